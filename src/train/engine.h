/* The model's tensors put into the engine: what train, eval, generate and export begin with. */
#ifndef TAGC_TRAIN_ENGINE_H
#define TAGC_TRAIN_ENGINE_H

#include "data/data.h"
#include "fsdp/fsdp.h"
#include "gpt2/gpt2.h"
#include "launch/ranks.h"

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

#endif
