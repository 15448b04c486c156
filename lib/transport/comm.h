/* Inside of a comm: lanes, tickets and tasks. Reducers and gatherers are built on them.
 *
 *   caller ---submit task---> worker thread (codec) ---post ticket---> comm thread (transport)
 *   caller --------------------------------------------post ticket---> comm thread
 *
 * Only the comm thread calls the transport. It starts the tickets of a lane in the order of posting and polls all started
 * ones. Tickets of different lanes are independent. All ranks must post the tickets of a lane in the same order. */
#ifndef TAGC_TRANSPORT_COMM_H
#define TAGC_TRANSPORT_COMM_H

#include "core/memory.h"
#include "core/status.h"
#include "tagc/transport.h"
#include "transport/identity.h"

/* The lanes. On a transport without TAGC_TRANSPORT_LANES all of them are lane 0, and only tasks on the worker may post, so
 * that the order is that of submission. */
typedef enum tagc_lane {
    TAGC_LANE_REDUCE = 0,
    TAGC_LANE_GATHER = 1,
    TAGC_LANE_CONTROL = 2,
    TAGC_LANE_RESTS = 3, /* of bodies of a gather that are longer than expected */
    /* Each kind of transfer in a reducer's step has a lane, so that transfers of several steps can be in progress. */
    TAGC_LANE_REDUCE_2 = 4,
    TAGC_LANE_REDUCE_3 = 5,
    TAGC_LANE_REDUCE_4 = 6,
    TAGC_LANE_REDUCE_5 = 7
} tagc_lane;
#define TAGC_ALL_LANES 0xffu /* a set of lanes: bit l is lane l */
enum { TAGC_N_LANES = 8 };

/* One transfer. The poster fills the first part. The ticket's memory must stay until tagc_comm_wait returns. */
typedef struct tagc_ticket {
    tagc_transfer transfer; /* lane is set by _post */
    tagc_leg leg;
    tagc_leg part_leg; /* how many of its bytes count as this leg; the others count as `leg` */
    uint64_t part_sent, part_received;
    uint64_t tag;            /* for events */
    const tagc_identity *of; /* the reducer or gatherer, for messages; NULL: neither */
    /* filled by the comm: */
    uint64_t n_bytes_sent, n_bytes_received; /* to and from other ranks */
    tagc_status status;
    int state; /* private */
    double start_s;
    void *request;
    struct tagc_ticket *next;
} tagc_ticket;

/* Never blocks, never fails: see wait. */
void tagc_comm_post(tagc_comm *comm, tagc_lane lane, tagc_ticket *ticket);
/* Blocks; sets the caller's text of the failure. */
tagc_status tagc_comm_wait(tagc_comm *comm, tagc_ticket *ticket);
int tagc_comm_is_done(tagc_comm *comm, const tagc_ticket *ticket); /* 1 when _wait would not block */
/* Writes the bytes sent to each rank since the comm was created, (W). */
void tagc_comm_sent_to(const tagc_comm *comm, uint64_t *sent);
/* Moves bytes of a complete ticket to another leg. */
void tagc_comm_recount(tagc_comm *comm, tagc_leg from, tagc_leg to, uint64_t sent, uint64_t received);
/* Like tagc_comm_all_gather, but its bytes count as `leg`, not as control. */
tagc_status tagc_comm_all_gather_as(tagc_comm *comm, tagc_leg leg, const void *send, size_t n_bytes,
                                    void *recv, size_t n_recv_bytes);

/* Work for the worker thread. The submitter keeps the memory until the task was waited for.
 *
 * A task without `is_ready` is one call of `run`, which may block. A task with `is_ready` is a sequence of calls. Each
 * posts what it can and sets `more` if another follows; `is_ready` tells whether that one would not block. The
 * worker runs any submitted task that can go on, the oldest first, so that several tasks wait at the same time.
 *
 * All ranks must post the tickets of a lane in the same order. So a task declares on which lanes its next run may post,
 * and on which its next and all later runs may. It runs only if no older task may still post on a lane of the first set.
 * Within a task the program's order decides. Without lanes, every set that is not empty is lane 0: a task starts to
 * post when the one before it has posted its last ticket. */
typedef struct tagc_task {
    tagc_status (*run)(void *arg);
    int (*is_ready)(void *arg); /* NULL: `run` is called once, and may post on any lane */
    void *arg;
    /* Sets of lanes; set before _submit and by every run that sets `more`. */
    uint32_t next_lanes, later_lanes;
    int more;      /* set by a run that returns TAGC_OK: another one follows */
    double idle_s; /* set by the comm: how long the worker was idle before this run */
    /* filled by the comm: */
    tagc_status status;
    char error[TAGC_ERROR_TEXT_BYTES];
    int state; /* private */
    struct tagc_task *next;
} tagc_task;

void tagc_comm_submit(tagc_comm *comm, tagc_task *task);
/* Like _submit, but if the comm has lanes the task runs on a second worker, so that gathers and reducers do not wait for
 * each other's codec. Its tasks post on TAGC_LANE_GATHER and TAGC_LANE_RESTS only. */
void tagc_comm_submit_gather(tagc_comm *comm, tagc_task *task);
/* Returns the task's status; sets the caller's text. */
tagc_status tagc_comm_join(tagc_comm *comm, tagc_task *task);
int tagc_comm_has_ended(tagc_comm *comm, const tagc_task *task); /* 1 when _join would not block */
/* Has workers ask `is_ready` again, whose answer may be another for a reason that is no ticket. */
void tagc_comm_look_again(tagc_comm *comm);

/* Breaks the comm with a status and the last text, and tells the peers: for damage after which ranks cannot know what the others do
 * next. rank: that sent it. Returns the status. */
tagc_status tagc_comm_give_up(tagc_comm *comm, tagc_status status, int rank);
/* 1: every transfer fails from now on. */
int tagc_comm_is_broken(tagc_comm *comm);

/* A reducer or gatherer holds its comm, so that the caller may destroy them in any order. After tagc_comm_destroy the
 * comm is closed: it has no threads and no transport, and the last _let_go frees it. */
void tagc_comm_hold(tagc_comm *comm);
void tagc_comm_let_go(tagc_comm *comm);
/* In a fork of its process a comm has no threads, and its lock may be held for ever: nothing may be waited for or freed. */
int tagc_comm_is_fork(const tagc_comm *comm);
/* TAGC_ERR_STATE if the comm is closed or a fork's: a task that is submitted now would never run. */
tagc_status tagc_comm_check_open(tagc_comm *comm);

/* For transports that change some. from: NULL: the defaults. */
tagc_status tagc_comm_read_options(const tagc_comm_options *from, tagc_comm_options *options);
/* What messages call a rank. */
int tagc_comm_name(const tagc_comm *comm, int rank);

/* ---- a comm of some ranks of another ---- */

/* The ranks of a new comm: those that said the same. */
typedef struct tagc_split_group {
    int color, index, n; /* this rank's number in it, of n */
    int leader;          /* its rank 0, as a rank of the comm */
} tagc_split_group;

/* What a transport does for it, collective over the whole comm. options: of the new comm. */
typedef tagc_status (*tagc_split_fn)(tagc_comm *comm, const tagc_split_group *group,
                                     const tagc_comm_options *options, tagc_comm **out);
void tagc_comm_set_split(tagc_comm *comm, tagc_split_fn split);

/* Collective. Makes a comm of those ranks that pass the same color, in their order. It has the options of `comm`, messages call its ranks
 * as those of `comm`, and it is aborted with it. Destroy it first. TAGC_ERR_UNSUPPORTED over a transport that cannot. */
tagc_status tagc_comm_split(tagc_comm *comm, int color, tagc_comm **out);

int tagc_comm_has_lanes(const tagc_comm *comm);
/* Does nothing if no trace function is set. */
void tagc_comm_trace(tagc_comm *comm, const char *stream, const char *name, double start_s, double end_s,
                     uint64_t n_bytes, uint64_t tag);

/* What objects of the comm hold, for tagc_comm_memory. */
typedef enum tagc_held {
    TAGC_HELD_RESIDUAL,
    TAGC_HELD_RESIDUAL_THERE, /* on a device */
    TAGC_HELD_BUFFERS,
    TAGC_N_HELD
} tagc_held;
/* n_bytes: more, or if negative less. */
void tagc_comm_count(tagc_comm *comm, tagc_held what, int64_t n_bytes);

/* Spare residuals. A reducer writes its new residual into a spare of the same size. It swaps the two when the step has
 * succeeded on all ranks, so a failed or non-finite step changes nothing. A step that finds no spare waits. Reducers of
 * one size and heap share their spares: one, plus one per further reducer as long as they fit into
 * more_work_bytes of the comm's options, so that several steps of small units can be in progress. Each reducer calls _acquire and
 * _release once. */
#define TAGC_MOST_SPARES 64
typedef struct tagc_spares {
    uint64_t n_bytes;
    const tagc_heap *heap;
    int n_users, n_made, n_free;
    void *free[TAGC_MOST_SPARES];
    struct tagc_spares *next;
} tagc_spares;
tagc_status tagc_comm_spares_acquire(tagc_comm *comm, uint64_t n_bytes, const tagc_heap *heap,
                                     tagc_spares **out);
void tagc_comm_spares_release(tagc_comm *comm, tagc_spares *spares);
/* The number of spares for that many reducers, with that many more_work_bytes. */
int tagc_comm_n_spares(uint64_t more_bytes, uint64_t n_bytes, int n_users);
/* NULL when all are taken. */
void *tagc_comm_spare_take(tagc_comm *comm, tagc_spares *spares);
void tagc_comm_spare_give(tagc_comm *comm, tagc_spares *spares, void *spare);

#endif
