/* The backward pass: the forward's steps in reverse. Each turns the gradient of its output into that of its input, and adds to
 * the gradient of its parameters. */
#include "gpt2/model.h"

#include <cblas.h>
#include <string.h>

/* dx (rows, n_in) = dy weight^T */
static tagc_status input_gradient(tagc_gpt2 *model, const tagc_params *params, int tensor, const float *dy,
                                  size_t n_out, float *dx, size_t n_in) {
    const float *weight;
    TAGC_TRY(params->use(params->context, tensor, &weight));
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)tagc_gpt2_rows(model), (int)n_in, (int)n_out, 1,
                dy, (int)n_out, weight, (int)n_out, 0, dx, (int)n_in);
    params->done(params->context, tensor);
    return TAGC_OK;
}

static tagc_status bias_gradient(tagc_gpt2 *model, const tagc_params *params, int tensor, const float *dy,
                                 size_t n_out) {
    float *grad;
    TAGC_TRY(params->grad(params->context, tensor, &grad));
    model->kernels->sum_rows(dy, tagc_gpt2_rows(model), n_out, grad);
    return params->grad_done(params->context, tensor);
}

/* grad (n_in, n_out) += x^T dy */
static tagc_status weight_gradient(tagc_gpt2 *model, const tagc_params *params, int tensor, const float *x,
                                   size_t n_in, const float *dy, size_t n_out) {
    float *grad;
    TAGC_TRY(params->grad(params->context, tensor, &grad));
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)n_in, (int)n_out, (int)tagc_gpt2_rows(model), 1,
                x, (int)n_in, dy, (int)n_out, 1, grad, (int)n_out);
    return params->grad_done(params->context, tensor);
}

/* dx (rows, C) += gradient through the norm of `in`; dy (rows, C) is the gradient of its output. */
static tagc_status norm_gradient(tagc_gpt2 *model, const tagc_params *params, int tensor, const float *weight,
                                 const tagc_normed *in, const float *dy, float *dx) {
    size_t n_embd = (size_t)model->config.n_embd;
    float *dweight, *dbias;
    TAGC_TRY(params->grad(params->context, tensor + 1, &dbias));
    TAGC_TRY(params->grad(params->context, tensor, &dweight));
    for (size_t i = 0; i < tagc_gpt2_rows(model); i++)
        model->kernels->norm_backward(in->x + i * n_embd, in->mean[i], in->rstd[i], weight, dy + i * n_embd,
                                      dx + i * n_embd, dweight, dbias, n_embd);
    TAGC_TRY(params->grad_done(params->context, tensor + 1));
    return params->grad_done(params->context, tensor);
}

/* A norm followed by a linear layer: from dy (rows, n_out), the gradient of the output, to dx += (rows, C). Recomputes the
 * norm's output, which the weight's gradient needs. */
static tagc_status norm_linear_gradient(tagc_gpt2 *model, const tagc_params *params, int norm,
                                        const tagc_normed *in, int linear, const float *dy, size_t n_out) {
    size_t n_embd = (size_t)model->config.n_embd;
    const float *weight, *bias;
    TAGC_TRY(bias_gradient(model, params, linear + 1, dy, n_out));
    TAGC_TRY(input_gradient(model, params, linear, dy, n_out, model->dnorm, n_embd));
    TAGC_TRY(params->use(params->context, norm + 1, &bias));
    TAGC_TRY(params->use(params->context, norm, &weight));
    tagc_gpt2_norm_rows(model, in, weight, bias, model->norm);
    params->done(params->context, norm + 1);
    TAGC_TRY(weight_gradient(model, params, linear, model->norm, n_embd, dy, n_out));
    TAGC_TRY(norm_gradient(model, params, norm, weight, in, model->dnorm, model->dx));
    params->done(params->context, norm);
    return TAGC_OK;
}

/* Turns model->dx from the gradient of the block's output into that of its input. */
static tagc_status block_backward(tagc_gpt2 *model, const tagc_params *params, int index) {
    const tagc_block *block = &model->blocks[index];
    int first = TENSOR_BLOCKS + index * BLOCK_N_TENSORS;
    size_t n_embd = (size_t)model->config.n_embd, n_wide = 4 * n_embd;
    tagc_attention attention = tagc_gpt2_attention(model);

    TAGC_TRY(bias_gradient(model, params, first + BLOCK_MLP_OUT + 1, model->dx, n_embd));
    TAGC_TRY(input_gradient(model, params, first + BLOCK_MLP_OUT, model->dx, n_embd, model->dwide, n_wide));
    model->kernels->gelu_backward(block->wide, model->active, model->dwide, tagc_gpt2_rows(model) * n_wide);
    TAGC_TRY(weight_gradient(model, params, first + BLOCK_MLP_OUT, model->active, n_wide, model->dx, n_embd));
    TAGC_TRY(norm_linear_gradient(model, params, first + BLOCK_LN_2, &block->mid, first + BLOCK_MLP_IN,
                                  model->dwide, n_wide));

    TAGC_TRY(bias_gradient(model, params, first + BLOCK_PROJECTION + 1, model->dx, n_embd));
    TAGC_TRY(
        input_gradient(model, params, first + BLOCK_PROJECTION, model->dx, n_embd, model->dnorm, n_embd));
    TAGC_TRY(
        weight_gradient(model, params, first + BLOCK_PROJECTION, block->attended, n_embd, model->dx, n_embd));
    tagc_attention_backward(&attention, block->qkv, block->attended, block->lse, model->dnorm, model->dwide);
    return norm_linear_gradient(model, params, first + BLOCK_LN_1, &block->in, first + BLOCK_QKV,
                                model->dwide, 3 * n_embd);
}

/* From the logits to model->dx, the gradient of the last block's output. */
static tagc_status head_backward(tagc_gpt2 *model, const tagc_params *params, float loss_scale) {
    int n_embd = model->config.n_embd, n_vocab = model->config.vocab_size;
    int tensor = tagc_gpt2_head_tensor(&model->config),
        norm = TENSOR_BLOCKS + model->config.n_layer * BLOCK_N_TENSORS;
    size_t n_rows = tagc_gpt2_rows(model), chunk_rows = (size_t)model->chunk_rows;
    float factor = loss_scale / (float)n_rows;
    const float *head, *weight;
    float *grad;
    TAGC_TRY(params->use(params->context, tensor, &head));
    TAGC_TRY(params->grad(params->context, tensor, &grad));
    /* Starts with the last chunk, because its logits are still in the buffer. */
    for (int chunk = (int)((n_rows - 1) / chunk_rows); chunk >= 0; chunk--) {
        size_t first = (size_t)chunk * chunk_rows, n = tagc_gpt2_chunk_logits(model, head, chunk);
        for (size_t i = 0; i < n; i++) {
            float *logits = model->logits + i * (size_t)n_vocab;
            model->kernels->softmax_row(model->logits_lse[first + i], factor, logits, (size_t)n_vocab);
            logits[model->targets[first + i]] -= factor;
        }
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)n, n_embd, n_vocab, 1, model->logits,
                    n_vocab, head, n_embd, 0, model->dnorm + first * (size_t)n_embd, n_embd);
        cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, n_vocab, n_embd, (int)n, 1, model->logits,
                    n_vocab, model->final + first * (size_t)n_embd, n_embd, 1, grad, n_embd);
    }
    params->done(params->context, tensor);
    if (!model->config.tied) TAGC_TRY(params->grad_done(params->context, tensor));

    memset(model->dx, 0, n_rows * (size_t)n_embd * sizeof(float));
    TAGC_TRY(params->use(params->context, norm, &weight));
    TAGC_TRY(norm_gradient(model, params, norm, weight, &model->out, model->dnorm, model->dx));
    params->done(params->context, norm);
    return TAGC_OK;
}

static tagc_status embedding_backward(tagc_gpt2 *model, const tagc_params *params) {
    size_t n_embd = (size_t)model->config.n_embd, n_rows = tagc_gpt2_rows(model),
           n_tokens = (size_t)model->n_tokens;
    float *wte, *wpe;
    TAGC_TRY(params->grad(params->context, TENSOR_WPE, &wpe));
    for (size_t i = 0; i < n_rows; i++) {
        float *position = wpe + i % n_tokens * n_embd;
        model->kernels->add(position, model->dx + i * n_embd, position, n_embd);
    }
    TAGC_TRY(params->grad_done(params->context, TENSOR_WPE));
    TAGC_TRY(params->grad(params->context, TENSOR_WTE, &wte));
    for (size_t i = 0; i < n_rows; i++) {
        float *token = wte + (size_t)model->tokens[i] * n_embd;
        model->kernels->add(token, model->dx + i * n_embd, token, n_embd);
    }
    return params->grad_done(params->context, TENSOR_WTE);
}

tagc_status tagc_gpt2_backward(tagc_gpt2 *model, const tagc_params *params, float loss_scale) {
    if (!model->can_backward)
        return tagc_fail(TAGC_ERR_STATE, "backward without a forward with targets before it");
    model->can_backward = 0; /* the logits are overwritten */
    TAGC_TRY(head_backward(model, params, loss_scale));
    for (int i = model->config.n_layer - 1; i >= 0; i--) TAGC_TRY(block_backward(model, params, i));
    return embedding_backward(model, params);
}
