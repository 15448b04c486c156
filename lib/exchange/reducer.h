/* Inside of a reducer: what all exchanges share. reducer.c (life, begin and end), state.c (the residual), step.h (messages, actions,
 * agreement) and the exchanges, each with a state of its own, see exchange.h. */
#ifndef TAGC_EXCHANGE_REDUCER_H
#define TAGC_EXCHANGE_REDUCER_H

#include "codec/residual.h"
#include "codec/select.h"
#include "core/pool.h"
#include "exchange/exchange.h"
#include "exchange/runner.h"
#include "exchange/step.h"
#include "transport/work.h"

/* Where a reducer's gradient comes from and its sums go, if it takes no arrays of a caller's. direct asks for one row at a time, so a step
 * holds one row (two where sums are sent back), and for chunks of rows where it sends whole values and none back; else a step holds the
 * whole gradient. All calls come from a worker of the comm. */
typedef struct tagc_feed {
    void *context;
    /* Whether the step can start now; NULL: always. When that changes, call tagc_comm_look_again. */
    int (*is_ready)(void *context);
    /* The step begins. A failure is that of the step. *lent: set it to a whole gradient (n_elems) that stays until _end; else values
     * are asked for. */
    tagc_status (*start)(void *context, const void **lent);
    /* Writes values [first, first + n) of row `row` of the gradient, in options.gradient. Each value once in a step. */
    void (*fill)(void *context, size_t row, size_t first, size_t n, void *values);
    /* Takes values [first, first + n) of row `row` of the output. sums NULL: something is not finite, and so is the whole output, of which
     * it may have got a part before. */
    void (*take)(void *context, size_t row, size_t first, size_t n, const float *sums);
    /* The step has ended on all ranks. */
    void (*end)(void *context, tagc_status status);
    /* 1: _start lends the gradient, or fails. */
    int lends;
    /* A kind of transport/work.h, whose steps share memory: TAGC_WORK_REDUCE is 0. Within a host, where waits are short, chunks are, too. */
    int work;
} tagc_feed;

struct tagc_reducer {
    tagc_comm *comm;
    tagc_identity identity;
    const tagc_feed *feed;     /* NULL: arrays are the caller's */
    tagc_feed padding;         /* the feed of a unit that has fewer values than W shards */
    const tagc_arrays *arrays; /* where gradient, output and residual are */
    const tagc_exchange_table *exchange;
    const tagc_runner *runner;    /* of its batches; NULL if the exchange has none */
    int may_be_whole;             /* see tagc_exchange_path; the same on all ranks */
    tagc_reducer_options options; /* defaults resolved; n_elems is W shards */
    uint64_t n_given;             /* values of the caller's unit: those behind are zeros, and are nobody's */
    _Alignas(8) char own_options[TAGC_OWN_MAX_BYTES]; /* as well; see tagc_own_options */
    int rank, world_size;
    size_t shard;        /* n_elems / W */
    size_t k;            /* the most elements selected in a shard; 0 if nothing is selected */
    float scale;         /* of the sum: 1 or 1/W */
    tagc_pool *pool;     /* NULL with one thread */
    tagc_spares *spares; /* NULL where there is no residual */
    void *residual;      /* (W, row_bytes): rows of a shard; or NULL */
    uint64_t n_residual; /* values in it */
    int residual_format; /* tagc_format; a row is as codec/residual.h says */
    size_t row_bytes;
    uint64_t n_steps; /* begun so far; rounding derives from it, and a saved residual has it */
    void *state;      /* of the exchange */

    void *arena;         /* | messages | agreement | what the exchange asked for | */
    size_t buffer_bytes; /* of state and arena */
    tagc_work work;      /* what a step takes: see place_work of the exchange */
    tagc_message *messages;
    int n_messages;
    tagc_message *agreement;
    char *agree_send; /* (header) */
    char *agree_recv; /* (W, header) */

    tagc_step now; /* the step under way */
};

/* tagc_reducer_create and its like. Collective. runner: NULL for that of the exchange. feed: NULL, or one that outlives the reducer, whose
 * steps then are those of _begin_fed, which checks nothing. */
tagc_status tagc_reducer_make(const tagc_arrays *arrays, const tagc_runner *runner, const tagc_feed *feed,
                              tagc_comm *comm, const tagc_reducer_options *options, tagc_reducer **out);
tagc_status tagc_reducer_begin_fed(tagc_reducer *r);

/* tagc_reducer_create without a word to other ranks: for the sizes of its memory. It cannot begin. */
tagc_status tagc_reducer_make_alone(const tagc_arrays *arrays, const tagc_runner *runner, tagc_comm *comm,
                                    const tagc_reducer_options *options, tagc_reducer **out);

/* What tagc_reducer_state_save writes, without a copy: the header (TAGC_WIRE_HEADER_BYTES) and where the rest is. Of a reducer in host
 * memory. */
void tagc_reducer_state_view(const tagc_reducer *r, void *header, const void **body, uint64_t *n_body);

/* As _get_residual and _set_residual, which check; also at the start of a step, before anything is encoded. values (n_residual,) finite. */
tagc_status tagc_reducer_read_residual(const tagc_reducer *r, float *values);
tagc_status tagc_reducer_write_residual(tagc_reducer *r, const float *values);

/* What messages call it where ranks begin steps in different orders. Longer names are cut. */
void tagc_reducer_set_name(tagc_reducer *r, const char *name);

/* ---- parts of its life ---- */

/* If the options ask for one. After a failure there is none. */
tagc_status tagc_reducer_make_residual(tagc_reducer *r);
void tagc_reducer_destroy_residual(tagc_reducer *r);
static inline void tagc_reducer_note_residual(tagc_reducer *r) {
    if (r->runner && r->runner->note_residual) r->runner->note_residual(r);
}

/* ---- steps ---- */
/* Of the residual. */
static inline uint64_t tagc_reducer_n_rows(const tagc_reducer *r) {
    return r->n_residual / r->shard;
}
static inline uint64_t tagc_reducer_stored_bytes(const tagc_reducer *r) {
    return tagc_reducer_n_rows(r) * r->row_bytes;
}
/* How options that were checked let it be stored. */
int tagc_stored_format(const tagc_reducer_options *options);
/* What the rounding of a row derives from. A step writes each row once. */
static inline uint32_t tagc_reducer_seed(const tagc_reducer *r, size_t row) {
    return tagc_residual_seed(r->options.rounding_seed, r->n_steps, (uint32_t)r->rank, (uint32_t)row);
}

/* TAGC_ERR_STATE while a step is under way. */
tagc_status tagc_reducer_check_idle(const tagc_reducer *r, const char *what);

/* Sets n_given, and what follows from it and the checked options. */
void tagc_reducer_size(tagc_reducer *r, uint64_t n_given);

/* The values of the caller's unit that this rank gets. */
uint64_t tagc_reducer_given_output(const tagc_reducer *r);
/* TAGC_ERR_ARGUMENT unless a step can use arrays of these lengths. */
tagc_status tagc_reducer_check_lengths(const tagc_reducer *r, uint64_t n_gradient, uint64_t n_output);
/* Of an exchange that reads it as fp32, and a row of a residual that is stored as fp32. */
static inline const float *tagc_reducer_gradient(const tagc_reducer *r) {
    return r->now.gradient;
}
static inline float *tagc_reducer_fp32_row(const tagc_reducer *r, void *residual, size_t row) {
    return (float *)residual + row * r->shard;
}
/* Size of a value of the gradient. */
static inline size_t tagc_reducer_gradient_bytes(const tagc_reducer *r) {
    return r->options.gradient == TAGC_FORMAT_BF16 ? sizeof(uint16_t) : sizeof(float);
}

/* _begin without a look at the arrays, for a step that is ahead. It is then held once: see tagc_hold. failure: of this rank, with its
 * text, which all ranks return; or TAGC_OK. */
tagc_status tagc_reducer_begin_ahead(tagc_reducer *r, const void *gradient, float *output,
                                     tagc_status failure, const char *text);
void tagc_reducer_let_go(tagc_reducer *r);

/* Whether a caller's struct, which may be NULL, can be written; and writes now.stats to it. */
tagc_status tagc_reducer_check_stats(const tagc_reducer_stats *stats);
void tagc_reducer_write_stats(const tagc_reducer *r, tagc_reducer_stats *stats);

/* Lays out the reducer's own buffers; called twice, see tagc_arena. */
void tagc_reducer_place(tagc_reducer *r, tagc_arena *arena);
/* Those of a step under way. */
void tagc_reducer_place_work(tagc_reducer *r, tagc_arena *work);

#endif
