/* Steps whose messages the caller sends, in frames (tagc/frames.h). With kernels, all work is enqueued in their stream, and the host
 * reads nothing.
 *
 *   _encode   batch: all fragments, into their frames | headers
 *   _add      headers, checksums | batch: validate bodies | batch: add them in rank order; for an all-reduce | batch: encode sums | header
 *   _decode   headers, checksums | batch: validate bodies | batch: decode them
 *   _settle   if the ranks' verdict is that the step does not count, the new residual gets the values from before the step
 *
 * The host swaps the two residuals in any case, so it can begin the next step without knowing how this one ended. `lengths` and
 * `stop` tell a batch which bodies are damaged or missing and must not be read.
 *
 * Memory beside the arrays: | results (W) | lengths (W) | stop | sums of checksums |.
 *
 * Reducers in a store share that memory, because one step of them at a time is under way, and there follows | the residual from before
 * the step |. A step begins with a copy to there and overwrites the residual, which so stays in its place; `settle` copies it back if
 * the step does not count. The copy moves 2 bytes per value of an int8 residual, and saves a spare for each size of part. */
#include "tagc/frames.h"
#include "core/clock.h"
#include "exchange/direct/direct.h"
#include "gpu/store.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* The last call of the step under way. */
typedef enum last_call { IDLE, ENCODED, ADDED, DECODED, SETTLED } last_call;

typedef struct direct_frames {
    const tagc_frames_maker *maker;
    tagc_queue *queue; /* of the store; NULL: `memory` is the reducer's own */
    char *memory;
    size_t n_bytes;
    void *before;   /* in a store, the residual from before the step; NULL: there is no residual */
    int has_before; /* `before` has been written */
    uint64_t *lengths, *partial_sums;
    int *stop;

    last_call last;
    char *send, *sums; /* of the caller: what goes out */
    const char *received;
    tagc_frames_verdict *verdict;
} direct_frames;

static direct_frames *frames_of(const tagc_reducer *r) {
    return tagc_direct_of(r)->on_device;
}

/* NULL: in host memory. */
static tagc_kernels *kernels_of(const tagc_reducer *r) {
    return tagc_kernels_of(r->arrays);
}

static void *stream_of(const tagc_reducer *r) {
    return tagc_direct_of(r)->batches.stream;
}

/* ---- shapes ---- */

/* 1 for an all-reduce, whose sums are encoded and returned. */
static int has_sums(const tagc_reducer *r) {
    return r->options.output == TAGC_OUTPUT_UNIT;
}

static const tagc_code_options *options_of(const tagc_reducer *r, int is_sums) {
    const tagc_direct *d = tagc_direct_of(r);
    return is_sums ? &d->sums : &d->fragment;
}

static size_t most_bytes(const tagc_reducer *r, int is_sums) {
    const tagc_code_options *o = options_of(r, is_sums);
    return tagc_code_of(o)->max_bytes(o);
}

uint64_t tagc_frames_bytes(const tagc_reducer *r, int is_sums) {
    if (!r || !tagc_reducer_is_by_caller(r) || (is_sums && !has_sums(r))) return 0;
    return tagc_aligned(TAGC_FRAME_HEADER_BYTES + most_bytes(r, is_sums));
}

/* The layout of n frames: of fragments, or of sums. */
static tagc_frames_form form_of(const tagc_reducer *r, int is_sums, int n) {
    const tagc_code_options *o = options_of(r, is_sums);
    return (tagc_frames_form){.stride = (size_t)tagc_frames_bytes(r, is_sums),
                              .most_bytes = most_bytes(r, is_sums),
                              .n_frames = (uint32_t)n,
                              .most_items = (uint32_t)(o->sparse ? o->k : o->n),
                              .kind = is_sums ? TAGC_FRAME_SUMS : TAGC_FRAME_FRAGMENT,
                              .coding = (uint32_t)o->values,
                              .block = (uint32_t)o->block,
                              .has_sums = (uint32_t)has_sums(r),
                              .rank = (uint32_t)r->rank,
                              .k = (uint32_t)o->k,
                              .n_elems = r->shard,
                              .step = r->now.number};
}

static const uint8_t *body_at(const char *frames, const tagc_frames_form *form, int i) {
    return frames ? (const uint8_t *)frames + (size_t)i * form->stride + TAGC_FRAME_HEADER_BYTES : NULL;
}

/* ---- life ---- */

/* NULL: it is in none. */
static tagc_store *store_of(const tagc_reducer *r) {
    return r->runner->is_ahead ? r->arrays->heap.context : NULL;
}

static void place(direct_frames *s, tagc_reducer *r, tagc_arena *arena) {
    tagc_batches *b = &tagc_direct_of(r)->batches;
    size_t n = (size_t)r->world_size;
    b->results = tagc_arena_take(arena, n, sizeof *b->results);
    s->lengths = tagc_arena_take(arena, n, sizeof *s->lengths);
    s->stop = tagc_arena_take(arena, 1, sizeof *s->stop);
    s->partial_sums = tagc_arena_take(arena, s->maker->work_bytes((uint32_t)n), 1);
    if (s->queue && r->n_residual)
        s->before = tagc_arena_take(arena, (size_t)tagc_reducer_stored_bytes(r), 1);
}

/* Where its memory is now. */
static void place_there(tagc_reducer *r) {
    direct_frames *s = frames_of(r);
    tagc_arena arena = {.base = s->queue ? s->queue->works[FRAMES_WORK].memory : s->memory};
    place(s, r, &arena);
}

static tagc_status make(tagc_reducer *r) {
    if (r->options.output == TAGC_OUTPUT_HOST_SHARD)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "output is host_shard, but frames support only shard and unit");
    const tagc_heap *heap = &r->arrays->heap;
    tagc_arena arena = {0};
    void *memory;
    if (store_of(r)) TAGC_TRY(tagc_store_check_idle(store_of(r)->queue)); /* such a step has what may grow */
    TAGC_TRY(tagc_memory_create(sizeof(direct_frames), "reducer by frames", &tagc_direct_of(r)->on_device));
    direct_frames *s = frames_of(r);
    s->maker = kernels_of(r) ? kernels_of(r)->maker->frames : &tagc_frames_cpu;
    s->queue = store_of(r) ? store_of(r)->queue : NULL;
    place(s, r, &arena);
    s->n_bytes = arena.n_bytes;
    if (s->queue) {
        const rooms_needs needs = {.work_bytes[FRAMES_WORK] = s->n_bytes};
        TAGC_TRY(tagc_rooms_reserve(s->queue, &needs));
    } else {
        TAGC_TRY(heap->create(heap->context, s->n_bytes, "frames", &memory));
        s->memory = memory;
    }
    place_there(r);
    return kernels_of(r) ? tagc_kernels_make_batches(r, 0) : tagc_batches_make(r);
}

static void end(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    direct_frames *s = frames_of(r);
    if (!s) return;
    tagc_batches_end(r);
    if (s->queue && s->queue->steps_by_frames == r) s->queue->steps_by_frames = NULL;
    r->arrays->heap.destroy(r->arrays->heap.context, s->memory, s->n_bytes);
    tagc_memory_destroy(s);
    d->on_device = NULL;
}

static const tagc_runner runner = {.name = "frames", .by_caller = 1, .is_whole = 1, .make = make, .end = end};
static const tagc_runner stored = {.name = "frames",
                                   .by_caller = 1,
                                   .is_ahead = 1,
                                   .is_whole = 1,
                                   .make = make,
                                   .end = end,
                                   .note_residual = tagc_store_note};

tagc_status tagc_frames_create(tagc_kernels *kernels, tagc_comm *comm, const tagc_reducer_options *options,
                               tagc_reducer **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!comm) return tagc_fail(TAGC_ERR_ARGUMENT, "comm is NULL");
    return tagc_reducer_make(kernels ? &kernels->arrays : &tagc_host_arrays, &runner, comm, options, out);
}

static tagc_status check_store(tagc_store *store, const tagc_comm *comm, tagc_reducer **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!comm || !store) return tagc_fail(TAGC_ERR_ARGUMENT, "%s is NULL", comm ? "store" : "comm");
    return tagc_store_take_kind(store, 1);
}

tagc_status tagc_frames_create_in(tagc_store *store, tagc_comm *comm, const tagc_reducer_options *options,
                                  tagc_reducer **out) {
    TAGC_TRY(check_store(store, comm, out));
    return tagc_reducer_make(&store->arrays, &stored, comm, options, out);
}

tagc_status tagc_frames_probe_in(tagc_store *store, tagc_comm *comm, const tagc_reducer_options *options,
                                 tagc_reducer **out) {
    TAGC_TRY(check_store(store, comm, out));
    return tagc_reducer_make_alone(&store->of_probes, &stored, comm, options, out);
}

/* ---- a step ---- */

static tagc_status check_call(const tagc_reducer *r, const char *what, last_call wanted) {
    if (!r) return tagc_fail(TAGC_ERR_ARGUMENT, "reducer is NULL");
    if (!tagc_reducer_is_by_caller(r))
        return tagc_fail(TAGC_ERR_STATE, "%s: this reducer was not made by tagc_frames_create", what);
    if (frames_of(r)->last != wanted)
        return tagc_fail(TAGC_ERR_STATE, "%s is not what comes next in this step", what);
    return TAGC_OK;
}

static tagc_status check_frames(const tagc_reducer *r, const void *frames, const char *what) {
    if (!frames) return tagc_fail(TAGC_ERR_ARGUMENT, "%s is NULL", what);
    if ((uintptr_t)frames % TAGC_ALIGNMENT)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s is at %p, must be at a multiple of %d bytes", what, frames,
                         TAGC_ALIGNMENT);
    return r->arrays->check(r->arrays->heap.context, frames, what);
}

/* ---- what a call consists of ---- */

static tagc_status seal(const tagc_reducer *r, int is_sums) {
    direct_frames *s = frames_of(r);
    tagc_frames_form form = form_of(r, is_sums, is_sums ? 1 : r->world_size);
    return tagc_batches_check(r, s->maker->seal(&form, (uint8_t *)(is_sums ? s->sums : s->send),
                                                tagc_direct_of(r)->batches.results, s->verdict,
                                                s->partial_sums, stream_of(r)));
}

static tagc_status judge(const tagc_reducer *r, const tagc_frames_form *form, size_t n,
                         const uint64_t *lengths) {
    direct_frames *s = frames_of(r);
    return tagc_batches_check(r, s->maker->judge(form, tagc_direct_of(r)->batches.results, (uint32_t)n,
                                                 lengths, s->verdict, s->stop, stream_of(r)));
}

/* The received body of rank q; its length is read when the batch runs. */
static const tagc_body *body_from(const tagc_reducer *r, const tagc_frames_form *form, int q) {
    tagc_body *body = &tagc_direct_of(r)->batches.bodies[q];
    *body = (tagc_body){.bytes = body_at(frames_of(r)->received, form, q)};
    return body;
}

static tagc_status check_bodies(tagc_reducer *r, const tagc_frames_form *form, int is_sums) {
    tagc_batch_row *rows = tagc_direct_of(r)->batches.rows;
    for (int q = 0; q < r->world_size; q++)
        rows[q] = (tagc_batch_row){.options = *options_of(r, is_sums),
                                   .bodies = body_from(r, form, q),
                                   .n_bodies = 1,
                                   .lengths = &frames_of(r)->lengths[q]};
    return tagc_batches_run(r, is_sums ? TAGC_CHECK_SUMS : TAGC_CHECK);
}

static tagc_status add_bodies(tagc_reducer *r, const tagc_frames_form *form) {
    const tagc_batches *b = &tagc_direct_of(r)->batches; /* whose bodies are those that were checked */
    if (has_sums(r)) b->bodies[r->rank] = tagc_own_body(r);
    b->rows[0] = tagc_add_row(r, b->bodies, r->world_size, 0);
    b->rows[0].lengths = frames_of(r)->lengths;
    b->rows[0].stop = frames_of(r)->stop;
    TAGC_TRY(tagc_batches_run(r, TAGC_ADD));
    return judge(r, form, 1, NULL);
}

static tagc_status decode_bodies(tagc_reducer *r, const tagc_frames_form *form) {
    const tagc_batches *b = &tagc_direct_of(r)->batches;
    for (int q = 0; q < r->world_size; q++) {
        b->rows[q] = tagc_decode_sums_row(r, (size_t)q, &b->bodies[q]);
        b->rows[q].lengths = &frames_of(r)->lengths[q];
        b->rows[q].stop = frames_of(r)->stop;
    }
    TAGC_TRY(tagc_batches_run(r, TAGC_DECODE_SUMS));
    return judge(r, form, (size_t)r->world_size, NULL);
}

/* Validates the received frames, then decodes them. */
static tagc_status take(tagc_reducer *r, int is_sums) {
    direct_frames *s = frames_of(r);
    tagc_frames_form form = form_of(r, is_sums, r->world_size);
    TAGC_TRY(tagc_batches_check(r, s->maker->open(&form, (const uint8_t *)s->received, s->lengths, s->verdict,
                                                  s->partial_sums, stream_of(r))));
    TAGC_TRY(check_bodies(r, &form, is_sums));
    TAGC_TRY(judge(r, &form, (size_t)r->world_size, s->lengths));
    return is_sums ? decode_bodies(r, &form) : add_bodies(r, &form);
}

/* Around every call: runs `what` unless this rank has failed, and notes its failure. */
static tagc_status work(tagc_reducer *r, tagc_status (*what)(tagc_reducer *r), tagc_phase phase,
                        last_call next) {
    double start_s = tagc_clock_s();
    frames_of(r)->last = next;
    int has_failed = r->now.failure != TAGC_OK;
    tagc_status status = !has_failed && kernels_of(r) ? tagc_kernels_enter_for(r) : TAGC_OK;
    if (status == TAGC_OK && !has_failed) {
        status = what(r);
        if (kernels_of(r)) tagc_kernels_leave(kernels_of(r));
    }
    tagc_note_failure(r, status);
    if (r->arrays->is_here) tagc_phase_end(r, phase, start_s);
    return status;
}

/* In a store, a row of the residual is overwritten: it is read where the copy is. */
static tagc_batch_row row_before(const tagc_reducer *r, tagc_batch_row row) {
    const char *before = frames_of(r)->before;
    if (before) row.residual_in = before + ((const char *)row.residual_in - (const char *)r->residual);
    return row;
}

static tagc_status encode(tagc_reducer *r) {
    direct_frames *s = frames_of(r);
    tagc_frames_form form = form_of(r, 0, r->world_size);
    if (s->before)
        TAGC_TRY(tagc_kernels_copy(kernels_of(r), s->before, r->residual,
                                   (size_t)tagc_reducer_stored_bytes(r), TAGC_COPY_THERE));
    s->has_before = s->before != NULL;
    for (int q = 0; q < r->world_size; q++)
        tagc_direct_of(r)->batches.rows[q] =
            row_before(r, tagc_encode_row(r, q, (uint8_t *)(size_t)body_at(s->send, &form, q)));
    TAGC_TRY(tagc_batches_run(r, TAGC_ENCODE));
    return seal(r, 0);
}

tagc_status tagc_frames_encode(tagc_reducer *r, const void *gradient, float *output, void *send,
                               tagc_frames_verdict *verdict) {
    TAGC_TRY(check_call(r, "encode", IDLE));
    r->now.number++; /* also if it fails: peers count the step, too */
    r->n_steps++;
    TAGC_TRY(tagc_reducer_check_arrays(r, gradient, output));
    TAGC_TRY(check_frames(r, send, "send"));
    if (!verdict) return tagc_fail(TAGC_ERR_ARGUMENT, "verdict is NULL");
    TAGC_TRY(r->arrays->check(r->arrays->heap.context, verdict, "verdict"));
    direct_frames *s = frames_of(r);
    if (s->queue) {
        TAGC_TRY(tagc_store_check_idle(s->queue));
        s->queue->steps_by_frames = r;
        s->has_before = 0;
        place_there(r);
        r->now.residual = r->residual;
    }
    if (r->spares) {
        r->now.residual = tagc_comm_spare_take(r->comm, r->spares);
        if (!r->now.residual)
            return tagc_fail(TAGC_ERR_STATE,
                             "encode: more reducers of this size are between encode and settle than "
                             "there are spare residuals");
    }
    r->now.begun = 1;
    r->now.start_s = tagc_clock_s();
    tagc_reducer_stats_init(&r->now.stats);
    r->now.failure = TAGC_OK;
    r->now.gradient = gradient;
    r->now.output = output;
    s->send = send;
    s->verdict = verdict;
    return work(r, encode, TAGC_PHASE_SELECT, ENCODED);
}

static tagc_status add(tagc_reducer *r) {
    TAGC_TRY(take(r, 0));
    if (!has_sums(r)) return TAGC_OK;
    tagc_frames_form form = form_of(r, 1, 1);
    tagc_direct_of(r)->batches.rows[0] =
        row_before(r, tagc_encode_sums_row(r, (uint8_t *)(size_t)body_at(frames_of(r)->sums, &form, 0)));
    TAGC_TRY(tagc_batches_run(r, TAGC_ENCODE_SUMS));
    return seal(r, 1);
}

tagc_status tagc_frames_add(tagc_reducer *r, const void *received, void *sums) {
    TAGC_TRY(check_call(r, "add", ENCODED));
    TAGC_TRY(check_frames(r, received, "received"));
    if (has_sums(r)) TAGC_TRY(check_frames(r, sums, "sums"));
    frames_of(r)->received = received;
    frames_of(r)->sums = sums;
    return work(r, add, TAGC_PHASE_DECODE, has_sums(r) ? ADDED : DECODED);
}

static tagc_status decode(tagc_reducer *r) {
    return take(r, 1);
}

tagc_status tagc_frames_decode(tagc_reducer *r, const void *received) {
    TAGC_TRY(check_call(r, "decode", ADDED));
    TAGC_TRY(check_frames(r, received, "received"));
    frames_of(r)->received = received;
    return work(r, decode, TAGC_PHASE_DECODE, DECODED);
}

static tagc_status settle(tagc_reducer *r) {
    direct_frames *s = frames_of(r);
    size_t n_output = (size_t)r->exchange->output_elems(&r->options, r->world_size);
    return tagc_batches_check(r, s->maker->settle(s->verdict, s->before ? s->before : r->residual,
                                                  r->now.residual, (size_t)tagc_reducer_stored_bytes(r),
                                                  r->now.output, n_output, stream_of(r)));
}

/* Of a step that failed on this rank, whose kernels may have run. */
static void put_back(tagc_reducer *r) {
    direct_frames *s = frames_of(r);
    tagc_kernels *k = kernels_of(r);
    if (!s->has_before || tagc_kernels_enter(k) != TAGC_OK) return; /* the device failed */
    (void)tagc_kernels_copy(k, r->residual, s->before, (size_t)tagc_reducer_stored_bytes(r), TAGC_COPY_THERE);
    tagc_kernels_leave(k);
}

static void end_in_store(tagc_reducer *r) {
    if (r->now.failure != TAGC_OK) put_back(r);
    r->now.residual = NULL; /* the residual itself */
    frames_of(r)->queue->steps_by_frames = NULL;
}

/* If this rank failed, its kernels may not have run, so it keeps the residual from before the step. */
tagc_status tagc_frames_settle(tagc_reducer *r) {
    if (r && tagc_reducer_is_by_caller(r) && (frames_of(r)->last == ENCODED || frames_of(r)->last == ADDED)) {
        tagc_note_failure(r, tagc_fail(TAGC_ERR_STATE, "the step was given up before its end"));
        frames_of(r)->last = DECODED;
    }
    TAGC_TRY(check_call(r, "settle", DECODED));
    tagc_status status = work(r, settle, TAGC_PHASE_DECODE, SETTLED);
    if (frames_of(r)->queue) end_in_store(r);
    tagc_reducer_settle_residual(r, r->now.failure == TAGC_OK);
    r->now.gradient = r->now.output = NULL;
    return status;
}

/* ---- the outcome ---- */

int64_t tagc_frames_failure(const tagc_reducer *r, tagc_status status) {
    return r && status != TAGC_OK
               ? tagc_frame_failure(TAGC_FRAME_RANK_FAILED, (uint32_t)r->rank, (uint32_t)status)
               : 0;
}

static tagc_status fail_of(tagc_reducer *r, int64_t failure) {
    static const char *const texts[] = {[TAGC_FRAME_VOID] = "says that its sender has failed",
                                        [TAGC_FRAME_BAD_VALUES] = "has values that are damaged",
                                        [TAGC_FRAME_BAD_LENGTH] = "has a body of a wrong length",
                                        [TAGC_FRAME_BAD_POSITIONS] = "has positions that are damaged",
                                        [TAGC_FRAME_BAD_SUM] = "has a wrong checksum",
                                        [TAGC_FRAME_BAD_HEADER] = "has a damaged header",
                                        [TAGC_FRAME_OTHER_STEP] = "is not one of this step of this unit",
                                        [TAGC_FRAME_OTHER_K] = "is of another sparsity"};
    uint64_t bits = (uint64_t)failure;
    unsigned fault = (unsigned)(bits >> 48), rank = (unsigned)(bits >> 24) & 0xffffff,
             from = (unsigned)bits & 0xffffff;
    if (fault == TAGC_FRAME_RANK_FAILED && from <= TAGC_LAST_STATUS) {
        if (rank == (unsigned)r->rank && r->now.failure == (tagc_status)from)
            return tagc_fail(r->now.failure, "%s", r->now.failure_text);
        return tagc_fail((tagc_status)from, "rank %d failed in this step: %s",
                         tagc_comm_name(r->comm, (int)rank), tagc_status_name((int)from));
    }
    if (fault == TAGC_FRAME_SOUND || fault >= TAGC_FRAME_RANK_FAILED || failure < 0)
        return tagc_fail(TAGC_ERR_CORRUPT, "the ranks' verdict is damaged: failure is %lld",
                         (long long)failure);
    return tagc_fail(fault == TAGC_FRAME_OTHER_K ? TAGC_ERR_MISMATCH : TAGC_ERR_CORRUPT,
                     "the frame from rank %d that rank %d got %s", tagc_comm_name(r->comm, (int)from),
                     tagc_comm_name(r->comm, (int)rank), texts[fault]);
}

static void count(tagc_reducer *r, const tagc_frames_verdict *agreed) {
    tagc_reducer_stats *stats = &r->now.stats;
    uint64_t n_peers = (uint64_t)(r->world_size - 1);
    uint64_t n_bytes[TAGC_N_LEGS] = {[TAGC_LEG_VALUES] = n_peers * tagc_frames_bytes(r, 0),
                                     [TAGC_LEG_RESULT] = n_peers * tagc_frames_bytes(r, 1),
                                     [TAGC_LEG_CONTROL] = n_peers * 2 * sizeof(int64_t)};
    for (int leg = 0; leg < TAGC_N_LEGS; leg++)
        stats->n_bytes_sent[leg] = stats->n_bytes_received[leg] = n_bytes[leg];
    stats->n_sent = (uint64_t)agreed->n_sent;
    stats->n_union = tagc_direct_of(r)->fragment.sparse ? 0 : r->options.n_elems;
    stats->n_returned = (uint64_t)agreed->n_items;
    stats->nonfinite = agreed->nonfinite != 0;
    stats->sparsity = 1.0 - (double)stats->n_sent / (double)r->options.n_elems;
    stats->total_s = tagc_clock_s() - r->now.start_s;
}

tagc_status tagc_frames_end(tagc_reducer *r, const tagc_frames_verdict *agreed, tagc_reducer_stats *stats) {
    TAGC_TRY(check_call(r, "end", SETTLED));
    if (!agreed) return tagc_fail(TAGC_ERR_ARGUMENT, "agreed is NULL");
    TAGC_TRY(tagc_reducer_check_stats(stats));
    frames_of(r)->last = IDLE;
    r->now.begun = 0;
    if (agreed->failure) return fail_of(r, agreed->failure);
    /* A rank whose own failure is not in the verdict has a copy of another step's. */
    if (r->now.failure != TAGC_OK) return tagc_fail(r->now.failure, "%s", r->now.failure_text);
    count(r, agreed);
    tagc_reducer_write_stats(r, stats);
    return TAGC_OK;
}
