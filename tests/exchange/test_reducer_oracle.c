/* Every exchange against the brute-force step: same output, same residual, same bits, over steps that carry
 * it on. */
#include "../lengths.h"
#include "../repeats.h"
#include "exchange/direct/direct.h"
#include "oracle.h"
#include "paper.h"
#include "ranks.h"
#include "whole.h"

enum { N_STEPS = 3 };

typedef struct experiment {
    tagc_reducer_options options;
    tagc_paper_options paper;
    uint64_t seed;
    int has_residual; /* of whole values: one that another format has left, of zeros */
    int is_mixed;     /* rank 0 brings a runner, as one with its arrays on a device does */
    float *gradients; /* (steps, W, n) */
    float *outputs;   /* (steps, W, n or shard) */
    float *residuals; /* (steps, W, n) */
    tagc_reducer_stats stats[N_STEPS][MAX_RANKS];
} experiment;

static size_t output_elems(const experiment *x, int world_size) {
    return (size_t)x->options.n_elems / (x->options.output ? 1 : (size_t)world_size);
}

static void run_steps(rank_run *run) {
    experiment *x = run->shared;
    size_t n = (size_t)x->options.n_elems, n_out = output_elems(x, run->world_size);
    tagc_reducer *reducer;
    tagc_reducer_options options = x->options;
    tagc_paper_options paper = x->paper;
    attach_paper(&options, &paper);
    if (x->has_residual) options.format = TAGC_FORMAT_INT8;
    tagc_status status =
        x->is_mixed && run->rank == 0
            ? tagc_reducer_make(&tagc_host_arrays, &tagc_direct_on_host, run->comm, &options, &reducer)
            : tagc_reducer_create(run->comm, &options, &reducer);
    if (!CHECK(run, status == TAGC_OK)) return;
    if (x->has_residual) CHECK(run, tagc_reducer_change(reducer, &x->options) == TAGC_OK);
    for (size_t step = 0; step < N_STEPS; step++) {
        size_t row = step * (size_t)run->world_size + (size_t)run->rank;
        tagc_reducer_stats *stats = &x->stats[step][run->rank];
        tagc_reducer_stats_init(stats);
        CHECK(run, run_reducer(reducer, x->gradients + row * n, x->outputs + row * n_out, stats) == TAGC_OK);
        uint64_t n_residual = residual_to(reducer, x->residuals + row * n);
        int is_paper =
            x->options.exchange == TAGC_EXCHANGE_SKETCH || x->options.exchange == TAGC_EXCHANGE_PACKED;
        CHECK(run, n_residual == (is_paper || x->has_residual ? n : 0));
    }
    tagc_reducer_destroy(reducer);
}

static experiment make_experiment(int world_size, size_t shard, uint64_t seed) {
    experiment x = {.seed = seed};
    tagc_reducer_options_init(&x.options);
    tagc_paper_options_init(&x.paper);
    x.options.exchange = TAGC_EXCHANGE_PACKED;
    x.options.n_elems = shard * (size_t)world_size;
    x.options.sparsity = 0.95;
    x.paper.seed = seed;
    size_t n = (size_t)x.options.n_elems, W = (size_t)world_size;
    x.gradients = calloc(N_STEPS * W * n, sizeof(float));
    x.outputs = calloc(N_STEPS * W * n, sizeof(float));
    x.residuals = calloc(N_STEPS * W * n, sizeof(float));
    assert_true(x.gradients && x.outputs && x.residuals);
    for (size_t step = 0; step < N_STEPS; step++)
        for (size_t r = 0; r < W; r++)
            for (size_t i = 0; i < n; i++)
                x.gradients[(step * W + r) * n + i] =
                    i % 97 == 5 ? 0.0f : random_gradient(seed + step, (int)r, i);
    return x;
}

static void destroy_experiment(experiment *x) {
    free(x->gradients);
    free(x->outputs);
    free(x->residuals);
}

static void assert_same_bits(const float *a, const float *b, size_t n, const char *what, size_t step,
                             size_t rank) {
    for (size_t i = 0; i < n; i++) {
        if (bits_of(a[i]) == bits_of(b[i])) continue;
        fail_msg("%s of step %zu, rank %zu, element %zu: %.9g (%08x), expected %.9g (%08x)", what, step, rank,
                 i, (double)a[i], bits_of(a[i]), (double)b[i], bits_of(b[i]));
    }
}

/* tolerance 0: same bits. */
static void assert_as_oracle(experiment *x, int world_size, int fill, double tolerance) {
    size_t n = (size_t)x->options.n_elems, W = (size_t)world_size, shard = n / W,
           n_out = output_elems(x, world_size);
    float *residuals = malloc(W * n * sizeof(float)), *output = malloc(n * sizeof(float));
    int is_fixed = x->options.exchange == TAGC_EXCHANGE_SKETCH && x->paper.cells == TAGC_CELLS_FIXED &&
                   x->options.sparsity > 0;
    for (size_t i = 0; i < W * n; i++) residuals[i] = -0.0f;
    run_ranks(world_size, run_steps, x);
    for (size_t step = 0; step < N_STEPS; step++) {
        oracle_step(&x->options, world_size, fill, is_fixed, x->gradients + step * W * n, residuals, output);
        for (size_t r = 0; r < W; r++) {
            size_t row = step * W + r;
            const float *expected = x->options.output ? output : output + r * shard;
            float largest = 0;
            for (size_t i = 0; i < n_out; i++) largest = fmaxf(largest, fabsf(expected[i]));
            if (tolerance == 0) {
                assert_same_bits(x->outputs + row * n_out, expected, n_out, "output", step, r);
            } else {
                for (size_t i = 0; i < n_out; i++)
                    if (!(fabsf(x->outputs[row * n_out + i] - expected[i]) <= tolerance * largest))
                        fail_msg("output %zu is %g, expected %g", i, (double)x->outputs[row * n_out + i],
                                 (double)expected[i]);
            }
            assert_same_bits(x->residuals + row * n, residuals + r * n, n, "residual", step, r);
            assert_int_equal(x->stats[step][r].nonfinite, 0);
            assert_true(x->stats[step][r].n_unpeeled == 0 || x->paper.ratio > 0);
        }
    }
    free(residuals);
    free(output);
}

static const int world_sizes[] = {1, 2, 3, 8, 4, 5, 16};
enum { N_WORLDS = REPEATS(7, 4, 3) }; /* many threads take their time under sanitizers */

TEST(test_packed) {
    for (size_t w = 0; w < N_WORLDS; w++)
        for (int variant = 0; variant < 8; variant++) {
            int world_size = world_sizes[w];
            experiment x =
                make_experiment(world_size, (size_t[]){1000, 1024, 333, 64}[variant % 4], w * 8 + 1);
            x.paper.fill_union = variant % 2;
            x.options.output = variant / 2 % 2;
            x.options.op = variant / 4;
            if (variant == 6) x.options.sparsity = 0.5;
            if (world_size <= 15 && variant == 4) x.paper.index = TAGC_INDEX_SUM4;
            assert_as_oracle(&x, world_size, x.paper.fill_union, 0);
            destroy_experiment(&x);
        }
}

TEST(test_sketch_fixed) {
    for (size_t w = 0; w < N_WORLDS; w++)
        for (int variant = 0; variant < 8; variant++) {
            int world_size = world_sizes[w];
            experiment x =
                make_experiment(world_size, (size_t[]){2000, 1024, 333, 64}[variant % 4], w * 8 + 2);
            x.options.exchange = TAGC_EXCHANGE_SKETCH;
            x.paper.cells = TAGC_CELLS_FIXED;
            x.paper.fill_union = variant % 2;
            x.options.output = variant / 2 % 2;
            x.options.op = variant / 4;
            if (variant == 5) x.paper.ratio = 20; /* hopelessly overloaded: leftovers travel plainly */
            if (world_size <= 15 && variant == 4) x.paper.index = TAGC_INDEX_SUM4;
            assert_as_oracle(&x, world_size, x.paper.fill_union, 0);
            destroy_experiment(&x);
        }
}

TEST(test_sketch_fp32) {
    for (size_t w = 0; w < N_WORLDS; w++)
        for (int variant = 0; variant < 4; variant++) {
            experiment x = make_experiment(world_sizes[w], 3000, w * 8 + 3);
            x.options.exchange = TAGC_EXCHANGE_SKETCH;
            x.paper.fill_union = variant % 2;
            x.options.output = variant / 2;
            if (variant == 3) x.paper.ratio = 20;
            assert_as_oracle(&x, world_sizes[w], x.paper.fill_union, 1e-5);
            destroy_experiment(&x);
        }
}

/* Whole values take a path of their own, unless there is a residual, or a rank that cannot. Both give the same bits, also of shards of
 * several chunks, the last one short. */
TEST(test_two_paths) {
    for (int world_size = 1; world_size <= 8; world_size++)
        for (int variant = 0; variant < 8; variant++) {
            experiment x[3];
            for (int i = 0; i < 3; i++) {
                x[i] = make_experiment(world_size, world_size == 2 ? 262144 * 2 + 777 : 1999, 11);
                x[i].has_residual = i == 1;
                x[i].is_mixed = i == 2;
                x[i].options.format = variant & 1 ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
                set_exchange(&x[i].options, WHOLE);
                x[i].options.output = variant & 2 ? TAGC_OUTPUT_UNIT : TAGC_OUTPUT_SHARD;
                x[i].options.op = variant & 4 ? TAGC_OP_SUM : TAGC_OP_AVG;
                run_ranks(world_size, run_steps, &x[i]);
            }
            size_t n_steps =
                variant & 1 ? 1 : N_STEPS; /* what bf16 rounds off, the residual adds to the next */
            size_t n_bytes = n_steps * (size_t)world_size * output_elems(&x[0], world_size) * sizeof(float);
            for (int i = 1; i < 3; i++)
                if (memcmp(x[0].outputs, x[i].outputs, n_bytes) != 0)
                    fail_msg("%d ranks, variant %d: other bits %s", world_size, variant,
                             i == 1 ? "with a residual" : "where ranks differ");
            for (int i = 0; i < 3; i++) destroy_experiment(&x[i]);
        }
}

/* θ = 0 keeps everything: what comes out is the plain reduce-scatter, whatever the exchange. */
TEST(test_nothing_zeroed) {
    for (int world_size = 1; world_size <= 4; world_size++)
        for (int exchange = TAGC_EXCHANGE_SKETCH; exchange <= TAGC_EXCHANGE_PACKED; exchange++)
            for (int cells = 0; cells < 2; cells++) {
                experiment dense = make_experiment(world_size, 1777, 5),
                           x = make_experiment(world_size, 1777, 5);
                set_exchange(&dense.options, WHOLE);
                x.options.exchange = exchange;
                x.paper.cells = cells;
                x.options.sparsity = 0;
                x.options.op = dense.options.op = TAGC_OP_SUM; /* which direct would divide first */
                run_ranks(world_size, run_steps, &dense);
                run_ranks(world_size, run_steps, &x);
                size_t n_values = N_STEPS * (size_t)x.options.n_elems;
                for (size_t i = 0; i < n_values; i++)
                    if (bits_of(dense.outputs[i]) != bits_of(x.outputs[i]))
                        fail_msg("exchange %d: element %zu is %g, dense has %g", exchange, i,
                                 (double)x.outputs[i], (double)dense.outputs[i]);
                destroy_experiment(&dense);
                destroy_experiment(&x);
            }
}

/* θ = 1 keeps nothing: zeros come out, everything stays. */
TEST(test_everything_zeroed) {
    for (int exchange = TAGC_EXCHANGE_SKETCH; exchange <= TAGC_EXCHANGE_PACKED; exchange++) {
        experiment x = make_experiment(3, 100, 6);
        x.options.exchange = exchange;
        x.options.sparsity = 1;
        assert_as_oracle(&x, 3, 0, 0);
        destroy_experiment(&x);
    }
}

/* The same bits whatever the number of threads, and again. */
TEST(test_threads) {
    for (int exchange = TAGC_EXCHANGE_SKETCH; exchange <= TAGC_EXCHANGE_PACKED; exchange++) {
        experiment one = make_experiment(2, 40000, 9);
        one.options.exchange = exchange;
        run_ranks(2, run_steps, &one);
        for (int n_threads = 1; n_threads <= 4; n_threads += 3) {
            experiment x = make_experiment(2, 40000, 9);
            x.options.exchange = exchange;
            x.options.n_threads = n_threads;
            run_ranks(2, run_steps, &x);
            assert_memory_equal(x.outputs, one.outputs, N_STEPS * 2 * 40000 * sizeof(float));
            assert_memory_equal(x.residuals, one.residuals, N_STEPS * 4 * 40000 * sizeof(float));
            destroy_experiment(&x);
        }
        destroy_experiment(&one);
    }
}
