/* One question of a plan as plain numbers. */
#ifndef TAGC_PLAN_ASK_H
#define TAGC_PLAN_ASK_H

#include "tagc/tagc.h"

/* A GPT-2 of this shape, one way to train it, and what things cost. */
typedef struct tagc_plan_question {
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
    double compute_s;        /* of a step, as measured, in place of flops_per_s; 0: not known */
    double codec_s;          /* per element of all phases of a compressed exchange; 0: takes no time */
    double optimizer_s;      /* per element owned */
} tagc_plan_question;

typedef struct tagc_plan_reply {
    uint64_t n_params;
    double step_s, compute_s, exposed_s; /* exposed: computing waits for the network */
    double gradient_bytes, gather_bytes; /* that a host sends to others in a step */
    /* Of a rank: parameters, gradients and moments in fp32, and with tagc_sharding GRAD a copy of all parameters. */
    uint64_t state_bytes;
    uint64_t residual_bytes; /* what waits to be sent */
} tagc_plan_reply;

/* Counts and simulates one optimizer step. TAGC_ERR_ARGUMENT names the field, its value and what is allowed. */
tagc_status tagc_plan_ask(const tagc_plan_question *question, tagc_plan_reply *reply);

#endif
