/* What a reducer has under way and what it cost. */
#include "core/clock.h"
#include "exchange/reducer.h"

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
