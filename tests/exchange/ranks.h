/* Ranks as threads with a comm each. cmocka's assertions leave by longjmp and must stay in the main thread,
 * so a rank records its first failure, and run_ranks asserts that there is none. */
#ifndef TAGC_TESTS_EXCHANGE_RANKS_H
#define TAGC_TESTS_EXCHANGE_RANKS_H

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../residual.h"
#include "tagc/tagc.h"

#define MAX_RANKS 16

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
    tagc_comm *comm;
    void *shared; /* of all ranks */
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
    const tagc_comm_options *options = run->options ? run->options : named_ranks();
    tagc_status status = tagc_comm_create_local(run->group, run->rank, options, &run->comm);
    if (CHECK(run, status == TAGC_OK)) run->body(run);
    tagc_comm_destroy(run->comm);
    return NULL;
}

/* Runs body on world_size ranks; options: NULL: named_ranks(). runs (world_size) keeps what they recorded. */
static inline void run_ranks(int world_size, void (*body)(rank_run *run), void *shared,
                             const tagc_comm_options *options, rank_run *runs) {
    pthread_t threads[MAX_RANKS];
    tagc_local_group *group;
    assert_int_equal(tagc_local_group_create(world_size, &group), TAGC_OK);
    for (int r = 0; r < world_size; r++) {
        runs[r] = (rank_run){.rank = r,
                             .world_size = world_size,
                             .shared = shared,
                             .body = body,
                             .group = group,
                             .options = options};
        assert_int_equal(pthread_create(&threads[r], NULL, rank_main, &runs[r]), 0);
    }
    int n_failed = 0;
    for (int r = 0; r < world_size; r++) {
        pthread_join(threads[r], NULL);
        if (!runs[r].failure[0]) continue;
        print_error("rank %d of %d: %s\n", r, world_size, runs[r].failure);
        n_failed++;
    }
    tagc_local_group_destroy(group);
    assert_int_equal(n_failed, 0);
}

/* ---- random gradients ---- */

static inline uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Heavy-tailed, and about half alike between ranks, so that what they keep overlaps in part. */
static inline float random_gradient(uint64_t seed, int rank, uint64_t i) {
    double common = (double)(mix(seed * 7919 + i) >> 11) / 9007199254740992.0 - 0.5;
    double own =
        (double)(mix((seed * 64 + (uint64_t)rank + 1) * 1000003 + i) >> 11) / 9007199254740992.0 - 0.5;
    double x = common + own;
    return (float)(x * x * x * 1e-2);
}

#endif
