/* The page of hostile inputs: names that are markup, runs of one step and of a hundred thousand, forty arms, numbers that
 * are none or enormous. */
#include "scratch.h"

static size_t count(const char *text, const char *word) {
    size_t n = 0;
    for (; (text = strstr(text, word)); text++) n++;
    return n;
}

static void make_page(tagc_report *report, tagc_text *page) {
    tagc_view view = {0};
    if (tagc_report_finish(report) != TAGC_OK) fail_msg("%s", tagc_last_error());
    tagc_page_print(report, &view, NULL, page);
    assert_false(page->failed);
    assert_null(strstr(page->data, "nan"));
    assert_null(strstr(page->data, "inf\""));
    assert_int_equal(count(page->data, "<svg"), count(page->data, "</svg>"));
    assert_int_equal(count(page->data, "<table"), count(page->data, "</table>"));
    assert_int_equal(count(page->data, "<script"), 1);
    /* Nothing is fetched: addresses are of the page itself, or the name space of SVG. */
    assert_int_equal(count(page->data, "href="),
                     count(page->data, "href=\"#") + count(page->data, "href=\"data:,"));
    assert_int_equal(count(page->data, "http"), count(page->data, "http-equiv"));
    assert_null(strstr(page->data, "url(h"));
    assert_null(strstr(page->data, "src="));
}

static void write_run(const char *name, const char *value, int n_steps, const char *numbers) {
    FILE *file = open_run(name);
    fprintf(file, "{\"type\":\"run\",\"world_size\":2,\"n_params\":10,\"options\":{\"exchange\":\"%s\"}}\n",
            value);
    for (int step = 1; step <= n_steps; step++)
        fprintf(file,
                "{\"type\":\"step\",\"step\":%d,\"loss\":%s,\"wall_s\":%s,\"compute_s\":%s,"
                "\"bits_sent_per_param\":{\"values\":%s}}\n",
                step,
                *numbers   ? numbers
                : step % 3 ? "2.5"
                           : "2.6",
                *numbers ? numbers : "0.1", *numbers ? numbers : "0.05", *numbers ? numbers : "16");
    fclose(file);
}

static void test_markup(void **state) {
    (void)state;
    tagc_report report = {0};
    tagc_text page = {0}, words = {0};
    tagc_view view = {0};
    write_run("<script>alert(1)<&\"'\x1b[31m\xff", "</td><script>x", 3, "");
    write_run("b", "plain", 3, "");
    ADD(&report, in_scratch("<script>alert(1)<&\"'\x1b[31m\xff"));
    ADD(&report, in_scratch("b"));
    make_page(&report, &page);
    assert_non_null(strstr(page.data, "&lt;script&gt;alert(1)&lt;&amp;&quot;&#39;"));
    assert_non_null(strstr(page.data, "&lt;/td&gt;&lt;script&gt;x"));
    assert_null(strstr(page.data, "\x1b"));
    tagc_summary_print(&report, &view, &words);
    for (size_t i = 0; i < words.n_bytes; i++)
        assert_true((unsigned char)words.data[i] >= 0x20 || words.data[i] == '\n');
    assert_null(strstr(words.data, "\xff"));
    tagc_text_destroy(&page);
    tagc_text_destroy(&words);
    tagc_report_destroy(&report);
}

static void test_sections(void **state) {
    (void)state;
    tagc_report report = {0};
    tagc_text page = {0};
    write_run("a", "x", 1, ""); /* one step, no validation */
    ADD(&report, in_scratch("a"));
    make_page(&report, &page);
    const char *there[] = {"summary", "loss", "time", "bits", "origin"},
               *not_there[] = {"timeline", "memory", "codec", "plan", "lab"};
    for (int i = 0; i < 5; i++) {
        char word[40];
        snprintf(word, sizeof word, "<section id=\"%s\"", there[i]);
        if (!strstr(page.data, word)) fail_msg("no section %s", there[i]);
        snprintf(word, sizeof word, "<section id=\"%s\"", not_there[i]);
        if (strstr(page.data, word)) fail_msg("a section %s", not_there[i]);
    }
    assert_null(strstr(page.data, "figure-gap"));
    tagc_text_destroy(&page);
    tagc_report_destroy(&report);
}

static void test_numbers(void **state) {
    (void)state;
    static const char *const numbers[] = {"null", "1e308", "-1e308", "-5", "1e-320", "0"};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        tagc_report report = {0};
        tagc_text page = {0};
        char name[16];
        snprintf(name, sizeof name, "run%zu", i);
        write_run(name, "x", 7, numbers[i]);
        ADD(&report, in_scratch(name));
        make_page(&report, &page);
        tagc_text_destroy(&page);
        tagc_report_destroy(&report);
    }
}

static void test_long(void **state) {
    (void)state;
    tagc_report report = {0};
    tagc_text page = {0};
    for (int i = 0; i < 4; i++) {
        char name[16], value[16];
        snprintf(name, sizeof name, "long%d", i);
        snprintf(value, sizeof value, "v%d", i);
        write_run(name, value, 100000, "");
        ADD(&report, in_scratch(name));
    }
    make_page(&report, &page);
    assert_true(page.n_bytes < 2000000);
    assert_int_equal(report.runs[3].n_steps, 100000);
    tagc_text_destroy(&page);
    tagc_report_destroy(&report);
}

static void test_many(void **state) {
    (void)state;
    tagc_report report = {0};
    tagc_text page = {0};
    for (int i = 0; i < 40; i++) {
        char name[32], value[16];
        snprintf(name, sizeof name, "an-arm-of-many-%02d", i);
        snprintf(value, sizeof value, "v%d", i);
        write_run(name, value, 20, "");
        ADD(&report, in_scratch(name));
    }
    make_page(&report, &page);
    assert_int_equal(report.n_groups, 40);
    assert_true(page.n_bytes < 2000000);
    /* No two arms look alike: colour and dashes. */
    for (int i = 0; i < 40; i++) {
        char one[TAGC_NUMBER_BYTES], other[TAGC_NUMBER_BYTES];
        for (int k = 0; k < i; k++)
            assert_string_not_equal(tagc_svg_line_classes(i, one), tagc_svg_line_classes(k, other));
        snprintf(one, sizeof one, ">an-arm-of-many-%02d<", i);
        assert_non_null(strstr(page.data, one));
    }
    tagc_text_destroy(&page);
    tagc_report_destroy(&report);
}

static void test_figures(void **state) {
    (void)state;
    tagc_report report = {0};
    tagc_view view = {0};
    write_run("a", "x", 5, "");
    ADD(&report, in_scratch("a"));
    assert_int_equal(tagc_report_finish(&report), TAGC_OK);
    assert_int_equal(tagc_figure_write(&report, &view, tagc_figure_find("loss"), in_scratch("loss.svg")),
                     TAGC_OK);
    assert_int_equal(tagc_figure_write(&report, &view, tagc_figure_find("codec"), in_scratch("codec.svg")),
                     TAGC_ERR_ARGUMENT);
    assert_non_null(strstr(tagc_last_error(), "codec: it needs a bench or lab result"));
    assert_int_not_equal(access(in_scratch("codec.svg"), F_OK), 0);
    assert_null(tagc_figure_find("losses"));
    tagc_report_destroy(&report);
}

static void test_axis(void **state) {
    (void)state;
    const double ranges[][2] = {{0, 1},      {2.87, 5.54},     {0, 0},           {7, 7},      {-1e308, 1e308},
                                {0, 5e-324}, {1e15, 1e15 + 1}, {(double)NAN, 1}, {-3, 0.001}, {0, 1e308}};
    for (size_t i = 0; i < sizeof ranges / sizeof ranges[0]; i++) {
        for (int round_ends = 0; round_ends < 2; round_ends++) {
            tagc_axis axis = tagc_axis_make(ranges[i][0], ranges[i][1], 6, round_ends, 100, 700);
            int n = tagc_axis_n_ticks(&axis);
            assert_true(axis.max > axis.min && axis.step > 0);
            if (n > 15) fail_msg("%d ticks from %g to %g", n, ranges[i][0], ranges[i][1]);
            for (int tick = 0; tick < n; tick++) {
                double at = tagc_axis_place(&axis, tagc_axis_tick(&axis, tick));
                assert_true(at > 99 && at < 701);
            }
            if (!isfinite(ranges[i][0])) continue; /* beyond 1e300 an axis ends there */
            assert_true(axis.min <= fmax(ranges[i][0], -1e300) && axis.max >= fmin(ranges[i][1], 1e300));
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_markup, make_scratch, drop_scratch),
        cmocka_unit_test_setup_teardown(test_sections, make_scratch, drop_scratch),
        cmocka_unit_test_setup_teardown(test_numbers, make_scratch, drop_scratch),
        cmocka_unit_test_setup_teardown(test_long, make_scratch, drop_scratch),
        cmocka_unit_test_setup_teardown(test_many, make_scratch, drop_scratch),
        cmocka_unit_test_setup_teardown(test_figures, make_scratch, drop_scratch),
        cmocka_unit_test(test_axis),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
