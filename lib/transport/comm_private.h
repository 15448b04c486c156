/* The comm object, shared by comm.c (life, tickets), worker.c (tasks), spares.c, control.c (direct calls of the caller)
 * and transfer.c (checks of transfers). */
#ifndef TAGC_TRANSPORT_COMM_PRIVATE_H
#define TAGC_TRANSPORT_COMM_PRIVATE_H

#include "transport/comm.h"
#include <pthread.h>

/* A thread that runs tasks. */
typedef struct tagc_worker {
    tagc_comm *comm;
    pthread_cond_t work; /* signalled when a task was submitted, a ticket is done, or the comm stops */
    tagc_task *tasks, **tasks_end; /* submitted tasks that the worker has not seen yet */
    pthread_t thread;
    int is_started;     /* the creator's */
    int is_idle;        /* nothing to do */
    int looks_again;    /* since it looked last, a task may have become ready without a ticket */
    int awaits_tickets; /* idle, with tasks of which none could go on when so many tickets were done: */
    uint64_t n_done_seen;
} tagc_worker;

enum { TAGC_WORKER_REDUCE = 0, TAGC_WORKER_GATHER = 1, TAGC_N_WORKERS = 2 };

struct tagc_comm {
    const tagc_transport_ops *ops;
    void *context; /* the transport's */
    pid_t process; /* that has the threads */
    int rank, world_size;
    tagc_comm_options options;

    pthread_mutex_t lock; /* guards everything below, except where said */
    pthread_cond_t wake;  /* of the comm thread: signalled on post, break and stop; monotonic clock */
    pthread_cond_t done;  /* those of n_waiters wait on it; signalled when a ticket is done */
    pthread_cond_t ended; /* of waiters: a task is done, or a step may take its memory (work.h) */
    int n_waiters;
    tagc_ticket *posted, **posted_end;
    uint64_t n_bytes_sent[TAGC_N_LEGS], n_bytes_received[TAGC_N_LEGS];
    uint64_t *sent_to;  /* (W) bytes, by peer */
    int32_t *names;     /* (W) for messages */
    tagc_status broken; /* other than TAGC_OK: never reset; what follows then stays constant */
    int failed_rank;    /* where it began, or -1 */
    char error[TAGC_ERROR_TEXT_BYTES];
    char reason[TAGC_ERROR_TEXT_BYTES]; /* why, for other ranks: without what concerns this one alone */

    tagc_worker workers[TAGC_N_WORKERS];
    uint64_t n_posted, n_done; /* tickets */
    tagc_spares *spares;
    uint64_t n_held_bytes[TAGC_N_HELD];
    uint32_t world, n_made; /* see identity.h */
    struct tagc_identity *identities;
    struct tagc_works *works; /* see work.h */

    tagc_split_fn split;      /* NULL: this transport cannot */
    tagc_comm *whole, *parts; /* that it was split from; the first of those split from it */
    tagc_comm *next_part;     /* of the same whole, with the whole's lock */

    int n_users; /* reducers and gatherers made from it */
    int is_closed; /* destroyed by the caller: threads and transport are gone, and n_users still need the rest */

    int stopping;        /* of the workers: no more tasks come */
    int has_last_ticket; /* of the comm thread: the workers have ended, so that no more tickets come */
    int is_started;      /* the comm thread; the creator's */
    pthread_t comm_thread;

    /* The caller's collective call, of which there is one at a time; not guarded. */
    tagc_part *control_sends, *control_receives; /* (W - 1,) each */
    unsigned char *control_scratch;              /* (W,) */
};

/* transfer.c: TAGC_ERR_ARGUMENT if a table has another version of transport.h, or a transfer breaks its rules. */
tagc_status tagc_transport_check_abi(uint32_t abi);
tagc_status tagc_transfer_check(const tagc_transfer *transfer, int rank, int world_size);
uint64_t tagc_parts_bytes(const tagc_part *parts, uint32_t n_parts);

void *tagc_comm_worker_main(void *worker);

/* split.c: its whole knows nothing of it any more. */
void tagc_comm_leave_whole(tagc_comm *comm);

#endif
