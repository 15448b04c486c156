/* Turns a question of plain numbers into a setup and its costs, and what the planner finds into an answer of plain numbers. */
#include "plan/ask.h"

#include "core/status.h"
#include "plan/plan.h"

static void set_hosts(const tagc_plan_question *q, tagc_fsdp_options *engine) {
    engine->ranks_per_host = q->ranks_per_host;
    engine->two_level = q->n_levels == 2 && q->ranks_per_host > 1 && q->sharding != TAGC_SHARD_HYBRID;
}

/* What encoding an element of a parameter takes, or decoding it, beside the codec of a gradient. Measured where both are on
 * processors, in 4 bits. */
static const double gather_share = 0.5;
static const double decode_share = 0.25; /* of a gradient's codec; the rest selects and encodes */

/* Every value as it is, which compresses nothing. */
static int is_plain(const tagc_plan_question *q) {
    return q->format == TAGC_FORMAT_FP32 || q->format == TAGC_FORMAT_BF16;
}

static tagc_status set_gradients(const tagc_plan_question *q, tagc_fsdp_options *engine) {
    if (is_plain(q) && q->sparsity != 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "sparsity is %g, allowed with this format: 0", q->sparsity);
    if (!(q->sparsity >= 0 && q->sparsity < 1))
        return tagc_fail(TAGC_ERR_ARGUMENT, "sparsity is %g, allowed: 0 to less than 1", q->sparsity);
    engine->policy = is_plain(q) ? TAGC_POLICY_ALL : TAGC_POLICY_NON_ATTENTION_LINEAR;
    engine->dense_format = TAGC_FORMAT_BF16;
    engine->reducer.exchange = TAGC_EXCHANGE_DIRECT;
    engine->reducer.format = q->format;
    engine->reducer.sparsity = q->sparsity;
    if (q->sparsity == 0) engine->mild.format = q->format;
    return TAGC_OK;
}

static tagc_status setup_of(const tagc_plan_question *q, tagc_setup *out) {
    *out = (tagc_setup){.model = {q->n_layer, 1, q->n_embd, q->n_tokens, q->n_vocab, 0},
                        .world_size = q->world_size,
                        .n_batch = q->n_batch,
                        .n_tokens = q->n_tokens,
                        .union_density = -1};
    if (q->ranks_per_host < 1 || q->world_size < 1 || q->world_size % q->ranks_per_host != 0)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "ranks per host is %d, which does not divide the world size of %d",
                         q->ranks_per_host, q->world_size);
    if (q->sharding < TAGC_SHARD_FULL || q->sharding > TAGC_SHARD_HYBRID)
        return tagc_fail(TAGC_ERR_ARGUMENT, "sharding is %d, allowed: 0 to %d", q->sharding,
                         TAGC_SHARD_HYBRID);
    if (q->n_levels != 1 && q->n_levels != 2)
        return tagc_fail(TAGC_ERR_ARGUMENT, "levels is %d, allowed: 1 and 2", q->n_levels);
    out->n_hosts = q->world_size / q->ranks_per_host;
    out->placement = tagc_placement_of_sharding(q->sharding);
    tagc_fsdp_options_init(&out->engine);
    out->engine.sharding = q->sharding;
    out->engine.gather = q->gather;
    out->engine.n_micro_steps = q->n_micro_steps;
    set_hosts(q, &out->engine);
    TAGC_TRY(set_gradients(q, &out->engine));
    tagc_fsdp_options_resolve(&out->engine);
    return TAGC_OK;
}

static tagc_status answer(const tagc_plan_question *q, tagc_plan_reply *reply) {
    const struct {
        const char *name;
        double value;
    } rates[] = {{"link_bytes_per_s", q->link_bytes_per_s},
                 {"host_bytes_per_s", q->host_bytes_per_s},
                 {"flops_per_s", q->flops_per_s}};
    tagc_setup setup;
    tagc_costs costs = {.flop_s = 1 / q->flops_per_s,
                        .optimizer_s = q->optimizer_s,
                        .encode_s = (1 - decode_share) * q->codec_s,
                        .decode_s = decode_share * q->codec_s,
                        .gather_encode_s = gather_share * q->codec_s,
                        .gather_decode_s = gather_share * q->codec_s};
    tagc_forecast forecast;
    tagc_plan_volume volume;
    tagc_plan_memory memory;
    for (size_t i = 0; i < sizeof rates / sizeof rates[0]; i++)
        if (!(rates[i].value > 0))
            return tagc_fail(TAGC_ERR_ARGUMENT, "%s is %g, allowed: above 0", rates[i].name, rates[i].value);
    TAGC_TRY(setup_of(q, &setup));
    if (q->compute_s > 0) costs.flop_s = q->compute_s / tagc_setup_flops(&setup);
    TAGC_TRY(tagc_plan_count(&setup, &volume, &memory));
    tagc_plan_link link = {.latency_s = q->latency_s,
                           .bytes_per_s = q->link_bytes_per_s,
                           .host_bytes_per_s = q->host_bytes_per_s};
    TAGC_TRY(tagc_plan_simulate(&setup, &costs, &link, &forecast));
    reply->n_params = volume.n_params;
    reply->step_s = forecast.iteration_s;
    reply->compute_s = forecast.compute_s;
    reply->exposed_s = forecast.wait_gather_s + forecast.wait_reduce_s;
    reply->gather_bytes = volume.n_host_bytes[TAGC_LEG_GATHER];
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) reply->gradient_bytes += volume.n_host_bytes[leg];
    reply->gradient_bytes -= reply->gather_bytes;
    reply->state_bytes = memory.state;
    reply->residual_bytes = memory.engine.residuals;
    return TAGC_OK;
}

tagc_status tagc_plan_ask(const tagc_plan_question *question, tagc_plan_reply *reply) {
    *reply = (tagc_plan_reply){0};
    return answer(question, reply);
}
