/* Count sketch: three signed hashed cells per item. peel.h takes the sums apart again by knowing the positions.
 *
 * Element i of n has row i / width and column i % width. Table t (three disjoint ones of n_rows rows each) holds it
 * in row h_t(row), column (column XOR g_t(row)), with sign s_t(i). */
#ifndef TAGC_PAPER_SKETCH_H
#define TAGC_PAPER_SKETCH_H

#include "tagc/paper.h"
#include <stddef.h>
#include <stdint.h>

typedef struct tagc_sketch {
    size_t n;       /* elements of the fragment, < 2^32 */
    size_t n_rows;  /* of each table */
    size_t width;   /* of a row, a power of two up to 1024 */
    size_t n_cells; /* 3 * n_rows * width, at least what was asked for */
    uint64_t seed;
} tagc_sketch;

/* Shape for a fragment of n elements with `n_cells` cells; small sketches get narrower rows so that there are enough
 * of them to hash over. n_cells is rounded up to a possible shape: by less than 1 in 4096 from 12,288 cells on, by
 * at most 2 cells below, to at least 96 and at most about 2^32. */
void tagc_sketch_init(tagc_sketch *sketch, size_t n, size_t n_cells, uint64_t seed);

/* cells (n_cells) += signed values (n_items), both of this kind: fp32, or integers whose sums wrap modulo 2^32. */
void tagc_sketch_encode(tagc_cells kind, const tagc_sketch *sketch, const uint32_t *indices,
                        const void *values, size_t n_items, void *cells);
/* fixed (n) = values * 2^scale_exponent rounded to nearest even. The caller guarantees
 * |value| * 2^scale_exponent * world_size < 2^31. */
void tagc_sketch_round(const float *values, size_t n, int scale_exponent, int32_t *fixed);
/* The largest exponent in [-126, 126] for which world_size times the rounded max_abs * 2^exponent stays below 2^31
 * (0 for max_abs == 0). */
int tagc_sketch_scale_exponent(float max_abs, int world_size);

#endif
