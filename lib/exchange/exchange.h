/* The table of exchanges. It is all that reducer.c, step.c and volume.c know of an exchange.
 *
 * A step is a sequence of actions. An action posts messages, and calls tagc_then to name the next action and the messages that it
 * waits for. Meanwhile the worker runs actions of other steps. */
#ifndef TAGC_EXCHANGE_EXCHANGE_H
#define TAGC_EXCHANGE_EXCHANGE_H

#include "core/memory.h"
#include "exchange/fields.h"
#include "exchange/runner.h"
#include "exchange/volume.h"

struct tagc_reducer;

typedef tagc_status (*tagc_action_fn)(struct tagc_reducer *r);

/* Where in the gradient the output may lie, in host memory. */
typedef enum tagc_overlap {
    TAGC_OVERLAP_NONE,
    TAGC_OVERLAP_ROWS, /* as the unit, or as any row of it: of each row as much is read when sums are written */
    TAGC_OVERLAP_ANYWHERE /* as well, and the shard: a step has read everything but the own row by then */
} tagc_overlap;

typedef struct tagc_exchange_table {
    int id;             /* tagc_exchange */
    size_t state_bytes; /* size of its own state, r->state, which is zeroed when a reducer is made */
    tagc_overlap overlap;
    const tagc_runner *runner;           /* of arrays in host memory; NULL: it has none, and takes no other */
    const tagc_own_options *own_options; /* NULL: tagc_reducer_options are all */
    /* From checked options: the number of values of the residual, 0 if there is none. */
    uint64_t (*residual_elems)(const tagc_reducer_options *options);
    /* Computes sizes and lays out buffers; called twice, see tagc_arena. r->comm is NULL if only sizes are needed. */
    void (*place)(struct tagc_reducer *r, tagc_arena *arena);
    /* Lays out what only a step under way needs, in memory that reducers share (transport/work.h). Called after _place to learn its
     * size, and at the start of each step. */
    void (*place_work)(struct tagc_reducer *r, tagc_arena *arena);
    /* Starts a step: posts nothing, but names the first action. The last one returns without tagc_then. */
    tagc_action_fn start;
    /* Called when the step has ended on all ranks and no message is in progress; may be NULL. */
    void (*end)(struct tagc_reducer *r, int succeeded);
    /* What the rank of a laid-out reducer sends in a step. */
    tagc_status (*volume)(struct tagc_reducer *r, const tagc_volume_data *data, tagc_volume *out);
} tagc_exchange_table;

/* For one that shares nothing. */
void tagc_place_no_work(struct tagc_reducer *r, tagc_arena *arena);

/* The two paths of direct. */
extern const tagc_exchange_table tagc_exchange_whole, tagc_exchange_direct;

/* Of a tagc_exchange in range; NULL if this build leaves it out. */
const tagc_exchange_table *tagc_exchange_of(int id);
/* What steps of these options take, which were checked. may_be_whole: all ranks have host arrays, and none a residual. */
const tagc_exchange_table *tagc_exchange_path(const tagc_reducer_options *options, int may_be_whole);

#endif
