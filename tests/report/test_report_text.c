/* Words on their way out: nothing from a file becomes markup or a terminal's command, and files are whole. */
#include "scratch.h"

static void check_escaped(const char *words, const char *expected) {
    tagc_text text = {0};
    tagc_text_add(&text, "");
    tagc_text_escaped(&text, words);
    assert_string_equal(text.data, expected);
    tagc_text_destroy(&text);
}

static void test_escaped(void **state) {
    (void)state;
    check_escaped("plain", "plain");
    check_escaped("<script>alert('1')&\"", "&lt;script&gt;alert(&#39;1&#39;)&amp;&quot;");
    check_escaped("a\x01"
                  "b\x1b[31m\n",
                  "a\xef\xbf\xbd"
                  "b\xef\xbf\xbd[31m\xef\xbf\xbd");
    check_escaped("\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", "\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80");
    /* Stray, overlong, surrogate, cut off, too large, and one that turns the direction of writing. */
    check_escaped("\x80|", "\xef\xbf\xbd|");
    check_escaped("\xc0\xaf|", "\xef\xbf\xbd\xef\xbf\xbd|");
    check_escaped("\xed\xa0\x80|", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd|");
    check_escaped("\xe2\x82", "\xef\xbf\xbd\xef\xbf\xbd");
    check_escaped("\xf5\x80\x80\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
    check_escaped("\xe2\x80\xae|", "\xef\xbf\xbd|");
}

/* Any bytes: what comes out has no byte of markup but that of entities, and no control character. */
static void test_escaped_random(void **state) {
    (void)state;
    uint32_t random = 12345;
    for (int round = 0; round < 2000; round++) {
        char words[40] = "";
        for (int i = 0; i < 39; i++) {
            random = random * 1664525u + 1013904223u;
            words[i] = (char)(random >> 24 ? random >> 24 : 1);
        }
        tagc_text html = {0}, plain = {0};
        tagc_text_escaped(&html, words);
        tagc_text_plain(&plain, words);
        for (size_t i = 0; i < html.n_bytes; i++) {
            assert_true((unsigned char)html.data[i] >= 0x20 && html.data[i] != '<' && html.data[i] != '"');
            if (html.data[i] == '&') assert_non_null(strchr(html.data + i, ';'));
        }
        for (size_t i = 0; i < plain.n_bytes; i++)
            assert_true((unsigned char)plain.data[i] >= 0x20 && plain.data[i] != 0x7f);
        tagc_text_destroy(&html);
        tagc_text_destroy(&plain);
    }
}

static void check_number(char *(*format)(double, char *), double value, const char *expected) {
    char text[TAGC_NUMBER_BYTES];
    assert_string_equal(format(value, text), expected);
}

static void test_numbers(void **state) {
    (void)state;
    check_number(tagc_number_time, 0.0123, "12.3 ms");
    check_number(tagc_number_time, 0.99999, "1.00 s");
    check_number(tagc_number_time, 0, "0 s");
    check_number(tagc_number_time, 125, "125 s");
    check_number(tagc_number_time, (double)NAN, "-");
    check_number(tagc_number_time, (double)INFINITY, "-");
    check_number(tagc_number_bytes, 1.5e9, "1.50 GB");
    check_number(tagc_number_bytes, 999, "999 B");
    check_number(tagc_number_rate, 1.95e9, "1.95 Gbit/s");
    check_number(tagc_number_count, 2359296, "2.36 M");
    check_number(tagc_number_count, 4096, "4096");
    check_number(tagc_number_percent, 0.1234, "12.3 %");
    check_number(tagc_number_change, -0.00151, "-0.15 %");
    const double hostile[] = {1e308, -1e308, 5e-324, -0.0};
    for (size_t i = 0; i < 4; i++) {
        char text[TAGC_NUMBER_BYTES];
        assert_true(strlen(tagc_number_time(hostile[i], text)) < 20);
        assert_true(strlen(tagc_number_fixed(hostile[i], 4, text)) < 20);
        assert_true(strlen(tagc_number_change(hostile[i], text)) < 20);
    }
}

static void test_write(void **state) {
    (void)state;
    tagc_text text = {0};
    char *path = in_scratch("file"), partial[600], read[16] = "";
    tagc_text_add(&text, "first");
    assert_int_equal(tagc_text_write(&text, path), TAGC_OK);
    snprintf(partial, sizeof partial, "%s.partial", path);
    assert_int_not_equal(access(partial, F_OK), 0);
    /* A text that lacks memory replaces nothing. */
    text.failed = 1;
    assert_int_equal(tagc_text_write(&text, path), TAGC_ERR_MEMORY);
    text.failed = 0;
    FILE *file = fopen(path, "r");
    assert_non_null(fgets(read, sizeof read, file));
    fclose(file);
    assert_string_equal(read, "first");
    assert_int_equal(tagc_text_write(&text, scratch), TAGC_ERR_IO); /* a folder */
    assert_int_equal(tagc_text_write(&text, in_scratch("none/file")), TAGC_ERR_IO);
    assert_non_null(strstr(tagc_last_error(), "none/file"));
    tagc_text_destroy(&text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_escaped),
        cmocka_unit_test(test_escaped_random),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test_setup_teardown(test_write, make_scratch, drop_scratch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
