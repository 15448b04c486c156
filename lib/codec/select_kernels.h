/* The inner loops of selection, one table per processor level. All tables give the same bits. Only select.c and tests
 * include this file. */
#ifndef TAGC_CODEC_SELECT_KERNELS_H
#define TAGC_CODEC_SELECT_KERNELS_H

#include "codec/select.h"

#define TAGC_SELECT_SLACK 16 /* elements that a kernel may write past the end of a candidate or band list */
#define TAGC_SELECT_NONE 0x80000000u /* a lower bound that nothing reaches */

typedef struct tagc_select_kernels {
    const char *name;

    /* acc = gradient + residual_in over (n). |acc| >= t_lo, t_lo >= 1, become candidates (first + position, acc). The
     * residual is -0.0f for zeros and for |acc| >= t_clear (t_lo or NONE), else acc. Returns the number of candidates;
     * raises *max_bits to the largest |acc|. bypass: write residual_out around the cache. */
    size_t (*stream)(const float *gradient, const float *residual_in, float *residual_out, size_t n,
                     uint32_t first, uint32_t t_lo, uint32_t t_clear, int bypass, uint32_t *indices,
                     float *values, uint32_t *max_bits);

    /* The same of an int8 residual (residual.h), over whole blocks of it: n is a multiple of TAGC_RESIDUAL_BLOCK, and so is `first`, the position
     * in the row. Candidates leave zeros in the new residual. gradient begins at the row's start, like the exponents and
     * codes. NULL where this is done in pieces, with the kernels of code_kernels.h. */
    size_t (*stream_int8)(const void *gradient, int is_bf16, const uint8_t *exponents_in,
                          const uint8_t *codes_in, uint8_t *exponents_out, uint8_t *codes_out, size_t n,
                          uint32_t first, uint32_t t_lo, uint32_t seed, uint32_t *indices, float *values,
                          uint32_t *max_bits);

    /* Call after a run of streams or keeps with bypass: orders what they wrote before this thread's next writes. Calling it
     * after each would interrupt the stores. */
    void (*fence)(void);

    /* band = those of values (n) with |value| < t_hi, in order; returns how many. */
    size_t (*band)(const float *values, size_t n, uint32_t t_hi, float *band);

    /* Returns how many of values (n) have |value| > threshold, and in *n_ties how many are equal to it. */
    size_t (*count)(const float *values, size_t n, uint32_t threshold, size_t *n_ties);

    /* Of candidates (n, ascending) keeps |value| > threshold and the first n_ties equal to it, exactly n_sent of them.
     * Every other value goes back to residual[index] (with bypass around the cache if possible), or if residual is NULL, to the
     * front of the candidates' own lists. Writes nothing past n_sent. */
    void (*keep)(uint32_t *indices, float *values, size_t n, uint32_t threshold, size_t n_ties,
                 float *residual, int bypass, uint32_t *sent_indices, float *sent_values, size_t n_sent);
} tagc_select_kernels;

extern const tagc_select_kernels tagc_select_scalar;
#if defined(__x86_64__)
extern const tagc_select_kernels tagc_select_avx2;
extern const tagc_select_kernels tagc_select_avx512;
#endif
#if defined(__aarch64__)
extern const tagc_select_kernels tagc_select_neon;
#endif

#define TAGC_SELECT_MAX_KERNELS 3

/* The tables for this processor, best first; returns their number. The last one is scalar. */
size_t tagc_select_available(const tagc_select_kernels *available[TAGC_SELECT_MAX_KERNELS]);

/* tagc_select with a given table, or with `leave` tagc_select_leaving. */
void tagc_select_with(const tagc_select_kernels *kernels, const float *gradient, const float *residual_in,
                      float *residual_out, int leave, size_t n, size_t k, uint32_t *indices, float *values,
                      void *scratch, tagc_pool *pool, tagc_selection *result);

/* Moves the items of two lists at [from, n) down to `to`. */
static inline void tagc_select_close_up(uint32_t *indices, float *values, size_t to, size_t from, size_t n) {
    for (size_t i = 0; i < n - from; i++) {
        indices[to + i] = indices[from + i];
        values[to + i] = values[from + i];
    }
}

/* Bits of |x|: ordered like the magnitudes, Inf and NaN on top. */
static inline uint32_t tagc_abs_bits(float x) {
    union {
        float value;
        uint32_t bits;
    } u = {.value = x};
    return u.bits & 0x7fffffffu;
}

#endif
