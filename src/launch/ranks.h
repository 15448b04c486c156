/* Ranks of a command: threads of this process over the local transport, or processes that mpirun started.
 *
 * Whichever rank fails first, all end, and one message is printed. */
#ifndef TAGC_LAUNCH_RANKS_H
#define TAGC_LAUNCH_RANKS_H

#include "fsdp/trace.h"
#include "launch/busy.h"
#include "tagc/tagc.h"

enum { TAGC_EXIT_OK = 0, TAGC_EXIT_FAILURE = 1, TAGC_EXIT_USAGE = 2, TAGC_EXIT_INTERRUPTED = 130 };

/* What one rank has to work with. */
typedef struct tagc_rank {
    tagc_comm *comm;
    tagc_trace *trace; /* paused; NULL when the launch asks for none */
    tagc_busy *busy;   /* what the streams beside compute have done */
    int rank, world_size;
    void *job; /* private */
} tagc_rank;

typedef tagc_status (*tagc_rank_fn)(tagc_rank *rank, void *context);

typedef enum tagc_launch_transport {
    TAGC_LAUNCH_AUTO = 0,
    TAGC_LAUNCH_LOCAL = 1,
    TAGC_LAUNCH_MPI = 2
} tagc_launch_transport;

typedef struct tagc_launch {
    int n_ranks;       /* as asked for; 0: not */
    int n_local_ranks; /* of the local transport when not asked for; 0: 1 */
    int transport;     /* tagc_launch_transport */
    double timeout_s;
    int blas_threads; /* of a matrix product, per process; 0: this rank's share of the processors */
    int trace;        /* 1: give every rank a trace */
} tagc_launch;

/* Runs run(rank, context) on every rank and returns the exit code of the process. run gets the same context
 * on all local ranks: what it writes there it writes for one rank only. */
int tagc_ranks_run(const tagc_launch *launch, tagc_rank_fn run, void *context);

/* 1 when tagc_ranks_run would make threads of this process with this tagc_launch_transport. */
int tagc_ranks_is_local(int transport);

/* This process's rank as its launcher tells it, before MPI is started; 0 without a launcher. */
int tagc_ranks_launcher_rank(void);

/* 1 when stdout is a terminal that a line can be rewritten on. mpirun gives its processes one even where its
 * own output goes to a file, so under a launcher the answer is 0. */
int tagc_ranks_on_terminal(void);

/* To be called with what a rank's work came to, before its objects are destroyed: after a failure it says so
 * and wakes the peers, which would otherwise wait for this rank until their time-out. Returns `status`. */
tagc_status tagc_rank_finish(tagc_rank *rank, tagc_status status);

/* Prints "tagc: <text>" for people, unless a lower rank of this host's job is about to say the same. */
void tagc_ranks_complain(int rank, const char *text);

#endif
