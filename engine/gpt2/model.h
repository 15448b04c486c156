/* Inside of a model: what a forward keeps for its backward, and the scratch of both.
 *
 * Rows are the B * T positions, C is n_embd, V the vocabulary. Backward recomputes what is cheap (outputs of layer norms and
 * of gelu, attention probabilities) instead of keeping it. */
#ifndef TAGC_GPT2_MODEL_H
#define TAGC_GPT2_MODEL_H

#include "core/status.h"
#include "gpt2/attention.h"
#include "gpt2/gpt2.h"

/* Places of a block's tensors, counted from its first. Weight and bias are neighbours. */
enum {
    TENSOR_WTE = 0,
    TENSOR_WPE = 1,
    TENSOR_BLOCKS = 2,
    BLOCK_LN_1 = 0,
    BLOCK_QKV = 2,
    BLOCK_PROJECTION = 4,
    BLOCK_LN_2 = 6,
    BLOCK_MLP_IN = 8,
    BLOCK_MLP_OUT = 10,
    BLOCK_N_TENSORS = 12
};

/* Input of a layer norm with the statistics of its rows. */
typedef struct tagc_normed {
    float *x;    /* (rows, C) */
    float *mean; /* (rows) */
    float *rstd; /* (rows) */
} tagc_normed;

typedef struct tagc_block {
    tagc_normed in;  /* the residual stream before attention */
    float *qkv;      /* (rows, 3 C) */
    float *attended; /* (rows, C) attention's output before its projection */
    float *lse;      /* (B, n_head, T) */
    tagc_normed mid; /* the residual stream before the feed-forward layer */
    float *wide;     /* (rows, 4 C) before gelu */
} tagc_block;

struct tagc_gpt2 {
    tagc_gpt2_config config;
    const tagc_kernels *kernels;
    int max_batch, max_tokens;
    int n_batch, n_tokens; /* of the last forward */
    int can_backward;      /* the last forward had targets, and no backward has followed */
    int *tokens, *targets; /* (rows) of the last forward */
    tagc_block *blocks;    /* (n_layer) */
    tagc_normed out;       /* the residual stream after the last block */
    float *final;          /* (rows, C) after the last norm */

    /* The head works on chunk_rows positions at a time. `chunk` is the one whose logits are in the buffer, -1 for none.
     * If all rows fit into one chunk, backward finds its logits there and need not recompute them. */
    int chunk_rows, chunk;
    float *logits;     /* (chunk_rows, V) */
    float *logits_lse; /* (rows) */

    float *norm;             /* (rows, C) scratch: output of a layer norm */
    float *active;           /* (rows, 4 C) scratch: output of gelu */
    float *scores, *dscores; /* (TILE, T) scratch of attention */
    float *dx;               /* (rows, C) gradient of the residual stream */
    float *dnorm;            /* (rows, C) */
    float *dwide;            /* (rows, 4 C), also holds the gradient of qkv (rows, 3 C) */
    void *memory;
};

static inline size_t tagc_gpt2_rows(const tagc_gpt2 *model) {
    return (size_t)model->n_batch * (size_t)model->n_tokens;
}

/* tagc_gpt2_create with the bound on the logits' buffer. */
tagc_status tagc_gpt2_create_bounded(const tagc_gpt2_config *config, int max_batch, int max_tokens,
                                     size_t max_logits_bytes, tagc_gpt2 **out);

/* The tensor that is the head's matrix. */
int tagc_gpt2_head_tensor(const tagc_gpt2_config *config);
tagc_attention tagc_gpt2_attention(const tagc_gpt2 *model);

/* y (rows, C) = the norm of in->x. */
void tagc_gpt2_norm_rows(const tagc_gpt2 *model, const tagc_normed *in, const float *weight,
                         const float *bias, float *y);

/* Puts the logits of chunk number `chunk` into the buffer; returns its rows. */
size_t tagc_gpt2_chunk_logits(tagc_gpt2 *model, const float *head, int chunk);

#endif
