/* Positions of the selected elements of a fragment, in little more than their entropy.
 *
 * The fragment is divided into chunks of `chunk` elements (the last may be shorter), so that a decoder can jump, threads can
 * share the work, and sums are updated while they are in the cache. Both sides know n and k, and so the chunk: the smallest
 * power of two from 2048 to 32768 with chunk * k >= 1280 * n. Bytes, little-endian, unaligned:
 *
 *   0       u32   n_items, at most k
 *   4       u8    form: 0 a bitmap, 2 to 15 gaps of so many bits
 *   5       u8    3 zeros
 *   8       per chunk: u16 items, u16 codes (0 in a bitmap)
 *   8 + 4 * n_chunks    per chunk:
 *             bitmap: ceil(elements of the chunk / 8) bytes; element i is bit i % 8 of byte i / 8
 *             gaps:   ceil(codes * bits / 8) bytes; code j is bits [j * bits, (j + 1) * bits), lowest first
 *
 * The position starts at 0 in each chunk. Code 2^bits - 1 adds itself to the position. A smaller code v adds v, marks an item
 * there, and adds 1. Bits after the last code are zero. Gaps of random positions at density p take
 * bits / (1 - (1 - p)^(2^bits - 1)) bits per item; clustered ones take less.
 *
 * The sender chooses the width that takes the fewest bytes (in a sample of chunks), or a bitmap if that is at most an eighth
 * larger. A receiver accepts both. */
#ifndef TAGC_CODEC_GAPS_H
#define TAGC_CODEC_GAPS_H

#include "codec/code_kernels.h"
#include "core/pool.h"
#include <stddef.h>
#include <stdint.h>

#define TAGC_GAPS_MAX_CHUNK 32768       /* elements */
#define TAGC_GAPS_SLACK TAGC_CODE_LANES /* positions that next may write past the last */

typedef struct tagc_gaps {
    size_t n, k; /* elements of the fragment, < 2^32; items at most */
    size_t chunk, n_chunks;
    const tagc_code_kernels *kernels; /* the best; tests put another here */
} tagc_gaps;

void tagc_gaps_init(tagc_gaps *gaps, size_t n, size_t k);
size_t tagc_gaps_max_bytes(const tagc_gaps *gaps);
size_t tagc_gaps_scratch_bytes(const tagc_gaps *gaps); /* of encode */
/* The width whose worst case takes the fewest bytes; *n_bytes becomes that size, without the table. */
int tagc_gaps_safest_bits(const tagc_gaps *gaps, size_t *n_bytes);

/* indices (n_items): ascending, each < n; n_items <= k. Writes at most max_bytes; returns how many. */
size_t tagc_gaps_encode(const tagc_gaps *gaps, const uint32_t *indices, size_t n_items, uint8_t *bytes,
                        void *scratch, tagc_pool *pool);

/* The length of the code at the front of `bytes` (n_bytes of any content), and its items; 0 if it is damaged. */
size_t tagc_gaps_validate(const tagc_gaps *gaps, const uint8_t *bytes, size_t n_bytes, size_t *n_items);

/* Where a chunk begins, in a valid code. */
typedef struct tagc_gaps_cursor {
    size_t chunk;  /* its number */
    size_t item;   /* its first */
    size_t offset; /* of its bits, in bytes */
} tagc_gaps_cursor;

size_t tagc_gaps_items(const uint8_t *bytes); /* of a valid code */
size_t tagc_gaps_bytes(const tagc_gaps *gaps, const uint8_t *bytes);
void tagc_gaps_seek(const tagc_gaps *gaps, const uint8_t *bytes, size_t chunk, tagc_gaps_cursor *cursor);
size_t tagc_gaps_chunk_elems(const tagc_gaps *gaps, size_t chunk);
/* Items of the chunk at the cursor. */
size_t tagc_gaps_next_items(const uint8_t *bytes, const tagc_gaps_cursor *cursor);
/* Writes the positions, from the chunk's first element, of the items of the cursor's chunk, and moves the cursor on.
 * Returns their number. positions: room for them and TAGC_GAPS_SLACK more. */
size_t tagc_gaps_next(const tagc_gaps *gaps, const uint8_t *bytes, tagc_gaps_cursor *cursor,
                      uint32_t *positions);

#endif
