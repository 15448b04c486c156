/* Packed values: all ranks know the union, so values travel in its order without positions. */
#ifndef TAGC_PAPER_PACK_H
#define TAGC_PAPER_PACK_H

#include <stddef.h>
#include <stdint.h>

/* For each of the n_union ascending positions `union_indices`, packed[j] is the selected value there (indices, values:
 * n_sent ascending pairs, a subset of the union). At other positions: if `residual` (n, as selection wrote it) is
 * given, the value found there, which becomes TAGC_ZERO_RESIDUAL; if it is NULL, -0.0f, which adds nothing. */
void tagc_pack(const uint32_t *union_indices, size_t n_union, const uint32_t *indices, const float *values,
               size_t n_sent, float *residual, float *packed);

/* The same without vector instructions, for tests. */
void tagc_pack_reference(const uint32_t *union_indices, size_t n_union, const uint32_t *indices,
                         const float *values, size_t n_sent, float *residual, float *packed);

/* out (n) = zero except out[union_indices[j]] = packed[j] * scale (one multiplication, none when scale == 1). */
void tagc_unpack(const uint32_t *union_indices, size_t n_union, const float *packed, float scale, float *out,
                 size_t n);

#endif
