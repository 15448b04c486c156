/* Selection, 8 elements at a time, for processors without AVX-512: the compression is a permutation looked up
 * in two halves, and the ends of arrays go to the scalar loops. */
#include "codec/select_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,popcnt")))
#define LANES 8

/* Positions of the set bits of a nibble, one per byte, lowest first. */
static const uint32_t nibble_order[16] = {0x0, 0x0,   0x1,   0x100,   0x2,   0x200,   0x201,   0x20100,
                                          0x3, 0x300, 0x301, 0x30100, 0x302, 0x30200, 0x30201, 0x3020100};

/* The permutation that moves the lanes of mask to the front. */
TARGET static inline __m256i compress_order(uint32_t mask) {
    uint32_t low = mask & 15;
    uint64_t high = nibble_order[mask >> 4] + 0x04040404u;
    uint64_t order = nibble_order[low] | high << (8 * _mm_popcnt_u32(low));
    return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)order));
}

TARGET static inline __m256i abs_bits(__m256 x) {
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
}

TARGET static inline uint32_t lanes_of(__m256i all_or_none) {
    return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(all_or_none));
}

TARGET static inline uint32_t reduce_max(__m256i v) {
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(m);
}

TARGET static size_t avx2_stream(const float *gradient, const float *residual_in, float *residual_out,
                                 size_t n, uint32_t first, uint32_t t_lo, uint32_t t_clear, int bypass,
                                 uint32_t *indices, float *values, uint32_t *max_bits) {
    size_t head = bypass ? (32 - ((uintptr_t)residual_out & 31)) % 32 / sizeof(float) : 0;
    if (head > n) head = n;
    size_t n_candidates = tagc_select_scalar.stream(gradient, residual_in, residual_out, head, first, t_lo,
                                                    t_clear, 0, indices, values, max_bits);
    /* |acc|, t_lo - 1 and t_clear - 1 are below 2^31: signed comparisons do */
    const __m256i below = _mm256_set1_epi32((int)(t_lo - 1)), zero = _mm256_setzero_si256();
    const __m256i left = _mm256_set1_epi32((int)(t_clear - 1));
    const __m256 cleared = _mm256_set1_ps(TAGC_ZERO_RESIDUAL);
    __m256i index = _mm256_add_epi32(_mm256_set1_epi32((int)(first + (uint32_t)head)),
                                     _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    __m256i max = zero;
    size_t i = head;
    for (; i + LANES <= n; i += LANES, index = _mm256_add_epi32(index, _mm256_set1_epi32(LANES))) {
        __m256 acc = _mm256_add_ps(_mm256_loadu_ps(gradient + i), _mm256_loadu_ps(residual_in + i));
        __m256i bits = abs_bits(acc);
        max = _mm256_max_epu32(max, bits);
        __m256i chosen = _mm256_cmpgt_epi32(bits, below);
        __m256i clear = _mm256_or_si256(_mm256_cmpgt_epi32(bits, left), _mm256_cmpeq_epi32(bits, zero));
        __m256 rest = _mm256_blendv_ps(acc, cleared, _mm256_castsi256_ps(clear));
        if (bypass)
            _mm256_stream_ps(residual_out + i, rest);
        else
            _mm256_storeu_ps(residual_out + i, rest);
        uint32_t mask = lanes_of(chosen);
        __m256i order = compress_order(mask);
        _mm256_storeu_si256((__m256i *)(indices + n_candidates), _mm256_permutevar8x32_epi32(index, order));
        _mm256_storeu_ps(values + n_candidates, _mm256_permutevar8x32_ps(acc, order));
        n_candidates += (size_t)_mm_popcnt_u32(mask);
    }
    if (reduce_max(max) > *max_bits) *max_bits = reduce_max(max);
    return n_candidates + tagc_select_scalar.stream(gradient + i, residual_in + i, residual_out + i, n - i,
                                                    first + (uint32_t)i, t_lo, t_clear, 0,
                                                    indices + n_candidates, values + n_candidates, max_bits);
}

static void avx2_fence(void) {
    _mm_sfence();
}

TARGET static size_t avx2_band(const float *values, size_t n, uint32_t t_hi, float *band) {
    const __m256i limit = _mm256_set1_epi32((int)t_hi);
    size_t n_band = 0, i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m256 v = _mm256_loadu_ps(values + i);
        uint32_t inside = lanes_of(_mm256_cmpgt_epi32(limit, abs_bits(v)));
        _mm256_storeu_ps(band + n_band, _mm256_permutevar8x32_ps(v, compress_order(inside)));
        n_band += (size_t)_mm_popcnt_u32(inside);
    }
    return n_band + tagc_select_scalar.band(values + i, n - i, t_hi, band + n_band);
}

TARGET static size_t avx2_count(const float *values, size_t n, uint32_t threshold, size_t *n_ties) {
    const __m256i limit = _mm256_set1_epi32((int)threshold);
    size_t n_above = 0, n_equal = 0, i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m256i bits = abs_bits(_mm256_loadu_ps(values + i));
        n_above += (size_t)_mm_popcnt_u32(lanes_of(_mm256_cmpgt_epi32(bits, limit)));
        n_equal += (size_t)_mm_popcnt_u32(lanes_of(_mm256_cmpeq_epi32(bits, limit)));
    }
    n_above += tagc_select_scalar.count(values + i, n - i, threshold, n_ties);
    *n_ties += n_equal;
    return n_above;
}

TARGET static void avx2_keep(const uint32_t *indices, const float *values, size_t n, uint32_t threshold,
                             size_t n_ties, float *residual, int bypass, uint32_t *kept_indices,
                             float *kept_values, size_t n_kept) {
    const __m256i limit = _mm256_set1_epi32((int)threshold);
    size_t j = 0, i = 0;
    for (; i + LANES <= n && j + LANES <= n_kept; i += LANES) {
        __m256i index = _mm256_loadu_si256((const __m256i *)(indices + i));
        __m256 v = _mm256_loadu_ps(values + i);
        __m256i bits = abs_bits(v);
        uint32_t kept = lanes_of(_mm256_cmpgt_epi32(bits, limit));
        uint32_t ties = lanes_of(_mm256_cmpeq_epi32(bits, limit));
        for (; ties && n_ties; ties &= ties - 1, n_ties--) kept |= ties & -ties;
        __m256i order = compress_order(kept);
        _mm256_storeu_si256((__m256i *)(kept_indices + j), _mm256_permutevar8x32_epi32(index, order));
        _mm256_storeu_ps(kept_values + j, _mm256_permutevar8x32_ps(v, order));
        j += (size_t)_mm_popcnt_u32(kept);
        for (uint32_t lost = residual ? ~kept & 0xff : 0; lost; lost &= lost - 1) {
            size_t at = i + (size_t)__builtin_ctz(lost);
            residual[indices[at]] = values[at];
        }
    }
    tagc_select_scalar.keep(indices + i, values + i, n - i, threshold, n_ties, residual, bypass,
                            kept_indices + j, kept_values + j, n_kept - j);
}

const tagc_select_kernels tagc_select_avx2 = {
    .name = "avx2",
    .stream = avx2_stream,
    .fence = avx2_fence,
    .band = avx2_band,
    .count = avx2_count,
    .keep = avx2_keep,
};
#endif
