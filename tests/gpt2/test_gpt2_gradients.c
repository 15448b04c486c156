/* The model against a second GPT-2 that is written for nothing but plainness: scalar, in double, no backward.
 * Its central differences check every single gradient. */
#include "plain_params.h"

#include <math.h>
#include <string.h>

#include "gpt2/model.h"

/* ---- the reference ---- */

typedef struct reference {
    tagc_gpt2_config config;
    double *values[MAX_TENSORS];
    double *rows[6]; /* scratch (B * T, 4 C) each */
} reference;

static void reference_norm(const double *x, const double *w, const double *b, int n, double *y) {
    double mean = 0, variance = 0;
    for (int i = 0; i < n; i++) mean += x[i] / n;
    for (int i = 0; i < n; i++) variance += (x[i] - mean) * (x[i] - mean) / n;
    for (int i = 0; i < n; i++) y[i] = (x[i] - mean) / sqrt(variance + 1e-5) * w[i] + b[i];
}

static void reference_linear(const double *x, const double *w, const double *b, int n_in, int n_out,
                             double *y) {
    for (int j = 0; j < n_out; j++) {
        y[j] = b[j];
        for (int i = 0; i < n_in; i++) y[j] += x[i] * w[i * n_out + j];
    }
}

/* out (T, C) of one sequence from qkv (T, 3 C) */
static void reference_attention(const double *qkv, int n_tokens, int n_head, int n_embd, double *out) {
    int size = n_embd / n_head;
    for (int head = 0; head < n_head; head++) {
        for (int t = 0; t < n_tokens; t++) {
            double sum = 0, *o = out + t * n_embd + head * size;
            for (int d = 0; d < size; d++) o[d] = 0;
            for (int s = 0; s <= t; s++) {
                const double *q = qkv + t * 3 * n_embd + head * size,
                             *k = qkv + s * 3 * n_embd + n_embd + head * size;
                double score = 0;
                for (int d = 0; d < size; d++) score += q[d] * k[d];
                double weight = exp(score / sqrt(size));
                sum += weight;
                for (int d = 0; d < size; d++) o[d] += weight * k[n_embd + d];
            }
            for (int d = 0; d < size; d++) o[d] /= sum;
        }
    }
}

static double reference_loss(reference *r, const int *tokens, const int *targets, int n_batch, int n_tokens) {
    const tagc_gpt2_config *c = &r->config;
    int n = c->n_embd, n_rows = n_batch * n_tokens;
    double *x = r->rows[0], *h = r->rows[1], *wide = r->rows[2], *att = r->rows[3], *y = r->rows[4];
    for (int i = 0; i < n_rows * n; i++)
        x[i] = r->values[0][tokens[i / n] * n + i % n] + r->values[1][i / n % n_tokens * n + i % n];
    for (int layer = 0; layer < c->n_layer; layer++) {
        double **w = &r->values[2 + 12 * layer];
        for (int i = 0; i < n_rows; i++) {
            reference_norm(x + i * n, w[0], w[1], n, h + i * n);
            reference_linear(h + i * n, w[2], w[3], n, 3 * n, wide + i * 3 * n);
        }
        for (int b = 0; b < n_batch; b++)
            reference_attention(wide + b * n_tokens * 3 * n, n_tokens, c->n_head, n, att + b * n_tokens * n);
        for (int i = 0; i < n_rows; i++) {
            reference_linear(att + i * n, w[4], w[5], n, n, y);
            for (int j = 0; j < n; j++) x[i * n + j] += y[j];
            reference_norm(x + i * n, w[6], w[7], n, h);
            reference_linear(h, w[8], w[9], n, 4 * n, wide);
            for (int j = 0; j < 4 * n; j++) {
                double v = wide[j];
                wide[j] = 0.5 * v * (1 + tanh(sqrt(2 / acos(-1.0)) * (v + 0.044715 * v * v * v)));
            }
            reference_linear(wide, w[10], w[11], 4 * n, n, y);
            for (int j = 0; j < n; j++) x[i * n + j] += y[j];
        }
    }
    double **w = &r->values[2 + 12 * c->n_layer], *head = c->tied ? r->values[0] : w[2], loss = 0;
    for (int i = 0; i < n_rows; i++) {
        double sum = 0, target = 0;
        reference_norm(x + i * n, w[0], w[1], n, h);
        for (int v = 0; v < c->vocab_size; v++) {
            double logit = 0;
            for (int j = 0; j < n; j++) logit += h[j] * head[v * n + j];
            sum += exp(logit);
            if (v == targets[i]) target = logit;
        }
        loss += (log(sum) - target) / n_rows;
    }
    return loss;
}

static void reference_create(reference *r, const plain_params *plain, int n_rows) {
    r->config = plain->config;
    for (int i = 0; i < plain->n_tensors; i++) {
        r->values[i] = malloc(plain->info[i].n_elems * sizeof(double));
        for (size_t j = 0; j < plain->info[i].n_elems; j++) r->values[i][j] = plain->values[i][j];
    }
    for (int i = 0; i < 6; i++)
        r->rows[i] = calloc((size_t)n_rows * 4 * (size_t)r->config.n_embd, sizeof(double));
}

static void reference_destroy(reference *r, int n_tensors) {
    for (int i = 0; i < n_tensors; i++) free(r->values[i]);
    for (int i = 0; i < 6; i++) free(r->rows[i]);
}

/* ---- tests ---- */

/* Weights far from the initial ones, so that no term of a gradient is small. */
static plain_params *lively_params(const tagc_gpt2_config *config, uint64_t seed) {
    plain_params *plain = plain_create(config, seed);
    for (int i = 0; i < plain->n_tensors; i++) {
        for (size_t j = 0; j < plain->info[i].n_elems; j++) {
            int norm_weight =
                plain->info[i].kind == TAGC_TENSOR_NORM && strstr(plain->info[i].name, "weight");
            plain->values[i][j] = 0.6f * test_uniform(&seed) + (norm_weight ? 1.0f : 0.0f);
        }
    }
    return plain;
}

static void random_tokens(int n_vocab, int n, uint64_t seed, int *tokens) {
    for (int i = 0; i < n; i++) tokens[i] = (int)(test_random(&seed) % (uint32_t)n_vocab);
}

enum { MAX_ROWS = 400 };

/* With stride 1 every gradient is compared, with more every stride-th. */
static void compare_with_differences(const tagc_gpt2_config *config, int n_batch, int n_tokens,
                                     size_t stride) {
    int tokens[MAX_ROWS], targets[MAX_ROWS];
    random_tokens(config->vocab_size, n_batch * n_tokens, 1, tokens);
    random_tokens(config->vocab_size, n_batch * n_tokens, 2, targets);
    plain_params *plain = lively_params(config, 3);
    tagc_gpt2 *model;
    assert_int_equal(tagc_gpt2_create(config, n_batch, n_tokens, &model), TAGC_OK);
    double loss = plain_forward(plain, model, tokens, targets, n_batch, n_tokens);
    plain_backward(plain, model, 1);

    reference r;
    reference_create(&r, plain, n_batch * n_tokens);
    assert_true(fabs(loss - reference_loss(&r, tokens, targets, n_batch, n_tokens)) < 2e-6 * loss);
    for (int i = 0; i < plain->n_tensors; i++) {
        double largest = 0, worst = 0;
        for (size_t j = 0; j < plain->info[i].n_elems; j += stride) {
            double *value = &r.values[i][j], step = 1e-5, kept = *value;
            *value = kept + step;
            double above = reference_loss(&r, tokens, targets, n_batch, n_tokens);
            *value = kept - step;
            double below = reference_loss(&r, tokens, targets, n_batch, n_tokens);
            *value = kept;
            double expected = (above - below) / (2 * step);
            largest = fmax(largest, fabs(expected));
            worst = fmax(worst, fabs(expected - (double)plain->grads[i][j]));
        }
        if (!(worst <= 1e-5 * largest + 1e-8))
            fail_msg("%s: off by %g of %g", plain->info[i].name, worst, largest);
    }
    reference_destroy(&r, plain->n_tensors);
    plain_destroy(plain);
    tagc_gpt2_destroy(model);
}

TEST(test_untied) {
    compare_with_differences(&(tagc_gpt2_config){2, 3, 6, 7, 11, 0}, 2, 5, 1);
}

TEST(test_tied) {
    compare_with_differences(&(tagc_gpt2_config){2, 1, 5, 5, 7, 1}, 3, 5, 1);
}

TEST(test_one_of_each) {
    compare_with_differences(&(tagc_gpt2_config){1, 1, 1, 1, 2, 0}, 1, 1, 1);
}

/* More positions than one tile of queries. */
TEST(test_several_tiles) {
    compare_with_differences(&(tagc_gpt2_config){1, 2, 20, 140, 19, 0}, 1, 131, 97);
}

static double largest_difference(const plain_params *a, const plain_params *b, double scale) {
    double worst = 0;
    for (int i = 0; i < a->n_tensors; i++) {
        double largest = 0, difference = 0;
        for (size_t j = 0; j < a->info[i].n_elems; j++) {
            largest = fmax(largest, fabs((double)b->grads[i][j]));
            difference = fmax(difference, fabs((double)a->grads[i][j] - scale * (double)b->grads[i][j]));
        }
        worst = fmax(worst, difference / (largest + 1e-12));
    }
    return worst;
}

/* A small buffer of logits means the same sums in another order. */
TEST(test_logits_in_chunks) {
    tagc_gpt2_config config = {2, 2, 8, 16, 33, 1};
    int tokens[45], targets[45];
    random_tokens(33, 45, 5, tokens);
    random_tokens(33, 45, 6, targets);
    plain_params *whole = lively_params(&config, 7), *chunked = lively_params(&config, 7);
    tagc_gpt2 *model;
    assert_int_equal(tagc_gpt2_create(&config, 3, 16, &model), TAGC_OK);
    double loss = plain_forward(whole, model, tokens, targets, 3, 15);
    plain_backward(whole, model, 1);
    tagc_gpt2_destroy(model);
    for (size_t n_rows = 1; n_rows < 50; n_rows += 7) {
        assert_int_equal(tagc_gpt2_create_bounded(&config, 3, 16, n_rows * 33 * sizeof(float), &model),
                         TAGC_OK);
        assert_int_equal(model->chunk_rows, n_rows < 3 ? 3 : n_rows > 48 ? 48 : n_rows);
        assert_true(fabs(plain_forward(chunked, model, tokens, targets, 3, 15) - loss) < 1e-6);
        for (int i = 0; i < chunked->n_tensors; i++)
            memset(chunked->grads[i], 0, chunked->info[i].n_elems * sizeof(float));
        plain_backward(chunked, model, 1);
        assert_true(largest_difference(chunked, whole, 1) < 1e-5);
        tagc_gpt2_destroy(model);
    }
    plain_destroy(whole);
    plain_destroy(chunked);
}

/* Gradients are added, and scaled by the loss scale; two halves of a batch make the whole. */
TEST(test_accumulation) {
    tagc_gpt2_config config = {2, 2, 8, 16, 33, 0};
    int tokens[64], targets[64];
    random_tokens(33, 64, 5, tokens);
    random_tokens(33, 64, 6, targets);
    plain_params *whole = lively_params(&config, 7), *halves = lively_params(&config, 7);
    tagc_gpt2 *model;
    assert_int_equal(tagc_gpt2_create(&config, 4, 16, &model), TAGC_OK);
    double loss = plain_forward(whole, model, tokens, targets, 4, 16), sum = 0;
    plain_backward(whole, model, 1);
    for (int half = 0; half < 2; half++) {
        sum += plain_forward(halves, model, tokens + 32 * half, targets + 32 * half, 2, 16);
        plain_backward(halves, model, 64);
    }
    assert_true(fabs(sum / 2 - loss) < 1e-6);
    assert_true(largest_difference(halves, whole, 128) / 128 < 1e-5);
    plain_destroy(whole);
    plain_destroy(halves);
    tagc_gpt2_destroy(model);
}

/* Without targets the logits of the last position are those that the loss is made of. */
TEST(test_logits_of_last_position) {
    tagc_gpt2_config config = {1, 2, 8, 16, 21, 0};
    int tokens[18];
    random_tokens(21, 18, 5, tokens);
    plain_params *plain = lively_params(&config, 7);
    tagc_gpt2 *model;
    assert_int_equal(tagc_gpt2_create(&config, 2, 9, &model), TAGC_OK);
    plain_forward(plain, model, tokens, NULL, 2, 9);
    double loss[2];
    for (int b = 0; b < 2; b++) {
        double sum = 0;
        for (int v = 0; v < 21; v++) sum += exp((double)tagc_gpt2_logits(model)[b * 21 + v]);
        loss[b] = log(sum) - (double)tagc_gpt2_logits(model)[b * 21 + 4];
    }
    tagc_params params = plain_table(plain);
    assert_int_equal(tagc_gpt2_backward(model, &params, 1), TAGC_ERR_STATE);
    for (int b = 0; b < 2; b++) {
        /* The mean over 9 positions less the mean over the first 8 leaves the last. */
        int targets[9] = {1, 2, 3, 1, 2, 3, 1, 2, 4};
        double nine = 9 * plain_forward(plain, model, tokens + 9 * b, targets, 1, 9);
        double eight = 8 * plain_forward(plain, model, tokens + 9 * b, targets, 1, 8);
        assert_true(fabs(nine - eight - loss[b]) < 1e-5);
    }
    plain_destroy(plain);
    tagc_gpt2_destroy(model);
}

/* Whatever call fails, its status comes back at once and the model can be used again. */
TEST(test_failing_params) {
    tagc_gpt2_config config = {1, 2, 8, 16, 21, 1};
    int tokens[8], targets[8], n_failed = 0;
    random_tokens(21, 8, 5, tokens);
    random_tokens(21, 8, 6, targets);
    plain_params *plain = lively_params(&config, 7);
    tagc_gpt2 *model;
    assert_int_equal(tagc_gpt2_create(&config, 1, 8, &model), TAGC_OK);
    tagc_params params = plain_table(plain);
    double expected = plain_forward(plain, model, tokens, targets, 1, 8);
    for (;; n_failed++) {
        double loss;
        memset(plain->in_use, 0, sizeof plain->in_use);
        plain_begin(plain, 0);
        plain->calls_left = n_failed;
        tagc_status status = tagc_gpt2_forward(model, &params, tokens, targets, 1, 8, &loss);
        if (status == TAGC_OK) {
            plain_begin(plain, 1);
            status = tagc_gpt2_backward(model, &params, 1);
        }
        if (status == TAGC_OK) break;
        assert_int_equal(status, TAGC_ERR_TRANSPORT);
        assert_string_equal(tagc_last_error(), "rank 1 is gone");
        if (tagc_gpt2_backward(model, &params, 1) != TAGC_ERR_STATE) fail_msg("backward after a failure");
    }
    assert_int_equal(n_failed, 17 + 10 + 17); /* uses, uses and grads */
    plain->calls_left = -1;
    assert_true(plain_forward(plain, model, tokens, targets, 1, 8) == expected);
    plain_destroy(plain);
    tagc_gpt2_destroy(model);
}

TEST(test_bad_arguments) {
    tagc_gpt2_config config = {1, 2, 8, 16, 21, 1};
    tagc_gpt2 *model;
    int tokens[16] = {0}, bad[16] = {0};
    double loss;
    assert_int_equal(tagc_gpt2_create(&config, 1, 17, &model), TAGC_ERR_ARGUMENT);
    assert_null(model);
    assert_int_equal(tagc_gpt2_create(&config, 0, 16, &model), TAGC_ERR_ARGUMENT);
    assert_int_equal(tagc_gpt2_create(&config, 1 << 30, 16, &model), TAGC_ERR_ARGUMENT);
    assert_int_equal(tagc_gpt2_create(&config, 1, 16, &model), TAGC_OK);
    plain_params *plain = lively_params(&config, 7);
    tagc_params params = plain_table(plain);
    assert_int_equal(tagc_gpt2_forward(model, &params, tokens, tokens, 2, 8, &loss), TAGC_ERR_ARGUMENT);
    assert_int_equal(tagc_gpt2_forward(model, &params, tokens, tokens, 1, 17, &loss), TAGC_ERR_ARGUMENT);
    bad[15] = 21;
    assert_int_equal(tagc_gpt2_forward(model, &params, bad, tokens, 1, 16, &loss), TAGC_ERR_ARGUMENT);
    assert_string_equal(tagc_last_error(), "tokens[15] is 21, allowed is 0 to 20");
    bad[15] = -1;
    assert_int_equal(tagc_gpt2_forward(model, &params, tokens, bad, 1, 16, &loss), TAGC_ERR_ARGUMENT);
    plain_destroy(plain);
    tagc_gpt2_destroy(model);
    tagc_gpt2_destroy(NULL);
}
