/* Arrays in few bits, as one message of a fixed length: for tensors that a program sends by its own means, such as those between
 * the stages of a pipeline.
 *
 *   tagc_blocks_bytes     tells the length, which follows from the options and the number of values alone
 *   tagc_blocks_encode    writes the message; the caller sends it
 *   tagc_blocks_decode    checks a message that arrived, and writes the values
 *
 * Values lie in blocks, and a block has one scale. Nothing is kept from one call to the next: there is no residual. All functions
 * are local, work in host memory, and may be called from several threads at once. INT8 takes about 1 ns a value each
 * way on one core, INT4 and INT2 several. tagc/device.h has them for a device's memory. docs/reference/wire-format.md draws the bytes. */
#ifndef TAGC_BLOCKS_H
#define TAGC_BLOCKS_H

#include "tagc/tagc.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tagc_blocks_options {
    /* Written by _init. */
    size_t struct_bytes;
    /* tagc_format of the message: INT8 (default), INT4 or INT2. Both ends must agree. */
    int format;
    /* Values per scale, a power of two in [16, 4096]. Default 64. Both ends must agree. */
    int block;
    /* tagc_format of the array that is encoded or decoded to: FP32 (default), or BF16, an array of uint16_t. */
    int element;
    /* tagc_rounding of _encode, default NEAREST. STOCHASTIC is for INT8 and INT4. */
    int rounding;
    /* What the random numbers of STOCHASTIC derive from. The same values and seed give the same bytes, so give each message
     * another one. Default 0. */
    uint64_t seed;
} tagc_blocks_options;

TAGC_API void tagc_blocks_options_init_sized(tagc_blocks_options *options, size_t struct_bytes);
#define tagc_blocks_options_init(options) tagc_blocks_options_init_sized((options), sizeof *(options))

/* Sets *n_bytes to the length of a message of n_elems values, in [0, 2^32 - 64]. */
TAGC_API tagc_status tagc_blocks_bytes(const tagc_blocks_options *options, uint64_t n_elems,
                                       uint64_t *n_bytes);

/* Encodes `values` (n_elems) into `message`. n_bytes must be what tagc_blocks_bytes says. The arrays must not overlap. A block
 * that holds NaN or Inf arrives as NaN, in all its values; other blocks are as without it. */
TAGC_API tagc_status tagc_blocks_encode(const tagc_blocks_options *options, const void *values,
                                        uint64_t n_elems, void *message, uint64_t n_bytes);

/* Decodes `message` into `values` (n_elems), BF16 by rounding to the nearest. Accepts any bytes: TAGC_ERR_CORRUPT if they are
 * damaged, TAGC_ERR_MISMATCH if they are sound and were encoded with another format, block or number of values. Then
 * `values` is unchanged. The arrays must not overlap. */
TAGC_API tagc_status tagc_blocks_decode(const tagc_blocks_options *options, const void *message,
                                        uint64_t n_bytes, void *values, uint64_t n_elems);

#ifdef __cplusplus
}
#endif

#endif
