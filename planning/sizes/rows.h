/* The rows of a plan: every strategy of the catalogue that makes a difference, asked of the simulator for a GPT of some size on some
 * links, or of the formulas of a mesh. */
#ifndef TAGC_SIZES_ROWS_H
#define TAGC_SIZES_ROWS_H

#include "sizes/catalogue.h"
#include "sizes/tokens.h"

/* ---- data parallelism alone: what a step takes on each link, and what hosts send ---- */

enum { TAGC_TIMES_MAX_LINKS = 16, TAGC_TIMES_MAX_ROWS = 6, TAGC_TIMES_MAX_CARD = 5 };

/* What to plan for. */
typedef struct tagc_times_setup {
    int n_layer, n_embd;
    int hosts, ranks_per_host;
    int n_tokens, n_micro_steps;                    /* of a rank and micro-step; of a step */
    double links_bytes_per_s[TAGC_TIMES_MAX_LINKS]; /* (n_links) payload of a host's card */
    int n_links;
    double latency_s, host_bytes_per_s; /* between hosts, one way; between ranks of a host */
    double flops_per_s;                 /* of a rank */
    double compute_s;                   /* of a step, in place of flops_per_s; 0: not known */
    double codec_s;                     /* per element */
} tagc_times_setup;

typedef struct tagc_times_row {
    const char *name;
    int compresses;
    const tagc_strategy *strategy;
    double memory_bytes; /* of a rank: parameters, gradients, Adam's moments, copies that stay, residuals */
    double gradient_bytes, parameter_bytes; /* that a host sends to others in a step */
    double n_params, compute_s;
    double step_s[TAGC_TIMES_MAX_LINKS],
        exposed_s[TAGC_TIMES_MAX_LINKS]; /* (n_links) exposed: computing waits */
} tagc_times_row;

/* What passes a host's network card in a step, in each direction, by how it is sent. */
typedef struct tagc_times_card {
    char name[96];
    double gradient_bytes, parameter_bytes, rank_bytes; /* the last: of both, for one rank */
} tagc_times_card;

/* The fastest strategy with compression beside the fastest without it, on one link. */
typedef struct tagc_times_answer {
    tagc_verdict verdict;
    const tagc_times_row *plain, *packed;
    double factor;        /* how many times as fast `packed` is */
    double communication; /* share of a step in which `plain` waits for the network */
} tagc_times_answer;

typedef struct tagc_times_plan {
    tagc_times_row rows[TAGC_TIMES_MAX_ROWS];
    int n_rows;
    tagc_times_card card[TAGC_TIMES_MAX_CARD];
    int n_card;                                      /* 0: hosts have one rank */
    tagc_times_answer answers[TAGC_TIMES_MAX_LINKS]; /* (n_links) */
} tagc_times_plan;

/* The plan points into itself. TAGC_ERR_ARGUMENT names what is wrong with the setup. */
tagc_status tagc_times_make(const tagc_times_setup *setup, tagc_times_plan *out);

/* ---- a mesh: what each strategy holds and sends ---- */

typedef struct tagc_mesh_row {
    const char *name;
    int compresses;
    int stage; /* the rank of the pipeline that holds most */
    double device[TAGC_MESH_N_KINDS], host[TAGC_MESH_N_KINDS];
    double device_all, host_all;
} tagc_mesh_row;

/* Bytes sent in a step, of a kind of parallelism or of a strategy. */
typedef struct tagc_mesh_sent {
    char name[96];
    int compresses;
    tagc_mesh_bytes bytes;
} tagc_mesh_sent;

enum { TAGC_MESH_MAX_ROWS = 8, TAGC_MESH_MAX_SENT = 4 + 2 + 2 * TAGC_MESH_MAX_ROWS + 1 };

typedef struct tagc_mesh_plan {
    tagc_mesh_reply any; /* of some strategy: what does not depend on it */
    double n_tokens;     /* of a step, of all ranks */
    double compute_s;    /* of a rank and step, without what is recomputed */
    tagc_mesh_row rows[TAGC_MESH_MAX_ROWS];
    int n_rows;
    tagc_mesh_sent sent[TAGC_MESH_MAX_SENT];
    int n_sent;
    tagc_tokens_reply tokens[TAGC_TIMES_MAX_LINKS]; /* (n_token_links) */
    int n_token_links;                              /* 0: no token leaves its host */
} tagc_mesh_plan;

/* Of a kind of memory (tagc_mesh_kind). */
const char *tagc_mesh_kind_name(int kind);

/* The strategies that differ on this mesh. The question's sharding, format, sparsity and gather have no meaning; its forward and
 * backward are those of compress_stage(), those of tokens of Collectives. TAGC_ERR_ARGUMENT names what is wrong with the question. */
tagc_status tagc_mesh_plan_make(const tagc_mesh_question *question, double flops_per_s, tagc_mesh_plan *out);

/* Adds what the experts' all-to-alls take on a link, if tokens leave their host. card_bytes_per_s: of a host. codec_s: of
 * tagc_tokens_question. */
tagc_status tagc_mesh_plan_add_tokens(const tagc_mesh_question *question, double latency_s,
                                      double card_bytes_per_s, const double codec_s[2], tagc_mesh_plan *plan);

#endif
