/* The model over the engine, which knows no models: what train, bench, eval, generate and export begin with, a training
 * step and a validation loss. */
#ifndef TAGC_TRAIN_ENGINE_H
#define TAGC_TRAIN_ENGINE_H

#include "data/data.h"
#include "fsdp/fsdp.h"
#include "gpt2/gpt2.h"
#include "launch/ranks.h"
#include "train/options.h"

/* Collective. An engine over the tensors of `config`. */
tagc_status tagc_engine_create(tagc_rank *rank, const tagc_gpt2_config *config,
                               const tagc_fsdp_options *options, tagc_fsdp **out);

/* Local. Random weights of `seed`, or those of a safetensors file. */
tagc_status tagc_engine_init_random(tagc_fsdp *fsdp, const tagc_gpt2_config *config, uint64_t seed);
tagc_status tagc_engine_init_file(tagc_fsdp *fsdp, const tagc_gpt2_config *config, const char *path);

tagc_params tagc_engine_params(tagc_fsdp *fsdp);

/* Local. The rank's own batches of n_batch sequences of n_tokens. seed: of their order; NULL: that of the text. */
tagc_status tagc_engine_loader(const tagc_rank *rank, const tagc_gpt2_config *config,
                               const tagc_tokens *tokens, int n_batch, int n_tokens, const int64_t *seed,
                               tagc_loader **out);

/* Local. TAGC_ERR_MISMATCH when another tokenizer than `wanted` made the tokens; what either does not know ("") is let pass. */
tagc_status tagc_engine_check_tokens(const char *wanted, const tagc_tokens *tokens);

/* ---- a batch ---- */

/* What a model computes on. */
typedef struct tagc_workspace {
    tagc_gpt2 *model;
    int *tokens, *targets; /* (n_batch, n_tokens) */
    int n_batch, n_tokens;
} tagc_workspace;

/* Local. Call _close after failure, too. */
tagc_status tagc_workspace_open(const tagc_gpt2_config *config, int n_batch, int n_tokens,
                                tagc_workspace *out);
void tagc_workspace_close(tagc_workspace *workspace);

/* ---- training ---- */

typedef struct tagc_training {
    /* Set by the caller before anything else. */
    tagc_rank *rank;
    const tagc_train_options *options;
    tagc_gpt2_config model;
    int n_tokens; /* per sequence */
    /* Fills tokens and targets (batch_size, n_tokens) for the next micro-step. */
    tagc_status (*next_batch)(void *context, int *tokens, int *targets);
    void *context; /* of next_batch */
    /* Open. */
    tagc_fsdp *fsdp;
    tagc_workspace workspace;
} tagc_training;

/* Collective. The engine, whose weights the caller fills in, and the workspace. engine: that of the options. */
tagc_status tagc_training_open(tagc_training *training, const tagc_fsdp_options *engine);
/* Collective. One optimizer step. loss: of this rank, mean over micro-steps. busy: of the streams, in this step. */
tagc_status tagc_training_step(const tagc_training *training, double lr, double *loss, tagc_fsdp_stats *stats,
                               tagc_busy_times *busy);
void tagc_training_close(tagc_training *training);

/* ---- a validation loss ---- */

typedef struct tagc_evaluation {
    tagc_loader *loader;
    int n_batch;        /* sequences per rank and batch */
    uint64_t n_batches; /* per rank */
    uint64_t n_tokens;  /* of all ranks, in all batches */
} tagc_evaluation;

/* Local. The first batches of the text. n_batch and n_batches become less where they would read a token twice;
 * TAGC_ERR_ARGUMENT if there is less than a sequence per rank. loader: the caller destroys it. */
tagc_status tagc_evaluation_open(const tagc_rank *rank, const tagc_gpt2_config *config,
                                 const tagc_tokens *tokens, int n_batch, int n_tokens, uint64_t n_batches,
                                 tagc_evaluation *out);

/* Collective. Mean loss over the batches of all ranks, the same on all. workspace: of at least n_batch sequences. */
tagc_status tagc_evaluate(const tagc_rank *rank, tagc_fsdp *fsdp, const tagc_workspace *workspace,
                          const tagc_evaluation *evaluation, double *loss);

#endif
