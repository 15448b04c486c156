/* Many steps under way at once, against the same steps one by one: when a step's first transfers start before the one
 * ahead of it has ended, nothing may come out different, on any transport, and nothing may be left waiting when a
 * rank gives up. */
#include "../lengths.h"
#include "../meeting.h"
#include "../repeats.h"
#include "ranks.h"
#include "whole.h"

#include <math.h>
#include <time.h>

enum { N_RANKS = 3, N_STEPS = REPEATS(3, 3, 2), N_UNITS = 14, CHUNK = 262144 };
/* A prime, so that no two chunks have the same gradients. */
enum { PERIOD = 65537 };

/* Unit 0 is longer than what a dense step has under way; 2 to 4, 9, 10 and the last two take turns with one spare;
 * 4 has a NaN in step 1. */
static const struct {
    int exchange, wire, all_reduce;
    uint64_t shard;
} plan[N_UNITS] = {
    {WHOLE, TAGC_FORMAT_FP32, 0, 4 * CHUNK + 5},       {WHOLE, TAGC_FORMAT_BF16, 0, 3000},
    {TAGC_EXCHANGE_PACKED, TAGC_FORMAT_FP32, 0, 2000}, {TAGC_EXCHANGE_SKETCH, TAGC_FORMAT_FP32, 0, 2000},
    {TAGC_EXCHANGE_PACKED, TAGC_FORMAT_FP32, 1, 2000}, {WHOLE, TAGC_FORMAT_FP32, 1, 777},
    {WHOLE, TAGC_FORMAT_BF16, 1, CHUNK + 1},           {WHOLE, TAGC_FORMAT_FP32, 0, 1},
    {TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_FP32, 1, 5000}, {TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_FP32, 0, 2000},
    {TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_FP32, 1, 2000}, {TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_FP32, 0, 1500},
    {TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_FP32, 0, 2000}, /* begins before the one ahead has ended */
    {TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_FP32, 0, 2000}, /* cannot: the spare is taken */
};

/* ---- the steps ---- */

typedef struct trial {
    int queued, blocking, gives_up;
    float *outputs[N_RANKS][N_STEPS][N_UNITS], *residuals[N_RANKS][N_UNITS], *gathered[N_RANKS];
    meeting meeting;
    pthread_barrier_t all_made; /* where a rank gives up */
} trial;

static int is_short; /* where a rank gives up: what is under way then needs no length */

static size_t shard_of(int u) {
    return is_short && plan[u].shard > CHUNK ? CHUNK / 8 : plan[u].shard;
}

static size_t n_elems(int u) {
    return shard_of(u) * N_RANKS;
}

static size_t n_outputs(int u) {
    return plan[u].all_reduce ? n_elems(u) : shard_of(u);
}

static size_t n_residuals(int u) {
    return plan[u].exchange == WHOLE ? 0 : n_elems(u);
}

static void fill_gradient(float *gradient, int rank, int step, int u) {
    for (size_t i = 0; i < n_elems(u) && i < PERIOD; i++)
        gradient[i] = random_gradient((uint64_t)(step * N_UNITS + u), rank, i);
    for (size_t i = PERIOD; i < n_elems(u); i += PERIOD)
        memcpy(gradient + i, gradient,
               (n_elems(u) - i < PERIOD ? n_elems(u) - i : PERIOD) * sizeof *gradient);
    if (u == 4 && step == 1 && rank == 1) gradient[n_elems(u) / 2] = NAN;
}

static void dawdle(uint64_t seed) {
    uint64_t draw = mix(seed) % 8;
    if (draw < 4) nanosleep(&(struct timespec){.tv_nsec = (long)draw * 300000}, NULL);
}

static void one_step(rank_run *run, tagc_reducer **reducers, tagc_gatherer *gatherer, float **gradients,
                     int step) {
    trial *t = run->shared;
    float *shard = t->gathered[run->rank] + (size_t)run->rank * plan[1].shard;
    for (uint64_t i = 0; i < plan[1].shard; i++) shard[i] = (float)(step + run->rank);
    for (int u = 0; u < N_UNITS; u++) fill_gradient(gradients[u], run->rank, step, u);
    for (int u = 0; u < N_UNITS; u++) {
        float *output = t->outputs[run->rank][step][u];
        if (t->queued) dawdle((uint64_t)((step * N_RANKS + run->rank) * N_UNITS + u));
        CHECK(run, begin_reducer(reducers[u], gradients[u], output) == TAGC_OK);
        if (u == 4) CHECK(run, begin_gatherer(gatherer, shard, t->gathered[run->rank]) == TAGC_OK);
        if (!t->queued) CHECK(run, tagc_reducer_end(reducers[u], NULL) == TAGC_OK);
        if (u == 4 && !t->queued) CHECK(run, tagc_gatherer_end(gatherer) == TAGC_OK);
    }
    if (t->queued) CHECK(run, tagc_gatherer_end(gatherer) == TAGC_OK);
    for (int i = 0; i < N_UNITS && t->queued; i++) {
        int u = (i * 3 + run->rank) % N_UNITS; /* in any order */
        CHECK(run, tagc_reducer_end(reducers[u], NULL) == TAGC_OK);
    }
    for (int r = 0; r < N_RANKS; r++)
        CHECK(run, t->gathered[run->rank][(size_t)r * plan[1].shard + 7] == (float)(step + r));
}

static int make(rank_run *run, tagc_reducer **reducers, tagc_gatherer **gatherer) {
    for (int u = 0; u < N_UNITS; u++) {
        tagc_reducer_options options;
        tagc_reducer_options_init(&options);
        options.format = plan[u].wire;
        options.output = plan[u].all_reduce;
        options.n_elems = n_elems(u);
        options.sparsity = 0.9;
        set_exchange(&options, plan[u].exchange);
        if (!CHECK(run, tagc_reducer_create(run->comm, &options, &reducers[u]) == TAGC_OK)) return 0;
    }
    tagc_gatherer_options options;
    tagc_gatherer_options_init(&options);
    options.n_elems = n_elems(1);
    return CHECK(run, tagc_gatherer_create(run->comm, &options, gatherer) == TAGC_OK);
}

/* Everything is under way when rank 1 gives up; what is never ended goes with its reducer. */
static void give_up(rank_run *run, tagc_reducer **reducers, float **gradients) {
    trial *t = run->shared;
    for (int u = 0; u < N_UNITS; u++) fill_gradient(gradients[u], run->rank, 0, u);
    for (int u = 0; u < N_UNITS; u++) {
        if (run->rank == 1 && u == t->gives_up) {
            dawdle((uint64_t)u);
            tagc_comm_abort(run->comm, "enough");
        }
        CHECK(run, begin_reducer(reducers[u], gradients[u], t->outputs[run->rank][0][u]) == TAGC_OK);
    }
    for (int u = N_UNITS - 1; u > 2; u--) {
        tagc_status status = tagc_reducer_end(reducers[u], NULL);
        CHECK(run, status == TAGC_ERR_TRANSPORT || (status == TAGC_OK && u < t->gives_up));
    }
    for (int u = 0; u < N_UNITS; u++) {
        tagc_reducer_destroy(reducers[u]);
        reducers[u] = NULL;
    }
}

static void body(rank_run *run) {
    trial *t = run->shared;
    tagc_reducer *reducers[N_UNITS] = {NULL};
    tagc_gatherer *gatherer = NULL;
    float *gradients[N_UNITS];
    for (int u = 0; u < N_UNITS; u++) gradients[u] = calloc(n_elems(u), sizeof *gradients[u]);
    int is_made = make(run, reducers, &gatherer);
    if (t->gives_up)
        pthread_barrier_wait(&t->all_made); /* else the others may be making theirs still, and fail there */
    if (is_made) {
        for (int step = 0; step < N_STEPS && !t->gives_up; step++)
            one_step(run, reducers, gatherer, gradients, step);
        for (int u = 0; u < N_UNITS && !t->gives_up; u++) {
            residual_to(reducers[u], t->residuals[run->rank][u]);
        }
        if (t->gives_up) give_up(run, reducers, gradients);
    }
    for (int u = 0; u < N_UNITS; u++) tagc_reducer_destroy(reducers[u]);
    for (int u = 0; u < N_UNITS; u++) free(gradients[u]);
    tagc_gatherer_destroy(gatherer);
}

static void *blocking_main(void *arg) {
    rank_run *run = arg;
    trial *t = run->shared;
    seat self = {&t->meeting, run->rank, N_RANKS};
    if (CHECK(run, tagc_comm_create_callback(&meeting_ops, &self, run->rank, N_RANKS, NULL, &run->comm) ==
                       TAGC_OK))
        body(run);
    tagc_comm_destroy(run->comm);
    return NULL;
}

static void run_blocking(trial *t, rank_run *runs) {
    pthread_t threads[N_RANKS];
    pthread_barrier_init(&t->meeting.barrier, NULL, N_RANKS);
    for (int r = 0; r < N_RANKS; r++) {
        runs[r] = (rank_run){.rank = r, .world_size = N_RANKS, .shared = t};
        assert_int_equal(pthread_create(&threads[r], NULL, blocking_main, &runs[r]), 0);
    }
    for (int r = 0; r < N_RANKS; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < N_RANKS; r++)
        if (runs[r].failure[0]) fail_msg("rank %d: %s", r, runs[r].failure);
    pthread_barrier_destroy(&t->meeting.barrier);
}

static void run_trial(trial *t) {
    rank_run runs[MAX_RANKS];
    for (int r = 0; r < N_RANKS; r++) {
        t->gathered[r] = calloc(n_elems(1), sizeof(float));
        for (int u = 0; u < N_UNITS; u++) {
            t->residuals[r][u] = calloc(n_residuals(u) + 1, sizeof(float));
            for (int step = 0; step < (t->gives_up ? 1 : N_STEPS); step++)
                t->outputs[r][step][u] = calloc(n_outputs(u), sizeof(float));
        }
    }
    if (t->blocking)
        run_blocking(t, runs);
    else
        run_ranks(N_RANKS, body, t, NULL, runs);
}

static void clear(trial *t) {
    for (int r = 0; r < N_RANKS; r++) {
        free(t->gathered[r]);
        for (int u = 0; u < N_UNITS; u++) {
            free(t->residuals[r][u]);
            for (int step = 0; step < N_STEPS; step++) free(t->outputs[r][step][u]);
        }
    }
}

static void same_as_one_by_one(void **state) {
    (void)state;
    trial alone = {0};
    run_trial(&alone);
    for (int blocking = 0; blocking < 2; blocking++) {
        trial t = {.queued = 1, .blocking = blocking};
        run_trial(&t);
        for (int r = 0; r < N_RANKS; r++)
            for (int u = 0; u < N_UNITS; u++) {
                assert_memory_equal(alone.residuals[r][u], t.residuals[r][u], n_residuals(u) * sizeof(float));
                for (int step = 0; step < N_STEPS; step++)
                    assert_memory_equal(alone.outputs[r][step][u], t.outputs[r][step][u],
                                        n_outputs(u) * sizeof(float));
            }
        clear(&t);
    }
    clear(&alone);
}

static void an_abort_ends_every_wait(void **state) {
    (void)state;
    is_short = 1;
    for (int u = 1; u < N_UNITS; u += REPEATS(1, 1, 6)) {
        trial t = {.gives_up = u};
        pthread_barrier_init(&t.all_made, NULL, N_RANKS);
        run_trial(&t);
        pthread_barrier_destroy(&t.all_made);
        clear(&t);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_as_one_by_one),
        cmocka_unit_test(an_abort_ends_every_wait),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
