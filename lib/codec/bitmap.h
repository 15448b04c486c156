/* Positions of selected elements as bits, or as packed byte sums.
 *
 * Bit i of a bitmap of n bits is bit i % 8 of byte i / 8. Bits past n in the last byte are zero.
 * Fast versions may read and write whole 64-bit words: buffers are padded to tagc_bitmap_bytes(n). */
#ifndef TAGC_CODEC_BITMAP_H
#define TAGC_CODEC_BITMAP_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Bit i of a word is bit i % 8 of byte i / 8, because words are little-endian on all supported machines. */
static inline uint64_t tagc_load_word(const uint8_t *bytes) {
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

static inline void tagc_store_word(uint8_t *bytes, uint64_t word) {
    memcpy(bytes, &word, sizeof word);
}

size_t tagc_bitmap_bytes(size_t n); /* ceil(n / 64) * 8 */

/* Sets exactly the bits `indices` (n_indices, ascending, each < n). */
void tagc_bitmap_make(uint8_t *bits, size_t n, const uint32_t *indices, size_t n_indices);
void tagc_bitmap_or(uint8_t *into, const uint8_t *from, size_t n); /* n bits */
size_t tagc_bitmap_count(const uint8_t *bits, size_t n);
/* Writes the ascending positions of the set bits and returns their number. indices: tagc_bitmap_count of them. */
size_t tagc_bitmap_indices(const uint8_t *bits, size_t n, uint32_t *indices);
/* The same two without vector instructions, for tests. */
size_t tagc_bitmap_count_reference(const uint8_t *bits, size_t n);
size_t tagc_bitmap_indices_reference(const uint8_t *bits, size_t n, uint32_t *indices);
/* Returns 1 if all bits past n, up to the padding, are zero. */
int tagc_bitmap_valid(const uint8_t *bits, size_t n);

/* The published 1-bit sum: bitmaps added byte by byte modulo 256, so that equal bits carry. LOSSY, as published. */
void tagc_bitmap_add_bytes(uint8_t *into, const uint8_t *from, size_t n);

#endif
