/* What the all-to-alls of layers with experts send and take in a step: tokens to their experts and back, and the gradients of both; torch's
 * own in the tensor's type beside `Collectives.tokens()`. Bytes are those of the code that sends them. Tokens are spread evenly, and
 * nothing is overlapped. `tagc plan` and `tagc advise` ask it. */
#ifndef TAGC_SIZES_TOKENS_H
#define TAGC_SIZES_TOKENS_H

#include "tagc/policy.h"
#include "tagc/tagc.h"

typedef struct tagc_tokens_question {
    size_t struct_bytes;
    int world_size, ranks_per_host; /* over which experts are spread */
    int n_experts, n_active;        /* of a layer; that a token goes to */
    double n_tokens;                /* of a rank and call, [1, 2^32] */
    int width, element_bytes;       /* values of a token; 2: bf16, 4: fp32 */
    double n_forward, n_backward; /* all-to-alls of a step: 2 of a layer; forward 4, where it is recomputed */
    int forward, backward;        /* tagc_format: BF16 (whole), INT8 or INT4 */
    int block;                    /* values of a scale */
    double codec_s[2];            /* per value that crosses, encoded and decoded: forward, backward */
    double latency_s, bytes_per_s; /* of a message between hosts; what a rank sends, all at once */
    double torch_bytes_per_s;      /* in torch's own all-to-all; 0: the same */
    double compute_s;              /* of a step; 0: not known, and communication alone is compared */
} tagc_tokens_question;

/* Of torch's own, then of tagc's. */
typedef struct tagc_tokens_reply {
    size_t struct_bytes;
    double host_bytes[2]; /* to other hosts in a step, in each direction */
    double comm_s[2];     /* of a step, codec included */
    int verdict;          /* tagc_verdict: where it does not pay, leave it off */
    char why[256];        /* "" or why there is no answer */
} tagc_tokens_reply;

/* On failure reply->why names the field, its value and what is allowed. */
TAGC_API tagc_status tagc_plan_tokens(const tagc_tokens_question *question, tagc_tokens_reply *reply);

#endif
