/* Low-bit blocks: chooses the loops of the processor level, and lays out bodies. */
#include "codec/delta.h"
#include "codec/bf16.h"
#include "codec/delta_kernels.h"
#include "core/cpu.h"
#include "core/status.h"

#include <stdint.h>
#include <string.h>

#define SCALE_NAN TAGC_BF16_NAN
/* 2^-126: a smaller scale has no inverse, so such a block is left unchanged. */
#define MIN_NORMAL_BITS 0x00800000u

/* The scale over the largest magnitude. The figures are the mean square difference between replica and master in the
 * steady state, over that of a step, for Gaussian steps (in brackets: if each step is 0.9 of the last). 4 bits: 0.011
 * (0.012); with codes from -7 to 7 it would be 0.016. 2 bits: 0.17 (0.27); with three levels 0.24 (at best 0.58); with four
 * levels around 0 0.14 (0.28). Those four would move values that do not change, and have three times the error if few values
 * change. Clipped parts are in the next delta. */
static inline float share_of_largest(int bits) {
    return bits == 8 ? 1.0f / 128 : bits == 4 ? 1.0f / 8.5f : 0.375f;
}

static inline float scale_from(uint16_t half) {
    uint32_t bits = TAGC_BF16_WIDE(half);
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}

static inline float scale_at(const uint8_t *scale) {
    uint16_t half;
    memcpy(&half, scale, sizeof half);
    return scale_from(half);
}

/* 0 if the block holds only zeros or values too small to encode. */
static inline float inverse_of(uint16_t scale) {
    return scale == 0 || scale == SCALE_NAN ? 0.0f : 1.0f / scale_from(scale);
}

#if defined(__x86_64__)
#define KERNELS_NAME "avx512"
#if defined(__clang__) /* which would take the whole attribute for none */
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), min_vector_width(512)))
#else
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#define NAME(x) x##_avx512
#include "codec/delta_body.h"
#undef KERNELS_NAME
#undef TARGET
#undef NAME

#define KERNELS_NAME "avx2"
#define TARGET __attribute__((target("avx2")))
#define NAME(x) x##_avx2
#include "codec/delta_body.h"
#undef KERNELS_NAME
#undef TARGET
#undef NAME
#endif

#if defined(__aarch64__) /* where the compiler's own vectors are NEON */
#define KERNELS_NAME "neon"
#else
#define KERNELS_NAME "plain"
#endif
#define TARGET
#define NAME(x) x##_plain
#include "codec/delta_body.h"

const tagc_delta_kernels *const *tagc_delta_kernels_all(void) {
    static const tagc_delta_kernels *const tables[] = {
#if defined(__x86_64__)
        &kernels_avx512,
        &kernels_avx2,
#endif
        &kernels_plain,
        NULL
    };
#if defined(__x86_64__)
    return tables + (tagc_cpu_has(TAGC_CPU_AVX512) ? 0 : tagc_cpu_has(TAGC_CPU_AVX2) ? 1 : 2);
#else
    return tables;
#endif
}

/* ---- bodies ---- */

static size_t n_blocks_of(size_t n) {
    return n / TAGC_DELTA_BLOCK + (n % TAGC_DELTA_BLOCK != 0);
}

static size_t code_bytes(int bits) {
    return (size_t)bits * (TAGC_DELTA_BLOCK / 8);
}

size_t tagc_delta_bytes(int bits, size_t n) {
    return n_blocks_of(n) * (sizeof(uint16_t) + code_bytes(bits));
}

/* Blocks of values from (scales, codes) on. */
static int encode_blocks(const tagc_delta_kernels *kernels, int bits, const float *values, const void *base,
                         size_t width, size_t n, uint8_t *scales, uint8_t *codes) {
    int nonfinite = 0;
    for (size_t at = 0; at < n;
         at += TAGC_DELTA_BLOCK, scales += sizeof(uint16_t), codes += code_bytes(bits)) {
        size_t m = n - at;
        const float *from = values + at;
        const void *old = base ? (const char *)base + at * width : NULL;
        float last_values[TAGC_DELTA_BLOCK] = {0}, last_base[TAGC_DELTA_BLOCK] = {0};
        if (m < TAGC_DELTA_BLOCK) {
            from = memcpy(last_values, from, m * sizeof *from);
            if (base) old = memcpy(last_base, old, m * width);
        }
        uint16_t scale = kernels->encode(bits, from, old, width, codes);
        memcpy(scales, &scale, sizeof scale);
        nonfinite |= scale == SCALE_NAN;
    }
    return nonfinite;
}

int tagc_delta_encode_with(const tagc_delta_kernels *kernels, int bits, const float *values, const void *base,
                           size_t width, size_t n, uint8_t *body) {
    return encode_blocks(kernels, bits, values, base, width, n, body,
                         body + n_blocks_of(n) * sizeof(uint16_t));
}

tagc_status tagc_delta_validate(int bits, const uint8_t *body, size_t n) {
    (void)bits;
    for (size_t b = 0; b < n_blocks_of(n); b++) {
        uint16_t scale;
        memcpy(&scale, body + b * sizeof scale, sizeof scale);
        if ((scale & 0x7fffu) >= 0x7f80u)
            return tagc_fail(TAGC_ERR_CORRUPT, "the scale of block %zu is %g, must be finite", b,
                             (double)scale_from(scale));
    }
    return TAGC_OK;
}

static size_t scales_at(size_t at) {
    return at / TAGC_DELTA_BLOCK * sizeof(uint16_t);
}

static size_t codes_at(int bits, size_t n_all, size_t at) {
    return n_blocks_of(n_all) * sizeof(uint16_t) + at / TAGC_DELTA_BLOCK * code_bytes(bits);
}

/* All whole blocks in place, and the remainder in a block of its own. */
static void apply(const tagc_delta_kernels *kernels, int bits, const uint8_t *scales, const uint8_t *codes,
                  void *replica, size_t width, size_t n) {
    size_t n_whole = n / TAGC_DELTA_BLOCK, m = n % TAGC_DELTA_BLOCK;
    kernels->apply(bits, scales, codes, replica, width, n_whole);
    if (m == 0) return;
    float last[TAGC_DELTA_BLOCK] = {0};
    void *rest = (char *)replica + n_whole * TAGC_DELTA_BLOCK * width;
    memcpy(last, rest, m * width);
    kernels->apply(bits, scales + n_whole * sizeof(uint16_t), codes + n_whole * code_bytes(bits), last, width,
                   1);
    memcpy(rest, last, m * width);
}

static void decode(const tagc_delta_kernels *kernels, int bits, const uint8_t *scales, const uint8_t *codes,
                   float *values, size_t n) {
    size_t n_whole = n / TAGC_DELTA_BLOCK, m = n % TAGC_DELTA_BLOCK;
    kernels->decode(bits, scales, codes, values, n_whole);
    if (m == 0) return;
    float last[TAGC_DELTA_BLOCK];
    kernels->decode(bits, scales + n_whole * sizeof(uint16_t), codes + n_whole * code_bytes(bits), last, 1);
    memcpy(values + n_whole * TAGC_DELTA_BLOCK, last, m * sizeof *last);
}

void tagc_delta_apply_with(const tagc_delta_kernels *kernels, int bits, const uint8_t *body, void *replica,
                           size_t width, size_t n) {
    apply(kernels, bits, body, body + codes_at(bits, n, 0), replica, width, n);
}

void tagc_delta_decode_with(const tagc_delta_kernels *kernels, int bits, const uint8_t *body, float *values,
                            size_t n) {
    decode(kernels, bits, body, body + codes_at(bits, n, 0), values, n);
}

void tagc_delta_decode(int bits, const uint8_t *body, float *values, size_t n) {
    tagc_delta_decode_with(tagc_delta_kernels_all()[0], bits, body, values, n);
}

int tagc_delta_encode_part(int bits, const float *values, const void *base, size_t width, size_t n_all,
                           size_t at, size_t n, uint8_t *body) {
    return encode_blocks(tagc_delta_kernels_all()[0], bits, values + at,
                         base ? (const char *)base + at * width : NULL, width, n, body + scales_at(at),
                         body + codes_at(bits, n_all, at));
}

void tagc_delta_apply_part(int bits, const uint8_t *body, void *replica, size_t width, size_t n_all,
                           size_t at, size_t n) {
    apply(tagc_delta_kernels_all()[0], bits, body + scales_at(at), body + codes_at(bits, n_all, at),
          (char *)replica + at * width, width, n);
}

void tagc_delta_decode_part(int bits, const uint8_t *body, float *values, size_t n_all, size_t at, size_t n) {
    decode(tagc_delta_kernels_all()[0], bits, body + scales_at(at), body + codes_at(bits, n_all, at),
           values + at, n);
}
