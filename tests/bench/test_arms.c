/* The arms of the table and the config files of the same names ask the engine for the same. */
#include "../test.h"
#include "bench/arms.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static void read_arm(const char *text, tagc_fsdp_options *engine) {
    tagc_arm *arms;
    int n;
    if (tagc_arms_read(text, NULL, NULL, &arms, &n) != TAGC_OK) fail_msg("%s: %s", text, tagc_last_error());
    assert_int_equal(n, 1);
    tagc_train_fsdp(&arms[0].options, engine);
    engine->names = NULL;
    tagc_arms_destroy(arms, n);
}

/* The first option but the file itself that two arms say differently; NULL: none. */
static const char *difference(const char *a, const char *b) {
    tagc_arm *first, *second;
    int n;
    const char *name = NULL;
    if (tagc_arms_read(a, NULL, NULL, &first, &n) != TAGC_OK) fail_msg("%s: %s", a, tagc_last_error());
    if (tagc_arms_read(b, NULL, NULL, &second, &n) != TAGC_OK) fail_msg("%s: %s", b, tagc_last_error());
    for (int i = 0; i < tagc_train_command.n_options && !name; i++) {
        char one[256], other[256];
        tagc_options_get(&tagc_train_command, &first->options, i, one, sizeof one);
        tagc_options_get(&tagc_train_command, &second->options, i, other, sizeof other);
        if (strcmp(tagc_train_command.options[i].name, "config") != 0 && strcmp(one, other) != 0)
            name = tagc_train_command.options[i].name;
    }
    tagc_arms_destroy(first, 1);
    tagc_arms_destroy(second, 1);
    return name;
}

TEST(arms_are_their_files) {
    static const char *const names[][2] = {
        {"fsdp", "fsdp"},         {"packed", "packed"},           {"tagc-10x", "tagc-10x-or"},
        {"direct", "direct"},     {"direct-bf16", "direct-bf16"}, {"zero2-direct", "zero2-direct"},
        {"all-legs", "all-legs"}, {"ddp-direct", "ddp-direct"},   {"all-legs-2bit", "all-legs-2bit"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[1024];
        snprintf(path, sizeof path, TAGC_TEST_DATA "/../../lab/configs/%s.conf", names[i][1]);
        const char *option = difference(names[i][0], path);
        if (option) fail_msg("arm %s and %s differ in --%s", names[i][0], path, option);
    }
    assert_string_equal(difference("packed", "packed+sparsity=0.9"), "sparsity");
}

/* What every config file comes to, "*" for low-bit values of whichever default: the paper's and the dense ones train as they
 * always did. */
TEST(files_come_to) {
    static const char *const names[] = {
        "exchange",         "sparsity", "ratio",         "index",    "unpeeled", "compressed-beta1",
        "compressed-beta2", "mild",     "mild-sparsity", "compress", "wrap",     "sharding"};
    static const struct {
        const char *file, *words;
    } files[] = {
        {"fsdp", "dense 0.95 auto or packed 0.9 0.95 dense 0 none block full"},
        {"demo", "direct 0.95 auto or packed 0.5 auto * 0.85 non-attention-linear block full"},
        {"packed", "packed 0.9875 auto or packed 0.9 0.95 dense 0 non-attention-linear block full"},
        {"paper-gpt2-162m", "sketch 0.9875 10 or estimate 0.9 0.95 dense 0 paper matrix full"},
        {"tagc-10x-or", "sketch 0.9875 10 or packed 0.9 0.95 dense 0 non-attention-linear block full"},
        {"tagc-10x-sum4", "sketch 0.9875 10 sum4 packed 0.9 0.95 dense 0 non-attention-linear block full"},
        {"tagc-4x-or", "sketch 0.9 4 or packed 0.9 0.95 dense 0 non-attention-linear block full"},
        {"tagc-4x-sum4", "sketch 0.9 4 sum4 packed 0.9 0.95 dense 0 non-attention-linear block full"},
        {"tagc-2x-or", "sketch 0.8 2 or packed 0.9 0.95 dense 0 non-attention-linear block full"},
        {"tagc-2x-sum4", "sketch 0.8 2 sum4 packed 0.9 0.95 dense 0 non-attention-linear block full"},
        {"direct", "direct 0.95 auto or packed 0.5 auto * 0.85 non-attention-linear block full"},
        {"direct-bf16", "direct 0.95 auto or packed 0.5 auto * 0.85 non-attention-linear block full"},
        {"zero2-direct", "direct 0.95 auto or packed 0.5 auto * 0.85 non-attention-linear block grad"},
        {"all-legs", "direct 0.95 auto or packed 0.5 auto * 0.85 non-attention-linear block grad"},
        {"all-legs-2bit", "direct 0.95 auto or packed 0.5 auto * 0.85 non-attention-linear block grad"},
        {"ddp-direct", "direct 0.95 auto or packed 0.5 auto * 0.85 non-attention-linear block none"},
    };
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char path[1024], text[512] = "", word[64];
        tagc_arm *arm;
        int n;
        snprintf(path, sizeof path, TAGC_TEST_DATA "/../../lab/configs/%s.conf", files[i].file);
        if (tagc_arms_read(path, NULL, NULL, &arm, &n) != TAGC_OK)
            fail_msg("%s: %s", path, tagc_last_error());
        for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
            tagc_options_get(&tagc_train_command, &arm->options,
                             tagc_options_find(&tagc_train_command, names[k]), word, sizeof word);
            int is_low_bit = k == 7 && (strcmp(word, "int4") == 0 || strcmp(word, "int2") == 0);
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s", k ? " " : "",
                     is_low_bit ? "*" : word);
        }
        if (strcmp(text, files[i].words) != 0) fail_msg("%s: %s instead of %s", path, text, files[i].words);
        tagc_arms_destroy(arm, n);
    }
}

static void come_to(const char *arm, double sparsity, double beta1_compressed, int mild,
                    double mild_sparsity) {
    tagc_fsdp_options o;
    read_arm(arm, &o);
    if (o.reducer.sparsity != sparsity || o.beta1_compressed != beta1_compressed || o.mild.exchange != mild ||
        o.mild.sparsity != mild_sparsity)
        fail_msg("%s: sparsity %g, compressed-beta1 %g, mild %d at %g", arm, o.reducer.sparsity,
                 o.beta1_compressed, o.mild.exchange, o.mild.sparsity);
}

/* What is not given depends on the exchange; what is given stays. */
TEST(defaults_follow_the_exchange) {
    enum { DENSE = TAGC_NO_MILD, DIRECT = TAGC_EXCHANGE_DIRECT };
    come_to("direct", 0.95, 0.5, DIRECT, 0.85);
    come_to("direct+exchange=packed", 0.9875, 0.9, DENSE, 0);
    come_to("direct+exchange=sketch+beta1=0.8", 0.9875, 0.8, DENSE, 0);
    come_to("direct+exchange=dense", 0, 0.9, DENSE, 0);
    come_to("direct+compress=none", 0.95, 0.9, DENSE, 0);
    come_to("direct+sparsity=0", 0, 0.9, DIRECT, 0);
    come_to("direct+sparsity=0.5", 0.5, 0.5, DIRECT, 0.5);
    come_to("direct+sparsity=0.99", 0.99, 0.5, DIRECT, 0.85);
    come_to("direct+beta1=0.3", 0.95, 0.3, DIRECT, 0.85);
    come_to("direct+mild=dense", 0.95, 0.5, DENSE, 0);
    come_to("direct+compressed-beta1=0.9", 0.95, 0.9, DIRECT, 0.85);
    come_to("direct+mild-sparsity=0.9+sparsity=0.9875", 0.9875, 0.5, DIRECT, 0.9);
    come_to("direct+exchange=packed+mild=int8+mild-sparsity=0.5+compressed-beta1=0", 0.9875, 0, DIRECT, 0.5);
    tagc_fsdp_options o;
    static const struct {
        const char *arm;
        double beta2_compressed;
    } second[] = {{"direct", -1}, /* the schedule's */
                  {"direct+sparsity=0", 0.95},
                  {"direct+exchange=packed", 0.95},
                  {"direct+compress=none", 0.95},
                  {"direct+compressed-beta2=0.7", 0.7}};
    for (size_t i = 0; i < sizeof second / sizeof second[0]; i++) {
        read_arm(second[i].arm, &o);
        if (fabs(o.beta2_compressed - second[i].beta2_compressed) > 1e-12)
            fail_msg("%s: compressed-beta2 %g", second[i].arm, o.beta2_compressed);
        /* A checkpoint holds it as text, which a resumed run reads. */
        tagc_train_options values = {.compressed_beta2 = o.beta2_compressed}, resumed;
        char text[32];
        int row = tagc_options_find(&tagc_train_command, "compressed-beta2");
        tagc_options_get(&tagc_train_command, &values, row, text, sizeof text);
        if (tagc_options_set(&tagc_train_command, &resumed, row, text, "") != TAGC_OK)
            fail_msg("%s: %s", second[i].arm, tagc_last_error());
        assert_true(resumed.compressed_beta2 == o.beta2_compressed);
    }
    /* The engine's own defaults are the same. */
    tagc_fsdp_options init, arm;
    tagc_fsdp_options_init(&init);
    tagc_fsdp_options_resolve(&init);
    read_arm("direct", &arm);
    assert_true(init.reducer.exchange == arm.reducer.exchange &&
                init.reducer.sparsity == arm.reducer.sparsity);
    assert_true(init.reducer.format == arm.reducer.format && init.beta1_compressed == arm.beta1_compressed);
    assert_true(init.mild.exchange == arm.mild.exchange && init.mild.sparsity == arm.mild.sparsity);
    assert_true(init.mild.format == arm.mild.format && init.policy == arm.policy);
}

/* What would stand in an arm's name and change nothing of what is measured. */
TEST(arms_have_what_changes_them) {
    static const char *const refused[] = {
        "data=a", "val-data=a", "init-from=a",        "ranks=2",        "timeout=3", "blas-threads=2",
        "out=a",  "fork=a",     "schedule-from=fork", "eval-batches=2", "keep=3",    "levels=hosts=2"};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        char text[64];
        tagc_arm *arms;
        int n;
        snprintf(text, sizeof text, "packed+%s", refused[i]);
        assert_int_equal(tagc_arms_read(text, NULL, NULL, &arms, &n), TAGC_ERR_ARGUMENT);
        assert_non_null(strstr(tagc_last_error(), "is not an arm's own"));
    }
}
