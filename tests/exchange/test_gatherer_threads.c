/* Gathers on the comm's own thread: the same bits however many threads encode and decode, several gatherers and a reducer
 * at once, and a caller that is not held while the wire does nothing. */
#include "../delaying.h"
#include "../lengths.h"
#include "ranks.h"

#include <math.h>

enum {
    N_RANKS = 3,
    N_GATHERS = 4,
    SHARD = 3 * 16384 + 1001
}; /* whole pieces, and a block that is not whole */

static const struct {
    int format, delta, full_format, lossless;
} kinds[] = {{TAGC_FORMAT_FP32, 0, TAGC_FORMAT_FP32, 0}, {TAGC_FORMAT_BF16, 0, TAGC_FORMAT_FP32, 0},
             {TAGC_FORMAT_BF16, 0, TAGC_FORMAT_BF16, 1}, {TAGC_FORMAT_INT8, 0, TAGC_FORMAT_FP32, 0},
             {TAGC_FORMAT_INT8, 1, TAGC_FORMAT_BF16, 0}, {TAGC_FORMAT_INT4, 1, TAGC_FORMAT_BF16, 0},
             {TAGC_FORMAT_INT2, 1, TAGC_FORMAT_FP32, 0}};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

static float value_of(int step, int rank, size_t i) {
    float drift = random_gradient((uint64_t)step + 1, rank, i);
    return random_gradient(77, rank, i) * 100 + drift;
}

static tagc_gatherer *make(rank_run *run, int kind, int n_threads) {
    tagc_gatherer_options options;
    tagc_gatherer_options_init(&options);
    options.n_elems = (uint64_t)SHARD * (uint64_t)run->world_size;
    options.format = kinds[kind].format;
    options.delta = kinds[kind].delta;
    options.full_format = (uint64_t)kinds[kind].full_format;
    options.lossless = (uint64_t)kinds[kind].lossless;
    options.check_every = kinds[kind].delta ? 2 : 0;
    options.n_threads = (uint64_t)n_threads;
    tagc_gatherer *gatherer;
    CHECK(run, tagc_gatherer_create(run->comm, &options, &gatherer) == TAGC_OK);
    return gatherer;
}

/* All kinds at once, each with one thread and with one, two or four by rank, begun together. NaN in the last gather but
 * one. */
static void threads_body(rank_run *run) {
    size_t n = (size_t)SHARD * (size_t)run->world_size;
    float *own = calloc(SHARD, sizeof *own), *full[N_KINDS][2];
    tagc_gatherer *gatherers[N_KINDS][2];
    for (int k = 0; k < N_KINDS; k++)
        for (int i = 0; i < 2; i++) {
            full[k][i] = calloc(n, sizeof(float));
            gatherers[k][i] = make(run, k, i ? 1 << run->rank : 1);
            if (run->failure[0]) return;
        }
    for (int step = 0; step < N_GATHERS; step++) {
        for (size_t i = 0; i < SHARD; i++) own[i] = value_of(step, run->rank, i);
        if (step == N_GATHERS - 2 && run->rank == 1) own[SHARD - 1] = NAN;
        for (int k = 0; k < N_KINDS; k++)
            for (int i = 0; i < 2; i++)
                CHECK(run, begin_gatherer(gatherers[k][i], own, full[k][i]) == TAGC_OK);
        for (int k = N_KINDS - 1; k >= 0; k--)
            for (int i = 0; i < 2; i++) CHECK(run, tagc_gatherer_end(gatherers[k][i]) == TAGC_OK);
        for (int k = 0; k < N_KINDS; k++) CHECK(run, memcmp(full[k][0], full[k][1], n * sizeof(float)) == 0);
        for (size_t i = 0; i < n && step != N_GATHERS - 2; i++)
            CHECK(run, full[0][0][i] == value_of(step, (int)(i / SHARD), i % SHARD));
        CHECK(run, step != N_GATHERS - 2 || isnan(full[N_KINDS - 1][1][2 * SHARD - 1]));
    }
    for (int k = 0; k < N_KINDS; k++)
        for (int i = 0; i < 2; i++) {
            tagc_gatherer_destroy(gatherers[k][i]);
            free(full[k][i]);
        }
    free(own);
}

TEST(test_threads) {
    run_ranks(N_RANKS, threads_body, NULL);
}

/* Rank 0 among ranks that echo, over a network on which nothing arrives before three gathers, begun together, have all sent
 * what they send: one latency for all of them. Gathers that wait for each other would wait for ever. */
TEST(test_gathers_share_latency) {
    enum { N = 3 };
    delaying_network *network =
        delaying_create(&(delaying_options){.world_size = N_RANKS, .has_lanes = 1, .is_echo = 1});
    tagc_comm_options comm_options;
    tagc_comm_options_init(&comm_options);
    comm_options.timeout_s = 20;
    rank_run run = {.world_size = N_RANKS};
    assert_int_equal(delaying_comm(network, 0, &comm_options, &run.comm), TAGC_OK);
    float *own = calloc(SHARD, sizeof *own), *full[N];
    tagc_gatherer *gatherers[N];
    for (int i = 0; i < N; i++) {
        full[i] = calloc((size_t)SHARD * N_RANKS, sizeof(float));
        gatherers[i] = make(&run, 3 + i, 1);
    }
    pthread_mutex_lock(&network->lock);
    network->options.n_first = network->ranks[0].n_transfers + N + 1; /* rows in int8, and their words */
    pthread_mutex_unlock(&network->lock);
    for (int i = 0; i < N; i++) assert_int_equal(begin_gatherer(gatherers[i], own, full[i]), TAGC_OK);
    for (int i = 0; i < N; i++) assert_int_equal(tagc_gatherer_end(gatherers[i]), TAGC_OK);
    assert_int_equal(network->ranks[0].n_transfers, network->options.n_first); /* none held back */
    assert_string_equal(run.failure, "");
    for (int i = 0; i < N; i++) {
        tagc_gatherer_destroy(gatherers[i]);
        free(full[i]);
    }
    tagc_comm_destroy(run.comm);
    delaying_destroy(network);
    free(own);
}
