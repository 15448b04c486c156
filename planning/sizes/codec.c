/* Two ranks exchange a few times, or gather; waiting for each other does not count in an exchange. */
#include "sizes/codec.h"

#include "core/clock.h"
#include "core/measure.h"
#include "core/memory.h"
#include "core/status.h"
#include "core/thread.h"
#include "exchange/options.h"
#include "tagc/blocks.h"
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

enum { N_ELEMS = 1 << 20, N_RUNS = 5, MOST_THREADS = 8 };

typedef struct side {
    tagc_local_group *group;
    int rank, n_threads;
    int gather; /* tagc_gather_kind; -1: an exchange of gradients, with these: */
    int format;
    double sparsity;
    double seconds[N_RUNS + 1]; /* of each step; the first has an empty residual */
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

static tagc_status gather(side *s, tagc_comm *comm, float *shard, void *full) {
    tagc_gatherer_options options;
    tagc_gatherer *gatherer = NULL;
    int is_in_bf16 = s->gather != TAGC_GATHER_FP32 && s->gather != TAGC_GATHER_INT8;
    tagc_gatherer_options_init(&options);
    tagc_gatherer_options_choose(&options, s->gather);
    options.n_elems = N_ELEMS;
    options.n_threads = (uint64_t)s->n_threads;
    options.full_format = is_in_bf16 ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
    TAGC_TRY(tagc_gatherer_create(comm, &options, &gatherer));
    tagc_status status = TAGC_OK;
    for (int run = 0; status == TAGC_OK && run <= N_RUNS; run++) {
        double begin_s = tagc_clock_s();
        status = tagc_gatherer_begin(gatherer, shard, N_ELEMS / 2, full, N_ELEMS);
        if (status == TAGC_OK) status = tagc_gatherer_end(gatherer);
        s->seconds[run] = tagc_clock_s() - begin_s;
        for (size_t i = 0; i < N_ELEMS / 2; i++) shard[i] *= 1.001f; /* as a step of training would */
    }
    tagc_gatherer_destroy(gatherer);
    return status;
}

static tagc_status take_part(side *s) {
    tagc_comm *comm = NULL;
    void *gradient = NULL, *output = NULL;
    uint64_t seed = (uint64_t)s->rank + 1;
    tagc_status status = tagc_comm_create_local(s->group, s->rank, NULL, &comm);
    if (status == TAGC_OK) status = tagc_memory_create(N_ELEMS * sizeof(float), "a gradient", &gradient);
    if (status == TAGC_OK) status = tagc_memory_create(N_ELEMS * sizeof(float), "sums", &output);
    if (status == TAGC_OK) {
        tagc_fill_gradient(gradient, N_ELEMS, &seed);
        status = s->gather < 0 ? exchange(s, comm, gradient, output) : gather(s, comm, gradient, output);
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
    cpu_set_t cores;
    if (n_cores == 0 && sched_getaffinity(0, sizeof cores, &cores) == 0) n_cores = CPU_COUNT(&cores);
    int n = n_cores / n_ranks / 2;
    return n < 1 ? 1 : n > MOST_THREADS ? MOST_THREADS : n;
}

/* what: of both sides, but for group and rank. */
static tagc_status measure(const side *what, double *ns) {
    tagc_local_group *group = NULL;
    pthread_t thread;
    side sides[2] = {*what, *what};
    TAGC_TRY(tagc_local_group_create(2, &group));
    sides[0].group = sides[1].group = group;
    sides[1].rank = 1;
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

tagc_status tagc_plan_codec(int format, double sparsity, int n_threads, double *ns) {
    const side what = {.gather = -1, .format = format, .sparsity = sparsity, .n_threads = n_threads};
    return measure(&what, ns);
}

tagc_status tagc_plan_gather_codec(int gather, int n_threads, double *ns) {
    const side what = {.gather = gather, .n_threads = n_threads};
    if (gather < 0 || gather >= TAGC_N_GATHER_KINDS)
        return tagc_fail(TAGC_ERR_ARGUMENT, "gather is %d, allowed: 0 to %d", gather,
                         TAGC_N_GATHER_KINDS - 1);
    return measure(&what, ns);
}

tagc_status tagc_plan_blocks_codec(int format, double *ns) {
    tagc_blocks_options blocks;
    uint64_t n_bytes, seed = 1;
    double seconds[N_RUNS + 1];
    void *values = NULL, *message = NULL;
    tagc_blocks_options_init(&blocks);
    blocks.format = format;
    TAGC_TRY(tagc_blocks_bytes(&blocks, N_ELEMS, &n_bytes));
    tagc_status status = tagc_memory_create(N_ELEMS * sizeof(float), "values", &values);
    if (status == TAGC_OK) status = tagc_memory_create(n_bytes, "a message", &message);
    if (status == TAGC_OK) tagc_fill_gradient(values, N_ELEMS, &seed);
    for (int run = 0; status == TAGC_OK && run <= N_RUNS; run++) {
        double begin_s = tagc_clock_s();
        status = tagc_blocks_encode(&blocks, values, N_ELEMS, message, n_bytes);
        if (status == TAGC_OK) status = tagc_blocks_decode(&blocks, message, n_bytes, values, N_ELEMS);
        seconds[run] = tagc_clock_s() - begin_s;
    }
    tagc_memory_destroy(message);
    tagc_memory_destroy(values);
    TAGC_TRY(status);
    qsort(seconds + 1, N_RUNS, sizeof(double), by_size);
    *ns = 1e9 * seconds[1 + N_RUNS / 2] / N_ELEMS;
    return TAGC_OK;
}
