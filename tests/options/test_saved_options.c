/* What the command reads of a checkpoint, and options given beside it. */
#include "../test.h"
#include "options/saved_options.h"
#include "options/train_options.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MODEL                                                                                                \
    "\"model\":{\"n_layer\":2,\"n_head\":2,\"n_embd\":32,\"block_size\":32,\"vocab_size\":256,\"tied\":1},"  \
    "\"world_size\":2,\"position\":0,\"n_tokens\":0,\"fork_step\":0,\"data_n_tokens\":9,"                    \
    "\"data_hash\":\"0123456789abcdef\",\"tokenizer\":\"\","

typedef struct outcome {
    tagc_status known, merged;
} outcome;

/* A start with these words of the command line that goes on from a checkpoint with these options. */
static outcome resume(const char *options, int argc, char **argv) {
    static char text[32768];
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

TEST(what_is_given_is_compared_resolved) {
    static const char saved[] =
        "\"exchange\":\"direct\",\"sparsity\":\"0.95\",\"values\":\"int4\",\"beta1\":\"0.9\","
        "\"compressed-beta1\":\"0\",\"mild\":\"int4\",\"mild-sparsity\":\"0.8\"";
    char *autos[] = {"--mild=auto", "--sparsity=auto", "--mild-sparsity=auto"}, *other[] = {"--mild=dense"};
    assert_int_equal(resume(saved, 3, autos).merged, TAGC_OK);
    assert_int_equal(resume(saved, 1, other).merged, TAGC_ERR_MISMATCH);
    assert_non_null(
        strstr(tagc_last_error(), "--mild is \"dense\", but the checkpoint was made with \"int4\""));
}

TEST(an_unknown_option_is_refused) {
    assert_int_equal(resume("\"lr\":\"0.5\"", 0, NULL).known, TAGC_OK);
    assert_int_equal(resume("\"lr\":\"0.5\",\"of-the-future\":\"5\"", 0, NULL).known, TAGC_ERR_UNSUPPORTED);
    assert_non_null(strstr(tagc_last_error(), "--of-the-future 5, which this build does not know"));
}

TEST(what_a_checkpoint_needs) {
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
TEST(options_are_texts) {
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

/* Words of the command line, as they are saved and as they come back. */
static tagc_status save(int argc, char **argv, tagc_saved *out) {
    tagc_train_options values;
    tagc_parsed parsed;
    tagc_saved saved = {.model = {2, 2, 32, 32, 256, 1}};
    assert_int_equal(tagc_options_parse(&tagc_train_command, argc, argv, &values, &parsed), TAGC_OK);
    tagc_status status = tagc_saved_check_text(&tagc_train_command, &values);
    json_t *texts = tagc_saved_options(&tagc_train_command, &values);
    char *text = tagc_saved_write(&saved, texts);
    assert_int_equal(tagc_saved_read(text, out), TAGC_OK);
    free(text);
    json_decref(texts);
    tagc_options_destroy(&parsed);
    return status;
}

TEST(texts_of_any_length_are_saved) {
    enum { LENGTH = 9000 };
    static char patterns[LENGTH + 32] = "--compress-names=";
    size_t n = strlen(patterns);
    for (int i = 0; i < LENGTH; i++) patterns[n + (size_t)i] = i % 7 ? (char)('a' + i % 26) : ',';
    char *argv[] = {patterns};
    tagc_saved saved;
    assert_int_equal(save(1, argv, &saved), TAGC_OK);
    assert_string_equal(json_string_value(json_object_get(saved.options, "compress-names")), patterns + n);
    tagc_saved_destroy(&saved);

    /* The last letter counts, where a run goes on with another text. */
    static char options[2 * LENGTH];
    snprintf(options, sizeof options, "\"compress-names\":\"%s\"", patterns + n);
    assert_int_equal(resume(options, 1, argv).merged, TAGC_OK);
    patterns[n + LENGTH - 1] = 'Z';
    assert_int_equal(resume(options, 1, argv).merged, TAGC_ERR_MISMATCH);
}

/* Cut, it would be another one, and perhaps no text. */
TEST(a_tokenizer_that_is_too_long_is_refused) {
    char text[1000];
    tagc_saved saved;
    for (int n = 63; n <= 64; n++) {
        static const char model[] = "{" MODEL "\"options\":{}}";
        const char *at = strstr(model, "\"tokenizer\":\"") + strlen("\"tokenizer\":\"");
        snprintf(text, sizeof text, "%.*s%0*d%s", (int)(at - model), model, n, 0, at);
        assert_int_equal(tagc_saved_read(text, &saved), n == 63 ? TAGC_OK : TAGC_ERR_CORRUPT);
        tagc_saved_destroy(&saved);
    }
    assert_non_null(strstr(tagc_last_error(), "\"tokenizer\" is longer than 63 bytes"));
}

TEST(what_is_not_utf8_is_refused) {
    char *bad[] = {"--data=caf\xe9"}, *good[] = {"--data=caf\xc3\xa9"}, *own[] = {"--out=caf\xe9"};
    tagc_saved saved;
    assert_int_equal(save(1, good, &saved), TAGC_OK);
    assert_string_equal(json_string_value(json_object_get(saved.options, "data")), "caf\xc3\xa9");
    tagc_saved_destroy(&saved);
    assert_int_equal(save(1, own, &saved), TAGC_OK); /* which the next start gives itself */
    tagc_saved_destroy(&saved);
    assert_int_equal(save(1, bad, &saved), TAGC_ERR_ARGUMENT);
    assert_non_null(strstr(tagc_last_error(), "--data is no UTF-8 text"));
    tagc_saved_destroy(&saved);
}

/* Ranks that agree on all but the end of a long text do not agree. */
static void *agree_rank(void *arg) {
    char *argv[] = {((char **)arg)[1]};
    tagc_local_group *group = (tagc_local_group *)(void *)((char **)arg)[0];
    int rank = argv[0][strlen(argv[0]) - 1] == 'b';
    tagc_comm *comm;
    tagc_train_options values;
    tagc_parsed parsed;
    if (tagc_comm_create_local(group, rank, NULL, &comm) != TAGC_OK ||
        tagc_options_parse(&tagc_train_command, 1, argv, &values, &parsed) != TAGC_OK)
        return NULL;
    tagc_status status = tagc_agree_options(comm, &tagc_train_command, &values);
    tagc_options_destroy(&parsed);
    tagc_comm_destroy(comm);
    return status == TAGC_ERR_MISMATCH ? arg : NULL;
}

TEST(ranks_compare_whole_texts) {
    enum { LENGTH = 3000 };
    tagc_local_group *group;
    assert_int_equal(tagc_local_group_create(2, &group), TAGC_OK);
    char texts[2][LENGTH];
    pthread_t threads[2];
    char *given[2][2];
    for (int i = 0; i < 2; i++) {
        memset(texts[i], 'x', LENGTH);
        memcpy(texts[i], "--compress-names=", 17);
        texts[i][LENGTH - 2] = (char)('a' + i);
        texts[i][LENGTH - 1] = 0;
        given[i][0] = (char *)(void *)group;
        given[i][1] = texts[i];
        assert_int_equal(pthread_create(&threads[i], NULL, agree_rank, given[i]), 0);
    }
    for (int i = 0; i < 2; i++) {
        void *differs;
        assert_int_equal(pthread_join(threads[i], &differs), 0);
        assert_non_null(differs);
    }
    tagc_local_group_destroy(group);
}
