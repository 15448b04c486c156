/* Inside of a gatherer, shared by gatherer.c (life, transfers, plain arrays), rows.c (encoding and decoding), delta.c and
 * lossless.c. */
#ifndef TAGC_EXCHANGE_GATHERER_GATHERER_H
#define TAGC_EXCHANGE_GATHERER_GATHERER_H

#include "codec/values.h"
#include "core/memory.h"
#include "core/pool.h"
#include "core/status.h"
#include "exchange/runner.h"
#include "transport/comm.h"
#include "transport/identity.h"
#include "transport/work.h"

#include <stdatomic.h>

/* A row that is encoded or decoded. */
typedef struct tagc_row {
    uint8_t *body;
    void *values;          /* decoding: a row of `full` */
    int is_void;           /* decoding: NaN, whatever the body */
    atomic_int *nonfinite; /* encoding: set if a value or difference is not finite */
} tagc_row;

/* Where in a buffer of rows what travels of a row lies. */
typedef struct tagc_extent {
    uint64_t offset, n_bytes;
} tagc_extent;

/* Rows, or a part of each, on their way to all ranks. */
typedef struct tagc_delivery {
    tagc_extent *extents; /* (W) filled by the caller before it posts */
    int is_posted;        /* and not waited for */
    tagc_ticket ticket;
    tagc_part *sends, *receives; /* (W - 1) */
} tagc_delivery;

/* Of a lossless gather: elements that travel in one message, encoded while the one before is on the wire (lossless.c). */
typedef struct tagc_segment {
    size_t first, n; /* elements of a row */
    size_t at;       /* bytes of a row, where its message begins */
    size_t *front;   /* (W) bytes of the body that travel with the header; all ranks know them */
    size_t *n_bytes; /* (W) of the body, in this gather */
    int has_rest;    /* some body is longer than its front */
    tagc_delivery delivery;
} tagc_segment;

/* What each rank says beside rows that have no header. */
typedef struct tagc_gather_word {
    uint32_t unit, status; /* TAGC_OK, or why the rank could not begin */
    uint64_t step;         /* n_begun */
} tagc_gather_word;

/* These words on their way, at the same time as the rows. */
typedef struct tagc_gather_words {
    tagc_gather_word own, *all; /* (W) */
    tagc_delivery delivery;
} tagc_gather_words;

struct tagc_gatherer {
    tagc_comm *comm;
    tagc_identity identity;
    const tagc_arrays *arrays; /* where the values are */
    const tagc_gather_runner *runner;
    void *on_device;            /* what a runner of lib/gpu has made, else NULL */
    tagc_status device_failure; /* of this gather */
    char device_text[TAGC_ERROR_TEXT_BYTES];
    tagc_gatherer_options options;
    int rank, world_size; /* a row of `full` for each rank */
    int bits;             /* bits of a code; 0 for fp32 and bf16 */
    int is_delta, is_lossless;
    int is_plain;      /* rows travel as they are in `full` */
    int is_stochastic; /* whole parameters in int8, rounded at random: rows are values (codec/values.h) */
    tagc_value_format values; /* of these rows, with the seed of this gather */
    size_t shard;
    size_t stride; /* values of `full` from one row to the next: the shard, or more */
    size_t width;  /* bytes of a value of `full`: 2 or 4 */
    int begun;
    int is_posted;    /* the first half of the task is done */
    const float *own; /* (shard) */
    void *full;       /* (W, shard), fp32 or bf16 */
    tagc_delivery delivery;
    tagc_gather_words words; /* of rows without a header */
    tagc_task task;
    tagc_pool *pool;             /* NULL with one thread */
    struct tagc_gatherer *first; /* see tagc_gatherer_follow; NULL: it follows none */
    tagc_comm *followers;        /* their comm; NULL: it has none */
    atomic_int is_over;          /* of a gather with followers */
    tagc_status ended;           /* how */

    uint64_t n_begun;

    /* deltas */
    int is_whole; /* this gather sends checksums; all ranks know */
    int is_whole_next; /* the next gather sends whole parameters; all ranks know it from the messages of this one */
    int is_checked; /* this gather brings checksums along */
    int is_void;    /* this gather's own row has a value that is not finite */
    tagc_status
        failure; /* of this rank's last gather, sent in the next, or before this one. Of all gathers */

    /* lossless gathers */
    tagc_segment *segments;            /* (n_segments) */
    int n_segments, n_fronts, n_rests; /* of these, how many were looked at in this gather */
    const char *damage;                /* of the first row that is damaged; NULL: none is */
    int damaged_row;
    tagc_status told; /* a rank's failure, in the gather before or before this one */
    int told_by;
    int is_of_other_unit; /* some header names another unit: other_unit is its text */
    char other_unit[TAGC_ERROR_TEXT_BYTES];

    /* One arena: | arrays of the delivery | of the words | decoded |, of lossless gathers also | segments | arrays of each |. */
    void *arena;
    size_t arena_bytes;
    tagc_work work;    /* of a gather under way: rows */
    tagc_row *decoded; /* (W) */
    size_t row_bytes;  /* the most bytes of a row; 0 for plain ones */
    uint8_t *rows;     /* (W, row_bytes) as on the wire; row `rank` is sent */
};

static inline uint8_t *tagc_gatherer_row(const tagc_gatherer *g, int row) {
    return g->rows + (size_t)row * g->row_bytes;
}

/* Row `row` of `full`. */
static inline void *tagc_gatherer_full(const tagc_gatherer *g, int row) {
    return (char *)g->full + (size_t)row * g->stride * g->width;
}

/* Values from the first of `full` to the last. */
static inline uint64_t tagc_gatherer_full_elems(const tagc_gatherer *g) {
    return (uint64_t)(g->world_size - 1) * g->stride + g->shard;
}

/* Decides all sizes; *arena receives the bytes of its buffers, and *work those that a gather under way takes. */
tagc_status tagc_gatherer_lay_out(tagc_gatherer *gatherer, const tagc_gatherer_options *options,
                                  int world_size, int rank, tagc_arena *arena, tagc_arena *work);

/* At most, of one rank's message. */
size_t tagc_gatherer_delta_bytes(int bits, size_t shard, int world_size);
/* Bytes that this gather sends to each other rank; all ranks know them in advance. */
size_t tagc_gatherer_message_bytes(const tagc_gatherer *gatherer);

/* ---- deliveries ---- */

void tagc_delivery_place(const tagc_gatherer *gatherer, tagc_arena *arena, tagc_delivery *out);
/* own: what travels of the own row. The others come to their extents of `rows`. */
void tagc_delivery_post(const tagc_gatherer *gatherer, tagc_delivery *delivery, tagc_lane lane,
                        const void *own, void *rows);
int tagc_delivery_is_done(const tagc_gatherer *gatherer, const tagc_delivery *delivery);
/* Returns TAGC_OK at once if nothing is posted. */
tagc_status tagc_delivery_wait(const tagc_gatherer *gatherer, tagc_delivery *delivery);

/* 1: rows have no header, neither as plain arrays nor encoded: words have their identity. */
static inline int tagc_gatherer_has_words(const tagc_gatherer *g) {
    return !g->is_delta && !g->is_lossless;
}

/* ---- two levels: a gather between hosts, then one within each (unit/gather.h) ---- */

/* tagc_gatherer_create, where the rows of `full` lie `stride` values apart. n_full then counts all from the first value to the last. */
tagc_status tagc_gatherer_create_apart(tagc_comm *comm, const tagc_gatherer_options *options, size_t stride,
                                       tagc_gatherer **out);
/* From now on, each gather of `gatherer` waits until one of `first`, which is of another comm and begins just before it, is over. It
 * fails on all its ranks where that failed on one of them. For whole parameters; `first` has followers on one comm alone. */
void tagc_gatherer_follow(tagc_gatherer *gatherer, tagc_gatherer *first);

/* tagc_gatherer_create and its like. */
tagc_status tagc_gatherer_make(const tagc_arrays *arrays, const tagc_gather_runner *runner, tagc_comm *comm,
                               const tagc_gatherer_options *options, tagc_gatherer **out);

/* ---- deltas ---- */

/* Decides what this gather sends. Call it before the message is written. */
void tagc_gatherer_delta_begin(tagc_gatherer *gatherer);
/* Writes the own message. */
void tagc_gatherer_delta_encode(tagc_gatherer *gatherer);
/* Row `row` of this gather, received intact or the own one. */
tagc_row tagc_gatherer_delta_row(const tagc_gatherer *gatherer, int row, int is_void);
/* Decodes the received messages to `full`; the own row is there already. */
tagc_status tagc_gatherer_delta_decode(tagc_gatherer *gatherer);
/* What a rank, by its name, has said of itself with that status. */
tagc_status tagc_gatherer_told(tagc_status told, int name);

/* ---- lossless ---- */

/* Divides a row into segments. Sets g->row_bytes and g->n_segments; then _place takes the arrays of the segments. */
void tagc_gatherer_lossless_lay_out(tagc_gatherer *gatherer);
void tagc_gatherer_lossless_place(tagc_gatherer *gatherer, tagc_arena *arena);
/* Of a new gatherer: what the first fronts are. */
void tagc_gatherer_lossless_init(tagc_gatherer *gatherer);
/* Bytes to each other rank, as expected of weights. */
size_t tagc_gatherer_lossless_bytes(const tagc_gatherer *gatherer);
int tagc_gatherer_lossless_is_ready(const tagc_gatherer *gatherer); /* after the first run */
tagc_status tagc_gatherer_lossless_run(tagc_gatherer *gatherer);

#endif
