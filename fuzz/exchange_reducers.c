/* Steps of the exchange direct, with a hostile peer: see reducer_peers.h. */
#include "reducer_peers.h"

/* ranks, elements, exchange, format, sparsity, output, residual, gradient, whether every body has a checksum, no lanes */
static const struct row {
    int n_ranks, n_elems, exchange, format;
    double sparsity;
    int output, residual, gradient, is_summed, is_laneless;
} rows[] = {
    {3, 1920, TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_INT2, 0.95, TAGC_OUTPUT_SHARD, -1, 0, 1, 0},
    {3, 1920, TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_INT4, 0.9, TAGC_OUTPUT_UNIT, TAGC_FORMAT_INT4, 0, 1, 0},
    {3, 1920, TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_INT8, 0, TAGC_OUTPUT_UNIT, -1, 1, 1, 0},
    {3, 1920, TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_FP32, 0.5, TAGC_OUTPUT_SHARD, TAGC_FORMAT_FP32, 0, 1, 0},
    {3, 1920, TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_BF16, 0.8, TAGC_OUTPUT_UNIT, -1, 0, 1, 0},
    {3, 1921, TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_INT4, 0, TAGC_OUTPUT_SHARD, -1, 0, 1, 0},
    {3, 1920, TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_INT8, 0, TAGC_OUTPUT_UNIT, TAGC_RESIDUAL_NONE, 0, 1, 0},
    {3, 1920, TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_INT4, 0.9, TAGC_OUTPUT_UNIT, -1, 0, 1, 1},
    {3, 1920, TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_FP32, 0, TAGC_OUTPUT_SHARD, -1, 0, 0, 0},
    {3, 1921, TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_BF16, 0, TAGC_OUTPUT_UNIT, -1, 0, 0, 0},
};

static int find_case(int number, exchange_case *out) {
    if (number >= (int)(sizeof rows / sizeof *rows)) return 0;
    const struct row *row = &rows[number];
    *out = (exchange_case){
        .n_ranks = row->n_ranks, .is_laneless = row->is_laneless, .is_summed = row->is_summed};
    tagc_reducer_options *o = &out->options;
    tagc_reducer_options_init(o);
    o->n_elems = (uint64_t)row->n_elems;
    o->exchange = row->exchange;
    o->format = row->format;
    o->sparsity = row->sparsity;
    o->output = row->output;
    o->residual = row->residual;
    o->gradient = row->gradient;
    return 1;
}
