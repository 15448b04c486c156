/* Planned bytes and memory against real engines that train: equal, leg by leg, for every sharding, wrap, policy,
 * exchange, wire and way of accumulating. Shares of a rank differ by where unions lie, so all ranks together are
 * compared. What depends on the data, the size of the unions, is taken from the run. */
#include "small_gpt2.h"

#include "exchange/volume.h"
#include "plan/plan.h"

#ifdef TAGC_SANITIZED
enum { STRIDE = 7 };
#else
enum { STRIDE = 1 };
#endif

static const tagc_gpt2_config tiny = {2, 2, 16, 8, 40, 0}, tied = {2, 2, 16, 8, 40, 1};
/* Its embedding and head are above 2 M elements: the paper's wrap has something to wrap. */
static const tagc_gpt2_config large = {1, 1, 64, 8, 31300, 0}, large_tied = {1, 1, 64, 8, 31300, 1};

static const tagc_gpt2_config wide = {1, 2, 128, 8, 40, 0};

/* Elements of compressed flats with their padding: what a density refers to. */
static double padded_compressed(const small_run *run) {
    tagc_fsdp_options options = run->options;
    double n = 0;
    tagc_gpt2_config config = run->config;
    /* A packed exchange that keeps everything has everything in its union. */
    tagc_setup setup = {.model = config,
                        .world_size = run->world_size,
                        .n_hosts = 1,
                        .n_batch = 1,
                        .n_tokens = 1,
                        .engine = options};
    tagc_plan_volume none, all;
    setup.engine.reducer.exchange = TAGC_EXCHANGE_PACKED;
    tagc_paper_options_init(&setup.engine.paper);
    setup.engine.reducer.format = TAGC_FORMAT_FP32;
    setup.engine.reducer.sparsity = 0;
    setup.union_density = 0;
    assert_int_equal(tagc_plan_count(&setup, &none, NULL), TAGC_OK);
    setup.union_density = 1;
    assert_int_equal(tagc_plan_count(&setup, &all, NULL), TAGC_OK);
    int n_exchanges = options.exchange_each_micro_step ? options.n_micro_steps : 1;
    n = (all.n_bytes[TAGC_LEG_VALUES] - none.n_bytes[TAGC_LEG_VALUES]) / n_exchanges / 4;
    return n * run->world_size / (run->world_size - 1);
}

static void compare(small_run *run, const char *what) {
    small_train(run);
    tagc_setup setup = {.model = run->config,
                        .world_size = run->world_size,
                        .n_hosts = 1,
                        .n_batch = run->n_sequences / run->world_size / run->options.n_micro_steps,
                        .n_tokens = run->n_tokens,
                        .engine = run->options,
                        .union_density = -1};
    double n_union = (double)run->stats[0].n_union;
    int exchange = run->options.reducer.exchange;
    if (n_union > 0 && run->world_size > 1 &&
        (exchange == TAGC_EXCHANGE_SKETCH || exchange == TAGC_EXCHANGE_PACKED)) {
        int n_exchanges = run->options.exchange_each_micro_step ? run->options.n_micro_steps : 1;
        setup.union_density = n_union / n_exchanges / padded_compressed(run);
    }
    tagc_plan_volume volume;
    tagc_plan_memory memory;
    assert_int_equal(tagc_plan_count(&setup, &volume, &memory), TAGC_OK);
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
        double counted = 0, planned = volume.n_bytes[leg] * run->world_size;
        for (int r = 0; r < run->world_size; r++) counted += (double)run->stats[r].n_bytes_sent[leg];
        if (fabs(planned - counted) > 0.01)
            fail_msg("%s, W %d sharding %d wrap %d policy %d exchange %d micro %d each %d: %s planned %.3f, "
                     "counted %.0f",
                     what, run->world_size, run->options.sharding, run->options.wrap, run->options.policy,
                     run->options.reducer.exchange, run->options.n_micro_steps,
                     run->options.exchange_each_micro_step, tagc_leg_name(leg), planned, counted);
    }
    assert_int_equal(memory.engine.parameters, run->memory.parameters);
    assert_int_equal(memory.engine.gradients, run->memory.gradients);
    assert_int_equal(memory.engine.optimizer, run->memory.optimizer);
    assert_int_equal(memory.engine.residuals, run->memory.residuals);
}

static small_run make(const tagc_gpt2_config *config, int world_size) {
    small_run run = {.config = *config,
                     .world_size = world_size,
                     .n_sequences = 2 * world_size,
                     .n_tokens = 4,
                     .n_steps = 2,
                     .lr = 1e-3};
    tagc_fsdp_options_init(&run.options);
    run.options.reducer.exchange = TAGC_EXCHANGE_PACKED;
    return run;
}

/* Sharding x accumulation x policy x exchange, for W = 1 .. 8. */
TEST(every_placement) {
    for (int variant = 0; variant < 3 * 3 * 3 * 2; variant++) {
        small_run run = make(variant % 2 ? &tied : &tiny, 1 + variant % 8);
        run.options.sharding = variant % 3;
        run.options.n_micro_steps = variant / 3 % 3 == 0 ? 1 : 2;
        run.options.exchange_each_micro_step = variant / 3 % 3 == 2;
        run.options.policy = variant / 9 % 3;
        run.options.prefetch = variant / 2 % 4;
        run.options.grads_in_flight = 1 + variant % 3;
        run.options.reducer.exchange = TAGC_EXCHANGE_PACKED;
        run.options.reducer.sparsity = 0.9;
        if (variant < 27) tagc_reducer_options_send_whole(&run.options.reducer, TAGC_FORMAT_FP32);
        if (run.options.policy == TAGC_POLICY_PAPER) run.options.policy = TAGC_POLICY_ALL;
        if (variant % STRIDE == 0) compare(&run, "placement");
    }
}

TEST(both_wraps) {
    for (int variant = 0; variant < 12; variant++) {
        small_run run = make(variant / 6 ? &large_tied : &large, 2 + variant % 3);
        run.options.wrap = TAGC_WRAP_MATRIX;
        run.options.policy = TAGC_POLICY_PAPER;
        run.options.sharding = variant % 3;
        run.options.prefetch = variant / 3 % 2;
        run.n_steps = 1;
        if (variant % STRIDE == 0) compare(&run, "wrap matrix");
    }
}

/* Buckets are part of the layout: fewer messages and less padding, and memory for larger units. */
TEST(buckets) {
    static const tagc_gpt2_config deep = {7, 2, 16, 8, 40, 0}, deep_tied = {7, 2, 16, 8, 40, 1};
    for (int variant = 0; variant < 3 * 3 * 2; variant++) {
        small_run run = make(variant % 4 < 2 ? &deep : &deep_tied, 2 + variant % 3);
        run.options.sharding = variant % 3;
        run.options.bucket_elems = variant / 9 ? 1000000 : 7000; /* two blocks, and all */
        int exchange = variant / 3 % 3;                          /* whole, direct, packed */
        run.options.reducer.exchange = exchange == 2 ? TAGC_EXCHANGE_PACKED : TAGC_EXCHANGE_DIRECT;
        /* with positions, bytes of direct depend on the data */
        run.options.reducer.sparsity = exchange == 2 ? 0.9 : 0;
        if (exchange == 0) tagc_reducer_options_send_whole(&run.options.reducer, TAGC_FORMAT_FP32);
        run.options.prefetch = variant % 3;
        run.options.gather = variant % 2;
        if (variant % STRIDE == 0) compare(&run, "buckets");
    }
}

/* Many micro-steps are extrapolated from a few. */
TEST(long_accumulation) {
    for (int variant = 0; variant < 6; variant++) {
        small_run run = make(&tiny, 2);
        run.n_sequences = 2 * 9;
        run.options.n_micro_steps = 9;
        run.options.sharding = variant % 3;
        run.options.exchange_each_micro_step = variant / 3;
        run.options.policy = TAGC_POLICY_NONE;
        if (variant % STRIDE == 0) compare(&run, "accumulation");
    }
}

/* Direct in all its forms: all elements, whose bytes are known to the last, for every sharding and number of hosts;
 * mild flats beside the compressed ones; memory with residuals once per host group. */
TEST(direct_blocks) {
    for (int variant = 0; variant < 4 * 6 * 2; variant++) {
        static const int worlds[] = {1, 2, 3, 4, 6, 8}, per_host[] = {1, 2, 3, 2, 3, 4};
        int k = variant / 4 % 6, mild = variant / 24;
        small_run run = make(variant % 2 ? &tied : &tiny, worlds[k]);
        run.options.sharding = variant % 4;
        run.options.reducer.exchange = TAGC_EXCHANGE_DIRECT;
        run.options.reducer.sparsity = 0;
        run.options.reducer.format = variant % 5;
        run.options.reducer.block = 16 << variant % 3;
        run.options.two_level = variant % 3 == 0;
        if (run.options.two_level || run.options.sharding == TAGC_SHARD_HYBRID)
            run.options.ranks_per_host = per_host[k];
        run.options.dense_format = variant / 2 % 2;
        if (mild) {
            run.options.mild = run.options.reducer;
            run.options.mild.format = (variant + 3) % 5;
        }
        if (mild && variant % 2) {
            tagc_reducer_options_send_whole(&run.options.reducer, TAGC_FORMAT_FP32);
        }
        if (variant % STRIDE == 0) compare(&run, "direct blocks");
    }
}

/* Positions take what they take: headers, hosts' rows and all that does not depend on them is equal, bodies are about as
 * large as where positions fall independently. */
TEST(direct_positions) {
    for (int variant = 0; variant < 4 * 2; variant++) {
        int n_ranks = 2 + 2 * (variant / 4);
        small_run run = make(&wide, n_ranks);
        run.n_sequences =
            32 * n_ranks; /* of few tokens gradients have few rows, and positions stand together */
        run.n_tokens = 8;
        run.options.sharding = variant % 4;
        run.options.reducer.exchange = TAGC_EXCHANGE_DIRECT;
        run.options.reducer.sparsity = variant / 4 ? 0.8 : 0.95;
        run.options.two_level = variant % 3 == 0;
        if (run.options.two_level || run.options.sharding == TAGC_SHARD_HYBRID)
            run.options.ranks_per_host = 2;
        if (variant % STRIDE != 0) continue;
        small_train(&run);
        tagc_setup setup = {.model = run.config,
                            .world_size = n_ranks,
                            .n_hosts = 1,
                            .n_batch = 1,
                            .n_tokens = run.n_tokens,
                            .engine = run.options,
                            .union_density = -1};
        tagc_plan_volume v;
        setup.sent_density = (double)run.stats[0].n_sent / (double)run.stats[0].n_compressed;
        double n_senders = (double)n_ranks / run.options.ranks_per_host,
               returned = (double)run.stats[0].n_returned / (double)run.stats[0].n_compressed;
        if (run.options.sharding == TAGC_SHARD_HYBRID)
            returned *= run.options.ranks_per_host; /* of the part of one local index */
        if (returned > 0 && n_senders > 1)          /* of its own row a rank sends the sums */
            setup.sent_density = (setup.sent_density - returned / n_senders) / (1 - 1 / n_senders);
        assert_int_equal(tagc_plan_count(&setup, &v, NULL), TAGC_OK);
        for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
            double counted = 0, planned = v.n_bytes[leg] * n_ranks;
            for (int r = 0; r < n_ranks; r++) counted += (double)run.stats[r].n_bytes_sent[leg];
            double within = leg == TAGC_LEG_INDEX || leg == TAGC_LEG_VALUES
                                ? 0.1
                                : 1e-9; /* of small units positions travel among
                                                                                         the values */
            if (leg == TAGC_LEG_RESULT) within = 0.1;
            if (!(fabs(planned - counted) <= within * counted))
                fail_msg("W %d sharding %d hosts of %d: %s planned %.0f, counted %.0f", n_ranks,
                         run.options.sharding, run.options.ranks_per_host, tagc_leg_name(leg), planned,
                         counted);
        }
    }
}

/* Gathers in every wire that a sharding allows and whose bytes do not depend on the values, in one level and in two, counted
 * when deltas are no longer whole. */
TEST(every_gather) {
    static const int wires[] = {TAGC_GATHER_FP32,   TAGC_GATHER_BF16,   TAGC_GATHER_INT8,
                                TAGC_GATHER_DELTA8, TAGC_GATHER_DELTA4, TAGC_GATHER_DELTA2};
    for (int variant = 0; variant < 6 * 3 * 2 * 2; variant++) {
        int wire = wires[variant % 6], sharding = variant / 6 % 3;
        small_run run = make(&tiny, 4);
        run.n_steps = 3;
        run.options.sharding = sharding == 2 ? TAGC_SHARD_HYBRID : sharding;
        run.options.two_level = variant / 36;
        run.options.ranks_per_host = sharding == 2 || run.options.two_level ? 2 : 1;
        run.options.gather = wire;
        run.options.policy = TAGC_POLICY_NONE;
        run.options.n_micro_steps = 1 + variant / 18 % 2;
        if (wire >= TAGC_GATHER_DELTA8 && run.options.sharding != TAGC_SHARD_GRAD) continue;
        if (variant % STRIDE == 0) compare(&run, "gather");
    }
}

/* What leaves a host: with two levels only what was encoded, with hybrid sharding no parameters at all. */
TEST(hosts_are_told_apart) {
    tagc_setup setup = {
        .model = tiny, .world_size = 8, .n_hosts = 4, .n_batch = 1, .n_tokens = 8, .union_density = -1};
    tagc_plan_volume v, apart;
    tagc_fsdp_options_init(&setup.engine);
    setup.engine.reducer.exchange = TAGC_EXCHANGE_DIRECT;
    setup.engine.reducer.sparsity = 0.9;
    setup.engine.policy = TAGC_POLICY_ALL;
    setup.engine.ranks_per_host = 2;
    setup.engine.two_level = 1;
    setup.engine.sharding = TAGC_SHARD_GRAD;
    assert_int_equal(tagc_plan_count(&setup, &v, NULL), TAGC_OK);
    /* Of a dense row in bf16 to the neighbour nothing leaves: of all values, half of them. */
    double n_padded = 0;
    tagc_layout *layout;
    assert_int_equal(tagc_model_layout(&setup.model, &setup.engine, setup.world_size, &layout), TAGC_OK);
    for (int i = 0; i < layout->n_flats; i++) n_padded += (double)layout->flats[i].n_padded;
    double words = 16.0 * layout->n_flats; /* to each other rank, beside its rows */
    tagc_layout_destroy(layout);
    double rows = n_padded / 2 * 2;
    assert_true(v.n_bytes[TAGC_LEG_VALUES] > rows);
    assert_true(fabs(v.n_host_bytes[TAGC_LEG_VALUES] - 2 * (v.n_bytes[TAGC_LEG_VALUES] - rows)) <
                1e-6 * rows);
    assert_true(fabs(v.n_host_bytes[TAGC_LEG_INDEX] - 2 * v.n_bytes[TAGC_LEG_INDEX]) < 1e-6);
    /* A rank sends an eighth of the parameters to one rank of each of three hosts, and to its neighbour what it has of
     * all four hosts. Hosts that hold two such groups have one group less to send to, and four ranks that do. */
    double row = n_padded / 8 * 4;
    assert_true(v.n_bytes[TAGC_LEG_GATHER] == 7 * (row + words));
    assert_true(fabs(v.n_host_bytes[TAGC_LEG_GATHER] - 2 * 3 * (row + words)) < 1e-9 * row);
    setup.n_hosts = 2;
    assert_int_equal(tagc_plan_count(&setup, &apart, NULL), TAGC_OK);
    assert_true(apart.n_bytes[TAGC_LEG_GATHER] == 7 * (row + words));
    assert_true(fabs(apart.n_host_bytes[TAGC_LEG_GATHER] - 4 * 2 * (row + words)) < 1e-9 * row);
    setup.engine.two_level = 0;
    setup.n_hosts = 4;
    assert_int_equal(tagc_plan_count(&setup, &apart, NULL), TAGC_OK);
    assert_true(fabs(apart.n_host_bytes[TAGC_LEG_GATHER] - 2 * 6 * (row + words)) < 1e-9 * row);
    setup.engine.two_level = 1;
    /* Were all ranks hosts of their own, all of it would leave. */
    setup.n_hosts = 8;
    assert_int_equal(tagc_plan_count(&setup, &apart, NULL), TAGC_OK);
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
        assert_true(apart.n_bytes[leg] == v.n_bytes[leg]);
        assert_true(fabs(apart.n_host_bytes[leg] - v.n_bytes[leg]) <= 1e-9 * v.n_bytes[leg]);
    }
    setup.n_hosts = 4;
    setup.engine.sharding = TAGC_SHARD_HYBRID;
    assert_int_equal(tagc_plan_count(&setup, &v, NULL), TAGC_OK);
    assert_true(v.n_bytes[TAGC_LEG_GATHER] > 0 && v.n_host_bytes[TAGC_LEG_GATHER] == 0);
    assert_true(v.n_host_bytes[TAGC_LEG_RESULT] == 2 * v.n_bytes[TAGC_LEG_RESULT]);
}
