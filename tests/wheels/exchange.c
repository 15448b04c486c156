/* What scripts/wheels.sh runs with the libtagc.so of a wheel, at every level of the processor: two ranks, threads of this process
 * that are connected by TCP, exchange gradients and gather parameters, and all that must be so of the results is looked at. Prints a checksum of them, which is the
 * same for all levels, processors and C libraries. The oracle is what was put in: results and residuals add up to it. */
#include <tagc/native.h>
#include <tagc/tagc.h>
#include <tagc/transport.h>

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WORLD = 2, N = 1 << 18, SHARD = N / WORLD, N_STEPS = 4 };

typedef struct rank_state {
    tagc_native *native;
    const unsigned char *addresses;     /* of all ranks */
    int rank, exchange, format, stored; /* stored: how the residual is */
    double sparsity;
    float *gradient, *summed, *applied; /* (N): now; over steps; of the result, this rank's shard only */
    float *residual, *full;             /* (N) */
    uint64_t n_sent;
} rank_state;

static void must(tagc_status status, const char *what) {
    if (status == TAGC_OK) return;
    fprintf(stderr, "%s: %s: %s\n", what, tagc_status_name(status), tagc_last_error());
    exit(1);
}

static void *array(size_t n) {
    float *made = calloc(n, sizeof *made);
    if (!made) exit(1);
    return made;
}

/* Whole multiples of 2^-12 below 1, so that sums are exact in any order. */
static float draw(uint64_t *state) {
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    int64_t value = (int64_t)(*state >> 40) % 4096;
    return (float)(value * value * value / (4096 * 4096) * ((*state >> 33 & 1) ? 1 : -1)) / 4096.0f;
}

static void *run(void *argument) {
    rank_state *me = argument;
    tagc_comm *comm;
    static const unsigned char keys[2 * WORLD * TAGC_NATIVE_KEY_BYTES];
    must(tagc_native_connect(me->native, me->addresses, keys, 60), "connection");
    must(tagc_comm_create_native(me->native, NULL, &comm), "comm");
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.n_elems = N;
    options.exchange = me->exchange;
    options.format = me->format;
    options.residual = me->stored;
    options.sparsity = me->sparsity;
    options.op = TAGC_OP_SUM;
    tagc_reducer *reducer;
    must(tagc_reducer_create(comm, &options, &reducer), "reducer");
    float *shard = array(SHARD);
    uint64_t seed = 17 + (uint64_t)me->rank;
    for (int step = 0; step < N_STEPS; step++) {
        for (size_t i = 0; i < N; i++) me->summed[i] += me->gradient[i] = draw(&seed);
        tagc_reducer_stats stats;
        tagc_reducer_stats_init(&stats);
        must(tagc_reducer_begin(reducer, me->gradient, N, shard, SHARD), "begin");
        must(tagc_reducer_end(reducer, &stats), "end");
        me->n_sent += stats.n_sent;
        for (size_t i = 0; i < SHARD; i++) me->applied[(size_t)me->rank * SHARD + i] += shard[i];
    }
    if (tagc_reducer_residual_elems(reducer) == N)
        must(tagc_reducer_get_residual(reducer, me->residual, N), "residual");
    tagc_reducer_destroy(reducer);

    tagc_gatherer_options gather;
    tagc_gatherer_options_init(&gather);
    gather.n_elems = N;
    gather.format = TAGC_FORMAT_INT4;
    gather.delta = 1;
    tagc_gatherer *gatherer;
    must(tagc_gatherer_create(comm, &gather, &gatherer), "gatherer");
    for (int step = 0; step < N_STEPS; step++) {
        for (size_t i = 0; i < SHARD; i++) shard[i] += 0.001f * me->applied[(size_t)me->rank * SHARD + i];
        must(tagc_gatherer_begin(gatherer, shard, SHARD, me->full, N), "gather begin");
        must(tagc_gatherer_end(gatherer), "gather end");
    }
    tagc_gatherer_destroy(gatherer);
    tagc_comm_destroy(comm);
    free(shard);
    return NULL;
}

static uint64_t checksum(uint64_t so_far, const float *values) {
    for (size_t i = 0; i < N; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        so_far = (so_far ^ bits) * UINT64_C(1099511628211);
    }
    return so_far;
}

/* stored: TAGC_FORMAT_FP32 loses nothing, integers of 8 bits a step of their block. */
static uint64_t check(int exchange, int format, int stored, double sparsity, const char *name) {
    double most = stored == TAGC_FORMAT_FP32 ? 1e-5 : 0.05;
    rank_state ranks[WORLD];
    pthread_t threads[WORLD];
    tagc_native *natives[WORLD];
    unsigned char addresses[WORLD * TAGC_NATIVE_ADDRESS_BYTES];
    tagc_native_options options;
    tagc_native_options_init(&options);
    options.local = "127.0.0.1";
    for (int r = 0; r < WORLD; r++) {
        must(tagc_native_open(&options, r, WORLD, &natives[r]), "port");
        must(tagc_native_address(natives[r], addresses + r * TAGC_NATIVE_ADDRESS_BYTES), "address");
    }
    for (int r = 0; r < WORLD; r++) {
        ranks[r] = (rank_state){.native = natives[r],
                                .addresses = addresses,
                                .rank = r,
                                .exchange = exchange,
                                .format = format,
                                .stored = stored,
                                .sparsity = sparsity,
                                .gradient = array(N),
                                .summed = array(N),
                                .applied = array(N),
                                .residual = array(N),
                                .full = array(N)};
        if (pthread_create(&threads[r], NULL, run, &ranks[r])) exit(1);
    }
    uint64_t sum = UINT64_C(14695981039346656037);
    for (int r = 0; r < WORLD; r++) pthread_join(threads[r], NULL);
    double worst = 0, norm = 0;
    for (size_t i = 0; i < N; i++) {
        double put = 0, found = 0;
        for (int r = 0; r < WORLD; r++) {
            put += ranks[r].summed[i];
            found += (double)ranks[r].applied[i] + ranks[r].residual[i];
        }
        worst = fmax(worst, fabs(put - found));
        norm = fmax(norm, fabs(put));
    }
    double share = (double)ranks[0].n_sent / ((double)N * N_STEPS);
    int is_kept = sparsity > 0 ? share > 0 && share <= 1 - sparsity + 1e-9 : share == 1;
    if (worst > most * norm || !is_kept || memcmp(ranks[0].full, ranks[1].full, N * sizeof(float)) != 0) {
        fprintf(stderr, "%s: off by %g of %g, kept %g at sparsity %g\n", name, worst, norm, share, sparsity);
        exit(1);
    }
    for (int r = 0; r < WORLD; r++) {
        sum = checksum(checksum(checksum(sum, ranks[r].applied), ranks[r].residual), ranks[r].full);
        free(ranks[r].gradient), free(ranks[r].summed), free(ranks[r].applied), free(ranks[r].residual),
            free(ranks[r].full);
    }
    return sum;
}

int main(int argc, char **argv) {
    if (argc != 2 || strcmp(tagc_version(), argv[1]) != 0) {
        fprintf(stderr, "libtagc says that it is %s\n", tagc_version());
        return 1;
    }
    uint64_t sum = check(TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_INT2, TAGC_FORMAT_FP32, 0.95, "direct, 2 bits");
    sum ^= check(TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_INT4, TAGC_FORMAT_FP32, 0, "direct, every value in 4 bits")
           << 1;
    sum ^= check(TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_BF16, TAGC_FORMAT_FP32, 0.9, "direct, bf16") << 2;
    sum ^= check(TAGC_EXCHANGE_PACKED, TAGC_FORMAT_FP32, TAGC_FORMAT_FP32, 0.9875, "packed") << 3;
    sum ^= check(TAGC_EXCHANGE_SKETCH, TAGC_FORMAT_FP32, TAGC_FORMAT_FP32, 0.9875, "sketch") << 4;
    sum ^= check(TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_INT2, TAGC_FORMAT_INT8, 0.95, "direct, residual in 8 bits")
           << 5;
    printf("%016llx\n", (unsigned long long)sum);
    return 0;
}
