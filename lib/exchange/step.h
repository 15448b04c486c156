/* A step in progress: its actions, its messages, its statistics, and the agreement that it succeeded.
 *
 * Rounds. A step sends its messages in up to five rounds, each on a lane of its own. When a step will post nothing more in a
 * round, the next step may. So several steps are in progress at once, and all ranks post the messages of a lane in the same
 * order, step after step. */
#ifndef TAGC_EXCHANGE_STEP_H
#define TAGC_EXCHANGE_STEP_H

#include "exchange/exchange.h"
#include "exchange/wire.h"
#include "transport/comm.h"

#include <stdatomic.h>

typedef struct tagc_reducer tagc_reducer;

enum { TAGC_N_ROUNDS = 5, TAGC_NO_ROUND = TAGC_N_ROUNDS };

/* A ticket with its own arrays. */
typedef struct tagc_message {
    tagc_ticket ticket;
    int in_flight;
    uint32_t n_sends, n_receives;
    tagc_part *sends, *receives; /* as many as the room says */
    uint64_t round_bytes;        /* as in tagc_transfer; 0 after _clear */
} tagc_message;

/* This many messages, each to and from at most this many ranks. */
typedef struct tagc_room {
    int n_messages, n_peers;
} tagc_room;

/* Of a step that is ahead: HELD when all bodies have arrived, until another thread has seen what is added up of them. */
typedef enum tagc_hold { TAGC_NOT_HELD, TAGC_HELD, TAGC_LET_GO } tagc_hold;

typedef struct tagc_step {
    tagc_task task;
    int begun;
    /* 1: what its batches do is in a device's streams already, and so is what becomes of residual and output (tagc_ahead in
     * lib/gpu). The step sends, checks and agrees. */
    int is_ahead;
    atomic_int hold; /* tagc_hold */
    uint64_t number; /* from 1 */
    uint64_t word;   /* of the caller's, which all ranks must have alike; set before the step begins */
    double start_s;
    const void *gradient;       /* (W, shard), in options.gradient */
    float *output;              /* (output_elems) */
    const void *given_gradient; /* (n_given) of the caller's, where the unit is padded */
    float *given_output;        /* as well, its part of the unit */
    /* Of a step with a feed: a row of the gradient, then of the output, and the sums of the own row; else NULL. (shard) */
    void *row;
    float *own_sums;
    void *residual; /* the new residual, or NULL; swapped with the reducer's */
    tagc_reducer_stats stats;
    tagc_status refused; /* why this rank takes part for the others' sake alone, with zeros; or TAGC_OK */
    tagc_status failure; /* of this rank; sent to all in the next agreement */
    char failure_text[TAGC_ERROR_TEXT_BYTES];
    uint64_t n_told; /* all ranks' items in the last agreement */
    uint32_t longest
        [2]; /* longest body, and body of sums, that this rank sent; after the agreement, of all ranks */

    tagc_action_fn next; /* NULL: the step is over */
    tagc_message *awaited;
    int n_awaited;
} tagc_step;

/* ---- actions ---- */

/* Runs `next` when the n messages from `awaited` on have arrived. It posts in rounds `low` to `high`. Neither it nor later
 * actions post in rounds before `low`. TAGC_NO_ROUND as low: they post nothing. */
void tagc_then(tagc_reducer *r, tagc_action_fn next, tagc_message *awaited, int n, int low, int high);
/* Ends codec work of one phase that began at start_s: updates statistics and trace. Returns the time now. */
double tagc_phase_end(tagc_reducer *r, tagc_phase phase, double start_s);

/* ---- messages ---- */

/* r->messages with their arrays; part of the arena. */
void tagc_messages_place(tagc_reducer *r, tagc_arena *arena, const tagc_room *rooms, int n_rooms);
/* Without any peer. */
void tagc_message_clear(tagc_message *message);
/* Adds what goes to another rank, and what comes from one. Offsets count from `send` and `recv` of _post. Ranks ascend or
 * descend, and may wrap around once. */
void tagc_message_to(tagc_message *message, int rank, uint64_t n_bytes, uint64_t offset);
void tagc_message_from(tagc_message *message, int rank, uint64_t n_bytes, uint64_t offset);
void tagc_message_post(tagc_reducer *r, tagc_message *message, int round, tagc_leg leg, const void *send,
                       void *recv);
/* Like _post, but some of its bytes count as another leg. */
void tagc_message_post_parts(tagc_reducer *r, tagc_message *message, int round, tagc_leg leg,
                             const void *send, void *recv, tagc_leg part, uint64_t part_sent,
                             uint64_t part_received);
/* Waits, if the message was posted, and counts its bytes. */
tagc_status tagc_message_wait(tagc_reducer *r, tagc_message *message);
/* Moves bytes of received messages to another leg, which their content decides. */
void tagc_messages_recount(tagc_reducer *r, tagc_leg from, tagc_leg to, uint64_t sent, uint64_t received);
/* 1 when _wait would not wait. */
int tagc_message_done(const tagc_reducer *r, const tagc_message *message);
/* Waits for all messages in progress after a failure. */
void tagc_messages_drain(tagc_reducer *r);

/* The s-th partner of this rank, and the rank whose s-th partner it is. For each s all links are in use. */
int tagc_partner_to(const tagc_reducer *r, int s);
int tagc_partner_from(const tagc_reducer *r, int s);
/* The s with tagc_partner_from(r, s) == from. */
int tagc_partner_step(const tagc_reducer *r, int from);

/* ---- the agreement ---- */

void tagc_agreement_place(tagc_reducer *r, tagc_arena *arena);
/* Keeps this rank's first failure, with tagc_last_error(), until the next agreement. */
void tagc_note_failure(tagc_reducer *r, tagc_status status);
/* Sends this rank's failure, non-finiteness, now.longest and n_items to all ranks. The message is r->agreement, and the
 * caller of _end waits for it. */
void tagc_agree_begin(tagc_reducer *r, int round, uint32_t n_items);
/* Learns theirs: the same status on all ranks, stats.nonfinite, now.longest, the sum of n_items and, unless NULL, each rank's. No
 * rank's may be above max_items (W,), or where that is NULL above W. */
tagc_status tagc_agree_end(tagc_reducer *r, const size_t *max_items, uint32_t *n_items);

/* 1 when a value is NaN or Inf. */
int tagc_holds_nonfinite(const float *values, size_t n);

#endif
