/* Causal self-attention of one layer, all sequences and heads. */
#ifndef TAGC_GPT2_ATTENTION_H
#define TAGC_GPT2_ATTENTION_H

#include "gpt2/kernels.h"

enum { TAGC_ATTENTION_TILE = 64 }; /* queries that are worked on together */

typedef struct tagc_attention {
    const tagc_kernels *kernels;
    int n_batch, n_tokens, n_head, n_embd;
    float *scores;  /* (TILE, n_tokens) scratch */
    float *dscores; /* (TILE, n_tokens) scratch of backward */
} tagc_attention;

/* qkv (B, T, 3, n_embd) -> out (B, T, n_embd) and lse (B, n_head, T), the log of the sum of exp of each row of scores.
 * Backward recomputes the probabilities from lse. */
void tagc_attention_forward(const tagc_attention *shape, const float *qkv, float *out, float *lse);

/* dout (B, T, n_embd) -> dqkv (B, T, 3, n_embd), overwritten. */
void tagc_attention_backward(const tagc_attention *shape, const float *qkv, const float *out,
                             const float *lse, const float *dout, float *dqkv);

#endif
