/* Ranks of a command: threads of this process over the local transport, or processes that mpirun started.
 *
 * If a rank fails, all ranks end, and one message is printed. */
#ifndef TAGC_LAUNCH_RANKS_H
#define TAGC_LAUNCH_RANKS_H

#include "fsdp/trace.h"
#include "launch/busy.h"
#include "tagc/tagc.h"

enum { TAGC_EXIT_OK = 0, TAGC_EXIT_FAILURE = 1, TAGC_EXIT_USAGE = 2, TAGC_EXIT_INTERRUPTED = 130 };

/* The objects of one rank. */
typedef struct tagc_rank {
    tagc_comm *comm;
    tagc_trace *trace; /* paused; NULL unless the launch asks for it */
    tagc_busy *busy;   /* times of the comm and codec streams */
    int rank, world_size;
    int is_failure_common; /* 1: all ranks return the same failure and nothing is under way, so none has to end the others */
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
    int n_local_ranks; /* default of the local transport; 0: 1 */
    int transport;     /* tagc_launch_transport */
    double timeout_s;
    int blas_threads; /* of a matrix product, per process; 0: this rank's share of the processors */
    int trace;        /* 1: give every rank a trace */
    int has_levels;   /* 1: ranks of a host will have a comm of their own (tagc_comm_split) */
} tagc_launch;

/* Calls run(rank, context) on every rank and returns the exit code of the process. All local ranks share the context, so
 * only one of them may write to it. */
int tagc_ranks_run(const tagc_launch *launch, tagc_rank_fn run, void *context);

/* 1 if tagc_ranks_run would run ranks as threads of this process with this tagc_launch_transport. */
int tagc_ranks_is_local(int transport);

/* This process's rank from the launcher's environment, valid before MPI is started; 0 without a launcher. */
int tagc_ranks_launcher_rank(void);

/* The number of ranks from there; 1 without a launcher. */
int tagc_ranks_launcher_size(void);

/* The command that starts so many ranks on this host: "mpirun -n 2", with what Open MPI wants as root and for more ranks than
 * processors. */
enum { TAGC_MPIRUN_BYTES = 80 };
void tagc_ranks_mpirun(int n_ranks, char text[TAGC_MPIRUN_BYTES]);

/* 1 if stdout is a terminal on which a line can be overwritten. 0 under a launcher: mpirun gives its processes a terminal
 * even if its own output is a file. */
int tagc_ranks_on_terminal(void);

/* Call it with the status of a rank's work, before its objects are destroyed. After a failure it prints the failure and
 * wakes the other ranks, which would otherwise wait for this one until their time-out. Over MPI it ends the job (MPI_Abort),
 * except after an interruption or with is_failure_common. Returns `status`. */
tagc_status tagc_rank_finish(tagc_rank *rank, tagc_status status);

/* Prints "tagc: <text>", unless a lower rank of the job on this host is about to print the same. */
void tagc_ranks_complain(int rank, const char *text);

#endif
