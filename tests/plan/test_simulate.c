/* Simulated steps against times worked out by hand, at the limits where that is possible, and in the direction in
 * which they must go. */

#include <math.h>
#include <string.h>

#include "../test.h"
#include "core/status.h"
#include "plan/plan.h"
#include "tagc/tagc.h"

static void assert_near(double seen, double expected, double share) {
    if (!(fabs(seen - expected) <= share * fabs(expected)))
        fail_msg("%.12g instead of %.12g", seen, expected);
}

static tagc_setup make(const char *preset, int world_size) {
    tagc_setup setup = {
        .world_size = world_size, .n_hosts = world_size, .n_batch = 1, .n_tokens = 16, .union_density = -1};
    assert_int_equal(tagc_gpt2_preset(preset, &setup.model), TAGC_OK);
    tagc_fsdp_options_init(&setup.engine);
    setup.engine.policy = TAGC_POLICY_NONE;
    return setup;
}

static tagc_forecast simulate(const tagc_setup *setup, const tagc_costs *costs, double bytes_per_s,
                              double latency_s) {
    tagc_plan_link link = {.bytes_per_s = bytes_per_s, .latency_s = latency_s};
    tagc_forecast forecast;
    tagc_status status = tagc_plan_simulate(setup, costs, &link, &forecast);
    if (status != TAGC_OK) fail_msg("%s", tagc_last_error());
    return forecast;
}

static double all_bytes(const tagc_forecast *f) {
    double sum = 0;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) sum += f->n_bytes[leg];
    return sum;
}

/* An endless link without latency: what is left is computing, and the update. */
TEST(nothing_but_computing) {
    for (int sharding = TAGC_SHARD_FULL; sharding <= TAGC_SHARD_NONE; sharding++)
        for (int n_micro = 1; n_micro <= 7; n_micro += 2) {
            tagc_setup setup = make("tiny", 4);
            tagc_costs costs = {0};
            costs.flop_s = 1e-9;
            setup.engine.sharding = sharding;
            setup.engine.n_micro_steps = n_micro;
            tagc_forecast f = simulate(&setup, &costs, (double)INFINITY, 0);
            assert_near(f.iteration_s, 1e-9 * tagc_setup_flops(&setup), 1e-6);
            assert_near(f.compute_s, f.iteration_s, 1e-6);
            costs.optimizer_s = 1e-6;
            double n_owned = (double)tagc_gpt2_n_params(&setup.model) / (sharding == TAGC_SHARD_NONE ? 1 : 4);
            f = simulate(&setup, &costs, (double)INFINITY, 0);
            assert_near(f.optimizer_s, 1e-6 * n_owned, 0.01); /* padding */
        }
}

/* Computing that takes no time: the link is busy from beginning to end. */
TEST(nothing_but_bytes) {
    for (int variant = 0; variant < 5 * 3; variant++) {
        tagc_setup setup = make(variant % 2 ? "demo" : "tiny", 2 + variant % 3);
        setup.engine.sharding = variant % 5 < 3 ? variant % 5 : TAGC_SHARD_FULL;
        setup.engine.n_micro_steps = 1 + variant / 5;
        setup.engine.dense_format = variant % 2;
        setup.engine.wrap = variant % 5 == 4 ? TAGC_WRAP_MATRIX : TAGC_WRAP_BLOCK;
        tagc_costs costs = {0};
        tagc_forecast f = simulate(&setup, &costs, 1e6, 0);
        assert_near(f.iteration_s, all_bytes(&f) / 1e6, 1e-6);
        assert_near(f.comm_s, f.iteration_s, 1e-6);
        tagc_plan_volume volume;
        assert_int_equal(tagc_plan_count(&setup, &volume, NULL), TAGC_OK);
        for (int leg = 0; leg < TAGC_N_LEGS; leg++) assert_true(volume.n_bytes[leg] == f.n_bytes[leg]);
    }
}

enum { WORD = 16 }; /* bytes beside a row of a gather */

/* One unit: gather, compute, exchange, agree, norm, update, each of which waits for the one before. */
TEST(one_unit_by_hand) {
    const double bytes_per_s = 1e6, latency_s = 0.01;
    tagc_setup setup = make("tiny", 2);
    setup.engine.wrap = TAGC_WRAP_MATRIX; /* no matrix is above 2 M elements: all in the root unit */
    tagc_costs costs = {0};
    costs.flop_s = 1e-9;
    costs.optimizer_s = 1e-7;
    double n_padded = (double)tagc_padded_elems(tagc_gpt2_n_params(&setup.model), 2);
    double shard_s = n_padded / 2 * 4 / bytes_per_s;
    double word_s = WORD / bytes_per_s;
    double expected = shard_s + word_s + latency_s      /* gather */
                      + 1e-9 * tagc_setup_flops(&setup) /* forward and backward */
                      + shard_s + latency_s             /* gradients: one chunk */
                      + 64 / bytes_per_s + latency_s    /* agreement */
                      + 8 / bytes_per_s + latency_s     /* norm */
                      + 1e-7 * n_padded / 2;
    tagc_forecast f = simulate(&setup, &costs, bytes_per_s, latency_s);
    assert_near(f.iteration_s, expected, 1e-9);
    assert_near(f.wait_gather_s, shard_s + word_s + latency_s, 1e-9);
    assert_near(f.wait_reduce_s, shard_s + 72 / bytes_per_s + 3 * latency_s, 1e-9);

    /* Replicated: no gather, and the sums come back, beside which the ranks agree. */
    setup.engine.sharding = TAGC_SHARD_NONE;
    expected += -1e-7 * n_padded / 2 + 1e-7 * n_padded - latency_s - word_s;
    assert_near(simulate(&setup, &costs, bytes_per_s, latency_s).iteration_s, expected, 1e-9);

    /* Two ranks of one host share its link with two of the other: each sends a third of its bytes within the host. */
    setup.world_size = 4;
    setup.n_hosts = 2;
    setup.engine.sharding = TAGC_SHARD_FULL;
    n_padded = (double)tagc_padded_elems(tagc_gpt2_n_params(&setup.model), 4);
    double leave_s =
        n_padded / 4 * 4 * 2 / (bytes_per_s / 2); /* two peers are remote, two ranks share the link */
    expected = 2 * leave_s + 4 * latency_s + (2 * 64 + 3 * 8) / (bytes_per_s / 2) +
               1e-9 * tagc_setup_flops(&setup) + 1e-7 * n_padded / 4;
    assert_near(simulate(&setup, &costs, bytes_per_s, latency_s).iteration_s, expected,
                1e-3); /* the norm's bytes */
}

/* An endless link and computing that takes no time: a step is its latencies, counted. Of one unit those are the gather, the
 * gradients, their agreement, the norm. */
TEST(nothing_but_latency) {
    for (int n_ranks = 2; n_ranks <= 8; n_ranks *= 2)
        for (int is_bf16 = 0; is_bf16 < 2; is_bf16++) {
            tagc_setup setup = make("tiny", n_ranks);
            setup.engine.wrap = TAGC_WRAP_MATRIX;
            setup.engine.dense_format = setup.engine.gather = is_bf16;
            tagc_costs costs = {0};
            tagc_plan_link link = {.bytes_per_s = (double)INFINITY, .latency_s = 0.01};
            tagc_forecast f;
            assert_int_equal(tagc_plan_simulate(&setup, &costs, &link, &f), TAGC_OK);
            assert_near(f.iteration_s, 4 * 0.01, 1e-9);
            assert_near(f.wait_gather_s, 0.01, 1e-9);
        }
    tagc_setup setup = make("tiny", 2);
    tagc_costs costs = {0};
    tagc_plan_link link = {.bytes_per_s = 1, .latency_s = -1};
    tagc_forecast f;
    assert_int_equal(tagc_plan_simulate(&setup, &costs, &link, &f), TAGC_ERR_ARGUMENT);
}

static tagc_setup make_direct(int n_layers, int n_ranks, double sparsity) {
    tagc_setup setup = make("tiny", n_ranks);
    setup.model.n_layer = n_layers;
    setup.engine.sharding = TAGC_SHARD_GRAD;
    setup.engine.policy = TAGC_POLICY_ALL;
    setup.engine.reducer.exchange = TAGC_EXCHANGE_DIRECT;
    setup.engine.reducer.sparsity = sparsity;
    return setup;
}

static double step_in_latencies(const tagc_setup *setup) {
    const tagc_costs costs = {0};
    tagc_forecast f;
    tagc_plan_link link = {.bytes_per_s = (double)INFINITY, .latency_s = 0.5};
    if (tagc_plan_simulate(setup, &costs, &link, &f) != TAGC_OK) fail_msg("%s", tagc_last_error());
    return f.iteration_s / 0.5;
}

/* Direct: the gather of what is needed first, fragments with their headers, agreement, norm; whatever the number of ranks
 * and of units, whose steps share their latency. Of larger units headers go ahead of bodies. */
TEST(direct_takes_few_latencies) {
    static const int n_ranks[] = {2, 3, 8, 64, 256};
    for (int i = 0; i < 5; i++)
        for (int n_layers = 1; n_layers <= 16; n_layers *= 4) {
            tagc_setup setup = make_direct(n_layers, n_ranks[i], 0.95);
            setup.engine.n_micro_steps = 2; /* gradients of all units stay */
            setup.engine.prefetch = 64;
            assert_near(step_in_latencies(&setup), 4, 1e-9);
        }
    tagc_setup setup = make_direct(1, 2, 0);
    setup.engine.wrap = TAGC_WRAP_MATRIX;
    setup.engine.gather = TAGC_GATHER_DELTA4;
    setup.engine.reducer.format = TAGC_FORMAT_INT4;
    setup.model = (tagc_gpt2_config){1, 1, 64, 64, 31300, 1}; /* a matrix of 2 M elements */
    assert_near(step_in_latencies(&setup), 1 + 1 + 1 + 1 + 1, 1e-9);
    setup.world_size = setup.n_hosts = 64; /* headers of all, then their bodies */
    assert_near(step_in_latencies(&setup), 1 + 1 + 1 + 1 + 1, 1e-9);
}

/* Two units, both of which stay for backward: the embedding shared with the head, and the rest. Gathers come first,
 * all is computed with both here, and gradients leave when all is computed: there is nothing to overlap. */
TEST(two_units_by_hand) {
    tagc_setup setup = make("tiny", 2);
    setup.model = (tagc_gpt2_config){1, 1, 64, 32, 31300, 1};
    setup.engine.wrap = TAGC_WRAP_MATRIX;
    tagc_costs costs = {0};
    costs.flop_s = 1e-10;
    tagc_forecast f = simulate(&setup, &costs, 1e7, 0);
    assert_near(f.iteration_s, all_bytes(&f) / 1e7 + 1e-10 * tagc_setup_flops(&setup), 1e-9);
    /* Each further chunk of the embedding's gradient and each of the transfers has latency once; the second unit's
     * first chunks leave while the first agrees. */
    double n_wte = 31300.0 * 64, shard = (double)tagc_padded_elems((uint64_t)n_wte, 2) / 2;
    assert_true(shard / 262144 <= 4);
    tagc_forecast late = simulate(&setup, &costs, 1e7, 1e-4);
    assert_true(late.iteration_s > f.iteration_s + 5 * 1e-4 - 1e-9);
    assert_true(late.iteration_s < f.iteration_s + 12 * 1e-4);
}

static double values_bytes(const tagc_setup *setup) {
    tagc_plan_volume v;
    assert_int_equal(tagc_plan_count(setup, &v, NULL), TAGC_OK);
    return v.n_bytes[TAGC_LEG_VALUES];
}

/* Blocks to one other: encoded, sent with their header while the own half is encoded, all decoded, agreed. */
TEST(direct_by_hand) {
    const double bytes_per_s = 1e6, latency_s = 0.01, encode_s = 2e-8, decode_s = 1e-8;
    tagc_setup setup = make("tiny", 2);
    setup.engine.wrap = TAGC_WRAP_MATRIX;
    setup.engine.policy = TAGC_POLICY_ALL;
    setup.engine.reducer.exchange = TAGC_EXCHANGE_DIRECT;
    setup.engine.reducer.sparsity = 0;
    setup.engine.reducer.format = TAGC_FORMAT_INT8;
    tagc_costs costs = {0};
    costs.flop_s = 1e-9;
    costs.encode_s = encode_s;
    costs.decode_s = decode_s;
    double n = (double)tagc_padded_elems(tagc_gpt2_n_params(&setup.model), 2);
    double gather_s = (n / 2 * 4 + WORD) / bytes_per_s + latency_s,
           control_s = (64 + 8) / bytes_per_s + 2 * latency_s;
    double body_s = (64 + values_bytes(&setup)) / bytes_per_s + latency_s;
    assert_true(body_s > n / 2 * encode_s); /* the own half is encoded beside it */
    double expected =
        gather_s + 1e-9 * tagc_setup_flops(&setup) + n / 2 * encode_s + body_s + n * decode_s + control_s;
    tagc_forecast f = simulate(&setup, &costs, bytes_per_s, latency_s);
    assert_near(f.iteration_s, expected, 1e-9);

    /* Encoding is slower than the link: the body is there long before the own half is encoded. */
    costs.encode_s = 1e-3;
    f = simulate(&setup, &costs, bytes_per_s, latency_s);
    assert_near(f.iteration_s, expected - n / 2 * encode_s - body_s + n * 1e-3, 1e-9);

    /* Two hosts of two: rows within a host take no time here, and each rank encodes half of the sums. */
    costs.encode_s = encode_s;
    setup.world_size = 4;
    setup.n_hosts = 2;
    setup.engine.two_level = 1;
    setup.engine.ranks_per_host = 2;
    n = (double)tagc_padded_elems(tagc_gpt2_n_params(&setup.model), 4);
    double rows = n / 2 * 2;                 /* bf16 of two quarters' rows to the neighbour */
    double rate = bytes_per_s / 2;           /* two ranks share the link of a host */
    gather_s = n / 4 * 4 / rate + latency_s; /* to one rank of the other host, which hands it on in no time */
    control_s = (64 + 3 * 8) / rate + 2 * latency_s;
    body_s = (64 + values_bytes(&setup) - rows) / rate + latency_s;
    expected =
        gather_s + 1e-9 * tagc_setup_flops(&setup) + n / 4 * encode_s + body_s + n / 2 * decode_s + control_s;
    f = simulate(&setup, &costs, bytes_per_s, latency_s);
    assert_near(f.iteration_s, expected, 1e-3); /* whose agreement and norm stay within the host */
}

/* Across, then within the host: one after the other, and the second as slow as the host is. */
TEST(two_levels_by_hand) {
    const double bytes_per_s = 1e6, host_bytes_per_s = 4e6, latency_s = 0.01;
    tagc_setup setup = make("tiny", 6);
    setup.engine.wrap = TAGC_WRAP_MATRIX; /* one unit */
    setup.engine.two_level = 1;
    setup.engine.ranks_per_host = 2;
    setup.n_hosts = 3;
    tagc_costs costs = {0};
    double row = (double)tagc_padded_elems(tagc_gpt2_n_params(&setup.model), 6) / 6 * 4;
    tagc_plan_link link = {
        .bytes_per_s = bytes_per_s, .host_bytes_per_s = host_bytes_per_s, .latency_s = latency_s};
    tagc_forecast f, fast;
    assert_int_equal(tagc_plan_simulate(&setup, &costs, &link, &f), TAGC_OK);
    /* Two rows across; then three to the neighbour, who is reached four times as fast. */
    double across_s = 2 * (row + WORD) / (bytes_per_s / 2) + latency_s,
           within_s = 3 * (row + WORD) / host_bytes_per_s;
    assert_near(f.wait_gather_s, across_s + within_s, 1e-9);
    link.host_bytes_per_s = 0;
    assert_int_equal(tagc_plan_simulate(&setup, &costs, &link, &fast), TAGC_OK);
    assert_near(fast.wait_gather_s, across_s, 1e-9);
}

/* ZeRO-2, two units: the gather of the first runs beside the update of the second, and no other time is saved. */
TEST(gathers_begin_inside_the_update) {
    const double bytes_per_s = 1e7;
    tagc_setup setup = make("tiny", 2);
    setup.engine.sharding = TAGC_SHARD_GRAD;
    setup.model = (tagc_gpt2_config){1, 1, 64, 32, 31300, 1};
    setup.engine.wrap = TAGC_WRAP_MATRIX;
    tagc_costs costs = {0};
    costs.flop_s = 1e-10;
    costs.optimizer_s = 1e-6;
    tagc_layout *layout;
    assert_int_equal(tagc_model_layout(&setup.model, &setup.engine, setup.world_size, &layout), TAGC_OK);
    assert_int_equal(layout->n_flats, 2);
    double first_s = 1e-6 * (double)layout->flats[0].n_padded / 2,
           second_s = 1e-6 * (double)layout->flats[1].n_padded / 2;
    double gather_s = 4 * (double)layout->flats[0].n_padded / 2 / bytes_per_s;
    tagc_layout_destroy(layout);
    assert_true(gather_s > second_s); /* it goes on after the step */
    tagc_forecast f = simulate(&setup, &costs, bytes_per_s, 0);
    assert_near(f.iteration_s, all_bytes(&f) / bytes_per_s + 1e-10 * tagc_setup_flops(&setup) + first_s,
                1e-9);
    assert_near(f.optimizer_s, first_s + second_s, 1e-9);
    /* More micro-steps than are simulated one by one gather as often: once. */
    setup.engine.n_micro_steps = 9;
    tagc_forecast more = simulate(&setup, &costs, bytes_per_s, 0);
    assert_near(more.n_bytes[TAGC_LEG_GATHER], f.n_bytes[TAGC_LEG_GATHER], 1e-12);
    assert_near(more.iteration_s - f.iteration_s, 8e-10 / 9 * tagc_setup_flops(&setup), 1e-9);
    /* Codes of parameters cost the owner's caller and every rank's. */
    setup.engine.n_micro_steps = 1;
    setup.engine.gather = TAGC_GATHER_DELTA4;
    f = simulate(&setup, &costs, (double)INFINITY, 0);
    costs.gather_encode_s = 1e-7;
    costs.gather_decode_s = 3e-7;
    more = simulate(&setup, &costs, (double)INFINITY, 0);
    double n = 2e6 * (first_s + second_s);
    assert_near(more.iteration_s - f.iteration_s, 1e-7 * n / 2 + 3e-7 * n, 1e-9);
}

/* A faster link, less latency, faster computing never take longer; and a link that is slow enough decides alone. */
TEST(times_go_the_right_way) {
    for (int variant = 0; variant < 4 * 4 * 2; variant++) {
        int is_direct = variant / 4 % 2, is_sparse = variant / 8 % 2;
        tagc_setup setup = make("demo", 2 + variant % 3);
        setup.engine.sharding = variant % 3;
        setup.engine.policy = is_direct ? TAGC_POLICY_NON_ATTENTION_LINEAR : TAGC_POLICY_NONE;
        if (!is_direct) tagc_reducer_options_send_whole(&setup.engine.reducer, TAGC_FORMAT_FP32);
        if (is_direct) {
            setup.engine.mild = setup.engine.reducer;
            setup.engine.mild.sparsity = 0;
            if (!is_sparse) setup.engine.reducer.sparsity = 0;
        }
        setup.engine.n_micro_steps = 1 + variant / 16;
        tagc_costs costs = {.flop_s = 1e-10, .encode_s = 3e-9, .decode_s = 1e-9};
        double before = (double)INFINITY;
        for (double bytes_per_s = 1e5; bytes_per_s < 1e12; bytes_per_s *= 4) {
            tagc_forecast f = simulate(&setup, &costs, bytes_per_s, 1e-4);
            assert_true(f.iteration_s <=
                        before * 1.01); /* which step goes first changes, and costs a little */
            assert_true(f.iteration_s >= 1e-10 * tagc_setup_flops(&setup));
            assert_true(f.iteration_s >= all_bytes(&f) / bytes_per_s * (1 - 1e-9));
            before = f.iteration_s;
        }
        before = 0;
        for (double latency_s = 1e-6; latency_s < 1; latency_s *= 4) {
            tagc_forecast f = simulate(&setup, &costs, 1e8, latency_s);
            assert_true(f.iteration_s >= before * 0.985);
            before = f.iteration_s;
        }
        tagc_forecast slow = simulate(&setup, &costs, 1e4, 0);
        assert_near(slow.iteration_s, all_bytes(&slow) / 1e4, 0.02);
    }
}

TEST(what_is_not_known_is_refused) {
    tagc_setup setup = make("tiny", 2);
    tagc_costs costs = {0};
    tagc_plan_link link = {.bytes_per_s = 1e6};
    tagc_forecast f;
    setup.engine.policy = TAGC_POLICY_ALL;
    setup.engine.reducer.exchange = TAGC_EXCHANGE_PACKED;
    tagc_fsdp_options_resolve(&setup.engine);
    assert_int_equal(tagc_plan_simulate(&setup, &costs, &link, &f), TAGC_ERR_UNSUPPORTED);
    assert_non_null(strstr(tagc_last_error(), "packed"));
    setup.engine.reducer.exchange = TAGC_EXCHANGE_DIRECT;
    setup.engine.reducer.format = -1; /* its own: packed had fp32 */
    assert_int_equal(tagc_plan_simulate(&setup, &costs, &link, &f), TAGC_OK);
    setup.engine.reducer.sparsity = 0;
    setup.engine.reducer.format = TAGC_FORMAT_BF16; /* codes nothing, as a dense step */
    costs.encode_s = costs.decode_s = 1e9;
    assert_int_equal(tagc_plan_simulate(&setup, &costs, &link, &f), TAGC_OK);
    assert_true(f.iteration_s < 1e6);
    link.bytes_per_s = 0;
    assert_int_equal(tagc_plan_simulate(&setup, &costs, &link, &f), TAGC_ERR_ARGUMENT);
    link.bytes_per_s = 1;
    setup.n_hosts = 3;
    assert_int_equal(tagc_plan_simulate(&setup, &costs, &link, &f), TAGC_ERR_ARGUMENT);
    assert_non_null(strstr(tagc_last_error(), "hosts is 3"));
}
