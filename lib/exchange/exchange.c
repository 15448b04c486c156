/* All exchanges there are. */
#include "exchange/exchange.h"

const tagc_exchange_table *tagc_exchange_of(int id) {
    static const tagc_exchange_table *const all[] = {
        [TAGC_EXCHANGE_DENSE] = &tagc_exchange_dense,
        [TAGC_EXCHANGE_SKETCH] = &tagc_exchange_sketch,
        [TAGC_EXCHANGE_PACKED] = &tagc_exchange_packed,
        [TAGC_EXCHANGE_DIRECT] = &tagc_exchange_direct,
    };
    return all[id];
}
