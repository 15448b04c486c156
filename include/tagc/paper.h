/* Options of the exchanges `sketch` and `packed`, which reproduce TAGC as it was published. `direct` does not
 * use this file.
 *
 *   tagc_paper_options paper;
 *   tagc_paper_options_init(&paper);
 *   paper.ratio = 10;
 *   options.exchange = TAGC_EXCHANGE_SKETCH;
 *   options.paper = &paper;
 *
 * tagc_reducer_create copies the struct. If an option does not apply to the chosen exchange, it must keep its default.
 * Otherwise _create fails with TAGC_ERR_UNSUPPORTED and names the option.
 *
 * Before ranks send values, they agree on the union: the positions that at least one rank selected. The owner combines
 * the indices of all ranks and sends the union back. A sketch packs values into fewer cells than there are
 * positions; the owner recovers them by peeling, one value after the other. */
#ifndef TAGC_PAPER_H
#define TAGC_PAPER_H

#include "tagc/tagc.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How an index encodes the positions that a rank selected. */
typedef enum tagc_index {
    /* 1 bit per element. Indices are combined by OR. */
    TAGC_INDEX_OR = 0,
    /* 4 bits per element. Indices are summed (LHC). W <= 15. */
    TAGC_INDEX_SUM4 = 1,
    /* 1 bit per element. Indices are summed as packed bytes, as in the published code. LOSSY if two ranks select the
     * same element. For reproducing published results only. */
    TAGC_INDEX_SUM1 = 2
} tagc_index;

/* The number format of the cells of a sketch. */
typedef enum tagc_cells {
    TAGC_CELLS_FP32 = 0,
    /* int32 modulo 2^32, with one power-of-two scale per unit and step. What can be recovered is exact. */
    TAGC_CELLS_FIXED = 1
} tagc_cells;

/* What happens to values that cannot be recovered from a sketch. */
typedef enum tagc_unpeeled {
    /* The ranks send them uncompressed. Nothing is lost. */
    TAGC_UNPEELED_PACKED = 0,
    /* Each rank adds its part to its residual. */
    TAGC_UNPEELED_RESIDUAL = 1,
    /* The owner takes the median of three cells, as in the paper. LOSSY. */
    TAGC_UNPEELED_ESTIMATE = 2
} tagc_unpeeled;

typedef struct tagc_paper_options {
    /* Written by _init. */
    size_t struct_bytes;
    /* tagc_index, default TAGC_INDEX_OR. */
    int index;
    /* 1: a rank sends its value at every position of the union, which takes no more bytes. This requires
     * TAGC_INDEX_OR. 0: it sends only the values that it selected. Default -1: 1 for packed with TAGC_INDEX_OR, else
     * 0. */
    int fill_union;
    /* sketch: elements per cell, [1, 1000]. Default 0: the size of the sketch follows from the union, 0.75 items per
     * cell. */
    double ratio;
    /* sketch: tagc_cells, default TAGC_CELLS_FP32. */
    int cells;
    /* sketch: tagc_unpeeled, default TAGC_UNPEELED_PACKED. */
    int unpeeled;
    /* sketch: seed of its hashes, default 0. */
    uint64_t seed;
} tagc_paper_options;

TAGC_API void tagc_paper_options_init_sized(tagc_paper_options *options, size_t struct_bytes);
#define tagc_paper_options_init(options) tagc_paper_options_init_sized((options), sizeof *(options))

#ifdef __cplusplus
}
#endif

#endif
