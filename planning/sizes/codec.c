/* Two ranks exchange a few times; waiting for each other does not count. */
#include "sizes/codec.h"

#include "core/measure.h"
#include "core/memory.h"
#include "core/status.h"
#include "core/thread.h"
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

enum { N_ELEMS = 1 << 20, N_RUNS = 5, MOST_THREADS = 8 };

typedef struct side {
    tagc_local_group *group;
    int rank, format, n_threads;
    double sparsity, seconds[N_RUNS + 1]; /* of each step; the first has an empty residual */
    tagc_status status;
    char why[TAGC_ERROR_TEXT_BYTES]; /* the text of a failure belongs to its thread */
} side;

static tagc_status exchange(side *s, tagc_comm *comm, const float *gradient, float *output) {
    tagc_reducer_options options;
    tagc_reducer *reducer = NULL;
    tagc_reducer_options_init(&options);
    options.n_elems = N_ELEMS;
    options.exchange = TAGC_EXCHANGE_DIRECT;
    options.format = s->format;
    options.sparsity = s->sparsity;
    options.n_threads = s->n_threads;
    TAGC_TRY(tagc_reducer_create(comm, &options, &reducer));
    tagc_status status = TAGC_OK;
    for (int run = 0; status == TAGC_OK && run <= N_RUNS; run++) {
        tagc_reducer_stats stats;
        tagc_reducer_stats_init(&stats);
        status = tagc_reducer_run(reducer, gradient, N_ELEMS, output, N_ELEMS / 2, &stats);
        s->seconds[run] = 0;
        for (int phase = 0; phase < TAGC_N_PHASES; phase++)
            if (phase != TAGC_PHASE_WAIT) s->seconds[run] += stats.time_s[phase];
    }
    tagc_reducer_destroy(reducer);
    return status;
}

static tagc_status take_part(side *s) {
    tagc_comm *comm = NULL;
    void *gradient = NULL, *output = NULL;
    uint64_t seed = (uint64_t)s->rank + 1;
    tagc_status status = tagc_comm_create_local(s->group, s->rank, NULL, &comm);
    if (status == TAGC_OK) status = tagc_memory_create(N_ELEMS * sizeof(float), "a gradient", &gradient);
    if (status == TAGC_OK) status = tagc_memory_create(N_ELEMS / 2 * sizeof(float), "sums", &output);
    if (status == TAGC_OK) {
        tagc_fill_gradient(gradient, N_ELEMS, &seed);
        status = exchange(s, comm, gradient, output);
    }
    tagc_comm_destroy(comm);
    tagc_memory_destroy(gradient);
    tagc_memory_destroy(output);
    return status;
}

static void *run_side(void *arg) {
    side *s = arg;
    s->status = take_part(s);
    if (s->status != TAGC_OK) snprintf(s->why, sizeof s->why, "%s", tagc_last_error());
    return NULL;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int tagc_plan_threads(int n_cores, int n_ranks) {
    cpu_set_t own;
    if (n_cores == 0 && sched_getaffinity(0, sizeof own, &own) == 0) n_cores = CPU_COUNT(&own);
    int n = n_cores / n_ranks / 2;
    return n < 1 ? 1 : n > MOST_THREADS ? MOST_THREADS : n;
}

tagc_status tagc_plan_codec(int format, double sparsity, int n_threads, double *ns) {
    tagc_local_group *group = NULL;
    pthread_t thread;
    TAGC_TRY(tagc_local_group_create(2, &group));
    side sides[2] = {
        {.group = group, .format = format, .n_threads = n_threads, .sparsity = sparsity},
        {.group = group, .rank = 1, .format = format, .n_threads = n_threads, .sparsity = sparsity}};
    tagc_status status =
        tagc_thread_start(&thread, "a thread to measure the codec with", run_side, &sides[1]);
    if (status == TAGC_OK) {
        run_side(&sides[0]);
        pthread_join(thread, NULL);
    }
    tagc_local_group_destroy(group);
    TAGC_TRY(status);
    *ns = 0;
    for (int i = 0; i < 2; i++) {
        if (sides[i].status != TAGC_OK) return tagc_fail(sides[i].status, "%s", sides[i].why);
        qsort(sides[i].seconds + 1, N_RUNS, sizeof(double), by_size);
        double median = 1e9 * sides[i].seconds[1 + N_RUNS / 2] / N_ELEMS;
        if (median > *ns) *ns = median;
    }
    return TAGC_OK;
}
