/* Options that a checkpoint or a result of an earlier program holds mean what they meant then. */
#include "options/train_options.h"
#include "train/saved.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define MODEL                                                                                                \
    "\"model\":{\"n_layer\":2,\"n_head\":2,\"n_embd\":32,\"block_size\":32,\"vocab_size\":256,\"tied\":1},"  \
    "\"world_size\":2,\"position\":0,\"n_tokens\":0,"
/* of programs that had recipes which are gone, and a first moment of -1 */
#define GONE "\"residual-decay\":\"1\",\"local-momentum\":\"0\",\"low-rank\":\"0\",\"residual-bf16\":\"no\""

typedef struct outcome {
    tagc_status known, merged;
    tagc_fsdp_options engine;
} outcome;

/* A start with these words of the command line that goes on from a checkpoint with these options. */
static outcome resume(const char *options, int argc, char **argv) {
    char text[4096];
    tagc_saved saved;
    tagc_train_options values;
    tagc_parsed parsed;
    tagc_progress silent = {.quiet = 1};
    outcome out;
    snprintf(text, sizeof text, "{" MODEL "\"options\":{%s}}", options);
    assert_int_equal(tagc_saved_read(text, &saved), TAGC_OK);
    assert_int_equal(tagc_options_parse(&tagc_train_command, argc, argv, &values, &parsed), TAGC_OK);
    out.known = tagc_saved_check_known(&saved, &tagc_train_command, &silent);
    out.merged = tagc_saved_merge(&saved, &parsed, &values, &silent);
    tagc_train_fsdp(&values, &out.engine);
    tagc_options_destroy(&parsed);
    tagc_saved_destroy(&saved);
    return out;
}

static void check(const char *options, int exchange, double sparsity, double beta1, int mild,
                  double mild_sparsity) {
    outcome o = resume(options, 0, NULL);
    if (o.known != TAGC_OK || o.merged != TAGC_OK) fail_msg("%s: %s", options, tagc_last_error());
    if (o.engine.reducer.exchange != exchange || o.engine.reducer.sparsity != sparsity ||
        o.engine.beta1_compressed != beta1 || o.engine.mild.exchange != mild ||
        o.engine.mild.sparsity != mild_sparsity)
        fail_msg("%s: exchange %d, sparsity %g, compressed-beta1 %g, mild %d at %g", options,
                 o.engine.reducer.exchange, o.engine.reducer.sparsity, o.engine.beta1_compressed,
                 o.engine.mild.exchange, o.engine.mild.sparsity);
    if (o.engine.beta2_compressed != o.engine.beta2)
        fail_msg("%s: beta2 %g, compressed-beta2 %g", options, o.engine.beta2, o.engine.beta2_compressed);
    assert_int_equal(o.engine.reducer.format,
                     exchange == TAGC_EXCHANGE_DIRECT ? TAGC_FORMAT_INT4 : TAGC_FORMAT_FP32);
}

static void old_options_mean_what_they_meant(void **state) {
    (void)state;
    enum { DENSE = TAGC_EXCHANGE_DENSE, DIRECT = TAGC_EXCHANGE_DIRECT };
    /* the first version, and one whose options were never said */
    check("\"exchange\":\"packed\",\"sparsity\":\"0.9875\",\"beta1\":\"0.9\"", TAGC_EXCHANGE_PACKED, 0.9875,
          0.9, DENSE, 0);
    check("\"exchange\":\"sketch\",\"sparsity\":\"0.9\"", TAGC_EXCHANGE_SKETCH, 0.9, 0.9, DENSE, 0);
    check("", TAGC_EXCHANGE_PACKED, 0.9875, 0.9, DENSE, 0);
    /* direct before its recipe was the default */
    check("\"exchange\":\"direct\",\"sparsity\":\"0.9\",\"values\":\"int4\",\"beta1\":\"0.8\",\"compressed-"
          "beta1\":\"-1\","
          "\"mild\":\"dense\",\"mild-sparsity\":\"0\"," GONE,
          DIRECT, 0.9, 0.8, DENSE, 0);
    check("\"exchange\":\"direct\",\"sparsity\":\"0.9\"", DIRECT, 0.9, 0.9, DENSE, 0);
    check("\"exchange\":\"direct\",\"sparsity\":\"0.9\",\"beta2\":\"0.8\"", DIRECT, 0.9, 0.9, DENSE, 0);
    /* and since: autos are saved as what they came to */
    check("\"exchange\":\"direct\",\"sparsity\":\"0.9\",\"compressed-beta1\":\"0\",\"mild\":\"dense\",\"mild-"
          "sparsity\":\"0\"",
          DIRECT, 0.9, 0, DENSE, 0);
}

static void what_is_given_is_compared_resolved(void **state) {
    (void)state;
    static const char saved[] =
        "\"exchange\":\"direct\",\"sparsity\":\"0.95\",\"values\":\"int4\",\"beta1\":\"0.9\","
        "\"compressed-beta1\":\"0\",\"mild\":\"int4\",\"mild-sparsity\":\"0.8\"";
    char *autos[] = {"--mild=auto", "--sparsity=auto", "--mild-sparsity=auto"}, *other[] = {"--mild=dense"};
    assert_int_equal(resume(saved, 3, autos).merged, TAGC_OK);
    assert_int_equal(resume(saved, 1, other).merged, TAGC_ERR_MISMATCH);
    assert_non_null(
        strstr(tagc_last_error(), "--mild is \"dense\", but the checkpoint was made with \"int4\""));
}

static void options_that_are_gone(void **state) {
    (void)state;
    static const char *const in_use[] = {"\"residual-decay\":\"0.99\"", "\"local-momentum\":\"0.9\"",
                                         "\"low-rank\":\"4\"", "\"residual-bf16\":\"yes\""};
    for (size_t i = 0; i < sizeof in_use / sizeof *in_use; i++) {
        assert_int_equal(resume(in_use[i], 0, NULL).known, TAGC_ERR_UNSUPPORTED);
        assert_non_null(strstr(tagc_last_error(), "which this build no longer has"));
    }
    assert_int_equal(resume(GONE, 0, NULL).known, TAGC_OK);
    assert_int_equal(resume("\"of-the-future\":\"5\"", 0, NULL).known, TAGC_OK); /* noted */
}

/* What is no text would be taken for an option that is not there, and printed as one that is. */
static void options_are_texts(void **state) {
    (void)state;
    static const char *const bad[] = {"{\"lr\":1}", "{\"seed\":\"1\",\"out\":null}", "{\"two-level\":true}",
                                      "[]", "null"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char text[400];
        tagc_saved saved;
        snprintf(text, sizeof text, "{" MODEL "\"options\":%s}", bad[i]);
        assert_int_equal(tagc_saved_read(text, &saved), TAGC_ERR_CORRUPT);
        assert_non_null(strstr(tagc_last_error(), "option"));
        assert_null(saved.options);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(old_options_mean_what_they_meant),
        cmocka_unit_test(what_is_given_is_compared_resolved),
        cmocka_unit_test(options_that_are_gone),
        cmocka_unit_test(options_are_texts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
