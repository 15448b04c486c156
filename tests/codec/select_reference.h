/* Selection in its simplest form: builds the threshold bit by bit and counts the whole array for each. */
#ifndef TAGC_TESTS_SELECT_REFERENCE_H
#define TAGC_TESTS_SELECT_REFERENCE_H

#include "codec/select_kernels.h"

static uint32_t acc_bits(const float *gradient, const float *residual, size_t i) {
    return tagc_abs_bits(gradient[i] + residual[i]);
}

static size_t count_at_least(const float *gradient, const float *residual, size_t n, uint32_t bits) {
    size_t count = 0;
    for (size_t i = 0; i < n; i++) count += acc_bits(gradient, residual, i) >= bits;
    return count;
}

/* Selects as tagc_select does, without scratch, in 33 sweeps over the inputs. */
static void select_reference(const float *gradient, const float *residual_in, float *residual_out, size_t n,
                             size_t k, uint32_t *indices, float *values, tagc_selection *result) {
    *result = (tagc_selection){.n_passes = 1};
    for (size_t i = 0; i < n; i++) {
        float acc = gradient[i] + residual_in[i];
        float magnitude = acc < 0 ? -acc : acc;
        if (!(magnitude <= 3.402823466e38f)) result->nonfinite = 1;
        if (magnitude > result->max_abs) result->max_abs = magnitude;
    }
    if (result->nonfinite) return;

    uint32_t threshold = 0; /* the largest value that k of the |acc| reach */
    for (uint32_t bit = 1u << 30; bit; bit >>= 1)
        if (count_at_least(gradient, residual_in, n, threshold | bit) >= k) threshold |= bit;
    size_t n_ties = k - count_at_least(gradient, residual_in, n, threshold + 1);
    if (k < n && threshold == 0) n_ties = 0;

    for (size_t i = 0; i < n; i++) {
        float acc = gradient[i] + residual_in[i];
        uint32_t bits = tagc_abs_bits(acc);
        int tie = bits == threshold && n_ties > 0;
        n_ties -= (size_t)tie;
        if (bits > threshold || tie) {
            indices[result->n_sent] = (uint32_t)i;
            values[result->n_sent++] = acc;
        }
        residual_out[i] = bits > threshold || tie || bits == 0 ? TAGC_ZERO_RESIDUAL : acc;
    }
}

#endif
