/* The direct exchange against plain loops over all ranks: the same bits, for every format, shape and option. */
#include "../lengths.h"
#include "../repeats.h"
#include "direct_oracle.h"
#include "oracle.h"
#include "ranks.h"
#include "whole.h"

#include <math.h>

enum { MAX_STEPS = 20 };

typedef struct experiment {
    tagc_reducer_options options;
    int n_steps, world_size;
    double sparsity[MAX_STEPS]; /* of each step */
    int reload_at;   /* the step before which residuals go through save and load, in a new reducer; 0: none */
    int is_in_place; /* 1: the output takes the place of the gradient, or of a part of it */
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
    x.options.rounding_seed = seed;
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

static void make_halves(experiment *x) {
    x->options.gradient = TAGC_FORMAT_BF16;
    for (size_t i = 0; i < row_of(x, (size_t)x->n_steps, 0); i++) {
        uint16_t half;
        tagc_bf16_narrow(&x->gradients[i], &half, 1);
        tagc_bf16_widen(&half, &x->gradients[i], 1);
    }
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

/* Reads the gradient as fp32, or as bf16, which holds its values too. */
static tagc_status run_step(tagc_reducer *reducer, const experiment *x, size_t row,
                            tagc_reducer_stats *stats) {
    size_t n = (size_t)x->options.n_elems, shard = n / (size_t)x->world_size;
    float *gradient = malloc(n * sizeof *gradient), *output = x->outputs + row;
    if (x->options.gradient)
        tagc_bf16_narrow(x->gradients + row, (uint16_t *)gradient, n);
    else
        memcpy(gradient, x->gradients + row, n * sizeof *gradient);
    size_t n_out = x->options.output ? n : shard;
    int in_rows = tagc_reducer_options_are_whole(&x->options); /* then only where a row begins */
    int is_in_place = x->is_in_place && !(in_rows && x->options.gradient);
    if (is_in_place) output = gradient + (x->options.gradient ? 0 : in_rows ? n - n_out : (n - n_out) / 2);
    tagc_status status = run_reducer(reducer, gradient, output, stats);
    if (is_in_place) memcpy(x->outputs + row, output, n_out * sizeof *output);
    free(gradient);
    return status;
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
        CHECK(run, run_step(reducer, x, row, stats) == TAGC_OK);
        uint64_t n_residual = residual_to(reducer, x->residuals + row);
        if (x->sparsity[step] == 0) CHECK(run, n_residual == direct_residual(&m));
    }
    tagc_reducer_destroy(reducer);
}

static void assert_same_bits(const float *a, const float *b, size_t n, const experiment *x, const char *what,
                             size_t step, size_t rank) {
    for (size_t i = 0; i < n; i++) {
        if (bits_of(a[i]) == bits_of(b[i])) continue;
        fail_msg("W %d, values %d, residual %d, sparsity %g, all %d: %s of step %zu, rank %zu, element %zu: "
                 "%.9g (%08x), expected %.9g (%08x)",
                 x->world_size, x->options.format, x->options.residual, x->options.sparsity,
                 x->options.output, what, step, rank, i, (double)a[i], bits_of(a[i]), (double)b[i],
                 bits_of(b[i]));
    }
}

static void assert_as_oracle(experiment *x) {
    size_t W = (size_t)x->world_size, n = (size_t)x->options.n_elems;
    float *residuals = malloc(W * n * sizeof(float)), *owned = malloc(n * sizeof(float)),
          *output = malloc(n * sizeof(float));
    for (size_t i = 0; i < W * n; i++) residuals[i] = TAGC_ZERO_RESIDUAL;
    run_ranks(x->world_size, run_steps, x);
    int had_residual = 0; /* a residual that was made stays */
    for (size_t step = 0; step < (size_t)x->n_steps; step++) {
        tagc_reducer_options options = x->options;
        if (x->sparsity[step] > 0) options.sparsity = x->sparsity[step];
        direct_model m = direct_model_of(&options, x->world_size);
        m.has_residual |= had_residual;
        had_residual = m.has_residual;
        uint64_t n_sent[MAX_RANKS] = {0};
        direct_step(&m, step + 1, x->gradients + row_of(x, step, 0), residuals, owned, n_sent);
        for (size_t r = 0; r < W; r++) {
            size_t row = row_of(x, step, r);
            direct_expected(&m, r, owned, output);
            assert_same_bits(x->outputs + row, output, direct_output(&m), x, "output", step, r);
            assert_same_bits(x->residuals + row, residuals + r * n, direct_residual(&m), x, "residual", step,
                             r);
            assert_int_equal(x->stats[step][r].nonfinite, 0);
            assert_int_equal(x->stats[step][r].n_sent, n_sent[r]);
            if (options.sparsity == 0) assert_int_equal(x->stats[step][r].n_union, n);
        }
    }
    free(residuals);
    free(owned);
    free(output);
}

/* Many threads take their time under sanitizers. Races between ranks need no more than a few of them, and of variants that
 * differ in numbers alone every fifth will do. */
static const int world_sizes[] = {1, 3, 4, 8, 2, 5, 16};
enum { N_WORLDS = REPEATS(7, 4, 3), EACH_VARIANT = REPEATS(1, 5, 5), EACH_SPARSITY = REPEATS(1, 1, 2) };

/* Where TAGC_CPU asks for a level, the codec differs, and how ranks meet does not. */
static int n_worlds(void) {
    return getenv("TAGC_CPU") && N_WORLDS > 4 ? 4 : N_WORLDS;
}

static const double sparsities[] = {0, 0.5, 0.9, 0.9875, 1};

TEST(test_formats) {
    for (int w = 0; w < n_worlds(); w++)
        for (int values = TAGC_FORMAT_FP32; values <= TAGC_FORMAT_INT2; values++)
            for (int i = (w + values) % EACH_SPARSITY; i < 5; i += EACH_SPARSITY) {
                experiment x = make_experiment(world_sizes[w], (size_t[]){1000, 333, 64}[(w + i) % 3], 3,
                                               (uint64_t)(w * 100 + i));
                x.options.format = values;
                x.options.sparsity = sparsities[i];
                x.options.block = 16 << (values + i) % 4;
                x.options.op = (w + values + i) % 2;
                x.options.residual = residual_of(w + 2 * values + 3 * i);
                if (i % 2) make_halves(&x);
                x.is_in_place = (w + values) % 2 && (x.world_size > 1 || !x.options.gradient);
                tagc_reducer_options_prune(&x.options);
                assert_as_oracle(&x);
                destroy_experiment(&x);
            }
}

/* The format and the share of sums: by default, and every other choice in turn. */
static void choose_results(tagc_reducer_options *options, int variant) {
    static const double shares[] = {-1, 0, 0.5, 0.97, 1};
    options->result.sparsity = shares[variant % 5];
    options->result.format = variant % 3 ? -1 : variant % 7 % 5;
}

/* Sums to all ranks, with what the owner does not send of them in its residual. */
TEST(test_all_reduce) {
    for (int w = 0; w < n_worlds(); w++)
        for (int values = TAGC_FORMAT_FP32; values <= TAGC_FORMAT_INT2; values++)
            for (int i = (w + values) % EACH_SPARSITY; i < 5; i += EACH_SPARSITY) {
                experiment x = make_experiment(world_sizes[w], (size_t[]){700, 257, 16}[(w + values) % 3], 3,
                                               (uint64_t)(w * 200 + i));
                x.options.output = TAGC_OUTPUT_UNIT;
                x.options.format = values;
                x.options.sparsity = sparsities[i];
                x.options.block = 16 << i % 4;
                x.options.op = (w + values) % 2;
                choose_results(&x.options, w * 11 + values * 4 + i);
                x.options.residual = residual_of(w + 2 * values + 3 * i);
                tagc_reducer_options_prune(&x.options);
                x.is_in_place = (values + i / 2) % 2 && x.world_size > 1;
                assert_as_oracle(&x);
                for (int r = 1; r < x.world_size; r++) /* what the oracle says of each, said of all */
                    assert_memory_equal(x.outputs, x.outputs + row_of(&x, 0, (size_t)r),
                                        x.options.n_elems * sizeof(float));
                destroy_experiment(&x);
            }
}

/* Elsewhere the output must lie apart. */
static void refuse_overlaps(rank_run *run) {
    float arrays[3 * 64] = {0};
    for (int variant = run->world_size > 1 ? 0 : 3; variant < (run->world_size > 1 ? 3 : 4); variant++) {
        tagc_reducer *reducer;
        tagc_reducer_options options;
        tagc_reducer_options_init(&options);
        options.n_elems = 64;
        options.output = TAGC_OUTPUT_UNIT;
        if (variant == 1) options.gradient = TAGC_FORMAT_BF16;
        if (variant == 2) set_exchange(&options, WHOLE);
        if (!CHECK(run, tagc_reducer_create(run->comm, &options, &reducer) == TAGC_OK)) return;
        float *output =
            variant == 1 || variant > 2 ? arrays : arrays + 1; /* in its own place: test_in_place */
        CHECK(run, begin_reducer(reducer, arrays, output) == TAGC_ERR_ARGUMENT);
        CHECK(run, strstr(tagc_last_error(), "output overlaps gradient, must lie apart") != NULL);
        CHECK(run, run_reducer(reducer, arrays, arrays + 64, NULL) == TAGC_OK);
        tagc_reducer_destroy(reducer);
    }
}

TEST(test_overlaps) {
    run_ranks(4, refuse_overlaps, NULL);
    run_ranks(1, refuse_overlaps, NULL);
}

/* θ that changes between steps: from everything to little, back, and through nothing at all. */
TEST(test_sparsity_changes) {
    static const double plan[][6] = {{0, 0.9, 0.9875, 0.5, 1, 0.9}, {0.75, 0.9, 0.95, 0.9875, 0.9, 0.2}};
    for (int variant = 0; variant < 24; variant += EACH_VARIANT) {
        experiment x = make_experiment(2 + variant % 3 * 2, 600, 6, (uint64_t)variant + 900);
        x.options.format = variant % 5;
        x.options.output = variant / 2 % 2;
        choose_results(&x.options, variant * 7);
        tagc_reducer_options_prune(&x.options);
        x.options.residual = residual_of(variant);
        memcpy(x.sparsity, plan[variant % 2], sizeof plan[0]);
        x.options.sparsity = x.sparsity[0];
        assert_as_oracle(&x);
        destroy_experiment(&x);
    }
}

/* A run that is interrupted goes on with the same bits. */
TEST(test_reload) {
    for (int variant = 0; variant < 12; variant++) {
        experiment x = make_experiment(4, 500, 5, (uint64_t)variant + 950);
        x.options.format = variant % 5;
        x.options.output = variant % 2;
        x.options.residual = residual_of(variant);
        x.reload_at = 2;
        assert_as_oracle(&x); /* which knows of no interruption */
        destroy_experiment(&x);
    }
}

/* The same bits whatever the number of threads, and again. */
TEST(test_threads) {
    for (int variant = 0; variant < 9; variant += EACH_SPARSITY) {
        experiment one = make_experiment(4, 30000, 2, 970);
        one.options.format = variant % 5;
        one.options.output = variant / 2 % 2;
        one.options.sparsity = variant % 3 ? 0.95 : 0;
        one.options.residual = residual_of(variant);
        run_ranks(4, run_steps, &one);
        for (int n_threads = 1; n_threads <= 4; n_threads += 3) {
            experiment x = make_experiment(4, 30000, 2, 970);
            x.options = one.options;
            x.options.n_threads = n_threads;
            run_ranks(4, run_steps, &x);
            size_t n_values = row_of(&x, 2, 0);
            assert_memory_equal(x.outputs, one.outputs, n_values * sizeof(float));
            assert_memory_equal(x.residuals, one.residuals, n_values * sizeof(float));
            destroy_experiment(&x);
        }
        destroy_experiment(&one);
    }
}

/* What went in has come out or is still there: the sum of outputs, times W where they are means, and of residuals.
 * Gradients are multiples of 1/128 below 1: with fp32 values and W a power of two every sum is exact. */
static void check_conserved(experiment *x, double tolerance) {
    size_t W = (size_t)x->world_size, n = (size_t)x->options.n_elems, n_steps = (size_t)x->n_steps;
    direct_model m = direct_model_of(&x->options, x->world_size);
    for (size_t i = 0; i < n_steps * W * n; i++)
        x->gradients[i] = (float)(rint(fmod(x->gradients[i] * 4e5, 1) * 128) / 128);
    run_ranks(x->world_size, run_steps, x);
    double *in = calloc(n, sizeof *in), *out = calloc(n, sizeof *out), worst = 0;
    float *output = malloc(n * sizeof *output);
    for (size_t step = 0; step < n_steps; step++)
        for (size_t r = 0; r < W; r++) {
            const float *gradient = x->gradients + row_of(x, step, r);
            for (size_t i = 0; i < n; i++) in[i] += (double)gradient[i];
            size_t begin = r * m.shard;
            const float *owned = x->outputs + row_of(x, step, r) + (x->options.output ? begin : 0);
            for (size_t i = 0; i < m.shard; i++) out[begin + i] += (double)owned[i] / (double)m.scale;
        }
    for (size_t r = 0; r < W && m.has_residual; r++)
        for (size_t i = 0; i < n; i++) out[i] += (double)x->residuals[row_of(x, n_steps - 1, r) + i];
    for (size_t i = 0; i < n; i++) worst = fmax(worst, fabs(in[i] - out[i]));
    if (!(worst <= tolerance))
        fail_msg("W %d, values %d, all %d, op %d: %g is missing", x->world_size, x->options.format,
                 x->options.output, x->options.op, worst);
    free(in);
    free(out);
    free(output);
}

TEST(test_conservation) {
    for (int variant = 0; variant < 6 * 2 * 3; variant += EACH_VARIANT) {
        int world_size = variant / 6 % 2 ? 4 : 8;
        experiment x = make_experiment(world_size, 300, MAX_STEPS, (uint64_t)variant);
        x.options.format = variant % 5;
        x.options.output = variant / 12 % 2;
        x.options.op = variant % 5 % 2;
        x.options.sparsity = variant % 7 ? 0.95 : 0;
        choose_results(&x.options, variant);
        tagc_reducer_options_prune(&x.options);
        x.options.residual = TAGC_FORMAT_FP32;
        /* exact, or to the rounding of sums; what is rounded without a residual is lost */
        direct_model m = direct_model_of(&x.options, world_size);
        int is_exact = x.options.format == TAGC_FORMAT_FP32 &&
                       (x.options.output == 0 || x.options.result.format <= TAGC_FORMAT_FP32);
        double tolerance = is_exact ? 0 : m.has_residual ? 1e-4 : 0.5;
        check_conserved(&x, tolerance);
        destroy_experiment(&x);
    }
}

/* Means that are finite where what their rounding loses, times W, is not: told, and not left in a residual for ever. */
TEST(test_overflow_of_errors) {
    for (int variant = 0; variant < 2; variant++) {
        experiment x = make_experiment(4, 64, 2, 1);
        memset(x.gradients, 0, row_of(&x, 2, 0) * sizeof(float));
        x.options.output = 1;
        x.options.format = TAGC_FORMAT_INT2;
        x.options.sparsity = variant ? 0 : 63.0 / 64;
        x.options.block = 64;
        for (size_t r = 0; r < 4; r++) { /* two agree on element 0, and on nothing else */
            float *gradient = x.gradients + row_of(&x, 0, r);
            for (size_t i = 1; i < 64 && variant && r < 2; i++) gradient[i] = r ? -3e38f : 3e38f;
            gradient[r < 2 ? 0 : r] = r < 2 ? 3e38f : 1;
        }
        run_ranks(4, run_steps, &x);
        for (size_t r = 0; r < 4; r++) {
            int is_finite = 1;
            for (size_t i = 0; i < x.options.n_elems; i++)
                is_finite &= isfinite(x.residuals[row_of(&x, 0, r) + i]) != 0;
            assert_true(is_finite);
            assert_int_equal(x.stats[0][r].nonfinite, 1);
            assert_int_equal(x.stats[1][r].nonfinite, 0);
        }
        destroy_experiment(&x);
    }
}

/* What statistics say, where it can be counted otherwise. */
TEST(test_stats) {
    experiment x = make_experiment(3, 800, 1, 990);
    x.options.output = 1;
    x.options.format = TAGC_FORMAT_FP32;
    run_ranks(3, run_steps, &x);
    uint64_t n_returned = 0, sent = 0, received = 0;
    for (size_t i = 0; i < 2400; i++) n_returned += x.outputs[i] != 0;
    assert_int_equal(n_returned, 3 * 96); /* 2.4 times 40 */
    for (int r = 0; r < 3; r++) {
        const tagc_reducer_stats *stats = &x.stats[0][r];
        assert_int_equal(stats->n_sent, 2 * 40 + 96);
        assert_int_equal(stats->n_union, 0);
        assert_int_equal(stats->n_returned, n_returned);
        assert_true(stats->sparsity == 1 - 176.0 / 2400);
        /* Small fragments travel whole behind their headers, and a little of nothing. */
        uint64_t n_index = stats->n_bytes_sent[TAGC_LEG_INDEX],
                 n_values = stats->n_bytes_sent[TAGC_LEG_VALUES];
        assert_true(n_index > 2 * 40 / 2 && n_index < 2 * 40 * 2);
        assert_true(n_values >= 2 * 40 * 4 && n_index + n_values < 2 * (40 * 4 + 40 * 2));
        assert_int_equal(stats->n_bytes_sent[TAGC_LEG_CONTROL], 2 * 3 * 64);
        assert_true(stats->time_s[TAGC_PHASE_SELECT] > 0 && stats->time_s[TAGC_PHASE_DECODE] > 0);
        double sum = 0;
        for (int phase = 0; phase < TAGC_N_PHASES; phase++) sum += stats->time_s[phase];
        assert_true(sum <= stats->total_s);
        for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
            sent += stats->n_bytes_sent[leg];
            received += stats->n_bytes_received[leg];
        }
    }
    assert_int_equal(sent, received);
    static const double shares[] = {-1, 0}; /* of the sums: as many as there are, a tenth or nothing stays */
    for (int i = 0; i < 2; i++) {
        x.options.sparsity = 0.625;
        x.options.result.sparsity = shares[i];
        run_ranks(3, run_steps, &x);
        n_returned = 0;
        for (size_t j = 0; j < 2400; j++) n_returned += x.outputs[j] != 0;
        assert_true(i ? n_returned > 2300 : n_returned == 3 * 719);
        for (int r = 0; r < 3; r++) assert_int_equal(x.stats[0][r].n_returned, i ? 2400 : n_returned);
    }
    destroy_experiment(&x);
}
