/* Presets, the tensor table, initial values and sampling. */
#include "plain_params.h"

#include <math.h>
#include <string.h>

TEST(test_presets) {
    /* n_layer (12 n^2 + 13 n) + 2 n + positions, vocabulary (twice when untied) */
    const struct {
        const char *name;
        uint64_t n_params;
    } known[] = {{"gpt2-162m", 12u * (12u * 768 * 768 + 13 * 768) + 2 * 768 + 1024 * 768 + 2u * 50304 * 768},
                 {"gpt2-124m", 124439808},
                 {"demo", 4 * (12 * 128 * 128 + 13 * 128) + 2 * 128 + 128 * 128 + 2 * 256 * 128},
                 {"tiny", 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32 + 32 * 32 + 2 * 256 * 32}};
    tagc_gpt2_config config;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        assert_int_equal(tagc_gpt2_preset(known[i].name, &config), TAGC_OK);
        assert_int_equal(tagc_gpt2_config_check(&config), TAGC_OK);
        assert_int_equal(tagc_gpt2_n_params(&config), known[i].n_params);
    }
    assert_int_equal(tagc_gpt2_preset("gpt3", &config), TAGC_ERR_ARGUMENT);
    assert_string_equal(tagc_last_error(), "model \"gpt3\" is not one of gpt2-162m, gpt2-124m, gpt2, "
                                           "gpt2-medium, gpt2-large, gpt2-xl, demo, tiny");
}

TEST(test_check) {
    const tagc_gpt2_config good = {2, 2, 8, 16, 32, 0};
    const struct {
        size_t field;
        int low, high;
    } bad[] = {{offsetof(tagc_gpt2_config, n_layer), 0, 1001},
               {offsetof(tagc_gpt2_config, n_head), 0, 9},
               {offsetof(tagc_gpt2_config, n_head), -2, 3},
               {offsetof(tagc_gpt2_config, n_embd), 0, 65537},
               {offsetof(tagc_gpt2_config, block_size), -1, (1 << 20) + 1},
               {offsetof(tagc_gpt2_config, vocab_size), 0, (1 << 24) + 1},
               {offsetof(tagc_gpt2_config, tied), -1, 2}};
    assert_int_equal(tagc_gpt2_config_check(&good), TAGC_OK);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        for (int high = 0; high < 2; high++) {
            tagc_gpt2_config config = good;
            memcpy((char *)&config + bad[i].field, high ? &bad[i].high : &bad[i].low, sizeof(int));
            assert_int_equal(tagc_gpt2_config_check(&config), TAGC_ERR_ARGUMENT);
        }
    }
}

TEST(test_table) {
    for (int tied = 0; tied < 2; tied++) {
        tagc_gpt2_config config = {2, 2, 8, 16, 32, tied};
        tagc_tensor_info info, first, last;
        int n = tagc_gpt2_n_tensors(&config), layer = 0;
        assert_int_equal(n, 2 + 24 + (tied ? 2 : 3));
        for (int i = 0; i < n; i++) {
            tagc_gpt2_tensor(&config, i, &info);
            assert_int_equal(info.n_elems, info.n_rows * info.n_cols);
            assert_true(info.layer == layer || info.layer == layer + 1);
            layer = info.layer;
            assert_int_equal(info.decay, info.n_cols > 1);
        }
        assert_int_equal(layer, 3);
        tagc_gpt2_tensor(&config, 0, &first);
        tagc_gpt2_tensor(&config, n - 1, &last);
        assert_string_equal(first.name, "wte.weight");
        assert_string_equal(last.name, tied ? "ln_f.bias" : "lm_head.weight");
        tagc_gpt2_tensor(&config, 2 + 12 + 8, &info);
        assert_string_equal(info.name, "h.1.mlp.c_fc.weight");
        assert_int_equal(info.kind, TAGC_TENSOR_MLP);
        assert_int_equal(info.n_rows, 8);
        assert_int_equal(info.n_cols, 32);
    }
}

TEST(test_initial_values) {
    tagc_gpt2_config config = {2, 2, 64, 64, 256, 0};
    float all[256 * 64], part[300];
    for (int tensor = 0; tensor < tagc_gpt2_n_tensors(&config); tensor++) {
        tagc_tensor_info info;
        tagc_gpt2_tensor(&config, tensor, &info);
        size_t n = info.n_elems;
        tagc_gpt2_init_tensor(&config, tensor, 42, 0, n, all);
        double mean = 0, square = 0, fourth = 0;
        for (size_t i = 0; i < n; i++) {
            double x = (double)all[i];
            mean += x / (double)n;
            square += x * x / (double)n;
            fourth += x * x * x * x / (double)n;
        }
        if (info.decay) {
            double deviation = strstr(info.name, "c_proj") ? 0.01 : 0.02; /* 0.02 / sqrt(2 * 2) */
            assert_true(fabs(mean) < 5 * deviation / sqrt((double)n));
            assert_true(fabs(square / (deviation * deviation) - 1) < 8 / sqrt((double)n));
            assert_true(fabs(fourth / (square * square) - 3) <
                        25 / sqrt((double)n)); /* a normal's kurtosis */
        } else {
            assert_true(mean == (strstr(info.name, "ln") && strstr(info.name, "weight") ? 1 : 0));
            assert_true(square == mean);
        }
        for (size_t first = 0; first + 300 < n; first += 101) {
            size_t n_part = 1 + first % 300;
            tagc_gpt2_init_tensor(&config, tensor, 42, first, n_part, part);
            assert_memory_equal(part, all + first, n_part * sizeof *part);
        }
    }
    float other[256 * 64];
    tagc_gpt2_init_tensor(&config, 0, 42, 0, 256 * 64, all);
    tagc_gpt2_init_tensor(&config, 0, 43, 0, 256 * 64, other);
    assert_memory_not_equal(all, other, sizeof all);
    tagc_gpt2_init_tensor(&config, tagc_gpt2_n_tensors(&config) - 1, 42, 0, 256 * 64, other);
    assert_memory_not_equal(all, other, sizeof all);
}

TEST(test_sample) {
    const float logits[5] = {0, 2, 1, 2, -3};
    float scratch[5];
    uint64_t rng = 1;
    assert_int_equal(tagc_gpt2_sample(logits, 5, 0, 0, &rng, scratch), 1);

    enum { N_DRAWS = 200000 };
    for (int top_k = 0; top_k <= 5; top_k++) {
        double temperature = 0.5 + 0.3 * top_k, weight[5], sum = 0;
        int n_seen[5] = {0};
        for (int i = 0; i < 5; i++) {
            /* Logits in order are 2, 2, 1, 0, -3; equals of the last kept one stay. */
            const float least[6] = {-3, 2, 2, 1, 0, -3};
            weight[i] = logits[i] >= least[top_k] ? exp((double)logits[i] / temperature) : 0;
            sum += weight[i];
        }
        for (int draw = 0; draw < N_DRAWS; draw++)
            n_seen[tagc_gpt2_sample(logits, 5, temperature, top_k, &rng, scratch)]++;
        for (int i = 0; i < 5; i++) {
            double p = weight[i] / sum;
            assert_true(fabs(n_seen[i] - N_DRAWS * p) <= 5 * sqrt(N_DRAWS * p * (1 - p)));
        }
    }
}
