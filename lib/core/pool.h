/* A few threads that split one loop, so that the codec can use several cores.
 *
 * OpenMP is not used because the thread sanitizer does not understand its runtime, and it cannot give each rank a
 * team of its own if many ranks run in one process. */
#ifndef TAGC_CORE_POOL_H
#define TAGC_CORE_POOL_H

#include "tagc/tagc.h"

typedef struct tagc_pool tagc_pool;

/* Makes a pool of `n_threads` in [1, 256]. The caller of _run counts as one of them. */
tagc_status tagc_pool_create(int n_threads, tagc_pool **out);
void tagc_pool_destroy(tagc_pool *pool);        /* accepts NULL */
int tagc_pool_n_threads(const tagc_pool *pool); /* 1 for NULL */

/* Calls work(arg, i, n) for every i in [0, n) with n = tagc_pool_n_threads(pool), and returns when all calls have ended.
 * A NULL pool calls work(arg, 0, 1) in the caller. Only one caller at a time. */
void tagc_pool_run(tagc_pool *pool, void (*work)(void *arg, int index, int n_threads), void *arg);

#endif
