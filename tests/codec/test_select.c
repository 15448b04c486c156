/* Every version of selection, on every number of threads, must give the reference's bits: on gradients as
 * they are and on arrays made to mislead the sample, the bounds or the ends of loops. The reference itself is
 * checked against a sort. */
#define RANDOM_SEED 1
#include "../bits.h"
#include "../repeats.h"
#include "../test.h"
#include "codec/select.h"
#include "codec/select_kernels.h"
#include "core/memory.h"
#include "random.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "select_reference.h"

enum {
    N_LARGE = REPEATS(700000, 200000, 100000),
    N_SMALL_TRIALS = REPEATS(2000, 200, 12),
    N_MIDDLE_TRIALS = REPEATS(400, 60, 4),
    N_SAMPLED = REPEATS(2, 2, 1),
    N_PREDICTIONS = REPEATS(48, 10, 2)
};
enum { GUARD = 64, MAX_OFFSET = 20 };

static float random_heavy(void) {
    return random_normal() * expf(random_normal());
}

/* ---- inputs ---- */

typedef void (*filler)(float *gradient, float *residual, size_t n);

static void fill_heavy(float *gradient, float *residual, size_t n) {
    for (size_t i = 0; i < n; i++) {
        gradient[i] = random_heavy();
        residual[i] = 0.5f * random_heavy();
    }
}

static void fill_constant(float *gradient, float *residual, size_t n) {
    for (size_t i = 0; i < n; i++) {
        gradient[i] = random_below(2) ? 1.5f : -1.5f;
        residual[i] = -0.0f;
    }
}

static void fill_few_levels(float *gradient, float *residual, size_t n) {
    for (size_t i = 0; i < n; i++) {
        gradient[i] = (float)((int)random_below(7) - 3);
        residual[i] = random_below(2) ? 0.0f : -0.0f;
    }
}

static void fill_zeros(float *gradient, float *residual, size_t n) {
    for (size_t i = 0; i < n; i++) {
        gradient[i] = random_below(2) ? 0.0f : -0.0f;
        residual[i] = random_below(2) ? 0.0f : -0.0f;
    }
}

static void fill_few_non_zeros(float *gradient, float *residual, size_t n) {
    fill_zeros(gradient, residual, n);
    for (size_t i = 0; i < n / 500 + 1 && n; i++) gradient[random_below(n)] = random_normal();
}

static void fill_cancelling(float *gradient, float *residual, size_t n) {
    fill_heavy(gradient, residual, n);
    for (size_t i = 0; i < n; i++)
        if (random_below(4)) residual[i] = -gradient[i];
}

static void fill_denormals(float *gradient, float *residual, size_t n) {
    for (size_t i = 0; i < n; i++) {
        gradient[i] = float_of((uint32_t)random_below(1u << (1 + random_below(24))));
        residual[i] = float_of(0x80000000u | (uint32_t)random_below(1000));
    }
}

static void fill_sorted(float *gradient, float *residual, size_t n) {
    int down = (int)random_below(2);
    for (size_t i = 0; i < n; i++) {
        gradient[i] = (float)(down ? n - i : i) * 1e-3f;
        residual[i] = -0.0f;
    }
}

/* Large where a fixed stride of lines would always, or never, look. */
static void fill_periodic(float *gradient, float *residual, size_t n) {
    size_t period = (size_t)16 << random_below(9), phase = random_below(period);
    for (size_t i = 0; i < n; i++) {
        gradient[i] = random_normal() * ((i + phase) % period < 16 ? 100.0f : 1.0f);
        residual[i] = 0.0f;
    }
}

/* One run holds all that is large; its length changes from line to a third of the array. */
static void fill_clumped(float *gradient, float *residual, size_t n) {
    fill_heavy(gradient, residual, n);
    size_t length = n ? random_below(n / 3 + 1) >> random_below(12) : 0,
           begin = n ? random_below(n - length) : 0;
    for (size_t i = begin; i < begin + length; i++) gradient[i] *= 1000;
}

static void fill_rows(float *gradient, float *residual, size_t n) {
    float scale = 1;
    for (size_t i = 0; i < n; i++) {
        if (i % 768 == 0) scale = expf(2 * random_normal());
        gradient[i] = scale * random_normal();
        residual[i] = 0;
    }
}

/* Rows so long that a few blocks hold most of what is large, and with them a few threads. */
static void fill_long_rows(float *gradient, float *residual, size_t n) {
    float scale = 1;
    for (size_t i = 0; i < n; i++) {
        if (i % 16384 == 0) scale = expf(2 * random_normal());
        gradient[i] = scale * random_normal();
        residual[i] = 0;
    }
}

static void fill_any_finite_bits(float *gradient, float *residual, size_t n) {
    for (size_t i = 0; i < n; i++) {
        do gradient[i] = float_of((uint32_t)random_u64());
        while (!(fabsf(gradient[i]) < 1.7e38f));
        do residual[i] = float_of((uint32_t)random_u64());
        while (!(fabsf(residual[i]) < 1.7e38f));
    }
}

static const filler fillers[] = {
    fill_heavy,      fill_constant,  fill_few_levels,      fill_zeros,    fill_few_non_zeros,
    fill_cancelling, fill_denormals, fill_sorted,          fill_periodic, fill_clumped,
    fill_rows,       fill_long_rows, fill_any_finite_bits,
};
enum { N_FILLERS = sizeof fillers / sizeof fillers[0] };

/* ---- one comparison ---- */

typedef struct fixture {
    size_t n_max;
    float *gradient, *residual, *expected_residual, *expected_values;
    uint32_t *expected_indices;
    tagc_pool *pools[4]; /* NULL, 2, 3, 8 threads */
} fixture;

static void *must_alloc(size_t n, size_t item_bytes) {
    void *memory = malloc((n + 1) * item_bytes);
    assert_non_null(memory);
    return memory;
}

static fixture fixture_make(size_t n_max) {
    fixture f = {.n_max = n_max,
                 .gradient = must_alloc(n_max, 4),
                 .residual = must_alloc(n_max, 4),
                 .expected_residual = must_alloc(n_max, 4),
                 .expected_values = must_alloc(n_max, 4),
                 .expected_indices = must_alloc(n_max, 4)};
    const int n_threads[] = {1, 2, 3, 8};
    for (int i = 1; i < 4; i++) assert_int_equal(tagc_pool_create(n_threads[i], &f.pools[i]), TAGC_OK);
    return f;
}

static void fixture_free(fixture *f) {
    free(f->gradient);
    free(f->residual);
    free(f->expected_residual);
    free(f->expected_values);
    free(f->expected_indices);
    for (int i = 1; i < 4; i++) tagc_pool_destroy(f->pools[i]);
}

static const unsigned char guard_byte = 0xa5;

static void *guarded(size_t n, size_t item_bytes, size_t offset_bytes, char **block) {
    size_t n_bytes = n * item_bytes + offset_bytes + 2 * GUARD;
    *block = aligned_alloc(64, (n_bytes + 63) / 64 * 64);
    assert_non_null(*block);
    memset(*block, guard_byte, n_bytes);
    return *block + GUARD + offset_bytes;
}

static void free_guarded(char *block, size_t n, size_t item_bytes, size_t offset_bytes) {
    for (size_t i = 0; i < GUARD; i++) {
        assert_int_equal((unsigned char)block[i], guard_byte);
        assert_int_equal((unsigned char)block[GUARD + offset_bytes + n * item_bytes + i], guard_byte);
    }
    free(block);
}

/* Runs `kernels` on f->gradient, f->residual and compares with f->expected_*. Arrays lie exactly in their
 * blocks, at odd offsets, so that any step outside is seen. */
static int run_and_compare(const fixture *f, const tagc_select_kernels *kernels, tagc_pool *pool, size_t n,
                           size_t k, int in_place, const tagc_selection *expected) {
    size_t offset = 4 * random_below(MAX_OFFSET);
    size_t scratch_bytes = tagc_select_scratch_bytes(n, k, tagc_pool_n_threads(pool));
    char *blocks[6];
    float *gradient = guarded(n, 4, offset, &blocks[0]);
    float *residual_in = guarded(n, 4, offset, &blocks[1]);
    float *residual_out = guarded(n, 4, offset, &blocks[2]);
    uint32_t *indices = guarded(k, 4, offset, &blocks[3]);
    float *values = guarded(k, 4, offset, &blocks[4]);
    void *scratch = guarded(scratch_bytes, 1, 0, &blocks[5]);
    memcpy(gradient, f->gradient, n * 4);
    memcpy(residual_in, f->residual, n * 4);
    if (in_place) memcpy(residual_out, f->residual, n * 4);

    tagc_selection result;
    int leave = (int)random_below(2);
    tagc_select_with(kernels, gradient, in_place ? residual_out : residual_in, residual_out, leave, n, k,
                     indices, values, scratch, pool, &result);
    assert_int_equal(result.nonfinite, expected->nonfinite);
    if (!expected->nonfinite) {
        assert_int_equal(result.n_sent, expected->n_sent);
        assert_int_equal(bits_of(result.max_abs), bits_of(expected->max_abs));
        assert_memory_equal(indices, f->expected_indices, result.n_sent * 4);
        assert_memory_equal(values, f->expected_values, result.n_sent * 4);
        for (size_t i = 0; leave && i < result.n_sent; i++) { /* it is there, and then as if it were not */
            uint32_t left = bits_of(residual_out[indices[i]]), value = bits_of(values[i]);
            assert_int_equal(left, value << 1 ? value : bits_of(TAGC_ZERO_RESIDUAL));
            residual_out[indices[i]] = TAGC_ZERO_RESIDUAL;
        }
        assert_memory_equal(residual_out, f->expected_residual, n * 4);
    }
    assert_memory_equal(gradient, f->gradient, n * 4);
    assert_memory_equal(residual_in, f->residual, n * 4);
    free_guarded(blocks[0], n, 4, offset);
    free_guarded(blocks[1], n, 4, offset);
    free_guarded(blocks[2], n, 4, offset);
    free_guarded(blocks[3], k, 4, offset);
    free_guarded(blocks[4], k, 4, offset);
    free_guarded(blocks[5], scratch_bytes, 1, 0);
    return result.n_passes;
}

static tagc_selection expect(const fixture *f, size_t n, size_t k) {
    tagc_selection expected;
    select_reference(f->gradient, f->residual, f->expected_residual, n, k, f->expected_indices,
                     f->expected_values, &expected);
    return expected;
}

static void compare_all(const fixture *f, size_t n, size_t k) {
    tagc_selection expected = expect(f, n, k);
    const tagc_select_kernels *kernels[TAGC_SELECT_MAX_KERNELS];
    size_t n_kernels = tagc_select_available(kernels);
    const uint64_t here = random_state;
    for (size_t i = 0; i < n_kernels; i++) {
        random_state = here;
        run_and_compare(f, kernels[i], f->pools[random_below(4)], n, k, (int)random_below(2), &expected);
    }
}

static size_t random_k(size_t n) {
    const double sparsities[] = {0, 0.05, 0.5, 0.8, 0.9, 0.9875, 0.9999, 1};
    size_t choice = random_below(10);
    return choice < 8 ? tagc_select_count(n, sparsities[choice]) : random_below(n + 1);
}

/* ---- tests ---- */

typedef struct ranked {
    uint32_t bits, index;
} ranked;

static int by_magnitude(const void *a, const void *b) {
    const ranked *x = a, *y = b;
    if (x->bits != y->bits) return x->bits > y->bits ? -1 : 1;
    return (x->index > y->index) - (x->index < y->index);
}

TEST(reference_agrees_with_a_sort) {
    HAS_ONE_THREAD();
    enum { N = 300 };
    fixture f = fixture_make(N);
    for (int trial = 0; trial < 400; trial++) {
        random_begin(0, (uint64_t)trial);
        size_t n = random_below(N), k = random_k(n), n_expected = 0;
        fillers[random_below(N_FILLERS)](f.gradient, f.residual, n);
        ranked order[N];
        unsigned char sent[N] = {0};
        for (size_t i = 0; i < n; i++)
            order[i] = (ranked){bits_of(f.gradient[i] + f.residual[i]) & 0x7fffffff, (uint32_t)i};
        qsort(order, n, sizeof order[0], by_magnitude);
        for (size_t j = 0; j < k; j++) sent[order[j].index] = order[j].bits != 0 || k == n;

        tagc_selection result = expect(&f, n, k);
        assert_false(result.nonfinite);
        for (size_t i = 0; i < n; i++) {
            float acc = f.gradient[i] + f.residual[i];
            if (sent[i]) {
                assert_int_equal(f.expected_indices[n_expected], i);
                assert_int_equal(bits_of(f.expected_values[n_expected++]), bits_of(acc));
            }
            float left = sent[i] || acc == 0 ? -0.0f : acc;
            assert_int_equal(bits_of(f.expected_residual[i]), bits_of(left));
        }
        assert_int_equal(result.n_sent, n_expected);
        if (n) assert_int_equal(bits_of(result.max_abs), order[0].bits);
    }
    fixture_free(&f);
}

TEST(small_arrays) {
    fixture f = fixture_make(400);
    for (int trial = 0; trial < N_SMALL_TRIALS; trial++) {
        random_begin(1, (uint64_t)trial);
        size_t n = random_below(trial % 2 ? 40 : 400);
        fillers[trial % N_FILLERS](f.gradient, f.residual, n);
        compare_all(&f, n, random_k(n));
    }
    fixture_free(&f);
}

/* From arrays that are too small to sample to those whose lines are sampled, with bands small and large. */
TEST(middling_arrays) {
    enum { MOST = 60000 };
    fixture f = fixture_make(MOST);
    for (int trial = 0; trial < N_MIDDLE_TRIALS; trial++) {
        random_begin(10, (uint64_t)trial);
        size_t n = 200 + random_below(trial % 2 ? 4000 : MOST - 200);
        fillers[trial % N_FILLERS](f.gradient, f.residual, n);
        compare_all(&f, n, random_k(n));
    }
    fixture_free(&f);
}

TEST(sampled_arrays) {
    fixture f = fixture_make(N_LARGE);
    for (int round = 0; round < N_SAMPLED; round++)
        for (size_t i = 0; i < N_FILLERS; i++) {
            random_begin(2, (size_t)round * N_FILLERS + i);
            size_t n = 8192 + random_below(N_LARGE - 8192);
            fillers[i](f.gradient, f.residual, n);
            compare_all(&f, n, random_k(n));
            compare_all(&f, n, tagc_select_count(n, round ? 0.9 : 0.9875));
        }
    fixture_free(&f);
}

/* Beyond this size the residual is written around the cache. */
TEST(arrays_larger_than_the_cache) {
    const size_t n = ((size_t)1 << 21) + 12345;
    fixture f = fixture_make(n);
    random_begin(3, 0);
    fill_rows(f.gradient, f.residual, n);
    compare_all(&f, n, tagc_select_count(n, 0.9875));
    fill_few_levels(f.gradient, f.residual, n);
    compare_all(&f, n, n / 20);
    fixture_free(&f);
}

/* Passes of every version, which all predict alike. */
static int passes_of_all(const fixture *f, tagc_pool *pool, size_t n, size_t k, int in_place) {
    tagc_selection expected = expect(f, n, k);
    const tagc_select_kernels *kernels[TAGC_SELECT_MAX_KERNELS];
    size_t n_kernels = tagc_select_available(kernels);
    const uint64_t here = random_state;
    int n_passes = 0;
    for (size_t i = 0; i < n_kernels; i++) {
        random_state = here;
        int n_here = run_and_compare(f, kernels[i], pool, n, k, in_place, &expected);
        assert_true(i == 0 || n_here == n_passes);
        n_passes = n_here;
    }
    return n_passes;
}

/* The other tests pass with a prediction that never holds, or always; this one watches which path was taken. Bounds
 * of four standard deviations miss once in 16,000 trials where the sampled lines that hold what is large are many, and
 * more often where they are a dozen. If 1 trial in 1,000 misses, 3 of 48 do once in 60,000 choices of the seed. */
TEST(prediction_holds_where_it_can) {
    const filler predictable[] = {fill_heavy, fill_rows, fill_few_non_zeros, fill_cancelling, fill_long_rows};
    const double sparsities[] = {0.5, 0.8, 0.9, 0.95, 0.97, 0.9875};
    fixture f = fixture_make(N_LARGE);
    int n_two_passes = 0;
    for (int trial = 0; trial < N_PREDICTIONS; trial++) {
        random_begin(4, (uint64_t)trial);
        predictable[trial % 5](f.gradient, f.residual, N_LARGE);
        size_t k = tagc_select_count(N_LARGE, sparsities[trial % 6]);
        n_two_passes += passes_of_all(&f, f.pools[trial / 2 % 4], N_LARGE, k, 0) - 1;
    }
    assert_in_range(n_two_passes, 0, 2);
    fill_constant(f.gradient, f.residual, N_LARGE);
    assert_int_equal(passes_of_all(&f, f.pools[1], N_LARGE, 1000, 1), 2);
    fixture_free(&f);
}

/* Fragments of a few thousand elements, of which single elements are sampled: wherever the large ones lie, the sample is as
 * one of independent elements. The bounds of a fragment miss in 1 of 1,000 at most. */
TEST(prediction_holds_for_small_fragments) {
    HAS_ONE_THREAD();
    const filler predictable[] = {fill_heavy, fill_rows, fill_clumped, fill_cancelling, fill_periodic};
    const double sparsities[] = {0.5, 0.9, 0.95, 0.9875, 0.999};
    enum { MOST = 20000 };
    fixture f = fixture_make(MOST);
    int n_two_passes = 0;
    for (int trial = 0; trial < 6 * N_PREDICTIONS; trial++) {
        random_begin(11, (uint64_t)trial);
        size_t n = 300 + random_below(trial % 2 ? MOST - 300 : 4096 - 300);
        predictable[trial % 5](f.gradient, f.residual, n);
        n_two_passes += passes_of_all(&f, NULL, n, tagc_select_count(n, sparsities[trial / 5 % 5]), 0) - 1;
    }
    assert_in_range(n_two_passes, 0, 2);
    for (size_t period = 8; period <= 32;
         period *= 2) { /* columns that every 512th part of the array begins with */
        size_t n = 512 * period;
        for (size_t i = 0; i < n; i++) {
            f.gradient[i] = random_normal() * (i % period < period / 8 ? 100.0f : 1.0f);
            f.residual[i] = TAGC_ZERO_RESIDUAL;
        }
        assert_int_equal(passes_of_all(&f, NULL, n, n / 20, 0), 1);
    }
    fixture_free(&f);
}

/* Values so close together that a bucket of the sample holds a third of k: the band is a bucket wide at
 * least, and a large sample's margin leaves less room than that. */
TEST(band_has_room_for_a_bucket) {
    HAS_ONE_THREAD();
    const size_t n = (size_t)1 << 21;
    fixture f = fixture_make(n);
    random_begin(5, 0);
    for (size_t i = 0; i < n; i++) {
        float magnitude = 1.0f + 0.05f * (float)random_below(1 << 20) / (float)(1 << 20);
        f.gradient[i] = i % 2 ? magnitude : -magnitude;
        f.residual[i] = TAGC_ZERO_RESIDUAL;
    }
    assert_int_equal(passes_of_all(&f, NULL, n, n / 2, 0), 1);
    fixture_free(&f);
}

TEST(non_finite_is_seen_anywhere) {
    const uint32_t bad_bits[] = {0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001, 0x7f800001};
    fixture f = fixture_make(100000);
    for (int trial = 0; trial < REPEATS(200, 200, 40); trial++) {
        random_begin(6, (uint64_t)trial);
        size_t n = 1 + random_below(trial % 10 ? 100 : 100000), at = random_below(n);
        fill_heavy(f.gradient, f.residual, n);
        if (trial % 3 == 0)
            f.residual[at] = float_of(bad_bits[random_below(5)]);
        else if (trial % 3 == 1)
            f.gradient[at] = float_of(bad_bits[random_below(5)]);
        else
            f.gradient[at] = f.residual[at] = 3e38f; /* finite, their sum is not */
        compare_all(&f, n, random_k(n));
    }
    fill_any_finite_bits(f.gradient, f.residual, 1000);
    f.gradient[77] = 3.402823466e38f;
    f.residual[77] = 0;
    compare_all(&f, 1000, 10); /* the largest finite value is finite */
    assert_false(expect(&f, 1000, 10).nonfinite);
    fixture_free(&f);
}

/* What was sent and what is left make up what came in, and with nothing left a step returns the gradient's
 * bits. */
TEST(nothing_is_lost_over_steps) {
    HAS_ONE_THREAD();
    enum { N = 50000 };
    size_t k = tagc_select_count(N, 0.95);
    float *gradient = must_alloc(N, 4), *residuals[2] = {must_alloc(N, 4), must_alloc(N, 4)};
    float *values = must_alloc(k, 4), *acc = must_alloc(N, 4);
    uint32_t *indices = must_alloc(k, 4);
    void *scratch;
    assert_int_equal(tagc_memory_create(tagc_select_scratch_bytes(N, k, 1), "scratch", &scratch), TAGC_OK);
    for (size_t i = 0; i < N; i++) residuals[0][i] = TAGC_ZERO_RESIDUAL;
    for (int step = 0; step < 10; step++) {
        random_begin(7, (uint64_t)step);
        float *before = residuals[step % 2], *after = residuals[(step + 1) % 2];
        for (size_t i = 0; i < N; i++) {
            gradient[i] = step == 0 && i % 3 == 0 ? -0.0f : random_heavy();
            acc[i] = gradient[i] + before[i];
            if (step == 0) assert_int_equal(bits_of(acc[i]), bits_of(gradient[i]));
        }
        tagc_selection result;
        tagc_select(gradient, before, after, N, k, indices, values, scratch, NULL, &result);
        assert_int_equal(result.n_sent, k);
        for (size_t j = 0; j < k; j++) {
            assert_int_equal(bits_of(after[indices[j]]), bits_of(TAGC_ZERO_RESIDUAL));
            after[indices[j]] = values[j];
        }
        for (size_t i = 0; i < N; i++) assert_true(after[i] == acc[i]);
        for (size_t j = 0; j < k; j++) after[indices[j]] = TAGC_ZERO_RESIDUAL;
    }
    tagc_memory_destroy(scratch);
    free(gradient);
    free(residuals[0]);
    free(residuals[1]);
    free(values);
    free(acc);
    free(indices);
}

TEST(count_is_the_largest_allowed) {
    HAS_ONE_THREAD();
    assert_int_equal(tagc_select_count(10, 0.9), 1);
    assert_int_equal(tagc_select_count(80, 0.9875), 1);
    assert_int_equal(tagc_select_count(79, 0.9875), 1); /* or none of them would ever be sent */
    assert_int_equal(tagc_select_count(1, 0.5), 1);
    assert_int_equal(tagc_select_count(38633472, 0.9875), 482918); /* 1.25 % is 482918.4 */
    assert_int_equal(tagc_select_count(0, 0.5), 0);
    assert_int_equal(tagc_select_count(7, 0), 7);
    assert_int_equal(tagc_select_count(7, 1), 0);
    assert_int_equal(tagc_select_count(3, 1e-300), 2);
    for (int trial = 0; trial < 20000; trial++) {
        random_begin(8, (uint64_t)trial);
        size_t n = 1 + random_below(trial % 2 ? 200 : 4000000000u);
        double sparsity =
            trial % 3 ? (double)random_below(10001) / 10000 : (double)(random_u64() >> 11) * 0x1p-53;
        size_t k = tagc_select_count(n, sparsity);
        assert_true(k <= n);
        assert_true(k == 1 || (double)(n - k) / (double)n >= sparsity);
        assert_true(k > 0 || sparsity == 1);
        assert_true(k == n || (double)(n - k - 1) / (double)n < sparsity);
    }
}

/* In place, an array larger than the cache has only its losers written around it. */
TEST(losers_go_back_around_the_cache) {
    const size_t n = ((size_t)1 << 21) + 12345, k = tagc_select_count(n, 0.9);
    fixture f = fixture_make(n);
    random_begin(9, 0);
    fill_heavy(f.gradient, f.residual, n);
    tagc_selection expected = expect(&f, n, k);
    const tagc_select_kernels *kernels[TAGC_SELECT_MAX_KERNELS];
    size_t n_kernels = tagc_select_available(kernels);
    for (size_t i = 0; i < n_kernels; i++)
        for (int in_place = 0; in_place < 2; in_place++)
            run_and_compare(&f, kernels[i], f.pools[in_place], n, k, in_place, &expected);
    fixture_free(&f);
}
