/* The pool sleeps between loops. Ranks in one process share the cores, and a spinning pool would take them from
 * the rank that has work. */
#include "core/pool.h"
#include "core/thread.h"

#include <stdio.h>
#include <stdlib.h>

#define MAX_THREADS 256

typedef struct worker {
    tagc_pool *pool;
    int index;
    pthread_t thread;
} worker;

struct tagc_pool {
    int n_threads;
    int n_started; /* workers whose thread exists */
    pthread_mutex_t mutex;
    pthread_cond_t started, ended;
    unsigned long round; /* grows by one per loop */
    int n_running;       /* workers still in the present loop */
    int stop;
    void (*work)(void *arg, int index, int n_threads);
    void *arg;
    worker workers[]; /* (n_threads - 1) of index 1, 2, ...; the caller is 0 */
};

static void *worker_main(void *arg) {
    worker *self = arg;
    tagc_pool *pool = self->pool;
    unsigned long round = 0;
    pthread_mutex_lock(&pool->mutex);
    for (;;) {
        while (pool->round == round && !pool->stop) pthread_cond_wait(&pool->started, &pool->mutex);
        if (pool->stop) break;
        round = pool->round;
        pthread_mutex_unlock(&pool->mutex);
        pool->work(pool->arg, self->index, pool->n_threads);
        pthread_mutex_lock(&pool->mutex);
        if (--pool->n_running == 0) pthread_cond_signal(&pool->ended);
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

tagc_status tagc_pool_create(int n_threads, tagc_pool **out) {
    *out = NULL;
    if (n_threads < 1 || n_threads > MAX_THREADS)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_threads is %d, allowed are 1 to %d", n_threads, MAX_THREADS);
    size_t n_workers = (size_t)n_threads - 1;
    tagc_pool *pool = calloc(1, sizeof *pool + n_workers * sizeof pool->workers[0]);
    if (!pool) return tagc_fail(TAGC_ERR_MEMORY, "no memory for a pool of %d threads", n_threads);
    pool->n_threads = n_threads;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->started, NULL);
    pthread_cond_init(&pool->ended, NULL);
    for (int i = 0; i < n_threads - 1; i++) {
        worker *w = &pool->workers[i];
        w->pool = pool;
        w->index = i + 1;
        char what[64];
        snprintf(what, sizeof what, "thread %d of n_threads %d", i + 1, n_threads);
        tagc_status status = tagc_thread_start(&w->thread, what, worker_main, w);
        if (status != TAGC_OK) {
            tagc_pool_destroy(pool);
            return status;
        }
        pool->n_started++;
    }
    *out = pool;
    return TAGC_OK;
}

void tagc_pool_destroy(tagc_pool *pool) {
    if (!pool) return;
    pthread_mutex_lock(&pool->mutex);
    pool->stop = 1;
    pthread_cond_broadcast(&pool->started);
    pthread_mutex_unlock(&pool->mutex);
    for (int i = 0; i < pool->n_started; i++) pthread_join(pool->workers[i].thread, NULL);
    pthread_cond_destroy(&pool->ended);
    pthread_cond_destroy(&pool->started);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

int tagc_pool_n_threads(const tagc_pool *pool) {
    return pool ? pool->n_threads : 1;
}

void tagc_pool_run(tagc_pool *pool, void (*work)(void *arg, int index, int n_threads), void *arg) {
    if (!pool || pool->n_threads == 1) {
        work(arg, 0, 1);
        return;
    }
    pthread_mutex_lock(&pool->mutex);
    pool->work = work;
    pool->arg = arg;
    pool->n_running = pool->n_threads - 1;
    pool->round++;
    pthread_cond_broadcast(&pool->started);
    pthread_mutex_unlock(&pool->mutex);
    work(arg, 0, pool->n_threads);
    pthread_mutex_lock(&pool->mutex);
    while (pool->n_running) pthread_cond_wait(&pool->ended, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
}
