/* What a reducer has under way, what it cost, and how ranks agree that a step went well. */
#include "core/clock.h"
#include "exchange/reducer.h"

#include <stdio.h>
#include <string.h>

const char *tagc_phase_name(int phase) {
    static const char *const names[TAGC_N_PHASES] = {"select", "index", "encode", "decode", "wait"};
    return phase >= 0 && phase < TAGC_N_PHASES ? names[phase] : "?";
}

double tagc_phase_end(tagc_reducer *r, tagc_phase phase, double start_s) {
    double now_s = tagc_clock_s();
    r->stats.time_s[phase] += now_s - start_s;
    tagc_comm_trace(r->comm, "codec", tagc_phase_name((int)phase), start_s, now_s, 0, r->options.tag);
    return now_s;
}

void tagc_messages_place(tagc_reducer *r, tagc_arena *arena, int n_messages) {
    size_t n_ranks = (size_t)r->world_size;
    r->n_messages = n_messages;
    r->messages = tagc_arena_take(arena, (size_t)n_messages, sizeof *r->messages);
    uint64_t *arrays = tagc_arena_take(arena, (size_t)n_messages * 4 * n_ranks, sizeof *arrays);
    if (!r->messages) return;
    for (int m = 0; m < n_messages; m++, arrays += 4 * n_ranks)
        r->messages[m] = (tagc_message){.send_bytes = arrays,
                                        .send_offset = arrays + n_ranks,
                                        .recv_bytes = arrays + 2 * n_ranks,
                                        .recv_offset = arrays + 3 * n_ranks};
}

void tagc_message_clear(tagc_reducer *r, tagc_message *message) {
    memset(message->send_bytes, 0, 4 * (size_t)r->world_size * sizeof *message->send_bytes);
}

void tagc_message_pair(tagc_reducer *r, tagc_message *message, int to, uint64_t send_bytes, int from,
                       uint64_t recv_bytes) {
    tagc_message_clear(r, message);
    message->send_bytes[to] = send_bytes;
    message->recv_bytes[from] = recv_bytes;
}

void tagc_message_post(tagc_reducer *r, tagc_message *message, tagc_leg leg, const void *send, void *recv) {
    message->ticket = (tagc_ticket){
        .transfer = {.send = send,
                     .send_bytes = message->send_bytes,
                     .send_offset = message->send_offset,
                     .recv = recv,
                     .recv_bytes = message->recv_bytes,
                     .recv_offset = message->recv_offset},
        .leg = leg,
        .tag = r->options.tag,
    };
    message->in_flight = 1;
    tagc_comm_post(r->comm, TAGC_LANE_REDUCE, &message->ticket);
}

tagc_status tagc_message_wait(tagc_reducer *r, tagc_message *message) {
    if (!message->in_flight) return TAGC_OK;
    double start_s = tagc_clock_s();
    tagc_status status = tagc_comm_wait(r->comm, &message->ticket);
    message->in_flight = 0;
    tagc_phase_end(r, TAGC_PHASE_WAIT, start_s);
    r->stats.n_bytes_sent[message->ticket.leg] += message->ticket.n_bytes_sent;
    r->stats.n_bytes_received[message->ticket.leg] += message->ticket.n_bytes_received;
    return status;
}

int tagc_message_done(const tagc_reducer *r, const tagc_message *message) {
    return !message->in_flight || tagc_comm_is_done(r->comm, &message->ticket);
}

void tagc_messages_drain(tagc_reducer *r) {
    for (int m = 0; m < r->n_messages; m++) (void)tagc_message_wait(r, &r->messages[m]);
}

/* ---- agreement ---- */

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
    tagc_message_clear(r, r->round);
    for (int q = 0; q < r->world_size; q++) {
        r->round->send_bytes[q] = r->round->recv_bytes[q] = TAGC_WIRE_HEADER_BYTES;
        r->round->recv_offset[q] = (uint64_t)q * TAGC_WIRE_HEADER_BYTES;
    }
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
