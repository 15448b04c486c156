/* tagc bench: measures link, memory and codec, and whether compression makes training faster here.
 *
 *   cli/bench.c    options, and the order of the parts
 *   link.c         the link; mpi.c: plain MPI
 *   exchanges.c    each exchange alone: the share of the link that it fills
 *   codec.c        the time of memory alone, and the codec compared with it
 *   rounds.c       iterations of the real engine; the arms take turns
 *   advice.c       the recommendation
 *
 * Every part is collective. All ranks get the same figures and decide alike; rank 0 prints and keeps the result. */
#ifndef TAGC_BENCH_BENCH_H
#define TAGC_BENCH_BENCH_H

#include "bench/arms.h"
#include "files/result_file.h"
#include "launch/hosts.h"
#include "launch/ranks.h"

typedef struct tagc_bench_options {
    tagc_train_options train; /* must come first: rows shared with tagc train use its offsets */
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

/* Read-only for all ranks of a process. */
typedef struct tagc_bench_plan {
    tagc_bench_options options; /* must come first: where its rows point */
    const tagc_parsed *parsed;
    tagc_gpt2_config model;
    int n_tokens; /* per sequence */
    int parts;    /* tagc_bench_part, combined by | */
    tagc_arm *arms;
    int n_arms;
} tagc_bench_plan;

typedef struct tagc_bench {
    tagc_rank *rank;
    const tagc_bench_plan *plan;
    tagc_hosts hosts;
    int is_mpi;
    double all_to_all_bytes_per_s; /* of the link, sent per rank; 0: not known */
    double floor_s_per_elem;       /* of memory; 0: not known */
    json_t *result;                /* rank 0; NULL on the others */
} tagc_bench;

/* Prints on rank 0. */
void tagc_bench_say(const tagc_bench *bench, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Adds `value` to the result if there is one. Takes ownership of it. */
void tagc_bench_put(tagc_bench *bench, const char *name, json_t *value);

tagc_status tagc_bench_link(tagc_bench *bench);
tagc_status tagc_bench_exchanges(tagc_bench *bench);
tagc_status tagc_bench_floor(tagc_bench *bench);
tagc_status tagc_bench_codec(tagc_bench *bench);
tagc_status tagc_bench_arms(tagc_bench *bench);
/* Local: finds errors that would otherwise end the arms' turns after minutes of other work. */
tagc_status tagc_bench_arms_check(const tagc_bench *bench);

/* ---- recommendation ---- */

typedef struct tagc_bench_candidate {
    const char *name;
    int sharding, is_compressed;
    const double *round_s; /* (n_rounds) median iteration of each */
    double total_s, exposed_s, compute_s, codec_s, comm_s;
    double link_s;  /* time of its bytes at the link's full rate; 0: not known */
    double n_bytes; /* sent in an iteration: between hosts if these have several ranks; 0: not known */
} tagc_bench_candidate;

enum { TAGC_BENCH_REASON_BYTES = 896, TAGC_BENCH_LEAST_ROUNDS = 5 };

/* Of the fastest arm with compression beside the fastest without. */
typedef struct tagc_bench_advice {
    tagc_verdict verdict; /* unknown without one of either, and with fewer than TAGC_BENCH_LEAST_ROUNDS */
    int arm;              /* -1: leave compression off, or unknown */
    double speedup;       /* NaN without one of either */
    char reason[TAGC_BENCH_REASON_BYTES];
} tagc_bench_advice;

/* again: an arm's second turn of a round over its first, of all rounds. What is the same arm differs by so much. */
void tagc_bench_advise(const tagc_bench_candidate *candidates, int n, int n_rounds, tagc_result_spread again,
                       tagc_bench_advice *out);

#endif
