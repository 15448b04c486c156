/* Steps of a direct reducer with kernels whose launches are enqueued ahead of the messages: by the thread of the hooks, in three
 * streams. The step itself (exchange/direct) then sends and receives what is in pinned memory, and calls nothing of CUDA.
 *
 *   out    encode | lengths and bodies, each as long as it can be, to pinned memory
 *   add    bodies of other ranks, their lengths and the orders to the device | add; all-reduce: encode the sums | these to pinned memory
 *   back   all-reduce: bodies of sums to the device | decode | settle: undoes the step if it does not count
 *
 * ahead_unit.c puts flags between them. Launches have fixed grids: kernels read lengths and orders when they run.
 *
 * Residuals. A step writes its new residual into the spare of its buffer, and when the exchange is enqueued, the two swap (store.h). So
 * a later step can be enqueued before this one has ended; `settle` makes the new one what the old one was, where the step did not
 * count. */
#ifndef TAGC_GPU_AHEAD_H
#define TAGC_GPU_AHEAD_H

#include "exchange/direct/direct.h"
#include "gpu/store.h"

typedef struct tagc_ahead {
    tagc_reducer *reducer;
    tagc_queue *queue;
    tagc_code_options fragment, sums; /* that its batches are for */
    tagc_batch *made[TAGC_N_BATCHES];
    uint64_t n_moves[TAGC_N_BATCHES]; /* of the memory that they work in */
    tagc_batch_row *rows;             /* (ranks) of the next run */
    tagc_body *bodies;                /* (ranks) */
    tagc_store *store;
    size_t at_residual, n_stored; /* in the store, bytes; 0 bytes: there is no residual */
    /* Head of a room, in both memories: | orders | lengths (ranks) | results (ranks) | results of sums (2) |. Rest: | bodies (ranks,
     * stride) |. */
    size_t at_results, at_sums, head_bytes, stride, n_bytes;

    /* The thread of the hooks' alone. Of the step that has a buffer: its number, and its arrays on the device. */
    struct {
        uint64_t number;
        const void *gradient;
        float *output;
    } steps[MAX_BUFFERS];

    /* The step under way: its room, and whether all bodies are in it. */
    gpu_room room;
    int has_bodies;
} tagc_ahead;

/* Collective. A direct reducer whose steps are those of a model's unit: gradient, output and residual are in the device's memory. Functions
 * of the residual take host memory. TAGC_ERR_UNSUPPORTED on all ranks unless the exchange is direct. */
tagc_status tagc_reducer_create_in(tagc_store *store, tagc_comm *comm, const tagc_reducer_options *options,
                                   tagc_reducer **out);
/* Local. Makes one that has no residual and no steps. A unit of such probes takes the memory that a unit of such reducers will need, which
 * stays with the queue and the store; then destroy both. */
tagc_status tagc_reducer_probe_in(tagc_store *store, tagc_comm *comm, const tagc_reducer_options *options,
                                  tagc_reducer **out);

/* The reducer is in a store. */
tagc_status tagc_ahead_create(tagc_queue *queue, tagc_reducer *reducer, tagc_ahead **out);
void tagc_ahead_destroy(tagc_ahead *ahead); /* accepts NULL */
/* Makes sizes of work memory as large as batches of this reducer need. */
void tagc_ahead_add_work(const tagc_ahead *ahead, size_t n_bytes[N_WORKS]);
/* The most pieces of work that a step puts into streams behind its first flag. */
size_t tagc_ahead_n_places(const tagc_ahead *ahead);
/* TAGC_ERR_STATE if the reducer's options are others by now. */
tagc_status tagc_ahead_check(const tagc_ahead *ahead);

/* ---- the thread of the hooks; the device is entered ---- */

/* number: of the step. */
tagc_status tagc_ahead_put_out(tagc_ahead *ahead, int b, const gpu_room *room, uint64_t number,
                               const void *gradient, float *output);
tagc_status tagc_ahead_put_add(tagc_ahead *ahead, int b, const gpu_room *room);
tagc_status tagc_ahead_put_back(tagc_ahead *ahead, int b, const gpu_room *room);
/* When that of all parts is enqueued, and the store has turned. */
void tagc_ahead_turn(tagc_ahead *ahead);

/* ---- the thread that exchanges ---- */

/* number: as of _put_out. */
tagc_status tagc_ahead_begin(tagc_ahead *ahead, uint64_t number, const gpu_room *room);
/* Waits until the step has all bodies or has ended, lets the device add them, and sees whether sums are finite. */
void tagc_ahead_add(tagc_ahead *ahead, uint64_t number);
tagc_status tagc_ahead_end(tagc_ahead *ahead, tagc_reducer_stats *stats);
/* A step of a reducer with kernels that has nothing in streams, since this rank has failed: it tells the others. _pass, when all parts
 * have begun, lets it go on; it ends as any. */
tagc_status tagc_ahead_refuse(tagc_reducer *reducer, uint64_t number, tagc_status failure, const char *text);
void tagc_ahead_pass(tagc_reducer *reducer);
/* NULL: it was refused. */
tagc_ahead *tagc_ahead_of(const tagc_reducer *reducer);
/* Makes the orders of a room negative, while the device does not read them. */
void tagc_orders_refuse(const gpu_room *room);

#endif
