/* Peeling: recovers the items of a sketch, whose positions are known, from its cells.
 *
 * The union alone decides whether a sketch peels. So the order of peeling is found once, in rounds, from the union, and
 * replayed over the cells. Ranks with the same shape, seed and union find the same order, whatever their processors. */
#ifndef TAGC_PAPER_PEEL_H
#define TAGC_PAPER_PEEL_H

#include "paper/sketch.h"

/* The order of peeling the n_items ascending positions of the union. The caller owns the memory. */
typedef struct tagc_peeling {
    size_t n_items;
    size_t n_peeled; /* order has so many entries, in rounds */
    int n_rounds;
    uint32_t *order;     /* (n_items) item numbers j; from n_peeled on: the leftovers, ascending */
    uint32_t *cell;      /* (n_items) the cell that order[i] was alone in; undefined for leftovers */
    uint32_t *round_end; /* (TAGC_PEELING_MAX_ROUNDS) exclusive end in order of each round */
} tagc_peeling;

/* Peeling that needs more rounds stops; the remaining items are leftovers. */
#define TAGC_PEELING_MAX_ROUNDS 512

size_t tagc_peeling_bytes(size_t n_items); /* memory behind order, cell, round_end */
void tagc_peeling_place(tagc_peeling *peeling, void *memory, size_t n_items);
size_t tagc_peeling_scratch_bytes(const tagc_sketch *sketch, size_t n_items);
/* indices: (n_items) ascending. */
void tagc_peeling_make(tagc_peeling *peeling, const tagc_sketch *sketch, const uint32_t *indices,
                       size_t n_items, void *scratch);
/* The same without vector instructions, for tests. */
void tagc_peeling_make_reference(tagc_peeling *peeling, const tagc_sketch *sketch, const uint32_t *indices,
                                 size_t n_items, void *scratch);

/* Replays the peeling over cells of this kind: writes values (n_items) of the peeled items, and 0 for leftovers. It consumes the
 * cells. What remains in them belongs to the leftovers; without leftovers and with the right union it is zero (exactly so in
 * fixed point). Fixed-point values stay integers; the caller scales them by 2^-scale_exponent. */
void tagc_peeling_replay(tagc_cells kind, const tagc_peeling *peeling, const tagc_sketch *sketch,
                         const uint32_t *indices, void *cells, void *values);

/* Sets the leftovers' values to the median of their three cells after peeling (the paper's estimation). */
void tagc_peeling_estimate(tagc_cells kind, const tagc_peeling *peeling, const tagc_sketch *sketch,
                           const uint32_t *indices, const void *cells, void *values);

/* Returns 1 if the consumed cells contradict the peeling. If all items were peeled and the union is right, cells hold zero
 * (fixed point) or rounding errors (fp32: at most `tolerance`). Never 1 if there are leftovers. */
int tagc_peeling_dirty(tagc_cells kind, const tagc_peeling *peeling, const tagc_sketch *sketch,
                       const void *cells, float tolerance);

#endif
