/* What the command reads of a checkpoint, and options given beside it. */
#include "options/saved_options.h"
#include "options/train_options.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define MODEL                                                                                                \
    "\"model\":{\"n_layer\":2,\"n_head\":2,\"n_embd\":32,\"block_size\":32,\"vocab_size\":256,\"tied\":1},"  \
    "\"world_size\":2,\"position\":0,\"n_tokens\":0,\"fork_step\":0,\"data_n_tokens\":9,"                    \
    "\"data_hash\":\"0123456789abcdef\",\"tokenizer\":\"\","

typedef struct outcome {
    tagc_status known, merged;
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
    out.known = tagc_saved_check_known(&saved, &tagc_train_command);
    out.merged = tagc_saved_merge(&saved, &parsed, &values, &silent);
    tagc_options_destroy(&parsed);
    tagc_saved_destroy(&saved);
    return out;
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

static void an_unknown_option_is_refused(void **state) {
    (void)state;
    assert_int_equal(resume("\"lr\":\"0.5\"", 0, NULL).known, TAGC_OK);
    assert_int_equal(resume("\"lr\":\"0.5\",\"of-the-future\":\"5\"", 0, NULL).known, TAGC_ERR_UNSUPPORTED);
    assert_non_null(strstr(tagc_last_error(), "--of-the-future 5, which this build does not know"));
}

static void what_a_checkpoint_needs(void **state) {
    (void)state;
    static const char *const members[] = {"model",     "world_size",    "position",  "n_tokens",
                                          "fork_step", "data_n_tokens", "data_hash", "tokenizer"};
    for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
        char text[1000], *at;
        tagc_saved saved;
        snprintf(text, sizeof text, "{" MODEL "\"options\":{}}");
        assert_int_equal(tagc_saved_read(text, &saved), TAGC_OK);
        tagc_saved_destroy(&saved);
        at = strstr(text, members[i]);
        assert_non_null(at);
        *at = 'x';
        assert_int_equal(tagc_saved_read(text, &saved), TAGC_ERR_CORRUPT);
    }
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
        cmocka_unit_test(what_is_given_is_compared_resolved),
        cmocka_unit_test(an_unknown_option_is_refused),
        cmocka_unit_test(what_a_checkpoint_needs),
        cmocka_unit_test(options_are_texts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
