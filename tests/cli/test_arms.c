/* The arms of the table and the config files of the same names ask the engine for the same. */
#include "cli/arms.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static void read_arm(const char *text, tagc_fsdp_options *engine) {
    tagc_arm *arms;
    int n;
    if (tagc_arms_parse(text, 0, NULL, &arms, &n) != TAGC_OK) fail_msg("%s: %s", text, tagc_last_error());
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
    if (tagc_arms_parse(a, 0, NULL, &first, &n) != TAGC_OK) fail_msg("%s: %s", a, tagc_last_error());
    if (tagc_arms_parse(b, 0, NULL, &second, &n) != TAGC_OK) fail_msg("%s: %s", b, tagc_last_error());
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

static void arms_are_their_files(void **state) {
    (void)state;
    static const char *const names[][2] = {
        {"fsdp", "fsdp"},         {"packed", "packed"},           {"tagc-10x", "tagc-10x-or"},
        {"direct", "direct"},     {"direct-bf16", "direct-bf16"}, {"zero2-direct", "zero2-direct"},
        {"all-legs", "all-legs"}, {"ddp-direct", "ddp-direct"},   {"all-legs-2bit", "all-legs-2bit"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[1024];
        snprintf(path, sizeof path, TAGC_TEST_DATA "/../../configs/%s.conf", names[i][1]);
        const char *option = difference(names[i][0], path);
        if (option) fail_msg("arm %s and %s differ in --%s", names[i][0], path, option);
    }
    assert_string_equal(difference("packed", "packed+sparsity=0.9"), "sparsity");
}

/* rotate goes where every element is sent, and nowhere else. */
static void rotate_is_for_dense_blocks(void **state) {
    (void)state;
    tagc_fsdp_options o;
    read_arm("direct+rotate=yes", &o);
    assert_true(!o.reducer.rotate && !o.mild.rotate);
    read_arm("direct+rotate=yes+mild-sparsity=0", &o);
    assert_true(!o.reducer.rotate && o.mild.rotate);
    read_arm("direct+rotate=yes+sparsity=0", &o);
    assert_true(o.reducer.rotate && !o.mild.rotate);
    read_arm("packed+rotate=yes+sparsity=0", &o);
    assert_true(!o.reducer.rotate);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(arms_are_their_files),
        cmocka_unit_test(rotate_is_for_dense_blocks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
