/* The inner loops of gaps and values, one table per processor level. All tables give the same bytes and bits. Only gaps.c,
 * values.c, the codes and tests include this file. */
#ifndef TAGC_CODEC_CODE_KERNELS_H
#define TAGC_CODEC_CODE_KERNELS_H

#include "codec/bf16.h"
#include "codec/residual.h"
#include <stddef.h>
#include <stdint.h>

#define TAGC_CODE_LANES 16 /* values that go together; a block's partial sums */

#define TAGC_CODE_MAX_CODES 32768 /* of a chunk, which has no more elements */

typedef struct tagc_code_kernels {
    const char *name;

    /* ---- gaps: indices (n) ascending, of one chunk; `next` is the chunk's first element ---- */

    size_t (*count_codes)(const uint32_t *indices, size_t n, uint32_t next, int bits);
    /* codes: the result of count_codes. Writes ceil(codes * bits / 8) bytes and nothing past them. */
    void (*write_codes)(const uint32_t *indices, size_t n, uint32_t next, int bits, size_t n_codes,
                        uint8_t *bytes);
    /* Positions in the chunk, which must be valid, and up to LANES undefined ones after them. Returns their number. */
    size_t (*read_codes)(const uint8_t *bytes, size_t n_codes, int bits, uint32_t *positions);
    /* Accepts any bytes. Returns the number of items; *end becomes the position after the last code. */
    size_t (*check_codes)(const uint8_t *bytes, size_t n_codes, int bits, size_t *end);

    /* ---- values: `level` is int2's larger magnitude, as a multiple of the scale ---- */

    /* acc = gradient + residual (n); returns the bits of the largest magnitude. */
    uint32_t (*accumulate)(const float *gradient, const float *residual, float *acc, size_t n);
    uint32_t (*largest)(const float *x, size_t n); /* the same of x */
    float (*mean)(const float *x, size_t n);       /* of the magnitudes; n up to 4096 */
    /* The scale with the least squared error, given the levels that result from `scale`; n up to 4096. */
    float (*refit)(const float *x, size_t n, float level, float scale);
    /* Rounds one block. decoded and errors (n) may be NULL, or x itself. Writes ceil(n * bits / 8) bytes. */
    void (*round)(int values, float level, float scale, const float *x, size_t n, float *decoded,
                  float *errors, uint8_t *packed);
    /* Rounds one block of int8 or int4 at random (values.h), with the thresholds of positions [first, first + n); first is a multiple
     * of LANES. */
    void (*dither)(int values, const float *x, size_t first, size_t n, uint32_t seed, float scale,
                   uint8_t *packed);
    void (*narrow)(const float *x, size_t n, float *decoded, float *errors, uint8_t *halves);
    void (*widen_halves)(const uint8_t *halves, size_t n, float *out);
    /* Values [first, first + n) of an integer format; first a multiple of LANES. */
    void (*widen)(int values, float level, const uint8_t *scales, int block, const uint8_t *packed,
                  size_t first, size_t n, float *out);
    void (*add)(float *sums, const float *x, float scale, size_t n); /* sums += scale * x */
    /* ---- stored residuals (residual.h); what these leave out, at the end or from where values are too large or not finite, the caller
     * does one by one. They return how many of n they did. ---- */

    /* int8 and int4. first is a multiple of TAGC_RESIDUAL_BLOCK. */
    size_t (*write_residual)(int format, const float *x, size_t first, size_t n, uint32_t seed,
                             uint8_t *exponents, uint8_t *codes);
    /* tagc_residual_put of int8; *n_misfits counts on. */
    size_t (*put_int8)(const uint32_t *indices, const float *values, size_t n, uint32_t seed,
                       const uint8_t *exponents, uint8_t *codes, uint32_t *misfits, size_t *n_misfits);
    /* int8 and int4. */
    size_t (*read_residual)(int format, const uint8_t *exponents, const uint8_t *codes, size_t first,
                            size_t n, const void *ahead, float *out);

    void (*copy_around)(float *to, const float *from, size_t n); /* past the cache where that can be */
} tagc_code_kernels;

extern const tagc_code_kernels tagc_code_scalar;
#if defined(__x86_64__)
extern const tagc_code_kernels tagc_code_avx2;
extern const tagc_code_kernels tagc_code_avx512;
#endif
#if defined(__aarch64__)
extern const tagc_code_kernels tagc_code_neon;
#endif

#define TAGC_CODE_MAX_KERNELS 3

/* The tables for this processor, best first; returns their number. The last one is scalar. */
size_t tagc_code_available(const tagc_code_kernels *available[TAGC_CODE_MAX_KERNELS]);
const tagc_code_kernels *tagc_code_best(void);

static inline uint32_t tagc_load16(const uint8_t *bytes) {
    return bytes[0] | (uint32_t)bytes[1] << 8;
}

static inline void tagc_store16(uint8_t *bytes, uint32_t value) {
    bytes[0] = (uint8_t)value;
    bytes[1] = (uint8_t)(value >> 8);
}

static inline uint32_t tagc_float_bits(float x) {
    union {
        float value;
        uint32_t bits;
    } u = {.value = x};
    return u.bits;
}

static inline float tagc_bits_float(uint32_t bits) {
    union {
        uint32_t bits;
        float value;
    } u = {.bits = bits};
    return u.value;
}

#endif
