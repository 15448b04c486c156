/* Which arms nothing beats, against a result small enough to see it; and that the pictures say what the file says. */
#include "report/figures.h"
#include "report/pareto.h"
#include "scratch.h"

typedef struct arm {
    const char *name, *exchange;
    double loss[2], gradient_bits, gather_bits;
} arm;

/* Gaps in percent: paper +3, cheap +1, dear +2 (beaten by cheap in both), fine 0 at more bits, free -1 and +1: 0. */
static const arm arms[] = {
    {"dense", "dense", {2, 4}, 32, 64},        {"paper", "sketch", {2.06, 4.12}, 5, 64},
    {"cheap", "direct", {2.02, 4.04}, 0.5, 4}, {"dear", "direct", {2.04, 4.08}, 0.6, 4},
    {"fine", "direct", {2, 4}, 2, 4},          {"free", "direct", {1.98, 4.04}, 1, 64}};
enum { N_ARMS = sizeof arms / sizeof arms[0] };

static char *write_result(const char *step_s) {
    static char text[16384];
    int n =
        snprintf(text, sizeof text,
                 "{\"type\":\"lab\",\"format\":1,\"experiment\":\"quality-x\",\"title\":\"t\",\"origin\":{},"
                 "\"settings\":{\"table\":\"quality\"},\"cases\":[{\"hosts\":1,\"ranks_per_host\":2,"
                 "\"link\":null,\"interface\":null,\"simulated\":{\"assumed\":{},\"arms\":{");
    for (int i = 0; i < N_ARMS; i++)
        n += snprintf(text + n, sizeof text - (size_t)n,
                      "%s\"%s\":[{\"bits_per_s\":1e9,\"step_s\":%s},{\"bits_per_s\":1e10,\"step_s\":%d}]",
                      i ? "," : "", arms[i].name, step_s, i + 1);
    n += snprintf(text + n, sizeof text - (size_t)n, "}},\"runs\":[");
    for (int i = 0; i < 2 * N_ARMS; i++) {
        const arm *a = &arms[i / 2];
        n += snprintf(
            text + n, sizeof text - (size_t)n,
            "%s{\"label\":\"%s\",\"seed\":%d,\"world_size\":2,\"n_params\":1000,\"n_compressed\":500,"
            "\"options\":{\"exchange\":\"%s\"},\"bits_per_param\":{\"index\":0,\"values\":%g,"
            "\"leftover\":0,\"result\":0,\"gather\":%g,\"control\":0},\"evals\":["
            "{\"step\":100,\"val_loss\":5},{\"step\":110,\"val_loss\":%g}]}",
            i ? "," : "", a->name, i % 2, a->exchange, a->gradient_bits, a->gather_bits, a->loss[i % 2]);
    }
    snprintf(text + n, sizeof text - (size_t)n, "]}]}");
    return write_file("quality-x.json", text);
}

static const tagc_pareto_point *find(const tagc_pareto_point *points, int n, const char *name) {
    for (int i = 0; i < n; i++)
        if (strcmp(points[i].result->name, name) == 0) return &points[i];
    fail_msg("no %s", name);
    return NULL;
}

static void test_front(void **state) {
    (void)state;
    tagc_report report = {0};
    tagc_pareto_point points[TAGC_MAX_PARETO];
    ADD(&report, write_result("10"));
    assert_int_equal(tagc_report_finish(&report), TAGC_OK);
    for (int is_all = 0; is_all < 2; is_all++) {
        int n = tagc_pareto_find(&report, is_all, 0.01, points);
        assert_int_equal(n, N_ARMS);
        assert_true(find(points, n, "dense")->is_first && !find(points, n, "dense")->is_front);
        assert_true(find(points, n, "paper")->is_paper && !find(points, n, "paper")->is_front);
        assert_true(find(points, n, "cheap")->is_front);
        assert_false(find(points, n, "dear")->is_front);
        /* Both are at 0: the one with fewer bits wins, which depends on what is counted. */
        assert_int_equal(find(points, n, "fine")->is_front, is_all);
        assert_int_equal(find(points, n, "free")->is_front, !is_all);
        double bits = find(points, n, "cheap")->bits;
        assert_true(fabs(bits - (is_all ? 4.5 : 0.5)) < 1e-9);
    }
    const tagc_pareto_point *free_one = find(points, N_ARMS, "free");
    assert_true(fabs(free_one->gap.middle) < 1e-9 && fabs(free_one->gap.min + 1) < 1e-9 &&
                fabs(free_one->gap.max - 1) < 1e-9);
    tagc_report_destroy(&report);
}

static void check_figure(const tagc_report *report, const char *name, const char *const *words) {
    tagc_view view = {0};
    tagc_canvas canvas = {.width = TAGC_WIDE};
    assert_int_equal(tagc_figure_find(name)->draw(report, &view, &canvas), 1);
    for (; *words; words++)
        if (!strstr(canvas.body.data, *words)) fail_msg("%s lacks \"%s\"", name, *words);
    assert_null(strstr(canvas.body.data, "nan"));
    tagc_text_destroy(&canvas.body);
}

static void test_figures(void **state) {
    (void)state;
    tagc_report report = {0};
    ADD(&report, write_result("30"));
    assert_int_equal(tagc_report_finish(&report), TAGC_OK);
    check_figure(
        &report, "pareto",
        (const char *const[]){"paper: +3.000 % (+3.000 to +3.000) at 5 bits", "spread of the first", NULL});
    check_figure(&report, "pareto-all", (const char *const[]){"cheap: +1.000 %", "at 4.5 bits", NULL});
    /* Ten steps of 30 s; at the fast link dense takes 10 x 1 s, the paper 10 x 2. */
    check_figure(&report, "loss-slow",
                 (const char *const[]){"1.00 Gbit/s (s)", "dense: 3 at 300", "fine: 3 at 300", NULL});
    check_figure(&report, "loss-fast",
                 (const char *const[]){"10.0 Gbit/s (s)", "dense: 3 at 10", "paper: 3.09 at 20", NULL});
    tagc_view view = {0};
    tagc_text page = {0};
    tagc_page_print(&report, &view, "t", &page);
    assert_non_null(strstr(page.data, "<section id=\"quality\""));
    tagc_text_destroy(&page);
    tagc_report_destroy(&report);
}

static void test_refusals(void **state) {
    (void)state;
    check_refused(write_result("\"soon\""), "quality-x.json", "step_s");
    /* One arm alone is no picture. */
    tagc_report report = {0};
    tagc_canvas canvas = {.width = TAGC_WIDE};
    tagc_view view = {0};
    assert_int_equal(tagc_figure_find("pareto")->draw(&report, &view, &canvas), 0);
    assert_int_equal(tagc_figure_find("loss-slow")->draw(&report, &view, &canvas), 0);
    tagc_text_destroy(&canvas.body);
    tagc_report_destroy(&report);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_front),
        cmocka_unit_test(test_figures),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, make_scratch, drop_scratch);
}
