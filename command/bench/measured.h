/* What rounds.c measures of each arm, and report.c prints. */
#ifndef TAGC_BENCH_MEASURED_H
#define TAGC_BENCH_MEASURED_H

#include "bench/bench.h"
#include "data/data.h"

/* One step, mean over ranks. All members are doubles, so that one loop averages them. */
typedef struct tagc_bench_iteration {
    double total_s, compute_s, wait_gather_s, wait_reduce_s, optimizer_s, comm_s, codec_s, exchange_s,
        gradient_s;
    double exposed_s; /* both waits */
    double phase_s[TAGC_N_PHASES];
} tagc_bench_iteration;
enum { TAGC_BENCH_N_FIGURES = sizeof(tagc_bench_iteration) / sizeof(double) };

typedef struct tagc_measured_arm {
    const tagc_arm *arm;
    tagc_bench_iteration *iterations; /* (rounds, steps) */
    double *round_s, *speedups;       /* (rounds) medians, and those of the first arm over them */
    uint64_t n_params, n_compressed, n_mild;
    double n_sent, n_union, n_bytes[TAGC_N_LEGS]; /* of rank 0, summed over n_steps */
    double
        card_bytes; /* to ranks of other hosts: by the ranks of a host, mean over hosts, summed over n_steps */
    int n_steps;
    tagc_fsdp_memory memory;
    tagc_result_spread total, exposed, speedup;
    tagc_bench_iteration median; /* member by member */
} tagc_measured_arm;

typedef struct tagc_measured_arms {
    tagc_bench *bench;
    int n, n_rounds, n_steps;
    tagc_measured_arm
        *arms; /* (n + 1): the last one is the first again, for by how much an arm differs from itself */
    tagc_result_spread again; /* that one over the first, round by round */
    tagc_tokens *tokens;      /* NULL: synthetic */
} tagc_measured_arms;

int tagc_measured_name_width(const tagc_measured_arms *arms);

/* Local: the tokens of --data, or NULL without. */
tagc_status tagc_bench_open_tokens(const tagc_bench_plan *plan, tagc_tokens **out);

/* After the last round: medians and spreads. */
void tagc_measured_summarize(tagc_measured_arms *arms);
/* Prints the tables and the recommendation, and adds them to the result. */
tagc_status tagc_measured_report(const tagc_measured_arms *arms);

#endif
