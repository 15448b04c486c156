/* All-reduce after a direct exchange: owners encode their sums, and all ranks decode the same bodies, including the owner.
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

static size_t own_row(const tagc_reducer *r) {
    const tagc_direct *d = tagc_direct_of(r);
    return row_of(r, d->host, d->local);
}

/* Encodes the sums into the own row of the received ones. The rounding error stays in the owner's residual, as part of its own
 * fragment. */
static void encode_sums(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    size_t own = own_row(r);
    char *row = d->recv + own * d->stride;
    float *error = r->residual ? r->now.residual + (size_t)d->host * r->shard : NULL;
    tagc_encoded encoded = {0};
    double start_s = tagc_clock_s();
    if (r->now.failure == TAGC_OK && !r->now.stats.nonfinite) {
        uint8_t *body = (uint8_t *)row + TAGC_WIRE_HEADER_BYTES;
        if (r->beside)
            r->beside->encode_sums(r, body, &encoded);
        else
            d->sums_code->encode_sums(&d->sums, tagc_direct_sums(r), error, 1.0f / r->scale, body, d->scratch,
                                      r->pool, &encoded);
        r->now.stats.nonfinite |= encoded.nonfinite;
    }
    tagc_fragment_finish(r, row, &encoded, d->eager[1], &d->received[own]);
    tagc_direct_note_length(r, 1, d->received[own].n_bytes);
    tagc_phase_end(r, TAGC_PHASE_ENCODE, start_s);
}

static tagc_status decode_results(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    int is_whole = r->options.output == TAGC_OUTPUT_UNIT;
    size_t own = own_row(r);
    double start_s = tagc_clock_s();
    for (size_t row = 0; row < d->n_rows; row++) {
        int from = is_whole ? (int)row : tagc_rank_of(d, (int)row, d->local);
        if (is_whole || d->per_host == 1)
            r->now.stats.n_union += d->sums.sparse ? d->received[row].n_items : r->shard;
        if (row == own) {
            if (r->beside) d->bodies[row] = (tagc_body){0};
            continue;
        }
        tagc_body body = tagc_fragment_body(r, row);
        int n = tagc_fragment_is_sound(r, row, from, &d->sums);
        if (r->beside) {
            d->bodies[row] = n ? body : (tagc_body){0};
            continue;
        }
        d->sums_code->decode(&d->sums, &body, n, 0, 1, r->now.output + row * r->shard, d->scratch, r->pool);
    }
    if (r->beside) r->beside->decode_sums(r, d->bodies);
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    return tagc_direct_agree(r);
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
        /* The body was not kept, and the other ranks of this host know. */
        tagc_comm_abort(r->comm, "a body of another sparsity cannot be handed on");
        return tagc_fail(TAGC_ERR_TRANSPORT, "the body from rank %d is too long to be handed on",
                         tagc_rank_of(d, of, d->local));
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
    tagc_message_post(r, message, TAGC_ROUND_RESULTS, is_body ? TAGC_LEG_RESULT : TAGC_LEG_CONTROL, d->recv,
                      rests.to);
    return TAGC_OK;
}

static tagc_status hand_bodies(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    for (size_t row = 0; row < d->n_rows; row++)
        if ((int)row % d->per_host != d->local) TAGC_TRY(tagc_fragment_announced(r, row, (int)row, &d->sums));
    for (int host = 0; host < d->n_hosts; host++) TAGC_TRY(hand_row(r, host, 1));
    tagc_then(r, decode_results, d->hand_out + d->n_hosts, d->n_hosts, TAGC_ROUND_DIRECT_AGREEMENT,
              TAGC_ROUND_DIRECT_AGREEMENT);
    return TAGC_OK;
}

static tagc_status hand_headers(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    if (r->options.output != TAGC_OUTPUT_UNIT || d->per_host == 1) return decode_results(r);
    for (int host = 0; host < d->n_hosts; host++) TAGC_TRY(hand_row(r, host, 0));
    tagc_then(r, hand_bodies, d->hand_out, d->n_hosts, TAGC_ROUND_RESULTS, TAGC_ROUND_RESULTS);
    return TAGC_OK;
}

/* ---- across hosts ---- */

/* Receives the rest of every body whose front is here. */
static tagc_status post_bodies(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    tagc_message *message = &d->result_out[1];
    size_t own = own_row(r), eager = d->eager[1];
    uint64_t rest = tagc_fragment_rest(&d->received[own], eager);
    int n = 0, hands_on = r->options.output == TAGC_OUTPUT_UNIT && d->per_host > 1;
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
    tagc_message_post(r, message, TAGC_ROUND_RESULTS, TAGC_LEG_RESULT, d->recv, rests.to);
    if (hands_on)
        tagc_then(r, hand_headers, message, 1, TAGC_ROUND_RESULTS, TAGC_ROUND_RESULTS);
    else
        tagc_then(r, hand_headers, message, 1, TAGC_ROUND_DIRECT_AGREEMENT, TAGC_ROUND_DIRECT_AGREEMENT);
    return TAGC_OK;
}

/* Sends the own header and front to the ranks with the own local index on all hosts. */
tagc_status tagc_direct_results(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    tagc_message *message = &d->result_out[0];
    encode_sums(r);
    size_t n_bytes = TAGC_WIRE_HEADER_BYTES + d->eager[1];
    uint64_t n_headers = (uint64_t)(d->n_hosts - 1) * TAGC_WIRE_HEADER_BYTES;
    tagc_message_clear(message);
    for (int host = 0; host < d->n_hosts; host++) {
        int peer = tagc_rank_of(d, host, d->local);
        if (host == d->host) continue;
        tagc_message_to(message, peer, n_bytes, own_row(r) * d->stride);
        tagc_message_from(message, peer, n_bytes, row_of(r, host, d->local) * d->stride);
    }
    tagc_message_post_parts(r, message, TAGC_ROUND_RESULTS, TAGC_LEG_RESULT, d->recv, d->recv,
                            TAGC_LEG_CONTROL, n_headers, n_headers);
    tagc_then(r, post_bodies, message, 1, TAGC_ROUND_RESULTS, TAGC_ROUND_RESULTS);
    return TAGC_OK;
}
