/* Results made up from known costs: the fit must find costs that predict what it has not seen, other links, other arms,
 * other numbers of ranks; and files that are not what they should be are refused by name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/status.h"
#include "plan/profile.h"

static const struct {
    const char *name;
    int placement, exchange; /* of what is compressed, or -1 */
    double sparsity, ratio;
    int is_bf16;
} arms[] = {
    {"fsdp", TAGC_PLACE_ZERO3, -1, 0, 0, 0},
    {"fsdp-bf16", TAGC_PLACE_ZERO3, -1, 0, 0, 1},
    {"zero2-bf16", TAGC_PLACE_ZERO2, -1, 0, 0, 1},
    {"packed", TAGC_PLACE_ZERO3, TAGC_EXCHANGE_PACKED, 0.9875, 0, 0},
    {"tagc-10x", TAGC_PLACE_ZERO3, TAGC_EXCHANGE_SKETCH, 0.9875, 10, 0},
    {"zero2-packed", TAGC_PLACE_ZERO2, TAGC_EXCHANGE_PACKED, 0.9875, 0, 1},
    {"all-legs", TAGC_PLACE_ZERO2, TAGC_EXCHANGE_DIRECT, 0.95, 0, 1},
};
enum { N_ARMS = sizeof arms / sizeof arms[0], N_SAMPLES = 3 };

static void set_arm(int arm, tagc_fsdp_options *out) {
    tagc_fsdp_options_init(out);
    out->sharding = arms[arm].placement == TAGC_PLACE_ZERO2 ? TAGC_SHARD_GRAD : TAGC_SHARD_FULL;
    out->policy = arms[arm].exchange < 0 ? TAGC_POLICY_NONE : TAGC_POLICY_NON_ATTENTION_LINEAR;
    if (arms[arm].exchange >= 0) {
        out->reducer.exchange = arms[arm].exchange;
        out->reducer.sparsity = arms[arm].sparsity;
        out->paper.ratio = arms[arm].ratio;
    }
    out->dense_format = out->gather = arms[arm].is_bf16;
    if (arms[arm].exchange != TAGC_EXCHANGE_DIRECT) return;
    out->gather = TAGC_GATHER_DELTA4;
    out->mild = out->reducer;
    out->mild.sparsity = 0;
}

/* The options of these results hold the number of the arm. */
static tagc_status read_engine(const json_t *options, tagc_fsdp_options *out) {
    set_arm((int)json_integer_value(json_object_get(options, "arm")), out);
    return TAGC_OK;
}

static tagc_costs hidden_costs(void) {
    tagc_costs c;
    tagc_costs_init(&c);
    c.flop_s = 1 / 30e9;
    c.optimizer_s = 1.5e-9;
    c.byte_s = 1 / 12e9;
    c.codec_factor = 1.4;
    c.overhead_s = 2e-4;
    c.queue_bytes = 3e5;
    c.link_share = 0.92;
    c.cpu_s_per_byte = 8e-10;
    c.poll_cores = 0.15;
    c.cores = 2;
    c.n_codec = 4;
    c.gather[TAGC_GATHER_DELTA4] = (tagc_gather_cost){.encode_s = 4e-10, .decode_s = 6e-10, .weight = 1};
    c.codec[2] = (tagc_codec_cost){.exchange = TAGC_EXCHANGE_DIRECT,
                                   .format = TAGC_FORMAT_INT4,
                                   .sparsity = 0.95,
                                   .union_density = 0.05,
                                   .elem_s = {8e-10, 0, 1e-10, 2e-10}};
    c.codec[3] = c.codec[2]; /* what is left milder: every element */
    c.codec[3].sparsity = 0;
    c.codec[3].union_density = 1;
    for (int i = 0; i < 2; i++)
        c.codec[i] = (tagc_codec_cost){.exchange = i ? TAGC_EXCHANGE_SKETCH : TAGC_EXCHANGE_PACKED,
                                       .sparsity = 0.9875,
                                       .ratio = i ? 10 : 0,
                                       .union_density = 1 - 0.9875 * 0.9875,
                                       .elem_s = {1e-9, 2e-10, 2e-10, i ? 4e-10 : 1e-10}};
    return c;
}

static double noise(unsigned *state, double most) {
    *state = *state * 1664525u + 1013904223u;
    return most * ((double)(*state >> 8) / 8388608.0 - 1);
}

static const char *const exchanges[] = {"dense", "sketch", "packed", "direct"};

/* Of hidden_costs. */
static int codec_of(int exchange) {
    return exchange == TAGC_EXCHANGE_PACKED ? 0 : exchange == TAGC_EXCHANGE_SKETCH ? 1 : 2;
}

static json_t *make_distant(const tagc_costs *costs, int world_size, int n_hosts, double bytes_per_s,
                            double latency_s, double most_noise) {
    tagc_setup setup = {.world_size = world_size,
                        .n_hosts = n_hosts,
                        .n_machines = 1,
                        .n_batch = 2,
                        .n_tokens = 64,
                        .model = {4, 4, 128, 64, 2048, 0},
                        .union_density = -1};
    tagc_plan_link link = {
        .latency_s = latency_s, .large_latency_s = 3 * latency_s, .bytes_per_s = bytes_per_s};
    unsigned state = (unsigned)world_size * 7 + (unsigned)(bytes_per_s / 1e6);
    json_t *list = json_array(), *codec = json_array();
    for (int arm = 0; arm < N_ARMS; arm++) {
        tagc_forecast f;
        set_arm(arm, &setup.engine);
        setup.placement = arms[arm].placement;
        if (tagc_plan_simulate(&setup, costs, &link, &f) != TAGC_OK) fail_msg("%s", tagc_last_error());
        tagc_plan_volume v;
        assert_int_equal(tagc_plan_count(&setup, &v, NULL), TAGC_OK);
        double n_compressed = arms[arm].exchange < 0 ? 0 : (double)v.n_compressed;
        int is_direct = arms[arm].exchange == TAGC_EXCHANGE_DIRECT;
        json_t *iterations = json_array();
        for (int i = 0; i < N_SAMPLES; i++) {
            double factor = 1 + noise(&state, most_noise);
            json_array_append_new(iterations,
                                  json_pack("{s:f, s:f, s:f, s:f, s:f}", "total_s", f.iteration_s * factor,
                                            "compute_s", f.compute_s * factor, "wait_gather_s",
                                            f.wait_gather_s * factor, "wait_reduce_s",
                                            f.wait_reduce_s * factor, "optimizer_s", f.optimizer_s));
        }
        json_array_append_new(list,
                              json_pack("{s:s, s:{s:i}, s:f, s:f, s:f, s:f, s:o}", "name", arms[arm].name,
                                        "options", "arm", arm, "n_compressed", n_compressed, "n_union",
                                        is_direct ? 0 : n_compressed * tagc_setup_union(&setup), "n_sent",
                                        n_compressed * (1 - arms[arm].sparsity), "n_mild", (double)v.n_mild,
                                        "iterations", iterations));
    }
    const tagc_gather_cost *gather = &costs->gather[TAGC_GATHER_DELTA4];
    json_array_append_new(codec,
                          json_pack("{s:s, s:s, s:f, s:f, s:i, s:i, s:{s:f, s:f}}", "exchange", "gather",
                                    "wire", "delta4", "sparsity", 0.0, "ratio", 0.0, "n_elems", 1000000,
                                    "n_tensors", 3, "phase_s", "encode", gather->encode_s * 1e6 / world_size,
                                    "decode", gather->decode_s * 1e6));
    for (int i = 0; i < costs->n_codec; i++) {
        const tagc_codec_cost *c = &costs->codec[i];
        json_t *phases = json_object();
        for (int phase = 0; phase < TAGC_N_PHASES; phase++)
            json_object_set_new(phases, tagc_phase_name(phase), json_real(c->elem_s[phase] * 1e6));
        json_array_append_new(codec, json_pack("{s:s, s:s, s:f, s:f, s:i, s:i, s:o}", "exchange",
                                               exchanges[c->exchange], "values", "int4", "sparsity",
                                               c->sparsity, "ratio", c->ratio, "n_elems", 1000000,
                                               "n_tensors", 3, "phase_s", phases));
    }
    return json_pack(
        "{s:s, s:i, s:{s:{s:i, s:[s,s]}}, s:i, s:i, s:{s:s, s:i, s:i, s:i, s:i, s:i, s:b}, s:i, s:i,"
        " s:{s:f, s:f, s:f, s:f}, s:{s:f}, s:o, s:o}",
        "type", "bench", "format", 1, "origin", "machine", "n_cpus", (int)costs->cores, "hosts", "box", "box",
        "world_size", world_size, "n_hosts", n_hosts, "model", "name", "small", "n_layer",
        setup.model.n_layer, "n_head", setup.model.n_head, "n_embd", setup.model.n_embd, "block_size",
        setup.model.block_size, "vocab_size", setup.model.vocab_size, "tied", setup.model.tied, "batch_size",
        setup.n_batch, "seq_len", setup.n_tokens, "link", "latency_s", link.latency_s, "large_latency_s",
        link.large_latency_s, "both_ways_bytes_per_s", link.bytes_per_s, "one_way_bytes_per_s",
        0.9 * link.bytes_per_s, "floor", "bytes_per_s", 1 / costs->byte_s, "codec", codec, "arms", list);
}

static json_t *make_bench(const tagc_costs *costs, int world_size, int n_hosts, double bytes_per_s,
                          double most_noise) {
    return make_distant(costs, world_size, n_hosts, bytes_per_s, 1e-4, most_noise);
}

static char path[] = "/tmp/tagc-profile-XXXXXX";

static tagc_status read_json(tagc_points *points, json_t *json, const char *suffix) {
    char name[64];
    assert_int_equal(json_dump_file(json, path, JSON_INDENT(1)), 0);
    json_decref(json);
    snprintf(name, sizeof name, "%s%s", path, suffix);
    return tagc_points_read(points, name, read_engine);
}

static double worst_error(const tagc_points *points, const tagc_costs *fitted) {
    double worst = 0;
    for (int i = 0; i < points->n_points; i++) {
        const tagc_point *p = &points->points[i];
        tagc_costs costs = *fitted;
        tagc_forecast f;
        costs.cores = p->cores;
        assert_int_equal(tagc_plan_simulate(&p->setup, &costs, &p->link, &f), TAGC_OK);
        worst = fmax(worst, fabs(f.iteration_s / p->total_s - 1));
    }
    return worst;
}

/* Two links are seen; a third between, a faster one, four ranks on two hosts and on four, and two arms are not. */
static void fit_and_check(double most_noise, double seen_within, double held_out_within) {
    tagc_costs hidden = hidden_costs(), fitted;
    tagc_points seen = {0}, held_out = {0};
    double rms;
    assert_int_equal(read_json(&seen, make_bench(&hidden, 2, 2, 20e6, most_noise), ""), TAGC_OK);
    assert_int_equal(read_json(&seen, make_bench(&hidden, 2, 2, 100e6, most_noise), ""), TAGC_OK);
    assert_int_equal(seen.n_points, 2 * N_ARMS);
    for (int i = 0; i < seen.n_points; i++)
        seen.points[i].is_held_out =
            !strcmp(seen.points[i].arm, "tagc-10x") || !strcmp(seen.points[i].arm, "fsdp-bf16");
    assert_int_equal(tagc_costs_fit(&seen, &fitted, &rms), TAGC_OK);
    assert_true(rms < seen_within);
    assert_int_equal(read_json(&held_out, make_bench(&hidden, 2, 2, 50e6, 0), ""), TAGC_OK);
    assert_int_equal(read_json(&held_out, make_bench(&hidden, 2, 2, 200e6, 0), ""), TAGC_OK);
    assert_int_equal(read_json(&held_out, make_bench(&hidden, 4, 2, 50e6, 0), ""), TAGC_OK);
    assert_int_equal(read_json(&held_out, make_bench(&hidden, 4, 4, 50e6, 0), ""), TAGC_OK);
    double worst = worst_error(&held_out, &fitted);
    print_message("noise %.0f %%: fitted to %.2f %% rms, held out within %.2f %%\n", 100 * most_noise,
                  100 * rms, 100 * worst);
    assert_true(worst < held_out_within);
    tagc_points_destroy(&seen);
    tagc_points_destroy(&held_out);
}

static void held_out_points_are_predicted(void **state) {
    (void)state;
    fit_and_check(0, 0.01, 0.05);
    fit_and_check(0.05, 0.04, 0.15);
}

/* Fitted where the link is near or far and fast or slow, two of each; what is held out is farther, and at other rates. */
static void distant_points_are_predicted(void **state) {
    (void)state;
    static const double seen_at[][2] = {{20e6, 1e-3}, {20e6, 2e-2}, {100e6, 1e-3}, {100e6, 2e-2}};
    static const double held_out_at[][3] = {
        {2, 50e6, 1e-2}, {2, 12.5e6, 5e-2}, {4, 100e6, 5e-2}, {4, 50e6, 1e-3}};
    tagc_costs hidden = hidden_costs(), fitted;
    tagc_points seen = {0}, held_out = {0};
    double rms;
    for (int i = 0; i < 4; i++)
        assert_int_equal(read_json(&seen, make_distant(&hidden, 2, 2, seen_at[i][0], seen_at[i][1], 0), ""),
                         TAGC_OK);
    assert_int_equal(tagc_costs_fit(&seen, &fitted, &rms), TAGC_OK);
    assert_true(rms < 0.01);
    for (int i = 0; i < 4; i++) {
        int n = (int)held_out_at[i][0];
        json_t *bench = make_distant(&hidden, n, n, held_out_at[i][1], held_out_at[i][2], 0);
        assert_int_equal(read_json(&held_out, bench, ""), TAGC_OK);
    }
    assert_non_null(strstr(held_out.points[0].place, "0.4 Gbit/s, 10 ms, "));
    double worst = worst_error(&held_out, &fitted);
    print_message("distance: fitted to %.2f %% rms, held out within %.2f %%\n", 100 * rms, 100 * worst);
    assert_true(worst < 0.05);
    tagc_points_destroy(&seen);
    tagc_points_destroy(&held_out);
}

/* The lab's ping where its bench measured no link: half of the mean round trip, and three times that of large messages. */
static void latency_of_the_lab(void **state) {
    (void)state;
    tagc_costs hidden = hidden_costs();
    for (int has_link = 0; has_link < 2; has_link++) {
        tagc_points points = {0};
        json_t *bench = make_distant(&hidden, 2, 2, 20e6, 7e-3, 0);
        if (!has_link) json_object_del(bench, "link");
        json_t *lab =
            json_pack("{s:s, s:i, s:[{s:{s:[f,f], s:[f,f], s:{s:[f,f]}}, s:o}]}", "type", "lab", "format", 1,
                      "cases", "link", "tcp_one_way_bits_per_s", 2e8, 1.9e8, "tcp_both_ways_bits_per_s", 1e8,
                      1e8, "latency", "ping_round_trip_s", 0.020, 0.022, "bench", bench);
        assert_int_equal(read_json(&points, lab, ""), TAGC_OK);
        assert_true(points.points[0].link.bytes_per_s == 25e6);
        double latency_s = has_link ? 7e-3 : 0.0105;
        assert_true(fabs(points.points[0].link.latency_s - latency_s) < 1e-12);
        assert_true(fabs(points.points[0].link.large_latency_s - 3 * latency_s) < 1e-12);
        tagc_points_destroy(&points);
    }
}

/* What the points say of the union: as measured, and between nothing shared and all shared when extended. */
static void unions_are_extended(void **state) {
    (void)state;
    tagc_costs hidden = hidden_costs();
    tagc_points points = {0};
    double density;
    assert_int_equal(tagc_points_union(&points, 0.9875, 2, &density), 0);
    assert_int_equal(read_json(&points, make_bench(&hidden, 2, 2, 20e6, 0), ""), TAGC_OK);
    assert_int_equal(tagc_points_union(&points, 0.9, 2, &density), 0);
    assert_int_equal(tagc_points_union(&points, 0.9875, 2, &density), 1);
    assert_true(fabs(density - (1 - 0.9875 * 0.9875)) < 1e-9);
    assert_int_equal(tagc_points_union(&points, 0.9875, 8, &density), 1);
    assert_true(fabs(density - (1 - pow(0.9875, 8))) < 1e-9); /* these were independent */
    for (int i = 0; i < points.n_points; i++) points.points[i].union_density = 0.0125; /* all the same */
    assert_int_equal(tagc_points_union(&points, 0.9875, 8, &density), 1);
    assert_true(fabs(density - 0.0125) < 1e-9);
    tagc_points_destroy(&points);
}

static json_t *make_lab(void) {
    tagc_costs hidden = hidden_costs();
    return json_pack("{s:s, s:i, s:[{s:i}, {s:o}, {s:o}]}", "type", "lab", "format", 1, "cases", "hosts", 2,
                     "bench", make_bench(&hidden, 2, 2, 20e6, 0), "bench",
                     make_bench(&hidden, 2, 2, 80e6, 0));
}

static void cases_of_the_lab(void **state) {
    (void)state;
    tagc_points points = {0};
    assert_int_equal(read_json(&points, make_lab(), ""), TAGC_OK);
    assert_int_equal(points.n_points, 2 * N_ARMS);
    assert_int_equal(points.points[0].setup.n_machines, 1);
    assert_int_equal(read_json(&points, make_lab(), ":2"), TAGC_OK);
    assert_int_equal(points.n_points, 3 * N_ARMS);
    assert_true(points.points[2 * N_ARMS].link.bytes_per_s == 80e6);
    assert_int_equal(read_json(&points, make_lab(), ":3"), TAGC_ERR_ARGUMENT);
    assert_non_null(strstr(tagc_last_error(), "0 to 2"));
    assert_int_equal(read_json(&points, make_lab(), ":0"), TAGC_ERR_CORRUPT);
    assert_non_null(strstr(tagc_last_error(), "no bench"));
    tagc_points_destroy(&points);
}

/* Hosts of different names are machines of their own. */
static void machines_are_told_by_name(void **state) {
    (void)state;
    tagc_costs hidden = hidden_costs();
    tagc_points points = {0};
    json_t *bench = make_bench(&hidden, 2, 2, 20e6, 0);
    json_t *machine = json_object_get(json_object_get(bench, "origin"), "machine");
    json_object_set_new(machine, "hosts", json_pack("[s, s]", "one", "two"));
    assert_int_equal(read_json(&points, bench, ""), TAGC_OK);
    assert_int_equal(points.points[0].setup.n_machines, 2);
    tagc_points_destroy(&points);
}

/* Takes a member away from an object of a bench and says what must be named. */
static void refuse_without(const char *object, const char *member, const char *named) {
    tagc_costs hidden = hidden_costs();
    tagc_points points = {0};
    json_t *bench = make_bench(&hidden, 2, 2, 20e6, 0), *from = bench;
    if (object) from = json_object_get(bench, object);
    if (json_is_array(from)) from = json_array_get(from, 0);
    assert_int_equal(json_object_del(from, member), 0);
    assert_int_equal(read_json(&points, bench, ""), TAGC_ERR_CORRUPT);
    if (!strstr(tagc_last_error(), named)) fail_msg("\"%s\" does not name %s", tagc_last_error(), named);
    if (!strstr(tagc_last_error(), path)) fail_msg("\"%s\" does not name the file", tagc_last_error());
    tagc_points_destroy(&points);
}

static void what_is_missing_is_named(void **state) {
    (void)state;
    refuse_without(NULL, "world_size", "world_size");
    refuse_without(NULL, "format", "format");
    refuse_without(NULL, "type", "type");
    refuse_without(NULL, "model", "model");
    refuse_without(NULL, "link", "link");
    refuse_without(NULL, "arms", "arms");
    refuse_without("model", "n_embd", "model.n_embd");
    refuse_without("model", "tied", "model.tied");
    refuse_without("link", "both_ways_bytes_per_s", "link.both_ways_bytes_per_s");
    refuse_without("floor", "bytes_per_s", "floor.bytes_per_s");
    refuse_without("origin", "machine", "n_cpus");
    refuse_without("arms", "name", "arms.name");
    refuse_without("arms", "options", "arms.options");
    refuse_without("arms", "iterations", "arms.iterations");
    refuse_without("arms", "n_union", "arms.n_union");
    refuse_without("arms", "n_mild", "arms.n_mild");
    refuse_without("arms", "n_sent", "arms.n_sent");
    refuse_without("codec", "phase_s", "codec.phase_s");
    refuse_without("codec", "exchange", "codec.exchange");
}

/* A lab's bench of arms alone: the link is what TCP got, codec and memory are as in the iterations. */
static void arms_alone_will_do(void **state) {
    (void)state;
    tagc_costs hidden = hidden_costs(), fitted;
    tagc_points points = {0};
    const tagc_gpt2_config model = {4, 4, 128, 64, 2048, 0}; /* make_bench's */
    double rms;
    hidden.codec_factor = 1;
    json_t *bench = make_bench(&hidden, 2, 2, 50e6, 0), *arm;
    double n_compressed = 0;
    size_t i;
    json_object_set_new(bench, "codec", json_null());
    json_object_set_new(bench, "floor", json_null());
    json_object_set_new(bench, "link", json_null());
    json_array_foreach(json_object_get(bench, "arms"), i, arm) {
        json_t *phases = json_object(), *iteration;
        size_t k;
        n_compressed = json_number_value(json_object_get(arm, "n_compressed"));
        double n_mild = json_number_value(json_object_get(arm, "n_mild"));
        for (int phase = 0; phase < TAGC_N_PHASES; phase++) {
            double phase_s = 0;
            if (arms[i].exchange >= 0)
                phase_s = (n_compressed + n_mild) * hidden.codec[codec_of(arms[i].exchange)].elem_s[phase];
            else if (phase == TAGC_PHASE_DECODE)
                phase_s = (double)tagc_gpt2_n_params(&model) / 2 * 36 * hidden.byte_s;
            json_object_set_new(phases, tagc_phase_name(phase), json_real(phase_s));
        }
        json_array_foreach(json_object_get(arm, "iterations"), k, iteration)
            json_object_set(iteration, "phase_s", phases);
        json_decref(phases);
    }
    json_t *lab = json_pack("{s:s, s:i, s:[{s:O, s:{s:[f, f]}}]}", "type", "lab", "format", 1, "cases",
                            "bench", bench, "link", "tcp_both_ways_bits_per_s", 399e6, 400e6);
    assert_int_equal(read_json(&points, bench, ""), TAGC_ERR_CORRUPT); /* without the lab there is no link */
    assert_non_null(strstr(tagc_last_error(), "link is missing"));
    assert_int_equal(read_json(&points, lab, ""), TAGC_OK);
    assert_int_equal(points.n_points, N_ARMS);
    assert_true(points.points[0].link.bytes_per_s == 50e6);
    assert_int_equal(points.n_codec, 4);
    for (int c = 0; c < 4; c++)
        for (int phase = 0; phase < TAGC_PHASE_WAIT; phase++) {
            double elem_s = hidden.codec[codec_of(points.codec[c].exchange)].elem_s[phase];
            assert_true(fabs(points.codec[c].elem_s[phase] - elem_s) <= 1e-9 * elem_s);
        }
    assert_int_equal(tagc_costs_fit(&points, &fitted, &rms), TAGC_OK);
    print_message("arms alone: %.2f %% rms\n", 100 * rms);
    assert_true(rms < 0.02);
    tagc_points_destroy(&points);
}

/* In every iteration of the arm each phase took one second more than the one before it. */
static void set_phases(json_t *arm) {
    json_t *phases = json_object(), *iteration;
    size_t k;
    for (int phase = 0; phase < TAGC_N_PHASES; phase++)
        json_object_set_new(phases, tagc_phase_name(phase), json_real(1 + phase));
    json_array_foreach(json_object_get(arm, "iterations"), k, iteration)
        json_object_set(iteration, "phase_s", phases);
    json_decref(phases);
}

/* What direct sent is told, and flats of both classes share what the phases took. */
static void direct_arms_are_read(void **state) {
    (void)state;
    tagc_costs hidden = hidden_costs();
    tagc_points points = {0};
    double density;
    json_t *bench = make_bench(&hidden, 4, 4, 20e6, 0), *list = json_object_get(bench, "arms");
    json_t *arm = json_array_get(list, N_ARMS - 1);
    double n_compressed = json_number_value(json_object_get(arm, "n_compressed"));
    set_phases(arm);
    json_object_set_new(arm, "n_mild", json_real(n_compressed / 2));
    json_object_set_new(arm, "n_sent", json_real(n_compressed * 0.04));
    for (int i = 0; i < N_ARMS - 1; i++) json_array_remove(list, 0);
    json_object_set_new(bench, "codec", json_null());
    assert_int_equal(read_json(&points, bench, ""), TAGC_OK);
    assert_int_equal(points.n_points, 1);
    assert_true(fabs(points.points[0].setup.sent_density - 0.04) < 1e-12);
    assert_true(points.points[0].union_density < 0);
    assert_int_equal(tagc_points_sent(&points, 0.95, &density), 1);
    assert_true(fabs(density - 0.04) < 1e-12);
    assert_int_equal(tagc_points_sent(&points, 0.9, &density), 0);
    assert_int_equal(tagc_points_union(&points, 0.95, 4, &density), 0);
    assert_int_equal(points.n_codec, 2); /* positions, and blocks of the mild flats */
    for (int c = 0; c < 2; c++) {
        assert_int_equal(points.codec[c].exchange, TAGC_EXCHANGE_DIRECT);
        assert_true(points.codec[c].sparsity == (c ? 0 : 0.95));
        for (int phase = 0; phase < TAGC_PHASE_WAIT; phase++)
            assert_true(fabs(points.codec[c].elem_s[phase] * 1.5 * n_compressed - (1 + phase)) < 1e-9);
    }
    tagc_points_destroy(&points);
}

static tagc_status read_hybrid(const json_t *options, tagc_fsdp_options *out) {
    set_arm(N_ARMS - 1, out);
    out->sharding = TAGC_SHARD_HYBRID;
    out->gather = TAGC_GATHER_FP32;
    out->ranks_per_host = (int)json_integer_value(json_object_get(options, "arm"));
    return TAGC_OK;
}

/* Hosts whose ranks add first encode a part of what there is: an element takes so many times as long. */
static void hosts_encode_for_their_ranks(void **state) {
    (void)state;
    tagc_costs hidden = hidden_costs();
    for (int per_host = 1; per_host <= 4; per_host *= 2) {
        tagc_points points = {0};
        json_t *bench = make_bench(&hidden, 4, 4, 20e6, 0), *list = json_object_get(bench, "arms");
        json_t *arm = json_array_get(list, N_ARMS - 1);
        double n = json_number_value(json_object_get(arm, "n_compressed"));
        set_phases(arm);
        json_object_set_new(arm, "n_mild", json_real(0));
        json_object_set_new(arm, "n_sent", json_real(0.1 * n));
        json_object_set_new(json_object_get(arm, "options"), "arm", json_integer(per_host));
        for (int i = 0; i < N_ARMS - 1; i++) json_array_remove(list, 0);
        json_object_set_new(bench, "codec", json_null());
        assert_int_equal(json_dump_file(bench, path, 0), 0);
        json_decref(bench);
        assert_int_equal(tagc_points_read(&points, path, read_hybrid), TAGC_OK);
        assert_int_equal(points.n_codec, per_host < 4); /* of one host nothing is encoded */
        for (int phase = 0; per_host < 4 && phase < TAGC_PHASE_WAIT; phase++)
            assert_true(fabs(points.codec[0].elem_s[phase] * n / per_host - (1 + phase)) < 1e-9);
        /* Of its own row a rank sends the sums, 2.4 times as many, and of the others' what it was told to. */
        double n_hosts = 4.0 / per_host, sums = 0.12, sent = (0.1 - sums / n_hosts) / (1 - 1 / n_hosts);
        if (per_host < 4) assert_true(fabs(points.codec[0].union_density - (sent + sums)) < 1e-9);
        tagc_points_destroy(&points);
    }
}

static void torn_files_are_refused(void **state) {
    (void)state;
    tagc_points points = {0};
    char text[] = "{\"type\": \"bench\", \"format\": 1, \"arms\": [",
         *texts[] = {text, text + sizeof text - 1};
    for (int i = 0; i < 2; i++) {
        FILE *file = fopen(path, "w");
        fputs(texts[i], file);
        fclose(file);
        assert_int_equal(tagc_points_read(&points, path, read_engine), TAGC_ERR_CORRUPT);
        assert_non_null(strstr(tagc_last_error(), "line"));
    }
    assert_int_equal(tagc_points_read(&points, "/nowhere/x.json", read_engine), TAGC_ERR_IO);
    assert_int_equal(tagc_points_read(&points, "/tmp", read_engine), TAGC_ERR_IO);
    assert_non_null(strstr(tagc_last_error(), "directory"));
    assert_int_equal(points.n_points, 0);
    tagc_costs costs;
    double rms;
    assert_int_equal(tagc_costs_fit(&points, &costs, &rms), TAGC_ERR_ARGUMENT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(held_out_points_are_predicted),
        cmocka_unit_test(distant_points_are_predicted),
        cmocka_unit_test(latency_of_the_lab),
        cmocka_unit_test(unions_are_extended),
        cmocka_unit_test(cases_of_the_lab),
        cmocka_unit_test(machines_are_told_by_name),
        cmocka_unit_test(what_is_missing_is_named),
        cmocka_unit_test(torn_files_are_refused),
        cmocka_unit_test(arms_alone_will_do),
        cmocka_unit_test(direct_arms_are_read),
        cmocka_unit_test(hosts_encode_for_their_ranks),
    };
    int file = mkstemp(path);
    if (file < 0) return 1;
    close(file);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return failed;
}
