/* The planner of GPT-2 lays out an engine; a plan on a mesh has formulas. Both know FSDP2, with deltas and without, and what
 * computing takes. */
#include "../test.h"
#include "core/status.h"
#include "mesh/mesh.h"
#include "plan/plan.h"
#include "schedule/constants.h"
#include "sizes/catalogue.h"
#include "sizes/rows.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define OK(call)                                                                                             \
    do {                                                                                                     \
        if ((call) != TAGC_OK) fail_msg("%s: %s", #call, tagc_last_error());                                 \
    } while (0)

static void assert_near(const char *what, double value, double expected, double part) {
    if (!(fabs(value - expected) <= part * expected))
        fail_msg("%s is %.17g, must be %.17g within %g", what, value, expected, part);
}

enum { N_LAYER = 6, WIDTH = 512, VOCAB = 4096, N_TOKENS = 128, N_HOSTS = 4 };

/* Two levels, and what attention sends follows from the rest. */
static tagc_setup setup_of(const tagc_mesh_question *m) {
    tagc_setup setup = {.model = {N_LAYER, 1, WIDTH, m->n_tokens, VOCAB, 0},
                        .world_size = m->world_size,
                        .n_hosts = N_HOSTS,
                        .n_batch = 1,
                        .n_tokens = m->n_tokens,
                        .union_density = -1};
    tagc_fsdp_options *engine = &setup.engine;
    tagc_fsdp_options_init(engine);
    engine->sharding = m->sharding;
    engine->gather = m->gather;
    engine->ranks_per_host = m->ranks_per_host;
    engine->two_level = m->ranks_per_host > 1;
    engine->dense_format = TAGC_FORMAT_BF16;
    engine->reducer.format = m->format;
    engine->reducer.sparsity = m->sparsity;
    if (m->sparsity == 0) engine->mild.format = m->format;
    if (m->sparsity == 0) engine->reducer.block = TAGC_BLOCK_OF_EVERY;
    tagc_fsdp_options_resolve(engine);
    return setup;
}

static tagc_mesh_question mesh_question(int gather, int sharding, int per_host) {
    return (tagc_mesh_question){.struct_bytes = sizeof(tagc_mesh_question),
                                .model = {.n_layer = N_LAYER,
                                          .n_embd = WIDTH,
                                          .n_head = 8,
                                          .n_kv_head = 8,
                                          .n_ffn = 4 * WIDTH,
                                          .n_vocab = VOCAB,
                                          .n_positions = N_TOKENS,
                                          .has_bias = 1,
                                          .n_experts = 1,
                                          .n_active = 1},
                                .world_size = N_HOSTS * per_host,
                                .ranks_per_host = per_host,
                                .n_tensor = 1,
                                .n_context = 1,
                                .n_pipeline = 1,
                                .n_expert = 1,
                                .sharding = sharding,
                                .n_sequences = 2,
                                .n_tokens = N_TOKENS,
                                .n_micro_batches = 1,
                                .schedule = TAGC_MESH_1F1B,
                                .n_stages_per_rank = 1,
                                .format = TAGC_FORMAT_INT4,
                                .gather = gather,
                                .forward = TAGC_FORMAT_BF16,
                                .token_forward = TAGC_FORMAT_BF16,
                                .token_backward = TAGC_FORMAT_BF16,
                                .backward = TAGC_FORMAT_BF16,
                                .block = 64};
}

TEST(both_planners_agree_on_what_both_know) {
    const struct {
        int gather, sharding;
    } ways[] = {{TAGC_GATHER_BF16, TAGC_SHARD_FULL},
                {TAGC_GATHER_BF16, TAGC_SHARD_GRAD},
                {TAGC_GATHER_DELTA4, TAGC_SHARD_GRAD}};
    for (size_t i = 0; i < 3 * sizeof ways / sizeof ways[0]; i++) {
        int per_host = i % 3 == 1 ? 4 : 1, gather = ways[i / 3].gather, sharding = ways[i / 3].sharding;
        tagc_mesh_question m = mesh_question(gather, sharding, per_host);
        tagc_mesh_reply mesh = {.struct_bytes = sizeof mesh};
        tagc_plan_volume volume;
        tagc_plan_memory memory;
        if (i % 3 == 2) { /* classes of parameters differ in what they send */
            m.format = TAGC_FORMAT_INT2;
            m.sparsity = 0.95;
        }
        tagc_setup setup = setup_of(&m);
        OK(tagc_plan_count(&setup, &volume, &memory));
        OK(tagc_plan_mesh(&m, &mesh));
        double gradients = -volume.n_host_bytes[TAGC_LEG_GATHER];
        for (int leg = 0; leg < TAGC_N_LEGS; leg++) gradients += volume.n_host_bytes[leg];
        assert_int_equal(mesh.n_params, volume.n_params);
        assert_near("gradients", mesh.legs[TAGC_MESH_LEG_GRADIENTS].host, gradients,
                    per_host == 1 ? 0.002 : 0.03); /* the engine's ranks of a host each send all biases */
        assert_near("residual", mesh.device[TAGC_MESH_RESIDUAL], (double)memory.engine.residuals, 0.02);
        if (gather == TAGC_GATHER_DELTA4)
            assert_near("parameters", mesh.legs[TAGC_MESH_LEG_PARAMETERS].host,
                        volume.n_host_bytes[TAGC_LEG_GATHER], 0.02);
        double states = mesh.device[TAGC_MESH_PARAMETERS] + mesh.device[TAGC_MESH_GRADIENTS] +
                        mesh.device[TAGC_MESH_OPTIMIZER];
        if (sharding == TAGC_SHARD_FULL) assert_near("states", states, (double)memory.state, 0.01);
    }
}

TEST(both_planners_agree_on_computing) {
    const double flops_per_s = 1e12;
    for (int n_tokens = N_TOKENS; n_tokens <= 8192; n_tokens *= 8) { /* at last it is half attention */
        tagc_mesh_question m = mesh_question(TAGC_GATHER_BF16, TAGC_SHARD_FULL, 1);
        tagc_mesh_plan mesh;
        m.n_tokens = m.model.n_positions = n_tokens;
        tagc_setup setup = setup_of(&m);
        setup.n_batch = m.n_sequences;
        OK(tagc_mesh_plan_make(&m, flops_per_s, &mesh));
        assert_near("computing", mesh.compute_s, tagc_setup_flops(&setup) / flops_per_s, 0.005);
    }
}

TEST(tokens_need_not_be_whole_sequences) {
    double of_2048 = 0;
    for (int n_tokens = 2048; n_tokens <= 5120; n_tokens += 512) {
        tagc_times_setup setup = {.n_layer = N_LAYER,
                                  .n_embd = WIDTH,
                                  .hosts = N_HOSTS,
                                  .ranks_per_host = 1,
                                  .n_tokens = n_tokens,
                                  .n_micro_steps = 1,
                                  .links_bytes_per_s = {1e9},
                                  .n_links = 1,
                                  .host_bytes_per_s = 1e11,
                                  .flops_per_s = 1e12};
        tagc_times_plan plan;
        OK(tagc_times_make(&setup, &plan));
        if (n_tokens == 2048) of_2048 = plan.rows[0].compute_s;
        assert_near("computing", plan.rows[0].compute_s, of_2048 * n_tokens / 2048, 1e-9);
    }
}

/* Names say the bits and the share of zeros that the schedule has. */
TEST(strategies_are_named_as_they_send) {
    for (int i = 0; i < TAGC_N_STRATEGIES; i++) {
        const tagc_strategy *s = &tagc_strategies[i];
        char zeros[32];
        const tagc_schedule_plan plan = tagc_strategy_plan(s);
        snprintf(zeros, sizeof zeros, "%g %% zero", 100 * plan.sparsity);
        assert_int_equal(strstr(s->name, "tagc, ") != NULL, tagc_strategy_compresses(s));
        assert_int_equal(strstr(s->name, zeros) != NULL, plan.sparsity > 0);
        assert_int_equal(strstr(s->name, "4 bits") != NULL, plan.format == TAGC_FORMAT_INT4);
        assert_int_equal(strstr(s->name, "in bf16") != NULL, plan.format == TAGC_FORMAT_BF16);
    }
}
