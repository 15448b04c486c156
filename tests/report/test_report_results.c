/* From files to arms: seeds taken together, gaps per seed, medians, and errors that name what is missing. */
#include "scratch.h"

static void add_head(FILE *file, const char *exchange, int seed) {
    fprintf(file,
            "{\"type\":\"run\",\"tagc\":\"0.1.0\",\"options\":{\"exchange\":\"%s\",\"seed\":\"%d\",\"out\":"
            "\"x%d\"},"
            "\"world_size\":2,\"n_params\":1000,\"n_compressed\":500}\n",
            exchange, seed, seed);
}

static void add_step(FILE *file, int step, double wall_s) {
    fprintf(file,
            "{\"type\":\"step\",\"step\":%d,\"loss\":4,\"wall_s\":%g,\"total_s\":%g,\"compute_s\":0.5,"
            "\"wait_gather_s\":0.1,\"wait_reduce_s\":0.2,\"optimizer_s\":0.05,\"bits_sent_per_param\":{"
            "\"index\":1,"
            "\"values\":2,\"leftover\":0,\"result\":0,\"gather\":8,\"control\":0}}\n",
            step, wall_s, wall_s);
}

static void make_run(const char *name, const char *exchange, int seed, double wall_s, double loss) {
    FILE *file = open_run(name);
    add_head(file, exchange, seed);
    for (int step = 1; step <= 12; step++) add_step(file, step, step <= 2 ? 9 : wall_s + 0.001 * step);
    fprintf(
        file,
        "{\"type\":\"eval\",\"step\":6,\"val_loss\":7}\n{\"type\":\"eval\",\"step\":12,\"val_loss\":%.17g}\n",
        loss);
    fclose(file);
}

static void near(double got, double expected) {
    if (!(fabs(got - expected) < 1e-9 * (1 + fabs(expected))))
        fail_msg("%.12g instead of %.12g", got, expected);
}

static void test_seeds(void **state) {
    (void)state;
    tagc_report report = {0};
    make_run("fsdp-s1", "dense", 1, 1.0, 2.0);
    make_run("fsdp-s2", "dense", 2, 1.0, 2.2);
    make_run("packed-seed1", "packed", 1, 0.8, 2.1);
    make_run("packed-seed2", "packed", 2, 0.8, 2.2);
    make_run("odd", "sketch", 7, 0.9, 2.31);
    const char *names[] = {"fsdp-s1", "fsdp-s2", "packed-seed1", "packed-seed2", "odd"};
    for (int i = 0; i < 5; i++) ADD(&report, in_scratch(names[i]));
    assert_int_equal(tagc_report_finish(&report), TAGC_OK);
    assert_int_equal(report.n_sets, 1);
    const tagc_set *set = &report.sets[0];
    assert_int_equal(set->n_results, 3);
    assert_string_equal(set->results[0].name, "fsdp");
    assert_string_equal(set->results[1].name, "packed");
    assert_string_equal(set->results[2].name, "odd");
    near(set->results[0].loss.middle, 2.1);
    near(set->results[0].loss.min, 2.0);
    /* Per seed: 2.1 / 2.0 and 2.2 / 2.2. */
    near(set->results[1].gap.middle, 0.025);
    near(set->results[1].gap.min, 0);
    near(set->results[1].gap.max, 0.05);
    /* No fsdp run has seed 7: against the mean. */
    near(set->results[2].gap.middle, 2.31 / 2.1 - 1);
    /* Steps 3 to 12 of two runs: the median lies between 1.007 and 1.008. */
    near(set->results[0].total_s.middle, 1.0075);
    near(set->results[0].part_s[TAGC_PART_COMPUTE], 0.5);
    near(set->results[0].part_s[TAGC_PART_OTHER], 1.0075 - 0.85);
    near(set->results[1].speedup.middle, 1.0075 / 0.8075);
    /* Before the factor (W-1)/W. */
    near(set->results[0].bits[TAGC_LEG_VALUES], 4);
    near(set->results[0].bits[TAGC_LEG_GATHER], 16);
    tagc_report_destroy(&report);
}

static void test_names(void **state) {
    (void)state;
    tagc_report report = {0};
    make_run("a", "dense", 1, 1.0, 2.0);
    assert_int_equal(mkdir(in_scratch("other"), 0700), 0);
    make_run("other/a", "packed", 1, 1.0, 2.0);
    ADD(&report, in_scratch("a"));
    ADD(&report, in_scratch("other/a"));
    ADD(&report, in_scratch("other")); /* no run's: a note */
    assert_int_equal(tagc_report_finish(&report), TAGC_OK);
    assert_string_equal(report.groups[0].name, "a");
    assert_string_equal(report.groups[1].name, "a (2)");
    assert_int_equal(report.n_notes, 1);
    assert_non_null(strstr(report.notes[0], "other"));
    tagc_report_destroy(&report);
}

static void test_torn(void **state) {
    (void)state;
    tagc_report report = {0};
    FILE *file = open_run("torn");
    add_head(file, "dense", 1);
    add_step(file, 1, 1);
    fputs("{\"type\":\"step\",\"step\":2,\"lo", file);
    fclose(file);
    ADD(&report, in_scratch("torn"));
    assert_int_equal(report.runs[0].n_steps, 1);
    assert_int_equal(report.n_notes, 1);
    assert_non_null(strstr(report.notes[0], "not whole"));
    tagc_report_destroy(&report);
    file = open_run("holed"); /* the same line, but others follow */
    fputs("{\"type\":\"step\",\"step\":2,\"lo\n", file);
    add_step(file, 3, 1);
    fclose(file);
    check_refused(in_scratch("holed"), "line 1", "no JSON");
    fclose(open_run("empty"));
    check_refused(in_scratch("empty"), "empty", "no steps");
}

#define BENCH_HEAD                                                                                           \
    "{\"type\":\"bench\",\"format\":1,\"world_size\":2,\"n_hosts\":1,\"model\":{\"name\":\"tiny\"},"         \
    "\"link\":null,"

static void test_members(void **state) {
    (void)state;
    check_refused(write_file("a.json", "{\"type\":\"other\"}"), "a.json",
                  "\"other\", allowed: bench, plan, lab");
    check_refused(write_file("b.json", "{\"a\":1}"), "b.json", "no result");
    check_refused(write_file("c.json", "[]"), "c.json", "empty list");
    check_refused(write_file("d.json", "{\"type\":\"bench\",\"format\":2}"), "\"format\" is 2", "allowed: 1");
    check_refused(write_file("e.json", "{\"type\":\"bench\",\"format\":1}"), "e.json",
                  "lacks \"arms\", a list");
    check_refused(write_file("f.json", BENCH_HEAD "\"arms\":[{\"name\":\"a\"}]}"), "arms[0]",
                  "lacks \"total_s\", an object");
    check_refused(write_file("g.json", BENCH_HEAD "\"arms\":[{\"name\":\"a\",\"total_s\":3}]}"), "arms[0]",
                  "\"total_s\" is no object");
    check_refused(write_file("h.json", BENCH_HEAD "\"arms\":[{\"name\":\"a\",\"total_s\":{\"median\":1}}]}"),
                  "total_s", "lacks \"min\", a number");
    check_refused(write_file("i.json", "{\"type\":\"lab\",\"format\":1}"), "i.json",
                  "\"experiment\", a text");
    check_refused(write_file("j.json", "{\"type\":\"lab\",\"format\":1,\"experiment\":\"x\",\"cases\":[{}]}"),
                  "cases[0]", "\"hosts\", a number");
    check_refused(write_file("k.json",
                             "{\"type\":\"plan\",\"format\":1,\"model\":{\"name\":\"m\"},\"world_size\":2,"
                             "\"rows\":[{\"arm\":\"a\"}]}"),
                  "rows[0]", "\"iteration_s\", a number");
    check_refused(write_file("l.json", ""), "l.json", "no JSON");
    check_refused(in_scratch("nothing"), "nothing", "No such file");
    tagc_report report = {0};
    ADD(&report, write_file("m.json", BENCH_HEAD "\"arms\":null}")); /* left out by --only */
    tagc_report_destroy(&report);
}

static void test_pairs(void **state) {
    (void)state;
    /* Two rounds of two iterations: medians 2 and 4 against 1 and 4. */
    json_t *bench = json_loads(
        "{\"arms\":[{\"name\":\"a\",\"iterations\":[{\"round\":0,\"total_s\":1},{\"round\":0,\"total_s\":3},"
        "{\"round\":1,\"total_s\":4},{\"round\":1,\"total_s\":4}]},"
        "{\"name\":\"b\",\"iterations\":[{\"round\":0,\"total_s\":1},{\"round\":0,\"total_s\":1},"
        "{\"round\":1,\"total_s\":3},{\"round\":1,\"total_s\":5}]}]}",
        0, NULL);
    tagc_spread ratio = tagc_pair_ratio(bench, "a", "b");
    assert_int_equal(ratio.n, 2);
    near(ratio.middle, 1.5);
    near(ratio.min, 1);
    near(ratio.max, 2);
    assert_int_equal(tagc_pair_ratio(bench, "a", "c").n, 0);
    json_decref(bench);
}

static void test_spread(void **state) {
    (void)state;
    double values[] = {3, (double)NAN, 1, (double)INFINITY, 2, 10};
    tagc_spread spread = tagc_spread_of(values, 6, 0);
    assert_int_equal(spread.n, 4);
    near(spread.middle, 2.5);
    near(spread.min, 1);
    near(spread.max, 10);
    double none[] = {(double)NAN};
    assert_int_equal(tagc_spread_of(none, 1, 1).n, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_seeds, make_scratch, drop_scratch),
        cmocka_unit_test_setup_teardown(test_names, make_scratch, drop_scratch),
        cmocka_unit_test_setup_teardown(test_torn, make_scratch, drop_scratch),
        cmocka_unit_test_setup_teardown(test_members, make_scratch, drop_scratch),
        cmocka_unit_test(test_pairs),
        cmocka_unit_test(test_spread),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
