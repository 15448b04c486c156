/* Low-bit blocks against a naive coder, on every instruction set: the same bytes, the same values, near what they stand
 * for, whatever the input. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../bits.h"
#include "../test.h"
#include "codec/delta.h"
#include "codec/delta_kernels.h"
#include "core/measure.h"

enum { BLOCK = 256, MAX_N = 5 * BLOCK };

/* ---- the oracle: one element at a time, in double where that changes nothing ---- */

static double oracle_scale(int bits, const float *x, size_t n) {
    float most = 0;
    int lowest_is_positive = 0;
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(x[i])) return (double)NAN;
        if (fabsf(x[i]) > most)
            most = fabsf(x[i]), lowest_is_positive = x[i] > 0;
        else if (fabsf(x[i]) == most && x[i] < 0)
            lowest_is_positive = 0;
    }
    float scale = most * (bits == 8 ? 1.0f / 128 : bits == 4 ? 1.0f / 8.5f : 0.375f);
    if (scale < 0x1p-126f) return 0;
    return (double)(lowest_is_positive ? -bf16_nearest(scale) : bf16_nearest(scale));
}

/* Of element i of a block: an integer, by halves of the code range. */
static int oracle_integer(int bits, double scale, float x) {
    if (scale == 0 || isnan(scale)) return 0;
    float quotient = x * (1.0f / (float)scale);
    int q = (int)nearbyint((double)quotient), half = 1 << (bits - 1);
    return q < -half ? -half : q >= half ? half - 1 : q;
}

static int read_code(int bits, const uint8_t *codes, size_t i) {
    size_t n_columns = (size_t)BLOCK * (size_t)bits / 8;
    return (codes[i % n_columns] >> (size_t)bits * (i / n_columns) & ((1 << bits) - 1)) - (1 << (bits - 1));
}

static void fill(float *x, size_t n, int kind, uint64_t *state) {
    tagc_fill_gradient(x, n, state);
    for (size_t i = 0; i < n; i++) {
        if (kind == 1) x[i] = 0;
        if (kind == 2) x[i] *= 0x1p-120f;
        if (kind == 3) x[i] *= 0x1p+120f;
        if (kind == 4) x[i] = i % 3 ? -1.0f : 1.0f;
        if (kind == 5) x[i] = i == n / 2 ? 1.0f : 0.0f;
        if (kind == 6) x[i] = (float)((int)(i % 256) - 128) / 64;
    }
}

static void check_body(int bits, const float *x, const uint8_t *body, size_t n, const float *decoded) {
    size_t n_blocks = (n + BLOCK - 1) / BLOCK;
    for (size_t b = 0; b < n_blocks; b++) {
        size_t m = n - b * BLOCK < BLOCK ? n - b * BLOCK : BLOCK;
        const float *from = x + b * BLOCK;
        const uint8_t *codes = body + 2 * n_blocks + b * (size_t)BLOCK * (size_t)bits / 8;
        uint16_t half;
        memcpy(&half, body + 2 * b, sizeof half);
        double expected = oracle_scale(bits, from, m);
        if (isnan(expected)) {
            assert_int_equal(half, 0x7fc0);
            continue;
        }
        assert_int_equal(half, bits_of((float)expected) >> 16);
        for (size_t i = 0; i < BLOCK; i++) {
            int q = oracle_integer(bits, expected, i < m ? from[i] : 0.0f);
            assert_int_equal(read_code(bits, codes, i), q);
            if (i < m) assert_int_equal(bits_of(decoded[b * BLOCK + i]), bits_of((float)q * (float)expected));
        }
    }
}

TEST(all_kernels_agree) {
    static const size_t lengths[] = {1, 16, 255, 256, 257, 1000, MAX_N};
    static float x[MAX_N], base[MAX_N], difference[MAX_N], decoded[MAX_N], replica[MAX_N];
    static uint16_t halves[MAX_N];
    uint8_t *body = malloc(tagc_delta_bytes(8, MAX_N)), *first = malloc(tagc_delta_bytes(8, MAX_N));
    uint64_t random = 5;
    for (const tagc_delta_kernels *const *k = tagc_delta_kernels_all(); *k; k++)
        for (int bits = 2; bits <= 8; bits *= 2)
            for (int kind = 0; kind < 7; kind++)
                for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
                    size_t n = lengths[l];
                    fill(x, n, kind, &random);
                    tagc_fill_gradient(base, n, &random);
                    for (size_t i = 0; i < n; i++) base[i] = bf16_nearest(base[i]);
                    for (size_t i = 0; i < n; i++) halves[i] = (uint16_t)(bits_of(base[i]) >> 16);
                    memset(body, 0xee, tagc_delta_bytes(bits, n));
                    assert_int_equal(tagc_delta_encode_with(*k, bits, x, NULL, 0, n, body), 0);
                    tagc_delta_decode_with(*k, bits, body, decoded, n);
                    assert_int_equal(tagc_delta_validate(bits, body, n), TAGC_OK);
                    check_body(bits, x, body, n, decoded);

                    assert_int_equal(tagc_delta_encode_with(*k, bits, x, base, 4, n, body), 0);
                    tagc_delta_decode_with(*k, bits, body, decoded, n);
                    for (size_t i = 0; i < n; i++) difference[i] = x[i] - base[i];
                    check_body(bits, difference, body, n, decoded);
                    memset(first, 0xee, tagc_delta_bytes(bits, n));
                    assert_int_equal(tagc_delta_encode_with(*k, bits, x, halves, 2, n, first), 0);
                    assert_memory_equal(first, body, tagc_delta_bytes(bits, n));
                    tagc_delta_encode_part(bits, x, halves, 2, n, 0, n, first);
                    assert_memory_equal(first, body, tagc_delta_bytes(bits, n));
                    memcpy(replica, base, n * sizeof *base);
                    tagc_delta_apply_with(*k, bits, body, replica, 4, n);
                    tagc_delta_apply_with(*k, bits, body, halves, 2, n);
                    for (size_t i = 0; i < n; i++) {
                        uint32_t expected = bits_of(bf16_nearest(base[i] + decoded[i]));
                        assert_int_equal(bits_of(replica[i]), expected);
                        assert_int_equal((uint32_t)halves[i] << 16, expected);
                    }
                }
    free(body);
    free(first);
}

/* What is not finite marks its block and no other. */
TEST(nonfinite_marks_its_block) {
    static const float bad[] = {NAN, -NAN, INFINITY, -INFINITY};
    float x[3 * BLOCK], decoded[3 * BLOCK];
    uint8_t body[3 * (2 + BLOCK)];
    for (const tagc_delta_kernels *const *k = tagc_delta_kernels_all(); *k; k++)
        for (int bits = 2; bits <= 8; bits *= 2)
            for (size_t c = 0; c < 4; c++) {
                for (size_t i = 0; i < 3 * BLOCK; i++) x[i] = (float)i;
                x[BLOCK + 7 + 60 * c] = bad[c];
                assert_int_equal(tagc_delta_encode_with(*k, bits, x, NULL, 0, 3 * BLOCK, body), 1);
                assert_int_equal(tagc_delta_validate(bits, body, 3 * BLOCK), TAGC_ERR_CORRUPT);
                tagc_delta_decode_with(*k, bits, body, decoded, 3 * BLOCK);
                for (size_t i = 0; i < 3 * BLOCK; i++)
                    assert_int_equal(isnan(decoded[i]) != 0, i / BLOCK == 1);
            }
    /* finite values whose difference is not */
    uint16_t base[BLOCK] = {0};
    for (size_t i = 0; i < BLOCK; i++) x[i] = 0;
    x[3] = 3e38f;
    base[3] = (uint16_t)(bits_of(-3e38f) >> 16);
    assert_int_equal(tagc_delta_encode_part(4, x, base, 2, BLOCK, 0, BLOCK, body), 1);
}

/* Any codes and any finite scale are taken; the bytes around values stay as they are. */
TEST(hostile_bytes_stay_in_place) {
    uint64_t random = 9;
    for (int round = 0; round < 300; round++) {
        int bits = 2 << round % 3;
        size_t n = 1 + tagc_next_random(&random) % 700, n_bytes = tagc_delta_bytes(bits, n);
        uint8_t *body = malloc(n_bytes); /* exact, for the address sanitizer */
        float *values = malloc((n + 1) * sizeof *values);
        uint16_t *halves = malloc((n + 1) * sizeof *halves);
        for (size_t i = 0; i < n_bytes; i++) body[i] = (uint8_t)tagc_next_random(&random);
        for (size_t i = 0; i <= n; i++) values[i] = 1, halves[i] = 0x3f80;
        int finite = 1;
        for (size_t b = 0; b < (n + BLOCK - 1) / BLOCK; b++)
            finite &= (body[2 * b + 1] & 0x7f) != 0x7f || !(body[2 * b] & 0x80);
        assert_int_equal(tagc_delta_validate(bits, body, n), finite ? TAGC_OK : TAGC_ERR_CORRUPT);
        tagc_delta_apply_part(bits, body, halves, 2, n, 0, n);
        tagc_delta_apply_part(bits, body, values, sizeof *values, n, 0, n);
        for (size_t i = 0; i < n; i++) /* NaN where an infinite scale meets a code of 0, on both sides */
            assert_true(bits_of(values[i]) == (uint32_t)halves[i] << 16);
        tagc_delta_decode(bits, body, values, n);
        assert_true(values[n] == 1 && halves[n] == 0x3f80);
        free(body);
        free(values);
        free(halves);
    }
}

/* A master that walks and a replica that follows by deltas alone: the distance stays where the first step left it, however
 * long it goes on, and is as small as the bits allow. */
TEST(nothing_accumulates) {
    enum { N = 8 * BLOCK, STEPS = 200 };
    static const double most[] = {0.25, 0.02, 0.0005}; /* mean squares over those of a step */
    for (int which = 0; which < 3; which++) {
        int bits = 2 << which;
        static float master[N];
        static uint16_t replica[N];
        uint8_t body[N + 2 * 8];
        uint64_t random = 3;
        double squares = 0;
        for (size_t i = 0; i < N; i++) master[i] = replica[i] = 0;
        for (int step = 0; step < STEPS; step++) {
            for (size_t i = 0; i < N; i++) master[i] += tagc_normal_of(tagc_next_random(&random)) * 0x1p-6f;
            assert_int_equal(tagc_delta_encode_part(bits, master, replica, 2, N, 0, N, body), 0);
            for (size_t i = 0; i < N; i++) { /* within a block the error is what its scale allows */
                uint16_t half;
                memcpy(&half, body + 2 * (i / BLOCK), sizeof half);
                uint32_t scale_bits = (uint32_t)(half & 0x7fffu) << 16;
                float scale, before = bf16_wide(replica[i]);
                memcpy(&scale, &scale_bits, sizeof scale);
                float difference = fabsf(master[i] - before);
                assert_true(difference <= scale * (float)(1 << (bits - 1)) * 1.4f);
            }
            tagc_delta_apply_part(bits, body, replica, 2, N, 0, N);
            for (size_t i = 0; i < N && step >= STEPS / 2; i++)
                squares += pow((double)(master[i] - bf16_wide(replica[i])), 2);
        }
        squares /= (double)N * (STEPS - STEPS / 2) * 0x1p-12;
        /* bf16 has its own share: half a unit in the last place at the size that the walk has reached */
        assert_true(squares < most[which] + 0.0005);
        assert_true(squares > most[which] / 50);
    }
}

/* The example of docs/reference/wire-format.md. */
TEST(the_documented_block) {
    static const uint8_t expected[] = {0xcd, 0xbd, 0x80, 0x8a, 0x38, 0x88};
    float x[131] = {0.85f, -0.2f}, decoded[131];
    uint8_t body[2 + 128];
    x[130] = 0.5f;
    assert_int_equal(tagc_delta_bytes(4, 131), sizeof body);
    tagc_delta_encode_part(4, x, NULL, 2, 131, 0, 131, body);
    assert_memory_equal(body, expected, sizeof expected);
    for (size_t i = sizeof expected; i < sizeof body; i++) assert_int_equal(body[i], 0x88);
    tagc_delta_decode(4, body, decoded, 131);
    assert_true(decoded[0] == 0.80078125f && decoded[1] == -0.2001953125f && decoded[130] == 0.50048828125f);
}
