/* Ranks as threads for tests. cmocka's assertions leave by longjmp and so must stay in the main thread: a
 * rank records its first failure here, and the main thread asserts that there is none. */
#ifndef TAGC_TESTS_RANKS_H
#define TAGC_TESTS_RANKS_H

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "transport/comm.h"

typedef struct rank_run {
    int rank, world_size;
    void *shared; /* of all ranks */
    void (*body)(struct rank_run *run);
    char failure[256];
} rank_run;

static inline void rank_check(rank_run *run, int ok, const char *what, int line) {
    if (!ok && !run->failure[0])
        snprintf(run->failure, sizeof run->failure, "line %d: %s (last error: %.120s)", line, what,
                 tagc_last_error());
}
#define CHECK(run, condition) rank_check(run, !!(condition), #condition, __LINE__)

static inline void *rank_main(void *arg) {
    rank_run *run = arg;
    run->body(run);
    return NULL;
}

static inline void run_ranks(int world_size, void (*body)(rank_run *run), void *shared) {
    pthread_t *threads = calloc((size_t)world_size, sizeof *threads);
    rank_run *runs = calloc((size_t)world_size, sizeof *runs);
    for (int r = 0; r < world_size; r++) {
        runs[r] = (rank_run){.rank = r, .world_size = world_size, .shared = shared, .body = body};
        assert_int_equal(pthread_create(&threads[r], NULL, rank_main, &runs[r]), 0);
    }
    int n_failed = 0;
    for (int r = 0; r < world_size; r++) {
        pthread_join(threads[r], NULL);
        if (!runs[r].failure[0]) continue;
        print_error("rank %d of %d: %s\n", r, world_size, runs[r].failure);
        n_failed++;
    }
    free(runs);
    free(threads);
    assert_int_equal(n_failed, 0);
}

#endif
