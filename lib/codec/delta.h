/* Low-bit blocks: parameters in fewer bits than bf16. A block of 256 values has one scale. The number of bits is fixed, and
 * so is the length of a body:
 *
 *   | scales: bf16 per block | codes: 256 * bits / 8 bytes per block |        the last block is padded with zeros
 *
 * value = (code - 2^(bits-1)) * scale. The sign of the scale puts the block's largest value at code 0.
 *
 * A delta is the difference of the owner's fp32 master from the bf16 replica that all ranks hold. Every rank adds the same
 * decoded delta to the same replica and rounds to bf16, so replicas stay equal bit for bit. Rounding errors are in the next
 * difference: error feedback without a residual. A replica is stored in 2 bytes per value, or in 4, where a caller computes
 * with it: the values are the same.
 *
 * The formats of values.h do not fit here. What counts is the error in the steady state, which is smaller with asymmetric codes
 * (figures in delta.c). The encoder does not need the loss. And all blocks are whole, so they pack without shuffles.
 *
 * All processor levels give the same bytes and the same values. */
#ifndef TAGC_CODEC_DELTA_H
#define TAGC_CODEC_DELTA_H

#include "tagc/tagc.h"

#define TAGC_DELTA_BLOCK 256

/* Size of a body of n values in codes of `bits` (8, 4 or 2). */
size_t tagc_delta_bytes(int bits, size_t n);

/* Encodes values - base for n values starting at `at`, a multiple of TAGC_DELTA_BLOCK, of a body of n_all; base may be NULL: the values
 * themselves. Several threads may write, and read below, parts of one body. All pointers are to the whole. width: bytes of a value of base,
 * 2 (bf16) or 4 (fp32). Returns 1 if a difference is not finite: its block then has a scale of NaN, and the other blocks are unaffected. */
int tagc_delta_encode_part(int bits, const float *values, const void *base, size_t width, size_t n_all,
                           size_t at, size_t n, uint8_t *body);

/* TAGC_ERR_CORRUPT unless all scales are finite. Any codes are valid. */
tagc_status tagc_delta_validate(int bits, const uint8_t *body, size_t n);

/* values (n) = the decoded body; a block whose scale is NaN is NaN. */
void tagc_delta_decode(int bits, const uint8_t *body, float *values, size_t n);

/* Values [at, at + n) of a replica = bf16(replica + decoded body). width: as above. */
void tagc_delta_apply_part(int bits, const uint8_t *body, void *replica, size_t width, size_t n_all,
                           size_t at, size_t n);
void tagc_delta_decode_part(int bits, const uint8_t *body, float *values, size_t n_all, size_t at, size_t n);

#endif
