/* Inside of a comm: lanes, tickets and jobs. What reducers and gatherers are built on.
 *
 *   caller ---submit job---> worker thread (codec stream, FIFO) ---post ticket---> comm thread (transport)
 *   caller ---------------------------------------------------- post ticket---> comm thread
 *
 * The comm thread is the only one to call the transport. It starts the posted tickets of a lane in the order of
 * posting, and polls all that are under way. Tickets of different lanes are independent; tickets of one lane are
 * posted in the same order on all ranks. */
#ifndef TAGC_TRANSPORT_COMM_H
#define TAGC_TRANSPORT_COMM_H

#include "core/status.h"
#include "tagc/transport.h"

/* Fixed lanes. On a transport without TAGC_TRANSPORT_LANES all of them are lane 0, and whoever posts must do
 * so from a job on the worker, so that the order is the order of submission. */
typedef enum tagc_lane {
    TAGC_LANE_REDUCE = 0,
    TAGC_LANE_GATHER = 1,
    TAGC_LANE_CONTROL = 2,
    TAGC_LANE_RELAY = 3 /* of what a gather brought, to the ranks of the own host */
} tagc_lane;

/* One transfer under way. The poster fills the first part and owns the memory until waited for. */
typedef struct tagc_ticket {
    tagc_transfer transfer; /* lane is set by _post */
    tagc_leg leg;
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
/* As tagc_comm_all_gather, its bytes counted as another leg's than control. */
tagc_status tagc_comm_all_gather_as(tagc_comm *comm, tagc_leg leg, const void *send, size_t n_bytes,
                                    void *recv);

/* Work for the worker thread, run in order of submission. The submitter owns the memory until waited for.
 *
 * Where `finish` only waits, the next job's `start` may come before it, so that the wire does not fall silent
 * between two jobs. Whether it does depends on time; the order of posts does not, as finish posts nothing. */
typedef struct tagc_job {
    void (*start)(void *arg); /* may be NULL; posts what needs no waiting */
    tagc_status (*run)(void *arg);
    tagc_status (*finish)(void *arg); /* may be NULL; called when run succeeded */
    void *arg;
    /* filled by the comm: */
    tagc_status status;
    char error[TAGC_ERROR_TEXT_BYTES];
    int state, started; /* private */
    struct tagc_job *next;
} tagc_job;

void tagc_comm_submit(tagc_comm *comm, tagc_job *job);
tagc_status tagc_comm_join(tagc_comm *comm,
                           tagc_job *job); /* the job's status; its text is set for the caller */

int tagc_comm_has_lanes(const tagc_comm *comm);
void tagc_comm_trace(tagc_comm *comm, const char *stream, const char *name, double start_s, double end_s,
                     uint64_t n_bytes, uint64_t tag); /* nothing when no trace function is set */

/* Spare residuals: a reducer writes its new residual into a spare of the same size and swaps the two when the
 * step has succeeded on all ranks, so that a failed or non-finite step changes nothing. Reducers of one size
 * share one spare and take turns. Counted: _acquire per reducer, _release per reducer.
 */
typedef struct tagc_spare {
    uint64_t n_elems;
    float *values; /* swap this pointer with the residual's */
    int n_users;
    int in_use; /* by a step that has written there and has not ended; the worker's alone */
    struct tagc_spare *next;
} tagc_spare;
tagc_status tagc_comm_spare_acquire(tagc_comm *comm, uint64_t n_elems, tagc_spare **out);
void tagc_comm_spare_release(tagc_comm *comm, tagc_spare *spare);

#endif
