/* Shares of a window: a timeline small enough to count by hand, and random ones against counting microsecond by
 * microsecond. */
#include "scratch.h"

#define THREADS                                                                                              \
    "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":0,\"tid\":0,\"args\":{\"name\":\"compute\"}},"           \
    "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":0,\"tid\":1,\"args\":{\"name\":\"codec\"}},"             \
    "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":0,\"tid\":2,\"args\":{\"name\":\"comm\"}},"              \
    "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":0,\"tid\":3,\"args\":{\"name\":\"comm 2\"}}"

static void add(tagc_text *out, const char *name, int thread, int start_us, int end_us, const char *unit) {
    tagc_text_printf(out,
                     ",{\"ph\":\"X\",\"name\":\"%s %s\",\"pid\":0,\"tid\":%d,\"ts\":%d,\"dur\":%d,"
                     "\"args\":{\"n_bytes\":1,\"unit\":\"%s\"}}",
                     name, unit, thread, start_us, end_us - start_us, unit);
}

static void read_trace(tagc_text *text, tagc_trace_file *out) {
    tagc_text_add(text, "]}");
    json_t *root = json_loads(text->data, 0, NULL);
    assert_non_null(root);
    if (tagc_trace_file_read(root, "test", "test", out) != TAGC_OK) fail_msg("%s", tagc_last_error());
    json_decref(root);
    tagc_text_destroy(text);
}

static void near(double got, double expected) {
    if (!(fabs(got - expected) < 1e-9)) fail_msg("%.12g instead of %.12g", got, expected);
}

static void test_by_hand(void **state) {
    (void)state;
    tagc_text text = {0};
    tagc_trace_file trace;
    tagc_text_add(&text, "{\"traceEvents\":[" THREADS);
    add(&text, "forward", 0, 0, 100, "h.0");
    add(&text, "forward", 0, 100, 200, "h.1");
    add(&text, "backward", 0, 200, 260, "h.1"); /* the window of h.1: 200 to 300 */
    add(&text, "wait", 0, 260, 300, "h.0");
    add(&text, "backward", 0, 300, 400, "h.0");
    add(&text, "optimizer", 0, 400, 500, "");
    add(&text, "gather", 2, 210, 230, "h.0");
    add(&text, "index", 3, 220, 240, "h.1");
    add(&text, "select", 1, 240, 260, "h.1");
    add(&text, "decode", 1, 285, 295, "h.1");
    add(&text, "wait", 1, 260, 285, "h.1");
    add(&text, "values", 2, 270, 290, "h.1");
    add(&text, "control", 2, 295, 310, "h.1");
    read_trace(&text, &trace);
    tagc_shares shares = tagc_trace_shares(&trace, "h.1");
    assert_int_equal(shares.n, 1);
    near(shares.length_s, 100e-6);
    near(shares.model, 0.60);
    near(shares.computing, 0.70);
    near(shares.communicating, (30 + 20 + 5) / 100.0);
    near(shares.exchanging, (20 + 20) / 100.0);
    near(shares.exchanging_with_gaps, (290 - 220) / 100.0);
    near(shares.overlapped, (30 + 5) / 100.0);
    shares = tagc_trace_shares(&trace, NULL);
    near(shares.length_s, 500e-6);
    near(shares.model, 460 / 500.0);
    near(shares.computing, 470 / 500.0);
    assert_int_equal(tagc_trace_shares(&trace, "h").n, 1); /* both units, one after the other */
    near(tagc_trace_shares(&trace, "h").length_s, 200e-6);
    assert_int_equal(tagc_trace_shares(&trace, "h.2").n, 0);
    tagc_trace_file_destroy(&trace);
}

/* What is wrapped alone: "root" comes back between the others, and is not what ends a window. */
static void test_root(void **state) {
    (void)state;
    tagc_text text = {0};
    tagc_trace_file trace;
    tagc_text_add(&text, "{\"traceEvents\":[" THREADS);
    const char *units[] = {"root", "b", "root", "a", "root", "c"};
    for (int pass = 0; pass < 2; pass++) {
        add(&text, "forward", 0, 1000 * pass, 1000 * pass + 100, "root");
        for (int i = 0; i < 6; i++)
            add(&text, "backward", 0, 1000 * pass + 100 + 10 * i, 1000 * pass + 110 + 10 * i, units[i]);
    }
    add(&text, "optimizer", 0, 1160, 1170, "");
    read_trace(&text, &trace);
    tagc_shares shares = tagc_trace_shares(&trace, "b,a");
    assert_int_equal(shares.n, 2);
    near(shares.length_s, 40e-6); /* from b over root, a and root to c */
    near(tagc_trace_shares(&trace, "a").length_s, 20e-6);
    tagc_trace_file_destroy(&trace);
}

static void test_units(void **state) {
    (void)state;
    assert_true(tagc_trace_has_unit("h.5,h.6", "h.6"));
    assert_true(tagc_trace_has_unit("h.5", "h.5.mlp.c_fc"));
    assert_false(tagc_trace_has_unit("h.5", "h.51"));
    assert_false(tagc_trace_has_unit("h.51", "h.5"));
    assert_false(tagc_trace_has_unit("", "h.5"));
    assert_false(tagc_trace_has_unit(",", "h.5"));
}

static uint32_t random_state = 1;
static int random_below(int n) {
    random_state = random_state * 1664525u + 1013904223u;
    return (int)((random_state >> 8) % (uint32_t)n);
}

/* One step without waits between steps; each microsecond is asked for what goes on in it. */
static void test_random(void **state) {
    (void)state;
    for (int round = 0; round < 100; round++) {
        enum { LENGTH = 400 };
        uint8_t computes[LENGTH] = {0}, communicates[LENGTH] = {0}, exchanges[LENGTH] = {0};
        tagc_text text = {0};
        tagc_trace_file trace;
        tagc_text_add(&text, "{\"traceEvents\":[" THREADS);
        add(&text, "forward", 0, 0, 20, "u");
        memset(computes, 1, 20);
        for (int at = 20; at < LENGTH - 20;) {
            int end = at + 1 + random_below(30);
            if (end > LENGTH - 20) end = LENGTH - 20;
            int waits = random_below(2);
            add(&text, waits ? "wait" : "backward", 0, at, end, "u");
            if (!waits) memset(computes + at, 1, (size_t)(end - at));
            at = end;
        }
        add(&text, "optimizer", 0, LENGTH - 20, LENGTH, "");
        memset(computes + LENGTH - 20, 1, 20);
        for (int i = 0; i < 20; i++) {
            int start = random_below(LENGTH - 1), end = start + 1 + random_below(LENGTH - start - 1);
            int is_exchange = random_below(2);
            if (end > start + 40) end = start + 40;
            add(&text, is_exchange ? "values" : "gather", 2 + random_below(2), start, end, "u");
            memset(communicates + start, 1, (size_t)(end - start));
            if (is_exchange) memset(exchanges + start, 1, (size_t)(end - start));
        }
        read_trace(&text, &trace);
        tagc_shares shares = tagc_trace_shares(&trace, NULL);
        int n[4] = {0};
        for (int i = 0; i < LENGTH; i++) {
            n[0] += computes[i];
            n[1] += communicates[i];
            n[2] += exchanges[i];
            n[3] += computes[i] && communicates[i];
        }
        near(shares.computing, n[0] / (double)LENGTH);
        near(shares.communicating, n[1] / (double)LENGTH);
        near(shares.exchanging, n[2] / (double)LENGTH);
        near(shares.overlapped, n[3] / (double)LENGTH);
        tagc_trace_file_destroy(&trace);
    }
}

static void test_refused(void **state) {
    (void)state;
    check_refused(write_file("a.json", "{\"traceEvents\":[]}"), "a.json", "no event");
    check_refused(write_file("b.json", "{\"traceEvents\":{}}"), "b.json", "no list");
    check_refused(write_file("c.json", "{\"traceEvents\":[" THREADS "]}"), "c.json", "no event");
    check_refused(
        write_file("d.json", "{\"traceEvents\":[" THREADS ",{\"ph\":\"X\",\"pid\":0,\"tid\":0,\"dur\":1}]}"),
        "traceEvents[4]", "\"ts\"");
    check_refused(write_file("e.json", "{\"traceEvents\":[" THREADS
                                       ",{\"ph\":\"X\",\"pid\":0,\"tid\":0,\"ts\":1,\"dur\":-1}]}"),
                  "traceEvents[4]", "\"dur\"");
    check_refused(write_file("f.json", "{\"traceEvents\":[" THREADS ",{\"ph\""), "f.json", "no JSON");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_by_hand),
        cmocka_unit_test(test_root),
        cmocka_unit_test(test_units),
        cmocka_unit_test(test_random),
        cmocka_unit_test_setup_teardown(test_refused, make_scratch, drop_scratch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
