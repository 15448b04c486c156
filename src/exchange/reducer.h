/* Inside of a reducer, shared by the files that make it up: reducer.c (life), state.c (residual), step.c
 * (what is under way), agreement.c, dense.c, paper/ (index.c with packed.c and sketch.c, the two ways to send the values
 * of an index), and direct/.
 *
 * All of a step runs as one job on the worker of the comm. */
#ifndef TAGC_EXCHANGE_REDUCER_H
#define TAGC_EXCHANGE_REDUCER_H

#include "codec/paper/peel.h"
#include "codec/select.h"
#include "core/memory.h"
#include "exchange/direct/direct.h"
#include "exchange/wire.h"
#include "transport/comm.h"

#define TAGC_DENSE_DEPTH 3 /* chunks under way: one being added, two on the wire */

/* A ticket with its own arrays. */
typedef struct tagc_message {
    tagc_ticket ticket;
    int in_flight;
    uint32_t n_sends, n_receives;
    tagc_part *sends, *receives; /* (n_most) each: W - 1 of a round, 1 of a pair */
} tagc_message;

struct tagc_reducer {
    tagc_comm *comm;
    tagc_reducer_options options; /* defaults resolved */
    int rank, world_size;
    size_t shard;
    float scale;       /* of the sum: 1 or 1/W */
    tagc_pool *pool;   /* NULL with one thread */
    tagc_spare *spare; /* NULL where there is no residual */
    float *residual;   /* (n_residual): (W, shard), of direct (hosts, shard), or NULL: dense */
    uint64_t n_residual;

    /* One arena, see reducer.c. */
    void *arena;
    tagc_message *messages;
    int n_messages;
    tagc_message *round; /* of whatever all ranks exchange at once: unions, agreement, leftovers, results */

    /* dense */
    size_t chunk;            /* elements of a shard that travel at a time */
    tagc_message *chunk_in;  /* (DEPTH,) */
    tagc_message *chunk_out; /* (DEPTH,) all-reduce: sums */
    float *recv_chunks;      /* (DEPTH, W, chunk) fp32 wire */
    float *widened;          /* (chunk,) bf16 wire */
    uint16_t *send_halves;   /* (DEPTH, W, chunk) bf16 wire */
    uint16_t *recv_halves;   /* (DEPTH, W, chunk) */
    uint16_t *sum_halves;    /* (DEPTH, chunk) bf16 wire and all-reduce */
    uint16_t *sums_recv;     /* (DEPTH, W, chunk) */

    /* sketch and packed; k and scratch of direct, too */
    int sketching;           /* 0 also for a sketch that keeps everything: it would only be larger */
    size_t k;                /* kept of a shard at most */
    size_t max_union;        /* elements of a shard's union at most */
    size_t max_cells;        /* of a sketch; 0 when packed */
    size_t index_bytes;      /* header and body */
    size_t value_bytes;      /* of one row of the value buffers */
    tagc_message *index_out; /* (W - 1,) one per destination */
    tagc_message *value_out; /* (W - 1,) */
    char *index_send; /* (W, index_bytes): row d goes to d; row `rank` becomes the union of the own shard */
    char *index_recv; /* (W, index_bytes): indices from each rank, then the unions from each rank */
    char *value_send; /* (W, value_bytes): row d goes to d; row `rank` is the own contribution */
    char *value_recv; /* (W, value_bytes): row r comes from r; row `rank` holds the sums in packed order */
    char *agree_send; /* (header) */
    char *agree_recv; /* (W, header) */
    uint32_t *kept_indices;   /* (W, k) */
    float *kept_values;       /* (W, k) */
    uint32_t *list;           /* (max_union) the union at hand */
    uint8_t *bits;            /* (bitmap of a shard) for an index that is no bitmap */
    int32_t *fixed;           /* (max_union) fixed-point cells only */
    void *plan_memory;        /* sketch */
    void *scratch;            /* of selection, then of planning */
    size_t *n_kept, *n_union; /* (W,) */
    uint32_t *attempt;        /* (W,) added to the seed */
    uint32_t *n_left;         /* (W,) leftovers of each shard */

    tagc_direct direct;

    /* the step under way */
    tagc_job job;
    int begun;
    double start_s;
    const float *gradient; /* (W, shard) */
    float *output;         /* (shard), or (W, shard) with all_reduce, (hosts, shard) with all_reduce 2 */
    uint64_t step;
    tagc_reducer_stats stats;
    tagc_status failure; /* of this rank, told to all in the next agreement */
    char failure_text[TAGC_ERROR_TEXT_BYTES];
    float max_abs;     /* over ranks and, once the unions are here, over shards */
    float own_max_abs; /* over ranks, of the own shard */
    int exponent;      /* of fixed-point cells */
    int planned;       /* the plan below is made */
    tagc_peeling plan; /* of the own shard */
};

/* ---- step.c ---- */

/* r->messages, part of the arena: n_rounds with room for a part to and from every other rank, then n_pairs with room for
 * one each. */
void tagc_messages_place(tagc_reducer *r, tagc_arena *arena, int n_rounds, int n_pairs);
/* Nothing to anybody. */
void tagc_message_clear(tagc_message *message);
/* Adds n_bytes to or from a peer, at `offset` of what is posted; peers ascend. */
void tagc_message_send(tagc_message *message, int peer, uint64_t n_bytes, uint64_t offset);
void tagc_message_receive(tagc_message *message, int peer, uint64_t n_bytes, uint64_t offset);
/* Nothing but send_bytes to `to` and recv_bytes from `from`. */
void tagc_message_pair(tagc_message *message, int to, uint64_t send_bytes, int from, uint64_t recv_bytes);
void tagc_message_post(tagc_reducer *r, tagc_message *message, tagc_leg leg, const void *send, void *recv);
/* Waits, when it is under way at all, and counts its bytes. */
tagc_status tagc_message_wait(tagc_reducer *r, tagc_message *message);
/* 1 when _wait would not wait. */
int tagc_message_done(const tagc_reducer *r, const tagc_message *message);
/* Waits for all that is under way; failures are known already. */
void tagc_messages_drain(tagc_reducer *r);

/* Ends a stretch of work of one phase that began at start_s: statistics and trace. Returns the time now. */
double tagc_phase_end(tagc_reducer *r, tagc_phase phase, double start_s);

/* Keeps this rank's first failure, with tagc_last_error(), until the next agreement. */
void tagc_note_failure(tagc_reducer *r, tagc_status status);
/* Tells all ranks this rank's failure, non-finiteness and n_left; _end learns theirs: the same status on all
 * ranks, stats.nonfinite and n_left (W,). One round trip that may overlap work between the two. */
void tagc_agree_begin(tagc_reducer *r, size_t n_left);
tagc_status tagc_agree_end(tagc_reducer *r);

/* Rank order with all links at work: the s-th partner of this rank, and whose s-th partner it is. */
static inline int tagc_partner_to(const tagc_reducer *r, int s) {
    return (r->rank + 1 + s) % r->world_size;
}
static inline int tagc_partner_from(const tagc_reducer *r, int s) {
    return (r->rank + r->world_size - 1 - s) % r->world_size;
}
/* The s with tagc_partner_from(r, s) == from. */
static inline int tagc_partner_step(const tagc_reducer *r, int from) {
    return (r->rank + r->world_size - 1 - from) % r->world_size;
}

/* ---- exchanges: a whole step each ---- */

void tagc_dense_place(tagc_reducer *r, tagc_arena *arena);
/* The first chunks go out; all the others and the begin of the agreement, whose end is the caller's. */
void tagc_dense_start(tagc_reducer *r);
tagc_status tagc_dense_step(tagc_reducer *r);
int tagc_holds_nonfinite(const float *values, size_t n);
/* Lays out all buffers; twice, as tagc_arena says. */
void tagc_reducer_place(tagc_reducer *r, tagc_arena *arena);
/* Values that a reducer of these (checked) options keeps as residual, and writes to its output. */
uint64_t tagc_residual_elems(const tagc_reducer_options *options, int world_size);
uint64_t tagc_output_elems(const tagc_reducer_options *options, int world_size);
void tagc_indexed_place(tagc_reducer *r, tagc_arena *arena);
tagc_status tagc_indexed_step(tagc_reducer *r);

/* ---- paper/index.c, for packed.c and sketch.c ---- */

/* The union of shard d as a bitmap (valid until the next call) and as ascending positions in r->list. */
const uint8_t *tagc_union_bits(tagc_reducer *r, int d);
size_t tagc_union_list(tagc_reducer *r, int d);

static inline char *tagc_contribution(const tagc_reducer *r, int from) {
    return (from == r->rank ? r->value_send : r->value_recv) + (size_t)from * r->value_bytes;
}
static inline float *tagc_sums(const tagc_reducer *r) {
    return (float *)(r->value_recv + (size_t)r->rank * r->value_bytes);
}
/* Waits for what rank `from` sends for the own shard. */
tagc_status tagc_contribution_wait(tagc_reducer *r, int from);

/* Values of the union of shard d, found in r->list, into row d of value_send; the new residual changes to
 * match. */
void tagc_packed_encode(tagc_reducer *r, int d);
void tagc_sketch_encode_shard(tagc_reducer *r, int d);
uint64_t tagc_sketch_shard_bytes(const tagc_reducer *r, int d);
/* Union of the own shard in r->list: contributions to tagc_sums. Sketch: leftovers too. */
tagc_status tagc_packed_decode(tagc_reducer *r);
tagc_status tagc_sketch_decode(tagc_reducer *r);
/* Small unions of the own shard, in r->list: looks for a seed that peels, before the union is sent. */
void tagc_sketch_plan_early(tagc_reducer *r);
size_t tagc_sketch_max_cells(const tagc_reducer *r);
size_t tagc_sketch_scratch_bytes(const tagc_reducer *r);

#endif
