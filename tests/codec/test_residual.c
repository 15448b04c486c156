/* Stored residuals: the layout and every bit as residual.h defines them, by an oracle in doubles that shares no code; rounding without
 * a bias; and rows of any bytes. */
#define RANDOM_SEED 37
#include "../bits.h"
#include "../test.h"
#include "codec/residual.h"
#include "core/memory.h"
#include "random.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const int formats[] = {TAGC_FORMAT_FP32, TAGC_FORMAT_INT8, TAGC_FORMAT_INT4};
enum { N_FORMATS = 3, MOST = 5000 };

static void *bytes_of(size_t n_bytes) {
    void *memory = malloc(n_bytes ? n_bytes : 1);
    assert_non_null(memory);
    memset(memory, 0xa5, n_bytes);
    return memory;
}

/* ---- the oracle ---- */

static size_t block_of(int format) {
    return format == TAGC_FORMAT_INT8 ? 128 : 32;
}

static size_t in_lines(size_t n_bytes) {
    return (n_bytes + 63) / 64 * 64;
}

static size_t expected_bytes(int format, size_t n) {
    if (format == TAGC_FORMAT_FP32) return 4 * n;
    size_t n_blocks = (n + block_of(format) - 1) / block_of(format);
    return in_lines(n_blocks) + in_lines(format == TAGC_FORMAT_INT8 ? n : (n + 1) / 2);
}

/* The hash as the header writes it, in 64 bits. */
static uint32_t oracle_byte(uint32_t seed, size_t i) {
    uint64_t x = (seed + i / 4) % 0x100000000u;
    x = (x ^ x / 65536) * 0x21f0aaad % 0x100000000u;
    x = (x ^ x / 32768) * 0x735a2d97 % 0x100000000u;
    x = x ^ x / 32768;
    for (size_t j = 0; j < i % 4; j++) x /= 256;
    return (uint32_t)(x % 256);
}

/* The bytes of a hash from that of the value down and round, as a share of 1. */
static double oracle_threshold(uint32_t seed, size_t i) {
    double threshold = 0;
    for (int k = 0; k < 4; k++)
        threshold += ldexp(oracle_byte(seed, i / 4 * 4 + (i + 4 - (size_t)k) % 4), -8 * (k + 1));
    return threshold;
}

static int oracle_exponent(int format, const float *x, size_t n) {
    double largest = 0, most = format == TAGC_FORMAT_INT8 ? 127 : 7;
    int exponent = format == TAGC_FORMAT_INT8 ? 24 : 28, top = format == TAGC_FORMAT_INT8 ? 248 : 252;
    for (size_t i = 0; i < n; i++) largest = fmax(largest, fabs((double)x[i]));
    while (exponent < top && largest > most * ldexp(1, exponent - 127)) exponent++;
    return exponent;
}

/* Quotient and threshold have 24 or 28 bits after the point. */
static double oracle_code(int format, double x, int exponent, uint32_t seed, size_t i) {
    int n_bits = format == TAGC_FORMAT_INT8 ? 24 : 28;
    double most = format == TAGC_FORMAT_INT8 ? 127 : 7,
           quotient = fmin(fmax(-ldexp(x, 127 - exponent), -most), most);
    double threshold = floor(ldexp(oracle_threshold(seed, i), n_bits));
    return floor(ldexp(trunc(ldexp(quotient, n_bits)) + threshold, -n_bits));
}

/* What value i of x (n) becomes. */
static float oracle(int format, const float *x, size_t n, size_t i, uint32_t seed) {
    if (format == TAGC_FORMAT_FP32) return x[i] == 0 ? -0.0f : x[i];
    size_t begin = i / block_of(format) * block_of(format), end = begin + block_of(format);
    int exponent = oracle_exponent(format, x + begin, (end < n ? end : n) - begin);
    double code = oracle_code(format, x[i], exponent, seed, i);
    return code == 0 ? -0.0f : (float)(-code * ldexp(1, exponent - 127));
}

/* ---- inputs ---- */

enum { NORMAL, HEAVY, ZEROS, DENORMALS, HUGE_ONES, POWERS, ONE_LARGE, N_FILLS };

static void fill(int kind, float *x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        x[i] = random_normal();
        if (kind == HEAVY) x[i] *= expf(3 * random_normal());
        if (kind == ZEROS) x[i] = random_below(2) ? 0.0f : -0.0f;
        if (kind == DENORMALS) x[i] = float_of((uint32_t)random_below(1u << (1 + random_below(25))));
        if (kind == HUGE_ONES) x[i] = copysignf(FLT_MAX / (float)(1 + random_below(3)), x[i]);
        if (kind == POWERS)
            x[i] = copysignf(ldexpf((float)(126 + random_below(3)), (int)random_below(3)), x[i]);
        if (kind == ONE_LARGE && i == n / 2) x[i] = 1e30f;
    }
}

/* ---- tests ---- */

static void check_row(int format, const float *x, size_t n, uint32_t seed) {
    size_t n_bytes = expected_bytes(format, n);
    assert_int_equal(tagc_residual_bytes(format, n), n_bytes);
    void *row = bytes_of(n_bytes), *again = bytes_of(n_bytes);
    float *out = bytes_of(n * sizeof *out);
    tagc_residual_write(format, n, x, 0, n, seed, row);
    tagc_residual_read(format, n, row, 0, n, out);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(bits_of(out[i]), bits_of(oracle(format, x, n, i, seed)));
        if (format != TAGC_FORMAT_FP32) assert_int_equal(bits_of(out[i]) & 0xffff, 0); /* a bf16 */
    }
    assert_int_equal(tagc_residual_check(format, n, row), TAGC_OK);
    /* in pieces, from the last to the first, as threads may */
    for (size_t at = (n - 1) / 256 * 256 + 256; at > 0;) {
        at -= 256;
        tagc_residual_write(format, n, x + at, at, n - at < 256 ? n - at : 256, seed, again);
    }
    assert_memory_equal(row, again, n_bytes);
    /* what was read is written again without loss, whatever the seed */
    tagc_residual_write(format, n, out, 0, n, seed + 1, again);
    float *second = bytes_of(n * sizeof *second);
    tagc_residual_read(format, n, again, 0, n, second);
    assert_memory_equal(out, second, n * sizeof *out);
    free(row), free(again), free(out), free(second);
}

TEST(test_every_bit) {
    static float x[MOST];
    static const size_t lengths[] = {1, 31, 32, 33, 127, 128, 129, 255, 1000, 4096, MOST};
    for (int f = 0; f < N_FORMATS; f++)
        for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++)
            for (int kind = 0; kind < N_FILLS; kind++) {
                fill(kind, x, lengths[l]);
                check_row(formats[f], x, lengths[l], (uint32_t)random_below(1u << 30) * 4 + 3);
            }
}

/* A range that starts anywhere is that part of the row. */
TEST(test_read_anywhere) {
    float x[700], all[700], part[700];
    fill(HEAVY, x, 700);
    for (int f = 0; f < N_FORMATS; f++) {
        uint8_t *row = bytes_of(expected_bytes(formats[f], 700));
        tagc_residual_write(formats[f], 700, x, 0, 700, 5, row);
        tagc_residual_read(formats[f], 700, row, 0, 700, all);
        for (int trial = 0; trial < 200; trial++) {
            size_t first = random_below(700), n = random_below(700 - first + 1);
            tagc_residual_read(formats[f], 700, row, first, n, part);
            assert_memory_equal(part, all + first, n * sizeof *part);
        }
        free(row);
    }
}

TEST(test_clear) {
    for (int f = 0; f < N_FORMATS; f++)
        for (size_t n = 1; n < 300; n += 37) {
            float out[300];
            const uint32_t zeros = tagc_residual_zeros(formats[f]);
            uint8_t *row = bytes_of(expected_bytes(formats[f], n));
            for (size_t i = 0; i < expected_bytes(formats[f], n); i++)
                row[i] = ((const uint8_t *)&zeros)[i % sizeof zeros];
            tagc_residual_read(formats[f], n, row, 0, n, out);
            for (size_t i = 0; i < n; i++) assert_int_equal(bits_of(out[i]), 0x80000000u);
            free(row);
        }
    uint8_t zeros[192] = {0};
    float out[100];
    tagc_residual_read(TAGC_FORMAT_INT8, 100, zeros, 0, 100, out);
    for (size_t i = 0; i < 100; i++) assert_int_equal(bits_of(out[i]), 0x80000000u);
}

/* Over many seeds the mean of what is stored is the value, and its variance that of rounding up with the probability of the
 * rest: step^2 * p * (1 - p). */
TEST(test_unbiased) {
    enum { N = 1024, N_SEEDS = 4000 };
    static float x[N], out[N];
    static double sum[N], squares[N];
    static uint8_t row[4 * N];
    fill(NORMAL, x, N);
    for (int f = 1; f < N_FORMATS; f++) {
        int format = formats[f];
        double chi = 0, total = 0, total_deviation = 0;
        size_t n_counted = 0;
        memset(sum, 0, sizeof sum), memset(squares, 0, sizeof squares);
        for (int s = 0; s < N_SEEDS; s++) {
            tagc_residual_write(format, N, x, 0, N, tagc_residual_seed(3, (uint64_t)s, 1, 2), row);
            tagc_residual_read(format, N, row, 0, N, out);
            for (int i = 0; i < N; i++) {
                double error = (double)out[i] - x[i];
                sum[i] += error, squares[i] += error * error;
            }
        }
        for (int i = 0; i < N; i++) {
            size_t begin = (size_t)i / block_of(format) * block_of(format);
            double step = ldexp(1, oracle_exponent(format, x + begin, block_of(format)) - 127);
            double p = fabs(x[i]) / step - floor(fabs(x[i]) / step);
            double variance = step * step * p * (1 - p);
            if (p * (1 - p) < 0.02) continue; /* too rare for the normal distribution */
            double z = sum[i] / sqrt(variance * N_SEEDS);
            assert_true(fabs(sum[i]) / N_SEEDS <= 6 * sqrt(variance / N_SEEDS));
            assert_true(fabs(squares[i] / N_SEEDS / variance - 1) < 0.5);
            chi += z * z, total += squares[i] / N_SEEDS, total_deviation += variance, n_counted++;
        }
        assert_true(n_counted > N / 2);
        assert_true(fabs(total / total_deviation - 1) < 0.01);
        assert_true(chi / (double)n_counted < 1.25);
    }
}

/* Values down to a millionth of their block's largest: none is too small to count. The sum over many steps is the exact one within
 * five standard deviations, that of single values and that of all in a decade. */
TEST(test_small) {
    enum { N = 1024, N_STEPS = 100000, N_DECADES = 7 };
    static float x[N], out[N];
    static uint8_t row[4 * N];
    for (int f = 1; f < N_FORMATS; f++) {
        static double sum[N];
        double decade[N_DECADES] = {0}, variance[N_DECADES] = {0};
        int format = formats[f];
        for (int i = 0; i < N; i++) {
            float size = (float)pow(10, -6.0 * (i % 32) / 31), one = i / 32 % 2 ? -1.0f : 1.0f;
            x[i] = one * size;
        }
        memset(sum, 0, sizeof sum);
        for (int s = 0; s < N_STEPS; s++) {
            tagc_residual_write(format, N, x, 0, N, tagc_residual_seed(9, (uint64_t)s, 0, 0), row);
            tagc_residual_read(format, N, row, 0, N, out);
            for (int i = 0; i < N; i++) sum[i] += (double)out[i] - (double)x[i];
        }
        for (int i = 0; i < N; i++) {
            double step = format == TAGC_FORMAT_INT8 ? 0x1p-6 : 0x1p-2;
            double p = fabs(x[i]) / step - floor(fabs(x[i]) / step),
                   of_one = step * step * p * (1 - p) * N_STEPS;
            int d = i % 32 * 6 / 31;
            decade[d] += x[i] < 0 ? -sum[i] : sum[i], variance[d] += of_one;
            if (p * (1 - p) * N_STEPS > 30 && fabs(sum[i]) > 5 * sqrt(of_one))
                fail_msg("format %d, %g: off by %g standard deviations", format, (double)x[i],
                         sum[i] / sqrt(of_one));
        }
        for (int d = 0; d < N_DECADES; d++)
            if (fabs(decade[d]) > 5 * sqrt(variance[d]))
                fail_msg("format %d, decade %d: off by %g standard deviations", format, d,
                         decade[d] / sqrt(variance[d]));
    }
}

/* Neighbours, other reducers, steps, ranks and rows round independently. */
TEST(test_independent) {
    enum { N = 1 << 16 };
    static const size_t lags[] = {1, 2, 3, 4, 5, 8, 64, 128, 1024};
    enum { N_OTHERS = 5 };
    uint32_t seed = tagc_residual_seed(5, 7, 3, 1);
    uint32_t others[N_OTHERS] = {tagc_residual_seed(5, 8, 3, 1), tagc_residual_seed(5, 7, 4, 1),
                                 tagc_residual_seed(5, 7, 3, 2), tagc_residual_seed(6, 7, 3, 1),
                                 tagc_residual_seed(5 + (1ull << 40), 7, 3, 1)};
    double limit = 6 / sqrt(N), mean = 0;
    for (size_t l = 0; l < sizeof lags / sizeof *lags; l++) {
        double product = 0;
        for (size_t i = 0; i < N; i++)
            product += (oracle_byte(seed, i) - 127.5) * (oracle_byte(seed, i + lags[l]) - 127.5) / 5461.25;
        assert_true(fabs(product / N) < limit);
    }
    for (int o = 0; o < N_OTHERS; o++) {
        double product = 0;
        for (size_t i = 0; i < N; i++)
            product += (oracle_byte(seed, i) - 127.5) * (oracle_byte(others[o], i) - 127.5) / 5461.25;
        assert_true(fabs(product / N) < limit);
    }
    for (size_t i = 0; i < N; i++) mean += (oracle_byte(seed, i) - 127.5) / 73.9 / N;
    assert_true(fabs(mean) < limit);
    for (size_t i = 0; i < 1000; i++)
        assert_int_equal(oracle_byte(seed, i),
                         tagc_residual_threshold(tagc_residual_random(seed, (uint32_t)(i / 4)), i % 4) >> 24);
}

/* Rows of any bytes are read within bounds, and refused if a value is not finite. */
TEST(test_hostile) {
    for (int trial = 0; trial < 3000; trial++) {
        int format = formats[random_below(N_FORMATS)], is_finite = 1;
        size_t n = 1 + random_below(500), n_bytes = expected_bytes(format, n);
        uint8_t *row = bytes_of(n_bytes);
        float *out = bytes_of(n * sizeof *out);
        for (size_t i = 0; i < n_bytes; i++) row[i] = (uint8_t)random_below(trial % 2 ? 256 : 128);
        tagc_residual_read(format, n, row, 0, n, out);
        for (size_t i = 0; i < n; i++) is_finite &= isfinite(out[i]) != 0;
        assert_int_equal(tagc_residual_check(format, n, row), is_finite ? TAGC_OK : TAGC_ERR_CORRUPT);
        free(row), free(out);
    }
    uint8_t row[192] = {0};
    row[0] = 255;
    assert_int_equal(tagc_residual_check(TAGC_FORMAT_INT8, 100, row), TAGC_ERR_CORRUPT);
    assert_non_null(strstr(tagc_last_error(), "value 0 of 100"));
}
