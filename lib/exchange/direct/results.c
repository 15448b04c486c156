/* All-reduce after a direct exchange: owners encode their sums, and all ranks decode the same bodies, including the owner.
 *
 * The sums are those of all ranks and of the owner's residual, not divided by W yet. So an owner encodes them exactly as every
 * rank encodes a fragment, and the residual of its own row takes what is not sent.
 *
 * The sums cross the link between hosts once, among ranks of one local index. If the output is the whole unit, the ranks of a
 * host then pass the received bodies to each other. */
#include "core/clock.h"
#include "exchange/direct/direct.h"

/* The row of received bodies, and of the output, for the sums of the rank `local` of `host`. */
static size_t row_of(const tagc_reducer *r, int host, int local) {
    return (size_t)(r->options.output == TAGC_OUTPUT_UNIT ? tagc_rank_of(tagc_direct_of(r), host, local)
                                                          : host);
}

size_t tagc_direct_own_row(const tagc_reducer *r) {
    const tagc_direct *d = tagc_direct_of(r);
    return row_of(r, d->host, d->local);
}

/* Into the own row of the received ones. */
static void encode_sums(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    size_t own = tagc_direct_own_row(r);
    char *row = d->recv + own * d->stride;
    tagc_encoded encoded = {0};
    double start_s = tagc_clock_s();
    if (r->now.failure == TAGC_OK && !r->now.stats.nonfinite) {
        r->runner->encode_sums(r, (uint8_t *)row + TAGC_WIRE_HEADER_BYTES, &encoded);
        r->now.stats.nonfinite |= encoded.nonfinite;
        if (!encoded.nonfinite) r->now.stats.n_sent += encoded.n_sent;
    }
    tagc_fragment_finish(r, &d->sums, row, &encoded, d->eager[1], &d->received[own]);
    tagc_direct_note_length(r, 1, d->received[own].n_bytes);
    tagc_phase_end(r, TAGC_PHASE_ENCODE, start_s);
}

void tagc_results_decode(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    int is_whole = r->options.output == TAGC_OUTPUT_UNIT;
    double start_s = tagc_clock_s();
    for (size_t row = 0; row < d->n_rows; row++) {
        int from = is_whole ? (int)row : tagc_rank_of(d, (int)row, d->local);
        r->now.stats.n_returned += d->received[row].n_items;
        d->bodies[row] = tagc_fragment_body(r, row, from, &d->sums);
    }
    r->runner->decode_sums(r);
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
}

/* ---- within a host ---- */

/* To the ranks of this host, sends rows of local index `local` of host `of`, and receives theirs: headers with fronts, or
 * bodies. */
static tagc_status hand_row(tagc_reducer *r, int of, int is_body) {
    tagc_direct *d = tagc_direct_of(r);
    size_t own = row_of(r, of, d->local), front = TAGC_WIRE_HEADER_BYTES;
    tagc_message *message = &d->hand_out[of + (is_body ? d->n_hosts : 0)];
    tagc_rests rests = {.to = d->recv};
    int n = 0;
    for (int l = 0; l < d->per_host; l++)
        if (l != d->local) d->rows[n++] = row_of(r, of, l);
    if (is_body && d->received[own].n_bytes > d->capacity) {
        /* The body was discarded, and the other ranks of this host know. */
        int from = tagc_rank_of(d, of, d->local);
        tagc_status status = tagc_fail(TAGC_ERR_MISMATCH, "the body from rank %d is too long to be handed on",
                                       tagc_comm_name(r->comm, from));
        return tagc_comm_give_up(r->comm, status, from);
    }
    if (is_body) TAGC_TRY(tagc_rests_begin(r, d->rows, n, 0, &rests));
    tagc_message_clear(message);
    for (int l = 0; l < d->per_host; l++) {
        int peer = tagc_rank_of(d, d->host, l);
        size_t row = row_of(r, of, l);
        if (l == d->local) continue;
        tagc_message_to(message, peer, is_body ? d->received[own].n_bytes : front,
                        own * d->stride + (is_body ? front : 0));
        if (is_body)
            tagc_rests_add(r, &rests, message, peer, row, 0);
        else
            tagc_message_from(message, peer, front, row * d->stride);
    }
    tagc_message_post(r, message, TAGC_ROUND_RESULT_RESTS, is_body ? TAGC_LEG_RESULT : TAGC_LEG_CONTROL,
                      d->recv, rests.to);
    return TAGC_OK;
}

int tagc_results_are_handed_on(const tagc_reducer *r) {
    return r->options.output == TAGC_OUTPUT_UNIT && tagc_direct_of(r)->per_host > 1;
}

tagc_status tagc_results_hand_headers(tagc_reducer *r, tagc_message **out) {
    tagc_direct *d = tagc_direct_of(r);
    for (int host = 0; host < d->n_hosts; host++) TAGC_TRY(hand_row(r, host, 0));
    *out = d->hand_out;
    return TAGC_OK;
}

tagc_status tagc_results_hand_bodies(tagc_reducer *r, tagc_message **out) {
    tagc_direct *d = tagc_direct_of(r);
    for (size_t row = 0; row < d->n_rows; row++)
        if ((int)row % d->per_host != d->local) TAGC_TRY(tagc_fragment_announced(r, row, (int)row, &d->sums));
    for (int host = 0; host < d->n_hosts; host++) TAGC_TRY(hand_row(r, host, 1));
    *out = d->hand_out + d->n_hosts;
    return TAGC_OK;
}

/* ---- across hosts ---- */

/* Sends the own header and front to the ranks with the own local index on all hosts. */
tagc_message *tagc_results_send(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    tagc_message *message = &d->result_out[0];
    encode_sums(r);
    size_t n_bytes = TAGC_WIRE_HEADER_BYTES + d->eager[1];
    uint64_t n_headers = (uint64_t)(d->n_hosts - 1) * TAGC_WIRE_HEADER_BYTES;
    tagc_message_clear(message);
    for (int host = 0; host < d->n_hosts; host++) {
        int peer = tagc_rank_of(d, host, d->local);
        if (host == d->host) continue;
        tagc_message_to(message, peer, n_bytes, tagc_direct_own_row(r) * d->stride);
        tagc_message_from(message, peer, n_bytes, row_of(r, host, d->local) * d->stride);
    }
    tagc_message_post_parts(r, message, TAGC_ROUND_RESULTS, TAGC_LEG_RESULT, d->recv, d->recv,
                            TAGC_LEG_CONTROL, n_headers, n_headers);
    return message;
}

/* Receives the rest of every body whose front is here. */
tagc_status tagc_results_send_rest(tagc_reducer *r, tagc_message **out) {
    tagc_direct *d = tagc_direct_of(r);
    tagc_message *message = *out = &d->result_out[1];
    size_t own = tagc_direct_own_row(r), eager = d->eager[1];
    uint64_t rest = tagc_fragment_rest(&d->received[own], eager);
    int n = 0;
    tagc_rests rests;
    for (int host = 0; host < d->n_hosts; host++) {
        if (host == d->host) continue;
        size_t row = row_of(r, host, d->local);
        d->rows[n++] = row;
        TAGC_TRY(tagc_fragment_announced(r, row, tagc_rank_of(d, host, d->local), &d->sums));
    }
    TAGC_TRY(tagc_rests_begin(r, d->rows, n, eager, &rests));
    tagc_message_clear(message);
    for (int host = 0; host < d->n_hosts; host++) {
        int peer = tagc_rank_of(d, host, d->local);
        if (host == d->host) continue;
        tagc_message_to(message, peer, rest, own * d->stride + TAGC_WIRE_HEADER_BYTES + eager);
        tagc_rests_add(r, &rests, message, peer, row_of(r, host, d->local), eager);
    }
    tagc_message_post(r, message, TAGC_ROUND_RESULT_RESTS, TAGC_LEG_RESULT, d->recv, rests.to);
    return TAGC_OK;
}
