/* Beside tagc_exchange in tables of tests: direct that sends every value whole. */
#ifndef TAGC_TESTS_EXCHANGE_WHOLE_H
#define TAGC_TESTS_EXCHANGE_WHOLE_H

#include "tagc/tagc.h"

enum { WHOLE = 0 };

/* In fp32, or what options->format says already. Call it when the other fields are set. */
static inline void set_exchange(tagc_reducer_options *options, int exchange) {
    options->exchange = exchange == WHOLE ? TAGC_EXCHANGE_DIRECT : exchange;
    if (exchange != WHOLE) return;
    options->sparsity = 0;
    if (options->format == -1) options->format = TAGC_FORMAT_FP32;
}

#endif
