/* Finds the cells of an element. Only this file turns positions into hashes. Encoding and peeling use it in chunks, so that
 * the vector versions fill whole registers. */
#ifndef TAGC_PAPER_LOCATE_H
#define TAGC_PAPER_LOCATE_H

#include "paper/sketch.h"
#include <string.h>

#define TAGC_LOCATE_CHUNK 256 /* items at a time: their cells stay in the first-level cache */

/* Keys of one sketch, derived from its seed. */
typedef struct tagc_locator {
    uint32_t n_rows, column_mask, width_log2;
    uint32_t table_cells; /* n_rows * width */
    uint32_t before[3], between[3], sign;
} tagc_locator;

typedef struct tagc_located {
    uint32_t cell[3][TAGC_LOCATE_CHUNK];
    uint32_t signs[TAGC_LOCATE_CHUNK]; /* bit 31 - t is set where table t holds the negative */
} tagc_located;

void tagc_locator_init(tagc_locator *locator, const tagc_sketch *sketch);
/* n <= chunk. */
void tagc_locate(const tagc_locator *locator, const uint32_t *indices, size_t n, tagc_located *out);
/* The plain version, and the one for processors without AVX-512 (returns 1 if this processor can run it). Tests compare
 * them. */
void tagc_locate_reference(const tagc_locator *locator, const uint32_t *indices, size_t n, tagc_located *out);
int tagc_locate_avx2(const tagc_locator *locator, const uint32_t *indices, size_t n, tagc_located *out);

/* Prefetches the located cells for writing, a chunk at a time. Otherwise the adding loop would wait for each miss. */
static inline void tagc_prefetch(const tagc_located *at, size_t n, const void *cells, size_t cell_bytes) {
    for (int t = 0; t < 3; t++)
        for (size_t k = 0; k < n; k++)
            __builtin_prefetch((const char *)cells + at->cell[t][k] * cell_bytes, 1);
}

/* Cells and values are words of 4 bytes, of either kind. */
typedef uint32_t __attribute__((may_alias)) tagc_word;

static inline float tagc_word_float(uint32_t word) {
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

static inline uint32_t tagc_float_word(float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    return word;
}

static inline uint32_t tagc_word_sum(tagc_cells kind, uint32_t a, uint32_t b) {
    return kind == TAGC_CELLS_FIXED ? a + b : tagc_float_word(tagc_word_float(a) + tagc_word_float(b));
}

/* The word with its sign in table t; its own inverse. */
static inline uint32_t tagc_word_signed(tagc_cells kind, uint32_t word, uint32_t signs, int t) {
    uint32_t negative = 0u - ((signs >> (31 - t)) & 1u);
    return kind == TAGC_CELLS_FIXED ? (word ^ negative) - negative : word ^ (negative & 0x80000000u);
}

#endif
