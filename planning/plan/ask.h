/* One question of a plan as plain numbers: what `python -m tagc plan` asks libtagc-plan.so, which pip installs beside libtagc.so.
 * The library holds the planner that `tagc plan` uses, without what reads and writes JSON. */
#ifndef TAGC_PLAN_ASK_H
#define TAGC_PLAN_ASK_H

#include "tagc/tagc.h"

/* A GPT-2 of this shape, one way to train it, and what things cost. */
typedef struct tagc_plan_question {
    size_t struct_bytes;
    int n_layer, n_embd, n_vocab;
    int n_batch, n_tokens, n_micro_steps; /* of a rank */
    int world_size, ranks_per_host;
    /* 2: the ranks of a host add their gradients, and share what they gather, before anything leaves the host. 1: each rank
     * exchanges with all others by itself. */
    int n_levels;
    int sharding; /* tagc_sharding */
    int gather;   /* tagc_gather_kind */
    /* tagc_format of the gradients' values. With FP32 and BF16 every value is sent and nothing is compressed; sparsity is 0 then. */
    int format;
    double sparsity;         /* of compressed parameters; attention takes the default that goes with it */
    double link_bytes_per_s; /* payload of a host, each direction */
    double latency_s;        /* one way */
    double host_bytes_per_s; /* between ranks of one host */
    double flops_per_s;      /* of a rank, that it reaches in matrix products */
    double codec_s;          /* per element of all phases of a compressed exchange; 0: takes no time */
    double optimizer_s;      /* per element owned */
} tagc_plan_question;

typedef struct tagc_plan_reply {
    size_t struct_bytes;
    uint64_t n_params;
    double step_s, compute_s, exposed_s; /* exposed: computing waits for the network */
    double gradient_bytes, gather_bytes; /* that a host sends to others in a step */
    /* Of a rank: parameters, gradients and moments in fp32, and with tagc_sharding GRAD a copy of all parameters. */
    uint64_t state_bytes;
    uint64_t residual_bytes; /* what waits to be sent */
    char why[256];           /* "" or why there is no answer */
} tagc_plan_reply;

/* What a reducer or a gatherer with these options holds, of ranks that are so many (exchange/volume.h). n_before: reducers
 * whose residual is of the same size. */
struct tagc_exchange_memory;
TAGC_API tagc_status tagc_plan_reducer_memory(const tagc_reducer_options *options, int world_size,
                                              int n_before, struct tagc_exchange_memory *out);
TAGC_API tagc_status tagc_plan_gatherer_memory(const tagc_gatherer_options *options, int world_size,
                                               struct tagc_exchange_memory *out);
/* Of steps under way: the largest unit takes `most`, all together `total`. */
TAGC_API uint64_t tagc_plan_work_bytes(uint64_t most, uint64_t total);

/* Counts and simulates one optimizer step. On failure reply->why says what is wrong. */
TAGC_API tagc_status tagc_plan_ask(const tagc_plan_question *question, tagc_plan_reply *reply);

#endif
