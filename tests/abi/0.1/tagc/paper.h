/* Options of sketch and packed, the exchanges of TAGC as it was published. Nobody else needs this file.
 *
 *   tagc_paper_options paper;
 *   tagc_paper_options_init(&paper);
 *   paper.ratio = 10;
 *   options.exchange = TAGC_EXCHANGE_SKETCH;
 *   options.paper = &paper;
 *
 * tagc_reducer_create copies what options.paper points to. An option that means nothing for the chosen exchange must
 * keep its default: _create refuses it by name with TAGC_ERR_UNSUPPORTED. */
#ifndef TAGC_PAPER_H
#define TAGC_PAPER_H

#include "tagc/tagc.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How ranks tell each other which elements they keep. */
typedef enum tagc_index {
    /* 1 bit per element, a true OR. */
    TAGC_INDEX_OR = 0,
    /* 4 bits per element, summed (LHC); W <= 15. */
    TAGC_INDEX_SUM4 = 1,
    /* 1 bit per element, summed as packed bytes as TAGC was published. LOSSY where two ranks keep the same element: for
     * reproduction only. */
    TAGC_INDEX_SUM1 = 2
} tagc_index;

typedef enum tagc_cells {
    TAGC_CELLS_FP32 = 0,
    /* int32 modulo 2^32 with one power-of-two scale per unit and step: exact where it peels. */
    TAGC_CELLS_FIXED = 1
} tagc_cells;

/* What becomes of items that a sketch does not give back. */
typedef enum tagc_unpeeled {
    /* Their values are sent plainly: nothing is lost. */
    TAGC_UNPEELED_PACKED = 0,
    /* They go back to the residual of every rank. */
    TAGC_UNPEELED_RESIDUAL = 1,
    /* The median of three cells stands for them, as in the paper. LOSSY. */
    TAGC_UNPEELED_ESTIMATE = 2
} tagc_unpeeled;

typedef struct tagc_paper_options {
    /* Written by _init. */
    size_t struct_bytes;
    /* tagc_index, default OR. */
    int index;
    /* 1: every rank sends what it has at every position of the union, not only what it kept, which is free on the wire.
     * It needs index OR. 0: only what it kept. -1 (default): 1 for packed with index OR, else 0. */
    int fill_union;
    /* n / cells of a sketch, [1, 1000], or 0 (default): sized from the union to load 0.75. sketch. */
    double ratio;
    /* tagc_cells, default FP32. sketch. */
    int cells;
    /* tagc_unpeeled, default PACKED. sketch. */
    int unpeeled;
    /* Of the sketch's hashes, default 0. sketch. */
    uint64_t seed;
} tagc_paper_options;

TAGC_API void tagc_paper_options_init_sized(tagc_paper_options *options, size_t struct_bytes);
#define tagc_paper_options_init(options) tagc_paper_options_init_sized((options), sizeof *(options))

#ifdef __cplusplus
}
#endif

#endif
