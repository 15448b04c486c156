/* Checks a question about a mesh, and answers it. */
#include "mesh/parts.h"

#include "core/status.h"
#include "exchange/options.h"
#include "plan/plan.h"
#include <stdio.h>

typedef struct range {
    const char *name;
    int value, min, max;
} range;

static tagc_status check_ranges(const range *ranges, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (ranges[i].value < ranges[i].min || ranges[i].value > ranges[i].max)
            return tagc_fail(TAGC_ERR_ARGUMENT, "%s is %d, allowed: %d to %d", ranges[i].name,
                             ranges[i].value, ranges[i].min, ranges[i].max);
    return TAGC_OK;
}

static tagc_status check_divides(const char *name, int value, const char *what, int n) {
    if (n % value == 0) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT, "%s is %d, which does not divide the %d %s", name, value, n, what);
}

static int common_divisor(int a, int b) {
    return b == 0 ? a : common_divisor(b, a % b);
}

enum { LIST_BYTES = 80 };

/* "1, 2, 4": what divides n, as far as there is room. */
static const char *list_divisors(int n, char text[LIST_BYTES]) {
    size_t used = 0;
    for (int i = 1; i <= n; i++) {
        if (n % i != 0) continue;
        if (used + 16 > LIST_BYTES) {
            snprintf(text + used, LIST_BYTES - used, ", ...");
            break;
        }
        used += (size_t)snprintf(text + used, LIST_BYTES - used, "%s%d", used > 0 ? ", " : "", i);
    }
    return text;
}

/* n_all: what a degree has to divide in order to be right everywhere. */
static tagc_status check_degree(const tagc_mesh_question *q, const char *name, int value, const char *what,
                                int n, int n_all) {
    char list[LIST_BYTES];
    if (n % value == 0) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT,
                     "%s is %d, which does not divide the %d %s; allowed with %d ranks: %s", name, value, n,
                     what, q->world_size, list_divisors(n_all, list));
}

static tagc_status check_model(const tagc_mesh_question *q) {
    const tagc_mesh_model *m = &q->model;
    const range ranges[] = {{"layers", m->n_layer, 1, 1 << 16},
                            {"width", m->n_embd, 1, 1 << 20},
                            {"heads", m->n_head, 1, 1 << 16},
                            {"heads of keys", m->n_kv_head, 1, m->n_head},
                            {"feed-forward width", m->n_ffn, 1, 1 << 22},
                            {"vocabulary", m->n_vocab, 1, 1 << 24},
                            {"positions", m->n_positions, 0, 1 << 24},
                            {"gated", m->is_gated, 0, 1},
                            {"bias", m->has_bias, 0, 1},
                            {"experts", m->n_experts, 1, 1 << 16},
                            {"experts of a token", m->n_active, 1, m->n_experts}};
    TAGC_TRY(check_ranges(ranges, sizeof ranges / sizeof ranges[0]));
    TAGC_TRY(check_divides("heads", m->n_head, "values of the model's width", m->n_embd));
    return check_divides("heads of keys", m->n_kv_head, "heads", m->n_head);
}

static tagc_status check_step(const tagc_mesh_question *q) {
    int is_plain = q->format == TAGC_FORMAT_BF16;
    const range ranges[] = {{"world size", q->world_size, 1, 65536},
                            {"ranks per host", q->ranks_per_host, 1, q->world_size},
                            {"tensor-parallel", q->n_tensor, 1, 1024},
                            {"context-parallel", q->n_context, 1, 1024},
                            {"pipeline-parallel", q->n_pipeline, 1, 1024},
                            {"expert-parallel", q->n_expert, 1, 65536},
                            {"sequence-parallel", q->sequence, 0, TAGC_MESH_SEQUENCE_REGATHER},
                            {"sharding", q->sharding, TAGC_SHARD_FULL, TAGC_SHARD_HYBRID},
                            {"sequences", q->n_sequences, 1, 1 << 20},
                            {"tokens of a sequence", q->n_tokens, 1, 1 << 26},
                            {"micro-batches", q->n_micro_batches, 1, 1 << 16},
                            {"pipeline-schedule", q->schedule, 0, TAGC_MESH_ZERO_BUBBLE},
                            {"stages-per-rank", q->n_stages_per_rank, 1, 1024},
                            {"recompute", q->recompute, 0, TAGC_MESH_RECOMPUTE_ALL},
                            {"offload", q->offload, 0, 7},
                            {"format", q->format, TAGC_FORMAT_BF16, TAGC_FORMAT_INT2},
                            {"gather", q->gather, TAGC_GATHER_BF16, TAGC_GATHER_DELTA2}};
    TAGC_TRY(check_ranges(ranges, sizeof ranges / sizeof ranges[0]));
    if (!(q->sparsity >= 0 && q->sparsity < 1) || (is_plain && q->sparsity != 0))
        return tagc_fail(TAGC_ERR_ARGUMENT, "sparsity is %g, allowed: 0%s", q->sparsity,
                         is_plain ? " with bf16" : " to less than 1");
    if (q->gather > TAGC_GATHER_BF16 && q->sharding >= TAGC_SHARD_NONE)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "sharding is %s, where nothing of parameters is sent between hosts: gather %s is "
                         "for full and grad",
                         q->sharding == TAGC_SHARD_NONE ? "none" : "hybrid",
                         tagc_gather_choices[q->gather].name);
    if ((q->offload & TAGC_MESH_OFFLOAD_PARAMETERS) && q->sharding == TAGC_SHARD_NONE)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "offload has parameters, which have to be sharded, but sharding is none");
    return TAGC_OK;
}

/* One of a group of neighbours and the ranks of a host must be whole multiples of the other, so that all hosts look alike. */
static tagc_status check_hosts(const tagc_mesh_question *q, const char *name, int n) {
    int per_host = q->ranks_per_host;
    if (n % per_host == 0 || per_host % n == 0) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT,
                     "%s is %d ranks and a host has %d: one must be a multiple of the other", name, n,
                     per_host);
}

static tagc_status check_tensor(const tagc_mesh_question *q) {
    const tagc_mesh_model *m = &q->model;
    int n_tokens = q->n_tokens / q->n_context;
    int n_all = common_divisor(m->n_head, q->world_size / (q->n_context * q->n_pipeline));
    n_all = common_divisor(common_divisor(n_all, m->n_kv_head), m->n_ffn);
    if (q->sequence != TAGC_MESH_WHOLE_SEQUENCE) n_all = common_divisor(n_all, n_tokens);
    TAGC_TRY(check_degree(q, "tensor-parallel", q->n_tensor, "heads", m->n_head, n_all));
    TAGC_TRY(check_degree(q, "tensor-parallel", q->n_tensor, "heads of keys", m->n_kv_head, n_all));
    TAGC_TRY(
        check_degree(q, "tensor-parallel", q->n_tensor, "values of the feed-forward width", m->n_ffn, n_all));
    if (q->sequence == TAGC_MESH_WHOLE_SEQUENCE) return TAGC_OK;
    if (q->n_tensor == 1)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "sequence-parallel is given, but tensor-parallel is 1: it splits the "
                         "sequence over the ranks of tensor parallelism");
    return check_degree(q, "sequence-parallel on tensor-parallel", q->n_tensor, "tokens of a rank's sequence",
                        n_tokens, n_all);
}

static tagc_status check_experts(const tagc_mesh_question *q) {
    const tagc_mesh_model *m = &q->model;
    int n_ranks = q->world_size / (q->n_tensor * q->n_pipeline);
    int n_all = common_divisor(m->n_experts, n_ranks);
    if (q->n_expert > 1 && m->n_experts == 1)
        return tagc_fail(TAGC_ERR_ARGUMENT, "expert-parallel is %d, but the model has no experts",
                         q->n_expert);
    TAGC_TRY(check_degree(q, "expert-parallel", q->n_expert, "experts", m->n_experts, n_all));
    return check_degree(q, "expert-parallel", q->n_expert, "ranks of data and context parallelism", n_ranks,
                        n_all);
}

static tagc_status check_mesh(const tagc_mesh_question *q) {
    char list[LIST_BYTES];
    long long n_fixed = (long long)q->n_tensor * q->n_context * q->n_pipeline;
    if (n_fixed > q->world_size)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "tensor %d x context %d x pipeline %d are %lld ranks, but there are only %d",
                         q->n_tensor, q->n_context, q->n_pipeline, n_fixed, q->world_size);
    TAGC_TRY(check_divides("ranks per host", q->ranks_per_host, "ranks", q->world_size));
    if (q->world_size % n_fixed != 0)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "tensor %d x context %d x pipeline %d are %lld ranks, which do not divide the %d "
                         "there are; allowed: %s",
                         q->n_tensor, q->n_context, q->n_pipeline, n_fixed, q->world_size,
                         list_divisors(q->world_size, list));
    TAGC_TRY(check_degree(q, "context-parallel", q->n_context, "tokens of a sequence", q->n_tokens,
                          common_divisor(q->n_tokens, q->world_size / (q->n_tensor * q->n_pipeline))));
    TAGC_TRY(check_tensor(q));
    TAGC_TRY(check_experts(q));
    if (q->keeps_scores && q->n_context > 1)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "attention keeps its scores, but context-parallel is %d, where no "
                         "rank has them",
                         q->n_context);
    TAGC_TRY(check_hosts(q, "a stage", q->world_size / q->n_pipeline));
    TAGC_TRY(check_hosts(q, "tensor-parallel", q->n_tensor));
    return check_hosts(q, "tensor x expert parallel", q->n_tensor * q->n_expert);
}

static tagc_status check_schedule(const tagc_mesh_question *q) {
    static const char *const names[] = {"gpipe", "1f1b", "interleaved", "zero-bubble"};
    int v = q->n_stages_per_rank, n = q->n_pipeline, n_layer = q->model.n_layer;
    char list[LIST_BYTES];
    if (n == 1)
        return v == 1 ? TAGC_OK
                      : tagc_fail(TAGC_ERR_ARGUMENT, "stages-per-rank is %d, but pipeline-parallel is 1", v);
    if (v > 1 && q->schedule <= TAGC_MESH_1F1B)
        return tagc_fail(TAGC_ERR_ARGUMENT, "stages-per-rank is %d, allowed with %s: 1", v,
                         names[q->schedule]);
    if (v == 1 && q->schedule == TAGC_MESH_INTERLEAVED)
        return tagc_fail(TAGC_ERR_ARGUMENT, "stages-per-rank is 1, allowed with interleaved: 2 or more");
    if (n_layer % (n * v) != 0)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "%d layers do not divide into %d stages (pipeline-parallel x "
                         "stages-per-rank); allowed: %s",
                         n_layer, n * v, list_divisors(n_layer, list));
    if (v > 1 && q->n_micro_batches % n != 0)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "micro-batches is %d, allowed with %d stages per rank: multiples of "
                         "pipeline-parallel, %d",
                         q->n_micro_batches, v, n);
    return TAGC_OK;
}

static tagc_status check_messages(const tagc_mesh_question *q) {
    static const char *const names[] = {"forward", "backward", "tokens forward", "tokens backward"};
    const int formats[] = {q->forward, q->backward, q->token_forward, q->token_backward};
    for (int i = 0; i < 4; i++)
        if (formats[i] != TAGC_FORMAT_BF16 && formats[i] != TAGC_FORMAT_INT8 &&
            formats[i] != TAGC_FORMAT_INT4)
            return tagc_fail(TAGC_ERR_ARGUMENT, "%s is format %d, allowed: bf16, int8, int4", names[i],
                             formats[i]);
    return TAGC_OK;
}

static double sum(const double values[TAGC_MESH_N_KINDS]) {
    double all = 0;
    for (int i = 0; i < TAGC_MESH_N_KINDS; i++) all += values[i];
    return all;
}

/* Keeps the memory of the fullest rank. */
static tagc_status find_fullest(const tagc_mesh_question *q, tagc_mesh_reply *reply) {
    for (int at = 0; at < q->n_pipeline; at++) {
        double device[TAGC_MESH_N_KINDS] = {0}, host[TAGC_MESH_N_KINDS] = {0};
        tagc_mesh_stage stage = tagc_mesh_stage_of(q, at);
        tagc_mesh_activations activations = tagc_mesh_activations_of(q, &stage, at);
        TAGC_TRY(tagc_mesh_data_memory(q, &stage, device, host));
        device[TAGC_MESH_ACTIVATIONS] = activations.device;
        host[TAGC_MESH_ACTIVATIONS] = activations.host;
        if (at > 0 && sum(device) <= sum(reply->device)) continue;
        reply->fullest = at;
        reply->in_flight = stage.chunks / q->n_stages_per_rank;
        for (int i = 0; i < TAGC_MESH_N_KINDS; i++) {
            reply->device[i] = device[i];
            reply->host[i] = host[i];
        }
    }
    return TAGC_OK;
}

static tagc_status answer(const tagc_mesh_question *q, tagc_mesh_reply *reply) {
    TAGC_TRY(check_model(q));
    TAGC_TRY(check_step(q));
    TAGC_TRY(check_mesh(q));
    TAGC_TRY(check_schedule(q));
    TAGC_TRY(check_messages(q));
    tagc_mesh_params(&q->model, &reply->n_params, &reply->n_active_params);
    reply->n_data = q->world_size / (q->n_tensor * q->n_context * q->n_pipeline);
    reply->bubble = tagc_mesh_bubble(q);
    TAGC_TRY(find_fullest(q, reply));
    return tagc_mesh_count_legs(q, reply->legs);
}

tagc_status tagc_plan_mesh(const tagc_mesh_question *question, tagc_mesh_reply *reply) {
    if (question->struct_bytes != sizeof *question || reply->struct_bytes != sizeof *reply)
        return TAGC_ERR_MISMATCH; /* of another version */
    *reply = (tagc_mesh_reply){.struct_bytes = sizeof *reply};
    tagc_status status = answer(question, reply);
    if (status != TAGC_OK) snprintf(reply->why, sizeof reply->why, "%s", tagc_last_error());
    return status;
}
