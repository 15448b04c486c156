/* Gathers over MPI, several at once: deltas that follow their masters, the same bits on all ranks, compared by checksum. */
#include <stdio.h>

#include <stdlib.h>
#include <string.h>

#include "../lengths.h"
#include "../test.h"
#include "codec/delta.h"
#include "exchange/options.h"
#include "tagc/mpi.h"

enum { N_UNITS = 3, N_STEPS = 6 };

static const size_t shards[N_UNITS] = {300000, 17, 4096};
static tagc_comm *comm;
static int rank, world_size;

static float change_of(int step, int r, int unit, size_t i) {
    uint64_t x = (uint64_t)step * 1000003 + (uint64_t)r * 7919 + (uint64_t)unit * 104729 + i * 2654435761u;
    x = (x ^ x >> 15) * 0x94d049bb133111ebu;
    return (float)((double)(x >> 40) / 16777216.0 - 0.5) * (step ? 0.01f : 1.0f);
}

typedef struct unit {
    tagc_gatherer *gatherer;
    size_t shard, n;
    float *masters, *expected, *full; /* (W, shard) */
} unit;

static void open_unit(unit *u, int which, int wire) {
    tagc_gatherer_options options;
    tagc_gatherer_options_init(&options);
    *u = (unit){.shard = shards[which], .n = shards[which] * (size_t)world_size};
    options.n_elems = u->n;
    tagc_gatherer_options_choose(&options, wire);
    options.check_every = options.delta ? 2 : 0;
    assert_int_equal(tagc_gatherer_create(comm, &options, &u->gatherer), TAGC_OK);
    u->masters = calloc(u->n, sizeof(float));
    u->expected = calloc(u->n, sizeof(float));
    u->full = calloc(u->n, sizeof(float));
}

static void close_unit(unit *u) {
    tagc_gatherer_destroy(u->gatherer);
    free(u->masters);
    free(u->expected);
    free(u->full);
}

/* What each owner sends, made here from its master; the coder has tests of its own. */
static void follow(unit *u, int bits, int step) {
    uint8_t *body = malloc(tagc_delta_bytes(bits, u->shard));
    const size_t width = sizeof(float);
    for (size_t r = 0; r < (size_t)world_size; r++) {
        float *master = u->masters + r * u->shard, *row = u->expected + r * u->shard;
        tagc_delta_encode_part(bits, master, row, width, u->shard, 0, u->shard, body);
        if (step > 0) tagc_delta_apply_part(bits, body, row, width, u->shard, 0, u->shard);
        for (size_t i = 0; i < u->shard && step == 0; i++) {
            uint32_t as_bits;
            memcpy(&as_bits, &master[i], sizeof as_bits);
            as_bits = (as_bits + 0x7fffu + (as_bits >> 16 & 1)) & 0xffff0000u;
            memcpy(&row[i], &as_bits, sizeof as_bits);
        }
    }
    free(body);
}

static void gather_all(int wire, int bits) {
    unit units[N_UNITS];
    for (int w = 0; w < N_UNITS; w++) open_unit(&units[w], w, wire);
    for (int step = 0; step < N_STEPS; step++) {
        for (int w = 0; w < N_UNITS; w++) {
            unit *u = &units[w];
            for (size_t i = 0; i < u->n; i++)
                u->masters[i] += change_of(step, (int)(i / u->shard), w, i % u->shard);
            assert_int_equal(begin_gatherer(u->gatherer, u->masters + (size_t)rank * u->shard, u->full),
                             TAGC_OK);
        }
        for (int w = 0; w < N_UNITS; w++) {
            unit *u = &units[w];
            assert_int_equal(tagc_gatherer_end(u->gatherer), TAGC_OK);
            follow(u, bits, step);
            assert_memory_equal(u->full, u->expected, u->n * sizeof(float));
        }
    }
    for (int w = 0; w < N_UNITS; w++) close_unit(&units[w]);
}

TEST(test_deltas) {
    gather_all(TAGC_GATHER_DELTA8, 8);
    gather_all(TAGC_GATHER_DELTA4, 4);
    gather_all(TAGC_GATHER_DELTA2, 2);
}

int main(int argc, char **argv) {
    int level;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
    if (tagc_comm_create_mpi(MPI_COMM_WORLD, NULL, &comm) != TAGC_OK) {
        fprintf(stderr, "%s\n", tagc_last_error());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    rank = tagc_comm_rank(comm);
    world_size = tagc_comm_world_size(comm);
    if (rank != 0) cmocka_set_message_output(CM_OUTPUT_TAP);
    int n_failed = test_run(NULL, NULL);
    if (n_failed) MPI_Abort(MPI_COMM_WORLD, 1); /* the others may wait for this rank */
    tagc_comm_destroy(comm);
    MPI_Finalize();
    return 0;
}
