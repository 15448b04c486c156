/* The plain loops of selection, for processors without a vector version and for the ends of arrays. */
#include "codec/select_kernels.h"
#include "core/cpu.h"

static size_t scalar_stream(const float *gradient, const float *residual_in, float *residual_out, size_t n,
                            uint32_t first, uint32_t t_lo, uint32_t t_clear, int bypass, uint32_t *indices,
                            float *values, uint32_t *max_bits) {
    (void)bypass;
    size_t n_candidates = 0;
    uint32_t max = *max_bits;
    for (size_t i = 0; i < n; i++) {
        union {
            float value;
            uint32_t bits;
        } acc = {.value = gradient[i] + residual_in[i]}, left = acc;
        uint32_t magnitude = acc.bits & 0x7fffffffu;
        uint32_t chosen = magnitude >= t_lo;
        if (magnitude > max) max = magnitude;
        indices[n_candidates] =
            first + (uint32_t)i; /* always written, counted only if selected, to avoid a branch */
        values[n_candidates] = acc.value;
        n_candidates += chosen;
        uint32_t clear = 0u - (uint32_t)((magnitude >= t_clear) | (magnitude == 0));
        left.bits = (acc.bits & ~clear) | (clear << 31); /* acc or TAGC_ZERO_RESIDUAL */
        residual_out[i] = left.value;
    }
    *max_bits = max;
    return n_candidates;
}

static void scalar_fence(void) {
}

static size_t scalar_band(const float *values, size_t n, uint32_t t_hi, float *band) {
    size_t n_band = 0;
    for (size_t i = 0; i < n; i++) {
        band[n_band] = values[i];
        n_band += tagc_abs_bits(values[i]) < t_hi;
    }
    return n_band;
}

static size_t scalar_count(const float *values, size_t n, uint32_t threshold, size_t *n_ties) {
    size_t n_above = 0, n_equal = 0;
    for (size_t i = 0; i < n; i++) {
        n_above += tagc_abs_bits(values[i]) > threshold;
        n_equal += tagc_abs_bits(values[i]) == threshold;
    }
    *n_ties = n_equal;
    return n_above;
}

static void scalar_keep(uint32_t *indices, float *values, size_t n, uint32_t threshold, size_t n_ties,
                        float *residual, int bypass, uint32_t *sent_indices, float *sent_values,
                        size_t n_sent) {
    (void)bypass;
    (void)n_sent;
    size_t j = 0, n_lost = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = tagc_abs_bits(values[i]);
        int tie = bits == threshold && n_ties > 0;
        n_ties -= (size_t)tie;
        if (bits > threshold || tie) {
            sent_indices[j] = indices[i];
            sent_values[j++] = values[i];
        } else if (residual) {
            residual[indices[i]] = values[i];
        } else {
            indices[n_lost] = indices[i];
            values[n_lost++] = values[i];
        }
    }
}

const tagc_select_kernels tagc_select_scalar = {
    .name = "scalar",
    .stream = scalar_stream,
    .fence = scalar_fence,
    .band = scalar_band,
    .count = scalar_count,
    .keep = scalar_keep,
};

size_t tagc_select_available(const tagc_select_kernels *available[TAGC_SELECT_MAX_KERNELS]) {
    size_t n = 0;
#if defined(__x86_64__)
    if (tagc_cpu_has(TAGC_CPU_AVX512)) available[n++] = &tagc_select_avx512;
    if (tagc_cpu_has(TAGC_CPU_AVX2)) available[n++] = &tagc_select_avx2;
#endif
#if defined(__aarch64__)
    if (tagc_cpu_has(TAGC_CPU_NEON)) available[n++] = &tagc_select_neon;
#endif
    available[n++] = &tagc_select_scalar;
    return n;
}
