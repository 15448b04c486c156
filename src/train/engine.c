/* Glue between the model's table of tensors and the engine, which knows no models. */
#include "train/engine.h"

#include "core/status.h"
#include "gpt2/safetensors.h"
#include <stdlib.h>

tagc_status tagc_engine_create(tagc_rank *rank, const tagc_gpt2_config *config,
                               const tagc_fsdp_options *options, tagc_fsdp **out) {
    tagc_tensor_info *tensors;
    *out = NULL;
    TAGC_TRY(tagc_gpt2_tensors(config, &tensors));
    tagc_status status =
        tagc_fsdp_create(rank->comm, tensors, tagc_gpt2_n_tensors(config), options, rank->trace, out);
    free(tensors);
    return status;
}

typedef struct random_fill {
    const tagc_gpt2_config *config;
    uint64_t seed;
} random_fill;

static tagc_status fill_random(void *context, int tensor, size_t first, size_t n, float *values) {
    const random_fill *fill = context;
    tagc_gpt2_init_tensor(fill->config, tensor, fill->seed, first, n, values);
    return TAGC_OK;
}

tagc_status tagc_engine_init_random(tagc_fsdp *fsdp, const tagc_gpt2_config *config, uint64_t seed) {
    random_fill fill = {config, seed};
    return tagc_fsdp_fill(fsdp, fill_random, &fill);
}

static tagc_status fill_file(void *context, int tensor, size_t first, size_t n, float *values) {
    return tagc_gpt2_weights_read(context, tensor, first, n, values);
}

tagc_status tagc_engine_init_file(tagc_fsdp *fsdp, const tagc_gpt2_config *config, const char *path) {
    tagc_gpt2_weights *weights = NULL;
    TAGC_TRY(tagc_gpt2_weights_open(path, config, &weights));
    tagc_status status = tagc_fsdp_fill(fsdp, fill_file, weights);
    tagc_gpt2_weights_close(weights);
    return status;
}

tagc_params tagc_engine_params(tagc_fsdp *fsdp) {
    return (tagc_params){.context = fsdp,
                         .use = tagc_fsdp_use,
                         .done = tagc_fsdp_done,
                         .grad = tagc_fsdp_grad,
                         .grad_done = tagc_fsdp_grad_done};
}

tagc_status tagc_engine_loader(const tagc_rank *rank, const tagc_gpt2_config *config,
                               const tagc_tokens *tokens, int n_batch, int n_tokens, const int64_t *seed,
                               tagc_loader **out) {
    tagc_loader_options options;
    tagc_loader_options_init(&options);
    options.n_batch = n_batch;
    options.n_tokens = n_tokens;
    options.rank = rank->rank;
    options.world_size = rank->world_size;
    options.vocab_size = (uint32_t)config->vocab_size;
    options.shuffle = seed != NULL;
    if (seed) options.seed = (uint64_t)*seed;
    return tagc_loader_create(tokens, &options, out);
}
