/* Steps whose messages the caller carries, in slots (tagc/slots.h). With kernels all of it is put into their stream, and the host
 * looks at nothing.
 *
 *   _encode   batch: all fragments, into their slots | headers
 *   _add      headers, checksums | batch: are bodies sound | batch: add them in rank order; for an all-reduce | batch: encode sums | header
 *   _decode   headers, checksums | batch: are bodies sound | batch: decode those of the others
 *   _settle   the residual that the step made has taken the place of the one before; where the ranks' verdict says that the step does
 *             not count, its values become those from before
 *
 * So the host need not know how a step ended to begin the next one: it swaps the two residuals in any case. What a batch may not look
 * at, since it is damaged or is not there, it learns from `lengths` and `stop`.
 *
 * Memory where the arrays are: | results (W) | lengths (W) | stop | sums of checksums |. */
#include "tagc/slots.h"
#include "core/clock.h"
#include "exchange/direct/direct.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { ENCODE, CHECK, ADD, ENCODE_SUMS, CHECK_SUMS, DECODE_SUMS, N_BATCHES };

/* What may come next. */
typedef enum stage { IDLE, ENCODED, ADDED, DECODED, SETTLED } stage;

struct tagc_direct_slots {
    const tagc_batch_maker *maker;
    tagc_batch *batches[N_BATCHES]; /* NULL: not needed */
    uint64_t n_moves;               /* of kernels->work when they were made */
    char *memory;
    size_t n_bytes;
    tagc_batch_result *results;
    uint64_t *lengths, *partial_sums;
    int *stop;
    void *work;           /* of batches; with kernels theirs */
    tagc_batch_row *rows; /* (W) */
    tagc_body *bodies;    /* (W) */
    void *arena;

    stage stage;
    char *send, *sums; /* of the caller: what goes out */
    const char *received;
    tagc_slots_verdict *verdict;
    float *residual; /* that the step makes; the one before is in now.residual until _settle */
};

static tagc_direct_slots *of(const tagc_reducer *r) {
    return tagc_direct_of(r)->slots;
}

static const tagc_code_options *options_of(const tagc_reducer *r, int is_sums) {
    const tagc_direct *d = tagc_direct_of(r);
    return is_sums ? &d->sums : &d->fragment;
}

static int has_sums(const tagc_reducer *r) {
    return r->options.output == TAGC_OUTPUT_UNIT;
}

static size_t most_bytes(const tagc_reducer *r, int is_sums) {
    const tagc_code_options *o = options_of(r, is_sums);
    return tagc_code_of(o)->max_bytes(o);
}

uint64_t tagc_slots_bytes(const tagc_reducer *r, int is_sums) {
    if (!r || !r->by_slots || (is_sums && !has_sums(r))) return 0;
    return tagc_aligned(TAGC_SLOT_HEADER_BYTES + most_bytes(r, is_sums));
}

/* Of all slots that come, or of those that go out: n. */
static tagc_slots_form form_of(const tagc_reducer *r, int is_sums, int n) {
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

/* ---- rows; each function returns their number ---- */

static float *own_sums(const tagc_reducer *r) {
    return r->now.output ? tagc_direct_sums(r) : NULL;
}

static float *part_of(float *residual, const tagc_reducer *r, int rank) {
    return residual ? residual + (size_t)rank * r->shard : NULL;
}

static size_t encode_rows(const tagc_reducer *r) {
    tagc_direct_slots *s = of(r);
    tagc_slots_form form = form_of(r, 0, r->world_size);
    for (int q = 0; q < r->world_size; q++)
        s->rows[q] =
            (tagc_batch_row){.options = *options_of(r, 0),
                             .gradient = r->now.gradient ? r->now.gradient + (size_t)q * r->shard : NULL,
                             .residual_in = part_of(r->now.residual, r, q),
                             .residual_out = part_of(s->residual, r, q),
                             .body = (uint8_t *)(size_t)body_at(s->send, &form, q)};
    return (size_t)r->world_size;
}

/* A row for each body that came. */
static size_t check_rows(const tagc_reducer *r, int is_sums) {
    tagc_direct_slots *s = of(r);
    tagc_slots_form form = form_of(r, is_sums, r->world_size);
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
    tagc_direct_slots *s = of(r);
    tagc_slots_form form = form_of(r, 0, r->world_size);
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
    tagc_direct_slots *s = of(r);
    tagc_slots_form form = form_of(r, 1, 1);
    s->rows[0] = (tagc_batch_row){.options = *options_of(r, 1),
                                  .sums = own_sums(r),
                                  .error = part_of(s->residual, r, r->rank),
                                  .scale = 1.0f / r->scale,
                                  .body = (uint8_t *)(size_t)body_at(s->sums, &form, 0)};
    return 1;
}

/* Of all ranks but this one, whose sums are what they decode to already. */
static size_t decode_rows(const tagc_reducer *r) {
    tagc_direct_slots *s = of(r);
    tagc_slots_form form = form_of(r, 1, r->world_size);
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

static size_t rows_of(const tagc_reducer *r, int batch) {
    return batch == ENCODE        ? encode_rows(r)
           : batch == CHECK       ? check_rows(r, 0)
           : batch == ADD         ? add_rows(r)
           : batch == ENCODE_SUMS ? encode_sums_rows(r)
           : batch == CHECK_SUMS  ? check_rows(r, 1)
                                  : decode_rows(r);
}

static const tagc_batch_kind kinds[N_BATCHES] = {TAGC_BATCH_ENCODE,   TAGC_BATCH_VALIDATE,
                                                 TAGC_BATCH_DECODE,   TAGC_BATCH_ENCODE_SUMS,
                                                 TAGC_BATCH_VALIDATE, TAGC_BATCH_DECODE};

static int n_batches(const tagc_reducer *r) {
    return has_sums(r) ? N_BATCHES : ENCODE_SUMS;
}

/* ---- life ---- */

static void destroy_batches(const tagc_reducer *r) {
    tagc_direct_slots *s = of(r);
    for (int b = 0; b < N_BATCHES; b++) {
        if (s->maker) s->maker->destroy(s->batches[b]);
        s->batches[b] = NULL;
    }
}

static tagc_status check(const tagc_reducer *r, tagc_status status) {
    return r->kernels ? tagc_kernels_check(r->kernels, status) : status;
}

/* Again where another reducer has made the memory grow that kernels work in. */
static tagc_status make_batches(const tagc_reducer *r) {
    tagc_direct_slots *s = of(r);
    const tagc_kernels *k = r->kernels;
    if (s->batches[ENCODE] && (!k || s->n_moves == k->n_moves)) return TAGC_OK;
    destroy_batches(r);
    for (int b = 0; b < n_batches(r); b++) {
        size_t n = rows_of(r, b);
        if (n == 0) continue;
        TAGC_TRY(check(r, s->maker->create(kinds[b], s->rows, n, s->results, k ? k->work : s->work, r->pool,
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

static tagc_status enter(const tagc_reducer *r) {
    return r->kernels ? tagc_kernels_enter(r->kernels) : TAGC_OK;
}

static void leave(const tagc_reducer *r) {
    if (r->kernels) tagc_kernels_leave(r->kernels);
}

static tagc_status reserve(tagc_reducer *r) {
    tagc_direct_slots *s = of(r);
    size_t work_bytes = 0;
    for (int b = 0; b < n_batches(r); b++) {
        size_t n = rows_of(r, b),
               n_bytes = n ? s->maker->work_bytes(kinds[b], s->rows, n, r->options.n_threads) : 0;
        if (n_bytes > work_bytes) work_bytes = n_bytes;
    }
    if (!r->kernels) {
        TAGC_TRY(tagc_memory_create(work_bytes, "scratch of a reducer", &s->work));
        return make_batches(r);
    }
    TAGC_TRY(enter(r));
    tagc_status status = tagc_kernels_reserve(r->kernels, work_bytes, 0);
    if (status == TAGC_OK) status = make_batches(r);
    if (status == TAGC_OK) status = tagc_kernels_wait(r->kernels);
    leave(r);
    return status;
}

tagc_status tagc_direct_make_slots(tagc_reducer *r) {
    tagc_arena lists = {0}, memory = {0};
    void *block;
    TAGC_TRY(tagc_memory_create(sizeof(tagc_direct_slots), "reducer by slots", &block));
    tagc_direct_slots *s = tagc_direct_of(r)->slots = block;
    s->maker = r->kernels ? r->kernels->maker : &tagc_batch_cpu;
    place_lists(s, r, &lists);
    TAGC_TRY(tagc_memory_create(lists.n_bytes, "reducer by slots", &s->arena));
    lists = (tagc_arena){.base = s->arena};
    place_lists(s, r, &lists);
    place_memory(s, r, &memory);
    s->n_bytes = memory.n_bytes;
    TAGC_TRY(r->kernels ? r->kernels->heap.create(r->kernels, s->n_bytes, "slots", &block)
                        : tagc_memory_create(s->n_bytes, "slots", &block));
    s->memory = block;
    memory = (tagc_arena){.base = block};
    place_memory(s, r, &memory);
    return reserve(r);
}

void tagc_direct_end_slots(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    tagc_direct_slots *s = d->slots;
    if (!s) return;
    destroy_batches(r);
    if (r->kernels)
        r->kernels->heap.destroy(r->kernels, s->memory, s->n_bytes);
    else
        tagc_memory_destroy(s->memory);
    tagc_memory_destroy(s->work);
    tagc_memory_destroy(s->arena);
    tagc_memory_destroy(s);
    d->slots = NULL;
}

tagc_status tagc_slots_create(tagc_kernels *kernels, tagc_comm *comm, const tagc_reducer_options *options,
                              tagc_reducer **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!comm) return tagc_fail(TAGC_ERR_ARGUMENT, "comm is NULL");
    return tagc_reducer_make(kernels, 1, comm, options, out);
}

/* ---- a step ---- */

static tagc_status check_call(const tagc_reducer *r, const char *what, stage wanted) {
    if (!r) return tagc_fail(TAGC_ERR_ARGUMENT, "reducer is NULL");
    if (!r->by_slots)
        return tagc_fail(TAGC_ERR_STATE, "%s: this reducer was not made by tagc_slots_create", what);
    if (of(r)->stage != wanted)
        return tagc_fail(TAGC_ERR_STATE, "%s is not what comes next in this step", what);
    return TAGC_OK;
}

static tagc_status check_slots(const tagc_reducer *r, const void *slots, const char *what) {
    if (!slots) return tagc_fail(TAGC_ERR_ARGUMENT, "%s is NULL", what);
    if ((uintptr_t)slots % TAGC_ALIGNMENT)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s is at %p, must be at a multiple of %d bytes", what, slots,
                         TAGC_ALIGNMENT);
    return r->kernels ? tagc_device_check_place(r->kernels->device, slots, what) : TAGC_OK;
}

static void *stream_of(const tagc_reducer *r) {
    return r->kernels ? r->kernels->stream : NULL;
}

/* Of a number of rows that rows_of has filled. */
static tagc_status run(const tagc_reducer *r, int batch) {
    tagc_direct_slots *s = of(r);
    if (rows_of(r, batch) == 0) return TAGC_OK;
    TAGC_TRY(check(r, s->maker->point(s->batches[batch], s->rows, s->results)));
    return check(r, s->maker->run(s->batches[batch]));
}

static tagc_status seal(const tagc_reducer *r, int is_sums) {
    tagc_direct_slots *s = of(r);
    tagc_slots_form form = form_of(r, is_sums, is_sums ? 1 : r->world_size);
    return check(r, s->maker->slots->seal(&form, (uint8_t *)(is_sums ? s->sums : s->send), s->results,
                                          s->verdict, s->partial_sums, stream_of(r)));
}

static tagc_status judge(const tagc_reducer *r, const tagc_slots_form *form, size_t n,
                         const uint64_t *lengths) {
    tagc_direct_slots *s = of(r);
    return check(
        r, s->maker->slots->judge(form, s->results, (uint32_t)n, lengths, s->verdict, s->stop, stream_of(r)));
}

/* What came is looked at, and then `batch` decodes it. */
static tagc_status take(tagc_reducer *r, int is_sums) {
    tagc_direct_slots *s = of(r);
    tagc_slots_form form = form_of(r, is_sums, r->world_size);
    int batch = is_sums ? DECODE_SUMS : ADD;
    size_t n_decoded = is_sums ? (size_t)r->world_size - 1 : 1;
    TAGC_TRY(check(r, s->maker->slots->open(&form, (const uint8_t *)s->received, s->lengths, s->verdict,
                                            s->partial_sums, stream_of(r))));
    TAGC_TRY(run(r, is_sums ? CHECK_SUMS : CHECK));
    TAGC_TRY(judge(r, &form, (size_t)r->world_size, s->lengths));
    TAGC_TRY(run(r, batch));
    return judge(r, &form, n_decoded, NULL);
}

/* What every call does around its work: it is this rank's first failure, or nothing. */
static tagc_status work(tagc_reducer *r, tagc_status (*what)(tagc_reducer *r), tagc_phase phase, stage next) {
    double start_s = tagc_clock_s();
    of(r)->stage = next;
    tagc_status status = r->now.failure == TAGC_OK ? enter(r) : TAGC_OK;
    if (status == TAGC_OK && r->now.failure == TAGC_OK) {
        status = make_batches(r);
        if (status == TAGC_OK) status = what(r);
        leave(r);
    }
    tagc_note_failure(r, status);
    if (!r->kernels) tagc_phase_end(r, phase, start_s);
    return status;
}

static tagc_status encode(tagc_reducer *r) {
    TAGC_TRY(run(r, ENCODE));
    return seal(r, 0);
}

tagc_status tagc_slots_encode(tagc_reducer *r, const float *gradient, float *output, void *send,
                              tagc_slots_verdict *verdict) {
    TAGC_TRY(check_call(r, "encode", IDLE));
    r->now.number++; /* also where it fails: peers count on */
    TAGC_TRY(tagc_reducer_check_arrays(r, gradient, output));
    TAGC_TRY(check_slots(r, send, "send"));
    if (!verdict) return tagc_fail(TAGC_ERR_ARGUMENT, "verdict is NULL");
    if (r->kernels) TAGC_TRY(tagc_device_check_place(r->kernels->device, verdict, "verdict"));
    tagc_direct_slots *s = of(r);
    if (r->spares) {
        s->residual = tagc_comm_spare_take(r->comm, r->spares);
        if (!s->residual)
            return tagc_fail(TAGC_ERR_STATE,
                             "encode: more reducers of this size are between encode and settle than "
                             "there are spare residuals");
        r->now.residual = r->residual; /* the one before */
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
    TAGC_TRY(run(r, ENCODE_SUMS));
    return seal(r, 1);
}

tagc_status tagc_slots_add(tagc_reducer *r, const void *received, void *sums) {
    TAGC_TRY(check_call(r, "add", ENCODED));
    TAGC_TRY(check_slots(r, received, "received"));
    if (has_sums(r)) TAGC_TRY(check_slots(r, sums, "sums"));
    of(r)->received = received;
    of(r)->sums = sums;
    return work(r, add, TAGC_PHASE_DECODE, has_sums(r) ? ADDED : DECODED);
}

static tagc_status decode(tagc_reducer *r) {
    return take(r, 1);
}

tagc_status tagc_slots_decode(tagc_reducer *r, const void *received) {
    TAGC_TRY(check_call(r, "decode", ADDED));
    TAGC_TRY(check_slots(r, received, "received"));
    of(r)->received = received;
    return work(r, decode, TAGC_PHASE_DECODE, DECODED);
}

static tagc_status settle(tagc_reducer *r) {
    tagc_direct_slots *s = of(r);
    size_t n_output = (size_t)r->exchange->output_elems(&r->options, r->world_size);
    return check(r, s->maker->slots->settle(s->verdict, r->now.residual, s->residual, (size_t)r->n_residual,
                                            r->now.output, n_output, stream_of(r)));
}

/* Where this rank failed all will hear of it, and its kernels may not have run: the residual is the one before. */
tagc_status tagc_slots_settle(tagc_reducer *r) {
    if (r && r->by_slots && (of(r)->stage == ENCODED || of(r)->stage == ADDED)) {
        tagc_note_failure(r, tagc_fail(TAGC_ERR_STATE, "the step was given up before its end"));
        of(r)->stage = DECODED;
    }
    TAGC_TRY(check_call(r, "settle", DECODED));
    tagc_direct_slots *s = of(r);
    tagc_status status = work(r, settle, TAGC_PHASE_DECODE, SETTLED);
    if (s->residual) {
        float *other = r->now.failure == TAGC_OK ? r->now.residual : s->residual;
        r->residual = other == s->residual ? r->now.residual : s->residual;
        tagc_comm_spare_give(r->comm, r->spares, other);
    }
    s->residual = r->now.residual = NULL;
    r->now.gradient = r->now.output = NULL;
    return status;
}

/* ---- what comes of it ---- */

int64_t tagc_slots_failure(const tagc_reducer *r, tagc_status status) {
    return r && status != TAGC_OK
               ? tagc_slot_failure(TAGC_SLOT_RANK_FAILED, (uint32_t)r->rank, (uint32_t)status)
               : 0;
}

static tagc_status fail_of(tagc_reducer *r, int64_t failure) {
    static const char *const texts[] = {[TAGC_SLOT_VOID] = "says that its sender has failed",
                                        [TAGC_SLOT_BAD_VALUES] = "has values that are damaged",
                                        [TAGC_SLOT_BAD_LENGTH] = "has a body of a wrong length",
                                        [TAGC_SLOT_BAD_POSITIONS] = "has positions that are damaged",
                                        [TAGC_SLOT_BAD_SUM] = "has a wrong checksum",
                                        [TAGC_SLOT_BAD_HEADER] = "has a damaged header",
                                        [TAGC_SLOT_OTHER_STEP] = "is not one of this step of this unit",
                                        [TAGC_SLOT_OTHER_K] = "is of another sparsity"};
    uint64_t bits = (uint64_t)failure;
    unsigned fault = (unsigned)(bits >> 48), rank = (unsigned)(bits >> 24) & 0xffffff,
             from = (unsigned)bits & 0xffffff;
    if (fault == TAGC_SLOT_RANK_FAILED && from <= TAGC_LAST_STATUS) {
        if (rank == (unsigned)r->rank && r->now.failure == (tagc_status)from)
            return tagc_fail(r->now.failure, "%s", r->now.failure_text);
        return tagc_fail((tagc_status)from, "rank %u failed in this step: %s", rank,
                         tagc_status_name((int)from));
    }
    if (fault == TAGC_SLOT_SOUND || fault >= TAGC_SLOT_RANK_FAILED || failure < 0)
        return tagc_fail(TAGC_ERR_CORRUPT, "the ranks' verdict is damaged: failure is %lld",
                         (long long)failure);
    return tagc_fail(fault == TAGC_SLOT_OTHER_K ? TAGC_ERR_MISMATCH : TAGC_ERR_CORRUPT,
                     "the slot from rank %u that rank %u got %s", from, rank, texts[fault]);
}

static void count(tagc_reducer *r, const tagc_slots_verdict *agreed) {
    tagc_reducer_stats *stats = &r->now.stats;
    uint64_t n_peers = (uint64_t)(r->world_size - 1);
    uint64_t n_bytes[TAGC_N_LEGS] = {[TAGC_LEG_VALUES] = n_peers * tagc_slots_bytes(r, 0),
                                     [TAGC_LEG_RESULT] = n_peers * tagc_slots_bytes(r, 1),
                                     [TAGC_LEG_CONTROL] = n_peers * 2 * sizeof(int64_t)};
    for (int leg = 0; leg < TAGC_N_LEGS; leg++)
        stats->n_bytes_sent[leg] = stats->n_bytes_received[leg] = n_bytes[leg];
    stats->n_kept = (uint64_t)agreed->n_kept;
    stats->n_union = tagc_direct_of(r)->fragment.sparse ? (uint64_t)agreed->n_items : r->options.n_elems;
    stats->nonfinite = agreed->nonfinite != 0;
    stats->sparsity = 1.0 - (double)stats->n_kept / (double)r->options.n_elems;
    stats->total_s = tagc_clock_s() - r->now.start_s;
}

tagc_status tagc_slots_end(tagc_reducer *r, const tagc_slots_verdict *agreed, tagc_reducer_stats *stats) {
    TAGC_TRY(check_call(r, "end", SETTLED));
    if (!agreed) return tagc_fail(TAGC_ERR_ARGUMENT, "agreed is NULL");
    TAGC_TRY(tagc_reducer_check_stats(stats));
    of(r)->stage = IDLE;
    r->now.begun = 0;
    if (agreed->failure) return fail_of(r, agreed->failure);
    /* A rank whose own failure is not in the verdict has a copy of another step's. */
    if (r->now.failure != TAGC_OK) return tagc_fail(r->now.failure, "%s", r->now.failure_text);
    count(r, agreed);
    tagc_reducer_write_stats(r, stats);
    return TAGC_OK;
}
