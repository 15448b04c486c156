/* The codes of a direct reducer whose values are in the memory of a device (gpu/kernels.h).
 *
 *   first stage    selects and encodes all fragments of the unit in one batch
 *   each message   bodies of its fragments, as long as they came out, to the host
 *   last body in   all bodies but the own one to the device; added in one batch
 *   all-reduce     sums are encoded there, and those of the others decoded, in a batch each
 *
 * Bodies are checked on the host, where they arrive. A failure of the device is this rank's failure, which the agreement tells
 * all ranks; so nothing of such a step changes a residual.
 *
 * On the device: | results (n_results) | bodies (hosts, stride) |, and through pinned memory in the same order. */
#include "exchange/direct/direct.h"
#include "gpu/kernels.h"

#include <string.h>

enum { ENCODE, ADD, ENCODE_SUMS, DECODE_SUMS, N_BATCHES };

typedef struct tagc_direct_on {
    tagc_batch *batches[N_BATCHES]; /* NULL: not needed */
    uint64_t n_moves;               /* of kernels->work when they were made */
    size_t stride, n_results;
    char *memory; /* of the device */
    size_t n_bytes;
    tagc_batch_row *rows;       /* (n_results) */
    tagc_body *bodies;          /* (n_results) */
    int *hosts;                 /* (n_results) that sent them */
    tagc_batch_result *results; /* (n_results) of the last run */
    void *arena;
} tagc_direct_on;

static tagc_direct_on *on_of(const tagc_reducer *r) {
    return tagc_direct_of(r)->beside;
}

static tagc_kernels *kernels_of(const tagc_reducer *r) {
    return tagc_kernels_of(r->arrays);
}

static tagc_batch_result *results_of(const tagc_direct_on *on) {
    return (tagc_batch_result *)(void *)on->memory;
}

static size_t bodies_begin(const tagc_direct_on *on) {
    return tagc_aligned(on->n_results * sizeof(tagc_batch_result));
}

static char *body_of(const tagc_direct_on *on, int host) {
    return on->memory + bodies_begin(on) + (size_t)host * on->stride;
}

/* ---- rows; each function returns their number ---- */

static size_t encode_rows(tagc_reducer *r) {
    const tagc_direct *d = tagc_direct_of(r);
    tagc_direct_on *on = on_of(r);
    for (int host = 0; host < d->n_hosts; host++) {
        size_t first = (size_t)host * r->shard;
        on->rows[host] = (tagc_batch_row){.options = d->fragment,
                                          .gradient = r->now.gradient ? r->now.gradient + first : NULL,
                                          .residual_in = r->residual ? r->residual + first : NULL,
                                          .residual_out = r->now.residual ? r->now.residual + first : NULL,
                                          .body = (uint8_t *)body_of(on, host)};
    }
    return (size_t)d->n_hosts;
}

static size_t add_rows(tagc_reducer *r, int n_bodies) {
    const tagc_direct *d = tagc_direct_of(r);
    on_of(r)->rows[0] = (tagc_batch_row){.options = d->fragment,
                                         .sums = r->now.output ? tagc_direct_sums(r) : NULL,
                                         .scale = r->scale,
                                         .bodies = on_of(r)->bodies,
                                         .n_bodies = n_bodies};
    return 1;
}

static size_t encode_sums_rows(tagc_reducer *r) {
    const tagc_direct *d = tagc_direct_of(r);
    float *error = r->now.residual ? r->now.residual + (size_t)d->host * r->shard : NULL;
    on_of(r)->rows[0] = (tagc_batch_row){.options = d->sums,
                                         .sums = r->now.output ? tagc_direct_sums(r) : NULL,
                                         .error = error,
                                         .scale = 1.0f / r->scale,
                                         .body = (uint8_t *)body_of(on_of(r), d->host)};
    return 1;
}

/* Of all hosts but the own one; on->bodies (hosts). has_all: room for every body. */
static size_t decode_sums_rows(tagc_reducer *r, int has_all) {
    const tagc_direct *d = tagc_direct_of(r);
    size_t n = 0;
    for (int host = 0; host < d->n_hosts; host++) {
        if (host == d->host) continue;
        on_of(r)->rows[n++] =
            (tagc_batch_row){.options = d->sums,
                             .sums = r->now.output ? r->now.output + (size_t)host * r->shard : NULL,
                             .scale = 1,
                             .bodies = &on_of(r)->bodies[host],
                             .n_bodies = has_all || on_of(r)->bodies[host].bytes != NULL};
    }
    return n;
}

/* As large as they can be. */
static size_t rows_of(tagc_reducer *r, int batch) {
    const tagc_direct *d = tagc_direct_of(r);
    return batch == ENCODE        ? encode_rows(r)
           : batch == ADD         ? add_rows(r, d->n_hosts)
           : batch == ENCODE_SUMS ? encode_sums_rows(r)
                                  : decode_sums_rows(r, 1);
}

static const tagc_batch_kind kinds[N_BATCHES] = {TAGC_BATCH_ENCODE, TAGC_BATCH_DECODE, TAGC_BATCH_ENCODE_SUMS,
                                                 TAGC_BATCH_DECODE};

/* ---- life ---- */

/* Those that the output needs. */
static int n_batches(const tagc_reducer *r) {
    return r->options.output == TAGC_OUTPUT_SHARD ? ENCODE_SUMS : N_BATCHES;
}

static void destroy_batches(tagc_reducer *r) {
    tagc_direct_on *on = on_of(r);
    for (int b = 0; b < N_BATCHES; b++) {
        kernels_of(r)->maker->destroy(on->batches[b]);
        on->batches[b] = NULL;
    }
}

/* Having entered. Again where another reducer has made the memory grow that they work in. */
static tagc_status make_batches(tagc_reducer *r) {
    tagc_direct_on *on = on_of(r);
    tagc_kernels *k = kernels_of(r);
    if (on->batches[ENCODE] && on->n_moves == k->n_moves) return TAGC_OK;
    destroy_batches(r);
    for (int b = 0; b < n_batches(r); b++) {
        size_t n = rows_of(r, b);
        if (n == 0) continue;
        TAGC_TRY(tagc_kernels_check(k, k->maker->create(kinds[b], on->rows, n, results_of(on), k->work, NULL,
                                                        k->stream, &on->batches[b])));
    }
    on->n_moves = k->n_moves;
    return TAGC_OK;
}

static void place(tagc_direct_on *on, tagc_arena *arena) {
    on->rows = tagc_arena_take(arena, on->n_results, sizeof *on->rows);
    on->bodies = tagc_arena_take(arena, on->n_results, sizeof *on->bodies);
    on->hosts = tagc_arena_take(arena, on->n_results, sizeof *on->hosts);
    on->results = tagc_arena_take(arena, on->n_results, sizeof *on->results);
}

static tagc_status reserve(tagc_reducer *r) {
    const tagc_direct_on *on = on_of(r);
    tagc_kernels *k = kernels_of(r);
    size_t work_bytes = 0;
    for (int b = 0; b < n_batches(r); b++) {
        size_t n = rows_of(r, b), n_bytes = n ? k->maker->work_bytes(kinds[b], on->rows, n, 1) : 0;
        if (n_bytes > work_bytes) work_bytes = n_bytes;
    }
    TAGC_TRY(tagc_kernels_enter(k));
    tagc_status status = tagc_kernels_reserve(k, work_bytes, on->n_bytes);
    if (status == TAGC_OK) status = make_batches(r);
    if (status == TAGC_OK) status = tagc_kernels_wait(k);
    tagc_kernels_leave(k);
    return status;
}

static tagc_status make(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    tagc_arena arena = {0};
    void *memory;
    TAGC_TRY(tagc_memory_create(sizeof(tagc_direct_on), "reducer on a device", &memory));
    tagc_direct_on *on = d->beside = memory;
    on->n_results = (size_t)d->n_hosts;
    on->stride = tagc_aligned(d->capacity);
    on->n_bytes = bodies_begin(on) + (size_t)d->n_hosts * on->stride;
    place(on, &arena);
    TAGC_TRY(tagc_memory_create(arena.n_bytes, "reducer on a device", &on->arena));
    arena = (tagc_arena){.base = on->arena};
    place(on, &arena);
    const tagc_heap *heap = &r->arrays->heap;
    TAGC_TRY(heap->create(heap->context, on->n_bytes, "bodies", &memory));
    on->memory = memory;
    return reserve(r);
}

static void end(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    tagc_direct_on *on = on_of(r);
    if (!on) return;
    destroy_batches(r);
    r->arrays->heap.destroy(r->arrays->heap.context, on->memory, on->n_bytes);
    tagc_memory_destroy(on->arena);
    tagc_memory_destroy(on);
    d->beside = NULL;
}

/* ---- runs; having entered ---- */

/* Of the first n rows; results are here when it returns. */
static tagc_status run(tagc_reducer *r, int batch, size_t n) {
    tagc_direct_on *on = on_of(r);
    tagc_kernels *k = kernels_of(r);
    size_t n_bytes = n * sizeof *on->results;
    TAGC_TRY(tagc_kernels_check(k, k->maker->point(on->batches[batch], on->rows, results_of(on))));
    TAGC_TRY(tagc_kernels_check(k, k->maker->run(on->batches[batch])));
    TAGC_TRY(tagc_kernels_copy(k, k->pinned, on->memory, n_bytes, TAGC_COPY_TO_HOST));
    TAGC_TRY(tagc_kernels_wait(k));
    memcpy(on->results, k->pinned, n_bytes);
    return TAGC_OK;
}

/* A length from the device decides how much is copied here. */
static tagc_status check_length(const tagc_direct_on *on, const tagc_encoded *encoded) {
    if (encoded->n_bytes <= on->stride && encoded->n_index_bytes <= encoded->n_bytes) return TAGC_OK;
    return tagc_fail(TAGC_ERR_DEVICE,
                     "kernels made a body of %zu bytes, %zu of them positions: there is room for %zu",
                     encoded->n_bytes, encoded->n_index_bytes, on->stride);
}

static char *pinned_body(const tagc_reducer *r, int host) {
    const tagc_direct_on *on = on_of(r);
    return kernels_of(r)->pinned + bodies_begin(on) + (size_t)host * on->stride;
}

/* Bodies as they are on the host (bytes NULL: none) become those on the device, on their way to it. hosts[i] sent bodies[i]; the
 * own one never left. */
static tagc_status send_bodies(const tagc_reducer *r, tagc_body *bodies, const int *hosts, int n) {
    const tagc_direct *d = tagc_direct_of(r);
    for (int i = 0; i < n; i++)
        if (bodies[i].bytes && hosts[i] != d->host)
            memcpy(pinned_body(r, hosts[i]), bodies[i].bytes, bodies[i].n_bytes);
    for (int i = 0; i < n; i++) {
        char *to = body_of(on_of(r), hosts[i]);
        if (!bodies[i].bytes) continue;
        if (hosts[i] != d->host)
            TAGC_TRY(tagc_kernels_copy(kernels_of(r), to, pinned_body(r, hosts[i]), bodies[i].n_bytes,
                                       TAGC_COPY_TO_DEVICE));
        bodies[i].bytes = (uint8_t *)to;
    }
    return TAGC_OK;
}

static tagc_status encode_all(tagc_reducer *r) {
    tagc_direct_on *on = on_of(r);
    TAGC_TRY(make_batches(r));
    size_t n = encode_rows(r);
    TAGC_TRY(run(r, ENCODE, n));
    for (size_t i = 0; i < n; i++) TAGC_TRY(check_length(on, &on->results[i].encoded));
    return TAGC_OK;
}

/* Bodies of stages [s, end) to where they leave. */
static tagc_status fetch_bodies(tagc_reducer *r, int s, int end) {
    const tagc_direct *d = tagc_direct_of(r);
    for (int i = s; i < end; i++) {
        int host = tagc_host_to(d, i);
        TAGC_TRY(tagc_kernels_copy(kernels_of(r), pinned_body(r, host), body_of(on_of(r), host),
                                   on_of(r)->results[host].encoded.n_bytes, TAGC_COPY_TO_HOST));
    }
    TAGC_TRY(tagc_kernels_wait(kernels_of(r)));
    for (int i = s; i < end; i++) {
        int host = tagc_host_to(d, i);
        memcpy(tagc_direct_row_out(d, i) + TAGC_WIRE_HEADER_BYTES, pinned_body(r, host),
               on_of(r)->results[host].encoded.n_bytes);
    }
    return TAGC_OK;
}

static tagc_status encode_sums(tagc_reducer *r, uint8_t *body, tagc_encoded *out) {
    const tagc_direct *d = tagc_direct_of(r);
    tagc_direct_on *on = on_of(r);
    TAGC_TRY(make_batches(r));
    TAGC_TRY(run(r, ENCODE_SUMS, encode_sums_rows(r)));
    const tagc_encoded *encoded = &on->results[0].encoded;
    TAGC_TRY(check_length(on, encoded));
    TAGC_TRY(tagc_kernels_copy(kernels_of(r), pinned_body(r, d->host), body_of(on, d->host), encoded->n_bytes,
                               TAGC_COPY_TO_HOST));
    TAGC_TRY(tagc_kernels_wait(kernels_of(r)));
    memcpy(body, pinned_body(r, d->host), encoded->n_bytes);
    *out = *encoded;
    return TAGC_OK;
}

static tagc_status add(tagc_reducer *r, int n) {
    const tagc_direct *d = tagc_direct_of(r);
    tagc_direct_on *on = on_of(r);
    const uint8_t *own = (const uint8_t *)tagc_direct_row_out(d, d->n_hosts - 1) + TAGC_WIRE_HEADER_BYTES;
    TAGC_TRY(make_batches(r));
    for (int i = 0; i < n; i++) {
        size_t at = (size_t)(d->bodies[i].bytes - (const uint8_t *)d->recv);
        on->hosts[i] = d->bodies[i].bytes == own ? d->host : (int)(at / d->stride);
        on->bodies[i] = d->bodies[i];
    }
    TAGC_TRY(send_bodies(r, on->bodies, on->hosts, n));
    TAGC_TRY(run(r, ADD, add_rows(r, n)));
    r->now.stats.nonfinite |= on->results[0].nonfinite;
    return TAGC_OK;
}

static tagc_status decode_sums(tagc_reducer *r, const tagc_body *bodies) {
    const tagc_direct *d = tagc_direct_of(r);
    tagc_direct_on *on = on_of(r);
    TAGC_TRY(make_batches(r));
    for (int host = 0; host < d->n_hosts; host++) {
        on->hosts[host] = host;
        on->bodies[host] = bodies[host];
    }
    TAGC_TRY(send_bodies(r, on->bodies, on->hosts, d->n_hosts));
    size_t n = decode_sums_rows(r, 0);
    return n ? run(r, DECODE_SUMS, n) : TAGC_OK;
}

/* ---- what the exchange calls ---- */

static int is_doomed(const tagc_reducer *r) {
    return r->now.failure != TAGC_OK || r->now.stats.nonfinite;
}

/* Around each of them. */
static tagc_status enter(tagc_reducer *r) {
    tagc_status status = tagc_kernels_enter(kernels_of(r));
    tagc_note_failure(r, status);
    return status;
}

static void leave(tagc_reducer *r, tagc_status status) {
    tagc_note_failure(r, status);
    tagc_kernels_leave(kernels_of(r));
}

static void on_encode(tagc_reducer *r, int s, tagc_encoded *out) {
    const tagc_direct *d = tagc_direct_of(r);
    tagc_status status = TAGC_OK;
    int is_first = s < d->n_hosts - 1 && s % d->batch == 0;
    if (s == 0 || is_first) {
        if (enter(r) != TAGC_OK) return;
        if (s == 0) status = encode_all(r);
        if (status == TAGC_OK && is_first)
            status = fetch_bodies(r, s, tagc_direct_batch_end(d, s / d->batch));
        leave(r, status);
    }
    if (status == TAGC_OK) *out = on_of(r)->results[tagc_host_to(d, s)].encoded;
}

static void on_add(tagc_reducer *r, int n) {
    if (is_doomed(r) || enter(r) != TAGC_OK) return;
    leave(r, add(r, n));
}

static void on_encode_sums(tagc_reducer *r, uint8_t *body, tagc_encoded *out) {
    if (enter(r) != TAGC_OK) return;
    leave(r, encode_sums(r, body, out));
}

static void on_decode_sums(tagc_reducer *r, const tagc_body *bodies) {
    if (is_doomed(r) || enter(r) != TAGC_OK) return;
    leave(r, decode_sums(r, bodies));
}

static const tagc_beside kernels = {.name = "kernels",
                                    .make = make,
                                    .end = end,
                                    .encode = on_encode,
                                    .add = on_add,
                                    .encode_sums = on_encode_sums,
                                    .decode_sums = on_decode_sums};

tagc_status tagc_reducer_create_on(tagc_kernels *of, tagc_comm *comm, const tagc_reducer_options *options,
                                   tagc_reducer **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!comm || !of) return tagc_fail(TAGC_ERR_ARGUMENT, "%s is NULL", comm ? "kernels" : "comm");
    return tagc_reducer_make(&of->arrays, &kernels, comm, options, out);
}
