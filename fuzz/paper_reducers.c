/* Steps of the paper's exchanges with a hostile peer: see reducer_peers.h. */
#include "reducer_peers.h"
#include "tagc/paper.h"

static const struct row {
    int exchange, index, cells, unpeeled, output;
    double sparsity, ratio;
} rows[] = {
    {TAGC_EXCHANGE_SKETCH, TAGC_INDEX_OR, TAGC_CELLS_FP32, TAGC_UNPEELED_PACKED, TAGC_OUTPUT_SHARD, 0.9, 0},
    {TAGC_EXCHANGE_SKETCH, TAGC_INDEX_SUM4, TAGC_CELLS_FIXED, TAGC_UNPEELED_PACKED, TAGC_OUTPUT_UNIT, 0.9,
     20},
    {TAGC_EXCHANGE_SKETCH, TAGC_INDEX_SUM1, TAGC_CELLS_FP32, TAGC_UNPEELED_ESTIMATE, TAGC_OUTPUT_SHARD, 0.9,
     20},
    {TAGC_EXCHANGE_SKETCH, TAGC_INDEX_OR, TAGC_CELLS_FIXED, TAGC_UNPEELED_RESIDUAL, TAGC_OUTPUT_SHARD, 0.9,
     20},
    {TAGC_EXCHANGE_PACKED, TAGC_INDEX_OR, TAGC_CELLS_FP32, TAGC_UNPEELED_PACKED, TAGC_OUTPUT_SHARD, 0.9, 0},
    {TAGC_EXCHANGE_PACKED, TAGC_INDEX_SUM4, TAGC_CELLS_FP32, TAGC_UNPEELED_PACKED, TAGC_OUTPUT_UNIT, 0.95, 0},
    {TAGC_EXCHANGE_PACKED, TAGC_INDEX_SUM1, TAGC_CELLS_FP32, TAGC_UNPEELED_PACKED, TAGC_OUTPUT_SHARD, 0.95,
     0},
};

static int find_case(int number, exchange_case *out) {
    static tagc_paper_options papers[sizeof rows / sizeof *rows];
    if (number >= (int)(sizeof rows / sizeof *rows)) return 0;
    const struct row *row = &rows[number];
    tagc_paper_options *paper = &papers[number];
    tagc_paper_options_init(paper);
    paper->index = row->index;
    paper->cells = row->cells;
    paper->unpeeled = row->unpeeled;
    paper->ratio = row->ratio;
    *out = (exchange_case){.n_ranks = 3}; /* values have no checksum */
    tagc_reducer_options *o = &out->options;
    tagc_reducer_options_init(o);
    o->n_elems = 1920;
    o->exchange = row->exchange;
    o->sparsity = row->sparsity;
    o->output = row->output;
    o->paper = paper;
    return 1;
}
