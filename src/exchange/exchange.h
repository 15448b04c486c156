/* The table of exchanges: what a reducer needs to know of one. reducer.c, step.c and volume.c know nothing else of them.
 *
 * A step is a sequence of phases. A phase posts messages and says in tagc_then which phase follows and which messages it
 * waits for; meanwhile the worker runs phases of other steps. */
#ifndef TAGC_EXCHANGE_EXCHANGE_H
#define TAGC_EXCHANGE_EXCHANGE_H

#include "core/memory.h"
#include "exchange/volume.h"

struct tagc_reducer;

typedef tagc_status (*tagc_phase_fn)(struct tagc_reducer *r);

typedef struct tagc_exchange_table {
    int id;             /* tagc_exchange */
    size_t state_bytes; /* of its own state, r->state, zeroed when a reducer is made */
    int is_selective;   /* 1: sparsity means something */
    /* Of checked options: values of the residual, 0 where nothing is ever left, and of the output. */
    uint64_t (*residual_elems)(const tagc_reducer_options *options, int world_size);
    uint64_t (*output_elems)(const tagc_reducer_options *options, int world_size);
    /* Shapes and buffers; twice, as tagc_arena says. r->comm is NULL where only sizes are wanted. */
    void (*place)(struct tagc_reducer *r, tagc_arena *arena);
    /* What a reducer with kernels has beside its arena, made after _place and ended with the state; NULL: it cannot have
     * kernels. _end_on accepts what is half-made. */
    tagc_status (*make_on)(struct tagc_reducer *r);
    void (*end_on)(struct tagc_reducer *r);
    /* The same of a reducer whose messages the caller carries (tagc/slots.h), with kernels or without. */
    tagc_status (*make_slots)(struct tagc_reducer *r);
    void (*end_slots)(struct tagc_reducer *r);
    /* Begins a step: posts nothing, but says what does. The last phase leaves without tagc_then. */
    tagc_phase_fn start;
    /* The step is over, on all ranks alike, and nothing of it is under way; may be NULL. */
    void (*end)(struct tagc_reducer *r, int succeeded);
    /* What the rank of a reducer that is laid out sends in a step. */
    tagc_status (*volume)(struct tagc_reducer *r, const tagc_volume_data *data, tagc_volume *out);
} tagc_exchange_table;

extern const tagc_exchange_table tagc_exchange_dense, tagc_exchange_sketch, tagc_exchange_packed,
    tagc_exchange_direct;

/* Of a tagc_exchange in range. */
const tagc_exchange_table *tagc_exchange_of(int id);

#endif
