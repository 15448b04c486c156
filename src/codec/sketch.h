/* Count sketch with a peeling plan: three signed hashed cells per item, taken apart again by knowing the positions.
 *
 * Element i of n has row i / width and column i % width. Table t (three disjoint ones of n_rows rows each) holds it
 * in row h_t(row), column (column XOR g_t(row)), with sign s_t(i). Whether it peels depends on the union index
 * alone, so the order of peeling is planned once, in rounds, from the index, and replayed over the cells. Ranks that
 * have the same shape, seed and indices make the same plan, whatever their processors. */
#ifndef TAGC_CODEC_SKETCH_H
#define TAGC_CODEC_SKETCH_H

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

/* cells (n_cells) += signed values of the items. */
void tagc_sketch_encode(const tagc_sketch *sketch, const uint32_t *indices, const float *values,
                        size_t n_items, float *cells);
/* values * 2^scale_exponent rounded to nearest even, added modulo 2^32; fixed[j] (n_items, may be NULL) the integer.
 * The caller guarantees |value| * 2^scale_exponent * world_size < 2^31. */
void tagc_sketch_encode_fixed(const tagc_sketch *sketch, const uint32_t *indices, const float *values,
                              size_t n_items, int scale_exponent, int32_t *cells, int32_t *fixed);
/* The largest exponent in [-126, 126] for which world_size times the rounded max_abs * 2^exponent stays below 2^31
 * (0 for max_abs == 0). */
int tagc_sketch_scale_exponent(float max_abs, int world_size);

/* A plan: peeling order over the n_items ascending positions of the union. Memory is the caller's. */
typedef struct tagc_plan {
    size_t n_items;
    size_t n_peeled; /* order has so many entries, in rounds */
    int n_rounds;
    uint32_t *order;     /* (n_items) item numbers j; from n_peeled on: the leftovers, ascending */
    uint32_t *cell;      /* (n_items) the cell that order[i] was alone in; undefined for leftovers */
    uint32_t *round_end; /* (TAGC_PLAN_MAX_ROUNDS) exclusive end in order of each round */
} tagc_plan;

#define TAGC_PLAN_MAX_ROUNDS 512 /* peeling that needs more stops there; the rest are leftovers */

size_t tagc_plan_bytes(size_t n_items); /* memory behind order, cell, round_end */
void tagc_plan_place(tagc_plan *plan, void *memory, size_t n_items);
size_t tagc_plan_scratch_bytes(const tagc_sketch *sketch, size_t n_items);
/* indices: (n_items) ascending. */
void tagc_plan_make(tagc_plan *plan, const tagc_sketch *sketch, const uint32_t *indices, size_t n_items,
                    void *scratch);
/* The same without vector instructions, for tests. */
void tagc_plan_make_reference(tagc_plan *plan, const tagc_sketch *sketch, const uint32_t *indices,
                              size_t n_items, void *scratch);

/* Replays the plan: values (n_items) of the peeled items; cells are consumed (what is left in them belongs to the
 * leftovers, and is zero, in fixed point exactly, when there are none and the index was right). Leftovers' values
 * are set to 0. Fixed values stay integers: the caller scales them back by 2^-scale_exponent. */
void tagc_plan_peel(const tagc_plan *plan, const tagc_sketch *sketch, const uint32_t *indices, float *cells,
                    float *values);
void tagc_plan_peel_fixed(const tagc_plan *plan, const tagc_sketch *sketch, const uint32_t *indices,
                          int32_t *cells, int32_t *values);

/* Sets the leftovers' values to the median of their three cells after peeling (the paper's estimation). */
void tagc_plan_estimate(const tagc_plan *plan, const tagc_sketch *sketch, const uint32_t *indices,
                        const float *cells, float *values);
void tagc_plan_estimate_fixed(const tagc_plan *plan, const tagc_sketch *sketch, const uint32_t *indices,
                              const int32_t *cells, int32_t *values);

/* 1 when the consumed cells contradict the plan: with all items peeled and the right index they hold nothing
 * (fixed), or rounding only (fp32: at most `tolerance`). Never 1 when there are leftovers. */
int tagc_sketch_dirty(const tagc_plan *plan, const tagc_sketch *sketch, const float *cells, float tolerance);
int tagc_sketch_dirty_fixed(const tagc_plan *plan, const tagc_sketch *sketch, const int32_t *cells);

#endif
