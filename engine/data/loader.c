/* Batches for training and evaluation. The state is one number: how many windows all ranks have read. Everything else
 * follows from it and the seed. So resuming is exact, and the data is the same for any number of ranks. */
#include "core/status.h"
#include "data/data.h"
#include "data/permutation.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- a random order without a table: see permutation.h ---- */

enum { N_ROUNDS = 6 };

uint64_t tagc_mix64(uint64_t value) {
    value += 0x9e3779b97f4a7c15u;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
}

tagc_permutation tagc_permutation_make(uint64_t n, uint64_t key) {
    tagc_permutation permutation = {n, key, 1};
    while (permutation.half_bits < 31 && (UINT64_C(1) << (2 * permutation.half_bits)) < n)
        permutation.half_bits++;
    return permutation;
}

static uint64_t feistel(const tagc_permutation *p, uint64_t value) {
    uint64_t mask = (UINT64_C(1) << p->half_bits) - 1;
    uint64_t left = value >> p->half_bits, right = value & mask;
    for (uint64_t round = 0; round < N_ROUNDS; round++) {
        uint64_t next = left ^ (tagc_mix64(p->key ^ tagc_mix64(right << 3 | round)) & mask);
        left = right;
        right = next;
    }
    return left << p->half_bits | right;
}

uint64_t tagc_permutation_at(const tagc_permutation *permutation, uint64_t i) {
    do {
        i = feistel(permutation, i);
    } while (i >= permutation->n);
    return i;
}

/* ---- batches ---- */

#define MAX_POSITION (UINT64_C(1) << 62)

struct tagc_loader {
    const tagc_tokens *tokens;
    tagc_loader_options options;
    uint64_t n_windows; /* per epoch */
    uint64_t n_offsets; /* an epoch starts at a token in [0, n_offsets) */
    uint64_t position;
    /* Of the epoch last used. */
    uint64_t epoch, first_token;
    tagc_permutation order;
    int *window; /* (T + 1) */
};

void tagc_loader_options_init(tagc_loader_options *options) {
    *options = (tagc_loader_options){.world_size = 1, .shuffle = 1};
}

static tagc_status check_range(const char *field, int64_t value, int64_t min, int64_t max) {
    if (value < min || value > max)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s is %" PRId64 ", must be in [%" PRId64 ", %" PRId64 "]", field,
                         value, min, max);
    return TAGC_OK;
}

static tagc_status check_options(const tagc_tokens *tokens, const tagc_loader_options *options) {
    TAGC_TRY(check_range("n_batch", options->n_batch, 1, 65536));
    TAGC_TRY(check_range("n_tokens", options->n_tokens, 1, 1048576));
    TAGC_TRY(check_range("world_size", options->world_size, 1, 65536));
    TAGC_TRY(check_range("rank", options->rank, 0, options->world_size - 1));
    TAGC_TRY(check_range("vocab_size", options->vocab_size, 1, INT32_MAX));
    TAGC_TRY(check_range("shuffle", options->shuffle, 0, 1));
    if (tagc_tokens_n(tokens) < (uint64_t)options->n_tokens + 1)
        return tagc_fail(
            TAGC_ERR_ARGUMENT,
            "%s: %" PRIu64 " tokens, a sequence of n_tokens %d and its last target need at least %d",
            tagc_tokens_path(tokens), tagc_tokens_n(tokens), options->n_tokens, options->n_tokens + 1);
    return TAGC_OK;
}

/* A shuffled epoch gives up one window, if there are two, so that it can start at any of T tokens: over the epochs every token
 * is predicted from every length of context. */
static void set_windows(tagc_loader *loader) {
    uint64_t n = tagc_tokens_n(loader->tokens), n_per_window = (uint64_t)loader->options.n_tokens;
    loader->n_windows = (n - 1) / n_per_window;
    loader->n_offsets = 1;
    if (!loader->options.shuffle) return;
    if (loader->n_windows > 1) loader->n_windows = n / n_per_window - 1;
    loader->n_offsets = n - loader->n_windows * n_per_window;
    if (loader->n_offsets > n_per_window) loader->n_offsets = n_per_window;
}

static void enter_epoch(tagc_loader *loader, uint64_t epoch) {
    uint64_t key = tagc_mix64(loader->options.seed ^ tagc_mix64(epoch));
    loader->epoch = epoch;
    loader->first_token = tagc_mix64(key) % loader->n_offsets;
    loader->order = tagc_permutation_make(loader->n_windows, key);
}

tagc_status tagc_loader_create(const tagc_tokens *tokens, const tagc_loader_options *options,
                               tagc_loader **out) {
    *out = NULL;
    TAGC_TRY(check_options(tokens, options));
    tagc_loader *loader = calloc(1, sizeof *loader);
    int *window = malloc(((size_t)options->n_tokens + 1) * sizeof *window);
    if (!loader || !window) {
        free(loader);
        free(window);
        return tagc_fail(TAGC_ERR_MEMORY, "no memory for a loader of n_tokens %d", options->n_tokens);
    }
    loader->tokens = tokens;
    loader->options = *options;
    loader->window = window;
    set_windows(loader);
    enter_epoch(loader, 0);
    *out = loader;
    return TAGC_OK;
}

void tagc_loader_destroy(tagc_loader *loader) {
    if (!loader) return;
    free(loader->window);
    free(loader);
}

/* The token at which window `number` of the whole run starts. */
static uint64_t window_start(tagc_loader *loader, uint64_t number) {
    uint64_t epoch = number / loader->n_windows, i = number % loader->n_windows;
    if (!loader->options.shuffle) return i * (uint64_t)loader->options.n_tokens;
    if (epoch != loader->epoch) enter_epoch(loader, epoch);
    return loader->first_token + tagc_permutation_at(&loader->order, i) * (uint64_t)loader->options.n_tokens;
}

tagc_status tagc_loader_next(tagc_loader *loader, int *tokens, int *targets) {
    const tagc_loader_options *o = &loader->options;
    size_t n_tokens = (size_t)o->n_tokens;
    uint64_t first = loader->position + (uint64_t)o->rank * (uint64_t)o->n_batch;
    for (size_t b = 0; b < (size_t)o->n_batch; b++) {
        uint64_t start = window_start(loader, first + b);
        TAGC_TRY(tagc_tokens_read(loader->tokens, start, n_tokens + 1, o->vocab_size, loader->window));
        memcpy(tokens + b * n_tokens, loader->window, n_tokens * sizeof *tokens);
        memcpy(targets + b * n_tokens, loader->window + 1, n_tokens * sizeof *targets);
    }
    loader->position += (uint64_t)o->n_batch * (uint64_t)o->world_size;
    return TAGC_OK;
}

uint64_t tagc_loader_n_windows(const tagc_loader *loader) {
    return loader->n_windows;
}

uint64_t tagc_loader_position(const tagc_loader *loader) {
    return loader->position;
}

tagc_status tagc_loader_seek(tagc_loader *loader, uint64_t position) {
    if (position > MAX_POSITION)
        return tagc_fail(TAGC_ERR_ARGUMENT, "position is %" PRIu64 ", must be in [0, 2^62]", position);
    loader->position = position;
    return TAGC_OK;
}
