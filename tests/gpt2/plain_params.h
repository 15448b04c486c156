/* Parameters and gradients in plain arrays, for tests of the model without an engine. Watches that the model
 * keeps the order that tagc_params promises. */
#ifndef TAGC_TESTS_PLAIN_PARAMS_H
#define TAGC_TESTS_PLAIN_PARAMS_H

#include <stdlib.h>

#include "../test.h"
#include "core/status.h"
#include "gpt2/gpt2.h"

enum { MAX_TENSORS = 64 };

typedef struct plain_params {
    tagc_gpt2_config config;
    int n_tensors;
    tagc_tensor_info info[MAX_TENSORS];
    float *values[MAX_TENSORS], *grads[MAX_TENSORS];
    int in_use[MAX_TENSORS], n_grad_done[MAX_TENSORS];
    int last_use, last_grad; /* tensors, for the order; -1 at the start of a pass */
    int backward;
    int calls_left; /* counts down per use and grad; at 0 the call fails. Negative: never */
} plain_params;

static inline tagc_status plain_call(plain_params *plain) {
    if (plain->calls_left == 0) return tagc_fail(TAGC_ERR_TRANSPORT, "rank 1 is gone");
    plain->calls_left--;
    return TAGC_OK;
}

static inline tagc_status plain_use(void *context, int tensor, const float **out) {
    plain_params *plain = context;
    TAGC_TRY(plain_call(plain));
    int head_of_tied = plain->config.tied && tensor == 0;
    if (plain->last_use >= 0 && !plain->backward && !head_of_tied) assert_true(tensor > plain->last_use);
    if (plain->last_use > 0 && plain->backward) assert_true(tensor < plain->last_use);
    plain->last_use = tensor;
    assert_int_equal(plain->in_use[tensor], 0);
    plain->in_use[tensor] = 1;
    *out = plain->values[tensor];
    return TAGC_OK;
}

static inline void plain_done(void *context, int tensor) {
    plain_params *plain = context;
    assert_int_equal(plain->in_use[tensor], 1);
    plain->in_use[tensor] = 0;
}

static inline tagc_status plain_grad(void *context, int tensor, float **out) {
    plain_params *plain = context;
    TAGC_TRY(plain_call(plain));
    assert_true(plain->backward);
    assert_int_equal(plain->n_grad_done[tensor], 0);
    if (plain->last_grad > 0) assert_true(tensor < plain->last_grad);
    plain->last_grad = tensor;
    *out = plain->grads[tensor];
    return TAGC_OK;
}

static inline tagc_status plain_grad_done(void *context, int tensor) {
    plain_params *plain = context;
    plain->n_grad_done[tensor]++;
    return TAGC_OK;
}

static inline tagc_params plain_table(plain_params *plain) {
    return (tagc_params){plain, plain_use, plain_done, plain_grad, plain_grad_done};
}

static inline plain_params *plain_create(const tagc_gpt2_config *config, uint64_t seed) {
    plain_params *plain = calloc(1, sizeof *plain);
    assert_non_null(plain);
    plain->config = *config;
    plain->calls_left = -1;
    plain->n_tensors = tagc_gpt2_n_tensors(config);
    assert_true(plain->n_tensors <= MAX_TENSORS);
    for (int i = 0; i < plain->n_tensors; i++) {
        tagc_gpt2_tensor(config, i, &plain->info[i]);
        plain->values[i] = malloc(plain->info[i].n_elems * sizeof(float));
        plain->grads[i] = calloc(plain->info[i].n_elems, sizeof(float));
        assert_non_null(plain->values[i]);
        assert_non_null(plain->grads[i]);
        tagc_gpt2_init_tensor(config, i, seed, 0, plain->info[i].n_elems, plain->values[i]);
    }
    return plain;
}

static inline void plain_destroy(plain_params *plain) {
    for (int i = 0; i < plain->n_tensors; i++) {
        free(plain->values[i]);
        free(plain->grads[i]);
    }
    free(plain);
}

static inline void plain_begin(plain_params *plain, int backward) {
    plain->backward = backward;
    plain->last_use = plain->last_grad = -1;
    for (int i = 0; i < plain->n_tensors; i++) plain->n_grad_done[i] = 0;
}

static inline double plain_forward(plain_params *plain, tagc_gpt2 *model, const int *tokens,
                                   const int *targets, int n_batch, int n_tokens) {
    tagc_params params = plain_table(plain);
    double loss = 0;
    plain_begin(plain, 0);
    assert_int_equal(tagc_gpt2_forward(model, &params, tokens, targets, n_batch, n_tokens, &loss), TAGC_OK);
    for (int i = 0; i < plain->n_tensors; i++) assert_int_equal(plain->in_use[i], 0);
    return loss;
}

static inline void plain_backward(plain_params *plain, tagc_gpt2 *model, float loss_scale) {
    tagc_params params = plain_table(plain);
    plain_begin(plain, 1);
    assert_int_equal(tagc_gpt2_backward(model, &params, loss_scale), TAGC_OK);
    for (int i = 0; i < plain->n_tensors; i++) {
        assert_int_equal(plain->in_use[i], 0);
        assert_int_equal(plain->n_grad_done[i], 1);
    }
}

static inline uint32_t test_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

/* Uniform in [-1, 1). */
static inline float test_uniform(uint64_t *state) {
    return (float)test_random(state) * 0x1p-30f - 1.0f;
}

#endif
