/* All-reduce after a direct exchange: owners encode their sums, and all ranks decode the same bodies, including the owner.
 *
 * The sums are those of all ranks and of the owner's residual, not divided by W yet. So an owner encodes them exactly as every
 * rank encodes a fragment, and the residual of its own row takes what is not sent. */
#include "core/clock.h"
#include "exchange/direct/direct.h"

/* Into the own row of the received ones. */
static void encode_sums(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    size_t own = (size_t)r->rank;
    char *row = d->recv + own * d->stride;
    tagc_encoded encoded = {0};
    double start_s = tagc_clock_s();
    if (r->now.failure == TAGC_OK && !r->now.stats.nonfinite) {
        r->runner->encode_sums(r, (uint8_t *)row + TAGC_WIRE_HEADER_BYTES, &encoded);
        r->now.stats.nonfinite |= encoded.nonfinite;
        if (!encoded.nonfinite) r->now.stats.n_sent += encoded.n_sent;
    }
    tagc_fragment_finish(r, &d->sums, row, &encoded, d->travel.eager[1], &d->received[own]);
    tagc_direct_note_length(r, 1, d->received[own].n_bytes);
    tagc_phase_end(r, TAGC_PHASE_ENCODE, start_s);
}

void tagc_results_decode(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    double start_s = tagc_clock_s();
    for (int from = 0; from < r->world_size; from++) {
        r->now.stats.n_returned += d->received[from].n_items;
        d->bodies[from] = tagc_fragment_body(r, from, &d->sums);
    }
    r->runner->decode_sums(r);
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
}

/* Sends the own header and front to all others. */
tagc_message *tagc_results_send(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    tagc_message *message = &d->result_out[0];
    encode_sums(r);
    size_t n_bytes = TAGC_WIRE_HEADER_BYTES + d->travel.eager[1];
    uint64_t n_headers = (uint64_t)(r->world_size - 1) * TAGC_WIRE_HEADER_BYTES;
    tagc_message_clear(message);
    for (int peer = 0; peer < r->world_size; peer++) {
        if (peer == r->rank) continue;
        tagc_message_to(message, peer, n_bytes, (size_t)r->rank * d->stride);
        tagc_message_from(message, peer, n_bytes, (size_t)peer * d->stride);
    }
    tagc_message_post_parts(r, message, TAGC_ROUND_RESULTS, TAGC_LEG_RESULT, d->recv, d->recv,
                            TAGC_LEG_CONTROL, n_headers, n_headers);
    return message;
}

/* Receives the rest of every body whose front is here. */
tagc_status tagc_results_send_rest(tagc_reducer *r, tagc_message **out) {
    tagc_direct *d = tagc_direct_of(r);
    tagc_message *message = *out = &d->result_out[1];
    size_t own = (size_t)r->rank, eager = d->travel.eager[1];
    uint64_t rest = tagc_fragment_rest(&d->received[own], eager);
    int n = 0;
    tagc_rests rests;
    for (int peer = 0; peer < r->world_size; peer++) {
        if (peer == r->rank) continue;
        d->step.senders[n++] = peer;
        TAGC_TRY(tagc_fragment_announced(r, peer, &d->sums));
    }
    TAGC_TRY(tagc_rests_begin(r, d->step.senders, n, eager, &rests));
    tagc_message_clear(message);
    for (int peer = 0; peer < r->world_size; peer++) {
        if (peer == r->rank) continue;
        tagc_message_to(message, peer, rest, own * d->stride + TAGC_WIRE_HEADER_BYTES + eager);
        tagc_rests_add(r, &rests, message, peer, eager);
    }
    tagc_message_post(r, message, TAGC_ROUND_RESULT_RESTS, TAGC_LEG_RESULT, d->recv, rests.to);
    return TAGC_OK;
}
