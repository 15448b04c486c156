/* Loss and every gradient against what PyTorch's own layers gave in float64 (make_fixture.py). */
#include "plain_params.h"

#include <math.h>
#include <stdio.h>

#include "gpt2/safetensors.h"

static void read_entry(tagc_safetensors *file, const char *prefix, const char *name, size_t n, float *out) {
    char full[100];
    tagc_safetensors_entry entry;
    snprintf(full, sizeof full, "%s%s", prefix, name);
    int index = tagc_safetensors_find(file, full);
    assert_true(index >= 0);
    tagc_safetensors_entry_at(file, index, &entry);
    assert_int_equal(entry.n_elems, n);
    assert_int_equal(tagc_safetensors_read(file, index, 0, n, out), TAGC_OK);
}

static void read_tokens(tagc_safetensors *file, const char *name, size_t n, int *out) {
    float values[300];
    assert_true(n <= 300);
    read_entry(file, "", name, n, values);
    for (size_t i = 0; i < n; i++) out[i] = (int)values[i];
}

static void compare(const char *path, const tagc_gpt2_config *config, int n_batch, int n_tokens) {
    tagc_safetensors *file;
    tagc_gpt2 *model;
    int tokens[300], targets[300];
    float loss;
    size_t n_rows = (size_t)n_batch * (size_t)n_tokens;
    assert_int_equal(tagc_safetensors_open(path, &file), TAGC_OK);
    assert_int_equal(tagc_gpt2_create(config, n_batch, n_tokens, &model), TAGC_OK);
    plain_params *plain = plain_create(config, 0);
    for (int i = 0; i < plain->n_tensors; i++)
        read_entry(file, "", plain->info[i].name, plain->info[i].n_elems, plain->values[i]);
    read_tokens(file, "tokens", n_rows, tokens);
    read_tokens(file, "targets", n_rows, targets);
    read_entry(file, "", "loss", 1, &loss);

    double ours = plain_forward(plain, model, tokens, targets, n_batch, n_tokens);
    plain_backward(plain, model, 1);
    assert_true(fabs(ours - (double)loss) < 1e-6 * (double)loss);
    for (int i = 0; i < plain->n_tensors; i++) {
        float *expected = malloc(plain->info[i].n_elems * sizeof(float));
        float largest = 0, worst = 0;
        read_entry(file, "grad.", plain->info[i].name, plain->info[i].n_elems, expected);
        for (size_t j = 0; j < plain->info[i].n_elems; j++) {
            largest = fmaxf(largest, fabsf(expected[j]));
            worst = fmaxf(worst, fabsf(expected[j] - plain->grads[i][j]));
        }
        if (!(worst <= 5e-6f * largest))
            fail_msg("%s: off by %g of %g", plain->info[i].name, (double)worst, (double)largest);
        free(expected);
    }
    plain_destroy(plain);
    tagc_gpt2_destroy(model);
    tagc_safetensors_close(file);
}

TEST(test_untied) {
    compare(TAGC_TEST_DATA "/gpt2_untied.safetensors", &(tagc_gpt2_config){2, 3, 24, 136, 61, 0}, 2, 131);
}

TEST(test_tied) {
    compare(TAGC_TEST_DATA "/gpt2_tied.safetensors", &(tagc_gpt2_config){2, 2, 20, 48, 67, 1}, 3, 40);
}
