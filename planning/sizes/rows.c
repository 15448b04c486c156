/* Asks the simulator, or the formulas of a mesh, about every strategy that makes a difference. */
#include "sizes/rows.h"

#include "core/status.h"
#include "plan/plan.h"
#include "sizes/catalogue.h"
#include <math.h>
#include <stdio.h>

enum { SEQUENCE = 2048 }; /* tokens */

/* ---- data parallelism alone ---- */

/* What encoding an element of a parameter takes, or decoding it, beside the codec of a gradient. Measured where both are on
 * processors, in 4 bits. */
static const double gather_share = 0.5;
static const double decode_share = 0.25; /* of a gradient's codec; the rest selects and encodes */

/* What is gathered as deltas is gathered once in a step, as with ZeRO-2. */
static int sharding_of(const tagc_strategy *strategy) {
    return strategy->gather >= TAGC_GATHER_DELTA8 ? TAGC_SHARD_GRAD : strategy->sharding;
}

/* Where nothing is compressed, attention is sent as all the rest. */
static void set_engine(const tagc_times_setup *s, const tagc_strategy *strategy, int n_levels,
                       tagc_fsdp_options *engine) {
    tagc_fsdp_options_init(engine);
    engine->sharding = sharding_of(strategy);
    engine->gather = strategy->gather;
    engine->n_micro_steps = s->n_micro_steps;
    engine->ranks_per_host = s->ranks_per_host;
    engine->two_level = n_levels == 2 && s->ranks_per_host > 1 && engine->sharding != TAGC_SHARD_HYBRID;
    engine->policy = tagc_strategy_compresses(strategy) ? TAGC_POLICY_NON_ATTENTION_LINEAR : TAGC_POLICY_ALL;
    engine->dense_format = TAGC_FORMAT_BF16;
    engine->reducer.exchange = TAGC_EXCHANGE_DIRECT;
    const tagc_schedule_plan plan = tagc_strategy_plan(strategy);
    engine->reducer.format = plan.format;
    engine->reducer.sparsity = plan.sparsity;
    engine->reducer.block = plan.block;
    if (engine->reducer.sparsity == 0) engine->mild.format = engine->reducer.format;
    tagc_fsdp_options_resolve(engine);
}

/* What an engine of this strategy sends and holds. n_levels: 2: the ranks of a host add their gradients, and share what they
 * gather, before anything leaves the host; 1: each rank exchanges with all others by itself. */
static tagc_status count(const tagc_times_setup *s, const tagc_strategy *strategy, int n_levels,
                         tagc_setup *setup, tagc_plan_volume *volume, tagc_plan_memory *memory) {
    int n_tokens = s->n_tokens < SEQUENCE ? s->n_tokens : SEQUENCE;
    *setup = (tagc_setup){.model = {s->n_layer, 1, s->n_embd, n_tokens, TAGC_MESH_VOCAB, 0},
                          .world_size = s->hosts * s->ranks_per_host,
                          .n_hosts = s->hosts,
                          .n_batch = (int)ceil((double)s->n_tokens / n_tokens),
                          .n_tokens = n_tokens,
                          .union_density = -1};
    set_engine(s, strategy, n_levels, &setup->engine);
    return tagc_plan_count(setup, volume, memory);
}

static double gradient_bytes(const tagc_plan_volume *volume) {
    double n_bytes = 0;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) n_bytes += volume->n_host_bytes[leg];
    return n_bytes - volume->n_host_bytes[TAGC_LEG_GATHER];
}

/* Of a floating point operation. A part of a sequence takes that part of its time. */
static double flop_s(const tagc_times_setup *s, const tagc_setup *setup) {
    double n_sequences = (double)s->n_tokens / setup->n_tokens;
    if (s->compute_s > 0) return s->compute_s / tagc_setup_flops(setup);
    return 1 / (s->flops_per_s * setup->n_batch / n_sequences);
}

/* What the planner counts as an fp32 copy of all parameters is torch's own, in bf16, or a replica of deltas: in bf16, of what one
 * rank of each host owns. */
static double memory_of(const tagc_times_setup *s, const tagc_strategy *strategy, uint64_t n,
                        const tagc_plan_memory *memory) {
    uint64_t n_bytes = memory->state + memory->engine.residuals;
    if (sharding_of(strategy) == TAGC_SHARD_GRAD) {
        n_bytes -= 4 * n;
        n_bytes += 2 * n / (uint64_t)(strategy->gather == TAGC_GATHER_BF16 ? 1 : s->ranks_per_host);
    }
    return (double)n_bytes;
}

static tagc_status make_row(const tagc_times_setup *s, const tagc_strategy *strategy, tagc_times_row *row) {
    tagc_setup setup;
    tagc_plan_volume volume;
    tagc_plan_memory memory;
    TAGC_TRY(count(s, strategy, 2, &setup, &volume, &memory));
    *row = (tagc_times_row){.name = strategy->name,
                            .compresses = tagc_strategy_compresses(strategy),
                            .strategy = strategy,
                            .memory_bytes = memory_of(s, strategy, volume.n_params, &memory),
                            .gradient_bytes = gradient_bytes(&volume),
                            .parameter_bytes = volume.n_host_bytes[TAGC_LEG_GATHER],
                            .n_params = (double)volume.n_params};
    const tagc_costs costs = {.flop_s = flop_s(s, &setup),
                              .encode_s = (1 - decode_share) * s->codec_s,
                              .decode_s = decode_share * s->codec_s,
                              .gather_encode_s = gather_share * s->codec_s,
                              .gather_decode_s = gather_share * s->codec_s};
    for (int i = 0; i < s->n_links; i++) {
        const tagc_plan_link link = {.latency_s = s->latency_s,
                                     .bytes_per_s = s->links_bytes_per_s[i],
                                     .host_bytes_per_s = s->host_bytes_per_s};
        tagc_forecast forecast;
        TAGC_TRY(tagc_plan_simulate(&setup, &costs, &link, &forecast));
        row->step_s[i] = forecast.iteration_s;
        row->exposed_s[i] = forecast.wait_gather_s + forecast.wait_reduce_s;
        if (i == 0) row->compute_s = forecast.compute_s;
    }
    return TAGC_OK;
}

static void add_card(tagc_times_plan *plan, const tagc_times_setup *s, const char *name, const char *how,
                     double gradient_bytes, double parameter_bytes) {
    tagc_times_card *card = &plan->card[plan->n_card++];
    snprintf(card->name, sizeof card->name, "%s%s", name, how);
    card->gradient_bytes = gradient_bytes;
    card->parameter_bytes = parameter_bytes;
    card->rank_bytes = (gradient_bytes + parameter_bytes) / s->ranks_per_host;
}

/* A ring of all ranks enters and leaves each host once. */
static tagc_status make_card(const tagc_times_setup *s, tagc_times_plan *plan) {
    const tagc_strategy *four_bits = &tagc_strategies[TAGC_STRATEGY_FOUR_BITS];
    const tagc_times_row *dense = &plan->rows[0], *four = &plan->rows[2], *few = &plan->rows[3];
    double n_hosts = s->hosts, n_ranks = n_hosts * s->ranks_per_host;
    double ring = (n_ranks - 1) / n_ranks / ((n_hosts - 1) / n_hosts);
    tagc_setup setup;
    tagc_plan_volume flat;
    TAGC_TRY(count(s, four_bits, 1, &setup, &flat, NULL));
    add_card(plan, s, dense->name, ", a ring of all ranks", ring * dense->gradient_bytes,
             ring * dense->parameter_bytes);
    add_card(plan, s, dense->name, ", in two levels", dense->gradient_bytes, dense->parameter_bytes);
    add_card(plan, s, four_bits->name, ", each rank by itself", gradient_bytes(&flat),
             flat.n_host_bytes[TAGC_LEG_GATHER]);
    add_card(plan, s, four->name, ", in two levels", four->gradient_bytes, four->parameter_bytes);
    add_card(plan, s, few->name, ", in two levels", few->gradient_bytes, few->parameter_bytes);
    return TAGC_OK;
}

static tagc_times_answer answer(const tagc_times_plan *plan, int link) {
    const tagc_times_row *fastest[2] = {NULL, NULL};
    for (int i = 0; i < plan->n_rows; i++) {
        const tagc_times_row *row = &plan->rows[i], **best = &fastest[row->compresses];
        if (!*best || row->step_s[link] < (*best)->step_s[link]) *best = row;
    }
    double plain_s = fastest[0]->step_s[link], packed_s = fastest[1]->step_s[link];
    return (tagc_times_answer){.verdict = tagc_verdict_of(plain_s, packed_s, 0),
                               .plain = fastest[0],
                               .packed = fastest[1],
                               .factor = plain_s / packed_s,
                               .communication = fastest[0]->exposed_s[link] / plain_s};
}

tagc_status tagc_times_make(const tagc_times_setup *s, tagc_times_plan *out) {
    int use = s->ranks_per_host > 1 ? TAGC_TIMED_HOSTS : TAGC_TIMED_ALONE;
    *out = (tagc_times_plan){0};
    for (int i = 0; i < TAGC_N_STRATEGIES; i++)
        if (tagc_strategies[i].uses & use)
            TAGC_TRY(make_row(s, &tagc_strategies[i], &out->rows[out->n_rows++]));
    if (s->ranks_per_host > 1) TAGC_TRY(make_card(s, out));
    for (int link = 0; link < s->n_links; link++) out->answers[link] = answer(out, link);
    return TAGC_OK;
}

/* ---- a mesh ---- */

const char *tagc_mesh_kind_name(int kind) {
    static const char *const names[TAGC_MESH_N_KINDS] = {"parameters", "gradients", "optimizer",  "residual",
                                                         "replicas",   "buffers",   "activations"};
    return names[kind];
}

/* is_packed: 1: stages and tokens in the question's formats; 0: as torch sends them. */
static tagc_status ask_mesh(const tagc_mesh_question *question, const tagc_strategy *strategy, int is_packed,
                            tagc_mesh_reply *reply) {
    tagc_mesh_question q = *question;
    q.struct_bytes = sizeof q;
    q.sharding = strategy->sharding;
    q.gather = strategy->gather;
    const tagc_schedule_plan plan = tagc_strategy_plan(strategy);
    q.format = plan.format;
    q.sparsity = plan.sparsity;
    if (!is_packed) q.forward = q.backward = q.token_forward = q.token_backward = TAGC_FORMAT_BF16;
    *reply = (tagc_mesh_reply){.struct_bytes = sizeof *reply};
    return tagc_plan_mesh(&q, reply);
}

/* Whether a strategy is another one than those before it. In a pipeline, FSDP2 gathers once in a step. */
static int differs(const tagc_mesh_question *q, int n_data_ranks, const tagc_strategy *strategy) {
    int near = q->ranks_per_host / q->n_tensor; /* ranks of a host that share out the same parameters */
    near = near < 1 ? 1 : near < n_data_ranks ? near : n_data_ranks;
    if (!(strategy->uses & TAGC_ON_MESH)) return 0;
    if (strategy == &tagc_strategies[TAGC_STRATEGY_FSDP2] && q->n_pipeline > 1) return 0;
    if (tagc_strategy_compresses(strategy) && near == n_data_ranks) return 0; /* within a host, or alone */
    if (strategy->sharding == TAGC_SHARD_HYBRID && (near == 1 || near == n_data_ranks)) return 0;
    return strategy->sharding != TAGC_SHARD_NONE || !(q->offload & TAGC_MESH_OFFLOAD_PARAMETERS);
}

static void add_sent(tagc_mesh_plan *plan, const char *what, const char *suffix, int compresses,
                     const tagc_mesh_bytes *bytes) {
    if (!(bytes->all > 0)) return;
    tagc_mesh_sent *sent = &plan->sent[plan->n_sent++];
    snprintf(sent->name, sizeof sent->name, "%s%s", what, suffix);
    sent->compresses = compresses;
    sent->bytes = *bytes;
}

static const char *format_name(int format) {
    return format == TAGC_FORMAT_BF16 ? "bf16" : format == TAGC_FORMAT_INT8 ? "int8" : "int4";
}

/* A leg as tagc sends it, if something of it leaves a host. */
static void add_packed(tagc_mesh_plan *plan, const char *what, const char *call, int forward, int backward,
                       const tagc_mesh_bytes *bytes) {
    char how[64];
    if (!(bytes->between > 0)) return;
    snprintf(how, sizeof how, ", %s, %s and %s", call, format_name(forward), format_name(backward));
    add_sent(plan, what, how, 1, bytes);
}

/* What travels whatever the strategy, and tokens and messages between stages as tagc sends them. */
static tagc_status add_shared(const tagc_mesh_question *q, tagc_mesh_plan *plan) {
    const tagc_mesh_bytes *legs = plan->any.legs;
    tagc_mesh_reply packed;
    TAGC_TRY(ask_mesh(q, &tagc_strategies[TAGC_STRATEGY_STAYS_GATHERED], 1, &packed));
    add_sent(plan, "tensor parallel", "", 0, &legs[TAGC_MESH_LEG_TENSOR]);
    add_sent(plan, "context parallel", "", 0, &legs[TAGC_MESH_LEG_CONTEXT]);
    add_sent(plan, "expert parallel", "", 0, &legs[TAGC_MESH_LEG_EXPERT]);
    add_packed(plan, "expert parallel", "Collectives.tokens()", q->token_forward, q->token_backward,
               &packed.legs[TAGC_MESH_LEG_EXPERT]);
    add_sent(plan, "pipeline parallel", "", 0, &legs[TAGC_MESH_LEG_PIPELINE]);
    add_packed(plan, "pipeline parallel", "compress_stage()", q->forward, q->backward,
               &packed.legs[TAGC_MESH_LEG_PIPELINE]);
    return TAGC_OK;
}

static tagc_status add_row(const tagc_mesh_question *q, const tagc_strategy *strategy, tagc_mesh_plan *plan) {
    int compresses = tagc_strategy_compresses(strategy);
    tagc_mesh_reply reply;
    TAGC_TRY(ask_mesh(q, strategy, 0, &reply));
    tagc_mesh_row *row = &plan->rows[plan->n_rows++];
    *row = (tagc_mesh_row){.name = strategy->name, .compresses = compresses, .stage = reply.fullest};
    for (int kind = 0; kind < TAGC_MESH_N_KINDS; kind++) {
        row->device_all += row->device[kind] = reply.device[kind];
        row->host_all += row->host[kind] = reply.host[kind];
    }
    add_sent(plan, "gradients: ", strategy->name, compresses, &reply.legs[TAGC_MESH_LEG_GRADIENTS]);
    add_sent(plan, "parameters: ", strategy->name, compresses, &reply.legs[TAGC_MESH_LEG_PARAMETERS]);
    return TAGC_OK;
}

/* Of a token, forward and backward, as planning/plan/program.c counts: products with matrices, of which the embedding is none, and
 * the causal half of attention's scores and of their product with the values. */
static double flops_per_token(const tagc_mesh_question *q, uint64_t n_active) {
    const tagc_mesh_model *m = &q->model;
    double width = m->n_embd, looked_up = ((double)m->n_vocab + m->n_positions) * width;
    return 6 * ((double)n_active - looked_up) + 3.5 * 2 * m->n_layer * width * (q->n_tokens + 1.0);
}

tagc_status tagc_mesh_plan_make(const tagc_mesh_question *q, double flops_per_s, tagc_mesh_plan *out) {
    *out = (tagc_mesh_plan){0};
    TAGC_TRY(ask_mesh(q, &tagc_strategies[TAGC_STRATEGY_STAYS_GATHERED], 0, &out->any));
    TAGC_TRY(add_shared(q, out));
    for (int i = 0; i < TAGC_N_STRATEGIES; i++)
        if (differs(q, out->any.n_data * q->n_context, &tagc_strategies[i]))
            TAGC_TRY(add_row(q, &tagc_strategies[i], out));
    add_sent(out, "offload, to and from the host", "", 0, &out->any.legs[TAGC_MESH_LEG_OFFLOAD]);
    out->n_tokens = (double)q->n_tokens * q->n_sequences * q->n_micro_batches * out->any.n_data;
    out->compute_s =
        flops_per_token(q, out->any.n_active_params) * out->n_tokens / q->world_size / flops_per_s;
    return TAGC_OK;
}

tagc_status tagc_mesh_plan_add_tokens(const tagc_mesh_question *q, double latency_s, double card_bytes_per_s,
                                      const double codec_s[2], tagc_mesh_plan *plan) {
    const tagc_mesh_model *m = &q->model;
    int near = q->ranks_per_host / q->n_tensor;
    near = near < 1 ? 1 : near < q->n_expert ? near : q->n_expert;
    if (!(plan->any.legs[TAGC_MESH_LEG_EXPERT].between > 0)) return TAGC_OK;
    int n_layers = m->n_layer / q->n_pipeline; /* of a stage */
    double n_uses = (double)n_layers * q->n_micro_batches;
    tagc_tokens_question ask = {.struct_bytes = sizeof ask,
                                .world_size = q->n_expert,
                                .ranks_per_host = near,
                                .n_experts = m->n_experts,
                                .n_active = m->n_active,
                                .n_tokens = (double)q->n_sequences * q->n_tokens / q->n_context,
                                .width = m->n_embd,
                                .element_bytes = 2,
                                .n_forward = n_uses * (q->recompute == TAGC_MESH_RECOMPUTE_ALL ? 4 : 2),
                                .n_backward = n_uses * 2,
                                .forward = q->token_forward,
                                .backward = q->token_backward,
                                .block = q->block,
                                .codec_s = {codec_s[0], codec_s[1]},
                                .latency_s = latency_s,
                                .bytes_per_s = card_bytes_per_s / q->ranks_per_host,
                                .compute_s = plan->compute_s};
    tagc_tokens_reply *reply = &plan->tokens[plan->n_token_links++];
    reply->struct_bytes = sizeof *reply;
    return tagc_plan_tokens(&ask, reply);
}
