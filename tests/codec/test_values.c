/* Formats of values: all tables give the same bits, scales are what they are said to be, and no accepted bytes decode to
 * anything that is not finite. */
#define RANDOM_SEED 5
#include "../test.h"
#include "codec/residual.h"
#include "codec/values.h"
#include "random.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef TAGC_SANITIZED
enum { N_TRIALS = 60, MAX_N = 9000, SCALE_STEP = 97 };
#else
enum { N_TRIALS = 300, MAX_N = 9000, SCALE_STEP = 1 };
#endif

static void *bytes_of(size_t n_bytes) { /* exactly, so that ASan sees a step over */
    void *memory = malloc(n_bytes ? n_bytes : 1);
    assert_non_null(memory);
    return memory;
}

enum { NORMAL, HEAVY, ANY_FINITE, LARGEST, DENORMALS, EQUAL, ZEROS, N_FILLS };

static void fill(int kind, float *x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t sign = (uint32_t)random_below(2) << 31;
        switch (kind) {
        case NORMAL:
            x[i] = random_normal();
            break;
        case HEAVY:
            x[i] = random_normal() * expf(random_normal());
            break;
        case ANY_FINITE:
            x[i] = tagc_bits_float(sign | (uint32_t)random_below(0x7f800000u));
            break;
        case LARGEST:
            x[i] = tagc_bits_float(sign | (0x7f7fffffu - (uint32_t)random_below(1u << random_below(24))));
            break;
        case DENORMALS:
            x[i] = tagc_bits_float(sign | (uint32_t)random_below(1u << (1 + random_below(24))));
            break;
        case EQUAL:
            x[i] = tagc_bits_float(sign | 0x3fc00000u);
            break;
        default:
            x[i] = tagc_bits_float(sign);
        }
    }
}

static tagc_value_format random_format(void) {
    static const int blocks[] = {16, 32, 128, 1024, 4096};
    return tagc_values_format((int)random_below(TAGC_FORMAT_INT2 + 1), blocks[random_below(5)],
                              (int)random_below(2));
}

/* ---- every table ---- */

typedef struct result {
    float *decoded, *errors, *received; /* (n) */
    uint8_t *bytes;
} result;

static result run(tagc_value_format format, const tagc_code_kernels *kernels, const float *values, size_t n) {
    result r = {bytes_of(4 * n), bytes_of(4 * n), bytes_of(4 * n), bytes_of(tagc_values_bytes(&format, n))};
    format.kernels = kernels;
    tagc_values_encode(&format, values, r.decoded, r.errors, 0, n, n, r.bytes);
    assert_true(tagc_values_valid(&format, r.bytes, n));
    tagc_values_decode(&format, r.bytes, 0, n, n, r.received);
    return r;
}

static void result_free(result *r) {
    free(r->decoded), free(r->errors), free(r->received), free(r->bytes);
}

TEST(test_every_table) {
    const tagc_code_kernels *available[TAGC_CODE_MAX_KERNELS];
    size_t n_available = tagc_code_available(available);
    for (int trial = 0; trial < N_TRIALS; trial++) {
        size_t n = 1 + random_below(trial % 4 ? 300 : MAX_N);
        tagc_value_format format = random_format();
        float *values = bytes_of(4 * n);
        fill(trial % N_FILLS, values, n);
        result expected = run(format, &tagc_code_scalar, values, n);
        for (size_t i = 0; i < n; i++) {
            assert_true(isfinite(expected.received[i]) && isfinite(expected.errors[i]));
            assert_true(expected.decoded[i] == expected.received[i]);
            assert_true(tagc_float_bits(expected.errors[i]) != 0); /* its zero is -0.0 */
        }
        for (size_t i = 0; i < n_available; i++) {
            result r = run(format, available[i], values, n);
            assert_memory_equal(r.bytes, expected.bytes, tagc_values_bytes(&format, n));
            assert_memory_equal(r.decoded, expected.decoded, 4 * n);
            assert_memory_equal(r.errors, expected.errors, 4 * n);
            assert_memory_equal(r.received, expected.received, 4 * n);
            result_free(&r);
        }
        result_free(&expected);
        free(values);
    }
}

/* Rounded at random: every table as the plain one, and in parts as at once. */
TEST(test_random) {
    const tagc_code_kernels *available[TAGC_CODE_MAX_KERNELS];
    size_t n_available = tagc_code_available(available);
    for (int trial = 0; trial < N_TRIALS; trial++) {
        size_t n = 1 + random_below(trial % 4 ? 300 : MAX_N);
        tagc_value_format format =
            tagc_values_format(trial % 2 ? TAGC_FORMAT_INT8 : TAGC_FORMAT_INT4, 16 << random_below(9), 0);
        size_t n_bytes = tagc_values_bytes(&format, n), step = (size_t)format.block * (1 + random_below(3));
        float *values = bytes_of(4 * n);
        uint8_t *expected = bytes_of(n_bytes), *bytes = bytes_of(n_bytes);
        fill(trial % N_FILLS, values, n);
        format.is_stochastic = 1;
        format.seed = (uint32_t)random_u64();
        format.kernels = &tagc_code_scalar;
        tagc_values_encode(&format, values, NULL, NULL, 0, n, n, expected);
        assert_true(tagc_values_valid(&format, expected, n));
        for (size_t i = 0; i < n_available; i++) {
            format.kernels = available[i];
            for (size_t at = 0; at < n; at += step)
                tagc_values_encode(&format, values + at, NULL, NULL, at, n - at < step ? n - at : step, n,
                                   bytes);
            assert_memory_equal(bytes, expected, n_bytes);
        }
        free(values), free(expected), free(bytes);
    }
}

/* Values down to a millionth of their block's largest: over many roundings the sums of each decade are the exact ones, within five
 * standard deviations. */
TEST(test_means) {
    enum { N = 1024, BLOCK = 128, N_STEPS = 100000, N_DECADES = 7 };
    static float x[N], received[N];
    static uint8_t bytes[2 * N];
    for (int i = 0; i < N; i++) x[i] = (float)pow(10, -6.0 * (i % 32) / 31) * (i / 32 % 2 ? -1.0f : 1.0f);
    for (int values = TAGC_FORMAT_INT8; values <= TAGC_FORMAT_INT4; values++) {
        tagc_value_format format = tagc_values_format(values, BLOCK, 0);
        double off[N_DECADES] = {0}, variance[N_DECADES] = {0};
        format.is_stochastic = 1;
        for (int s = 0; s < N_STEPS; s++) {
            format.seed = tagc_residual_seed(11, (uint64_t)s, 0, 0);
            tagc_values_encode(&format, x, NULL, NULL, 0, N, N, bytes);
            tagc_values_decode(&format, bytes, 0, N, N, received);
            for (int i = 0; i < N; i++)
                off[i % 32 * 6 / 31] += ((double)received[i] - (double)x[i]) * (x[i] < 0 ? -1 : 1);
        }
        double scale = (double)tagc_bits_float(tagc_load16(bytes) << 16); /* of all blocks */
        for (int i = 0; i < N; i++) {
            double share = fabs((double)x[i]) / scale - floor(fabs((double)x[i]) / scale);
            variance[i % 32 * 6 / 31] += share * (1 - share) * scale * scale * N_STEPS;
        }
        for (int d = 0; d < N_DECADES; d++)
            if (fabs(off[d]) > 5 * sqrt(variance[d]))
                fail_msg("format %d, decade %d: off by %g standard deviations", values, d,
                         off[d] / sqrt(variance[d]));
    }
}

/* In parts as at once; decoded and errors into the values themselves, or nowhere. */
TEST(test_parts) {
    for (int trial = 0; trial < N_TRIALS; trial++) {
        size_t n = 1 + random_below(MAX_N);
        tagc_value_format format = random_format();
        size_t n_bytes = tagc_values_bytes(&format, n), block = (size_t)format.block,
               step = block * (1 + random_below(5));
        float *values = bytes_of(4 * n), *part = bytes_of(4 * n);
        uint8_t *bytes = bytes_of(n_bytes);
        fill(HEAVY, values, n);
        result r = run(format, format.kernels, values, n);
        memcpy(part, values, 4 * n);
        for (size_t at = (n - 1) / step * step;; at -= step) {
            size_t n_here = n - at < step ? n - at : step;
            tagc_values_encode(&format, part + at, trial % 3 == 0 ? part + at : NULL,
                               trial % 3 == 1 ? part + at : NULL, at, n_here, n, bytes);
            if (at == 0) break;
        }
        assert_memory_equal(bytes, r.bytes, n_bytes);
        assert_memory_equal(part, trial % 3 == 0 ? r.decoded : trial % 3 == 1 ? r.errors : values, 4 * n);
        size_t begin = random_below(n / TAGC_CODE_LANES + 1) * TAGC_CODE_LANES,
               end = begin + random_below(n - begin + 1);
        float *received = bytes_of(4 * (end - begin));
        tagc_values_decode(&format, bytes, begin, end - begin, n, received);
        if (end > begin) assert_memory_equal(received, r.received + begin, 4 * (end - begin));
        result_free(&r);
        free(values), free(part), free(bytes), free(received);
    }
}

/* ---- what a block is worth ---- */

static double error_energy(int values, int sparse, int kind) {
    enum { N = 1 << 15 };
    static float x[N], errors[N];
    static uint8_t bytes[4 * N];
    tagc_value_format format = tagc_values_format(values, 128, sparse);
    double energy = 0, lost = 0;
    fill(kind, x, N);
    for (size_t i = 0; sparse && i < N; i++) x[i] = copysignf(2 + fabsf(x[i]), x[i]);
    tagc_values_encode(&format, x, NULL, errors, 0, N, N, bytes);
    for (size_t i = 0; i < N; i++) energy += (double)x[i] * x[i], lost += (double)errors[i] * errors[i];
    return lost / energy;
}

/* Bounds from a search over scales in double arithmetic; twice a format's own error would break them. */
TEST(test_errors) {
    static const struct {
        int values, sparse, kind;
        double most;
    } cases[] = {
        {TAGC_FORMAT_BF16, 0, NORMAL, 3e-6}, {TAGC_FORMAT_INT8, 0, NORMAL, 5e-5},
        {TAGC_FORMAT_INT8, 0, HEAVY, 3e-4},  {TAGC_FORMAT_INT4, 0, NORMAL, 0.015},
        {TAGC_FORMAT_INT4, 0, HEAVY, 0.06},  {TAGC_FORMAT_INT4, 1, NORMAL, 0.01},
        {TAGC_FORMAT_INT2, 0, NORMAL, 0.14}, {TAGC_FORMAT_INT2, 0, HEAVY, 0.40},
        {TAGC_FORMAT_INT2, 1, NORMAL, 0.05},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double energy = error_energy(cases[i].values, cases[i].sparse, cases[i].kind);
        if (energy > cases[i].most) print_message("case %zu: %g\n", i, energy);
        assert_true(energy <= cases[i].most);
    }
}

/* Integers are the nearest. */
TEST(test_scales) {
    for (int trial = 0; trial < N_TRIALS; trial++) {
        float x[128], decoded[128];
        uint8_t bytes[2 + 128];
        double largest = 0;
        fill(trial % 2 ? NORMAL : HEAVY, x, 128);
        for (int i = 0; i < 128; i++) largest = fmax(largest, fabs(x[i]));
        for (int values = TAGC_FORMAT_INT8; values <= TAGC_FORMAT_INT2; values++) {
            tagc_value_format format = tagc_values_format(values, 128, 0);
            tagc_values_encode(&format, x, decoded, NULL, 0, 128, 128, bytes);
            float scale = tagc_bits_float(tagc_load16(bytes) << 16);
            int most = values == TAGC_FORMAT_INT8 ? 127 : 7;
            for (int i = 0; i < 128; i++) assert_false(x[i] * decoded[i] < 0);
            if (values > TAGC_FORMAT_INT4) continue;
            assert_true(fabs(scale / (largest / most) - 1) < 0.005);
            for (int i = 0; i < 128; i++)
                assert_true(fabsf(x[i] - decoded[i]) <= scale * (0.5001f + 0.004f * (float)most));
        }
    }
}

/* ---- hostile bytes ---- */

static void check_finite(const tagc_value_format *format, const uint8_t *bytes, size_t n) {
    float *values = bytes_of(4 * n);
    tagc_values_decode(format, bytes, 0, n, n, values);
    for (size_t i = 0; i < n; i++) assert_true(isfinite(values[i]));
    free(values);
}

TEST(test_any_scale) {
    for (int values = TAGC_FORMAT_BF16; values <= TAGC_FORMAT_INT2; values++) {
        tagc_value_format format = tagc_values_format(values, 4096, 0);
        size_t n = 4096, n_bytes = tagc_values_bytes(&format, n), n_good = 0;
        uint8_t *bytes = bytes_of(n_bytes);
        for (int pattern = 0; pattern < 3; pattern++) {
            for (size_t i = 0; i < n_bytes; i++)
                bytes[i] = (uint8_t)(pattern == 0 ? 0 : pattern == 1 ? 0x88 : random_u64());
            if (values == TAGC_FORMAT_BF16) memset(bytes, 0, n_bytes);
            for (uint32_t scale = 0; scale < 65536; scale += SCALE_STEP) {
                tagc_store16(bytes, scale);
                if (!tagc_values_valid(&format, bytes, n)) continue;
                n_good++;
                assert_true((scale & 0x7f80u) != 0x7f80u);
                if (scale % 61 == 0 || scale > 0x7000u) check_finite(&format, bytes, n);
            }
        }
        assert_true(n_good > 0);
        free(bytes);
    }
}

TEST(test_hostile) {
    int n_passed = 0, n_refused = 0;
    for (int trial = 0; trial < 3 * N_TRIALS; trial++) {
        size_t n = 1 + random_below(300);
        tagc_value_format format = random_format();
        float *values = bytes_of(4 * n);
        fill(trial % N_FILLS, values, n);
        result r = run(format, format.kernels, values, n);
        for (int flips = 0; flips < 3; flips++)
            r.bytes[random_below(tagc_values_bytes(&format, n))] ^= (uint8_t)(1u << random_below(8));
        if (tagc_values_valid(&format, r.bytes, n)) {
            check_finite(&format, r.bytes, n);
            n_passed++;
        } else {
            n_refused++;
        }
        result_free(&r);
        free(values);
    }
    assert_true(n_passed > 0 && n_refused > 0);
}
