/* _test of reducers and gatherers: it never waits, says no while a peer has not begun, and yes once _end would not wait,
 * also where what was begun has failed. And statistics that were not initialised, which must not cost the step. */
#include "../lengths.h"
#include "core/clock.h"
#include "oracle.h"
#include "ranks.h"
#include "whole.h"

enum { SHARD = 512 };
static const double most_s = 60;    /* of a machine that is busy with other things */
static const double watch_s = 0.02; /* long enough for what can come to have come */

typedef struct trial {
    pthread_barrier_t barrier;
    int exchange;
} trial;

static float *filled(size_t n, int rank) {
    float *values = malloc(n * sizeof *values);
    for (size_t i = 0; i < n; i++) values[i] = random_gradient(3, rank, i);
    return values;
}

/* Polls until it is done. */
static int comes(tagc_status (*test)(void *, int *), void *object) {
    int done = 0;
    double start_s = tagc_clock_s();
    while (!done && tagc_clock_s() - start_s < most_s)
        if (test(object, &done) != TAGC_OK) return 0;
    return done;
}

static tagc_status test_reducer(void *reducer, int *done) {
    return tagc_reducer_test(reducer, done);
}

static tagc_status test_gatherer(void *gatherer, int *done) {
    return tagc_gatherer_test(gatherer, done);
}

/* All but the last rank have begun: no rank may be done, however long it looks. */
static int stays_away(tagc_status (*test)(void *, int *), void *object) {
    int done = 0;
    double start_s = tagc_clock_s();
    while (!done && tagc_clock_s() - start_s < watch_s)
        if (test(object, &done) != TAGC_OK) return 0;
    return !done;
}

/* ---- reducers ---- */

static void reducer_body(rank_run *run) {
    trial *t = run->shared;
    int done = 1, last = run->world_size - 1;
    size_t n = SHARD * (size_t)run->world_size;
    float *gradient = filled(n, run->rank), output[SHARD];
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    set_exchange(&options, t->exchange);
    options.n_elems = n;
    tagc_reducer *reducer;
    if (!CHECK(run, tagc_reducer_create(run->comm, &options, &reducer) == TAGC_OK)) return;
    CHECK(run, tagc_reducer_test(reducer, &done) == TAGC_ERR_STATE && done == 0);
    CHECK(run, tagc_reducer_test(reducer, NULL) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_test(NULL, &done) == TAGC_ERR_ARGUMENT);
    for (int step = 0; step < 3; step++) {
        if (run->rank < last) {
            CHECK(run, begin_reducer(reducer, gradient, output) == TAGC_OK);
            CHECK(run, stays_away(test_reducer, reducer));
        }
        pthread_barrier_wait(&t->barrier); /* until here no rank's step can have ended */
        if (run->rank == last) CHECK(run, begin_reducer(reducer, gradient, output) == TAGC_OK);
        CHECK(run, comes(test_reducer, reducer));
        CHECK(run, tagc_reducer_test(reducer, &done) == TAGC_OK && done); /* and stays so */
        CHECK(run, tagc_reducer_end(reducer, NULL) == TAGC_OK);
        CHECK(run, tagc_reducer_test(reducer, &done) == TAGC_ERR_STATE);
    }
    tagc_reducer_destroy(reducer);
    free(gradient);
}

TEST(reducers_are_polled) {
    for (int world_size = 2; world_size <= 4; world_size += 2)
        for (int exchange = WHOLE; exchange <= TAGC_EXCHANGE_DIRECT; exchange++) {
            trial t = {.exchange = exchange};
            pthread_barrier_init(&t.barrier, NULL, (unsigned)world_size);
            run_ranks(world_size, reducer_body, &t);
            pthread_barrier_destroy(&t.barrier);
        }
}

/* A peer gives up: the step has failed, so _end would not wait. */
static void failed_body(rank_run *run) {
    int done;
    size_t n = SHARD * (size_t)run->world_size;
    float *gradient = filled(n, run->rank), output[SHARD];
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.n_elems = n;
    tagc_reducer *reducer;
    if (!CHECK(run, tagc_reducer_create(run->comm, &options, &reducer) == TAGC_OK)) return;
    pthread_barrier_wait(&((trial *)run->shared)->barrier); /* all have theirs */
    if (run->rank == 0) {
        tagc_comm_abort(run->comm, "enough");
    } else {
        CHECK(run, begin_reducer(reducer, gradient, output) == TAGC_OK);
        CHECK(run, comes(test_reducer, reducer));
        CHECK(run, tagc_reducer_test(reducer, &done) == TAGC_OK && done);
        CHECK(run, tagc_reducer_end(reducer, NULL) == TAGC_ERR_TRANSPORT);
    }
    tagc_reducer_destroy(reducer);
    free(gradient);
}

TEST(failures_are_done) {
    trial t = {0};
    pthread_barrier_init(&t.barrier, NULL, 3);
    run_ranks(3, failed_body, &t);
    pthread_barrier_destroy(&t.barrier);
}

/* ---- gatherers ---- */

static void gatherer_body(rank_run *run) {
    trial *t = run->shared;
    int done = 1, last = run->world_size - 1;
    size_t n = SHARD * (size_t)run->world_size;
    float *shard = filled(SHARD, run->rank), *full = calloc(n, sizeof *full);
    tagc_gatherer_options options;
    tagc_gatherer_options_init(&options);
    options.n_elems = n;
    options.format = TAGC_FORMAT_INT8;
    tagc_gatherer *gatherer;
    if (!CHECK(run, tagc_gatherer_create(run->comm, &options, &gatherer) == TAGC_OK)) return;
    CHECK(run, tagc_gatherer_test(gatherer, &done) == TAGC_ERR_STATE && done == 0);
    CHECK(run, tagc_gatherer_test(gatherer, NULL) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_gatherer_test(NULL, &done) == TAGC_ERR_ARGUMENT);
    for (int step = 0; step < 3; step++) {
        if (run->rank < last) {
            CHECK(run, begin_gatherer(gatherer, shard, full) == TAGC_OK);
            CHECK(run, stays_away(test_gatherer, gatherer));
        }
        pthread_barrier_wait(&t->barrier);
        if (run->rank == last) CHECK(run, begin_gatherer(gatherer, shard, full) == TAGC_OK);
        CHECK(run, comes(test_gatherer, gatherer));
        CHECK(run, tagc_gatherer_end(gatherer) == TAGC_OK);
        CHECK(run, tagc_gatherer_test(gatherer, &done) == TAGC_ERR_STATE);
    }
    tagc_gatherer_destroy(gatherer);
    free(shard);
    free(full);
}

TEST(gatherers_are_polled) {
    for (int world_size = 2; world_size <= 3; world_size++) {
        trial t = {0};
        pthread_barrier_init(&t.barrier, NULL, (unsigned)world_size);
        run_ranks(world_size, gatherer_body, &t);
        pthread_barrier_destroy(&t.barrier);
    }
}

/* ---- statistics ---- */

/* One rank's statistics were not initialised: it gets an error at once and ends the step again. The other ranks do not
 * notice. */
static void stats_body(rank_run *run) {
    size_t n = SHARD * (size_t)run->world_size;
    float *gradient = filled(n, run->rank), output[SHARD], again[SHARD];
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.n_elems = n;
    tagc_reducer *reducer, *plain;
    if (!CHECK(run, tagc_reducer_create(run->comm, &options, &reducer) == TAGC_OK)) return;
    if (!CHECK(run, tagc_reducer_create(run->comm, &options, &plain) == TAGC_OK)) return;
    for (int step = 0; step < 3; step++) {
        tagc_reducer_stats stats = {0};
        CHECK(run, begin_reducer(reducer, gradient, output) == TAGC_OK);
        if (run->rank == 1) {
            stats.struct_bytes = (size_t[]){0, 100, 1u << 20}[step];
            CHECK(run, tagc_reducer_end(reducer, &stats) == TAGC_ERR_ARGUMENT);
            CHECK(run, strstr(tagc_last_error(), "struct_bytes of tagc_reducer_stats is"));
            CHECK(run, begin_reducer(reducer, gradient, output) == TAGC_ERR_STATE); /* still under way */
        }
        tagc_reducer_stats_init(&stats);
        CHECK(run, tagc_reducer_end(reducer, &stats) == TAGC_OK);
        CHECK(run, stats.n_sent > 0 && stats.struct_bytes == sizeof stats);
        CHECK(run, run_reducer(plain, gradient, again, NULL) == TAGC_OK);
        CHECK(run, memcmp(output, again, sizeof output) == 0);
        float *residual = copy_of_residual(reducer, NULL), *other = copy_of_residual(plain, NULL);
        CHECK(run, memcmp(residual, other, n * sizeof *gradient) == 0);
        free(residual), free(other);
    }
    if (run->rank == 1) { /* _run refuses before it begins: no other rank has to follow */
        tagc_reducer_stats stats = {0};
        CHECK(run, run_reducer(reducer, gradient, output, &stats) == TAGC_ERR_ARGUMENT);
        CHECK(run, tagc_reducer_end(reducer, NULL) == TAGC_ERR_STATE);
    }
    tagc_reducer_destroy(reducer);
    tagc_reducer_destroy(plain);
    free(gradient);
}

TEST(stats_are_checked_first) {
    run_ranks(3, stats_body, NULL);
}
