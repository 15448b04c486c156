/* Actions of a step, its messages, and how ranks agree that it succeeded. */
#include "exchange/step.h"
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
    r->now.stats.time_s[phase] += now_s - start_s;
    tagc_comm_trace(r->comm, "codec", tagc_phase_name((int)phase), start_s, now_s, 0, r->options.tag);
    return now_s;
}

static tagc_lane lane_of(int round) {
    static const tagc_lane lanes[TAGC_N_ROUNDS] = {TAGC_LANE_REDUCE, TAGC_LANE_REDUCE_2, TAGC_LANE_REDUCE_3,
                                                   TAGC_LANE_REDUCE_4, TAGC_LANE_REDUCE_5};
    return lanes[round];
}

static uint32_t lanes_of(int low, int high) {
    uint32_t lanes = 0;
    for (int round = low; round <= high && round < TAGC_N_ROUNDS; round++) lanes |= 1u << lane_of(round);
    return lanes;
}

void tagc_then(tagc_reducer *r, tagc_action_fn next, tagc_message *awaited, int n, int low, int high) {
    r->now.next = next;
    r->now.awaited = awaited;
    r->now.n_awaited = n;
    r->now.task.next_lanes = lanes_of(low, high);
    r->now.task.later_lanes = lanes_of(low, TAGC_N_ROUNDS - 1);
}

/* ---- messages ---- */

void tagc_messages_place(tagc_reducer *r, tagc_arena *arena, const tagc_room *rooms, int n_rooms) {
    int n_messages = 1, n_others = r->world_size - 1; /* one of them for the agreement */
    size_t n_parts = 2 * (size_t)n_others;
    for (int i = 0; i < n_rooms; i++) {
        n_messages += rooms[i].n_messages;
        n_parts += 2 * (size_t)rooms[i].n_messages * (size_t)rooms[i].n_peers;
    }
    r->n_messages = n_messages;
    r->messages = tagc_arena_take(arena, (size_t)n_messages, sizeof *r->messages);
    tagc_part *parts = tagc_arena_take(arena, n_parts, sizeof *parts);
    if (!r->messages) return;
    tagc_message *message = r->messages;
    for (int i = 0; i <= n_rooms; i++) {
        tagc_room room = i < n_rooms ? rooms[i] : (tagc_room){1, n_others};
        for (int m = 0; m < room.n_messages; m++, parts += 2 * room.n_peers)
            *message++ = (tagc_message){.sends = parts, .receives = parts + room.n_peers};
    }
    r->agreement = message - 1;
}

void tagc_message_clear(tagc_message *message) {
    message->n_sends = message->n_receives = 0;
    message->round_bytes = 0;
}

void tagc_message_to(tagc_message *message, int rank, uint64_t n_bytes, uint64_t offset) {
    if (n_bytes) message->sends[message->n_sends++] = (tagc_part){rank, n_bytes, offset};
}

void tagc_message_from(tagc_message *message, int rank, uint64_t n_bytes, uint64_t offset) {
    if (n_bytes) message->receives[message->n_receives++] = (tagc_part){rank, n_bytes, offset};
}

static void reverse(tagc_part *parts, uint32_t n) {
    for (uint32_t i = 0; i < n / 2; i++) {
        tagc_part part = parts[i];
        parts[i] = parts[n - 1 - i];
        parts[n - 1 - i] = part;
    }
}

/* Partners come in ring order, forwards or backwards, but a transfer needs them ascending. */
static void ascend(tagc_part *parts, uint32_t n) {
    uint32_t n_falls = 0, first = 0;
    for (uint32_t i = 1; i < n; i++) n_falls += parts[i].peer < parts[i - 1].peer;
    if (n_falls == 0) return;
    if (n_falls > 1 || parts[n - 1].peer > parts[0].peer) reverse(parts, n);
    for (uint32_t i = 1; i < n && !first; i++)
        if (parts[i].peer < parts[i - 1].peer) first = i;
    if (!first) return;
    reverse(parts, first);
    reverse(parts + first, n - first);
    reverse(parts, n);
}

void tagc_message_post_parts(tagc_reducer *r, tagc_message *message, int round, tagc_leg leg,
                             const void *send, void *recv, tagc_leg part, uint64_t part_sent,
                             uint64_t part_received) {
    ascend(message->sends, message->n_sends);
    ascend(message->receives, message->n_receives);
    message->ticket = (tagc_ticket){
        .transfer = {.n_sends = message->n_sends,
                     .n_receives = message->n_receives,
                     .sends = message->sends,
                     .receives = message->receives,
                     .send = send,
                     .recv = recv,
                     .round_bytes = message->round_bytes},
        .leg = leg,
        .part_leg = part,
        .part_sent = part_sent,
        .part_received = part_received,
        .tag = r->options.tag,
        .of = &r->identity,
    };
    message->in_flight = 1;
    tagc_comm_post(r->comm, lane_of(round), &message->ticket);
}

void tagc_message_post(tagc_reducer *r, tagc_message *message, int round, tagc_leg leg, const void *send,
                       void *recv) {
    tagc_message_post_parts(r, message, round, leg, send, recv, leg, 0, 0);
}

tagc_status tagc_message_wait(tagc_reducer *r, tagc_message *message) {
    if (!message->in_flight) return TAGC_OK;
    const tagc_ticket *ticket = &message->ticket;
    tagc_reducer_stats *stats = &r->now.stats;
    int must_wait = !tagc_message_done(r, message);
    double start_s = tagc_clock_s();
    tagc_status status = tagc_comm_wait(r->comm, &message->ticket);
    message->in_flight = 0;
    if (must_wait) tagc_phase_end(r, TAGC_PHASE_WAIT, start_s);
    stats->n_bytes_sent[ticket->leg] += ticket->n_bytes_sent - ticket->part_sent;
    stats->n_bytes_received[ticket->leg] += ticket->n_bytes_received - ticket->part_received;
    stats->n_bytes_sent[ticket->part_leg] += ticket->part_sent;
    stats->n_bytes_received[ticket->part_leg] += ticket->part_received;
    return status;
}

void tagc_messages_recount(tagc_reducer *r, tagc_leg from, tagc_leg to, uint64_t sent, uint64_t received) {
    tagc_reducer_stats *stats = &r->now.stats;
    stats->n_bytes_sent[from] -= sent;
    stats->n_bytes_received[from] -= received;
    stats->n_bytes_sent[to] += sent;
    stats->n_bytes_received[to] += received;
    tagc_comm_recount(r->comm, from, to, sent, received);
}

int tagc_message_done(const tagc_reducer *r, const tagc_message *message) {
    return !message->in_flight || tagc_comm_is_done(r->comm, &message->ticket);
}

void tagc_messages_drain(tagc_reducer *r) {
    for (int m = 0; m < r->n_messages; m++) (void)tagc_message_wait(r, &r->messages[m]);
}

int tagc_partner_to(const tagc_reducer *r, int s) {
    return (r->rank + 1 + s) % r->world_size;
}

int tagc_partner_from(const tagc_reducer *r, int s) {
    return (r->rank + 2 * r->world_size - 1 - s) % r->world_size;
}

int tagc_partner_step(const tagc_reducer *r, int from) {
    return (r->rank + r->world_size - 1 - from) % r->world_size;
}

/* Largest bit pattern of |value|: NaN and Inf are the largest. */
int tagc_holds_nonfinite(const float *values, size_t n) {
    uint32_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest >= 0x7f800000u;
}

/* ---- the agreement ----
 *
 * It is a message of its own, after everything that can fail. Only the owner knows whether a body is sound and whether sums are
 * finite, and only after it has added, so no earlier message can carry it. Every rank must know before its step ends and its
 * residual changes, so no later message can either. */

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
