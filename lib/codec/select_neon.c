/* Selection, 4 elements at a time, for aarch64. A byte permutation from a table compresses them, and the scalar loops
 * process the ends of arrays. There is no store around the cache, so bypass has no effect. */
#include "codec/select_kernels.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define LANES 4
#define INLINE static inline __attribute__((always_inline))

/* For each mask the bytes of its lanes, lowest first. */
#define LANE(i) 4 * (i), 4 * (i) + 1, 4 * (i) + 2, 4 * (i) + 3
static const uint8_t orders[16][16] = {
    {0},
    {LANE(0)},
    {LANE(1)},
    {LANE(0), LANE(1)},
    {LANE(2)},
    {LANE(0), LANE(2)},
    {LANE(1), LANE(2)},
    {LANE(0), LANE(1), LANE(2)},
    {LANE(3)},
    {LANE(0), LANE(3)},
    {LANE(1), LANE(3)},
    {LANE(0), LANE(1), LANE(3)},
    {LANE(2), LANE(3)},
    {LANE(0), LANE(2), LANE(3)},
    {LANE(1), LANE(2), LANE(3)},
    {LANE(0), LANE(1), LANE(2), LANE(3)},
};
static const uint8_t set_bits[16] = {0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4};

INLINE uint32x4_t abs_bits(float32x4_t x) {
    return vandq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x7fffffff));
}

/* Bit i is lane i of all_or_none. */
INLINE uint32_t lanes_of(uint32x4_t all_or_none) {
    static const uint32_t bits[LANES] = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(all_or_none, vld1q_u32(bits)));
}

INLINE uint32x4_t compress(uint32x4_t v, uint32_t mask) {
    return vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(v), vld1q_u8(orders[mask])));
}

INLINE void store_compressed(float *to, float32x4_t v, uint32_t mask) {
    vst1q_f32(to, vreinterpretq_f32_u32(compress(vreinterpretq_u32_f32(v), mask)));
}

static size_t neon_stream(const float *gradient, const float *residual_in, float *residual_out, size_t n,
                          uint32_t first, uint32_t t_lo, uint32_t t_clear, int bypass, uint32_t *indices,
                          float *values, uint32_t *max_bits) {
    static const uint32_t iota[LANES] = {0, 1, 2, 3};
    const uint32x4_t low = vdupq_n_u32(t_lo), left = vdupq_n_u32(t_clear), zero = vdupq_n_u32(0);
    const float32x4_t cleared = vdupq_n_f32(TAGC_ZERO_RESIDUAL);
    uint32x4_t index = vaddq_u32(vdupq_n_u32(first), vld1q_u32(iota)), max = zero;
    size_t n_candidates = 0, i = 0;
    (void)bypass;
    for (; i + LANES <= n; i += LANES, index = vaddq_u32(index, vdupq_n_u32(LANES))) {
        float32x4_t acc = vaddq_f32(vld1q_f32(gradient + i), vld1q_f32(residual_in + i));
        uint32x4_t bits = abs_bits(acc);
        uint32x4_t clear = vorrq_u32(vcgeq_u32(bits, left), vceqq_u32(bits, zero));
        max = vmaxq_u32(max, bits);
        vst1q_f32(residual_out + i, vbslq_f32(clear, cleared, acc));
        uint32_t mask = lanes_of(vcgeq_u32(bits, low));
        vst1q_u32(indices + n_candidates, compress(index, mask));
        store_compressed(values + n_candidates, acc, mask);
        n_candidates += set_bits[mask];
    }
    if (vmaxvq_u32(max) > *max_bits) *max_bits = vmaxvq_u32(max);
    return n_candidates + tagc_select_scalar.stream(gradient + i, residual_in + i, residual_out + i, n - i,
                                                    first + (uint32_t)i, t_lo, t_clear, 0,
                                                    indices + n_candidates, values + n_candidates, max_bits);
}

static void neon_fence(void) {
}

static size_t neon_band(const float *values, size_t n, uint32_t t_hi, float *band) {
    const uint32x4_t limit = vdupq_n_u32(t_hi);
    size_t n_band = 0, i = 0;
    for (; i + LANES <= n; i += LANES) {
        float32x4_t v = vld1q_f32(values + i);
        uint32_t inside = lanes_of(vcltq_u32(abs_bits(v), limit));
        store_compressed(band + n_band, v, inside);
        n_band += set_bits[inside];
    }
    return n_band + tagc_select_scalar.band(values + i, n - i, t_hi, band + n_band);
}

static size_t neon_count(const float *values, size_t n, uint32_t threshold, size_t *n_ties) {
    const uint32x4_t limit = vdupq_n_u32(threshold);
    size_t n_above = 0, n_equal = 0, i = 0;
    while (i + LANES <= n) { /* lanes count up to 2^16, less than 2^32 */
        uint32x4_t above = vdupq_n_u32(0), equal = above;
        for (size_t end = n - i > 1 << 16 ? i + (1 << 16) : n; i + LANES <= end; i += LANES) {
            uint32x4_t bits = abs_bits(vld1q_f32(values + i));
            above = vsubq_u32(above, vcgtq_u32(bits, limit));
            equal = vsubq_u32(equal, vceqq_u32(bits, limit));
        }
        n_above += vaddvq_u32(above);
        n_equal += vaddvq_u32(equal);
    }
    n_above += tagc_select_scalar.count(values + i, n - i, threshold, n_ties);
    *n_ties += n_equal;
    return n_above;
}

static void neon_keep(uint32_t *indices, float *values, size_t n, uint32_t threshold, size_t n_ties,
                      float *residual, int bypass, uint32_t *sent_indices, float *sent_values,
                      size_t n_sent) {
    const uint32x4_t limit = vdupq_n_u32(threshold);
    size_t j = 0, i = 0, n_lost = 0;
    for (; i + LANES <= n && j + LANES <= n_sent; i += LANES) {
        uint32x4_t index = vld1q_u32(indices + i);
        float32x4_t v = vld1q_f32(values + i);
        uint32x4_t bits = abs_bits(v);
        uint32_t sent = lanes_of(vcgtq_u32(bits, limit)), ties = lanes_of(vceqq_u32(bits, limit));
        for (; ties && n_ties; ties &= ties - 1, n_ties--) sent |= ties & -ties;
        vst1q_u32(sent_indices + j, compress(index, sent));
        store_compressed(sent_values + j, v, sent);
        j += set_bits[sent];
        for (uint32_t lost = ~sent & 15; lost; lost &= lost - 1) {
            size_t at = i + (size_t)__builtin_ctz(lost);
            if (residual) {
                residual[indices[at]] = values[at];
            } else {
                indices[n_lost] = indices[at];
                values[n_lost++] = values[at];
            }
        }
    }
    if (!residual) tagc_select_close_up(indices, values, n_lost, i, n);
    size_t from = residual ? i : n_lost;
    tagc_select_scalar.keep(indices + from, values + from, n - i, threshold, n_ties, residual, bypass,
                            sent_indices + j, sent_values + j, n_sent - j);
}

const tagc_select_kernels tagc_select_neon = {
    .name = "neon",
    .stream = neon_stream,
    .fence = neon_fence,
    .band = neon_band,
    .count = neon_count,
    .keep = neon_keep,
};
#endif
