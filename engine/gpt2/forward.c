/* The forward pass, from tokens to the mean loss.
 *
 *   x = wte[token] + wpe[position]
 *   n_layer times:  x += attention(norm(x)),  x += mlp(norm(x))
 *   loss = cross-entropy of norm(x) head^T */
#include "gpt2/model.h"

#include <cblas.h>
#include <string.h>

typedef struct layer {
    const float *weight, *bias;
} layer;

static tagc_status use_layer(const tagc_params *params, int tensor, layer *out) {
    TAGC_TRY(params->use(params->context, tensor, &out->weight));
    return params->use(params->context, tensor + 1, &out->bias);
}

static void done_layer(const tagc_params *params, int tensor) {
    params->done(params->context, tensor);
    params->done(params->context, tensor + 1);
}

void tagc_gpt2_norm_rows(const tagc_gpt2 *model, const tagc_normed *in, const float *weight,
                         const float *bias, float *y) {
    size_t n_rows = tagc_gpt2_rows(model), n_embd = (size_t)model->config.n_embd;
    for (size_t i = 0; i < n_rows; i++)
        model->kernels->norm(in->x + i * n_embd, in->mean[i], in->rstd[i], weight, bias, y + i * n_embd,
                             n_embd);
}

/* y (rows, C) = norm(in->x), filling in's statistics. */
static tagc_status norm(tagc_gpt2 *model, const tagc_params *params, int tensor, const tagc_normed *in,
                        float *y) {
    size_t n_rows = tagc_gpt2_rows(model), n_embd = (size_t)model->config.n_embd;
    layer use;
    TAGC_TRY(use_layer(params, tensor, &use));
    for (size_t i = 0; i < n_rows; i++)
        model->kernels->norm_statistics(in->x + i * n_embd, n_embd, &in->mean[i], &in->rstd[i]);
    tagc_gpt2_norm_rows(model, in, use.weight, use.bias, y);
    done_layer(params, tensor);
    return TAGC_OK;
}

/* y (rows, n_out) = x (rows, n_in) weight + bias, plus `add` (rows, n_out) unless it is NULL. */
static tagc_status linear(tagc_gpt2 *model, const tagc_params *params, int tensor, const float *x,
                          size_t n_in, const float *add, float *y, size_t n_out) {
    size_t n_rows = tagc_gpt2_rows(model);
    layer use;
    TAGC_TRY(use_layer(params, tensor, &use));
    for (size_t i = 0; i < n_rows; i++) {
        if (add)
            model->kernels->add(add + i * n_out, use.bias, y + i * n_out, n_out);
        else
            memcpy(y + i * n_out, use.bias, n_out * sizeof *y);
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)n_rows, (int)n_out, (int)n_in, 1, x,
                (int)n_in, use.weight, (int)n_out, 1, y, (int)n_out);
    done_layer(params, tensor);
    return TAGC_OK;
}

static tagc_status embed(tagc_gpt2 *model, const tagc_params *params, float *x) {
    size_t n_embd = (size_t)model->config.n_embd, n_tokens = (size_t)model->n_tokens;
    const float *wte, *wpe;
    TAGC_TRY(params->use(params->context, TENSOR_WTE, &wte));
    TAGC_TRY(params->use(params->context, TENSOR_WPE, &wpe));
    for (size_t i = 0; i < tagc_gpt2_rows(model); i++)
        model->kernels->add(wte + (size_t)model->tokens[i] * n_embd, wpe + i % n_tokens * n_embd,
                            x + i * n_embd, n_embd);
    done_layer(params, TENSOR_WTE);
    return TAGC_OK;
}

/* From the block's in.x to `next` (rows, C). */
static tagc_status block_forward(tagc_gpt2 *model, const tagc_params *params, int index, float *next) {
    const tagc_block *block = &model->blocks[index];
    int first = TENSOR_BLOCKS + index * BLOCK_N_TENSORS;
    size_t n_embd = (size_t)model->config.n_embd;
    tagc_attention attention = tagc_gpt2_attention(model);

    TAGC_TRY(norm(model, params, first + BLOCK_LN_1, &block->in, model->norm));
    TAGC_TRY(linear(model, params, first + BLOCK_QKV, model->norm, n_embd, NULL, block->qkv, 3 * n_embd));
    tagc_attention_forward(&attention, block->qkv, block->attended, block->lse);
    TAGC_TRY(linear(model, params, first + BLOCK_PROJECTION, block->attended, n_embd, block->in.x,
                    block->mid.x, n_embd));

    TAGC_TRY(norm(model, params, first + BLOCK_LN_2, &block->mid, model->norm));
    TAGC_TRY(linear(model, params, first + BLOCK_MLP_IN, model->norm, n_embd, NULL, block->wide, 4 * n_embd));
    model->kernels->gelu(block->wide, model->active, tagc_gpt2_rows(model) * 4 * n_embd);
    return linear(model, params, first + BLOCK_MLP_OUT, model->active, 4 * n_embd, block->mid.x, next,
                  n_embd);
}

static void head_logits(tagc_gpt2 *model, const float *head, const float *x, size_t n_rows, size_t stride) {
    int n_embd = model->config.n_embd, n_vocab = model->config.vocab_size;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)n_rows, n_vocab, n_embd, 1, x, (int)stride,
                head, n_embd, 0, model->logits, n_vocab);
}

size_t tagc_gpt2_chunk_logits(tagc_gpt2 *model, const float *head, int chunk) {
    size_t first = (size_t)chunk * (size_t)model->chunk_rows, n_rows = tagc_gpt2_rows(model) - first;
    size_t n_embd = (size_t)model->config.n_embd;
    if (n_rows > (size_t)model->chunk_rows) n_rows = (size_t)model->chunk_rows;
    if (model->chunk != chunk) head_logits(model, head, model->final + first * n_embd, n_rows, n_embd);
    model->chunk = chunk;
    return n_rows;
}

/* Sum over all rows of log sum exp(logits) - logits[target]. */
static double loss_sum(tagc_gpt2 *model, const float *head) {
    size_t n_vocab = (size_t)model->config.vocab_size;
    double sum = 0;
    size_t row = 0;
    for (int chunk = 0; row < tagc_gpt2_rows(model); chunk++) {
        size_t n_rows = tagc_gpt2_chunk_logits(model, head, chunk);
        for (size_t i = 0; i < n_rows; i++, row++) {
            const float *logits = model->logits + i * n_vocab;
            model->logits_lse[row] = model->kernels->log_sum_exp(logits, n_vocab);
            sum += (double)model->logits_lse[row] - (double)logits[model->targets[row]];
        }
    }
    return sum;
}

/* Checks and copies (B, T) token numbers: a wrong one would read outside of the embedding. */
static tagc_status take_tokens(const tagc_gpt2 *model, const char *what, const int *from, int *to) {
    for (size_t i = 0; i < tagc_gpt2_rows(model); i++) {
        if (from[i] < 0 || from[i] >= model->config.vocab_size)
            return tagc_fail(TAGC_ERR_ARGUMENT, "%s[%zu] is %d, allowed is 0 to %d", what, i, from[i],
                             model->config.vocab_size - 1);
        to[i] = from[i];
    }
    return TAGC_OK;
}

tagc_status tagc_gpt2_forward(tagc_gpt2 *model, const tagc_params *params, const int *tokens,
                              const int *targets, int n_batch, int n_tokens, double *mean_loss) {
    if (n_batch < 1 || n_batch > model->max_batch)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_batch is %d, allowed is 1 to %d", n_batch, model->max_batch);
    if (n_tokens < 1 || n_tokens > model->max_tokens)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_tokens is %d, allowed is 1 to %d", n_tokens,
                         model->max_tokens);
    model->n_batch = n_batch;
    model->n_tokens = n_tokens;
    model->can_backward = 0;
    model->chunk = -1;
    TAGC_TRY(take_tokens(model, "tokens", tokens, model->tokens));
    if (targets) TAGC_TRY(take_tokens(model, "targets", targets, model->targets));

    int n_layer = model->config.n_layer;
    TAGC_TRY(embed(model, params, model->blocks[0].in.x));
    for (int i = 0; i < n_layer; i++)
        TAGC_TRY(block_forward(model, params, i, i + 1 < n_layer ? model->blocks[i + 1].in.x : model->out.x));
    TAGC_TRY(norm(model, params, TENSOR_BLOCKS + n_layer * BLOCK_N_TENSORS, &model->out, model->final));

    const float *head;
    int head_tensor = tagc_gpt2_head_tensor(&model->config);
    size_t n_embd = (size_t)model->config.n_embd, length = (size_t)n_tokens;
    TAGC_TRY(params->use(params->context, head_tensor, &head));
    if (targets)
        *mean_loss = loss_sum(model, head) / (double)tagc_gpt2_rows(model);
    else
        head_logits(model, head, model->final + (length - 1) * n_embd, (size_t)n_batch, length * n_embd);
    params->done(params->context, head_tensor);
    model->can_backward = targets != NULL;
    return TAGC_OK;
}
