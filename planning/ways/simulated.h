/* A plan of data parallelism: for ways to train a GPT of some size, what a step takes on some links, and what hosts send. */
#ifndef TAGC_WAYS_SIMULATED_H
#define TAGC_WAYS_SIMULATED_H

#include "tagc/tagc.h"

enum { TAGC_WAYS_MAX_LINKS = 16, TAGC_WAYS_MAX_ROWS = 6, TAGC_WAYS_MAX_CARD = 5 };

/* What to plan for. */
typedef struct tagc_ways_setup {
    int n_layer, n_embd;
    int hosts, ranks_per_host;
    int n_tokens;                                  /* of a rank and step */
    double links_bytes_per_s[TAGC_WAYS_MAX_LINKS]; /* (n_links) payload of a host's card */
    int n_links;
    double latency_s, host_bytes_per_s; /* between hosts, one way; between ranks of a host */
    double flops_per_s;                 /* of a rank */
    double codec_s;                     /* per element */
} tagc_ways_setup;

typedef struct tagc_ways_row {
    const char *name;
    int compresses;
    double memory_bytes; /* of a rank: parameters, gradients, Adam's moments, copies that stay, residuals */
    double gradient_bytes, parameter_bytes; /* that a host sends to others in a step */
    double n_params, compute_s;
    double step_s[TAGC_WAYS_MAX_LINKS],
        exposed_s[TAGC_WAYS_MAX_LINKS]; /* (n_links) exposed: computing waits */
} tagc_ways_row;

/* What passes a host's network card in a step, in each direction, by a way to send it. */
typedef struct tagc_ways_card {
    char name[96];
    double gradient_bytes, parameter_bytes, rank_bytes; /* the last: of both, for one rank */
} tagc_ways_card;

/* The fastest way with compression beside the fastest without it, on one link. */
typedef struct tagc_ways_answer {
    tagc_verdict verdict;
    const tagc_ways_row *plain, *packed;
    double factor;        /* how many times as fast `packed` is */
    double communication; /* share of a step in which `plain` waits for the network */
} tagc_ways_answer;

typedef struct tagc_ways_plan {
    tagc_ways_row rows[TAGC_WAYS_MAX_ROWS];
    int n_rows;
    tagc_ways_card card[TAGC_WAYS_MAX_CARD];
    int n_card;                                    /* 0: hosts have one rank */
    tagc_ways_answer answers[TAGC_WAYS_MAX_LINKS]; /* (n_links) */
} tagc_ways_plan;

/* The plan points into itself. TAGC_ERR_ARGUMENT names what is wrong with the setup. */
tagc_status tagc_ways_simulate(const tagc_ways_setup *setup, tagc_ways_plan *out);

#endif
