/* Reducers and gatherers over MPI: the same bits as the brute-force step and as a plain sum. Every rank runs
 * every test and can compute what all others have. */
#include <stdio.h>
#include <unistd.h>

#include "../exchange/direct_oracle.h"
#include "../exchange/oracle.h"
#include "../exchange/paper.h"
#include "../lengths.h"
#include "../residual.h"
#include "../test.h"
#include "tagc/mpi.h"

static tagc_comm *comm;
static int rank, world_size;

static float gradient_of(int step, int r, size_t i) {
    uint64_t x =
        (uint64_t)step * 1000003 + (uint64_t)(r / 2) * 7919 + i * 2654435761u + (i % 3 ? (uint64_t)r : 0);
    x = (x ^ x >> 15) * 0x94d049bb133111ebu;
    double u = (double)(x >> 40) / 16777216.0 - 0.5;
    return (float)(u * u * u);
}

/* Three steps of every rank's view against the oracle. */
static void compare(const tagc_reducer_options *options, int fill, int is_fixed) {
    size_t n = (size_t)options->n_elems, W = (size_t)world_size, shard = n / W;
    size_t n_out = options->output ? n : shard;
    float *gradients = malloc(W * n * sizeof(float)), *residuals = malloc(W * n * sizeof(float));
    float *expected = malloc(n * sizeof(float)), *output = malloc(n * sizeof(float));
    tagc_reducer *reducer;
    assert_int_equal(tagc_reducer_create(comm, options, &reducer), TAGC_OK);
    for (size_t i = 0; i < W * n; i++) residuals[i] = -0.0f;
    for (int step = 0; step < 3; step++) {
        for (size_t r = 0; r < W; r++)
            for (size_t i = 0; i < n; i++) gradients[r * n + i] = gradient_of(step, (int)r, i);
        oracle_step(options, world_size, fill, is_fixed, gradients, residuals, expected);
        assert_int_equal(run_reducer(reducer, gradients + (size_t)rank * n, output, NULL), TAGC_OK);
        const float *own = options->output ? expected : expected + (size_t)rank * shard;
        assert_memory_equal(output, own, n_out * sizeof(float));
        if (residual_to(reducer, output)) /* (n), which is compared already */
            assert_memory_equal(output, residuals + (size_t)rank * n, n * sizeof(float));
    }
    tagc_reducer_destroy(reducer);
    free(gradients);
    free(residuals);
    free(expected);
    free(output);
}

TEST(test_exchanges) {
    for (int variant = 0; variant < 8; variant++) {
        tagc_reducer_options options;
        tagc_reducer_options_init(&options);
        options.n_elems = (variant < 4 ? 3000u : 40000u) * (uint64_t)world_size;
        options.exchange = variant % 2 ? TAGC_EXCHANGE_SKETCH : TAGC_EXCHANGE_PACKED;
        options.output = variant / 2 % 2;
        tagc_paper_options paper;
        tagc_paper_options_init(&paper);
        paper.cells = TAGC_CELLS_FIXED;
        options.sparsity = 0.97;
        if (variant == 7) paper.ratio = 100; /* overloaded: leftovers travel */
        attach_paper(&options, &paper);
        compare(&options, options.exchange == TAGC_EXCHANGE_PACKED, options.exchange == TAGC_EXCHANGE_SKETCH);
    }
}

/* The same for direct. */
static void compare_direct(const tagc_reducer_options *options) {
    direct_model m = direct_model_of(options, world_size);
    size_t n = m.n, W = (size_t)world_size;
    float *gradients = malloc(W * n * sizeof(float)), *residuals = malloc(W * n * sizeof(float));
    float *owned = malloc(n * sizeof(float)), *expected = malloc(n * sizeof(float)),
          *output = malloc(n * sizeof(float));
    tagc_reducer *reducer;
    assert_int_equal(tagc_reducer_create(comm, options, &reducer), TAGC_OK);
    for (size_t i = 0; i < W * n; i++) residuals[i] = -0.0f;
    for (int step = 0; step < 3; step++) {
        uint64_t n_sent[64] = {0};
        for (size_t r = 0; r < W; r++)
            for (size_t i = 0; i < n; i++) gradients[r * n + i] = gradient_of(step, (int)r, i);
        direct_step(&m, (uint64_t)step + 1, gradients, residuals, owned, n_sent);
        direct_expected(&m, (size_t)rank, owned, expected);
        assert_int_equal(run_reducer(reducer, gradients + (size_t)rank * n, output, NULL), TAGC_OK);
        assert_memory_equal(output, expected, direct_output(&m) * sizeof(float));
        if (m.has_residual) {
            residual_to(reducer, output);
            assert_memory_equal(output, residuals + (size_t)rank * n, direct_residual(&m) * sizeof(float));
        }
    }
    tagc_reducer_destroy(reducer);
    free(gradients);
    free(residuals);
    free(owned);
    free(expected);
    free(output);
}

TEST(test_direct) {
    for (int variant = 0; variant < 12; variant++) {
        tagc_reducer_options options;
        tagc_reducer_options_init(&options);
        options.n_elems = (variant < 9 ? 3000u : 40000u) * (uint64_t)world_size;
        options.exchange = TAGC_EXCHANGE_DIRECT;
        options.format = variant % 5;
        options.output = variant % 2;
        options.sparsity = variant % 5 ? 0.95 : 0;
        compare_direct(&options);
    }
}

TEST(test_dense_chunks) {
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.n_elems = (262144 * 4 / (uint64_t)world_size + 5) * (uint64_t)world_size;
    options.sparsity = 0;
    options.format = TAGC_FORMAT_FP32;
    compare(&options, 0, 0);
}

/* Without a residual: multiples of a block's step arrive as they are. Others vary from step to step, and their mean is right. */
TEST(test_once) {
    enum { SHARD = 96, STEPS = 40 };
    size_t n = SHARD * (size_t)world_size;
    float gradient[SHARD * 64], output[SHARD * 64];
    double means[SHARD * 64] = {0}, largest = 0, of_mean = 0;
    tagc_reducer *reducer;
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.n_elems = n;
    options.residual = TAGC_RESIDUAL_NONE;
    options.output = TAGC_OUTPUT_UNIT;
    options.op = TAGC_OP_SUM;
    options.result.format = TAGC_FORMAT_FP32;
    options.block = 16;
    assert_int_equal(tagc_reducer_create(comm, &options, &reducer), TAGC_OK);
    for (size_t i = 0; i < n; i++) gradient[i] = (float)(i % 15) * 0.125f - 0.875f; /* seven steps each way */
    assert_int_equal(run_reducer(reducer, gradient, output, NULL), TAGC_OK);
    for (size_t i = 0; i < n; i++) assert_true(output[i] == (float)world_size * gradient[i]);
    for (size_t i = 0; i < n; i++) gradient[i] += i % 16 ? 0.05f : 0;
    for (int step = 0; step < STEPS; step++) {
        assert_int_equal(run_reducer(reducer, gradient, output, NULL), TAGC_OK);
        for (size_t i = 0; i < n; i++) {
            double error = (double)output[i] - (double)world_size * (double)gradient[i];
            largest = fmax(largest, fabs(error));
            means[i] += error / STEPS;
        }
    }
    for (size_t i = 0; i < n; i++) of_mean = fmax(of_mean, fabs(means[i]));
    assert_true(world_size == 1 ? largest == 0 : largest > 0.07); /* the own values are not rounded */
    assert_true(of_mean <
                0.04 * sqrt(world_size)); /* to the nearest it would be half a step for each other rank */
    tagc_reducer_destroy(reducer);
}

TEST(test_mismatch) {
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.exchange = TAGC_EXCHANGE_PACKED;
    options.n_elems = 64 * (uint64_t)world_size;
    if (rank == world_size - 1) options.sparsity = 0.5;
    tagc_reducer *reducer;
    tagc_status status = tagc_reducer_create(comm, &options, &reducer);
    assert_int_equal(status, world_size > 1 ? TAGC_ERR_MISMATCH : TAGC_OK);
    if (world_size > 1) assert_non_null(strstr(tagc_last_error(), "sparsity: rank"));
    tagc_reducer_destroy(reducer);
}

/* Gathers under way beside reducers, ended in the other order. */
TEST(test_overlap) {
    size_t shard = 50000, n = shard * (size_t)world_size;
    tagc_reducer_options reduce;
    tagc_reducer_options_init(&reduce);
    reduce.exchange = TAGC_EXCHANGE_PACKED;
    reduce.n_elems = n;
    tagc_gatherer_options gather;
    tagc_gatherer_options_init(&gather);
    gather.n_elems = n;
    tagc_reducer *reducer;
    tagc_gatherer *gatherer;
    assert_int_equal(tagc_reducer_create(comm, &reduce, &reducer), TAGC_OK);
    assert_int_equal(tagc_gatherer_create(comm, &gather, &gatherer), TAGC_OK);
    float *gradient = malloc(n * sizeof(float)), *output = malloc(n * sizeof(float)),
          *full = malloc(n * sizeof(float));
    for (size_t i = 0; i < n; i++) gradient[i] = gradient_of(0, rank, i);
    for (int step = 0; step < 10; step++) {
        float *own = full + (size_t)rank * shard;
        for (size_t i = 0; i < shard; i++) own[i] = gradient_of(step, rank, i);
        assert_int_equal(begin_reducer(reducer, gradient, output), TAGC_OK);
        assert_int_equal(begin_gatherer(gatherer, own, full), TAGC_OK);
        assert_int_equal(tagc_gatherer_end(gatherer), TAGC_OK);
        for (size_t i = 0; i < n; i++) assert_true(full[i] == gradient_of(step, (int)(i / shard), i % shard));
        assert_int_equal(tagc_reducer_end(reducer, NULL), TAGC_OK);
    }
    tagc_reducer_destroy(reducer);
    tagc_gatherer_destroy(gatherer);
    free(gradient);
    free(output);
    free(full);
}

int main(int argc, char **argv) {
    int level;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
    if (tagc_comm_create_mpi(MPI_COMM_WORLD, NULL, &comm) != TAGC_OK) {
        fprintf(stderr, "%s\n", tagc_last_error());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    rank = tagc_comm_rank(comm);
    world_size = tagc_comm_world_size(comm);
    if (rank != 0) cmocka_set_message_output(CM_OUTPUT_TAP);
    int n_failed = test_run(NULL, NULL);
    if (n_failed) MPI_Abort(MPI_COMM_WORLD, 1); /* the others may wait for this rank */
    tagc_comm_destroy(comm);
    MPI_Finalize();
    return 0;
}
