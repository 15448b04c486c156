/* Parameters and activations of the ranks of a stage. The formulas of activations are those of "Reducing Activation Recomputation in
 * Large Transformer Models" (Megatron-LM, 2205.05198), for gated and grouped variants counted in the same way: two bytes for
 * whatever the backward pass reads, one for a mask of dropout. */
#include "mesh/parts.h"

#include <math.h>

double tagc_mesh_count(const tagc_mesh_values *v) {
    return v->compressed + v->mild + v->dense;
}

double tagc_mesh_tokens(const tagc_mesh_question *q) {
    return (double)q->n_sequences * q->n_tokens / q->n_context;
}

static double kv_width(const tagc_mesh_model *m) {
    return (double)m->n_embd / m->n_head * m->n_kv_head;
}

static double norm(const tagc_mesh_model *m) {
    return (1.0 + m->has_bias) * m->n_embd;
}

/* Of one feed-forward, as a rank of tensor parallelism holds it. */
static tagc_mesh_values feed_forward(const tagc_mesh_model *m, int n_tensor) {
    double width = m->n_embd, ffn = (double)m->n_ffn / n_tensor;
    return (tagc_mesh_values){.compressed = (m->is_gated ? 3 : 2) * width * ffn,
                              .dense = m->has_bias ? ffn + width : 0};
}

static tagc_mesh_values block(const tagc_mesh_model *m, int n_tensor) {
    double width = m->n_embd, split = width / n_tensor;
    /* Only queries, keys and values are mild: the projection behind attention is compressed, as in engine/fsdp/layout.c. */
    tagc_mesh_values v = {
        .compressed = split * width, .mild = split * (width + 2 * kv_width(m)), .dense = 2 * norm(m)};
    if (m->has_bias) v.dense += (width + 2 * kv_width(m)) / n_tensor + width;
    if (m->n_experts > 1) {
        v.dense += width * m->n_experts; /* the router */
    } else {
        tagc_mesh_values mlp = feed_forward(m, n_tensor);
        v.compressed += mlp.compressed;
        v.dense += mlp.dense;
    }
    return v;
}

static tagc_mesh_values experts(const tagc_mesh_model *m, int n_tensor, int n) {
    tagc_mesh_values v = feed_forward(m, n_tensor);
    return (tagc_mesh_values){.compressed = n * v.compressed, .dense = n * v.dense};
}

void tagc_mesh_params(const tagc_mesh_model *m, uint64_t *n_all, uint64_t *n_active) {
    tagc_mesh_values shared = block(m, 1);
    double rest = (2.0 * m->n_vocab + m->n_positions) * m->n_embd + norm(m);
    double layer = tagc_mesh_count(&shared);
    tagc_mesh_values all = {0}, active = {0};
    if (m->n_experts > 1) {
        all = experts(m, 1, m->n_experts);
        active = experts(m, 1, m->n_active);
    }
    *n_all = (uint64_t)llround(m->n_layer * (layer + tagc_mesh_count(&all)) + rest);
    *n_active = (uint64_t)llround(m->n_layer * (layer + tagc_mesh_count(&active)) + rest);
}

/* ---- schedules ---- */

double tagc_mesh_bubble(const tagc_mesh_question *q) {
    double idle = q->n_pipeline - 1.0, n = (double)q->n_micro_batches * q->n_stages_per_rank;
    /* A forward pass, a backward pass to the input and one to the weights take equally long. */
    return q->schedule == TAGC_MESH_ZERO_BUBBLE ? idle / (3 * n) : idle / n;
}

/* Of a stage's computing. */
static const double backward_share = 2.0 / 3;

/* All micro-batches in one direction, one behind the other, at the pace of what takes longest, a stage or a message. */
static double sweep_s(int n_stages, int n_micro_batches, double stage_s, double message_s) {
    return n_stages * stage_s + (n_stages - 1) * message_s + (n_micro_batches - 1) * fmax(stage_s, message_s);
}

/* 1F1B: as many micro-batches are under way as there are stages, and each passes all stages and messages both ways before its place is
 * free again. */
double tagc_plan_pipeline_s(int schedule, int n_stages, int n_micro_batches, double compute_s,
                            double forward_s, double backward_s) {
    if (schedule == TAGC_MESH_GPIPE)
        return sweep_s(n_stages, n_micro_batches, (1 - backward_share) * compute_s, forward_s) +
               sweep_s(n_stages, n_micro_batches, backward_share * compute_s, backward_s);
    double whole = n_stages * compute_s + (n_stages - 1) * (forward_s + backward_s);
    return whole + (n_micro_batches - 1) * fmax(whole / n_stages, fmax(forward_s, backward_s));
}

/* Chunks whose activations rank `at` of the pipeline holds at once, each of one micro-batch. */
static double chunks_in_flight(const tagc_mesh_question *q, int at) {
    double n = q->n_pipeline, v = q->n_stages_per_rank, all = v * q->n_micro_batches, held = all;
    if (q->schedule == TAGC_MESH_1F1B) held = n - at;
    if (q->schedule == TAGC_MESH_INTERLEAVED) held = 2 * (n - at - 1) + (v - 1) * n + 1;
    if (q->schedule == TAGC_MESH_ZERO_BUBBLE) held = v * n;
    return fmin(held, all);
}

tagc_mesh_stage tagc_mesh_stage_of(const tagc_mesh_question *q, int at) {
    const tagc_mesh_model *m = &q->model;
    int n_layers = m->n_layer / q->n_pipeline, vocab = (m->n_vocab + q->n_tensor - 1) / q->n_tensor;
    double table = (double)vocab * m->n_embd;
    tagc_mesh_stage stage = {.chunks = chunks_in_flight(q, at),
                             .layers_per_chunk = (double)n_layers / q->n_stages_per_rank};
    stage.n[TAGC_MESH_BLOCK] = n_layers;
    stage.units[TAGC_MESH_BLOCK] = block(m, q->n_tensor);
    if (m->n_experts > 1) {
        stage.n[TAGC_MESH_EXPERTS] = n_layers;
        stage.units[TAGC_MESH_EXPERTS] = experts(m, q->n_tensor, m->n_experts / q->n_expert);
    }
    if (at == 0) {
        stage.n[TAGC_MESH_EMBEDDING] = 1;
        stage.units[TAGC_MESH_EMBEDDING] =
            (tagc_mesh_values){.compressed = table, .mild = (double)m->n_positions * m->n_embd};
    }
    if (at == q->n_pipeline - 1) {
        stage.n[TAGC_MESH_HEAD] = 1;
        stage.units[TAGC_MESH_HEAD] = (tagc_mesh_values){.compressed = table, .dense = norm(m)};
    }
    return stage;
}

/* ---- activations ---- */

/* How many ranks share what lies along the sequence, and the gathered inputs of linear layers. */
static double sequence_parts(const tagc_mesh_question *q) {
    return q->sequence == TAGC_MESH_WHOLE_SEQUENCE ? 1 : q->n_tensor;
}

static double gathered_parts(const tagc_mesh_question *q) {
    return q->sequence == TAGC_MESH_SEQUENCE_REGATHER ? q->n_tensor : 1;
}

/* Between a feed-forward's input and its output, without them: the inputs of the activation and of the last matrix. */
static double feed_forward_bytes(const tagc_mesh_model *m) {
    return (m->is_gated ? 8.0 : 4.0) * m->n_ffn;
}

/* Per token, of attention's own arithmetic: queries, keys, values, its result, and what it keeps of the scores. */
static double attention_bytes(const tagc_mesh_question *q) {
    const tagc_mesh_model *m = &q->model;
    double bytes = 2 * (2.0 * m->n_embd + 2 * kv_width(m));
    if (q->recompute == TAGC_MESH_RECOMPUTE_ATTENTION) return bytes;
    if (!q->keeps_scores) return bytes + 4.0 * m->n_head; /* the logarithm of each row's sum, in fp32 */
    return bytes + (q->has_dropout ? 5.0 : 2.0) * m->n_head * q->n_tokens;
}

/* Per token, of a layer that recomputes nothing as a whole. */
static double layer_bytes(const tagc_mesh_question *q) {
    const tagc_mesh_model *m = &q->model;
    double width = 2.0 * m->n_embd, along = 2 * width, gathered = 2 * width, split = attention_bytes(q);
    double routed = 0;                            /* each rank of tensor parallelism has all of it */
    if (q->has_dropout) along += 2.0 * m->n_embd; /* two masks */
    if (m->n_experts > 1) {
        /* A token is sent to its experts, and their results are weighed. The router keeps what it chose from. */
        routed = m->n_active * 2 * width + 4.0 * m->n_experts;
        split += m->n_active * feed_forward_bytes(m);
    } else {
        split += feed_forward_bytes(m);
    }
    return along / sequence_parts(q) + gathered / gathered_parts(q) + split / q->n_tensor + routed;
}

/* Per token: the input and output of the last norm, and logits in fp32. */
static double head_bytes(const tagc_mesh_question *q) {
    double width = 2.0 * q->model.n_embd;
    return width / sequence_parts(q) + width / gathered_parts(q) + 4.0 * q->model.n_vocab / q->n_tensor;
}

tagc_mesh_activations tagc_mesh_activations_of(const tagc_mesh_question *q, const tagc_mesh_stage *stage,
                                               int at) {
    double n_tokens = tagc_mesh_tokens(q), whole = n_tokens * layer_bytes(q), kept = whole, ends = 0;
    double working = 0; /* of the layer that is computed again */
    if (q->recompute == TAGC_MESH_RECOMPUTE_ALL) {
        kept = n_tokens * 2.0 * q->model.n_embd / sequence_parts(q);
        working = whole;
    }
    if (at == 0 && q->has_dropout) ends += stage->chunks / q->n_stages_per_rank * n_tokens * q->model.n_embd;
    if (at == q->n_pipeline - 1) /* all schedules but one go back at once from the last stage */
        ends += n_tokens * head_bytes(q) * (q->schedule == TAGC_MESH_GPIPE ? q->n_micro_batches : 1);
    double layers = stage->chunks * stage->layers_per_chunk * kept;
    if (!(q->offload & TAGC_MESH_OFFLOAD_ACTIVATIONS))
        return (tagc_mesh_activations){.device = layers + working + ends};
    /* One layer is in use, and one on its way. */
    return (tagc_mesh_activations){.device = fmin(layers, 2 * kept) + working + ends,
                                   .host = layers,
                                   .moved = 2 * kept * stage->n[TAGC_MESH_BLOCK] * q->n_micro_batches};
}
