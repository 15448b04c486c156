/* Ways that must give the same bits: the two paths of whole values, exchanges that keep everything, and any number of threads. What these
 * bits are, the oracles of test_exchange_stress.c and test_reducer_direct.c say. */
#include "../bits.h"
#include "../lengths.h"
#include "exchange/direct/direct.h"
#include "paper.h"
#include "ranks.h"
#include "whole.h"

enum { N_STEPS = 3 };

typedef struct experiment {
    tagc_reducer_options options;
    tagc_paper_options paper;
    int has_residual; /* of whole values: one that another format has left, of zeros */
    int is_mixed;     /* rank 0 brings a runner, as one with its arrays on a device does */
    float *gradients; /* (steps, W, n) */
    float *outputs;   /* (steps, W, n or shard) */
    float *residuals; /* (steps, W, n) */
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
            ? tagc_reducer_make(&tagc_host_arrays, &tagc_direct_on_host, NULL, run->comm, &options, &reducer)
            : tagc_reducer_create(run->comm, &options, &reducer);
    if (!CHECK(run, status == TAGC_OK)) return;
    if (x->has_residual) CHECK(run, tagc_reducer_change(reducer, &x->options) == TAGC_OK);
    for (size_t step = 0; step < N_STEPS; step++) {
        size_t row = step * (size_t)run->world_size + (size_t)run->rank;
        CHECK(run, run_reducer(reducer, x->gradients + row * n, x->outputs + row * n_out, NULL) == TAGC_OK);
        uint64_t n_residual = residual_to(reducer, x->residuals + row * n);
        int is_paper =
            x->options.exchange == TAGC_EXCHANGE_SKETCH || x->options.exchange == TAGC_EXCHANGE_PACKED;
        CHECK(run, n_residual == (is_paper || x->has_residual ? n : 0));
    }
    tagc_reducer_destroy(reducer);
}

static experiment make_experiment(int world_size, size_t shard, uint64_t seed) {
    experiment x = {0};
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

/* Whole values take a path of their own, unless there is a residual, or a rank that cannot. Both give the same bits, also of shards of
 * several chunks, the last one short. */
TEST(test_two_paths) {
    for (int world_size = 1; world_size <= 8; world_size++)
        for (int variant = 0; variant < 8; variant++) {
            experiment x[3];
            size_t shard = world_size == 2 ? 262144 * 3 + 777 : 1999, W = (size_t)world_size;
            for (int i = 0; i < 3; i++) {
                x[i] = i ? x[0] : make_experiment(world_size, shard, 11);
                if (i) x[i].outputs = calloc(N_STEPS * W * shard * W, sizeof(float));
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
            size_t n_bytes = n_steps * W * output_elems(&x[0], world_size) * sizeof(float);
            for (int i = 1; i < 3; i++)
                if (memcmp(x[0].outputs, x[i].outputs, n_bytes) != 0)
                    fail_msg("%d ranks, variant %d: other bits %s", world_size, variant,
                             i == 1 ? "with a residual" : "where ranks differ");
            for (int i = 1; i < 3; i++) free(x[i].outputs);
            destroy_experiment(&x[0]);
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
