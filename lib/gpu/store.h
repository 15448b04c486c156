/* A store: where the residuals of one unit's reducers are, on the device, and what the unit needs there besides.
 *
 *   region                 | residual of a part | of another | free |       n_bytes
 *   spares (n_buffers)     | the same places, for the next residuals |      shared by all stores of n_bytes
 *
 * A step writes the new residuals of all parts into the spare of its buffer, and when it is enqueued, region and spare swap. So a
 * queue has as many spares as exchanges may be under way, and the memory of a unit does not depend on how its parts change: when the
 * schedule splits or joins them, residuals take other places of the same region. If what is free is in pieces, the others move
 * together, through the host. */
#ifndef TAGC_GPU_STORE_H
#define TAGC_GPU_STORE_H

#include "exchange/reducer.h"
#include "gpu/queue_private.h"

/* The spares of all stores of one size. */
typedef struct tagc_turns {
    size_t n_bytes;
    int n_users;
    char *spares[MAX_BUFFERS]; /* by buffer */
    struct tagc_turns *next;
} tagc_turns;

typedef struct store_piece {
    size_t at, n_bytes;
    tagc_reducer *reducer; /* whose residual it is; NULL while that is made */
    struct store_piece *next;
} store_piece;

typedef struct tagc_store {
    tagc_kernels *kernels; /* the first member: see tagc_kernels_in */
    tagc_queue *queue;
    tagc_arrays arrays, of_probes; /* the latter's residuals take no memory */
    char *region;                  /* (n_bytes) */
    size_t n_bytes, n_expected;
    tagc_turns *turns;   /* NULL: n_bytes is 0 */
    store_piece *pieces; /* by place */
    void *lists;         /* (lists_bytes) of the unit */
    size_t lists_bytes;
} tagc_store;

/* Only one thread at a time may call what follows, with nothing under way in the queue. A store grows when a reducer is made in it; never in
 * a step. Destroy it after its reducers and before its queue. */
tagc_status tagc_store_create(tagc_queue *queue, tagc_store **out);
/* Reducers of these options (n) will be in it, all at the same time: when it next grows, it has room for them. */
tagc_status tagc_store_expect(tagc_store *store, const tagc_comm *comm, const tagc_reducer_options *options,
                              uint32_t n);
void tagc_store_destroy(tagc_store *store);

/* NULL: the reducer was not made by tagc_reducer_create_in. */
tagc_store *tagc_store_of(const tagc_reducer *reducer);
/* The runner's note_residual: from now on the store may move it. */
void tagc_store_note(tagc_reducer *reducer);
/* Where its residual is in the region; a probe's is nowhere. */
size_t tagc_store_place(const tagc_store *store, const tagc_reducer *reducer);
/* Swaps region and spare of buffer b. */
void tagc_store_turn(tagc_store *store, int b);
/* Makes `lists` at least this large. */
tagc_status tagc_store_reserve_lists(tagc_store *store, size_t n_bytes);

#endif
