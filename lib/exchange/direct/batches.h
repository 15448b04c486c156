/* The batches of a direct exchange, over any maker (codec/batch.h): their rows, life and runs. The processor and kernels (lib/gpu/ahead.c)
 * use them.
 *
 *   ENCODE        own rows -> fragments           a row for each turn; with results, none for the own
 *   ADD           fragments -> own sums           one row, with a body from each rank; with results, the own one is plain
 *   ENCODE_SUMS   own sums -> body                one row
 *   DECODE_SUMS   bodies -> sums                  a row for each rank
 *
 * If the runner is not ahead, each has one row, and runs once for each rank. */
#ifndef TAGC_EXCHANGE_DIRECT_BATCHES_H
#define TAGC_EXCHANGE_DIRECT_BATCHES_H

#include "codec/batch.h"
#include "core/memory.h"

struct tagc_reducer;

enum { TAGC_ENCODE, TAGC_ADD, TAGC_ENCODE_SUMS, TAGC_DECODE_SUMS, TAGC_N_BATCHES };

typedef struct tagc_batches {
    tagc_batch_row *rows;             /* (W,) of the next run */
    tagc_body *bodies;                /* (W,) for these rows to name */
    tagc_batch_result *results;       /* (W,) of the last run, where the maker works */
    void *work;                       /* of the maker; shared, since one batch runs at a time */
    tagc_batch *made[TAGC_N_BATCHES]; /* NULL: not needed, or not made yet */
} tagc_batches;

/* Part of the arena: the lists, and if the arrays are here, results. */
void tagc_batches_place(struct tagc_reducer *r, tagc_arena *arena);
/* Of a step under way, if the arrays are here: work. */
void tagc_batches_place_work(struct tagc_reducer *r, tagc_arena *arena);
/* Bytes of `work` that a batch needs in a memory that is not here. */
size_t tagc_batches_work_bytes(struct tagc_reducer *r, int which);
/* The most launches of a batch's run, with those of making it. */
size_t tagc_batches_n_launches(struct tagc_reducer *r, int which);
/* Makes one that is the caller's, for another memory and stream. *out is NULL if the output does not need it. */
tagc_status tagc_batches_make_one(struct tagc_reducer *r, int which, void *work, void *stream,
                                  tagc_batch **out);
/* A status of the maker as this library's. */
tagc_status tagc_batches_check(const struct tagc_reducer *r, tagc_status status);

/* What the owner adds of its own, unrounded, if sums are sent back. Its turn, the last, is over. */
tagc_body tagc_own_body(const struct tagc_reducer *r);

#endif
