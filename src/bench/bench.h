/* tagc bench: what this link, this memory and this codec give, and whether compression pays here.
 *
 *   cli/bench.c          options, the order of the parts
 *   measure/hosts.c      which ranks share a host, what memory there is
 *   measure/link.c       latency and bandwidth of the link as the transport gives them
 *   measure/mpi.c        plain MPI, beside which ours are put
 *   measure/exchanges.c  each exchange alone: what share of the link it fills
 *   measure/codec.c      the memory floor, and the codec beside it
 *   bench/rounds.c       iterations of the real engine, arms taking turns
 *   bench/advice.c       the recommendation
 *
 * Every part is collective; all ranks see the same figures and come to the same decisions, rank 0 prints and keeps the
 * result. */
#ifndef TAGC_BENCH_BENCH_H
#define TAGC_BENCH_BENCH_H

#include "bench/arms.h"
#include "train/ranks.h"
#include "files/result_file.h"
#include "fsdp/layout.h"

typedef struct tagc_bench_options {
    tagc_train_options train; /* first: rows shared with tagc train have the offsets of its struct */
    const char *arms, *only, *json;
    int64_t rounds, warmup_steps, steps_per_round;
} tagc_bench_options;

typedef enum tagc_bench_part {
    TAGC_BENCH_LINK = 1,
    TAGC_BENCH_EXCHANGES = 2,
    TAGC_BENCH_FLOOR = 4,
    TAGC_BENCH_CODEC = 8,
    TAGC_BENCH_ARMS = 16
} tagc_bench_part;

/* What all ranks of a process read. */
typedef struct tagc_bench_plan {
    const tagc_command *command;
    tagc_bench_options options;
    int argc;
    char **argv;
    tagc_gpt2_config model;
    int n_tokens; /* per sequence */
    int parts;    /* tagc_bench_part, together */
    tagc_arm *arms;
    int n_arms;
} tagc_bench_plan;

enum { TAGC_BENCH_HOST_BYTES = 64 };

typedef struct tagc_bench_hosts {
    int n_hosts;
    int *of_rank;                         /* (W) */
    int *leaders;                         /* (n_hosts) lowest rank of each */
    int n_here;                           /* ranks on this rank's host */
    char (*names)[TAGC_BENCH_HOST_BYTES]; /* (n_hosts) */
} tagc_bench_hosts;

typedef struct tagc_bench {
    tagc_rank *rank;
    const tagc_bench_plan *plan;
    tagc_bench_hosts hosts;
    int is_mpi;
    double all_to_all_bytes_per_s; /* of the link, sent per rank; 0: not known */
    double floor_s_per_elem;       /* of memory; 0: not known */
    json_t *result;                /* rank 0; NULL on the others */
} tagc_bench;

/* Prints on rank 0. */
void tagc_bench_say(const tagc_bench *bench, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Takes `value` over and puts it into the result, where there is one. */
void tagc_bench_put(tagc_bench *bench, const char *name, json_t *value);
/* "1.94 Gbit/s", "61.2 us"; text: at least 24 bytes. */
const char *tagc_bench_rate(double bytes_per_s, char *text);
const char *tagc_bench_time(double seconds, char *text);

/* Collective: over the n doubles of all ranks, the largest of each, or the mean. */
tagc_status tagc_bench_max(tagc_comm *comm, double *values, int n);
tagc_status tagc_bench_mean(tagc_comm *comm, double *values, int n);

/* Local: what an engine of these options would look like. */
tagc_status tagc_bench_layout(const tagc_bench *bench, const tagc_fsdp_options *options, tagc_layout **out);

tagc_status tagc_bench_hosts_find(tagc_comm *comm, tagc_bench_hosts *out);
void tagc_bench_hosts_destroy(tagc_bench_hosts *hosts);
/* Local: refuses `what` when n_bytes for each rank of this host are more than it has free. */
tagc_status tagc_bench_check_memory(const tagc_bench *bench, const char *what, uint64_t n_bytes);

tagc_status tagc_bench_link(tagc_bench *bench);
tagc_status tagc_bench_exchanges(tagc_bench *bench);
tagc_status tagc_bench_floor(tagc_bench *bench);
tagc_status tagc_bench_codec(tagc_bench *bench);
tagc_status tagc_bench_arms(tagc_bench *bench);
/* Local: what would end the arms' turns only after minutes of other work. */
tagc_status tagc_bench_arms_check(const tagc_bench *bench);

/* ---- one transfer by plain MPI, or by the local transport ---- */

typedef struct tagc_bench_wire {
    tagc_comm *comm;
    int is_mpi;
    double timeout_s;
    char *send, *recv;                  /* (n_max) what anyone is sent; (W, n_max) */
    uint64_t n_max;                     /* bytes per peer */
    uint64_t *n_send, *n_recv;          /* (W) of this transfer; from a rank r to recv + r * n_max */
    struct tagc_part *sends, *receives; /* (W) the same, for the local transport */
} tagc_bench_wire;

tagc_status tagc_bench_wire_create(const tagc_bench *bench, uint64_t n_max, tagc_bench_wire *out);
void tagc_bench_wire_destroy(tagc_bench_wire *wire);
/* Collective: seconds, of the slowest rank, in which every rank sends n_bytes to each other one `n_times`. */
tagc_status tagc_bench_wire_all(tagc_bench_wire *wire, uint64_t n_bytes, int n_times, double *seconds);

/* ---- measure/mpi.c: only while nothing of the comm's is under way, because its thread calls MPI too ---- */

tagc_status tagc_bench_mpi_exchange(const tagc_bench_wire *wire);
tagc_status tagc_bench_mpi_reduce_scatter(const float *send, float *recv, uint64_t shard);
tagc_status tagc_bench_mpi_all_reduce(const float *send, float *recv, uint64_t n);
tagc_status tagc_bench_mpi_all_gather(const float *send, float *recv, uint64_t shard);

/* ---- recommendation ---- */

typedef struct tagc_bench_candidate {
    const char *name;
    int sharding, is_compressed;
    const double *round_s; /* (n_rounds) median iteration of each */
    double total_s, exposed_s, compute_s, codec_s, comm_s;
    double link_s; /* its bytes at the link's full rate; 0: not known */
    uint64_t memory_bytes;
} tagc_bench_candidate;

enum { TAGC_BENCH_REASON_BYTES = 768 };

typedef struct tagc_bench_advice {
    int arm; /* -1: leave compression off */
    double
        speedup; /* of the best compressed arm over the best without compression; NaN without one of either */
    char reason[TAGC_BENCH_REASON_BYTES];
} tagc_bench_advice;

void tagc_bench_advise(const tagc_bench_candidate *candidates, int n, int n_rounds, tagc_bench_advice *out);

#endif
