/* The model's tensors put into the engine: what train, eval, generate and export begin with. */
#ifndef TAGC_TRAIN_ENGINE_H
#define TAGC_TRAIN_ENGINE_H

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

#endif
