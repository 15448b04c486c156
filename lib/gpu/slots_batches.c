/* Batches of a reducer by slots: the rows of each, and their memory.
 *
 * Memory on the device of the arrays: | results (W) | lengths (W) | stop | sums of checksums |. */
#include "gpu/slots_private.h"

#include <string.h>

tagc_direct_slots *tagc_direct_slots_of(const tagc_reducer *r) {
    return tagc_direct_of(r)->beside;
}

static const tagc_code_options *options_of(const tagc_reducer *r, int is_sums) {
    const tagc_direct *d = tagc_direct_of(r);
    return is_sums ? &d->sums : &d->fragment;
}

int tagc_direct_slots_has_sums(const tagc_reducer *r) {
    return r->options.output == TAGC_OUTPUT_UNIT;
}

static size_t most_bytes(const tagc_reducer *r, int is_sums) {
    const tagc_code_options *o = options_of(r, is_sums);
    return tagc_code_of(o)->max_bytes(o);
}

uint64_t tagc_slots_bytes(const tagc_reducer *r, int is_sums) {
    if (!r || !tagc_reducer_is_by_caller(r) || (is_sums && !tagc_direct_slots_has_sums(r))) return 0;
    return tagc_aligned(TAGC_SLOT_HEADER_BYTES + most_bytes(r, is_sums));
}

tagc_slots_form tagc_direct_slots_form(const tagc_reducer *r, int is_sums, int n) {
    const tagc_code_options *o = options_of(r, is_sums);
    return (tagc_slots_form){.stride = (size_t)tagc_slots_bytes(r, is_sums),
                             .most_bytes = most_bytes(r, is_sums),
                             .n_slots = (uint32_t)n,
                             .most_items = (uint32_t)(o->sparse ? o->k : o->n),
                             .kind = is_sums ? TAGC_SLOT_SUMS : TAGC_SLOT_FRAGMENT,
                             .coding = (uint32_t)r->options.format,
                             .block = (uint32_t)r->options.block,
                             .rank = (uint32_t)r->rank,
                             .k = (uint32_t)r->k,
                             .n_elems = r->shard,
                             .step = r->now.number};
}

static const uint8_t *body_at(const char *slots, const tagc_slots_form *form, int i) {
    return slots ? (const uint8_t *)slots + (size_t)i * form->stride + TAGC_SLOT_HEADER_BYTES : NULL;
}

/* ---- rows ---- */

static float *own_sums(const tagc_reducer *r) {
    return r->now.output ? tagc_direct_sums(r) : NULL;
}

static float *part_of(float *residual, const tagc_reducer *r, int rank) {
    return residual ? residual + (size_t)rank * r->shard : NULL;
}

static size_t encode_rows(const tagc_reducer *r) {
    tagc_direct_slots *s = tagc_direct_slots_of(r);
    tagc_slots_form form = tagc_direct_slots_form(r, 0, r->world_size);
    for (int q = 0; q < r->world_size; q++)
        s->rows[q] =
            (tagc_batch_row){.options = *options_of(r, 0),
                             .gradient = r->now.gradient ? r->now.gradient + (size_t)q * r->shard : NULL,
                             .residual_in = part_of(r->now.residual, r, q),
                             .residual_out = part_of(s->residual, r, q),
                             .body = (uint8_t *)(size_t)body_at(s->send, &form, q)};
    return (size_t)r->world_size;
}

/* A row for each received body. */
static size_t check_rows(const tagc_reducer *r, int is_sums) {
    tagc_direct_slots *s = tagc_direct_slots_of(r);
    tagc_slots_form form = tagc_direct_slots_form(r, is_sums, r->world_size);
    for (int q = 0; q < r->world_size; q++) {
        s->bodies[q] = (tagc_body){body_at(s->received, &form, q), 0};
        s->rows[q] = (tagc_batch_row){.options = *options_of(r, is_sums),
                                      .bodies = &s->bodies[q],
                                      .n_bodies = 1,
                                      .lengths = &s->lengths[q]};
    }
    return (size_t)r->world_size;
}

static size_t add_rows(const tagc_reducer *r) {
    tagc_direct_slots *s = tagc_direct_slots_of(r);
    tagc_slots_form form = tagc_direct_slots_form(r, 0, r->world_size);
    for (int q = 0; q < r->world_size; q++) s->bodies[q] = (tagc_body){body_at(s->received, &form, q), 0};
    s->rows[0] = (tagc_batch_row){.options = *options_of(r, 0),
                                  .sums = own_sums(r),
                                  .scale = r->scale,
                                  .bodies = s->bodies,
                                  .n_bodies = r->world_size,
                                  .lengths = s->lengths,
                                  .stop = s->stop};
    return 1;
}

static size_t encode_sums_rows(const tagc_reducer *r) {
    tagc_direct_slots *s = tagc_direct_slots_of(r);
    tagc_slots_form form = tagc_direct_slots_form(r, 1, 1);
    s->rows[0] = (tagc_batch_row){.options = *options_of(r, 1),
                                  .sums = own_sums(r),
                                  .error = part_of(s->residual, r, r->rank),
                                  .scale = 1.0f / r->scale,
                                  .body = (uint8_t *)(size_t)body_at(s->sums, &form, 0)};
    return 1;
}

/* Of all ranks but this one, which already has its own sums as they decode. */
static size_t decode_rows(const tagc_reducer *r) {
    tagc_direct_slots *s = tagc_direct_slots_of(r);
    tagc_slots_form form = tagc_direct_slots_form(r, 1, r->world_size);
    size_t n = 0;
    for (int q = 0; q < r->world_size; q++) {
        s->bodies[q] = (tagc_body){body_at(s->received, &form, q), 0};
        if (q == r->rank) continue;
        s->rows[n++] = (tagc_batch_row){.options = *options_of(r, 1),
                                        .sums = r->now.output ? r->now.output + (size_t)q * r->shard : NULL,
                                        .scale = 1,
                                        .bodies = &s->bodies[q],
                                        .n_bodies = 1,
                                        .lengths = &s->lengths[q],
                                        .stop = s->stop};
    }
    return n;
}

size_t tagc_direct_slots_rows(const tagc_reducer *r, int batch) {
    return batch == TAGC_SLOTS_ENCODE        ? encode_rows(r)
           : batch == TAGC_SLOTS_CHECK       ? check_rows(r, 0)
           : batch == TAGC_SLOTS_ADD         ? add_rows(r)
           : batch == TAGC_SLOTS_ENCODE_SUMS ? encode_sums_rows(r)
           : batch == TAGC_SLOTS_CHECK_SUMS  ? check_rows(r, 1)
                                             : decode_rows(r);
}

static const tagc_batch_kind kinds[TAGC_SLOTS_N_BATCHES] = {TAGC_BATCH_ENCODE,   TAGC_BATCH_VALIDATE,
                                                            TAGC_BATCH_DECODE,   TAGC_BATCH_ENCODE_SUMS,
                                                            TAGC_BATCH_VALIDATE, TAGC_BATCH_DECODE};

static int n_batches(const tagc_reducer *r) {
    return tagc_direct_slots_has_sums(r) ? TAGC_SLOTS_N_BATCHES : TAGC_SLOTS_ENCODE_SUMS;
}

/* ---- life ---- */

static void destroy_batches(const tagc_reducer *r) {
    tagc_direct_slots *s = tagc_direct_slots_of(r);
    for (int b = 0; b < TAGC_SLOTS_N_BATCHES; b++) {
        if (s->maker) s->maker->destroy(s->batches[b]);
        s->batches[b] = NULL;
    }
}

tagc_status tagc_direct_slots_check(const tagc_reducer *r, tagc_status status) {
    return r->arrays ? tagc_kernels_check(tagc_direct_slots_kernels(r), status) : status;
}

tagc_status tagc_direct_slots_make_batches(const tagc_reducer *r) {
    tagc_direct_slots *s = tagc_direct_slots_of(r);
    const tagc_kernels *k = tagc_direct_slots_kernels(r);
    if (s->batches[TAGC_SLOTS_ENCODE] && (!k || s->n_moves == k->n_moves)) return TAGC_OK;
    destroy_batches(r);
    for (int b = 0; b < n_batches(r); b++) {
        size_t n = tagc_direct_slots_rows(r, b);
        if (n == 0) continue;
        TAGC_TRY(tagc_direct_slots_check(r, s->maker->create(kinds[b], s->rows, n, s->results,
                                                             k ? k->work : s->work, r->pool,
                                                             k ? k->stream : NULL, &s->batches[b])));
    }
    if (k) s->n_moves = k->n_moves;
    return TAGC_OK;
}

static void place_lists(tagc_direct_slots *s, const tagc_reducer *r, tagc_arena *arena) {
    size_t n = (size_t)r->world_size;
    s->rows = tagc_arena_take(arena, n, sizeof *s->rows);
    s->bodies = tagc_arena_take(arena, n, sizeof *s->bodies);
}

static void place_memory(tagc_direct_slots *s, const tagc_reducer *r, tagc_arena *arena) {
    size_t n = (size_t)r->world_size;
    s->results = tagc_arena_take(arena, n, sizeof *s->results);
    s->lengths = tagc_arena_take(arena, n, sizeof *s->lengths);
    s->stop = tagc_arena_take(arena, 1, sizeof *s->stop);
    s->partial_sums = tagc_arena_take(arena, s->maker->slots->work_bytes((uint32_t)r->world_size), 1);
}

tagc_status tagc_direct_slots_enter(const tagc_reducer *r) {
    return r->arrays ? tagc_kernels_enter(tagc_direct_slots_kernels(r)) : TAGC_OK;
}

void tagc_direct_slots_leave(const tagc_reducer *r) {
    if (r->arrays) tagc_kernels_leave(tagc_direct_slots_kernels(r));
}

static tagc_status reserve(tagc_reducer *r) {
    tagc_direct_slots *s = tagc_direct_slots_of(r);
    size_t work_bytes = 0;
    for (int b = 0; b < n_batches(r); b++) {
        size_t n = tagc_direct_slots_rows(r, b),
               n_bytes = n ? s->maker->work_bytes(kinds[b], s->rows, n, r->options.n_threads) : 0;
        if (n_bytes > work_bytes) work_bytes = n_bytes;
    }
    if (!r->arrays) {
        TAGC_TRY(tagc_memory_create(work_bytes, "scratch of a reducer", &s->work));
        return tagc_direct_slots_make_batches(r);
    }
    TAGC_TRY(tagc_direct_slots_enter(r));
    tagc_status status = tagc_kernels_reserve(tagc_direct_slots_kernels(r), work_bytes, 0);
    if (status == TAGC_OK) status = tagc_direct_slots_make_batches(r);
    if (status == TAGC_OK) status = tagc_kernels_wait(tagc_direct_slots_kernels(r));
    tagc_direct_slots_leave(r);
    return status;
}

static tagc_status make(tagc_reducer *r) {
    if (r->options.output == TAGC_OUTPUT_HOST_SHARD)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "output is host_shard, but slots support only shard and unit");
    tagc_arena lists = {0}, memory = {0};
    void *block;
    TAGC_TRY(tagc_memory_create(sizeof(tagc_direct_slots), "reducer by slots", &block));
    tagc_direct_slots *s = tagc_direct_of(r)->beside = block;
    s->maker = r->arrays ? tagc_direct_slots_kernels(r)->maker : &tagc_batch_cpu;
    place_lists(s, r, &lists);
    TAGC_TRY(tagc_memory_create(lists.n_bytes, "reducer by slots", &s->arena));
    lists = (tagc_arena){.base = s->arena};
    place_lists(s, r, &lists);
    place_memory(s, r, &memory);
    s->n_bytes = memory.n_bytes;
    TAGC_TRY(r->arrays ? r->arrays->heap.create(r->arrays->heap.context, s->n_bytes, "slots", &block)
                       : tagc_memory_create(s->n_bytes, "slots", &block));
    s->memory = block;
    memory = (tagc_arena){.base = block};
    place_memory(s, r, &memory);
    return reserve(r);
}

static void end(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    tagc_direct_slots *s = d->beside;
    if (!s) return;
    destroy_batches(r);
    if (r->arrays)
        r->arrays->heap.destroy(r->arrays->heap.context, s->memory, s->n_bytes);
    else
        tagc_memory_destroy(s->memory);
    tagc_memory_destroy(s->work);
    tagc_memory_destroy(s->arena);
    tagc_memory_destroy(s);
    d->beside = NULL;
}

const tagc_beside tagc_direct_slots_beside = {.name = "slots", .by_caller = 1, .make = make, .end = end};
