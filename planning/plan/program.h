/* A training pass of GPT-2 as the engine sees it: the order in which tensors are used, and the work between. tests/plan
 * compares it with the calls of the real model. */
#ifndef TAGC_PLAN_PROGRAM_H
#define TAGC_PLAN_PROGRAM_H

#include "gpt2/gpt2.h"

typedef enum tagc_call_kind {
    TAGC_CALL_USE,
    TAGC_CALL_DONE,
    TAGC_CALL_GRAD,
    TAGC_CALL_GRAD_DONE,
    TAGC_CALL_COMPUTE
} tagc_call_kind;

typedef struct tagc_call {
    tagc_call_kind kind;
    int tensor;   /* -1 for COMPUTE */
    double flops; /* of matrix products; COMPUTE only */
} tagc_call;

typedef struct tagc_program {
    tagc_call *calls;
    int n_calls, n_forward; /* the first n_forward calls are the forward pass */
    double flops;           /* of both passes */
} tagc_program;

/* One micro-step over n_batch sequences of n_tokens. */
tagc_status tagc_program_create(const tagc_gpt2_config *config, int n_batch, int n_tokens, tagc_program *out);
void tagc_program_destroy(tagc_program *program);

#endif
