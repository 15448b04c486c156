/* A few threads that split one loop: the codec's way to use more than one core.
 *
 * OpenMP would do, but its runtime hides from the thread sanitizer and cannot be given one team per rank when
 * many ranks live in one process. */
#ifndef TAGC_CORE_POOL_H
#define TAGC_CORE_POOL_H

#include "tagc/tagc.h"

typedef struct tagc_pool tagc_pool;

/* Makes a pool of `n_threads` in [1, 256]; the caller of _run counts as one of them. */
tagc_status tagc_pool_create(int n_threads, tagc_pool **out);
void tagc_pool_destroy(tagc_pool *pool);        /* accepts NULL */
int tagc_pool_n_threads(const tagc_pool *pool); /* 1 for NULL */

/* Calls work(arg, i, n) for every i in [0, n) with n = tagc_pool_n_threads(pool), and returns when all have ended.
 * A NULL pool runs work(arg, 0, 1) in the caller. One caller at a time. */
void tagc_pool_run(tagc_pool *pool, void (*work)(void *arg, int index, int n_threads), void *arg);

#endif
