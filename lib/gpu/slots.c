/* Steps whose messages the caller sends, in slots (tagc/slots.h). With kernels, all work is enqueued in their stream, and the host
 * reads nothing.
 *
 *   _encode   batch: all fragments, into their slots | headers
 *   _add      headers, checksums | batch: validate bodies | batch: add them in rank order; for an all-reduce | batch: encode sums | header
 *   _decode   headers, checksums | batch: validate bodies | batch: decode those of the others
 *   _settle   if the ranks' verdict is that the step does not count, the new residual gets the values from before the step
 *
 * The host swaps the two residuals in any case, so it can begin the next step without knowing how this one ended. `lengths` and
 * `stop` tell a batch which bodies are damaged or missing and must not be read. */
#include "gpu/slots_private.h"

#include "core/clock.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

tagc_status tagc_slots_create(tagc_kernels *kernels, tagc_comm *comm, const tagc_reducer_options *options,
                              tagc_reducer **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!comm) return tagc_fail(TAGC_ERR_ARGUMENT, "comm is NULL");
    return tagc_reducer_make(kernels ? &kernels->arrays : NULL, &tagc_direct_slots_beside, comm, options,
                             out);
}

/* ---- a step ---- */

static tagc_status check_call(const tagc_reducer *r, const char *what, tagc_slots_stage wanted) {
    if (!r) return tagc_fail(TAGC_ERR_ARGUMENT, "reducer is NULL");
    if (!tagc_reducer_is_by_caller(r))
        return tagc_fail(TAGC_ERR_STATE, "%s: this reducer was not made by tagc_slots_create", what);
    if (tagc_direct_slots_of(r)->stage != wanted)
        return tagc_fail(TAGC_ERR_STATE, "%s is not what comes next in this step", what);
    return TAGC_OK;
}

static tagc_status check_slots(const tagc_reducer *r, const void *slots, const char *what) {
    if (!slots) return tagc_fail(TAGC_ERR_ARGUMENT, "%s is NULL", what);
    if ((uintptr_t)slots % TAGC_ALIGNMENT)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s is at %p, must be at a multiple of %d bytes", what, slots,
                         TAGC_ALIGNMENT);
    return r->arrays ? tagc_device_check_place(tagc_direct_slots_kernels(r)->device, slots, what) : TAGC_OK;
}

static void *stream_of(const tagc_reducer *r) {
    return r->arrays ? tagc_direct_slots_kernels(r)->stream : NULL;
}

static tagc_status run(const tagc_reducer *r, int batch) {
    tagc_direct_slots *s = tagc_direct_slots_of(r);
    if (tagc_direct_slots_rows(r, batch) == 0) return TAGC_OK;
    TAGC_TRY(tagc_direct_slots_check(r, s->maker->point(s->batches[batch], s->rows, s->results)));
    return tagc_direct_slots_check(r, s->maker->run(s->batches[batch]));
}

static tagc_status seal(const tagc_reducer *r, int is_sums) {
    tagc_direct_slots *s = tagc_direct_slots_of(r);
    tagc_slots_form form = tagc_direct_slots_form(r, is_sums, is_sums ? 1 : r->world_size);
    return tagc_direct_slots_check(r, s->maker->slots->seal(&form, (uint8_t *)(is_sums ? s->sums : s->send),
                                                            s->results, s->verdict, s->partial_sums,
                                                            stream_of(r)));
}

static tagc_status judge(const tagc_reducer *r, const tagc_slots_form *form, size_t n,
                         const uint64_t *lengths) {
    tagc_direct_slots *s = tagc_direct_slots_of(r);
    return tagc_direct_slots_check(
        r, s->maker->slots->judge(form, s->results, (uint32_t)n, lengths, s->verdict, s->stop, stream_of(r)));
}

/* Validates the received slots, then decodes them. */
static tagc_status take(tagc_reducer *r, int is_sums) {
    tagc_direct_slots *s = tagc_direct_slots_of(r);
    tagc_slots_form form = tagc_direct_slots_form(r, is_sums, r->world_size);
    int batch = is_sums ? TAGC_SLOTS_DECODE_SUMS : TAGC_SLOTS_ADD;
    size_t n_decoded = is_sums ? (size_t)r->world_size - 1 : 1;
    TAGC_TRY(tagc_direct_slots_check(r, s->maker->slots->open(&form, (const uint8_t *)s->received, s->lengths,
                                                              s->verdict, s->partial_sums, stream_of(r))));
    TAGC_TRY(run(r, is_sums ? TAGC_SLOTS_CHECK_SUMS : TAGC_SLOTS_CHECK));
    TAGC_TRY(judge(r, &form, (size_t)r->world_size, s->lengths));
    TAGC_TRY(run(r, batch));
    return judge(r, &form, n_decoded, NULL);
}

/* The frame of every call: runs `what` unless this rank has failed, and notes its failure. */
static tagc_status work(tagc_reducer *r, tagc_status (*what)(tagc_reducer *r), tagc_phase phase,
                        tagc_slots_stage next) {
    double start_s = tagc_clock_s();
    tagc_direct_slots_of(r)->stage = next;
    tagc_status status = r->now.failure == TAGC_OK ? tagc_direct_slots_enter(r) : TAGC_OK;
    if (status == TAGC_OK && r->now.failure == TAGC_OK) {
        status = tagc_direct_slots_make_batches(r);
        if (status == TAGC_OK) status = what(r);
        tagc_direct_slots_leave(r);
    }
    tagc_note_failure(r, status);
    if (!r->arrays) tagc_phase_end(r, phase, start_s);
    return status;
}

static tagc_status encode(tagc_reducer *r) {
    TAGC_TRY(run(r, TAGC_SLOTS_ENCODE));
    return seal(r, 0);
}

tagc_status tagc_slots_encode(tagc_reducer *r, const float *gradient, float *output, void *send,
                              tagc_slots_verdict *verdict) {
    TAGC_TRY(check_call(r, "encode", TAGC_SLOTS_IDLE));
    r->now.number++; /* also if it fails: peers count the step, too */
    TAGC_TRY(tagc_reducer_check_arrays(r, gradient, output));
    TAGC_TRY(check_slots(r, send, "send"));
    if (!verdict) return tagc_fail(TAGC_ERR_ARGUMENT, "verdict is NULL");
    if (r->arrays)
        TAGC_TRY(tagc_device_check_place(tagc_direct_slots_kernels(r)->device, verdict, "verdict"));
    tagc_direct_slots *s = tagc_direct_slots_of(r);
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
    return work(r, encode, TAGC_PHASE_SELECT, TAGC_SLOTS_ENCODED);
}

static tagc_status add(tagc_reducer *r) {
    TAGC_TRY(take(r, 0));
    if (!tagc_direct_slots_has_sums(r)) return TAGC_OK;
    TAGC_TRY(run(r, TAGC_SLOTS_ENCODE_SUMS));
    return seal(r, 1);
}

tagc_status tagc_slots_add(tagc_reducer *r, const void *received, void *sums) {
    TAGC_TRY(check_call(r, "add", TAGC_SLOTS_ENCODED));
    TAGC_TRY(check_slots(r, received, "received"));
    if (tagc_direct_slots_has_sums(r)) TAGC_TRY(check_slots(r, sums, "sums"));
    tagc_direct_slots_of(r)->received = received;
    tagc_direct_slots_of(r)->sums = sums;
    return work(r, add, TAGC_PHASE_DECODE,
                tagc_direct_slots_has_sums(r) ? TAGC_SLOTS_ADDED : TAGC_SLOTS_DECODED);
}

static tagc_status decode(tagc_reducer *r) {
    return take(r, 1);
}

tagc_status tagc_slots_decode(tagc_reducer *r, const void *received) {
    TAGC_TRY(check_call(r, "decode", TAGC_SLOTS_ADDED));
    TAGC_TRY(check_slots(r, received, "received"));
    tagc_direct_slots_of(r)->received = received;
    return work(r, decode, TAGC_PHASE_DECODE, TAGC_SLOTS_DECODED);
}

static tagc_status settle(tagc_reducer *r) {
    tagc_direct_slots *s = tagc_direct_slots_of(r);
    size_t n_output = (size_t)r->exchange->output_elems(&r->options, r->world_size);
    return tagc_direct_slots_check(r, s->maker->slots->settle(s->verdict, r->now.residual, s->residual,
                                                              (size_t)r->n_residual, r->now.output, n_output,
                                                              stream_of(r)));
}

/* If this rank failed, its kernels may not have run, so it keeps the residual from before the step. */
tagc_status tagc_slots_settle(tagc_reducer *r) {
    if (r && tagc_reducer_is_by_caller(r) &&
        (tagc_direct_slots_of(r)->stage == TAGC_SLOTS_ENCODED ||
         tagc_direct_slots_of(r)->stage == TAGC_SLOTS_ADDED)) {
        tagc_note_failure(r, tagc_fail(TAGC_ERR_STATE, "the step was given up before its end"));
        tagc_direct_slots_of(r)->stage = TAGC_SLOTS_DECODED;
    }
    TAGC_TRY(check_call(r, "settle", TAGC_SLOTS_DECODED));
    tagc_direct_slots *s = tagc_direct_slots_of(r);
    tagc_status status = work(r, settle, TAGC_PHASE_DECODE, TAGC_SLOTS_SETTLED);
    if (s->residual) {
        float *other = r->now.failure == TAGC_OK ? r->now.residual : s->residual;
        r->residual = other == s->residual ? r->now.residual : s->residual;
        tagc_comm_spare_give(r->comm, r->spares, other);
    }
    s->residual = r->now.residual = NULL;
    r->now.gradient = r->now.output = NULL;
    return status;
}

/* ---- the outcome ---- */

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
    TAGC_TRY(check_call(r, "end", TAGC_SLOTS_SETTLED));
    if (!agreed) return tagc_fail(TAGC_ERR_ARGUMENT, "agreed is NULL");
    TAGC_TRY(tagc_reducer_check_stats(stats));
    tagc_direct_slots_of(r)->stage = TAGC_SLOTS_IDLE;
    r->now.begun = 0;
    if (agreed->failure) return fail_of(r, agreed->failure);
    /* A rank whose own failure is not in the verdict has a copy of another step's. */
    if (r->now.failure != TAGC_OK) return tagc_fail(r->now.failure, "%s", r->now.failure_text);
    count(r, agreed);
    tagc_reducer_write_stats(r, stats);
    return TAGC_OK;
}
