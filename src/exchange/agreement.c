/* How ranks agree that a step went well. */
#include "exchange/reducer.h"

#include <stdio.h>
#include <string.h>

void tagc_note_failure(tagc_reducer *r, tagc_status status) {
    if (status == TAGC_OK || r->failure != TAGC_OK) return;
    r->failure = status;
    snprintf(r->failure_text, sizeof r->failure_text, "%s", tagc_last_error());
}

void tagc_agree_begin(tagc_reducer *r, size_t n_left) {
    tagc_wire_header header = {
        .kind = TAGC_WIRE_AGREE,
        .flags = r->stats.nonfinite ? TAGC_WIRE_FLAG_NONFINITE : 0,
        .rank = (uint32_t)r->rank,
        .k = (uint32_t)r->k,
        .n_elems = r->shard,
        .n_items = (uint32_t)n_left,
        .status = (uint32_t)r->failure,
        .step = r->step,
    };
    tagc_wire_write(&header, r->agree_send);
    tagc_message_clear(r->round);
    for (int q = 0; q < r->world_size; q++) {
        if (q == r->rank) continue;
        tagc_message_send(r->round, q, TAGC_WIRE_HEADER_BYTES, 0);
        tagc_message_receive(r->round, q, TAGC_WIRE_HEADER_BYTES, (uint64_t)q * TAGC_WIRE_HEADER_BYTES);
    }
    memcpy(r->agree_recv + (size_t)r->rank * TAGC_WIRE_HEADER_BYTES, r->agree_send, TAGC_WIRE_HEADER_BYTES);
    tagc_message_post(r, r->round, TAGC_LEG_CONTROL, r->agree_send, r->agree_recv);
}

tagc_status tagc_agree_end(tagc_reducer *r) {
    TAGC_TRY(tagc_message_wait(r, r->round));
    int nonfinite = 0, failed_rank = -1;
    int is_direct = r->options.exchange == TAGC_EXCHANGE_DIRECT;
    tagc_status failure = TAGC_OK, disagreement = TAGC_OK;
    for (int q = 0; q < r->world_size; q++) {
        tagc_wire_header header, expected = {.kind = TAGC_WIRE_AGREE,
                                             .rank = (uint32_t)q,
                                             .k = (uint32_t)r->k,
                                             .n_elems = r->shard,
                                             .step = r->step};
        tagc_status status =
            tagc_wire_read(r->agree_recv + q * TAGC_WIRE_HEADER_BYTES, TAGC_WIRE_HEADER_BYTES, &header);
        if (status == TAGC_OK)
            expected.k = header.k; /* reported with the index, where all ranks hear of it */
        if (status == TAGC_OK) status = tagc_wire_expect(&header, &expected);
        expected.k = (uint32_t)r->k; /* direct: here, since not all ranks send each other fragments */
        if (status == TAGC_OK && is_direct && disagreement == TAGC_OK)
            disagreement = tagc_wire_expect(&header, &expected);
        size_t max_left = r->n_union ? r->n_union[q] : 0;
        if (status == TAGC_OK && header.n_items > max_left)
            status = tagc_fail(TAGC_ERR_CORRUPT, "%u leftovers of %zu elements", header.n_items, max_left);
        if (status != TAGC_OK) {
            /* Without an agreement there is no telling what the others do next, and no way to tell them. */
            status = tagc_fail_in(TAGC_ERR_TRANSPORT, "agreement from rank %d arrived damaged", q);
            tagc_comm_abort(r->comm, tagc_last_error());
            return status;
        }
        nonfinite |= (header.flags & TAGC_WIRE_FLAG_NONFINITE) != 0;
        if (r->n_left) r->n_left[q] = header.n_items;
        if (header.status == TAGC_OK || failed_rank >= 0) continue;
        failed_rank = q;
        failure = (tagc_status)header.status;
    }
    r->stats.nonfinite = nonfinite;
    if (failed_rank < 0) return disagreement;
    if (r->failure == failure) return tagc_fail(failure, "%s", r->failure_text);
    return tagc_fail(failure, "rank %d failed in this step: %s", failed_rank, tagc_status_name(failure));
}
