/* What one rank cannot begin fails on all ranks, with its status, before anybody waits for it; residuals stay, and the next exchange is
 * right. */
#include "../bits.h"
#include "../lengths.h"
#include "paper.h"
#include "ranks.h"

#include <math.h>
#include <sys/resource.h>

enum { SHARD = 512, MOST = SHARD * 4, TIMEOUT_S = 300, N_FAILURES = 6 };

static const tagc_comm_options *patient(void) {
    static tagc_comm_options options;
    static int32_t names[4] = {10, 11, 12, 13};
    tagc_comm_options_init(&options);
    options.timeout_s = TIMEOUT_S;
    options.names = names;
    return &options;
}

static void expect(rank_run *run, tagc_status found, tagc_status status, const char *own) {
    char other[64];
    snprintf(other, sizeof other, "rank 11 failed in this ");
    int is_said = strstr(tagc_last_error(), run->rank == 1 ? own : other) != NULL;
    if (found != status || !is_said)
        snprintf(run->failure, sizeof run->failure, "%s, not %s: %.300s", tagc_status_name(found),
                 tagc_status_name(status), tagc_last_error());
}

/* ---- reducers ---- */

typedef struct reducing {
    tagc_reducer_options options;
    tagc_paper_options paper;
    const char *name;
} reducing;

static void refuse_step(rank_run *run, tagc_reducer *reducer, int failure, float *gradient, float *output) {
    tagc_status status, expected = failure < 4    ? TAGC_ERR_ARGUMENT
                                   : failure == 4 ? TAGC_ERR_MEMORY
                                                  : TAGC_ERR_DEVICE;
    tagc_reducer_stats not_initialised = {0};
    static const char *const texts[N_FAILURES] = {"gradient is NULL",         "output is NULL",
                                                  "output overlaps gradient", "stats",
                                                  "no memory for it",         "no reason given"};
    if (run->rank != 1)
        status = run_reducer(reducer, gradient, output, NULL);
    else if (failure == 0)
        status = begin_reducer(reducer, NULL, output);
    else if (failure == 1)
        status = begin_reducer(reducer, gradient, NULL);
    else if (failure == 2)
        status = begin_reducer(reducer, gradient, gradient - 1);
    else if (failure == 3)
        status = run_reducer(reducer, gradient, output, &not_initialised);
    else
        status = tagc_reducer_fail(reducer, expected, failure == 4 ? "no memory for it" : NULL);
    expect(run, status, expected, texts[failure]);
}

static void reduce_body(rank_run *run) {
    reducing *r = run->shared;
    tagc_reducer *reducer;
    size_t n = (size_t)r->options.n_elems;
    float *memory = calloc(n + 1, sizeof *memory), *gradient = memory + 1,
          *output = calloc(n, sizeof *output), *before = calloc(n, sizeof *before),
          *after = calloc(n, sizeof *after);
    for (size_t i = 0; i < n; i++) gradient[i] = random_gradient(3, run->rank, i);
    double begin_s = tagc_time_s();
    if (!CHECK(run, tagc_reducer_create(run->comm, &r->options, &reducer) == TAGC_OK)) return;
    uint64_t n_residual = tagc_reducer_residual_elems(reducer);
    CHECK(run, run_reducer(reducer, gradient, output, NULL) == TAGC_OK);
    for (int failure = 0; failure < N_FAILURES && !run->failure[0]; failure++) {
        if (failure == 2 && r->options.exchange == TAGC_EXCHANGE_DIRECT)
            continue; /* its sums may lie there */
        if (n_residual) CHECK(run, tagc_reducer_get_residual(reducer, before, n_residual) == TAGC_OK);
        refuse_step(run, reducer, failure, gradient, output);
        if (n_residual) CHECK(run, tagc_reducer_get_residual(reducer, after, n_residual) == TAGC_OK);
        CHECK(run, memcmp(before, after, n_residual * sizeof *before) == 0);
        CHECK(run, run_reducer(reducer, gradient, output, NULL) == TAGC_OK);
        if (n_residual) continue;
        size_t first = r->options.output == TAGC_OUTPUT_UNIT ? 0 : (size_t)run->rank * SHARD;
        for (size_t i = 0; i < SHARD; i++) { /* nothing is left out, so that sums are whole */
            double sum = 0;
            for (int q = 0; q < run->world_size; q++) sum += (double)random_gradient(3, q, first + i);
            CHECK(run, fabs(sum / run->world_size - (double)output[i]) < 1e-6 + 1e-2 * fabs(sum));
        }
    }
    CHECK(run, tagc_reducer_fail(reducer, TAGC_OK, "") == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_fail(NULL, TAGC_ERR_MEMORY, "") == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_time_s() - begin_s < TIMEOUT_S / 10.0);
    tagc_reducer_destroy(reducer);
    free(memory);
    free(output);
    free(before);
    free(after);
}

TEST(test_reducers) {
    static const struct {
        const char *name;
        int exchange, output, format;
        double sparsity;
    } cases[] = {{"whole to all", TAGC_EXCHANGE_DIRECT, TAGC_OUTPUT_UNIT, TAGC_FORMAT_BF16, 0},
                 {"direct", TAGC_EXCHANGE_DIRECT, TAGC_OUTPUT_SHARD, TAGC_FORMAT_INT4, 0.9},
                 {"direct, whole", TAGC_EXCHANGE_DIRECT, TAGC_OUTPUT_SHARD, TAGC_FORMAT_FP32, 0},
                 {"direct to all", TAGC_EXCHANGE_DIRECT, TAGC_OUTPUT_UNIT, TAGC_FORMAT_INT8, 0.5},
                 {"packed", TAGC_EXCHANGE_PACKED, TAGC_OUTPUT_SHARD, TAGC_FORMAT_FP32, 0.9},
                 {"sketch", TAGC_EXCHANGE_SKETCH, TAGC_OUTPUT_UNIT, TAGC_FORMAT_FP32, 0.9}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        reducing r = {.name = cases[i].name};
        tagc_reducer_options_init(&r.options);
        tagc_paper_options_init(&r.paper);
        r.options.n_elems = MOST;
        r.options.exchange = cases[i].exchange;
        r.options.output = cases[i].output;
        r.options.format = cases[i].format;
        r.options.sparsity = cases[i].sparsity;
        attach_paper(&r.options, &r.paper);
        print_message("%s\n", r.name);
        run_ranks_with(4, reduce_body, &r, patient(), NULL);
    }
}

/* ---- without memory for its own gradient ---- */

/* This process may allocate so much more; 0: any amount. */
static void allow_more(rlim_t n_bytes) {
    struct rlimit limit;
    unsigned long n_kb = 0;
    char line[128];
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file) && sscanf(line, "VmData: %lu kB", &n_kb) != 1) {
    }
    if (file) fclose(file);
    getrlimit(RLIMIT_DATA, &limit);
    limit.rlim_cur = n_bytes ? (rlim_t)n_kb * 1024 + n_bytes : limit.rlim_max;
    setrlimit(RLIMIT_DATA, &limit);
}

enum { N_LARGE = 16 << 20 }; /* 64 MB, of which a rank gets 16 MB */

static void refuse_without_memory(rank_run *run) {
    const float *zeros = run->shared;
    tagc_reducer_options options;
    tagc_reducer *reducer;
    size_t n_output = N_LARGE / 4;
    float *output = malloc(n_output * sizeof *output);
    void *too_much = NULL;
    tagc_reducer_options_init(&options);
    options.n_elems = N_LARGE;
    options.sparsity = 0;
    options.format = TAGC_FORMAT_FP32;
    if (!CHECK(run, tagc_reducer_create(run->comm, &options, &reducer) == TAGC_OK)) return;
    if (run->rank == 1) {
        allow_more(24 << 20);
        CHECK(run, (too_much = malloc((size_t)N_LARGE * sizeof *zeros)) == NULL);
        expect(run, tagc_reducer_fail(reducer, TAGC_ERR_MEMORY, "no memory for it"), TAGC_ERR_MEMORY,
               "no memory for it");
        allow_more(0);
    } else {
        expect(run, run_reducer(reducer, zeros, output, NULL), TAGC_ERR_MEMORY, "");
    }
    CHECK(run, run_reducer(reducer, zeros, output, NULL) == TAGC_OK);
    tagc_reducer_destroy(reducer);
    free(output);
    free(too_much);
}

TEST(test_without_memory) {
#if !defined(__linux__) || defined(TAGC_SANITIZED)
    skip(); /* of a sanitizer's allocator, or where no limit says what was written */
#endif
    void *zeros = calloc(N_LARGE, sizeof(float));
    run_ranks_with(4, refuse_without_memory, zeros, patient(), NULL);
    free(zeros);
}

/* ---- gatherers ---- */

static void refuse_gather(rank_run *run, tagc_gatherer *gatherer, int failure, const float *shard,
                          void *full) {
    tagc_status expected = failure < 3 ? TAGC_ERR_ARGUMENT : TAGC_ERR_MEMORY, status;
    static const char *const texts[] = {"shard is NULL", "full is NULL", "", "no memory for it"};
    if (run->rank == 1 && failure == 3)
        status = tagc_gatherer_fail(gatherer, TAGC_ERR_MEMORY, "no memory for it");
    else
        status = begin_gatherer(gatherer, run->rank == 1 && failure == 0 ? NULL : shard,
                                run->rank == 1 && failure == 1 ? NULL : full);
    if (status == TAGC_OK) status = tagc_gatherer_end(gatherer);
    expect(run, status, expected, texts[failure]);
}

static float value_at(const tagc_gatherer_options *o, const void *full, size_t i) {
    if (o->full_format != TAGC_FORMAT_BF16) return ((const float *)full)[i];
    return bf16_wide(((const uint16_t *)full)[i]);
}

static void gather_body(rank_run *run) {
    const tagc_gatherer_options *o = run->shared;
    tagc_gatherer *gatherer;
    float *shard = calloc(SHARD, sizeof *shard);
    void *full = calloc(MOST, sizeof(float));
    double begin_s = tagc_time_s();
    if (!CHECK(run, tagc_gatherer_create(run->comm, o, &gatherer) == TAGC_OK)) return;
    for (int turn = 0; turn < 8 && !run->failure[0]; turn++) {
        for (size_t i = 0; i < SHARD; i++)
            shard[i] = (float)(run->rank * 8 + turn) + 0.125f * (float)(i % 16);
        if (turn % 2 && turn != 5) refuse_gather(run, gatherer, turn / 2, shard, full);
        CHECK(run, begin_gatherer(gatherer, shard, full) == TAGC_OK);
        CHECK(run, tagc_gatherer_end(gatherer) == TAGC_OK);
        for (size_t i = 0; i < MOST; i++) {
            float is = (float)((int)(i / SHARD) * 8 + turn) + 0.125f * (float)(i % 16);
            CHECK(run, fabsf(value_at(o, full, i) - is) <= (o->format == TAGC_FORMAT_FP32 ? 0.0f : 0.6f));
        }
    }
    CHECK(run, tagc_gatherer_fail(gatherer, (tagc_status)99, "") == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_time_s() - begin_s < TIMEOUT_S / 10.0);
    tagc_gatherer_destroy(gatherer);
    free(shard);
    free(full);
}

TEST(test_gatherers) {
    static const struct {
        const char *name;
        int format, full_format, delta, lossless, rounding;
    } cases[] = {{"fp32", TAGC_FORMAT_FP32, TAGC_FORMAT_FP32, 0, 0, 0},
                 {"bf16", TAGC_FORMAT_BF16, TAGC_FORMAT_BF16, 0, 0, 0},
                 {"int8", TAGC_FORMAT_INT8, TAGC_FORMAT_FP32, 0, 0, 0},
                 {"int8 at random", TAGC_FORMAT_INT8, TAGC_FORMAT_FP32, 0, 0, TAGC_ROUNDING_STOCHASTIC},
                 {"lossless", TAGC_FORMAT_BF16, TAGC_FORMAT_BF16, 0, 1, 0},
                 {"delta4", TAGC_FORMAT_INT4, TAGC_FORMAT_BF16, 1, 0, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tagc_gatherer_options o;
        tagc_gatherer_options_init(&o);
        o.n_elems = MOST;
        o.format = cases[i].format;
        o.full_format = (uint64_t)cases[i].full_format;
        o.delta = cases[i].delta;
        o.lossless = (uint64_t)cases[i].lossless;
        o.rounding = (uint64_t)cases[i].rounding;
        print_message("%s\n", cases[i].name);
        run_ranks_with(4, gather_body, &o, patient(), NULL);
    }
}
