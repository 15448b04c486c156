/* Forward and backward as lists of calls, in the order of engine/gpt2/forward.c and backward.c. Work is counted in floating
 * point operations of matrix products; other work is negligible. */
#include "plan/program.h"

#include "core/status.h"
#include "plan/plan.h"
#include <stdlib.h>

enum { LN_1 = 0, QKV = 2, PROJECTION = 4, LN_2 = 6, MLP_IN = 8, MLP_OUT = 10, N_BLOCK = 12 };
enum { WTE = 0, WPE = 1, BLOCKS = 2 };
enum { CALLS_OF_BLOCK = 84, MOST_OTHER_CALLS = 32 }; /* of both passes */

typedef struct writer {
    tagc_program *program;
    double rows, width; /* positions of a batch, n_embd */
} writer;

static void add(writer *w, tagc_call_kind kind, int tensor, double flops) {
    tagc_program *p = w->program;
    p->calls[p->n_calls++] = (tagc_call){kind, tensor, flops};
    p->flops += flops;
}

static void compute(writer *w, double flops) {
    add(w, TAGC_CALL_COMPUTE, -1, flops);
}

static double product(const writer *w, double n_in, double n_out) {
    return 2 * w->rows * n_in * n_out;
}

/* ---- forward ---- */

/* Weight and bias are neighbours. */
static void layer(writer *w, int tensor, double flops) {
    add(w, TAGC_CALL_USE, tensor, 0);
    add(w, TAGC_CALL_USE, tensor + 1, 0);
    compute(w, flops);
    add(w, TAGC_CALL_DONE, tensor, 0);
    add(w, TAGC_CALL_DONE, tensor + 1, 0);
}

static void forward(writer *w, const tagc_gpt2_config *config, double attention, int head) {
    double c = w->width;
    layer(w, WTE, 0);
    for (int i = 0; i < config->n_layer; i++) {
        int first = BLOCKS + i * N_BLOCK;
        layer(w, first + LN_1, 0);
        layer(w, first + QKV, product(w, c, 3 * c));
        compute(w, attention);
        layer(w, first + PROJECTION, product(w, c, c));
        layer(w, first + LN_2, 0);
        layer(w, first + MLP_IN, product(w, c, 4 * c));
        layer(w, first + MLP_OUT, product(w, 4 * c, c));
    }
    layer(w, BLOCKS + config->n_layer * N_BLOCK, 0);
    add(w, TAGC_CALL_USE, head, 0);
    compute(w, product(w, c, config->vocab_size));
    add(w, TAGC_CALL_DONE, head, 0);
}

/* ---- backward ---- */

static void gradient(writer *w, int tensor, double flops) {
    add(w, TAGC_CALL_GRAD, tensor, 0);
    compute(w, flops);
    add(w, TAGC_CALL_GRAD_DONE, tensor, 0);
}

static void input_gradient(writer *w, int tensor, double flops) {
    add(w, TAGC_CALL_USE, tensor, 0);
    compute(w, flops);
    add(w, TAGC_CALL_DONE, tensor, 0);
}

static void norm_gradient(writer *w, int norm) {
    add(w, TAGC_CALL_GRAD, norm + 1, 0);
    add(w, TAGC_CALL_GRAD, norm, 0);
    add(w, TAGC_CALL_GRAD_DONE, norm + 1, 0);
    add(w, TAGC_CALL_GRAD_DONE, norm, 0);
}

static void norm_linear_gradient(writer *w, int norm, int linear, double flops) {
    gradient(w, linear + 1, 0);
    input_gradient(w, linear, flops);
    add(w, TAGC_CALL_USE, norm + 1, 0);
    add(w, TAGC_CALL_USE, norm, 0);
    add(w, TAGC_CALL_DONE, norm + 1, 0);
    gradient(w, linear, flops);
    norm_gradient(w, norm);
    add(w, TAGC_CALL_DONE, norm, 0);
}

static void block_backward(writer *w, int first, double attention) {
    double c = w->width;
    gradient(w, first + MLP_OUT + 1, 0);
    input_gradient(w, first + MLP_OUT, product(w, 4 * c, c));
    gradient(w, first + MLP_OUT, product(w, 4 * c, c));
    norm_linear_gradient(w, first + LN_2, first + MLP_IN, product(w, c, 4 * c));
    gradient(w, first + PROJECTION + 1, 0);
    input_gradient(w, first + PROJECTION, product(w, c, c));
    gradient(w, first + PROJECTION, product(w, c, c));
    compute(w, 2.5 * attention); /* five products; forward has two */
    norm_linear_gradient(w, first + LN_1, first + QKV, product(w, c, 3 * c));
}

static void backward(writer *w, const tagc_gpt2_config *config, double attention, int head) {
    int norm = BLOCKS + config->n_layer * N_BLOCK;
    add(w, TAGC_CALL_USE, head, 0);
    add(w, TAGC_CALL_GRAD, head, 0);
    compute(w, 2 * product(w, w->width, config->vocab_size));
    add(w, TAGC_CALL_DONE, head, 0);
    if (!config->tied) add(w, TAGC_CALL_GRAD_DONE, head, 0);
    add(w, TAGC_CALL_USE, norm, 0);
    norm_gradient(w, norm);
    add(w, TAGC_CALL_DONE, norm, 0);
    for (int i = config->n_layer - 1; i >= 0; i--) block_backward(w, BLOCKS + i * N_BLOCK, attention);
    gradient(w, WPE, 0);
    gradient(w, WTE, 0);
}

tagc_status tagc_program_create(const tagc_gpt2_config *config, int n_batch, int n_tokens,
                                tagc_program *out) {
    *out = (tagc_program){0};
    TAGC_TRY(tagc_gpt2_config_check(config));
    if (n_tokens < 1 || n_tokens > config->block_size)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_tokens is %d, allowed is 1 to block_size %d", n_tokens,
                         config->block_size);
    if (n_batch < 1) return tagc_fail(TAGC_ERR_ARGUMENT, "n_batch is %d, allowed is 1 or more", n_batch);
    size_t n_calls = (size_t)config->n_layer * CALLS_OF_BLOCK + MOST_OTHER_CALLS;
    out->calls = malloc(n_calls * sizeof *out->calls);
    if (!out->calls) return tagc_fail(TAGC_ERR_MEMORY, "no memory for the calls of a model");
    int head = config->tied ? WTE : tagc_gpt2_n_tensors(config) - 1;
    writer w = {.program = out, .rows = (double)n_batch * (double)n_tokens, .width = (double)config->n_embd};
    /* The causal half of scores and of their product with the values. */
    double attention = 4 * w.rows * w.width * ((double)n_tokens + 1) / 2;
    forward(&w, config, attention, head);
    out->n_forward = out->n_calls;
    backward(&w, config, attention, head);
    if ((size_t)out->n_calls > n_calls) abort(); /* CALLS_OF_BLOCK or MOST_OTHER_CALLS is wrong */
    return TAGC_OK;
}

void tagc_program_destroy(tagc_program *program) {
    free(program->calls);
    *program = (tagc_program){0};
}

double tagc_setup_flops(const tagc_setup *setup) {
    tagc_program program;
    if (tagc_program_create(&setup->model, setup->n_batch, setup->n_tokens, &program) != TAGC_OK) return 0;
    double flops = program.flops * setup->engine.n_micro_steps;
    tagc_program_destroy(&program);
    return flops;
}
