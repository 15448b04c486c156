/* Shape and cells of the count sketch: encoding, the fixed-point scale.
 *
 * THEORY. Each item is an edge of a 3-uniform hypergraph whose vertices are the cells: one cell in each of
 * three disjoint tables. A cell that holds one item gives that item's value away; taking the item out of its
 * two other cells may leave them with one item each, and so on in rounds. A random hypergraph comes apart
 * completely, with probability tending to 1, below 0.818 items per cell; we ask for 0.75 at most. What stays
 * is the 2-core.
 *
 * ROWS. Hashing whole rows of `width` elements costs one hash per row and keeps neighbours together in the
 * cache:
 *
 *     element i = row * width + column        table t:  row of cells h_t(row), column (column XOR g_t(row))
 *
 *     row r |a b . . c . . .|      table 0, row h_0(r) |. c . . b a . .|    g_0 = 5: columns 0, 1, 4 -> 5, 4, 1
 *                                  table 1, row h_1(r) |. . a b . . c .|    g_1 = 2
 *                                  table 2, row h_2(r) |c . . . a b . .|    g_2 = 4
 *
 * Items of one row never meet. The XOR is what makes it work for scattered items: without it column c of
 * every row lands in column c of the tables, which are then `width` separate little sketches, and a hot
 * column sinks one. With it, items of two rows meet in one table with probability 1 / (n_rows * width), as if
 * hashed alone.
 *
 * FULL ROWS. When supports are runs that fill rows (the gradient of an embedding), the XOR only permutes a
 * full row, and rows come apart, or not, as wholes: the hypergraph shrinks to rows. Its most likely failure
 * is two rows with the same three rows of cells: with K = 3 * load * n_rows full rows about K^2 / 2 /
 * n_rows^3 = 4.5 load^2 / n_rows such pairs are expected. Hence the width is not fixed: it is the largest
 * that leaves MIN_ROWS = 4096 rows per table, for a failure in 3,600 seeds at load 0.5 and in 1,600 at load
 * 0.75, where rows of 1024 would fail once in 68 for a matrix of 2.36 M elements at a tenth as many cells.
 * Scattered items fail 4.5 load^2 * 3 / n_cells of the time, which is unavoidable and matters below some 10^4
 * cells only; callers that see leftovers try another seed.
 *
 * EXAMPLE. n = 2,359,296 (768 x 3072), asked for n / 10 = 235,930 cells: 78,644 per table, / 4096 = 19.2, so
 * width 16 and 4,916 rows, 235,968 cells in all. Element 1,000,003 is row 62,500, column 3. If h_1 = 77 and
 * g_1 = 6, its cell in table 1 is 4,916 * 16 + 77 * 16 + (3 XOR 6) = 79,893. */
#include "paper/locate.h"

#include <math.h>

#define MIN_ROWS 4096u
#define MAX_WIDTH 1024u
#define MIN_CELLS 96u

void tagc_sketch_init(tagc_sketch *sketch, size_t n, size_t n_cells, uint64_t seed) {
    size_t max_cells = UINT32_MAX - 3 * MAX_WIDTH; /* cells are numbered in 32 bits */
    size_t wanted = n_cells < MIN_CELLS ? MIN_CELLS : n_cells > max_cells ? max_cells : n_cells;
    size_t width = MAX_WIDTH;
    while (width > 1 && wanted / (3 * width) < MIN_ROWS) width /= 2;
    sketch->n = n;
    sketch->width = width;
    sketch->n_rows = (wanted + 3 * width - 1) / (3 * width);
    sketch->n_cells = 3 * sketch->n_rows * width;
    sketch->seed = seed;
}

static inline __attribute__((always_inline)) void encode(tagc_cells kind, const tagc_sketch *sketch,
                                                         const uint32_t *indices, const tagc_word *values,
                                                         size_t n_items, tagc_word *cells) {
    tagc_locator locator;
    tagc_located at;
    tagc_locator_init(&locator, sketch);
    for (size_t begin = 0; begin < n_items; begin += TAGC_LOCATE_CHUNK) {
        size_t n = n_items - begin < TAGC_LOCATE_CHUNK ? n_items - begin : TAGC_LOCATE_CHUNK;
        tagc_locate(&locator, indices + begin, n, &at);
        tagc_prefetch(&at, n, cells, sizeof *cells);
        for (size_t k = 0; k < n; k++)
            for (int t = 0; t < 3; t++) {
                tagc_word *cell = &cells[at.cell[t][k]];
                *cell = tagc_word_sum(kind, *cell, tagc_word_signed(kind, values[begin + k], at.signs[k], t));
            }
    }
}

void tagc_sketch_encode(tagc_cells kind, const tagc_sketch *sketch, const uint32_t *indices,
                        const void *values, size_t n_items, void *cells) {
    if (kind == TAGC_CELLS_FIXED)
        encode(TAGC_CELLS_FIXED, sketch, indices, values, n_items, cells);
    else
        encode(TAGC_CELLS_FP32, sketch, indices, values, n_items, cells);
}

void tagc_sketch_round(const float *values, size_t n, int scale_exponent, int32_t *fixed) {
    float scale = ldexpf(1.0f, scale_exponent);
    for (size_t i = 0; i < n; i++) fixed[i] = (int32_t)lrintf(values[i] * scale);
}

int tagc_sketch_scale_exponent(float max_abs, int world_size) {
    if (!(max_abs > 0)) return 0;
    int exponent;
    frexp((double)max_abs * world_size, &exponent); /* in [2^(exponent-1), 2^exponent) */
    exponent = 31 - exponent;
    exponent = exponent > 126 ? 126 : exponent < -126 ? -126 : exponent;
    /* With many ranks each value has few enough bits for its rounding to reach the limit. */
    if (rint(ldexp((double)max_abs, exponent)) * world_size >= 0x1p31) exponent--;
    return exponent;
}
