/* The codes of a direct reducer whose values are in the memory of a device (gpu/kernels.h).
 *
 *   first turn     selects and encodes all fragments of the unit in one batch
 *   each parcel    bodies of its fragments, as long as they came out, to the host
 *   last body in   all bodies but the own one to the device; added in one batch
 *   all-reduce     sums are encoded there, and those of all ranks decoded, in a batch each
 *
 * A step that is ahead has all that in streams before it begins, and passes on bodies in pinned memory: ahead.c.
 *
 * Bodies are checked on the host, where they arrive. A failure of the device is this rank's failure, which the agreement tells
 * all ranks; so nothing of such a step changes a residual.
 *
 * On the device: | results (hosts) | bodies (hosts, stride) |, and through pinned memory in the same order. */
#include "gpu/ahead.h"

#include <string.h>

typedef struct direct_on {
    size_t stride, n_bytes;
    char *memory;                /* of the device */
    tagc_batch_result results[]; /* (hosts) of the last run; of fragments, in the order of turns */
} direct_on;

static direct_on *on_of(const tagc_reducer *r) {
    return tagc_direct_of(r)->on_device;
}

static tagc_kernels *kernels_of(const tagc_reducer *r) {
    return tagc_kernels_of(r->arrays);
}

static tagc_batches *batches_of(const tagc_reducer *r) {
    return &tagc_direct_of(r)->batches;
}

/* Where the body of a host is, in both memories. */
static size_t body_at(const tagc_reducer *r, int host) {
    size_t n_hosts = (size_t)tagc_direct_of(r)->n_hosts;
    return tagc_aligned(n_hosts * sizeof(tagc_batch_result)) + (size_t)host * on_of(r)->stride;
}

static uint8_t *body_there(const tagc_reducer *r, int host) {
    return (uint8_t *)on_of(r)->memory + body_at(r, host);
}

static char *body_pinned(const tagc_reducer *r, int host) {
    return kernels_of(r)->pinned + body_at(r, host);
}

/* ---- life ---- */

static tagc_status make(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    const tagc_heap *heap = &r->arrays->heap;
    size_t n_hosts = (size_t)d->n_hosts;
    void *memory;
    TAGC_TRY(tagc_memory_create(sizeof(direct_on) + n_hosts * sizeof(tagc_batch_result),
                                "reducer on a device", &d->on_device));
    direct_on *on = on_of(r);
    on->stride = tagc_aligned(d->capacity);
    on->n_bytes = body_at(r, d->n_hosts);
    TAGC_TRY(heap->create(heap->context, on->n_bytes, "bodies", &memory));
    on->memory = memory;
    d->batches.results = memory;
    return tagc_kernels_make_batches(r, on->n_bytes);
}

static void end(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    direct_on *on = on_of(r);
    if (!on) return;
    tagc_batches_end(r);
    r->arrays->heap.destroy(r->arrays->heap.context, on->memory, on->n_bytes);
    tagc_memory_destroy(on);
    d->on_device = NULL;
}

/* ---- runs; having entered ---- */

/* Results of the first n rows are here when it returns. */
static tagc_status run(tagc_reducer *r, int which, size_t n) {
    tagc_kernels *k = kernels_of(r);
    size_t n_bytes = n * sizeof(tagc_batch_result);
    TAGC_TRY(tagc_batches_run(r, which));
    TAGC_TRY(tagc_kernels_copy(k, k->pinned, on_of(r)->memory, n_bytes, TAGC_COPY_TO_HOST));
    TAGC_TRY(tagc_kernels_wait(k));
    memcpy(on_of(r)->results, k->pinned, n_bytes);
    return TAGC_OK;
}

/* A length from the device decides how much is copied here. */
static tagc_status check_length(const direct_on *on, const tagc_encoded *encoded) {
    if (encoded->n_bytes <= on->stride && encoded->n_index_bytes <= encoded->n_bytes) return TAGC_OK;
    return tagc_fail(TAGC_ERR_DEVICE,
                     "kernels made a body of %zu bytes, %zu of them positions: there is room for %zu",
                     encoded->n_bytes, encoded->n_index_bytes, on->stride);
}

/* Copies the bodies in d->bodies to the device, where b->bodies then has them; the own one, plain or not, never left. */
static tagc_status send_bodies(const tagc_reducer *r) {
    const tagc_direct *d = tagc_direct_of(r);
    for (int host = 0; host < d->n_hosts; host++)
        if (d->bodies[host].bytes && host != d->host)
            memcpy(body_pinned(r, host), d->bodies[host].bytes, d->bodies[host].n_bytes);
    for (int host = 0; host < d->n_hosts; host++) {
        tagc_body *body = &d->batches.bodies[host];
        *body = d->bodies[host];
        if (!body->bytes || body->is_plain) continue;
        body->bytes = body_there(r, host);
        if (host != d->host)
            TAGC_TRY(tagc_kernels_copy(kernels_of(r), body_there(r, host), body_pinned(r, host),
                                       body->n_bytes, TAGC_COPY_TO_DEVICE));
    }
    return TAGC_OK;
}

static tagc_status encode_all(tagc_reducer *r) {
    const tagc_direct *d = tagc_direct_of(r);
    int n = d->n_hosts - tagc_direct_has_results(r); /* the own turn is the last */
    for (int t = 0; t < n; t++)
        d->batches.rows[t] = tagc_encode_row(r, tagc_host_to(d, t), body_there(r, tagc_host_to(d, t)));
    TAGC_TRY(run(r, TAGC_ENCODE, (size_t)n));
    for (int t = 0; t < n; t++) TAGC_TRY(check_length(on_of(r), &on_of(r)->results[t].encoded));
    return TAGC_OK;
}

/* Bodies of turns [t, end) to where they leave. */
static tagc_status fetch_bodies(tagc_reducer *r, int t, int end) {
    const tagc_direct *d = tagc_direct_of(r);
    const tagc_batch_result *results = on_of(r)->results;
    for (int i = t; i < end; i++) {
        int host = tagc_host_to(d, i);
        TAGC_TRY(tagc_kernels_copy(kernels_of(r), body_pinned(r, host), body_there(r, host),
                                   results[i].encoded.n_bytes, TAGC_COPY_TO_HOST));
    }
    TAGC_TRY(tagc_kernels_wait(kernels_of(r)));
    for (int i = t; i < end; i++) {
        int host = tagc_host_to(d, i);
        memcpy(tagc_direct_row_out(d, i) + TAGC_WIRE_HEADER_BYTES, body_pinned(r, host),
               results[i].encoded.n_bytes);
    }
    return TAGC_OK;
}

static tagc_status encode_sums(tagc_reducer *r, uint8_t *body, tagc_encoded *out) {
    int host = tagc_direct_of(r)->host;
    batches_of(r)->rows[0] = tagc_encode_sums_row(r, body_there(r, host));
    TAGC_TRY(run(r, TAGC_ENCODE_SUMS, 1));
    const tagc_encoded *encoded = &on_of(r)->results[0].encoded;
    TAGC_TRY(check_length(on_of(r), encoded));
    TAGC_TRY(tagc_kernels_copy(kernels_of(r), body_pinned(r, host), body_there(r, host), encoded->n_bytes,
                               TAGC_COPY_TO_HOST));
    TAGC_TRY(tagc_kernels_wait(kernels_of(r)));
    memcpy(body, body_pinned(r, host), encoded->n_bytes);
    *out = *encoded;
    return TAGC_OK;
}

static tagc_status add(tagc_reducer *r) {
    tagc_batches *b = batches_of(r);
    int n = 0;
    TAGC_TRY(send_bodies(r));
    for (int host = 0; host < tagc_direct_of(r)->n_hosts; host++)
        if (b->bodies[host].bytes) b->bodies[n++] = b->bodies[host];
    b->rows[0] = tagc_add_row(r, b->bodies, n, 0);
    TAGC_TRY(run(r, TAGC_ADD, 1));
    r->now.stats.nonfinite |= on_of(r)->results[0].nonfinite;
    return TAGC_OK;
}

static tagc_status decode_sums(tagc_reducer *r) {
    const tagc_direct *d = tagc_direct_of(r);
    TAGC_TRY(send_bodies(r));
    for (int host = 0; host < d->n_hosts; host++)
        d->batches.rows[host] = tagc_decode_sums_row(r, (size_t)host, &d->batches.bodies[host]);
    return run(r, TAGC_DECODE_SUMS, (size_t)d->n_hosts);
}

/* ---- what the exchange calls ---- */

static int is_doomed(const tagc_reducer *r) {
    return r->now.failure != TAGC_OK || r->now.stats.nonfinite;
}

/* Around each of them. */
static tagc_status enter(tagc_reducer *r) {
    tagc_status status = tagc_kernels_enter_for(r);
    tagc_note_failure(r, status);
    return status;
}

static void leave(tagc_reducer *r, tagc_status status) {
    tagc_note_failure(r, status);
    tagc_kernels_leave(kernels_of(r));
}

static void on_encode(tagc_reducer *r, int t, tagc_encoded *out) {
    const tagc_direct *d = tagc_direct_of(r);
    if (r->now.is_ahead) {
        tagc_ahead_take_body(r, t, out);
        return;
    }
    tagc_status status = TAGC_OK;
    int is_first = t < d->n_hosts - 1 && t % d->parcel == 0;
    if (t == 0 || is_first) {
        if (enter(r) != TAGC_OK) return;
        if (t == 0) status = encode_all(r);
        if (status == TAGC_OK && is_first)
            status = fetch_bodies(r, t, tagc_direct_parcel_end(d, t / d->parcel));
        leave(r, status);
    }
    if (status == TAGC_OK) *out = on_of(r)->results[t].encoded;
}

static void on_add(tagc_reducer *r, int first, int end_host) {
    (void)first, (void)end_host; /* all of them */
    if (r->now.is_ahead) {
        tagc_ahead_give_bodies(r);
        return;
    }
    if (is_doomed(r) || enter(r) != TAGC_OK) return;
    leave(r, add(r));
}

static void on_encode_sums(tagc_reducer *r, uint8_t *body, tagc_encoded *out) {
    if (r->now.is_ahead) {
        tagc_ahead_take_sums(r, body, out);
        return;
    }
    if (enter(r) != TAGC_OK) return;
    leave(r, encode_sums(r, body, out));
}

static void on_decode_sums(tagc_reducer *r) {
    if (r->now.is_ahead) {
        tagc_ahead_give_sums(r);
        return;
    }
    if (is_doomed(r) || enter(r) != TAGC_OK) return;
    leave(r, decode_sums(r));
}

static const tagc_runner kernels = {.name = "kernels",
                                    .is_whole = 1,
                                    .make = make,
                                    .end = end,
                                    .encode = on_encode,
                                    .add = on_add,
                                    .encode_sums = on_encode_sums,
                                    .decode_sums = on_decode_sums};

/* Bodies are in the rooms of the unit's queue. */
static tagc_status make_ahead(tagc_reducer *r) {
    (void)r;
    return TAGC_OK;
}

static const tagc_runner ahead = {.name = "kernels",
                                  .is_whole = 1,
                                  .is_ahead = 1,
                                  .make = make_ahead,
                                  .end = end,
                                  .note_residual = tagc_store_note,
                                  .encode = on_encode,
                                  .add = on_add,
                                  .encode_sums = on_encode_sums,
                                  .decode_sums = on_decode_sums};

static tagc_status check(const void *of, const tagc_comm *comm, tagc_reducer *const *out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    return comm && of ? TAGC_OK
                      : tagc_fail(TAGC_ERR_ARGUMENT, "%s is NULL", comm ? "kernels or store" : "comm");
}

tagc_status tagc_reducer_create_in(tagc_store *store, tagc_comm *comm, const tagc_reducer_options *options,
                                   tagc_reducer **out) {
    if (out) *out = NULL;
    TAGC_TRY(check(store, comm, out));
    return tagc_reducer_make(&store->arrays, &ahead, comm, options, out);
}

tagc_status tagc_reducer_probe_in(tagc_store *store, tagc_comm *comm, const tagc_reducer_options *options,
                                  tagc_reducer **out) {
    if (out) *out = NULL;
    TAGC_TRY(check(store, comm, out));
    return tagc_reducer_make_alone(&store->of_probes, &ahead, comm, options, out);
}

tagc_status tagc_reducer_create_on(tagc_kernels *of, tagc_comm *comm, const tagc_reducer_options *options,
                                   tagc_reducer **out) {
    if (out) *out = NULL;
    TAGC_TRY(check(of, comm, out));
    return tagc_reducer_make(&of->arrays, &kernels, comm, options, out);
}
