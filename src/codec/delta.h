/* Low-bit blocks: how parameters travel when bf16 is too much. A block of 256 values has one scale, the bits are fixed,
 * and so is the length of a body:
 *
 *   | scales: bf16 per block | codes: 256 * bits / 8 bytes per block |        the last block is padded with zeros
 *
 * value = (code - 2^(bits-1)) * scale, where the scale has the sign that puts the block's largest value at code 0.
 *
 * A delta is the difference of the owner's fp32 master from the bf16 replica that all ranks hold. Everyone adds the same
 * decoded delta to the same replica and rounds to bf16, so replicas stay alike to the bit, and what a delta could not say
 * is in the next difference: error feedback without a residual. Hence not a format of values.h: what counts is the error
 * that deltas settle at, for which codes are not symmetric (figures in delta.c), nobody asks the encoder what is lost, and
 * blocks are all whole, so that they pack without shuffles.
 *
 * All instruction sets give the same bytes and the same values. */
#ifndef TAGC_CODEC_DELTA_H
#define TAGC_CODEC_DELTA_H

#include "tagc/tagc.h"

#define TAGC_DELTA_BLOCK 256

/* Of n values in codes of `bits` (8, 4 or 2). */
size_t tagc_delta_bytes(int bits, size_t n);

/* values - base (n) as a body; base NULL: the values themselves. Returns 1 when a difference is not finite: its block
 * then has a scale of NaN, the others are as always. */
int tagc_delta_encode(int bits, const float *values, const float *base, size_t n, uint8_t *body);

/* The same of the n values from `at` on alone, a multiple of TAGC_DELTA_BLOCK, of a body of n_all. Parts of one body may be
 * written, and read below, by several threads. All pointers are to the whole. */
int tagc_delta_encode_part(int bits, const float *values, const float *base, size_t n_all, size_t at,
                           size_t n, uint8_t *body);

/* TAGC_ERR_CORRUPT unless all scales are finite. Any codes will do. */
tagc_status tagc_delta_validate(int bits, const uint8_t *body, size_t n);

/* replica (n) = bf16(replica + decoded body), as fp32. */
void tagc_delta_apply(int bits, const uint8_t *body, float *replica, size_t n);

/* values (n) = the decoded body; a block whose scale is NaN is NaN. */
void tagc_delta_decode(int bits, const uint8_t *body, float *values, size_t n);

void tagc_delta_apply_part(int bits, const uint8_t *body, float *replica, size_t n_all, size_t at, size_t n);
void tagc_delta_decode_part(int bits, const uint8_t *body, float *values, size_t n_all, size_t at, size_t n);

#endif
