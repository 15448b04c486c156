/* Gradient integrity and state consistency: wherever parameters, gradients and optimizer state are placed, training
 * comes to what one device computes from the whole batch. The device is a plain loop around the real GPT-2: no engine,
 * no ranks, AdamW in double. */
#include "../repeats.h"
#include "small_gpt2.h"

/* Each stride shares no factor with 27, so that every sharding, number of ranks and kind of accumulation has its turn. */
enum { STRIDE = REPEATS(1, 5, 5), LARGE_STRIDE = REPEATS(4, 5, 5) };

static const tagc_gpt2_config tiny = {2, 2, 16, 8, 40, 0}, tied = {2, 2, 16, 8, 40, 1};
/* Embedding and head above 2 M elements, so that wrapping by matrices has units to make. */
static const tagc_gpt2_config large = {1, 1, 64, 8, 31300, 0};

/* ---- one device ---- */

typedef struct device {
    const tagc_gpt2_config *config;
    int n_tensors;
    size_t n_params;
    float *params, *grads; /* (n_params), tensor after tensor */
    size_t *offsets;       /* (n_tensors) */
    double *p, *m, *v;     /* (n_params) masters and moments */
} device;

static tagc_status device_use(void *context, int tensor, const float **out) {
    const device *d = context;
    *out = d->params + d->offsets[tensor];
    return TAGC_OK;
}
static void device_done(void *context, int tensor) {
    (void)context;
    (void)tensor;
}
static tagc_status device_grad(void *context, int tensor, float **out) {
    const device *d = context;
    *out = d->grads + d->offsets[tensor];
    return TAGC_OK;
}
static tagc_status device_grad_done(void *context, int tensor) {
    (void)context;
    (void)tensor;
    return TAGC_OK;
}

static void device_make(device *d, const tagc_gpt2_config *config) {
    *d = (device){
        .config = config, .n_tensors = tagc_gpt2_n_tensors(config), .n_params = tagc_gpt2_n_params(config)};
    d->params = calloc(d->n_params * 2, sizeof *d->params);
    d->grads = d->params + d->n_params;
    d->p = calloc(d->n_params * 3, sizeof *d->p);
    d->m = d->p + d->n_params;
    d->v = d->m + d->n_params;
    d->offsets = calloc((size_t)d->n_tensors, sizeof *d->offsets);
    size_t at = 0;
    for (int i = 0; i < d->n_tensors; i++) {
        tagc_tensor_info info;
        tagc_gpt2_tensor(config, i, &info);
        d->offsets[i] = at;
        tagc_gpt2_init_tensor(config, i, 5, 0, info.n_elems, d->params + at);
        at += info.n_elems;
    }
    for (size_t i = 0; i < d->n_params; i++) d->p[i] = (double)d->params[i];
}

static void device_free(device *d) {
    free(d->params);
    free(d->p);
    free(d->offsets);
}

static void device_update(device *d, const tagc_fsdp_options *o, double lr, int n_updates, double *norm) {
    double squares = 0, correction1 = 1 - pow(o->beta1, n_updates),
           correction2 = 1 - pow(o->beta2, n_updates);
    for (size_t i = 0; i < d->n_params; i++) squares += (double)d->grads[i] * (double)d->grads[i];
    *norm = sqrt(squares);
    double clip = o->clip_norm > 0 && o->clip_norm < *norm ? o->clip_norm / *norm : 1;
    for (int t = 0; t < d->n_tensors; t++) {
        tagc_tensor_info info;
        tagc_gpt2_tensor(d->config, t, &info);
        for (size_t i = d->offsets[t]; i < d->offsets[t] + info.n_elems; i++) {
            double g = clip * (double)d->grads[i];
            if (info.decay) d->p[i] *= 1 - lr * o->weight_decay;
            d->m[i] = o->beta1 * d->m[i] + (1 - o->beta1) * g;
            d->v[i] = o->beta2 * d->v[i] + (1 - o->beta2) * g * g;
            d->p[i] -= lr * (d->m[i] / correction1) / (sqrt(d->v[i] / correction2) + o->epsilon);
            d->params[i] = (float)d->p[i];
        }
    }
}

/* The whole global batch at once. */
static void device_train(device *d, const small_run *run, double *loss, double *norm) {
    int n = run->n_sequences;
    int *tokens = malloc((size_t)(n * run->n_tokens) * 2 * sizeof *tokens),
        *targets = tokens + n * run->n_tokens;
    tagc_params params = {d, device_use, device_done, device_grad, device_grad_done};
    tagc_gpt2 *model;
    CHECK_OK(tagc_gpt2_create(d->config, n, run->n_tokens, &model));
    for (int step = 0; step < run->n_steps; step++) {
        for (int i = 0; i < n; i++)
            small_sequence(run, (uint64_t)(step * n + i), tokens + i * run->n_tokens,
                           targets + i * run->n_tokens);
        memset(d->grads, 0, d->n_params * sizeof *d->grads);
        CHECK_OK(tagc_gpt2_forward(model, &params, tokens, targets, n, run->n_tokens, loss));
        CHECK_OK(tagc_gpt2_backward(model, &params, 1));
        device_update(d, &run->options, run->lr, step + 1, norm);
    }
    tagc_gpt2_destroy(model);
    free(tokens);
}

/* ---- engines ---- */

static small_run make(const tagc_gpt2_config *config, int n_sequences, int n_steps) {
    small_run run = {
        .config = *config, .n_sequences = n_sequences, .n_tokens = 6, .n_steps = n_steps, .lr = 3e-3};
    tagc_fsdp_options_init(&run.options);
    run.options.policy = TAGC_POLICY_NONE;
    run.options.clip_norm = 0.5;
    run.options.epsilon = 1e-3; /* a gradient next to nothing has no sign to speak of */
    run.params = malloc(tagc_gpt2_n_params(config) * sizeof *run.params);
    return run;
}

static void compare(small_run *run, const device *d, double loss, double norm, const char *what) {
    double worst = 0, moved = 0;
    small_train(run);
    for (size_t i = 0; i < d->n_params; i++) worst = fmax(worst, fabs((double)run->params[i] - d->p[i]));
    for (int t = 0; t < d->n_tensors; t++) { /* that there was something to get wrong */
        float first;
        tagc_gpt2_init_tensor(d->config, t, 5, 0, 1, &first);
        moved = fmax(moved, fabs((double)first - d->p[d->offsets[t]]));
    }
    if (worst > 2e-6 || moved < 1e-3 || fabs(run->loss - loss) > 1e-5 * loss ||
        fabs(run->norm - norm) > 1e-4 * norm)
        fail_msg("%s, W %d sharding %d wrap %d micro %d each %d: parameters off by %g (moved %g), loss %.8g "
                 "for %.8g,"
                 " norm %.8g for %.8g",
                 what, run->world_size, run->options.sharding, run->options.wrap, run->options.n_micro_steps,
                 run->options.exchange_each_micro_step, worst, moved, run->loss, loss, run->norm, norm);
}

static void check(const tagc_gpt2_config *config, int wrap, int n_sequences, int n_steps, int stride,
                  const char *what) {
    small_run run = make(config, n_sequences, n_steps);
    device d;
    double loss, norm;
    device_make(&d, config);
    device_train(&d, &run, &loss, &norm);
    for (int variant = 0; variant < 3 * 3 * 3; variant += stride) {
        run.world_size = 1 << variant % 3;
        run.options.sharding = variant / 3 % 3;
        run.options.wrap = wrap;
        run.options.n_micro_steps = variant / 9 == 0 ? 1 : 2;
        run.options.exchange_each_micro_step = variant / 9 == 2;
        compare(&run, &d, loss, norm, what);
    }
    device_free(&d);
    free(run.params);
}

TEST(every_placement_gives_the_single_device) {
    check(&tiny, TAGC_WRAP_BLOCK, 8, 4, STRIDE, "untied");
    check(&tied, TAGC_WRAP_BLOCK, 8, 4, STRIDE, "tied");
    check(&tiny, TAGC_WRAP_MATRIX, 8, 4, STRIDE, "one unit");
    check(&large, TAGC_WRAP_MATRIX, 8, 2, LARGE_STRIDE, "matrices alone");
}

/* A wire that rounds: parameters and gradients seen to 8 bits, masters whole. Off, but by the rounding only. */
TEST(bf16_is_off_by_its_rounding) {
    small_run run = make(&tiny, 8, 4);
    device d;
    double loss, norm;
    device_make(&d, &tiny);
    device_train(&d, &run, &loss, &norm);
    run.options.gather = run.options.dense_format = TAGC_FORMAT_BF16;
    for (int variant = 0; variant < 6; variant++) {
        run.world_size = 2 + 2 * (variant % 2);
        run.options.sharding = variant / 2;
        small_train(&run);
        double off = 0, moved = 0;
        for (int t = 0; t < d.n_tensors; t++) {
            tagc_tensor_info info;
            tagc_gpt2_tensor(&tiny, t, &info);
            float *first = malloc(info.n_elems * sizeof *first);
            tagc_gpt2_init_tensor(&tiny, t, 5, 0, info.n_elems, first);
            for (size_t i = 0; i < info.n_elems; i++) {
                double p = d.p[d.offsets[t] + i];
                off += fabs((double)run.params[d.offsets[t] + i] - p);
                moved += fabs((double)first[i] - p);
            }
            free(first);
        }
        if (!(off > 0 && off < 0.02 * moved)) fail_msg("W %d: off by %g of %g", run.world_size, off, moved);
        assert_true(fabs(run.loss - loss) < 2e-3 * loss);
    }
    device_free(&d);
    free(run.params);
}

/* Packed that keeps everything is dense, bit for bit, wherever things are placed. */
TEST(packed_that_keeps_all_is_dense) {
    small_run run = make(&tiny, 8, 3);
    size_t n_bytes = tagc_gpt2_n_params(&tiny) * sizeof *run.params;
    float *dense = malloc(n_bytes);
    for (int variant = 0; variant < 9; variant++) {
        run.world_size = 1 << variant % 3;
        run.options.sharding = variant / 3;
        run.options.policy = TAGC_POLICY_NONE;
        small_train(&run);
        memcpy(dense, run.params, n_bytes);
        run.options.policy = TAGC_POLICY_ALL;
        run.options.reducer.exchange = TAGC_EXCHANGE_PACKED;
        run.options.reducer.sparsity = 0;
        small_train(&run);
        assert_memory_equal(dense, run.params, n_bytes);
        assert_int_equal(run.stats[0].n_sent, run.stats[0].n_union);
    }
    free(dense);
    free(run.params);
}
