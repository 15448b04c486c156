/* Ranks as threads. cmocka's assertions leave by longjmp and must stay in the main thread, so a rank records its first failure, and the
 * main thread asserts that there is none. */
#ifndef TAGC_TESTS_RANKS_H
#define TAGC_TESTS_RANKS_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tagc/tagc.h"
#include "test.h"

/* As where the comm has some ranks of a job: rank r is called 10 + r. What a message calls by its number in the comm is found so. */
static inline const tagc_comm_options *named_ranks(void) {
    static _Thread_local int32_t names[2048];
    static _Thread_local tagc_comm_options options;
    tagc_comm_options_init(&options);
    for (int r = 0; r < 2048; r++) names[r] = 10 + r;
    options.names = names;
    return &options;
}

typedef struct rank_run {
    int rank, world_size;
    tagc_comm *comm; /* in run_threads the body's own, or NULL */
    void *shared;    /* of all ranks */
    void (*body)(struct rank_run *run);
    tagc_local_group *group;
    const tagc_comm_options *options;
    tagc_status status; /* for bodies that expect a failure */
    char text[512];
    char failure[512];
} rank_run;

static inline int rank_check(rank_run *run, int ok, const char *what, int line) {
    if (!ok && !run->failure[0])
        snprintf(run->failure, sizeof run->failure, "line %d: %s (last error: %.200s)", line, what,
                 tagc_last_error());
    return ok;
}
#define CHECK(run, condition) rank_check(run, !!(condition), #condition, __LINE__)

/* Keeps a status with its text for the main thread. */
static inline tagc_status keep_status(rank_run *run, tagc_status status) {
    run->status = status;
    snprintf(run->text, sizeof run->text, "%s", status == TAGC_OK ? "" : tagc_last_error());
    return status;
}

static inline void *rank_main(void *arg) {
    rank_run *run = arg;
    tagc_status status = TAGC_OK;
    if (run->group) {
        const tagc_comm_options *options = run->options ? run->options : named_ranks();
        status = tagc_comm_create_local(run->group, run->rank, options, &run->comm);
    }
    if (CHECK(run, status == TAGC_OK)) run->body(run);
    if (run->group) tagc_comm_destroy(run->comm);
    return NULL;
}

static inline void run_all(int world_size, void (*body)(rank_run *run), void *shared, tagc_local_group *group,
                           const tagc_comm_options *options, rank_run *kept) {
    size_t n_ranks = (unsigned)world_size;
    pthread_t *threads = calloc(n_ranks, sizeof *threads);
    rank_run *runs = calloc(n_ranks, sizeof *runs);
    int n_failed = 0;
    for (int r = 0; r < world_size; r++) {
        runs[r] = (rank_run){.rank = r,
                             .world_size = world_size,
                             .shared = shared,
                             .body = body,
                             .group = group,
                             .options = options};
        assert_int_equal(pthread_create(&threads[r], NULL, rank_main, &runs[r]), 0);
    }
    for (int r = 0; r < world_size; r++) {
        pthread_join(threads[r], NULL);
        if (runs[r].failure[0]) print_error("rank %d of %d: %s\n", r, world_size, runs[r].failure);
        n_failed += runs[r].failure[0] != 0;
    }
    if (kept) memcpy(kept, runs, n_ranks * sizeof *runs);
    free(runs);
    free(threads);
    tagc_local_group_destroy(group);
    assert_int_equal(n_failed, 0);
}

/* Without comms. */
static inline void run_threads(int world_size, void (*body)(rank_run *run), void *shared) {
    run_all(world_size, body, shared, NULL, NULL, NULL);
}

/* With a comm each, of a local group. options: NULL: named_ranks(). runs (world_size): what they recorded; NULL: nobody asks. */
static inline void run_ranks_with(int world_size, void (*body)(rank_run *run), void *shared,
                                  const tagc_comm_options *options, rank_run *runs) {
    tagc_local_group *group;
    assert_int_equal(tagc_local_group_create(world_size, &group), TAGC_OK);
    run_all(world_size, body, shared, group, options, runs);
}

static inline void run_ranks(int world_size, void (*body)(rank_run *run), void *shared) {
    run_ranks_with(world_size, body, shared, NULL, NULL);
}

/* Of one rank; options may be NULL. */
static inline tagc_comm *comm_alone(const tagc_comm_options *options) {
    tagc_local_group *group;
    tagc_comm *comm;
    assert_int_equal(tagc_local_group_create(1, &group), TAGC_OK);
    assert_int_equal(tagc_comm_create_local(group, 0, options, &comm), TAGC_OK);
    tagc_local_group_destroy(group); /* the comm works on */
    return comm;
}

#endif
