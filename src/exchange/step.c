/* What a reducer has under way and what it cost. */
#include "core/clock.h"
#include "exchange/reducer.h"

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

void tagc_messages_place(tagc_reducer *r, tagc_arena *arena, int n_rounds, int n_pairs) {
    size_t n_others = (size_t)r->world_size - 1;
    size_t n_parts = 2 * ((size_t)n_rounds * n_others + (size_t)n_pairs);
    r->n_messages = n_rounds + n_pairs;
    r->messages = tagc_arena_take(arena, (size_t)r->n_messages, sizeof *r->messages);
    tagc_part *parts = tagc_arena_take(arena, n_parts, sizeof *parts);
    if (!r->messages) return;
    for (int m = 0; m < r->n_messages; m++) {
        size_t n_most = m < n_rounds ? n_others : 1;
        r->messages[m] = (tagc_message){.sends = parts, .receives = parts + n_most};
        parts += 2 * n_most;
    }
}

void tagc_message_clear(tagc_message *message) {
    message->n_sends = message->n_receives = 0;
}

void tagc_message_send(tagc_message *message, int peer, uint64_t n_bytes, uint64_t offset) {
    message->sends[message->n_sends++] = (tagc_part){peer, n_bytes, offset};
}

void tagc_message_receive(tagc_message *message, int peer, uint64_t n_bytes, uint64_t offset) {
    message->receives[message->n_receives++] = (tagc_part){peer, n_bytes, offset};
}

void tagc_message_pair(tagc_message *message, int to, uint64_t send_bytes, int from, uint64_t recv_bytes) {
    tagc_message_clear(message);
    tagc_message_send(message, to, send_bytes, 0);
    tagc_message_receive(message, from, recv_bytes, 0);
}

void tagc_message_post(tagc_reducer *r, tagc_message *message, tagc_leg leg, const void *send, void *recv) {
    message->ticket = (tagc_ticket){
        .transfer = {.n_sends = message->n_sends,
                     .n_receives = message->n_receives,
                     .sends = message->sends,
                     .receives = message->receives,
                     .send = send,
                     .recv = recv},
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
