/* Shared by the tests of the sketch: random numbers, supports as gradients have them, a sketch with its peeling.
 */
#ifndef TAGC_TESTS_SKETCH_SUPPORTS_H
#define TAGC_TESTS_SKETCH_SUPPORTS_H

#define RANDOM_SEED 3
#include "../codec/random.h"
#include "../test.h"
#include "paper/locate.h"
#include "paper/peel.h"
#include "paper/sketch.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- supports ---- */

typedef enum shape {
    SCATTERED,
    ROWS,
    COLUMNS_1024,
    COLUMNS_768,
    ONE_RUN,
    STRIDE,
    ONE_COLUMN,
    N_SHAPES
} shape;

/* Positions in [0, n) of about density * n elements; capacity n. ROWS are those of an embedding of width 768
 * that does not start at the fragment's beginning; ONE_COLUMN is a hot column and the rest scattered. */
static inline size_t support_make(int kind, size_t n, double density, uint32_t *indices) {
    size_t n_items = 0, offset = (size_t)(random_u64() % 768);
    char hot[1024];
    for (int c = 0; c < 1024; c++) hot[c] = random_uniform() < density;
    size_t stride = (size_t)(1 / density), run = (size_t)(density * (double)n);
    size_t next = (size_t)(log(1 - random_uniform()) / log1p(-density)),
           column = (size_t)(random_u64() % 1024);
    int row_is_hot = random_uniform() < density;
    for (size_t i = 0; i < n; i++) {
        int is_in = 0;
        if ((i + offset) % 768 == 0) row_is_hot = random_uniform() < density;
        switch (kind) {
        case ROWS:
            is_in = row_is_hot;
            break;
        case COLUMNS_1024:
            is_in = hot[i % 1024];
            break;
        case COLUMNS_768:
            is_in = hot[i % 768];
            break;
        case ONE_RUN:
            is_in = i >= offset && i < offset + run;
            break;
        case STRIDE:
            is_in = i % stride == offset % stride;
            break;
        default:
            is_in = i == next || (kind == ONE_COLUMN && i % 1024 == column);
            if (i == next) next += 1 + (size_t)(log(1 - random_uniform()) / log1p(-density));
        }
        if (is_in) indices[n_items++] = (uint32_t)i;
    }
    return n_items;
}

/* ---- a sketch with its peeling ---- */

typedef struct bench {
    tagc_sketch sketch;
    tagc_peeling peeling;
    void *memory, *scratch;
} bench;

static inline bench bench_make(size_t n, size_t n_cells, uint64_t seed, const uint32_t *indices,
                               size_t n_items) {
    bench b;
    tagc_sketch_init(&b.sketch, n, n_cells, seed);
    b.memory = malloc(tagc_peeling_bytes(n_items));
    b.scratch = malloc(tagc_peeling_scratch_bytes(&b.sketch, n_items));
    tagc_peeling_place(&b.peeling, b.memory, n_items);
    tagc_peeling_make(&b.peeling, &b.sketch, indices, n_items, b.scratch);
    return b;
}

static inline void bench_free(bench *b) {
    free(b->memory), free(b->scratch);
}

#endif
