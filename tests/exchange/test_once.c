/* Reducers without a residual and gathers that round at random: bit for bit as plain code rounds, and right on average; nothing is kept. */
#include "../lengths.h"
#include "../repeats.h"
#include "blocks_oracle.h"
#include "core/measure.h"
#include "ranks.h"

enum { MAX_STEPS = 64, NONFINITE_STEP = 1 };

typedef struct trial {
    tagc_reducer_options options;
    int world_size, n_steps;
    size_t n, n_out;
    float *gradients; /* (steps or 1, W, n) */
    float *outputs;   /* (steps, W, n_out) */
    int has_one_gradient, has_nonfinite;
} trial;

static uint64_t random_state;

static float normal(void) {
    return tagc_normal_of(tagc_next_random(&random_state));
}

enum { NORMAL, HEAVY, DENORMAL, ZEROS, ONE_HUGE, LARGEST, N_KINDS };

/* Of the largest finite values only rank 0 has some, since their sum is none. */
static float drawn(int kind, size_t i, int rank) {
    float x = normal();
    if (kind == HEAVY) return x * expf(3 * normal());
    if (kind == DENORMAL) return x * 1e-39f;
    if (kind == ZEROS) return i % 3 ? 0.0f : -0.0f;
    if (kind == ONE_HUGE) return i % 48 == 7 ? 1e30f * x : x;
    if (kind == LARGEST) return rank == 0 ? copysignf(3.4e38f, x) : x;
    return x;
}

static trial make_trial(int world_size, size_t shard, int output, int format, int n_steps) {
    trial t = {.world_size = world_size, .n_steps = n_steps, .n = shard * (size_t)world_size};
    tagc_reducer_options_init(&t.options);
    t.options.n_elems = t.n;
    t.options.residual = TAGC_RESIDUAL_NONE;
    t.options.format = format;
    t.options.output = output;
    t.options.block = 32;
    return t;
}

static void make_arrays(trial *t) {
    const tagc_reducer_options *o = &t->options;
    t->n_out = o->output == TAGC_OUTPUT_UNIT ? t->n : t->n / (size_t)t->world_size;
    size_t n_rows = (size_t)t->n_steps * (size_t)t->world_size;
    t->gradients = calloc(n_rows * t->n, sizeof(float));
    t->outputs = calloc(n_rows * t->n_out, sizeof(float));
    assert_true(t->gradients && t->outputs);
}

static void free_arrays(trial *t) {
    free(t->gradients), free(t->outputs);
}

static size_t row_of(const trial *t, int step, int rank) {
    return (size_t)(t->has_one_gradient ? 0 : step) * (size_t)t->world_size + (size_t)rank;
}

static void run_steps(rank_run *run) {
    trial *t = run->shared;
    tagc_reducer *reducer;
    tagc_reducer_stats stats;
    tagc_memory held;
    tagc_memory_init(&held);
    if (!CHECK(run, tagc_reducer_create(run->comm, &t->options, &reducer) == TAGC_OK)) return;
    for (int step = 0; step < t->n_steps; step++) {
        const float *gradient = t->gradients + row_of(t, step, run->rank) * t->n;
        float *output = t->outputs + ((size_t)step * (size_t)t->world_size + (size_t)run->rank) * t->n_out;
        tagc_reducer_stats_init(&stats);
        CHECK(run, run_reducer(reducer, gradient, output, &stats) == TAGC_OK);
        CHECK(run, stats.nonfinite == (t->has_nonfinite && step == NONFINITE_STEP));
        CHECK(run, stats.nonfinite || stats.n_union == t->n);
    }
    CHECK(run, tagc_reducer_residual_elems(reducer) == 0);
    CHECK(run, tagc_comm_memory(run->comm, &held) == TAGC_OK);
    CHECK(run, held.residual_bytes == 0 && held.spare_bytes == 0);
    tagc_reducer_destroy(reducer);
}

static void run_trial(trial *t) {
    run_ranks(t->world_size, run_steps, t);
}

/* ---- bit for bit ---- */

/* In place. */
static void round_row(int format, size_t block, uint32_t seed, float *x, size_t n) {
    for (size_t at = 0; at < n && format != TAGC_FORMAT_FP32; at += block) {
        size_t m = n - at < block ? n - at : block;
        uint16_t half = oracle_scale(format, 1, x + at, m);
        for (size_t i = at; i < at + m; i++) {
            float scale = oracle_wide(half);
            uint32_t threshold = oracle_threshold(seed, (uint32_t)i);
            int integer = half ? oracle_integer(format, &threshold, scale, x[i]) : 0;
            x[i] = (float)integer * scale;
        }
    }
}

/* The shard of `owner`, as it leaves it. */
static void expect_shard(const trial *t, int step, size_t owner, size_t shard, float *sums) {
    const tagc_reducer_options *o = &t->options;
    int is_back = o->output != TAGC_OUTPUT_SHARD;
    float scale = o->op == TAGC_OP_AVG ? 1.0f / (float)t->world_size : 1.0f,
          *row = malloc(shard * sizeof *row);
    memset(sums, 0, shard * sizeof *sums);
    for (size_t rank = 0; rank < (size_t)t->world_size; rank++) {
        memcpy(row, t->gradients + row_of(t, step, (int)rank) * t->n + owner * shard, shard * sizeof *row);
        if (!is_back || rank != owner)
            round_row(o->format, (size_t)o->block,
                      oracle_seed(o->rounding_seed, (uint64_t)step + 1, (uint32_t)rank, (uint32_t)owner), row,
                      shard);
        for (size_t i = 0; i < shard; i++) sums[i] += (is_back ? 1 : scale) * row[i];
    }
    if (is_back) {
        round_row(o->result.format == -1 ? o->format : o->result.format, (size_t)o->block,
                  oracle_seed(o->rounding_seed, (uint64_t)step + 1, (uint32_t)owner, (uint32_t)owner), sums,
                  shard);
        for (size_t i = 0; i < shard; i++) sums[i] = 0 + scale * sums[i];
    }
    free(row);
}

static void assert_step(const trial *t, int step, const float *owned) {
    size_t shard = t->n / (size_t)t->world_size;
    for (size_t rank = 0; rank < (size_t)t->world_size; rank++) {
        size_t first = t->options.output == TAGC_OUTPUT_SHARD ? rank * shard : 0;
        const float *found = t->outputs + ((size_t)step * (size_t)t->world_size + rank) * t->n_out;
        for (size_t i = 0; i < t->n_out; i++)
            if (bits_of(found[i]) != bits_of(owned[first + i]))
                fail_msg("W %d, format %d, output %d, step %d, rank %zu, element %zu: %.9g, expected %.9g",
                         t->world_size, t->options.format, t->options.output, step, rank, i, (double)found[i],
                         (double)owned[first + i]);
    }
}

static void assert_as_oracle(trial *t) {
    size_t shard = t->n / (size_t)t->world_size;
    float *owned = malloc(t->n * sizeof *owned);
    run_trial(t);
    for (int step = 0; step < t->n_steps; step++) {
        for (size_t owner = 0; owner < (size_t)t->world_size; owner++)
            expect_shard(t, step, owner, shard, owned + owner * shard);
        assert_step(t, step, owned);
    }
    free(owned);
}

static const int world_sizes[] = {1, 2, 3, 4, 6, 8};
enum { N_WORLDS = REPEATS(6, 4, 3), N_VARIANTS = REPEATS(12, 12, 6) };

/* Every kind of number, output and format. */
TEST(test_bits) {
    static const int formats[] = {TAGC_FORMAT_INT4, TAGC_FORMAT_INT8, TAGC_FORMAT_FP32, TAGC_FORMAT_INT4};
    static const int result_formats[] = {-1, TAGC_FORMAT_INT8, TAGC_FORMAT_INT4, TAGC_FORMAT_FP32};
    for (int w = 0; w < N_WORLDS; w++)
        for (int variant = 0; variant < N_VARIANTS; variant++) {
            int world_size = world_sizes[w];
            random_state = (uint64_t)(w * 100 + variant);
            trial t = make_trial(world_size, (size_t[]){700, 333, 5000}[variant % 3], variant / 2 % 2,
                                 formats[variant % 4], 2);
            t.options.op = variant / 4 % 2;
            t.options.block = 16 << variant % 5;
            t.options.rounding_seed = (uint64_t)variant << 40;
            t.options.n_threads = 1 + variant % 4 / 3;
            if (t.options.output) t.options.result.format = result_formats[(variant + w) % 4];
            int is_exact =
                t.options.format == TAGC_FORMAT_FP32 && t.options.result.format <= TAGC_FORMAT_FP32;
            if (is_exact) t.options.block = 0; /* there are none */
            make_arrays(&t);
            for (size_t i = 0; i < 2 * (size_t)world_size * t.n; i++)
                t.gradients[i] = drawn((variant + w) % N_KINDS, i, (int)(i / t.n) % world_size);
            assert_as_oracle(&t);
            free_arrays(&t);
        }
}

/* NaN or Inf on one rank: NaN on all, in that step alone. */
TEST(test_nonfinite) {
    for (int output = TAGC_OUTPUT_SHARD; output <= TAGC_OUTPUT_UNIT; output++) {
        trial t = make_trial(3, 100, output, TAGC_FORMAT_INT4, 3);
        make_arrays(&t);
        t.has_nonfinite = 1;
        for (size_t i = 0; i < 9 * t.n; i++) t.gradients[i] = 1;
        t.gradients[row_of(&t, NONFINITE_STEP, 2) * t.n + 5] = output ? NAN : INFINITY;
        run_trial(&t);
        for (size_t i = 0; i < 9 * t.n_out; i++)
            assert_true(i / (3 * t.n_out) == NONFINITE_STEP ? isnan(t.outputs[i])
                                                            : fabsf(t.outputs[i] - 1) < 0.2f);
        free_arrays(&t);
    }
}

/* ---- by law ---- */

/* The variance of one value that is rounded at random. */
static double variance_of(int format, const float *block, size_t n, size_t i) {
    double scale = oracle_wide(oracle_scale(format, 1, block, n)), q = block[i] / scale, share = q - floor(q);
    return share * (1 - share) * scale * scale;
}

/* All ranks have the same gradient in all steps, so that equal roundings would add up. Errors of the mean over steps tell whether
 * it goes to the exact sum as fast as independent roundings do; errors of single steps, whether these are as large as they should
 * be.
 * Where the first roundings are coarser than the second one, they have spread its values evenly. */
static void check_law(int world_size, int output, int format, int result_format) {
    enum { SHARD = 512, BLOCK = 32 };
    trial t = make_trial(world_size, SHARD, output, format, MAX_STEPS);
    double expected = 0, single = 0, mean = 0, n_rounded = output ? world_size - 1 : world_size;
    float row[BLOCK], sums[BLOCK];
    t.options.op = TAGC_OP_SUM;
    t.options.result.format = result_format;
    t.has_one_gradient = 1;
    make_arrays(&t);
    random_state = 77;
    for (size_t i = 0; i < t.n; i++) t.gradients[i] = normal() * expf(normal());
    for (int r = 1; r < world_size; r++)
        memcpy(t.gradients + (size_t)r * t.n, t.gradients, t.n * sizeof(float));
    run_trial(&t);
    for (size_t i = 0; i < t.n_out; i++) {
        double exact = (double)t.gradients[i] * world_size, total = 0;
        if (i % BLOCK == 0)
            for (size_t j = 0; j < BLOCK; j++) {
                row[j] = t.gradients[i + j];
                sums[j] = row[j] * (float)world_size;
            }
        expected += n_rounded * variance_of(format, row, BLOCK, i % BLOCK);
        double scale = output ? oracle_wide(oracle_scale(result_format, 1, sums, BLOCK)) : 0;
        int is_spread = n_rounded > 0 && format > result_format;
        if (output)
            expected += is_spread ? scale * scale / 6 : variance_of(result_format, sums, BLOCK, i % BLOCK);
        for (int step = 0; step < MAX_STEPS; step++) {
            double error = t.outputs[(size_t)step * (size_t)world_size * t.n_out + i] - exact;
            single += error * error / MAX_STEPS;
            total += error / MAX_STEPS;
        }
        mean += total * total;
    }
    if (!(single > 0.88 * expected && single < 1.12 * expected))
        fail_msg("W %d, output %d, formats %d %d: variance %g, expected %g", world_size, output, format,
                 result_format, single, expected);
    if (!(mean * MAX_STEPS > 0.7 * expected && mean * MAX_STEPS < 1.35 * expected))
        fail_msg("W %d, output %d, formats %d %d: of the mean %g, expected %g", world_size, output, format,
                 result_format, mean, expected / MAX_STEPS);
    free_arrays(&t);
}

TEST(test_law) {
    for (int world_size = 1; world_size <= 8; world_size = world_size < 2 ? 2 : world_size + 3) {
        check_law(world_size, TAGC_OUTPUT_SHARD, TAGC_FORMAT_INT4, -1);
        check_law(world_size, TAGC_OUTPUT_UNIT, TAGC_FORMAT_INT8, TAGC_FORMAT_INT4);
        check_law(world_size, TAGC_OUTPUT_UNIT, TAGC_FORMAT_INT4, TAGC_FORMAT_INT8);
    }
    check_law(3, TAGC_OUTPUT_SHARD, TAGC_FORMAT_INT8, -1);
}

/* ---- life ---- */

/* Two steps after `n_steps`. */
static void run_two(rank_run *run, tagc_reducer *reducer, const float *gradient, float *output) {
    for (int step = 0; step < 2; step++)
        CHECK(run, run_reducer(reducer, gradient, output + 64 * step, NULL) == TAGC_OK);
}

static void life_body(rank_run *run) {
    float gradient[128], first[128], second[128];
    uint64_t n_bytes;
    char state[256];
    tagc_reducer *reducer, *other;
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.n_elems = 128;
    options.residual = TAGC_RESIDUAL_NONE; /* by default every value, in 4 bits */
    options.tag = 7;                       /* one unit, twice */
    for (size_t i = 0; i < 128; i++) gradient[i] = random_gradient(3, run->rank, i);
    if (!CHECK(run, tagc_reducer_create(run->comm, &options, &reducer) == TAGC_OK)) return;
    CHECK(run, tagc_reducer_get_residual(reducer, first, 128) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_scale_residual(reducer, 0.5) == TAGC_OK); /* of nothing */
    CHECK(run, tagc_reducer_set_sparsity(reducer, 0.5) == TAGC_ERR_UNSUPPORTED);
    CHECK(run, strstr(tagc_last_error(), "sparsity is 0.5, must be 0 where residual is none"));
    options.sparsity = 0.5;
    CHECK(run, tagc_reducer_change(reducer, &options) == TAGC_ERR_UNSUPPORTED);
    options.sparsity = -1;
    options.residual = -1;
    CHECK(run, tagc_reducer_change(reducer, &options) == TAGC_ERR_ARGUMENT);
    CHECK(run, strstr(tagc_last_error(), "residual is the default, must be none"));
    options.residual = TAGC_RESIDUAL_NONE;
    n_bytes = tagc_reducer_state_bytes(reducer);
    run_two(run, reducer, gradient, first);
    CHECK(run, n_bytes == 64 && tagc_reducer_state_save(reducer, state, n_bytes) == TAGC_OK);
    run_two(run, reducer, gradient, first);
    CHECK(run, memcmp(first, first + 64, 64 * sizeof *first) != 0); /* another step rounds otherwise */
    CHECK(run, tagc_reducer_create(run->comm, &options, &other) == TAGC_OK);
    CHECK(run, tagc_reducer_state_load(other, state, n_bytes) == TAGC_OK && tagc_reducer_steps(other) == 2);
    run_two(run, other, gradient, second);
    CHECK(run, memcmp(first, second, sizeof first) == 0); /* as in a run that goes on */
    options.format = TAGC_FORMAT_INT8;
    CHECK(run, tagc_reducer_change(other, &options) == TAGC_OK);
    run_two(run, other, gradient, second);
    for (size_t i = 0; i < 64; i++) {
        size_t at = (size_t)run->rank * 64 + i;
        float exact = (random_gradient(3, 0, at) + random_gradient(3, 1, at)) / 2;
        CHECK(run, fabsf(second[i] - exact) < 1e-2f / 64 && fabsf(first[i] - exact) < 1e-2f / 4);
    }
    tagc_reducer_destroy(reducer);
    tagc_reducer_destroy(other);
}

TEST(test_life) {
    run_ranks(2, life_body, NULL);
}

/* ---- gathers ---- */

enum { GATHERED = 1000, GATHERS = 50, GATHER_BLOCK = 256 };

static float given(int rank, size_t i) {
    return i == 999 && rank == 1 ? INFINITY : random_gradient(8, rank, i);
}

/* Bits as plain code rounds them, on all ranks; a block with Inf is NaN; and the mean over gathers is right. */
static void gather_body(rank_run *run) {
    size_t W = (size_t)run->world_size, n = W * GATHERED;
    float *own = malloc(GATHERED * sizeof *own), *full = malloc(n * sizeof *full), row[GATHERED];
    double *means = calloc(n, sizeof *means), single = 0, mean = 0, expected = 0;
    tagc_gatherer *gatherer;
    tagc_gatherer_options options;
    tagc_gatherer_options_init(&options);
    options.n_elems = n;
    options.format = TAGC_FORMAT_INT8;
    options.rounding = TAGC_ROUNDING_STOCHASTIC;
    options.rounding_seed = 5 + (uint64_t)run->rank; /* ranks may differ */
    options.n_threads = 2;
    for (size_t i = 0; i < GATHERED; i++) own[i] = given(run->rank, i);
    if (!CHECK(run, tagc_gatherer_create(run->comm, &options, &gatherer) == TAGC_OK)) return;
    for (int g = 0; g < GATHERS; g++) {
        CHECK(run, begin_gatherer(gatherer, own, full) == TAGC_OK && tagc_gatherer_end(gatherer) == TAGC_OK);
        for (size_t r = 0; r < W; r++) {
            uint32_t seed = oracle_seed(5 + r, (uint64_t)g + 1, (uint32_t)r, (uint32_t)r);
            for (size_t i = 0; i < GATHERED; i++) row[i] = given((int)r, i);
            size_t n_finite = r == 1 ? 3 * GATHER_BLOCK : GATHERED;
            for (size_t i = n_finite; i < GATHERED; i++) CHECK(run, isnan(full[r * GATHERED + i]));
            round_row(TAGC_FORMAT_INT8, GATHER_BLOCK, seed, row, n_finite);
            for (size_t i = 0; i < n_finite; i++) {
                CHECK(run, full[r * GATHERED + i] == row[i]);
                means[r * GATHERED + i] += (double)row[i] / GATHERS;
                double error = (double)row[i] - (double)given((int)r, i);
                single += error * error / GATHERS;
            }
        }
    }
    for (size_t i = 0; i < n; i++) {
        size_t at = i % GATHERED, r = i / GATHERED, first = at / GATHER_BLOCK * GATHER_BLOCK;
        size_t m = GATHERED - first < GATHER_BLOCK ? GATHERED - first : GATHER_BLOCK;
        if (r == 1 && first == 3 * GATHER_BLOCK) continue;
        for (size_t j = 0; j < m; j++) row[j] = given((int)r, first + j);
        expected += variance_of(TAGC_FORMAT_INT8, row, m, at - first);
        mean += (means[i] - (double)given((int)r, at)) * (means[i] - (double)given((int)r, at));
    }
    CHECK(run, single > 0.9 * expected && single < 1.1 * expected);
    CHECK(run, mean * GATHERS > 0.75 * expected && mean * GATHERS < 1.3 * expected);
    uint64_t sent[TAGC_N_LEGS];
    tagc_comm_bytes(run->comm, sent, NULL, TAGC_N_LEGS);
    CHECK(run, sent[TAGC_LEG_GATHER] == GATHERS * (W - 1) * (GATHERED + 4 * 2 + 16));
    tagc_gatherer_destroy(gatherer);
    free(own), free(full), free(means);
}

static void refusals_body(rank_run *run) {
    tagc_gatherer *gatherer;
    for (int variant = 0; variant < 3; variant++) {
        tagc_gatherer_options options;
        tagc_gatherer_options_init(&options);
        options.n_elems = 64;
        options.rounding = variant < 2 ? TAGC_ROUNDING_STOCHASTIC : 2;
        options.format = variant == 1 ? TAGC_FORMAT_INT8 : TAGC_FORMAT_BF16;
        options.delta = variant == 1;
        CHECK(run, tagc_gatherer_create(run->comm, &options, &gatherer) ==
                       (variant < 2 ? TAGC_ERR_UNSUPPORTED : TAGC_ERR_ARGUMENT));
        const char *texts[] = {"only whole parameters in int8 are rounded so: format is bf16 and delta 0",
                               "only whole parameters in int8 are rounded so: format is int8 and delta 1",
                               "rounding is 2, must be nearest (0) or stochastic (1)"};
        CHECK(run, strstr(tagc_last_error(), texts[variant]) && !gatherer);
    }
}

TEST(test_gathers) {
    for (int world_size = 1; world_size <= 4; world_size++) run_ranks(world_size, gather_body, NULL);
    run_ranks(2, refusals_body, NULL);
}
