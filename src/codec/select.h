/* Selection with error feedback: keep the k largest of gradient + residual, put the rest into the next residual.
 *
 * The order of the |acc| is that of their integer bits; ties go to the lowest index on every path and thread count.
 * Zeros (+0 and -0) are kept only when k == n. A residual of zero is written as -0.0f (TAGC_ZERO_RESIDUAL), so that
 * acc = gradient + residual is the gradient bit for bit where nothing was left. */
#ifndef TAGC_CODEC_SELECT_H
#define TAGC_CODEC_SELECT_H

#include "core/pool.h"
#include <stddef.h>
#include <stdint.h>

#define TAGC_ZERO_RESIDUAL (-0.0f)

typedef struct tagc_selection {
    size_t n_kept; /* k, or fewer where acc has fewer than k non-zeros and k < n */
    float max_abs; /* largest |acc| of the fragment; undefined when nonfinite */
    int nonfinite; /* some acc is NaN or Inf: the rest of the result is void, residual_out is garbage */
    int n_passes;  /* 1: the streaming prediction held; 2: the histogram had to be used */
} tagc_selection;

/* How many of n may be kept so that the fraction of zeros is at least sparsity, [0, 1]; below 1 one at least, of however few:
 * what is never sent never arrives. */
size_t tagc_select_count(size_t n, double sparsity);

size_t tagc_select_scratch_bytes(size_t n, size_t k, int n_threads);

/* gradient (n), residual_in (n); residual_out (n) is either residual_in itself or does not overlap it or gradient.
 * indices (k), ascending, and values (k): what was kept. scratch: TAGC_ALIGNMENT-aligned. n < 2^32. Arrays need
 * only float alignment. Uses the best kernels of the processor (core/cpu.h); all give the same bits. */
void tagc_select(const float *gradient, const float *residual_in, float *residual_out, size_t n, size_t k,
                 uint32_t *indices, float *values, void *scratch, tagc_pool *pool, tagc_selection *result);

/* The same, but what is kept is in residual_out too: acc, zeros as TAGC_ZERO_RESIDUAL. For who writes there what will
 * be lost of it: nothing is then written twice. */
void tagc_select_leaving(const float *gradient, const float *residual_in, float *residual_out, size_t n,
                         size_t k, uint32_t *indices, float *values, void *scratch, tagc_pool *pool,
                         tagc_selection *result);

/* The plain reference: same contract without scratch, in 33 sweeps over the inputs; for tests. */
void tagc_select_reference(const float *gradient, const float *residual_in, float *residual_out, size_t n,
                           size_t k, uint32_t *indices, float *values, tagc_selection *result);

#endif
