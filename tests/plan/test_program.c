/* The planned order of calls against the order in which the real model makes them. */
#include "small_gpt2.h"

#include "plan/program.h"

enum { MAX_CALLS = 4096 };

/* Parameters without an engine, that write down who asks for what. */
typedef struct recorder {
    tagc_call calls[MAX_CALLS];
    int n_calls;
    float **values, **grads;
} recorder;

static void note(recorder *r, tagc_call_kind kind, int tensor) {
    assert_true(r->n_calls < MAX_CALLS);
    r->calls[r->n_calls++] = (tagc_call){kind, tensor, 0};
}

static tagc_status use(void *context, int tensor, const float **out) {
    recorder *r = context;
    note(r, TAGC_CALL_USE, tensor);
    *out = r->values[tensor];
    return TAGC_OK;
}

static void done(void *context, int tensor) {
    note(context, TAGC_CALL_DONE, tensor);
}

static tagc_status grad(void *context, int tensor, float **out) {
    recorder *r = context;
    note(r, TAGC_CALL_GRAD, tensor);
    *out = r->grads[tensor];
    return TAGC_OK;
}

static tagc_status grad_done(void *context, int tensor) {
    note(context, TAGC_CALL_GRAD_DONE, tensor);
    return TAGC_OK;
}

static void compare(const tagc_gpt2_config *config) {
    enum { BATCH = 2, TOKENS = 6 };
    recorder *r = calloc(1, sizeof *r);
    int n_tensors = tagc_gpt2_n_tensors(config), tokens[BATCH * TOKENS] = {0}, n_forward;
    r->values = calloc((size_t)n_tensors, sizeof *r->values);
    r->grads = calloc((size_t)n_tensors, sizeof *r->grads);
    for (int i = 0; i < n_tensors; i++) {
        tagc_tensor_info info;
        tagc_gpt2_tensor(config, i, &info);
        r->values[i] = calloc(info.n_elems, sizeof(float));
        r->grads[i] = calloc(info.n_elems, sizeof(float));
        tagc_gpt2_init_tensor(config, i, 1, 0, info.n_elems, r->values[i]);
    }
    tagc_params params = {r, use, done, grad, grad_done};
    tagc_gpt2 *model;
    double loss;
    assert_int_equal(tagc_gpt2_create(config, BATCH, TOKENS, &model), TAGC_OK);
    assert_int_equal(tagc_gpt2_forward(model, &params, tokens, tokens, BATCH, TOKENS, &loss), TAGC_OK);
    n_forward = r->n_calls;
    assert_int_equal(tagc_gpt2_backward(model, &params, 1), TAGC_OK);

    tagc_program program;
    assert_int_equal(tagc_program_create(config, BATCH, TOKENS, &program), TAGC_OK);
    int at = 0, at_forward = -1;
    for (int i = 0; i < program.n_calls; i++) {
        if (i == program.n_forward) at_forward = at;
        if (program.calls[i].kind == TAGC_CALL_COMPUTE) continue;
        assert_true(at < r->n_calls);
        assert_int_equal(program.calls[i].kind, r->calls[at].kind);
        assert_int_equal(program.calls[i].tensor, r->calls[at].tensor);
        at++;
    }
    assert_int_equal(at, r->n_calls);
    assert_int_equal(at_forward, n_forward);
    tagc_program_destroy(&program);
    tagc_gpt2_destroy(model);
    for (int i = 0; i < n_tensors; i++) {
        free(r->values[i]);
        free(r->grads[i]);
    }
    free(r->values);
    free(r->grads);
    free(r);
}

TEST(calls_are_the_models) {
    compare(&(tagc_gpt2_config){1, 1, 8, 8, 16, 0});
    compare(&(tagc_gpt2_config){3, 2, 16, 8, 24, 0});
    compare(&(tagc_gpt2_config){2, 2, 16, 8, 24, 1});
}

/* 6 operations per parameter of a matrix and position, and attention's own. */
TEST(work_is_counted) {
    tagc_gpt2_config config;
    assert_int_equal(tagc_gpt2_preset("gpt2-162m", &config), TAGC_OK);
    double matrices = 12.0 * 12 * 768 * 768 + 768.0 * 50304;
    for (int n_tokens = 256; n_tokens <= 1024; n_tokens *= 2) {
        tagc_program program;
        assert_int_equal(tagc_program_create(&config, 3, n_tokens, &program), TAGC_OK);
        double rows = 3.0 * n_tokens;
        double attention = 12 * 3.5 * 4 * rows * 768 * (n_tokens + 1) / 2;
        assert_true(fabs(program.flops / (6 * matrices * rows + attention) - 1) < 1e-12);
        tagc_program_destroy(&program);
    }
    tagc_program program;
    assert_int_equal(tagc_program_create(&config, 1, 1025, &program), TAGC_ERR_ARGUMENT);
    assert_int_equal(tagc_program_create(&config, 0, 10, &program), TAGC_ERR_ARGUMENT);
}
