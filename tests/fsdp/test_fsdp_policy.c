/* The engine gives GPT-2's tensors the classes that the policy of names gives their names: by kinds that the model tells, where the policy
 * reads. Only its own limit is the policy's alone: the engine compresses small matrices, too. */
#include "../test.h"
#include "fsdp/fsdp.h"
#include "gpt2/gpt2.h"

#include <stdlib.h>

static void check_model(const tagc_gpt2_config *config, uint64_t min_elems) {
    tagc_fsdp_options options;
    tagc_fsdp_options_init(&options);
    tagc_fsdp_options_resolve(&options);
    tagc_tensor_info *tensors;
    int n[TAGC_N_CLASSES] = {0};
    assert_int_equal(tagc_gpt2_tensors(config, &tensors), TAGC_OK);
    for (int i = 0; i < tagc_gpt2_n_tensors(config); i++) {
        const tagc_tensor_info *t = &tensors[i];
        const uint64_t shape[] = {t->n_rows, t->n_cols};
        tagc_class class_;
        const char *reason;
        assert_int_equal(tagc_classify(t->name, shape, 2, min_elems, &class_, &reason), TAGC_OK);
        tagc_class own = tagc_fsdp_class(&options, t);
        if (own != class_)
            fail_msg("%s: the engine says %d, the policy %d (%s)", t->name, own, class_, reason);
        n[class_]++;
    }
    free(tensors);
    /* per block c_proj twice and c_fc; c_attn */
    assert_int_equal(n[TAGC_CLASS_COMPRESSED], 3 * config->n_layer + (config->tied ? 1 : 2));
    assert_int_equal(n[TAGC_CLASS_MILD], config->n_layer + 1);
}

TEST(presets) {
    static const char *const names[] = {"gpt2-162m",  "gpt2-124m", "gpt2-medium",
                                        "gpt2-large", "gpt2-xl",   "demo"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        tagc_gpt2_config config;
        assert_int_equal(tagc_gpt2_preset(names[i], &config), TAGC_OK);
        check_model(&config, TAGC_CLASS_MIN_ELEMS);
    }
}

/* Some of its matrices are smaller than TAGC_CLASS_MIN_ELEMS. */
TEST(tiny) {
    tagc_gpt2_config config;
    assert_int_equal(tagc_gpt2_preset("tiny", &config), TAGC_OK);
    check_model(&config, 0);
}
