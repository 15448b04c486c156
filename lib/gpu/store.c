/* See store.h. */
#include "gpu/store.h"
#include "core/memory.h"
#include "core/status.h"
#include "exchange/options.h"
#include "gpu/slabs.h"

#include <string.h>

enum { LISTS_BYTES = 1 << 16 }; /* in one go, for the lists of many stores */

static void release(tagc_queue *queue, tagc_turns *turns) {
    if (!turns || --turns->n_users > 0) return;
    tagc_turns **link = &queue->turns;
    while (*link != turns) link = &(*link)->next;
    *link = turns->next;
    for (int b = 0; b < queue->n_buffers; b++) tagc_slab_destroy(queue, turns->spares[b]);
    tagc_memory_destroy(turns);
}

static tagc_status acquire(tagc_queue *queue, size_t n_bytes, tagc_turns **out) {
    tagc_turns *turns = queue->turns;
    *out = NULL;
    while (turns && turns->n_bytes != n_bytes) turns = turns->next;
    if (!turns) {
        void *memory;
        TAGC_TRY(tagc_memory_create(sizeof *turns, "spare residuals", &memory));
        turns = memory;
        *turns = (tagc_turns){.n_bytes = n_bytes, .next = queue->turns};
        queue->turns = turns;
    }
    turns->n_users++;
    for (int b = 0; b < queue->n_buffers; b++) {
        void *spare;
        if (turns->spares[b]) continue;
        size_t all = (size_t)(queue->n_buffers + 1) * n_bytes; /* with the region that comes next */
        tagc_status status = tagc_slab_create(queue, SLAB_OF_RESIDUALS, n_bytes, all, "residuals", &spare);
        turns->spares[b] = spare;
        if (status == TAGC_OK) continue;
        release(queue, turns);
        return status;
    }
    *out = turns;
    return TAGC_OK;
}

/* ---- pieces ---- */

static size_t n_used(const tagc_store *store) {
    size_t n = 0;
    for (const store_piece *piece = store->pieces; piece; piece = piece->next) n += piece->n_bytes;
    return n;
}

/* The link at which a piece of n_bytes fits in, and where that is; NULL: what is free is in smaller pieces. */
static store_piece **find_gap(tagc_store *store, size_t n_bytes, size_t *at) {
    store_piece **link = &store->pieces;
    for (*at = 0; *link && (*link)->at - *at < n_bytes; link = &(*link)->next)
        *at = (*link)->at + (*link)->n_bytes;
    return *link || store->n_bytes - *at >= n_bytes ? link : NULL;
}

/* Moves all pieces to the beginning of `region`, which may be the store's own. */
static tagc_status move(tagc_store *store, char *region) {
    size_t n = n_used(store), at = 0;
    void *here;
    if (n == 0) return TAGC_OK;
    for (const store_piece *piece = store->pieces; piece; piece = piece->next)
        if (!piece->reducer)
            return tagc_fail(TAGC_ERR_STATE, "a residual of this store is being made: it cannot move");
    TAGC_TRY(tagc_memory_create(n, "residuals that move", &here));
    tagc_status status = TAGC_OK;
    for (store_piece *piece = store->pieces; piece && status == TAGC_OK; piece = piece->next) {
        status =
            tagc_kernels_read(store->kernels, (char *)here + at, store->region + piece->at, piece->n_bytes);
        at += piece->n_bytes;
    }
    if (status == TAGC_OK) status = tagc_kernels_write(store->kernels, region, here, n);
    tagc_memory_destroy(here);
    if (status != TAGC_OK) return status;
    at = 0;
    for (store_piece *piece = store->pieces; piece; piece = piece->next) {
        piece->at = at;
        piece->reducer->residual = region + at;
        at += piece->n_bytes;
    }
    return TAGC_OK;
}

/* With the launch lock, while nothing is under way. */
static tagc_status grow(tagc_store *store, size_t n_bytes) {
    tagc_turns *turns = NULL;
    void *region;
    TAGC_TRY(acquire(store->queue, n_bytes, &turns));
    tagc_status status =
        tagc_slab_create(store->queue, SLAB_OF_RESIDUALS, n_bytes, n_bytes, "residuals", &region);
    if (status == TAGC_OK) status = move(store, region);
    if (status != TAGC_OK) {
        tagc_slab_destroy(store->queue, region);
        release(store->queue, turns);
        return status;
    }
    tagc_slab_destroy(store->queue, store->region);
    release(store->queue, store->turns);
    if (store->region) tagc_slabs_trim(store->queue);
    store->region = region;
    store->n_bytes = n_bytes;
    store->turns = turns;
    return TAGC_OK;
}

static tagc_status make_room(tagc_store *store, size_t n_bytes) {
    tagc_queue *queue = store->queue;
    size_t needed = n_used(store) + n_bytes, at;
    pthread_mutex_lock(&queue->launch);
    tagc_status status = tagc_queue_wait_for_all(queue);
    if (status == TAGC_OK && needed > store->n_bytes)
        status = grow(store, needed > store->n_expected ? needed : store->n_expected);
    if (status == TAGC_OK && !find_gap(store, n_bytes, &at)) status = move(store, store->region);
    pthread_mutex_unlock(&queue->launch);
    return status;
}

static tagc_status take(void *context, size_t n_bytes, const char *what, void **out) {
    tagc_store *store = context;
    size_t at;
    void *memory;
    *out = NULL;
    n_bytes = tagc_aligned(n_bytes);
    if (!find_gap(store, n_bytes, &at)) {
        tagc_status status = make_room(store, n_bytes);
        if (status != TAGC_OK)
            return tagc_fail_in(status, "no memory on the device for %s (%zu bytes)", what, n_bytes);
    }
    TAGC_TRY(tagc_memory_create(sizeof(store_piece), what, &memory));
    store_piece **link = find_gap(store, n_bytes, &at), *piece = memory;
    *piece = (store_piece){.at = at, .n_bytes = n_bytes, .next = *link};
    *link = piece;
    *out = store->region + at;
    return TAGC_OK;
}

static void give(void *context, void *memory, size_t n_bytes) {
    tagc_store *store = context;
    store_piece **link = &store->pieces;
    (void)n_bytes;
    if (!memory) return;
    while (*link && store->region + (*link)->at != (char *)memory) link = &(*link)->next;
    store_piece *piece = *link;
    if (!piece) return;
    *link = piece->next;
    tagc_memory_destroy(piece);
}

/* A probe's residual has an address, and nothing is there. */
static tagc_status take_nothing(void *context, size_t n_bytes, const char *what, void **out) {
    (void)n_bytes, (void)what;
    *out = context;
    return TAGC_OK;
}

static void give_nothing(void *context, void *memory, size_t n_bytes) {
    (void)context, (void)memory, (void)n_bytes;
}

static tagc_status fill_nothing(void *context, void *array, uint32_t word, uint64_t n_bytes) {
    (void)context, (void)array, (void)word, (void)n_bytes;
    return TAGC_OK;
}

/* ---- life ---- */

tagc_status tagc_store_create(tagc_queue *queue, tagc_store **out) {
    void *memory;
    *out = NULL;
    TAGC_TRY(tagc_memory_create(sizeof(tagc_store), "a store", &memory));
    tagc_store *store = *out = memory;
    *store = (tagc_store){.kernels = queue->kernels, .queue = queue, .arrays = queue->kernels->arrays};
    store->arrays.heap = (tagc_heap){.context = store, .create = take, .destroy = give};
    store->of_probes = store->arrays;
    store->of_probes.heap = (tagc_heap){.context = store, .create = take_nothing, .destroy = give_nothing};
    store->of_probes.fill = fill_nothing;
    return TAGC_OK;
}

tagc_status tagc_store_expect(tagc_store *store, const tagc_comm *comm, const tagc_reducer_options *options,
                              uint32_t n) {
    size_t n_bytes = 0;
    int world_size = tagc_comm_world_size(comm);
    for (uint32_t i = 0; i < n; i++) {
        tagc_reducer_options checked;
        _Alignas(8) char own[TAGC_OWN_MAX_BYTES];
        TAGC_TRY(tagc_reducer_options_check(&options[i], world_size, &checked, own));
        if (checked.exchange != TAGC_EXCHANGE_DIRECT || tagc_is_without_residual(&checked)) continue;
        size_t shard = (size_t)(checked.n_elems / (uint64_t)world_size);
        size_t n_kept = (size_t)tagc_exchange_of(checked.exchange)->residual_elems(&checked);
        n_bytes += tagc_aligned(n_kept / shard * tagc_residual_bytes(tagc_stored_format(&checked), shard));
    }
    if (n_bytes > store->n_expected) store->n_expected = n_bytes;
    return TAGC_OK;
}

void tagc_store_destroy(tagc_store *store) {
    if (!store) return;
    tagc_queue *queue = store->queue;
    pthread_mutex_lock(&queue->launch);
    tagc_slab_destroy(queue, store->region);
    tagc_slab_destroy(queue, store->lists);
    release(queue, store->turns);
    pthread_mutex_unlock(&queue->launch);
    for (store_piece *next, *piece = store->pieces; piece; piece = next) {
        next = piece->next;
        tagc_memory_destroy(piece);
    }
    tagc_memory_destroy(store);
}

/* ---- for units ---- */

tagc_store *tagc_store_of(const tagc_reducer *r) {
    return r->runner && r->runner->is_ahead ? r->arrays->heap.context : NULL;
}

static store_piece *piece_of(const tagc_store *store, const tagc_reducer *r) {
    store_piece *piece = store->pieces;
    while (piece && store->region + piece->at != (char *)r->residual) piece = piece->next;
    return piece;
}

void tagc_store_note(tagc_reducer *r) {
    store_piece *piece = piece_of(r->arrays->heap.context, r);
    if (piece) piece->reducer = r;
}

size_t tagc_store_place(const tagc_store *store, const tagc_reducer *r) {
    const store_piece *piece = piece_of(store, r);
    return piece ? piece->at : 0;
}

void tagc_store_turn(tagc_store *store, int b) {
    char *region = store->turns->spares[b];
    store->turns->spares[b] = store->region;
    store->region = region;
}

tagc_status tagc_store_reserve_lists(tagc_store *store, size_t n_bytes) {
    tagc_queue *queue = store->queue;
    void *larger;
    if (n_bytes <= store->lists_bytes) return TAGC_OK;
    pthread_mutex_lock(&queue->launch);
    tagc_status status = tagc_queue_wait_for_all(queue);
    if (status == TAGC_OK)
        status = tagc_slab_create(queue, SLAB_OF_LISTS, n_bytes, LISTS_BYTES, "lists of runs", &larger);
    if (status == TAGC_OK) {
        tagc_slab_destroy(queue, store->lists);
        store->lists = larger;
        store->lists_bytes = n_bytes;
    }
    pthread_mutex_unlock(&queue->launch);
    return status;
}
