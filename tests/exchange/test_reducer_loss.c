/* Nothing may get lost: what the owners receive and what stays in residuals adds up, exactly, also when the
 * sketch is overloaded. Where an index is lossy by design it says so, and a step with NaN or Inf changes
 * nothing. */
#include "../lengths.h"
#include "../repeats.h"
#include "oracle.h"
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

/* NaN or Inf on one rank, for one owner: everybody sees it, residuals stay byte for byte, the next step is as
 * if it had not been. */
TEST(test_nonfinite) {
    static const float poisons[] = {NAN, INFINITY, -INFINITY};
    for (int variant = 0; variant < 18; variant++) {
        int exchange = 1 + variant / 2 % 2, world_size = 2 + variant / 4;
        trial t = make_trial(world_size, 1000, 5);
        t.options.exchange = exchange;
        t.paper.fill_union = variant % 3 == 0;
        size_t n = (size_t)t.options.n_elems, W = (size_t)world_size;
        t.gradients[(1 * W + (size_t)(variant % world_size)) * n + (size_t)variant * 55] =
            poisons[variant % 3];
        run_ranks(world_size, run_trial, &t);
        for (int r = 0; r < world_size; r++) {
            assert_int_equal(t.stats[0][r].nonfinite, 0);
            assert_int_equal(t.stats[1][r].nonfinite, 1);
            assert_int_equal(t.stats[2][r].nonfinite, 0);
            const float *before = t.residuals + (size_t)r * n, *after = before + W * n;
            assert_memory_equal(before, after, n * sizeof(float));
        }
        for (size_t i = 0; i < n; i++) {
            assert_true(isnan(t.outputs[n + i]));
            assert_true(isfinite(t.outputs[2 * n + i]));
        }
        memcpy(t.gradients + W * n, t.gradients + 2 * W * n, W * n * sizeof(float));
        float *third = malloc(n * sizeof(float)); /* to compare with a run without the bad step */
        memcpy(third, t.outputs + 2 * n, n * sizeof(float));
        t.n_steps = 2;
        run_ranks(world_size, run_trial, &t);
        assert_memory_equal(third, t.outputs + n, n * sizeof(float));
        free(third);
        destroy_trial(&t);
    }
}

/* Finite values whose sums in a cell are not: as bad as NaN, but no rank's gradient is at fault. */
TEST(test_overflow) {
    for (int variant = 0; variant < 6; variant++) {
        int world_size = 1 + variant % 3;
        trial t = make_trial(world_size, 1000, 11);
        t.options.exchange = TAGC_EXCHANGE_SKETCH;
        t.options.sparsity = 0.9;
        if (variant >= 3) t.paper.ratio = 20; /* leftovers on top of it */
        size_t n = (size_t)t.options.n_elems, W = (size_t)world_size;
        for (size_t i = 0; i < n; i++) t.gradients[W * n + i] = 3e38f; /* rank 0 in the second step */
        run_ranks(world_size, run_trial, &t);
        for (size_t r = 0; r < W; r++) {
            for (int step = 0; step < 3; step++) assert_int_equal(t.stats[step][r].nonfinite, step == 1);
            assert_memory_equal(t.residuals + r * n, t.residuals + (W + r) * n, n * sizeof(float));
        }
        for (size_t i = 0; i < n; i++) {
            assert_true(isnan(t.outputs[n + i]));
            assert_true(isfinite(t.outputs[2 * n + i]));
        }
        destroy_trial(&t);
    }
}

/* Nor is it anybody's fault where only the sums of what each rank sends are too large. */
TEST(test_overflow_of_sums) {
    for (int variant = 0; variant < 8; variant++) {
        int world_size = 2 + variant % 2;
        trial t = make_trial(world_size, 1000, 11);
        t.options.exchange = variant & 2 ? TAGC_EXCHANGE_SKETCH : TAGC_EXCHANGE_PACKED;
        t.paper.cells = TAGC_CELLS_FIXED;
        t.options.op = variant & 4 ? TAGC_OP_AVG : TAGC_OP_SUM;
        t.options.sparsity = 0.9;
        size_t n = (size_t)t.options.n_elems, W = (size_t)world_size;
        for (size_t r = 0; r < 2; r++) t.gradients[(W + r) * n + 7] = 3e38f; /* second step, shard 0 */
        run_ranks(world_size, run_trial, &t);
        for (size_t r = 0; r < W; r++) {
            for (int step = 0; step < 3; step++) assert_int_equal(t.stats[step][r].nonfinite, step == 1);
            assert_memory_equal(t.residuals + r * n, t.residuals + (W + r) * n, n * sizeof(float));
        }
        for (size_t i = 0; i < n; i++) assert_true(isnan(t.outputs[n + i]));
        destroy_trial(&t);
    }
}
