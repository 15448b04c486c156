/* Options of a reducer together with those in tagc/paper.h, for tests that go through many exchanges. */
#ifndef TAGC_TESTS_EXCHANGE_PAPER_H
#define TAGC_TESTS_EXCHANGE_PAPER_H

#include "exchange/options.h"
#include "tagc/paper.h"

/* Right before a reducer is made: `options` point to `paper` where its exchange has such options. What means nothing to the
 * exchange gets its default. */
static inline void attach_paper(tagc_reducer_options *options, tagc_paper_options *paper) {
    options->paper = paper;
    tagc_reducer_options_prune(options);
    if (options->exchange != TAGC_EXCHANGE_PACKED) return;
    tagc_paper_options packed;
    tagc_paper_options_init(&packed);
    packed.index = paper->index;
    packed.fill_union = paper->fill_union;
    *paper = packed;
}

#endif
