/* How ranks agree that a step succeeded.
 *
 * The agreement is a message of its own, after everything that can fail. Only the owner knows whether a body is sound and
 * whether sums are finite, and only after it has added, so no earlier message can carry it. Every rank must know before its
 * step ends and its residual changes, so no later message can either. */
#include "exchange/reducer.h"

#include <stdio.h>
#include <string.h>

void tagc_agreement_place(tagc_reducer *r, tagc_arena *arena) {
    r->agree_send = tagc_arena_take(arena, 1, TAGC_WIRE_HEADER_BYTES);
    r->agree_recv = tagc_arena_take(arena, (size_t)r->world_size, TAGC_WIRE_HEADER_BYTES);
}

void tagc_note_failure(tagc_reducer *r, tagc_status status) {
    if (status == TAGC_OK || r->now.failure != TAGC_OK) return;
    r->now.failure = status;
    snprintf(r->now.failure_text, sizeof r->now.failure_text, "%s", tagc_last_error());
}

void tagc_agree_begin(tagc_reducer *r, int round, uint32_t n_items) {
    tagc_wire_header header = {
        .kind = TAGC_WIRE_AGREE,
        .flags = r->now.stats.nonfinite ? TAGC_WIRE_FLAG_NONFINITE : 0,
        .rank = (uint32_t)r->rank,
        .k = (uint32_t)r->k,
        .n_elems = r->shard,
        .unit = r->identity.unit,
        .n_items = n_items,
        .status = (uint32_t)r->now.failure,
        .longest = {r->now.longest[0], r->now.longest[1]},
        .word = r->now.word,
        .step = r->now.number,
    };
    tagc_wire_write(&header, r->agree_send);
    tagc_message_clear(r->agreement);
    r->agreement->round_bytes = TAGC_WIRE_HEADER_BYTES;
    memcpy(r->agree_recv + (size_t)r->rank * TAGC_WIRE_HEADER_BYTES, r->agree_send, TAGC_WIRE_HEADER_BYTES);
    for (int q = 0; q < r->world_size; q++) {
        if (q == r->rank) continue;
        tagc_message_to(r->agreement, q, TAGC_WIRE_HEADER_BYTES, 0);
        tagc_message_from(r->agreement, q, TAGC_WIRE_HEADER_BYTES, (uint64_t)q * TAGC_WIRE_HEADER_BYTES);
    }
    tagc_message_post(r, r->agreement, round, TAGC_LEG_CONTROL, r->agree_send, r->agree_recv);
}

/* Reads what rank q sent. Another k is a failure of the step, not of the message. TAGC_ERR_MISMATCH: q is in a step of another
 * unit. */
static tagc_status read_from(const tagc_reducer *r, int q, size_t max_items, tagc_wire_header *header) {
    tagc_wire_header expected = {
        .kind = TAGC_WIRE_AGREE, .rank = (uint32_t)q, .n_elems = r->shard, .step = r->now.number};
    tagc_status status =
        tagc_wire_read(r->agree_recv + (size_t)q * TAGC_WIRE_HEADER_BYTES, TAGC_WIRE_HEADER_BYTES, header);
    if (status == TAGC_OK) expected.k = header->k;
    if (status == TAGC_OK) status = tagc_wire_expect_of(r->comm, &r->identity, q, header, &expected);
    if (status == TAGC_OK && header->n_items > max_items)
        status = tagc_fail(TAGC_ERR_CORRUPT, "%u leftovers of %zu elements", header->n_items, max_items);
    return status;
}

tagc_status tagc_agree_end(tagc_reducer *r, const size_t *max_items, uint32_t *n_items) {
    TAGC_TRY(tagc_message_wait(r, r->agreement));
    int nonfinite = 0, failed_rank = -1, other_k = -1, is_other_unit = 0, first = -1, other_word = -1;
    uint64_t word = 0;
    char other_unit[TAGC_ERROR_TEXT_BYTES];
    tagc_status failure = TAGC_OK;
    tagc_wire_header header, different = {0};
    r->now.n_told = 0;
    for (int q = 0; q < r->world_size; q++) {
        tagc_status status = read_from(r, q, max_items ? max_items[q] : (size_t)r->world_size, &header);
        if (status == TAGC_ERR_MISMATCH) {
            if (!is_other_unit) snprintf(other_unit, sizeof other_unit, "%s", tagc_last_error());
            is_other_unit = 1;
            continue;
        }
        if (status != TAGC_OK) {
            /* Without an agreement, ranks cannot know what the others do next, and cannot inform them. */
            status =
                tagc_fail_in(status, "agreement from rank %d arrived damaged", tagc_comm_name(r->comm, q));
            return tagc_comm_give_up(r->comm, status, q);
        }
        nonfinite |= (header.flags & TAGC_WIRE_FLAG_NONFINITE) != 0;
        r->now.n_told += header.n_items;
        for (int i = 0; i < 2; i++)
            if (header.longest[i] > r->now.longest[i]) r->now.longest[i] = header.longest[i];
        if (n_items) n_items[q] = header.n_items;
        if (header.k != (uint32_t)r->k && other_k < 0) {
            other_k = q;
            different = header;
        }
        if (first < 0) {
            first = q;
            word = header.word;
        }
        if (header.word != word && other_word < 0) other_word = q;
        if (header.status == TAGC_OK || failed_rank >= 0) continue;
        failed_rank = q;
        failure = (tagc_status)header.status;
    }
    r->now.stats.nonfinite = nonfinite;
    /* Before all else: some rank differs from every rank, so that all return this. */
    if (is_other_unit) return tagc_fail(TAGC_ERR_MISMATCH, "%s", other_unit);
    /* Before failures: who has another word may have failed for that. */
    if (other_word >= 0)
        return tagc_fail(TAGC_ERR_MISMATCH,
                         "rank %d differs from rank %d in the word that all ranks must have alike",
                         tagc_comm_name(r->comm, other_word), tagc_comm_name(r->comm, first));
    if (failed_rank >= 0 && r->now.failure == failure) return tagc_fail(failure, "%s", r->now.failure_text);
    if (failed_rank >= 0)
        return tagc_fail(failure, "rank %d failed in this step: %s", tagc_comm_name(r->comm, failed_rank),
                         tagc_status_name(failure));
    if (other_k < 0) return TAGC_OK;
    tagc_wire_header expected = different;
    expected.k = (uint32_t)r->k;
    return tagc_fail_in(tagc_wire_expect(&different, &expected), "rank %d", tagc_comm_name(r->comm, other_k));
}
