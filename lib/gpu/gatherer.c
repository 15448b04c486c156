/* Rows of a gather of deltas whose values are in a device's memory (gpu/kernels.h). It does what rows.c does on the processor.
 *
 * Kernels encode and apply deltas, and only bodies move between host and device. Whole parameters (the first gather, and the one after
 * a failure) and checksums (one gather in check_every) go through the host, piece by piece.
 *
 * On the device: | results (rows) | bodies (rows, stride) |, and in pinned memory in the same order. */
#include "exchange/gatherer/gatherer.h"
#include "codec/bf16.h"
#include "codec/delta.h"
#include "core/xxh3.h"
#include "gpu/kernels.h"

#include <stdio.h>
#include <string.h>

enum { PIECE_ELEMS = 1 << 16 };
enum { ENCODE, APPLY_ONE, APPLY_OTHERS, N_BATCHES };

typedef struct gatherer_on {
    tagc_delta_batch *batches[N_BATCHES]; /* NULL: not needed */
    uint64_t n_moves;                     /* of kernels->work when they were made */
    size_t stride;
    char *memory; /* of the device */
    size_t n_bytes;
    tagc_delta_row *rows; /* (n_rows) */
    float *piece;         /* (PIECE_ELEMS) */
    void *arena;
} gatherer_on;

static gatherer_on *on_of(const tagc_gatherer *g) {
    return g->on_device;
}

static tagc_kernels *kernels_of(const tagc_gatherer *g) {
    return tagc_kernels_in(g->arrays->heap.context);
}

static int *results_of(const gatherer_on *on) {
    return (int *)(void *)on->memory;
}

static size_t bodies_begin(const tagc_gatherer *g) {
    return tagc_aligned((size_t)g->world_size * sizeof(int));
}

static size_t body_at(const tagc_gatherer *g, int row) {
    return bodies_begin(g) + (size_t)row * on_of(g)->stride;
}

static size_t body_bytes(const tagc_gatherer *g) {
    return tagc_delta_bytes(g->bits, g->shard);
}

static tagc_delta_row row_of(const tagc_gatherer *g, int row) {
    uint16_t *replica = tagc_gatherer_full(g, row);
    return (tagc_delta_row){.bits = g->bits,
                            .n = g->shard,
                            .values = g->own,
                            .base = replica,
                            .out = replica,
                            .body = (uint8_t *)on_of(g)->memory + body_at(g, row)};
}

/* ---- life ---- */

static void destroy_batches(tagc_gatherer *g) {
    for (int b = 0; b < N_BATCHES; b++) {
        kernels_of(g)->maker->deltas->destroy(on_of(g)->batches[b]);
        on_of(g)->batches[b] = NULL;
    }
}

static const tagc_delta_kind kinds[N_BATCHES] = {TAGC_DELTA_ENCODE, TAGC_DELTA_APPLY, TAGC_DELTA_APPLY};

/* Made for the largest sizes; each run sets the arrays. */
static size_t shape_rows(const tagc_gatherer *g, int batch) {
    size_t n = batch == APPLY_OTHERS ? (size_t)g->world_size - 1 : 1;
    for (size_t i = 0; i < n; i++) on_of(g)->rows[i] = (tagc_delta_row){.bits = g->bits, .n = g->shard};
    return n;
}

/* Call after entering. Makes the batches again if another object made their memory grow. */
static tagc_status make_batches(tagc_gatherer *g) {
    gatherer_on *on = on_of(g);
    tagc_kernels *k = kernels_of(g);
    if (on->batches[ENCODE] && on->n_moves == k->n_moves) return TAGC_OK;
    destroy_batches(g);
    for (int b = 0; b < N_BATCHES; b++) {
        size_t n = shape_rows(g, b);
        if (n == 0) continue;
        TAGC_TRY(tagc_kernels_check(k, k->maker->deltas->create(kinds[b], on->rows, n, results_of(on),
                                                                k->work, k->stream, &on->batches[b])));
    }
    on->n_moves = k->n_moves;
    return TAGC_OK;
}

static void place(tagc_gatherer *g, tagc_arena *arena) {
    on_of(g)->rows = tagc_arena_take(arena, (size_t)g->world_size, sizeof *on_of(g)->rows);
    on_of(g)->piece = tagc_arena_take(arena, PIECE_ELEMS, sizeof *on_of(g)->piece);
}

static tagc_status make(tagc_gatherer *g) {
    tagc_kernels *k = kernels_of(g);
    tagc_arena arena = {0};
    void *memory;
    if (!g->is_delta)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "delta is 0, and kernels have gathers of deltas alone");
    if (g->options.full_format != TAGC_FORMAT_BF16)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "full_format is fp32, and kernels have replicas in bf16 alone");
    TAGC_TRY(tagc_memory_create(sizeof(gatherer_on), "gatherer on a device", &memory));
    gatherer_on *on = g->on_device = memory;
    place(g, &arena);
    TAGC_TRY(tagc_memory_create(arena.n_bytes, "gatherer on a device", &on->arena));
    arena = (tagc_arena){.base = on->arena};
    place(g, &arena);
    on->stride = tagc_aligned(body_bytes(g));
    on->n_bytes = body_at(g, g->world_size);
    TAGC_TRY(k->arrays.heap.create(k, on->n_bytes, "bodies", &memory));
    on->memory = memory;
    size_t work_bytes = 0;
    for (int b = 0; b < N_BATCHES; b++) {
        size_t n = shape_rows(g, b), n_bytes = n ? k->maker->deltas->work_bytes(on->rows, n) : 0;
        if (n_bytes > work_bytes) work_bytes = n_bytes;
    }
    TAGC_TRY(tagc_kernels_enter(k));
    tagc_status status = tagc_kernels_reserve(k, work_bytes, on->n_bytes);
    if (status == TAGC_OK) status = make_batches(g);
    if (status == TAGC_OK) status = tagc_kernels_wait(k);
    tagc_kernels_leave(k);
    return status;
}

static void end(tagc_gatherer *g) {
    gatherer_on *on = on_of(g);
    if (!on) return;
    destroy_batches(g);
    g->arrays->heap.destroy(g->arrays->heap.context, on->memory, on->n_bytes);
    tagc_memory_destroy(on->arena);
    tagc_memory_destroy(on);
}

/* ---- runs; having entered ---- */

static tagc_status run(tagc_gatherer *g, int batch) {
    const tagc_delta_maker *maker = kernels_of(g)->maker->deltas;
    tagc_delta_batch *b = on_of(g)->batches[batch];
    TAGC_TRY(tagc_kernels_check(kernels_of(g), maker->point(b, on_of(g)->rows, results_of(on_of(g)))));
    return tagc_kernels_check(kernels_of(g), maker->run(b));
}

static tagc_status encode_delta(tagc_gatherer *g, uint8_t *body, int *nonfinite) {
    tagc_kernels *k = kernels_of(g);
    size_t begin = body_at(g, g->rank), n_bytes = body_bytes(g);
    TAGC_TRY(make_batches(g));
    on_of(g)->rows[0] = row_of(g, g->rank);
    TAGC_TRY(run(g, ENCODE));
    TAGC_TRY(tagc_kernels_copy(k, k->pinned, on_of(g)->memory, sizeof(int), TAGC_COPY_TO_HOST));
    TAGC_TRY(tagc_kernels_copy(k, k->pinned + begin, on_of(g)->memory + begin, n_bytes, TAGC_COPY_TO_HOST));
    TAGC_TRY(tagc_kernels_wait(k));
    memcpy(nonfinite, k->pinned, sizeof *nonfinite);
    memcpy(body, k->pinned + begin, n_bytes);
    return TAGC_OK;
}

static int place_of(const tagc_gatherer *g, const tagc_row *row) {
    return (int)((size_t)((uint16_t *)row->values - (uint16_t *)g->full) / g->shard);
}

/* The rows of g->decoded that count. The own body is on the device already. */
static tagc_status apply(tagc_gatherer *g, int n_rows) {
    tagc_kernels *k = kernels_of(g);
    size_t n_bytes = body_bytes(g);
    int n = 0;
    TAGC_TRY(make_batches(g));
    for (int i = 0; i < n_rows; i++) {
        const tagc_row *row = &g->decoded[i];
        int at = place_of(g, row);
        if (row->is_void) continue;
        if (at != g->rank) memcpy(k->pinned + body_at(g, at), row->body, n_bytes);
        on_of(g)->rows[n++] = row_of(g, at);
    }
    for (int i = 0; i < n_rows; i++) {
        size_t begin = body_at(g, place_of(g, &g->decoded[i]));
        if (!g->decoded[i].is_void && place_of(g, &g->decoded[i]) != g->rank)
            TAGC_TRY(tagc_kernels_copy(k, on_of(g)->memory + begin, k->pinned + begin, n_bytes,
                                       TAGC_COPY_TO_DEVICE));
    }
    if (n > 1 && n == g->world_size - 1) {
        TAGC_TRY(run(g, APPLY_OTHERS));
    } else {
        for (int i = 0; i < n; i++) {
            on_of(g)->rows[0] = on_of(g)->rows[i];
            TAGC_TRY(run(g, APPLY_ONE));
        }
    }
    return tagc_kernels_wait(k);
}

/* ---- whole rows ---- */

static tagc_status encode_whole(tagc_gatherer *g, uint8_t *body, int *nonfinite) {
    for (size_t at = 0, n; at < g->shard; at += n) {
        uint16_t *halves = (uint16_t *)(void *)body + at;
        n = g->shard - at < PIECE_ELEMS ? g->shard - at : PIECE_ELEMS;
        TAGC_TRY(tagc_kernels_read(kernels_of(g), on_of(g)->piece, g->own + at, n * sizeof(float)));
        tagc_bf16_narrow(on_of(g)->piece, halves, n);
        for (size_t i = 0; i < n; i++) *nonfinite |= (halves[i] & 0x7fffu) >= 0x7f80u;
    }
    return TAGC_OK;
}

/* A body is what the row becomes. */
static tagc_status decode_whole(const tagc_gatherer *g, const tagc_row *row) {
    uint16_t *to = row->values, *nothing = (uint16_t *)(void *)on_of(g)->piece;
    if (!row->is_void) return tagc_kernels_write(kernels_of(g), to, row->body, g->shard * sizeof *to);
    for (size_t i = 0; i < PIECE_ELEMS; i++) nothing[i] = TAGC_BF16_NAN;
    for (size_t at = 0, n; at < g->shard; at += n) {
        n = g->shard - at < PIECE_ELEMS ? g->shard - at : PIECE_ELEMS;
        TAGC_TRY(tagc_kernels_write(kernels_of(g), to + at, nothing, n * sizeof *to));
    }
    return TAGC_OK;
}

/* ---- what the gatherer calls ---- */

static void note(tagc_gatherer *g, tagc_status status) {
    if (status == TAGC_OK || g->device_failure != TAGC_OK) return;
    g->device_failure = status;
    snprintf(g->device_text, sizeof g->device_text, "%s", tagc_last_error());
}

static int on_encode_row(tagc_gatherer *g, uint8_t *body) {
    int nonfinite = 0;
    tagc_status status;
    if (g->is_whole) {
        status = encode_whole(g, body, &nonfinite);
    } else if ((status = tagc_kernels_enter(kernels_of(g))) == TAGC_OK) {
        status = encode_delta(g, body, &nonfinite);
        tagc_kernels_leave(kernels_of(g));
    }
    note(g, status);
    return nonfinite || status != TAGC_OK;
}

static void on_decode_rows(tagc_gatherer *g, int n_rows) {
    tagc_status status = TAGC_OK;
    for (int i = 0; i < n_rows; i++)
        if (g->is_whole || g->decoded[i].is_void) note(g, decode_whole(g, &g->decoded[i]));
    if (g->is_whole || n_rows == 0) return;
    if ((status = tagc_kernels_enter(kernels_of(g))) == TAGC_OK) {
        status = apply(g, n_rows);
        tagc_kernels_leave(kernels_of(g));
    }
    note(g, status);
}

static uint64_t on_checksum(tagc_gatherer *g, int row) {
    tagc_xxh3_state state;
    tagc_xxh3_begin(&state);
    for (size_t at = 0, n; at < g->shard; at += n) {
        n = g->shard - at < PIECE_ELEMS ? g->shard - at : PIECE_ELEMS;
        note(g, tagc_kernels_read(kernels_of(g), on_of(g)->piece, (uint16_t *)tagc_gatherer_full(g, row) + at,
                                  n * sizeof(uint16_t)));
        tagc_xxh3_add(&state, on_of(g)->piece, n * sizeof(uint16_t));
    }
    return tagc_xxh3_end(&state);
}

static const tagc_gather_runner kernels = {.make = make,
                                           .end = end,
                                           .encode_row = on_encode_row,
                                           .decode_rows = on_decode_rows,
                                           .checksum = on_checksum};

tagc_status tagc_gatherer_create_on(tagc_kernels *of, tagc_comm *comm, const tagc_gatherer_options *options,
                                    tagc_gatherer **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!comm || !of) return tagc_fail(TAGC_ERR_ARGUMENT, "%s is NULL", comm ? "kernels" : "comm");
    return tagc_gatherer_make(&of->arrays, &kernels, comm, options, out);
}
