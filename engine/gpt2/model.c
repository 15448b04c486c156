/* Creates and destroys a model: one arena for activations and scratch, laid out for the largest batch. */
#include "gpt2/model.h"

#include "core/memory.h"

#include <limits.h>
#include <stdlib.h>

enum { MAX_LOGITS_BYTES = 1 << 29 }; /* above this, logits are computed in chunks, twice per step */

int tagc_gpt2_head_tensor(const tagc_gpt2_config *config) {
    return config->tied ? TENSOR_WTE : tagc_gpt2_n_tensors(config) - 1;
}

tagc_attention tagc_gpt2_attention(const tagc_gpt2 *model) {
    return (tagc_attention){.kernels = model->kernels,
                            .n_batch = model->n_batch,
                            .n_tokens = model->n_tokens,
                            .n_head = model->config.n_head,
                            .n_embd = model->config.n_embd,
                            .scores = model->scores,
                            .dscores = model->dscores};
}

static void take_normed(tagc_arena *arena, size_t n_rows, size_t n_embd, tagc_normed *normed) {
    normed->x = tagc_arena_take(arena, n_rows * n_embd, sizeof(float));
    normed->mean = tagc_arena_take(arena, n_rows, sizeof(float));
    normed->rstd = tagc_arena_take(arena, n_rows, sizeof(float));
}

static void lay_out(tagc_gpt2 *model, tagc_arena *arena) {
    size_t n_rows = (size_t)model->max_batch * (size_t)model->max_tokens,
           n_embd = (size_t)model->config.n_embd;
    size_t n_layer = (size_t)model->config.n_layer, n_head = (size_t)model->config.n_head;
    size_t n_scores = (size_t)TAGC_ATTENTION_TILE * (size_t)model->max_tokens;
    model->tokens = tagc_arena_take(arena, n_rows, sizeof(int));
    model->targets = tagc_arena_take(arena, n_rows, sizeof(int));
    tagc_block *blocks = tagc_arena_take(arena, n_layer, sizeof *blocks);
    model->blocks = blocks;
    for (size_t i = 0; i < n_layer; i++) {
        tagc_block measured;
        tagc_block *block = blocks ? &blocks[i] : &measured;
        take_normed(arena, n_rows, n_embd, &block->in);
        block->qkv = tagc_arena_take(arena, n_rows * 3 * n_embd, sizeof(float));
        block->attended = tagc_arena_take(arena, n_rows * n_embd, sizeof(float));
        block->lse = tagc_arena_take(arena, n_rows * n_head, sizeof(float));
        take_normed(arena, n_rows, n_embd, &block->mid);
        block->wide = tagc_arena_take(arena, n_rows * 4 * n_embd, sizeof(float));
    }
    take_normed(arena, n_rows, n_embd, &model->out);
    model->final = tagc_arena_take(arena, n_rows * n_embd, sizeof(float));
    model->logits =
        tagc_arena_take(arena, (size_t)model->chunk_rows * (size_t)model->config.vocab_size, sizeof(float));
    model->logits_lse = tagc_arena_take(arena, n_rows, sizeof(float));
    model->norm = tagc_arena_take(arena, n_rows * n_embd, sizeof(float));
    model->active = tagc_arena_take(arena, n_rows * 4 * n_embd, sizeof(float));
    model->scores = tagc_arena_take(arena, n_scores, sizeof(float));
    model->dscores = tagc_arena_take(arena, n_scores, sizeof(float));
    model->dx = tagc_arena_take(arena, n_rows * n_embd, sizeof(float));
    model->dnorm = tagc_arena_take(arena, n_rows * n_embd, sizeof(float));
    model->dwide = tagc_arena_take(arena, n_rows * 4 * n_embd, sizeof(float));
}

/* Rows per chunk: as many as the bound allows, but at least one per sequence (a forward without targets). */
static int head_rows(const tagc_gpt2 *model, size_t max_logits_bytes) {
    int n_rows = model->max_batch * model->max_tokens;
    size_t bound = max_logits_bytes / ((size_t)model->config.vocab_size * sizeof(float));
    if (bound < (size_t)model->max_batch) bound = (size_t)model->max_batch;
    return (size_t)n_rows < bound ? n_rows : (int)bound;
}

tagc_status tagc_gpt2_create(const tagc_gpt2_config *config, int max_batch, int max_tokens, tagc_gpt2 **out) {
    return tagc_gpt2_create_bounded(config, max_batch, max_tokens, MAX_LOGITS_BYTES, out);
}

/* A model without memory. */
static tagc_status begin(const tagc_gpt2_config *config, int max_batch, int max_tokens,
                         size_t max_logits_bytes, tagc_gpt2 *model) {
    *model = (tagc_gpt2){0};
    TAGC_TRY(tagc_gpt2_config_check(config));
    if (max_tokens < 1 || max_tokens > config->block_size)
        return tagc_fail(TAGC_ERR_ARGUMENT, "max_tokens is %d, allowed is 1 to block_size %d", max_tokens,
                         config->block_size);
    int most = INT_MAX / 4 / max_tokens; /* keeps row counts and their offsets far from overflow */
    if (max_batch < 1 || max_batch > most)
        return tagc_fail(
            TAGC_ERR_ARGUMENT,
            "a batch of %d sequences of %d tokens is more than the model can compute: at most %d", max_batch,
            max_tokens, most);
    model->config = *config;
    model->kernels = tagc_kernels_best();
    model->max_batch = max_batch;
    model->max_tokens = max_tokens;
    model->chunk_rows = head_rows(model, max_logits_bytes);
    return TAGC_OK;
}

tagc_status tagc_gpt2_activation_bytes(const tagc_gpt2_config *config, int max_batch, int max_tokens,
                                       uint64_t *n_bytes) {
    tagc_gpt2 model;
    tagc_arena arena = {0};
    TAGC_TRY(begin(config, max_batch, max_tokens, MAX_LOGITS_BYTES, &model));
    lay_out(&model, &arena);
    *n_bytes = arena.overflow ? UINT64_MAX : arena.n_bytes;
    return TAGC_OK;
}

tagc_status tagc_gpt2_create_bounded(const tagc_gpt2_config *config, int max_batch, int max_tokens,
                                     size_t max_logits_bytes, tagc_gpt2 **out) {
    tagc_gpt2 made;
    *out = NULL;
    TAGC_TRY(begin(config, max_batch, max_tokens, max_logits_bytes, &made));
    tagc_gpt2 *model = calloc(1, sizeof *model);
    if (!model) return tagc_fail(TAGC_ERR_MEMORY, "no memory for a model");
    *model = made;
    tagc_arena arena = {0};
    lay_out(model, &arena);
    tagc_status status =
        arena.overflow
            ? tagc_fail(TAGC_ERR_MEMORY, "activations of %d x %d tokens exceed memory", max_batch, max_tokens)
            : tagc_memory_create(arena.n_bytes, "activations", &model->memory);
    if (status != TAGC_OK) {
        tagc_gpt2_destroy(model);
        return status;
    }
    arena = (tagc_arena){.base = model->memory};
    lay_out(model, &arena);
    *out = model;
    return TAGC_OK;
}

void tagc_gpt2_destroy(tagc_gpt2 *model) {
    if (!model) return;
    tagc_memory_destroy(model->memory);
    free(model);
}

const float *tagc_gpt2_logits(const tagc_gpt2 *model) {
    return model->logits;
}
