/* The GPT-2 family: embeddings, n_layer blocks of attention and feed-forward, a head. Forward, backward,
 * sampling.
 *
 * The model owns activations only. Parameters and gradients come through tagc_params (model/tensor.h), and
 * nothing here knows whether other ranks exist. Matrices of linear layers are (in, out), row-major, as
 * Hugging Face stores them; embeddings and the head are (vocabulary, n_embd). */
#ifndef TAGC_GPT2_GPT2_H
#define TAGC_GPT2_GPT2_H

#include "model/tensor.h"

typedef struct tagc_gpt2_config {
    int n_layer;    /* [1, 1000] */
    int n_head;     /* [1, n_embd], divides n_embd */
    int n_embd;     /* [1, 65536] */
    int block_size; /* most positions, [1, 1048576] */
    int vocab_size; /* [1, 16777216] */
    int tied;       /* 1: the head is the token embedding */
} tagc_gpt2_config;

/* "gpt2-162m" (12 layers, 12 heads, 768, 1024 positions, vocabulary 50304, untied), "gpt2-124m" (the same,
 * 50257, tied), "demo" (4, 4, 128, 128, bytes, untied), "tiny" (2, 2, 32, 32, bytes, untied). */
tagc_status tagc_gpt2_preset(const char *name, tagc_gpt2_config *out);
tagc_status tagc_gpt2_config_check(const tagc_gpt2_config *config);

/* The table of tensors of a checked config: wte, wpe, 12 per block, ln_f.weight, ln_f.bias, lm_head when
 * untied. */
int tagc_gpt2_n_tensors(const tagc_gpt2_config *config);
void tagc_gpt2_tensor(const tagc_gpt2_config *config, int tensor, tagc_tensor_info *out);
/* All of them, n_tensors; the caller frees the table. On failure *out is NULL. */
tagc_status tagc_gpt2_tensors(const tagc_gpt2_config *config, tagc_tensor_info **out);
uint64_t tagc_gpt2_n_params(const tagc_gpt2_config *config);

/* Initial values [first, first + n) of a tensor: normal with deviation 0.02 (projections back onto the
 * residual stream 0.02 / sqrt(2 n_layer)), zeros for biases, ones for norm weights. A value depends on the
 * seed, the tensor and its place only, so any rank can make any part. */
void tagc_gpt2_init_tensor(const tagc_gpt2_config *config, int tensor, uint64_t seed, size_t first, size_t n,
                           float *values);

typedef struct tagc_gpt2 tagc_gpt2;

/* Activations and scratch for up to max_batch sequences of up to max_tokens <= block_size positions. */
tagc_status tagc_gpt2_create(const tagc_gpt2_config *config, int max_batch, int max_tokens, tagc_gpt2 **out);
void tagc_gpt2_destroy(tagc_gpt2 *model); /* accepts NULL */
/* What _create would allocate; UINT64_MAX: more than can be addressed. It fails as _create does. */
tagc_status tagc_gpt2_activation_bytes(const tagc_gpt2_config *config, int max_batch, int max_tokens,
                                       uint64_t *n_bytes);

/* tokens (B, T). With targets (B, T): *mean_loss is the mean cross-entropy in nats over all B * T positions,
 * and a backward may follow. With NULL: only the last position of each sequence goes through the head (see
 * _logits), and mean_loss may be NULL. A token outside the vocabulary is TAGC_ERR_ARGUMENT. */
tagc_status tagc_gpt2_forward(tagc_gpt2 *model, const tagc_params *params, const int *tokens,
                              const int *targets, int n_batch, int n_tokens, double *mean_loss);

/* Adds the gradient of loss_scale * mean loss of the last forward, which had targets; once per forward. */
tagc_status tagc_gpt2_backward(tagc_gpt2 *model, const tagc_params *params, float loss_scale);

/* After a forward without targets: (B, vocab_size), the logits that follow each sequence. Valid until the
 * next forward. */
const float *tagc_gpt2_logits(const tagc_gpt2 *model);

/* Draws a token from logits (n_vocab). temperature 0 takes the largest (the first of equals); top_k in [1,
 * n_vocab] keeps the top_k largest, 0 keeps all. *rng is the generator's state and moves on. scratch
 * (n_vocab). */
int tagc_gpt2_sample(const float *logits, int n_vocab, double temperature, int top_k, uint64_t *rng,
                     float *scratch);

#endif
