/* Steps and gathers of tests, with the lengths that the object needs. What comes of other lengths is in exchange/test_lengths.c. */
#ifndef TAGC_TEST_LENGTHS_H
#define TAGC_TEST_LENGTHS_H

#include "exchange/gatherer/gatherer.h"
#include "exchange/reducer.h"

static inline tagc_status begin_reducer(tagc_reducer *r, const void *gradient, float *output) {
    return tagc_reducer_begin(r, gradient, r ? r->n_given : 0, output, r ? tagc_reducer_given_output(r) : 0);
}

static inline tagc_status run_reducer(tagc_reducer *r, const void *gradient, float *output,
                                      tagc_reducer_stats *stats) {
    return tagc_reducer_run(r, gradient, r ? r->n_given : 0, output, r ? tagc_reducer_given_output(r) : 0,
                            stats);
}

static inline tagc_status begin_gatherer(tagc_gatherer *g, const float *shard, void *full) {
    return tagc_gatherer_begin(g, shard, g ? g->shard : 0, full, g ? g->options.n_elems : 0);
}

#endif
