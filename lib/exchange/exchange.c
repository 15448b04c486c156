/* All exchanges there are. */
#include "exchange/exchange.h"
#include "exchange/options.h"
#include "exchange/registry.h"

const tagc_exchange_table *tagc_exchange_of(int id) {
    if (id == TAGC_EXCHANGE_DIRECT) return &tagc_exchange_direct;
    for (const tagc_exchange_table *const *at = tagc_fenced_exchanges; *at; at++)
        if ((*at)->id == id) return *at;
    return NULL;
}

const tagc_exchange_table *tagc_exchange_path(const tagc_reducer_options *options, int may_be_whole) {
    return may_be_whole && tagc_reducer_options_are_whole(options) ? &tagc_exchange_whole
                                                                   : tagc_exchange_of(options->exchange);
}

void tagc_place_no_work(struct tagc_reducer *r, tagc_arena *arena) {
    (void)r, (void)arena;
}
