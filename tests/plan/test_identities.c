/* Plans against what is published: what sharding saves and costs, and the volumes of the paper's configurations in
 * bits per parameter. */

#include <math.h>

#include "../test.h"
#include "core/status.h"
#include "plan/plan.h"

typedef struct counted {
    tagc_plan_volume volume;
    tagc_plan_memory memory;
    double bits[TAGC_N_LEGS]; /* per parameter, before (W-1)/W */
    double all_bits;
    double compressed_bits; /* gradients of the compressed part */
} counted;

static tagc_setup make(int sharding, int world_size) {
    tagc_setup setup = {
        .world_size = world_size, .n_hosts = world_size, .n_batch = 1, .n_tokens = 256, .union_density = -1};
    assert_int_equal(tagc_gpt2_preset("gpt2-162m", &setup.model), TAGC_OK);
    tagc_fsdp_options_init(&setup.engine);
    setup.engine.sharding = sharding;
    setup.engine.policy = TAGC_POLICY_NONE;
    return setup;
}

static counted count(const tagc_setup *setup) {
    counted c = {0};
    if (tagc_plan_count(setup, &c.volume, &c.memory) != TAGC_OK) fail_msg("%s", tagc_last_error());
    double n_ranks = setup->world_size, factor = 8 * n_ranks / (n_ranks - 1);
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
        c.bits[leg] = factor * c.volume.n_bytes[leg] / (double)c.volume.n_params;
        c.all_bits += c.bits[leg];
    }
    if (c.volume.n_compressed > 0)
        c.compressed_bits = factor * c.volume.n_bytes_compressed / (double)c.volume.n_compressed;
    return c;
}

static void assert_near(double seen, double expected, double share) {
    if (!(fabs(seen - expected) <= share * fabs(expected))) fail_msg("%.6f instead of %.6f", seen, expected);
}

/* Parameters of the embeddings' layer, which backward does not read: gathered once. */
static double n_embeddings(const tagc_gpt2_config *c) {
    return (double)c->n_embd * (c->vocab_size + c->block_size);
}

/* ZeRO, section 5 and 7: state of a rank falls to a part in W; layers 1 and 2 move what an all-reduce moves, layer 3
 * half as much again (a ring all-reduce moves every value twice; here, to its owner and back). */
TEST(sharding_divides_state_and_costs_half_more) {
    for (int world_size = 2; world_size <= 64; world_size *= 2) {
        tagc_setup setup = make(TAGC_SHARD_NONE, world_size);
        double n = (double)tagc_gpt2_n_params(&setup.model), emb = n_embeddings(&setup.model);
        counted each[TAGC_SHARD_NONE + 1];
        for (int sharding = TAGC_SHARD_FULL; sharding <= TAGC_SHARD_NONE; sharding++) {
            setup.engine.sharding = sharding;
            each[sharding] = count(&setup);
        }
        counted *ddp = &each[TAGC_SHARD_NONE], *zero3 = &each[TAGC_SHARD_FULL];
        assert_near((double)ddp->memory.state, 16 * n, 1e-4); /* parameters, gradients, two moments in fp32 */
        assert_near((double)ddp->memory.state / (double)zero3->memory.state, world_size, 1e-9);
        assert_near((double)each[TAGC_SHARD_GRAD].memory.engine.optimizer, 8 * n / world_size, 1e-3);
        assert_true(each[TAGC_SHARD_GRAD].memory.state <= ddp->memory.state); /* masters beside replicas */
        assert_true(zero3->memory.state < each[TAGC_SHARD_GRAD].memory.state);
        assert_true(zero3->memory.total < ddp->memory.total);
        assert_near(ddp->all_bits, 64, 1e-4);
        assert_near(each[TAGC_SHARD_GRAD].all_bits, ddp->all_bits, 1e-4);
        /* With the embeddings' second gather, which the engine leaves out, it would be 96. */
        assert_near(zero3->all_bits + 32 * emb / n, 1.5 * ddp->all_bits, 1e-3);
    }
}

static double host_bytes(const counted *c) {
    double all = 0;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) all += c->volume.n_host_bytes[leg];
    return all;
}

/* One host per rank: nothing to shard within, so hybrid is DDP; one host for all: it is ZeRO-3 and sends nothing. */
TEST(hybrid_lies_between) {
    tagc_setup setup = make(TAGC_SHARD_HYBRID, 8);
    counted apart = count(&setup);
    setup.engine.sharding = TAGC_SHARD_NONE;
    counted ddp = count(&setup);
    assert_near(apart.bits[TAGC_LEG_VALUES] + apart.bits[TAGC_LEG_RESULT],
                ddp.bits[TAGC_LEG_VALUES] + ddp.bits[TAGC_LEG_RESULT], 1e-6);
    assert_true(apart.bits[TAGC_LEG_GATHER] == 0);
    setup.engine.sharding = TAGC_SHARD_HYBRID;
    setup.engine.ranks_per_host = 8;
    setup.n_hosts = 1;
    counted together = count(&setup);
    assert_true(host_bytes(&together) < 1000); /* the norm's is counted as if it left */
    setup.engine.sharding = TAGC_SHARD_FULL;
    assert_near((double)together.memory.state, (double)count(&setup).memory.state, 1e-9);

    /* Two hosts of four: every gradient value crosses once per direction and host, both ways of the all-reduce
     * together 2 (H-1)/H x 4 bytes a parameter. */
    setup.engine.sharding = TAGC_SHARD_HYBRID;
    setup.engine.ranks_per_host = 4;
    setup.n_hosts = 2;
    counted two = count(&setup);
    assert_near(host_bytes(&two), 4 * (double)two.volume.n_params, 1e-3);
    setup.engine.sharding = TAGC_SHARD_FULL;
    counted zero3 = count(&setup);
    assert_true(host_bytes(&two) < 0.2 * host_bytes(&zero3));
}

/* Where nothing is gathered between hosts there is no delta. */
TEST(deltas_need_a_gather_between_hosts) {
    static const int shardings[] = {TAGC_SHARD_FULL, TAGC_SHARD_NONE, TAGC_SHARD_HYBRID};
    for (int i = 0; i < 3; i++) {
        tagc_setup setup = make(shardings[i], 8);
        tagc_plan_volume volume;
        setup.engine.gather = TAGC_GATHER_DELTA4;
        assert_int_equal(tagc_plan_count(&setup, &volume, NULL), TAGC_ERR_ARGUMENT);
    }
}

/* The paper's Figures 1 and 2: index of b bits there and back, a sketch of 32 / ratio bits to the owner. */
TEST(volumes_of_the_paper) {
    static const struct {
        double ratio, sparsity, bits[2]; /* 1-bit and 4-bit index */
    } rows[] = {{2, 0.8, {18, 24}}, {4, 0.9, {10, 16}}, {10, 0.9875, {5.2, 11.2}}};
    tagc_setup setup = make(TAGC_SHARD_FULL, 2);
    setup.engine.wrap = TAGC_WRAP_MATRIX;
    assert_near(count(&setup).bits[TAGC_LEG_VALUES], 32, 1e-4);
    setup.engine.policy = TAGC_POLICY_PAPER;
    setup.engine.reducer.exchange = TAGC_EXCHANGE_SKETCH;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int index = TAGC_INDEX_OR; index <= TAGC_INDEX_SUM4; index++) {
            setup.engine.paper.ratio = rows[i].ratio;
            setup.engine.reducer.sparsity = rows[i].sparsity;
            setup.engine.paper.index = index;
            counted c = count(&setup);
            assert_near((double)c.volume.n_compressed / (double)c.volume.n_params, 0.82, 0.002);
            assert_near(c.compressed_bits, rows[i].bits[index], 1e-3);
        }
    /* 6.15 times under the dense gradient. */
    setup.engine.paper.ratio = 10;
    setup.engine.reducer.sparsity = 0.9875;
    setup.engine.paper.index = TAGC_INDEX_OR;
    assert_near(32 / count(&setup).compressed_bits, 6.15, 0.002);
    /* As many ranks as the index may count: 15 with 4 bits. */
    setup.engine.paper.index = TAGC_INDEX_SUM4;
    setup.world_size = setup.n_hosts = 16;
    tagc_plan_volume volume;
    assert_int_equal(tagc_plan_count(&setup, &volume, NULL), TAGC_ERR_UNSUPPORTED);
}

/* All legs of the compressed part: parameters twice and the gradient once, 96 bits, against 69.2. Only matrices that
 * both passes read count here: not the token embedding, which forward alone reads, and not the root unit. */
TEST(all_legs_of_the_paper) {
    tagc_setup setup = make(TAGC_SHARD_FULL, 2);
    setup.engine.wrap = TAGC_WRAP_MATRIX;
    const tagc_gpt2_config *c = &setup.model;
    double n = (double)tagc_gpt2_n_params(c), wte = (double)c->n_embd * c->vocab_size;
    double twice = wte + 12.0 * 8 * 768 * 768; /* head and feed-forward matrices */
    counted dense = count(&setup);
    double gathered = (dense.bits[TAGC_LEG_GATHER] * n - 32 * (n - twice)) / twice;
    assert_near(gathered, 64, 1e-3);
    assert_near(gathered + dense.bits[TAGC_LEG_VALUES], 96, 1e-3);
    setup.engine.policy = TAGC_POLICY_PAPER;
    setup.engine.reducer.exchange = TAGC_EXCHANGE_SKETCH;
    setup.engine.paper.ratio = 10;
    tagc_fsdp_options_resolve(&setup.engine);
    counted tagc = count(&setup);
    assert_near(gathered + tagc.compressed_bits, 69.2, 1e-3);
    assert_near(tagc.bits[TAGC_LEG_GATHER], dense.bits[TAGC_LEG_GATHER], 1e-9);
    /* An all-reduce brings the index back and the sums too, as LHC's 2 x 1 + 2 x 3.2 has it; ours returns the union's
     * values in place of cells: 2 + 3.2 + 32 u. */
    setup.engine.sharding = TAGC_SHARD_NONE;
    setup.union_density = 0.02;
    assert_near(count(&setup).compressed_bits, 2 + 3.2 + 32 * 0.02, 1e-3);
    /* Packed: 2 + 32 u, and u of independent choices. */
    setup.engine.sharding = TAGC_SHARD_FULL;
    setup.engine.reducer.exchange = TAGC_EXCHANGE_PACKED;
    setup.engine.paper.ratio = 0;
    assert_near(count(&setup).compressed_bits, 2 + 32 * 0.02, 1e-3);
    setup.union_density = -1;
    setup.engine.reducer.sparsity = 0.9;
    assert_near(count(&setup).compressed_bits, 2 + 32 * (1 - 0.81), 1e-3);
}

/* Positions that fall independently: of the ranks that choose, which are hosts where their ranks add first. Sums come back here. */
TEST(unions_are_of_those_who_choose) {
    static const int exchanges[] = {TAGC_EXCHANGE_PACKED, TAGC_EXCHANGE_SKETCH, TAGC_EXCHANGE_DIRECT};
    tagc_setup setup = make(TAGC_SHARD_NONE, 8);
    setup.n_hosts = 4;
    setup.engine.policy = TAGC_POLICY_ALL;
    setup.engine.reducer.sparsity = 0.9;
    setup.engine.ranks_per_host = 2;
    setup.engine.two_level = 1;
    for (size_t i = 0; i < sizeof exchanges / sizeof exchanges[0]; i++) {
        int n_senders = exchanges[i] == TAGC_EXCHANGE_DIRECT ? 4 : 8;
        setup.engine.reducer.exchange = exchanges[i];
        setup.union_density = -1;
        counted alone = count(&setup);
        setup.union_density = 1 - pow(0.9, n_senders);
        assert_near(count(&setup).all_bits, alone.all_bits, 1e-9);
    }
}

/* Accumulation moves gradients once per optimizer step, unless each micro-step sends, as the published loop does. */
TEST(accumulation_defers_gradients) {
    tagc_setup setup = make(TAGC_SHARD_GRAD, 4);
    counted one = count(&setup);
    setup.engine.n_micro_steps = 20;
    counted deferred = count(&setup);
    assert_near(deferred.all_bits, one.all_bits, 1e-9);
    setup.engine.exchange_each_micro_step = 1;
    counted each = count(&setup);
    assert_near(each.bits[TAGC_LEG_VALUES], 20 * one.bits[TAGC_LEG_VALUES], 1e-9);
    assert_near(each.bits[TAGC_LEG_GATHER], one.bits[TAGC_LEG_GATHER], 1e-9);
    /* A careful user's bf16 ZeRO-2: 32 bits per optimizer step. */
    setup.engine.exchange_each_micro_step = 0;
    setup.engine.gather = setup.engine.dense_format = TAGC_FORMAT_BF16;
    assert_near(count(&setup).all_bits, 32, 1e-3);
}
