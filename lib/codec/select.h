/* Selection with error feedback: select the k largest of gradient + residual, and put the rest into the next residual.
 *
 * |acc| is ordered by its integer bits. Ties go to the lowest index at every processor level and thread count. Zeros (+0
 * and -0) are selected only if k == n. A zero residual is written as -0.0f (TAGC_ZERO_RESIDUAL), so that
 * acc = gradient + residual is the gradient bit for bit. */
#ifndef TAGC_CODEC_SELECT_H
#define TAGC_CODEC_SELECT_H

#include "codec/addends.h"
#include "core/pool.h"
#include <stddef.h>
#include <stdint.h>

#define TAGC_ZERO_RESIDUAL (-0.0f)

typedef struct tagc_selection {
    size_t n_sent; /* k, or fewer if acc has fewer than k non-zeros and k < n */
    float max_abs; /* largest |acc| of the fragment; undefined when nonfinite */
    int nonfinite; /* some acc is NaN or Inf: the other results and residual_out are undefined */
    int n_passes;  /* 1: the prediction held; 2: the histogram was needed */
} tagc_selection;

/* How many of n may be selected so that the share of zeros is at least `sparsity`, [0, 1]. Below 1 at least one, so that no
 * element waits forever. */
size_t tagc_select_count(size_t n, double sparsity);

size_t tagc_select_scratch_bytes(size_t n, size_t k, int n_threads);

/* gradient (n), residual_in (n); residual_out (n) is either residual_in itself or overlaps neither it nor gradient. indices
 * (k), ascending, and values (k): the selected elements. scratch: TAGC_ALIGNMENT-aligned. n < 2^32. Arrays need only
 * float alignment. All processor levels (core/cpu.h) give the same bits. */
void tagc_select(const float *gradient, const float *residual_in, float *residual_out, size_t n, size_t k,
                 uint32_t *indices, float *values, void *scratch, tagc_pool *pool, tagc_selection *result);

/* The same, but residual_out also holds the selected elements: acc, zeros as TAGC_ZERO_RESIDUAL. For callers that will
 * write their loss there, so that nothing is written twice. */
void tagc_select_leaving(const float *gradient, const float *residual_in, float *residual_out, size_t n,
                         size_t k, uint32_t *indices, float *values, void *scratch, tagc_pool *pool,
                         tagc_selection *result);

/* The same selection from addends in any formats, of which the residual is not NULL. residual_out, a row in the format of the
 * residual that does not overlap it, is undefined until tagc_select_settle. */
void tagc_select_addends(const tagc_addends *addends, void *residual_out, uint32_t seed, size_t k,
                         uint32_t *indices, float *values, void *scratch, tagc_pool *pool,
                         tagc_selection *result);

/* Writes what is left of residual_out: it then holds acc, but at `indices` the errors (n_sent), or zeros if errors is NULL; as
 * tagc_residual_write does with `seed`. Arrays, scratch and pool are those of the selection, which was finite; nothing has
 * changed them since. n is not 0. */
void tagc_select_settle(const float *errors, void *scratch);

#endif
