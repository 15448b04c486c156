/* Asks about every way of data parallelism that differs on a mesh, and collects what each of them holds and sends. */
#include "ways/on_mesh.h"

#include "core/status.h"
#include "plan/plan.h"
#include <stdio.h>

typedef struct way {
    const char *name;
    int compresses, placement, gather, format;
    double sparsity;
} way;

static const way ways[TAGC_MESH_MAX_ROWS] = {
    {"FSDP2 in bf16", 0, TAGC_PLACE_ZERO3, TAGC_GATHER_BF16, TAGC_FORMAT_BF16, 0},
    {"FSDP2 in bf16, reshard_after_forward=False", 0, TAGC_PLACE_ZERO2, TAGC_GATHER_BF16, TAGC_FORMAT_BF16,
     0},
    {"FSDP2 in bf16, sharded within a host", 0, TAGC_PLACE_HYBRID, TAGC_GATHER_BF16, TAGC_FORMAT_BF16, 0},
    {"DDP in bf16", 0, TAGC_PLACE_NONE, TAGC_GATHER_BF16, TAGC_FORMAT_BF16, 0},
    {"tagc, 4 bits, parameters=\"delta4\"", 1, TAGC_PLACE_ZERO3, TAGC_GATHER_DELTA4, TAGC_FORMAT_INT4, 0},
    {"tagc, 95 % zero, parameters=\"delta4\"", 1, TAGC_PLACE_ZERO3, TAGC_GATHER_DELTA4, TAGC_FORMAT_INT2,
     0.95},
    {"tagc, sharded within a host, 4 bits", 1, TAGC_PLACE_HYBRID, TAGC_GATHER_BF16, TAGC_FORMAT_INT4, 0},
    {"tagc, DDP, 4 bits", 1, TAGC_PLACE_NONE, TAGC_GATHER_BF16, TAGC_FORMAT_INT4, 0},
};

const char *tagc_mesh_kind_name(int kind) {
    static const char *const names[TAGC_MESH_N_KINDS] = {"parameters", "gradients", "optimizer",  "residual",
                                                         "replicas",   "buffers",   "activations"};
    return names[kind];
}

static tagc_status ask(const tagc_mesh_question *question, const way *w, int forward, int backward,
                       tagc_mesh_reply *reply) {
    tagc_mesh_question q = *question;
    q.struct_bytes = sizeof q;
    q.placement = w->placement;
    q.gather = w->gather;
    q.format = w->format;
    q.sparsity = w->sparsity;
    q.forward = forward;
    q.backward = backward;
    *reply = (tagc_mesh_reply){.struct_bytes = sizeof *reply};
    return tagc_plan_mesh(&q, reply);
}

/* Whether a way is another one than those before it. In a pipeline, FSDP2 gathers once in a step. */
static int differs(const tagc_mesh_question *q, int n_data_ranks, const way *w) {
    int near = q->ranks_per_host / q->n_tensor; /* ranks of a host that share out the same parameters */
    near = near < 1 ? 1 : near < n_data_ranks ? near : n_data_ranks;
    if (w == &ways[0] && q->n_pipeline > 1) return 0;
    if (w->compresses && near == n_data_ranks) return 0; /* within a host, or alone */
    if (w->placement == TAGC_PLACE_HYBRID && (near == 1 || near == n_data_ranks)) return 0;
    return w->placement != TAGC_PLACE_NONE || !(q->offload & TAGC_MESH_OFFLOAD_PARAMETERS);
}

static void add_sent(tagc_mesh_plan *plan, const char *what, const char *of, int compresses,
                     const tagc_mesh_bytes *bytes) {
    if (!(bytes->all > 0)) return;
    tagc_mesh_sent *sent = &plan->sent[plan->n_sent++];
    snprintf(sent->name, sizeof sent->name, "%s%s", what, of);
    sent->compresses = compresses;
    sent->bytes = *bytes;
}

static const char *format_name(int format) {
    return format == TAGC_FORMAT_BF16 ? "bf16" : format == TAGC_FORMAT_INT8 ? "int8" : "int4";
}

/* What travels whatever the way, and messages between stages as compress(stage) sends them. */
static tagc_status add_shared(const tagc_mesh_question *q, tagc_mesh_plan *plan) {
    const tagc_mesh_bytes *legs = plan->any.legs;
    tagc_mesh_reply packed;
    char name[64];
    add_sent(plan, "tensor parallel", "", 0, &legs[TAGC_MESH_LEG_TENSOR]);
    add_sent(plan, "context parallel", "", 0, &legs[TAGC_MESH_LEG_CONTEXT]);
    add_sent(plan, "expert parallel", "", 0, &legs[TAGC_MESH_LEG_EXPERT]);
    add_sent(plan, "pipeline parallel", "", 0, &legs[TAGC_MESH_LEG_PIPELINE]);
    if (!(legs[TAGC_MESH_LEG_PIPELINE].between > 0)) return TAGC_OK;
    TAGC_TRY(ask(q, &ways[1], q->forward, q->backward, &packed));
    snprintf(name, sizeof name, ", compress(stage), %s and %s", format_name(q->forward),
             format_name(q->backward));
    add_sent(plan, "pipeline parallel", name, 1, &packed.legs[TAGC_MESH_LEG_PIPELINE]);
    return TAGC_OK;
}

static tagc_status add_row(const tagc_mesh_question *q, const way *w, tagc_mesh_plan *plan) {
    tagc_mesh_reply reply;
    TAGC_TRY(ask(q, w, TAGC_FORMAT_BF16, TAGC_FORMAT_BF16, &reply));
    tagc_mesh_row *row = &plan->rows[plan->n_rows++];
    *row = (tagc_mesh_row){.name = w->name, .compresses = w->compresses, .stage = reply.fullest};
    for (int kind = 0; kind < TAGC_MESH_N_KINDS; kind++) {
        row->device_all += row->device[kind] = reply.device[kind];
        row->host_all += row->host[kind] = reply.host[kind];
    }
    add_sent(plan, "gradients: ", w->name, w->compresses, &reply.legs[TAGC_MESH_LEG_GRADIENTS]);
    add_sent(plan, "parameters: ", w->name, w->compresses, &reply.legs[TAGC_MESH_LEG_PARAMETERS]);
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
    TAGC_TRY(ask(q, &ways[1], TAGC_FORMAT_BF16, TAGC_FORMAT_BF16, &out->any));
    TAGC_TRY(add_shared(q, out));
    for (int i = 0; i < TAGC_MESH_MAX_ROWS; i++)
        if (differs(q, out->any.n_data * q->n_context, &ways[i])) TAGC_TRY(add_row(q, &ways[i], out));
    add_sent(out, "offload, to and from the host", "", 0, &out->any.legs[TAGC_MESH_LEG_OFFLOAD]);
    out->n_tokens = (double)q->n_tokens * q->n_sequences * q->n_micro_batches * out->any.n_data;
    out->compute_s =
        flops_per_token(q, out->any.n_active_params) * out->n_tokens / q->world_size / flops_per_s;
    return TAGC_OK;
}
