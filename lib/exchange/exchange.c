/* All exchanges there are. */
#include "exchange/exchange.h"
#include "exchange/options.h"
#include "exchange/registry.h"
#include "exchange/runner.h"

#include <string.h>

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

/* ---- arrays in host memory ---- */

static tagc_status check(void *context, const void *array, const char *what) {
    (void)context, (void)array, (void)what;
    return TAGC_OK;
}

static tagc_status copy(void *context, void *to, const void *from, size_t n_bytes) {
    (void)context;
    memcpy(to, from, n_bytes);
    return TAGC_OK;
}

static tagc_status fill(void *context, void *array, uint32_t word, uint64_t n_bytes) {
    uint64_t i = 0, n_words = n_bytes / sizeof word;
    (void)context;
    for (; i < n_words; i++) ((uint32_t *)array)[i] = word;
    memcpy((uint32_t *)array + i, &word, (size_t)(n_bytes - n_words * sizeof word));
    return TAGC_OK;
}

const tagc_arrays tagc_host_arrays = {.heap = TAGC_HOST_HEAP,
                                      .maker = &tagc_batch_cpu,
                                      .is_here = 1,
                                      .check = check,
                                      .read = copy,
                                      .write = copy,
                                      .fill = fill};
