/* The lengths of a caller's arrays. A wrong one is refused, with what it must be. A unit of any size arrives, and nothing that lies before
 * or behind its arrays is read or written. */
#include "../repeats.h"
#include "exchange/exchange.h"
#include "ranks.h"
#include "whole.h"

#include <math.h>

/* ---- wrong lengths ---- */

#define REFUSES(run, call, words)                                                                            \
    do {                                                                                                     \
        CHECK(run, (call) == TAGC_ERR_ARGUMENT);                                                             \
        CHECK(run, strstr(tagc_last_error(), words));                                                        \
    } while (0)

static void refuse_body(rank_run *run) {
    static const char *const outputs[] = {"8, must be 16: this rank's shard of 64 values",
                                          "8, must be 64: the whole unit of 64 values"};
    static const uint64_t n_outputs[] = {16, 64};
    float gradient[64], output[64];
    for (int i = 0; i < 64; i++) gradient[i] = (float)i;
    for (int kind = 0; kind < 2; kind++) {
        tagc_reducer_options options;
        tagc_reducer *reducer;
        tagc_reducer_options_init(&options);
        options.n_elems = 64;
        options.output = kind;
        if (!CHECK(run, tagc_reducer_create(run->comm, &options, &reducer) == TAGC_OK)) return;
        uint64_t n = n_outputs[kind];
        REFUSES(run, tagc_reducer_begin(reducer, gradient, 63, output, n), "n_gradient is 63, must be 64");
        REFUSES(run, tagc_reducer_run(reducer, gradient, 65, output, n, NULL),
                "n_gradient is 65, must be 64");
        REFUSES(run, tagc_reducer_begin(reducer, gradient, 64, output, 8), outputs[kind]);
        REFUSES(run, tagc_reducer_begin(reducer, gradient, 64, output, n + 1), "n_output is ");
        CHECK(run, tagc_reducer_run(reducer, gradient, 64, output, n, NULL) == TAGC_OK); /* none had begun */
        tagc_reducer_destroy(reducer);
    }
    for (int is_delta = 0; is_delta < 2; is_delta++) {
        tagc_gatherer_options options;
        tagc_gatherer *gatherer;
        tagc_gatherer_options_init(&options);
        options.n_elems = 64;
        options.delta = is_delta;
        options.format = is_delta ? TAGC_FORMAT_INT8 : TAGC_FORMAT_FP32;
        if (!CHECK(run, tagc_gatherer_create(run->comm, &options, &gatherer) == TAGC_OK)) return;
        REFUSES(run, tagc_gatherer_begin(gatherer, gradient, 15, output, 64), "n_shard is 15, must be 16");
        REFUSES(run, tagc_gatherer_begin(gatherer, gradient, 16, output, 60), "n_full is 60, must be 64");
        if (is_delta)
            REFUSES(run, tagc_gatherer_set_replica(gatherer, output, 65, 1), "n_full is 65, must be 64");
        CHECK(run, tagc_gatherer_begin(gatherer, gradient, 16, output, 64) == TAGC_OK);
        CHECK(run, tagc_gatherer_end(gatherer) == TAGC_OK);
        tagc_gatherer_destroy(gatherer);
    }
}

TEST(test_refused) {
    run_ranks(4, refuse_body, NULL);
}

/* ---- units of any size, between values of others ---- */

enum { GUARD = 80, N_STEPS = 6, MOST = 1100 };

typedef struct trial {
    uint64_t n;
    int exchange, output, is_exact, in_place;
} trial;

static float value_at(const trial *t, int rank, int step, uint64_t i) {
    uint64_t x = (i + 1) * 2654435761u + (uint64_t)(rank * 7 + step * 31) * 40503u;
    return t->is_exact ? (float)(int)(x >> 7 & 15) - 7 : (float)(int)(x >> 7 & 1023) / 512 - 1;
}

/* What is around an array would show in every sum, and in whether it is finite. */
static float *between_others(uint64_t n, float **memory) {
    *memory = malloc((size_t)(n + 2 * GUARD) * sizeof(float));
    for (uint64_t i = 0; i < n + 2 * GUARD; i++) (*memory)[i] = i % 2 ? NAN : 1e30f;
    return *memory + GUARD;
}

static int are_others_there(const float *memory, uint64_t n) {
    int n_there = 0;
    for (uint64_t i = 0; i < 2 * GUARD; i++) {
        uint64_t at = i < GUARD ? i : n + i;
        n_there += at % 2 ? isnan(memory[at]) : memory[at] == 1e30f;
    }
    return n_there == 2 * GUARD;
}

static void any_size_body(rank_run *run) {
    const trial *t = run->shared;
    uint64_t shard = (t->n + (uint64_t)run->world_size - 1) / (uint64_t)run->world_size;
    uint64_t first = t->output == TAGC_OUTPUT_SHARD ? (uint64_t)run->rank * shard : 0;
    uint64_t most = t->output == TAGC_OUTPUT_SHARD ? shard : t->n;
    uint64_t n_left = first < t->n ? t->n - first : 0, n_own = n_left < most ? n_left : most;
    float *memory, *memory_out, *gradient = between_others(t->n, &memory),
                                *output = between_others(n_own, &memory_out);
    static _Thread_local double wanted[MOST], got[MOST];
    memset(wanted, 0, sizeof wanted);
    memset(got, 0, sizeof got);
    if (t->in_place) output = gradient;
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.n_elems = t->n;
    options.output = t->output;
    options.op = TAGC_OP_SUM;
    options.sparsity = t->is_exact ? 0 : 0.5;
    options.residual = TAGC_FORMAT_FP32; /* others round */
    if (t->is_exact || t->exchange != TAGC_EXCHANGE_DIRECT) options.format = TAGC_FORMAT_FP32;
    set_exchange(&options, t->exchange);
    tagc_reducer *reducer;
    tagc_status status = tagc_reducer_create(run->comm, &options, &reducer);
    if (status == TAGC_ERR_UNSUPPORTED && !tagc_exchange_of(t->exchange)) return; /* built without it */
    if (!CHECK(run, status == TAGC_OK)) return;
    for (int step = 0; step < N_STEPS; step++) {
        for (uint64_t i = 0; i < t->n; i++) gradient[i] = value_at(t, run->rank, step, i);
        for (int r = 0; r < run->world_size; r++)
            for (uint64_t i = 0; i < n_own; i++) wanted[i] += (double)value_at(t, r, step, first + i);
        tagc_reducer_stats stats;
        tagc_reducer_stats_init(&stats);
        status = tagc_reducer_run(reducer, gradient, t->n, n_own ? output : NULL, n_own, &stats);
        CHECK(run, status == TAGC_OK && !stats.nonfinite);
        for (uint64_t i = 0; i < n_own; i++) got[i] += (double)output[i];
        CHECK(run, are_others_there(memory, t->n) && are_others_there(memory_out, n_own));
        if (!t->is_exact) continue;
        for (uint64_t i = 0; i < n_own; i++) CHECK(run, got[i] == wanted[i]);
    }
    /* What has not arrived waits on some rank, and nowhere else. */
    uint64_t n_residual = tagc_reducer_residual_elems(reducer), n_rows = shard * (uint64_t)run->world_size;
    if (n_residual > 0) {
        CHECK(run, n_residual == n_rows);
        float *own = calloc(n_rows, sizeof *own), *all = calloc(n_rows * MAX_RANKS, sizeof *all);
        CHECK(run, tagc_reducer_get_residual(reducer, own, n_rows) == TAGC_OK);
        CHECK(run, tagc_comm_all_gather(run->comm, own, n_rows * sizeof *own, all,
                                        (size_t)run->world_size * n_rows * sizeof *all) == TAGC_OK);
        for (uint64_t i = 0; i < n_own; i++) {
            for (int r = 0; r < run->world_size; r++) got[i] += (double)all[(uint64_t)r * n_rows + first + i];
            CHECK(run, fabs(got[i] - wanted[i]) < 1e-4);
        }
        free(own), free(all);
    }
    tagc_reducer_destroy(reducer);
    free(memory), free(memory_out);
}

TEST(test_any_size) {
    static const uint64_t sizes[] = {1, 2, 3, 17, 64, 257, 1001, 1024};
    static const int worlds[] = {1, 2, 3, 5, 8};
    int n_trials = 0;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
            for (int kind = 0; kind < 14; kind++) {
                if (n_trials++ % REPEATS(1, 3, 9))
                    continue; /* no factor of 8, 5 or 14: each option meets each */
                trial t = {.n = sizes[s], .is_exact = kind % 2 == 0};
                t.exchange = kind < 8    ? TAGC_EXCHANGE_DIRECT
                             : kind < 10 ? WHOLE
                             : kind < 12 ? TAGC_EXCHANGE_SKETCH
                                         : TAGC_EXCHANGE_PACKED;
                if (t.exchange == WHOLE) t.is_exact = 1;
                t.output = kind < 8 ? (kind / 2 + 1) % 2 : (int)(s + w + (size_t)kind) % 2;
                t.in_place = kind >= 6 && kind < 8 && t.output == TAGC_OUTPUT_UNIT && worlds[w] > 1;
                run_ranks(worlds[w], any_size_body, &t);
            }
}
