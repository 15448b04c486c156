/* Options of a small reducer, valid for any number of ranks. */
#ifndef TAGC_TESTS_EXCHANGE_GOOD_OPTIONS_H
#define TAGC_TESTS_EXCHANGE_GOOD_OPTIONS_H

#include "ranks.h"

static inline tagc_reducer_options good_options(int world_size) {
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.exchange = TAGC_EXCHANGE_PACKED;
    options.n_elems = 64 * (uint64_t)world_size;
    return options;
}

/* A gradient of such a reducer. */
enum { GOOD_ELEMS = 64 * 4 };

static inline void fill_good(const rank_run *run, float gradient[GOOD_ELEMS]) {
    for (uint64_t i = 0; i < GOOD_ELEMS; i++) gradient[i] = random_gradient(1, run->rank, i);
}

#endif
