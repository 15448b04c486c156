/* A comm, what was made of it, and its group end in any order: what a reducer and a gatherer still do without their comm, and
 * that nothing of a transport is used any more. Sanitizers see the memory. */
#include "../lengths.h"
#include "../meeting.h"
#include "paper.h"
#include "ranks.h"
#include "whole.h"

#include <sys/wait.h>
#include <unistd.h>

enum { SHARD = 256 };

/* What is under way when the comm is destroyed, and whether it is ended before its reducer is destroyed. */
typedef enum ends_moment { AT_REST, UNDER_WAY, UNDER_WAY_NOT_ENDED, N_MOMENTS } ends_moment;

typedef struct ends_case {
    int exchange, delta;
    ends_moment moment;
} ends_case;

typedef struct arrays {
    float *gradient, *full; /* (W, SHARD) */
    float *output, *expected, *shard;
} arrays;

static void make_arrays(const rank_run *run, arrays *a) {
    size_t n = (size_t)run->world_size * SHARD;
    *a = (arrays){malloc(n * sizeof(float)), calloc(n, sizeof(float)), calloc(SHARD, sizeof(float)),
                  calloc(SHARD, sizeof(float)), calloc(SHARD, sizeof(float))};
    for (size_t i = 0; i < n; i++) a->gradient[i] = random_gradient(1, run->rank, i);
    for (size_t i = 0; i < SHARD; i++) a->shard[i] = random_gradient(2, run->rank, i);
}

static void free_arrays(arrays *a) {
    free(a->gradient);
    free(a->full);
    free(a->output);
    free(a->expected);
    free(a->shard);
}

/* ---- reducers ---- */

static void check_reducer_alone(rank_run *run, tagc_reducer *reducer, const arrays *a) {
    uint64_t n_bytes = tagc_reducer_state_bytes(reducer);
    int done;
    CHECK(run, begin_reducer(reducer, a->gradient, a->output) == TAGC_ERR_STATE);
    CHECK(run, strstr(tagc_last_error(), "begin after tagc_comm_destroy"));
    CHECK(run, run_reducer(reducer, a->gradient, a->output, NULL) == TAGC_ERR_STATE);
    CHECK(run, tagc_reducer_end(reducer, NULL) == TAGC_ERR_STATE); /* nothing has begun */
    CHECK(run, tagc_reducer_test(reducer, &done) == TAGC_ERR_STATE);
    if (!tagc_reducer_residual_elems(reducer)) return;
    uint64_t n;
    float *before = copy_of_residual(reducer, &n);
    char *saved = malloc(n_bytes);
    CHECK(run, tagc_reducer_state_save(reducer, saved, n_bytes) == TAGC_OK);
    CHECK(run, tagc_reducer_scale_residual(reducer, 0.5) == TAGC_OK);
    CHECK(run, tagc_reducer_state_load(reducer, saved, n_bytes) == TAGC_OK);
    float *after = copy_of_residual(reducer, NULL);
    CHECK(run, memcmp(before, after, n * sizeof *before) == 0);
    CHECK(run, tagc_reducer_set_sparsity(reducer, 0.5) == TAGC_OK);
    free(saved), free(before), free(after);
}

static void reducer_body(rank_run *run) {
    const ends_case *c = run->shared;
    tagc_reducer *reducer = NULL, *other = NULL;
    tagc_reducer_options options;
    arrays a;
    make_arrays(run, &a);
    tagc_reducer_options_init(&options);
    options.n_elems = (uint64_t)run->world_size * SHARD;
    set_exchange(&options, c->exchange);
    options.n_threads = 2;
    CHECK(run, tagc_reducer_create(run->comm, &options, &reducer) == TAGC_OK);
    CHECK(run, tagc_reducer_create(run->comm, &options, &other) == TAGC_OK); /* shares its spares */
    CHECK(run, run_reducer(other, a.gradient, a.expected, NULL) == TAGC_OK);
    if (c->moment != AT_REST) CHECK(run, begin_reducer(reducer, a.gradient, a.output) == TAGC_OK);
    tagc_comm_destroy(run->comm);
    run->comm = NULL;
    if (c->moment == UNDER_WAY) {
        CHECK(run, tagc_reducer_end(reducer, NULL) == TAGC_OK);
        CHECK(run, memcmp(a.output, a.expected, SHARD * sizeof(float)) == 0);
    }
    if (c->moment != UNDER_WAY_NOT_ENDED) check_reducer_alone(run, reducer, &a);
    tagc_reducer_destroy(reducer);
    check_reducer_alone(run, other, &a);
    tagc_reducer_destroy(other);
    free_arrays(&a);
}

TEST(test_reducers_after_their_comm) {
    static const int exchanges[] = {WHOLE, TAGC_EXCHANGE_DIRECT, TAGC_EXCHANGE_PACKED};
    for (size_t i = 0; i < sizeof exchanges / sizeof exchanges[0]; i++)
        for (ends_moment moment = AT_REST; moment < N_MOMENTS; moment++) {
            ends_case c = {.exchange = exchanges[i], .moment = moment};
            run_ranks(1, reducer_body, &c);
            run_ranks(3, reducer_body, &c);
        }
}

/* ---- gatherers ---- */

static void gatherer_body(rank_run *run) {
    const ends_case *c = run->shared;
    tagc_gatherer *gatherer = NULL;
    tagc_gatherer_options options;
    uint64_t n_gathers;
    arrays a;
    make_arrays(run, &a);
    tagc_gatherer_options_init(&options);
    options.n_elems = (uint64_t)run->world_size * SHARD;
    options.delta = c->delta;
    options.format = c->delta ? TAGC_FORMAT_INT4 : TAGC_FORMAT_FP32;
    options.n_threads = 2;
    CHECK(run, tagc_gatherer_create(run->comm, &options, &gatherer) == TAGC_OK);
    CHECK(run, begin_gatherer(gatherer, a.shard, a.full) == TAGC_OK);
    if (c->moment == AT_REST) CHECK(run, tagc_gatherer_end(gatherer) == TAGC_OK);
    tagc_comm_destroy(run->comm);
    run->comm = NULL;
    if (c->moment == UNDER_WAY) CHECK(run, tagc_gatherer_end(gatherer) == TAGC_OK);
    if (c->moment != UNDER_WAY_NOT_ENDED) {
        CHECK(run, begin_gatherer(gatherer, a.shard, a.full) == TAGC_ERR_STATE);
        CHECK(run, strstr(tagc_last_error(), "begin after tagc_comm_destroy"));
        CHECK(run, tagc_gatherer_replica(gatherer, &n_gathers) == (c->delta ? a.full : NULL));
        CHECK(run, n_gathers == (c->delta ? 1 : 0));
        if (!c->delta) CHECK(run, a.full[run->rank * SHARD + 7] == a.shard[7]);
    }
    tagc_gatherer_destroy(gatherer);
    free_arrays(&a);
}

TEST(test_gatherers_after_their_comm) {
    for (int delta = 0; delta < 2; delta++)
        for (ends_moment moment = AT_REST; moment < N_MOMENTS; moment++) {
            ends_case c = {.delta = delta, .moment = moment};
            run_ranks(1, gatherer_body, &c);
            run_ranks(3, gatherer_body, &c);
        }
}

/* ---- what transports use ---- */

/* The caller frees the context of its function between its comm and its reducer. */
static void seat_body(rank_run *run) {
    seat *own = malloc(sizeof *own);
    *own = (seat){run->shared, run->rank, 2};
    tagc_reducer *reducer = NULL;
    tagc_reducer_options options;
    arrays a;
    make_arrays(run, &a);
    tagc_reducer_options_init(&options);
    options.n_elems = 2 * SHARD;
    CHECK(run, tagc_comm_create_callback(&meeting_ops, own, run->rank, 2, NULL, &run->comm) == TAGC_OK);
    CHECK(run, tagc_reducer_create(run->comm, &options, &reducer) == TAGC_OK);
    CHECK(run, begin_reducer(reducer, a.gradient, a.output) == TAGC_OK);
    tagc_comm_destroy(run->comm);
    free(own);
    CHECK(run, tagc_reducer_end(reducer, NULL) == TAGC_OK);
    check_reducer_alone(run, reducer, &a);
    tagc_reducer_destroy(reducer);
    free_arrays(&a);
}

TEST(test_a_callback_is_not_called_again) {
    meeting all;
    pthread_barrier_init(&all.barrier, NULL, 2);
    run_threads(2, seat_body, &all);
    pthread_barrier_destroy(&all.barrier);
}

/* The group goes first, and its comms work on; the last of them takes the group with it. */
TEST(test_a_group_before_its_comms) {
    tagc_local_group *group;
    tagc_comm *comms[2];
    tagc_reducer *reducer;
    tagc_reducer_options options;
    float gradient[SHARD] = {1}, output[SHARD];
    assert_int_equal(tagc_local_group_create(2, &group), TAGC_OK);
    for (int r = 0; r < 2; r++) assert_int_equal(tagc_comm_create_local(group, r, NULL, &comms[r]), TAGC_OK);
    tagc_local_group_destroy(group);
    for (int r = 0; r < 2; r++) tagc_comm_destroy(comms[r]);

    comms[0] = comm_alone(NULL);
    tagc_reducer_options_init(&options);
    options.n_elems = SHARD;
    set_exchange(&options, WHOLE);
    assert_int_equal(tagc_reducer_create(comms[0], &options, &reducer), TAGC_OK);
    assert_int_equal(run_reducer(reducer, gradient, output, NULL), TAGC_OK);
    assert_true(output[0] == 1);
    tagc_comm_destroy(comms[0]);
    tagc_reducer_destroy(reducer);
}

/* Returns the line of the first wrong answer in a fork, or 0. */
static int wrong_in_fork(tagc_comm *comm, tagc_reducer *reducer, tagc_gatherer *gatherer) {
    tagc_reducer_options options;
    tagc_reducer *another;
    static float gradient[SHARD], output[SHARD];
    int done = 0;
#define TRY(call, expected)                                                                                  \
    if ((call) != (expected)) return __LINE__
    TRY(tagc_reducer_test(reducer, &done), TAGC_OK);
    TRY(done, 1);
    TRY(tagc_reducer_end(reducer, NULL), TAGC_ERR_STATE); /* its thread is in the parent */
    TRY(strstr(tagc_last_error(), "has no threads in a fork") != NULL, 1);
    TRY(run_reducer(reducer, gradient, output, NULL), TAGC_ERR_STATE);
    TRY(begin_gatherer(gatherer, output, gradient), TAGC_ERR_STATE);
    TRY(tagc_comm_barrier(comm), TAGC_ERR_STATE);
    tagc_reducer_options_init(&options);
    options.n_elems = SHARD;
    TRY(tagc_reducer_create(comm, &options, &another), TAGC_ERR_STATE);
#undef TRY
    tagc_comm_abort(comm, "no reason of the parent's");
    tagc_reducer_destroy(reducer);
    tagc_comm_destroy(comm);
    tagc_gatherer_destroy(gatherer);
    return 0;
}

/* What a process made is of no use in a fork, such as a data loader's worker, and does no harm there. The parent goes on. */
TEST(test_forks) {
    static float gradient[SHARD] = {1}, output[SHARD];
    tagc_comm *comm = comm_alone(NULL);
    tagc_reducer *reducer;
    tagc_gatherer *gatherer;
    tagc_reducer_options options;
    tagc_gatherer_options gathers;
    int status;
    tagc_reducer_options_init(&options);
    tagc_gatherer_options_init(&gathers);
    options.n_elems = gathers.n_elems = SHARD;
    set_exchange(&options, WHOLE);
    options.n_threads = 2; /* of its own, which a fork has not, either */
    assert_int_equal(tagc_reducer_create(comm, &options, &reducer), TAGC_OK);
    assert_int_equal(tagc_gatherer_create(comm, &gathers, &gatherer), TAGC_OK);
    assert_int_equal(begin_reducer(reducer, gradient, output), TAGC_OK);
    pid_t child = fork();
    if (child == 0) {
        alarm(60); /* instead of waiting for a thread that is not there */
        int line = wrong_in_fork(comm, reducer, gatherer);
        if (line) fprintf(stderr, "line %d in the fork: %s\n", line, tagc_last_error());
        _exit(line != 0);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(tagc_reducer_end(reducer, NULL), TAGC_OK);
    assert_true(output[0] == 1);
    tagc_gatherer_destroy(gatherer);
    tagc_reducer_destroy(reducer);
    tagc_comm_destroy(comm);
}
