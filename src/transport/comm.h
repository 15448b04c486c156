/* Inside of a comm: lanes, tickets and jobs. What reducers and gatherers are built on.
 *
 *   caller ---submit job---> worker thread (codec stream) ---post ticket---> comm thread (transport)
 *   caller ---------------------------------------------------- post ticket---> comm thread
 *
 * The comm thread is the only one to call the transport. It starts the posted tickets of a lane in the order of
 * posting, and polls all that are under way. Tickets of different lanes are independent; tickets of one lane are
 * posted in the same order on all ranks. */
#ifndef TAGC_TRANSPORT_COMM_H
#define TAGC_TRANSPORT_COMM_H

#include "core/memory.h"
#include "core/status.h"
#include "tagc/transport.h"

/* Fixed lanes. On a transport without TAGC_TRANSPORT_LANES all of them are lane 0, and whoever posts must do
 * so from a job on the worker, so that the order is the order of submission. */
typedef enum tagc_lane {
    TAGC_LANE_REDUCE = 0,
    TAGC_LANE_GATHER = 1,
    TAGC_LANE_CONTROL = 2,
    TAGC_LANE_RELAY = 3, /* of what a gather brought, to the ranks of the own host */
    /* Reducers use one lane per round of a step, so that the rounds of several steps can be under way at once. */
    TAGC_LANE_REDUCE_2 = 4,
    TAGC_LANE_REDUCE_3 = 5,
    TAGC_LANE_REDUCE_4 = 6,
    TAGC_LANE_REDUCE_5 = 7
} tagc_lane;
#define TAGC_ALL_LANES 0xffu /* as a set: bit l is lane l */

/* One transfer under way. The poster fills the first part and owns the memory until waited for. */
typedef struct tagc_ticket {
    tagc_transfer transfer; /* lane is set by _post */
    tagc_leg leg;
    tagc_leg
        part_leg; /* so many of the bytes to and from other ranks count for this leg, the rest for `leg` */
    uint64_t part_sent, part_received;
    uint64_t tag; /* for events */
    /* NULL, or a ticket posted before: this one, and what is posted after it on its lane, starts when that is complete.
     * It sends what that one received, and nobody has to wait in between. Must stay until this one is waited for. */
    const struct tagc_ticket *after;
    /* filled by the comm: */
    uint64_t n_bytes_sent, n_bytes_received; /* to and from other ranks */
    tagc_status status;
    int state; /* private */
    double start_s;
    void *request;
    struct tagc_ticket *next;
} tagc_ticket;

void tagc_comm_post(tagc_comm *comm, tagc_lane lane,
                    tagc_ticket *ticket); /* never blocks, never fails: see wait */
tagc_status tagc_comm_wait(tagc_comm *comm,
                           tagc_ticket *ticket); /* blocks; text of the failure set for the caller */
int tagc_comm_is_done(tagc_comm *comm, const tagc_ticket *ticket); /* 1 when _wait would not block */
/* Bytes of a ticket that is done turn out to belong to another leg. */
void tagc_comm_recount(tagc_comm *comm, tagc_leg from, tagc_leg to, uint64_t sent, uint64_t received);
/* As tagc_comm_all_gather, its bytes counted as another leg's than control. */
tagc_status tagc_comm_all_gather_as(tagc_comm *comm, tagc_leg leg, const void *send, size_t n_bytes,
                                    void *recv);

/* Work for the worker thread. The submitter owns the memory until waited for.
 *
 * Either a job is one call of `run`, which may block, or, with `is_ready`, it is a sequence of them: each posts what it
 * can, says in `more` whether there is another, and in `is_ready` when that would not block. The worker runs whichever of
 * the submitted jobs can go on, the oldest first, so that the waits of several jobs pass at the same time.
 *
 * Tickets of one lane must be posted in the same order on all ranks, whatever happens when. So a job says on which lanes
 * its next run may post, and on which it and all later ones may; it goes on only when no older job may still post on one of
 * the former. Within a job the order is the program's. Without lanes every set that is not empty is lane 0, and a job
 * begins to post when the one before it posts no more. */
typedef struct tagc_job {
    tagc_status (*run)(void *arg);
    int (*is_ready)(void *arg); /* NULL: run is all there is, and may post on any lane */
    void *arg;
    uint32_t next_lanes,
        later_lanes; /* sets of lanes; set before _submit and by every run that leaves `more` */
    int more;        /* set by run, with TAGC_OK: there is another */
    double idle_s;   /* set by the comm: the worker had nothing to do for so long before this run */
    /* filled by the comm: */
    tagc_status status;
    char error[TAGC_ERROR_TEXT_BYTES];
    int state; /* private */
    struct tagc_job *next;
} tagc_job;

void tagc_comm_submit(tagc_comm *comm, tagc_job *job);
/* As _submit, on a worker of its own where the comm has lanes: gathers and reducers do not wait for each other's codec. Its
 * jobs post on TAGC_LANE_GATHER and TAGC_LANE_RELAY only. */
void tagc_comm_submit_gather(tagc_comm *comm, tagc_job *job);
tagc_status tagc_comm_join(tagc_comm *comm,
                           tagc_job *job); /* the job's status; its text is set for the caller */
int tagc_comm_has_ended(tagc_comm *comm, const tagc_job *job); /* 1 when _join would not block */

int tagc_comm_has_lanes(const tagc_comm *comm);
void tagc_comm_trace(tagc_comm *comm, const char *stream, const char *name, double start_s, double end_s,
                     uint64_t n_bytes, uint64_t tag); /* nothing when no trace function is set */

/* Spare residuals: a reducer writes its new residual into a spare of the same size and swaps the two when the
 * step has succeeded on all ranks, so that a failed or non-finite step changes nothing. A step that finds no spare waits.
 * Reducers of one size and heap share their spares: one, and as many more as they are reducers and as fit into
 * TAGC_MORE_SPARE_BYTES, so that the steps of small units can be under way together. Counted: _acquire per reducer, _release
 * per reducer. */
#define TAGC_MORE_SPARE_BYTES ((uint64_t)32 << 20)
#define TAGC_MOST_SPARES 64
typedef struct tagc_spares {
    uint64_t n_elems;
    const tagc_heap *heap; /* NULL: the process's memory */
    int n_users, n_made, n_free;
    float *free[TAGC_MOST_SPARES];
    struct tagc_spares *next;
} tagc_spares;
tagc_status tagc_comm_spares_acquire(tagc_comm *comm, uint64_t n_elems, const tagc_heap *heap,
                                     tagc_spares **out);
void tagc_comm_spares_release(tagc_comm *comm, tagc_spares *spares);
/* How many are made for so many reducers. */
int tagc_comm_n_spares(uint64_t n_elems, int n_users);
/* NULL when all are taken. */
float *tagc_comm_spare_take(tagc_comm *comm, tagc_spares *spares);
void tagc_comm_spare_give(tagc_comm *comm, tagc_spares *spares, float *spare);

#endif
