/* Glue between model and engine. */
#include "train/engine.h"

#include "core/status.h"
#include "gpt2/safetensors.h"
#include "launch/over_ranks.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

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

tagc_status tagc_engine_check_tokens(const char *wanted, const tagc_tokens *tokens) {
    tagc_tokens_info info;
    tagc_tokens_get_info(tokens, &info);
    if (!*wanted || !*info.tokenizer || strcmp(wanted, info.tokenizer) == 0) return TAGC_OK;
    return tagc_fail(TAGC_ERR_MISMATCH,
                     "%s holds tokens of tokenizer %s, the model is trained on those of %s",
                     tagc_tokens_path(tokens), info.tokenizer, wanted);
}

/* ---- a batch ---- */

tagc_status tagc_workspace_open(const tagc_gpt2_config *config, int n_batch, int n_tokens,
                                tagc_workspace *out) {
    size_t n = (size_t)n_batch * (size_t)n_tokens;
    *out = (tagc_workspace){.tokens = calloc(n, sizeof *out->tokens),
                            .targets = calloc(n, sizeof *out->targets),
                            .n_batch = n_batch,
                            .n_tokens = n_tokens};
    if (!out->tokens || !out->targets)
        return tagc_fail(TAGC_ERR_MEMORY, "out of memory for a batch of %zu tokens", n);
    return tagc_gpt2_create(config, n_batch, n_tokens, &out->model);
}

void tagc_workspace_close(tagc_workspace *workspace) {
    tagc_gpt2_destroy(workspace->model);
    free(workspace->tokens);
    free(workspace->targets);
    *workspace = (tagc_workspace){0};
}

/* ---- training ---- */

tagc_status tagc_training_open(tagc_training *t, const tagc_fsdp_options *engine) {
    TAGC_TRY(tagc_engine_create(t->rank, &t->model, engine, &t->fsdp));
    return tagc_workspace_open(&t->model, (int)t->options->batch_size, t->n_tokens, &t->workspace);
}

tagc_status tagc_training_step(const tagc_training *t, double lr, double *loss, tagc_fsdp_stats *stats,
                               tagc_busy_times *busy) {
    const tagc_workspace *w = &t->workspace;
    tagc_params params = tagc_engine_params(t->fsdp);
    double sum = 0;
    tagc_busy_take(t->rank->busy, busy); /* what was before this step */
    for (int64_t micro = 0; micro < t->options->accumulate; micro++) {
        double micro_loss = 0;
        TAGC_TRY(t->next_batch(t->context, w->tokens, w->targets));
        TAGC_TRY(tagc_fsdp_forward_begin(t->fsdp, 1));
        TAGC_TRY(tagc_gpt2_forward(w->model, &params, w->tokens, w->targets, w->n_batch, w->n_tokens,
                                   &micro_loss));
        TAGC_TRY(tagc_fsdp_backward_begin(t->fsdp));
        TAGC_TRY(
            tagc_gpt2_backward(w->model, &params, 1.0f)); /* the engine takes the mean over micro-steps */
        sum += micro_loss;
    }
    *loss = sum / (double)t->options->accumulate;
    tagc_fsdp_watch_loss(t->fsdp, *loss);
    TAGC_TRY(tagc_fsdp_step(t->fsdp, lr, stats));
    tagc_busy_take(t->rank->busy, busy);
    return TAGC_OK;
}

void tagc_training_close(tagc_training *t) {
    tagc_workspace_close(&t->workspace);
    tagc_fsdp_destroy(t->fsdp);
}

/* ---- a validation loss ---- */

static uint64_t at_most(uint64_t value, uint64_t most) {
    if (most == 0) most = 1;
    return value < most ? value : most;
}

tagc_status tagc_evaluation_open(const tagc_rank *rank, const tagc_gpt2_config *config,
                                 const tagc_tokens *tokens, int n_batch, int n_tokens, uint64_t n_batches,
                                 tagc_evaluation *out) {
    uint64_t n_ranks = (uint64_t)rank->world_size;
    uint64_t n_sequences = (tagc_tokens_n(tokens) - 1) / (uint64_t)n_tokens;
    *out = (tagc_evaluation){.n_batch = (int)at_most((uint64_t)n_batch, n_sequences / n_ranks)};
    if (n_sequences > 0 && n_sequences < n_ranks) /* none: the loader says what it needs */
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "%s has %" PRIu64 " sequence%s of %d tokens, fewer than there are ranks (%d): a"
                         " validation loss would count some of them twice",
                         tagc_tokens_path(tokens), n_sequences, n_sequences > 1 ? "s" : "", n_tokens,
                         rank->world_size);
    TAGC_TRY(tagc_engine_loader(rank, config, tokens, out->n_batch, n_tokens, NULL, &out->loader));
    out->n_batches =
        at_most(n_batches, tagc_loader_n_windows(out->loader) / ((uint64_t)out->n_batch * n_ranks));
    out->n_tokens = out->n_batches * n_ranks * (uint64_t)out->n_batch * (uint64_t)n_tokens;
    return TAGC_OK;
}

/* Sums go batch by batch and then rank by rank, so that a validation loss is the same number every time. */
tagc_status tagc_evaluate(const tagc_rank *rank, tagc_fsdp *fsdp, const tagc_workspace *w,
                          const tagc_evaluation *e, double *loss) {
    tagc_params params = tagc_engine_params(fsdp);
    double sum = 0;
    TAGC_TRY(tagc_loader_seek(e->loader, 0));
    for (uint64_t batch = 0; batch < e->n_batches; batch++) {
        double batch_loss = 0;
        TAGC_TRY(tagc_loader_next(e->loader, w->tokens, w->targets));
        TAGC_TRY(tagc_fsdp_forward_begin(fsdp, 0));
        TAGC_TRY(tagc_gpt2_forward(w->model, &params, w->tokens, w->targets, e->n_batch, w->n_tokens,
                                   &batch_loss));
        sum += batch_loss;
    }
    *loss = sum / (double)e->n_batches;
    return tagc_mean_over_ranks(rank->comm, loss, 1);
}
