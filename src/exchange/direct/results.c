/* All-reduce after a direct exchange: owners encode their sums, and everybody decodes the same bodies, the owner too.
 *
 * They cross the link between hosts once, among ranks of one local index. Where the whole unit is wanted, the ranks of
 * a host then hand each other the bodies as they came. */
#include "core/clock.h"
#include "exchange/direct/direct.h"
#include "exchange/reducer.h"

#include <string.h>

/* The row of received bodies, and of the output, for the sums of the rank `local` of `host`. */
static size_t row_of(const tagc_reducer *r, int host, int local) {
    return (size_t)(r->options.all_reduce == 1 ? tagc_rank_of(&r->direct, host, local) : host);
}

static char *body_of(const tagc_reducer *r, size_t row) {
    return r->direct.body_recv + row * r->direct.row_bytes;
}

/* Into the own row of the received ones. What rounding loses stays with the owner, as a part of its own fragment. */
static void encode_sums(tagc_reducer *r) {
    tagc_direct *d = &r->direct;
    size_t own = row_of(r, d->host, d->local);
    float *error = r->residual ? r->spare->values + (size_t)d->host * r->shard : NULL,
          *sums = tagc_direct_sums(r);
    tagc_encoded encoded = {0};
    double start_s = tagc_clock_s();
    if (r->failure == TAGC_OK && !r->stats.nonfinite) {
        d->sums_code->encode_sums(&d->sums, sums, error, 1.0f / r->scale, (uint8_t *)body_of(r, own),
                                  r->scratch, r->pool, &encoded);
        r->stats.nonfinite |= encoded.nonfinite;
    }
    if (r->stats.nonfinite) encoded = (tagc_encoded){0};
    d->received[own] = (tagc_fragment){.n_bytes = encoded.n_bytes,
                                       .index_bytes = encoded.n_index_bytes,
                                       .n_items = encoded.n_kept,
                                       .sum = tagc_wire_sum(body_of(r, own), encoded.n_bytes)};
    tagc_wire_header header = tagc_direct_header(r, &d->received[own]);
    tagc_wire_write(&header, d->header_recv + own * TAGC_WIRE_HEADER_BYTES);
    tagc_phase_end(r, TAGC_PHASE_ENCODE, start_s);
}

/* Own header and body to the ranks of the own local index on all hosts. */
static tagc_status cross_hosts(tagc_reducer *r) {
    tagc_direct *d = &r->direct;
    size_t own = row_of(r, d->host, d->local);
    tagc_message_clear(r->round);
    for (int host = 0; host < d->n_hosts; host++) {
        int peer = tagc_rank_of(d, host, d->local);
        if (host == d->host) continue;
        tagc_message_send(r->round, peer, TAGC_WIRE_HEADER_BYTES, 0);
        tagc_message_receive(r->round, peer, TAGC_WIRE_HEADER_BYTES,
                             row_of(r, host, d->local) * TAGC_WIRE_HEADER_BYTES);
    }
    tagc_message_post(r, r->round, TAGC_LEG_CONTROL, d->header_recv + own * TAGC_WIRE_HEADER_BYTES,
                      d->header_recv);
    TAGC_TRY(tagc_message_wait(r, r->round));
    tagc_message_clear(r->round);
    for (int host = 0; host < d->n_hosts; host++) {
        int peer = tagc_rank_of(d, host, d->local);
        size_t row = row_of(r, host, d->local);
        if (host == d->host) continue;
        TAGC_TRY(tagc_direct_announced(r, row, peer, d->sums_code, &d->sums));
        tagc_message_send(r->round, peer, d->received[own].n_bytes, 0);
        tagc_message_receive(r->round, peer, d->received[row].n_bytes, row * d->row_bytes);
    }
    tagc_message_post(r, r->round, TAGC_LEG_RESULT, body_of(r, own), d->body_recv);
    return tagc_message_wait(r, r->round);
}

/* The headers of all hosts first, then host by host the bodies. */
static tagc_status hand_on(tagc_reducer *r) {
    tagc_direct *d = &r->direct;
    for (int host = 0; host < 2 * d->n_hosts; host++) {
        int is_body = host >= d->n_hosts, of = host % d->n_hosts;
        size_t own = row_of(r, of, d->local), stride = is_body ? d->row_bytes : TAGC_WIRE_HEADER_BYTES;
        char *rows = is_body ? d->body_recv : d->header_recv;
        tagc_message *message = &d->value_out[host % TAGC_DIRECT_DEPTH];
        TAGC_TRY(tagc_message_wait(r, message));
        tagc_message_clear(message);
        for (int l = 0; l < d->per_host; l++) {
            int peer = tagc_rank_of(d, d->host, l);
            size_t row = row_of(r, of, l);
            if (l == d->local) continue;
            tagc_message_send(message, peer, is_body ? d->received[own].n_bytes : TAGC_WIRE_HEADER_BYTES, 0);
            tagc_message_receive(message, peer, is_body ? d->received[row].n_bytes : TAGC_WIRE_HEADER_BYTES,
                                 row * stride);
        }
        tagc_message_post(r, message, is_body ? TAGC_LEG_RESULT : TAGC_LEG_CONTROL, rows + own * stride,
                          rows);
        if (host != d->n_hosts - 1) continue;
        for (int slot = 0; slot < TAGC_DIRECT_DEPTH; slot++)
            TAGC_TRY(tagc_message_wait(r, &d->value_out[slot]));
        for (size_t row = 0; row < d->n_rows; row++)
            if ((int)row % d->per_host != d->local)
                TAGC_TRY(tagc_direct_announced(r, row, (int)row, d->sums_code, &d->sums));
    }
    for (int slot = 0; slot < TAGC_DIRECT_DEPTH; slot++) TAGC_TRY(tagc_message_wait(r, &d->value_out[slot]));
    return TAGC_OK;
}

tagc_status tagc_direct_results(tagc_reducer *r) {
    tagc_direct *d = &r->direct;
    int is_whole = r->options.all_reduce == 1;
    encode_sums(r);
    TAGC_TRY(cross_hosts(r));
    if (is_whole && d->per_host > 1) TAGC_TRY(hand_on(r));
    double start_s = tagc_clock_s();
    size_t own = row_of(r, d->host, d->local);
    for (size_t row = 0; row < d->n_rows; row++) {
        int from = is_whole ? (int)row : tagc_rank_of(d, (int)row, d->local);
        if (d->sums.sparse && (is_whole || d->per_host == 1)) r->stats.n_union += d->received[row].n_items;
        if (row == own) continue;
        tagc_body body = tagc_direct_body(r, row);
        int n = tagc_direct_is_sound(r, row, from, d->sums_code, &d->sums);
        d->sums_code->decode(&d->sums, &body, n, 0, 1, r->output + row * r->shard, r->scratch, r->pool);
    }
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    return TAGC_OK;
}
