/* The direct exchange against plain loops over all ranks: the same bits, for every format, shape and option. */
#include "direct_oracle.h"
#include "oracle.h"
#include "ranks.h"

#include <math.h>

enum { MAX_STEPS = 20 };

typedef struct experiment {
    tagc_reducer_options options;
    int n_steps, world_size;
    double sparsity[MAX_STEPS]; /* of each step */
    int reload_at; /* the step before which residuals go through save and load, in a new reducer; 0: none */
    float *gradients; /* (steps, W, n) */
    float *outputs;   /* (steps, W, n), of which as many as there are */
    float *residuals; /* (steps, W, n), the same */
    tagc_reducer_stats stats[MAX_STEPS][MAX_RANKS];
} experiment;

static size_t row_of(const experiment *x, size_t step, size_t rank) {
    return (step * (size_t)x->world_size + rank) * (size_t)x->options.n_elems;
}

static experiment make_experiment(int world_size, size_t shard, int n_steps, uint64_t seed) {
    experiment x = {.world_size = world_size, .n_steps = n_steps};
    tagc_reducer_options_init(&x.options);
    x.options.exchange = TAGC_EXCHANGE_DIRECT;
    x.options.n_elems = shard * (size_t)world_size;
    x.options.sparsity = 0.95;
    size_t n_values = row_of(&x, (size_t)n_steps, 0);
    x.gradients = calloc(n_values, sizeof(float));
    x.outputs = calloc(n_values, sizeof(float));
    x.residuals = calloc(n_values, sizeof(float));
    assert_true(x.gradients && x.outputs && x.residuals);
    for (size_t step = 0; step < (size_t)n_steps; step++)
        for (size_t r = 0; r < (size_t)world_size; r++)
            for (size_t i = 0; i < x.options.n_elems; i++)
                x.gradients[row_of(&x, step, r) + i] =
                    i % 97 == 5 ? 0.0f : random_gradient(seed + step, (int)r, i);
    return x;
}

static void destroy_experiment(experiment *x) {
    free(x->gradients);
    free(x->outputs);
    free(x->residuals);
}

/* As a checkpoint would. */
static void reload(rank_run *run, const experiment *x, tagc_reducer **reducer) {
    uint64_t n_bytes = tagc_reducer_state_bytes(*reducer);
    char *saved = malloc(n_bytes);
    CHECK(run, tagc_reducer_state_save(*reducer, saved, n_bytes) == TAGC_OK);
    tagc_reducer_destroy(*reducer);
    if (CHECK(run, tagc_reducer_create(run->comm, &x->options, reducer) == TAGC_OK))
        CHECK(run, tagc_reducer_state_load(*reducer, saved, n_bytes) == TAGC_OK);
    free(saved);
}

static void run_steps(rank_run *run) {
    experiment *x = run->shared;
    direct_model m = direct_model_of(&x->options, x->world_size);
    tagc_reducer *reducer;
    if (!CHECK(run, tagc_reducer_create(run->comm, &x->options, &reducer) == TAGC_OK)) return;
    for (int step = 0; step < x->n_steps && reducer; step++) {
        size_t row = row_of(x, (size_t)step, (size_t)run->rank);
        if (x->reload_at && step == x->reload_at) reload(run, x, &reducer);
        if (x->sparsity[step] > 0)
            CHECK(run, tagc_reducer_set_sparsity(reducer, x->sparsity[step]) == TAGC_OK);
        tagc_reducer_stats *stats = &x->stats[step][run->rank];
        tagc_reducer_stats_init(stats);
        CHECK(run, tagc_reducer_run(reducer, x->gradients + row, x->outputs + row, stats) == TAGC_OK);
        uint64_t n_residual;
        const float *residual = tagc_reducer_residual(reducer, &n_residual);
        if (x->sparsity[step] == 0) CHECK(run, n_residual == direct_residual(&m));
        if (residual) memcpy(x->residuals + row, residual, n_residual * sizeof *residual);
    }
    tagc_reducer_destroy(reducer);
}

static void assert_same_bits(const float *a, const float *b, size_t n, const experiment *x, const char *what,
                             size_t step, size_t rank) {
    for (size_t i = 0; i < n; i++) {
        if (bits_of(a[i]) == bits_of(b[i])) continue;
        fail_msg("W %d, per host %d, values %d, sparsity %g, all %d: %s of step %zu, rank %zu, element %zu: "
                 "%.9g (%08x), expected %.9g (%08x)",
                 x->world_size, x->options.ranks_per_host, x->options.values, x->options.sparsity,
                 x->options.all_reduce, what, step, rank, i, (double)a[i], bits_of(a[i]), (double)b[i],
                 bits_of(b[i]));
    }
}

static void assert_as_oracle(experiment *x) {
    size_t W = (size_t)x->world_size, n = (size_t)x->options.n_elems;
    float *residuals = malloc(W * n * sizeof(float)), *owned = malloc(n * sizeof(float)),
          *output = malloc(n * sizeof(float));
    for (size_t i = 0; i < W * n; i++) residuals[i] = TAGC_ZERO_RESIDUAL;
    rank_run runs[MAX_RANKS];
    run_ranks(x->world_size, run_steps, x, NULL, runs);
    int carried = 0; /* a residual that was made stays */
    for (size_t step = 0; step < (size_t)x->n_steps; step++) {
        tagc_reducer_options options = x->options;
        if (x->sparsity[step] > 0) options.sparsity = x->sparsity[step];
        direct_model m = direct_model_of(&options, x->world_size);
        m.carries |= carried;
        carried = m.carries;
        uint64_t n_kept[MAX_RANKS] = {0};
        direct_step(&m, x->gradients + row_of(x, step, 0), residuals, owned, n_kept);
        for (size_t r = 0; r < W; r++) {
            size_t row = row_of(x, step, r);
            direct_expected(&m, r, owned, output);
            assert_same_bits(x->outputs + row, output, direct_output(&m), x, "output", step, r);
            assert_same_bits(x->residuals + row, residuals + r * n, direct_residual(&m), x, "residual", step,
                             r);
            assert_int_equal(x->stats[step][r].nonfinite, 0);
            if (m.coded) assert_int_equal(x->stats[step][r].n_kept, n_kept[r]);
        }
    }
    free(residuals);
    free(owned);
    free(output);
}

#ifdef TAGC_SANITIZED
static const int world_sizes[] = {1, 2, 3, 8}; /* many threads take their time there */
#else
static const int world_sizes[] = {1, 2, 3, 4, 5, 8, 16};
#endif
enum { N_WORLDS = sizeof world_sizes / sizeof world_sizes[0] };

static const double sparsities[] = {0, 0.5, 0.9, 0.9875, 1};

static void test_formats(void **state) {
    (void)state;
    for (int w = 0; w < N_WORLDS; w++)
        for (int values = TAGC_VALUES_FP32; values <= TAGC_VALUES_SIGN; values++)
            for (int i = 0; i < 5; i++) {
                experiment x = make_experiment(world_sizes[w], (size_t[]){1000, 333, 64}[(w + i) % 3], 3,
                                               (uint64_t)(w * 100 + i));
                x.options.values = values;
                x.options.sparsity = sparsities[i];
                x.options.block = 16 << (values + i) % 4;
                x.options.op = (w + values + i) % 2;
                x.options.rotate = sparsities[i] == 0 && values % 2;
                assert_as_oracle(&x);
                destroy_experiment(&x);
            }
}

/* Sums to all ranks, with what the owner's rounding loses in its residual. */
static void test_all_reduce(void **state) {
    (void)state;
    for (int w = 0; w < N_WORLDS; w++)
        for (int values = TAGC_VALUES_FP32; values <= TAGC_VALUES_SIGN; values++)
            for (int i = 0; i < 5; i++) {
                experiment x = make_experiment(world_sizes[w], (size_t[]){700, 257, 16}[(w + values) % 3], 3,
                                               (uint64_t)(w * 200 + i));
                x.options.all_reduce = 1 + (w + i) % 2;
                x.options.values = values;
                x.options.sparsity = sparsities[i];
                x.options.block = 16 << i % 4;
                x.options.op = (w + values) % 2;
                x.options.rotate = sparsities[i] == 0 && i % 2;
                assert_as_oracle(&x);
                if (i == 1)
                    for (int r = 1; r < x.world_size; r++) /* what the oracle says of each, said of all */
                        assert_memory_equal(x.outputs, x.outputs + row_of(&x, 0, (size_t)r),
                                            x.options.n_elems * sizeof(float));
                destroy_experiment(&x);
            }
}

/* Every way to put W ranks on hosts. */
static void test_hosts(void **state) {
    (void)state;
    for (int w = 0; w < N_WORLDS; w++)
        for (int per_host = 1; per_host <= world_sizes[w]; per_host++)
            for (int variant = 0; variant < 9 && world_sizes[w] % per_host == 0; variant++) {
                static const int formats[] = {TAGC_VALUES_FP32, TAGC_VALUES_INT4, TAGC_VALUES_BF16};
                experiment x = make_experiment(world_sizes[w], (size_t[]){5000, 333, 48}[variant % 3], 3,
                                               (uint64_t)(w * 300 + variant));
                x.options.ranks_per_host = per_host;
                x.options.all_reduce = variant / 3;
                x.options.values = formats[(variant + per_host) % 3];
                x.options.sparsity = variant % 4 == 3 ? 0 : 0.95;
                x.options.op = variant % 2;
                assert_as_oracle(&x);
                destroy_experiment(&x);
            }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_formats),
        cmocka_unit_test(test_all_reduce),
        cmocka_unit_test(test_hosts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
