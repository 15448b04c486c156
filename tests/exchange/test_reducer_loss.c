/* Where the oracle of test_exchange_stress.c cannot foresee a step, nothing may get lost all the same: what the owners receive and what
 * stays in residuals adds up, exactly, when the sketch is overloaded. Where an index is lossy by design it says so. */
#include "../bits.h"
#include "../lengths.h"
#include "../repeats.h"
#include "paper.h"
#include "ranks.h"

enum { MAX_STEPS = 3 };

typedef struct trial {
    tagc_reducer_options options;
    tagc_paper_options paper;
    int n_steps;
    float *gradients; /* (steps, W, n) */
    float *outputs;   /* (steps, n): shards in rank order */
    float *residuals; /* (steps, W, n) */
    tagc_reducer_stats stats[MAX_STEPS][MAX_RANKS];
} trial;

static void run_trial(rank_run *run) {
    trial *t = run->shared;
    size_t n = (size_t)t->options.n_elems, shard = n / (size_t)run->world_size, W = (size_t)run->world_size;
    tagc_reducer *reducer;
    tagc_reducer_options options = t->options;
    tagc_paper_options paper = t->paper;
    attach_paper(&options, &paper);
    if (!CHECK(run, tagc_reducer_create(run->comm, &options, &reducer) == TAGC_OK)) return;
    for (size_t step = 0; step < (size_t)t->n_steps; step++) {
        tagc_reducer_stats *stats = &t->stats[step][run->rank];
        tagc_reducer_stats_init(stats);
        CHECK(run, run_reducer(reducer, t->gradients + (step * W + (size_t)run->rank) * n,
                               t->outputs + step * n + (size_t)run->rank * shard, stats) == TAGC_OK);
        residual_to(reducer, t->residuals + (step * W + (size_t)run->rank) * n);
    }
    tagc_reducer_destroy(reducer);
}

/* Multiples of 2^-10 small enough that every sum of them is exact in fp32. */
static float dyadic(uint64_t seed, int rank, size_t i) {
    double x = (double)random_gradient(seed, rank, i) * 4096 * 5;
    return (float)(rint(x * 1024) / 1024);
}

static trial make_trial(int world_size, size_t shard, uint64_t seed) {
    trial t = {.n_steps = MAX_STEPS};
    tagc_reducer_options_init(&t.options);
    tagc_paper_options_init(&t.paper);
    t.options.exchange = TAGC_EXCHANGE_PACKED;
    size_t W = (size_t)world_size, n = shard * W;
    t.options.n_elems = n;
    t.options.op = TAGC_OP_SUM;
    t.gradients = calloc(MAX_STEPS * W * n, sizeof(float));
    t.outputs = calloc(MAX_STEPS * n, sizeof(float));
    t.residuals = calloc(MAX_STEPS * W * n, sizeof(float));
    assert_true(t.gradients && t.outputs && t.residuals);
    for (size_t step = 0; step < MAX_STEPS; step++)
        for (size_t r = 0; r < W; r++)
            for (size_t i = 0; i < n; i++)
                t.gradients[(step * W + r) * n + i] = dyadic(seed * 10 + step, (int)r, i);
    return t;
}

static void destroy_trial(trial *t) {
    free(t->gradients);
    free(t->outputs);
    free(t->residuals);
}

static void assert_conserved(const trial *t, int world_size) {
    size_t W = (size_t)world_size, n = (size_t)t->options.n_elems;
    for (size_t step = 0; step < (size_t)t->n_steps; step++)
        for (size_t i = 0; i < n; i++) {
            double before = 0, after = (double)t->outputs[step * n + i];
            for (size_t r = 0; r < W; r++) {
                before += (double)t->gradients[(step * W + r) * n + i];
                if (step > 0) before += (double)t->residuals[((step - 1) * W + r) * n + i];
                after += (double)t->residuals[(step * W + r) * n + i];
            }
            if (before != after)
                fail_msg("step %zu, element %zu: %.17g came in, %.17g went out or stayed", step, i, before,
                         after);
        }
}

/* W = 8 at 10x and θ = 98.75 %: the union of eight supports is more than the cells can give back. */
TEST(test_overload) {
    size_t shard = 16384;
    for (int unpeeled = TAGC_UNPEELED_PACKED; unpeeled <= TAGC_UNPEELED_ESTIMATE; unpeeled++)
        for (int variant = 0; variant < 4; variant += REPEATS(1, 1, 3)) {
            trial t = make_trial(8, shard, 3);
            t.options.exchange = TAGC_EXCHANGE_SKETCH;
            t.paper.ratio = 10;
            t.paper.unpeeled = unpeeled;
            t.paper.cells = variant / 2 ? TAGC_CELLS_FIXED : TAGC_CELLS_FP32;
            t.paper.fill_union = variant % 2;
            for (size_t i = 0; i < MAX_STEPS * 8 * 8 * shard; i++) /* independent supports */
                t.gradients[i] = dyadic(mix(i), (int)(i / (8 * shard) % 8), i % (8 * shard));
            run_ranks(8, run_trial, &t);
            uint64_t n_unpeeled = 0;
            for (int r = 0; r < 8; r++) {
                n_unpeeled += t.stats[0][r].n_unpeeled;
                assert_true(t.stats[0][r].load > 0.85);
                int has_leg = t.stats[0][r].n_bytes_sent[TAGC_LEG_LEFTOVER] > 0;
                assert_int_equal(has_leg, unpeeled != TAGC_UNPEELED_ESTIMATE);
            }
            assert_true(n_unpeeled > 100);
            if (unpeeled != TAGC_UNPEELED_ESTIMATE) assert_conserved(&t, 8);
            destroy_trial(&t);
        }
}

static uint64_t sum_lost(const trial *t, int world_size) {
    uint64_t n_lost = 0;
    for (int r = 0; r < world_size; r++) n_lost += t->stats[0][r].n_lost;
    return n_lost;
}

/* The published 1-bit sum loses what two ranks both keep; a true OR does not. Packed gives such values back.
 */
TEST(test_lossy_index) {
    for (int exchange = TAGC_EXCHANGE_SKETCH; exchange <= TAGC_EXCHANGE_PACKED; exchange++)
        for (int index = TAGC_INDEX_OR; index <= TAGC_INDEX_SUM1; index++) {
            trial t = make_trial(2, 20000, 4);
            t.options.exchange = exchange;
            t.paper.index = index;
            run_ranks(2, run_trial, &t);
            uint64_t n_lost = sum_lost(&t, 2);
            if (index == TAGC_INDEX_SUM1)
                assert_true(n_lost > 50 && n_lost < 1000); /* of the 1000 that two ranks keep */
            else
                assert_int_equal(n_lost, 0);
            if (index != TAGC_INDEX_SUM1 || exchange == TAGC_EXCHANGE_PACKED) assert_conserved(&t, 2);
            destroy_trial(&t);
        }
}
