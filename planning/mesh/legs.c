/* Bytes of every leg on a mesh, of each rank in turn: what it sends, and what of that leaves its host. */
#include "mesh/parts.h"

#include "core/status.h"
#include "plan/bytes.h"
#include "tagc/blocks.h"
#include <stdlib.h>

typedef struct counter {
    const tagc_mesh_question *q;
    tagc_mesh_bytes *legs;
    double *host_bytes; /* (TAGC_MESH_N_LEGS, hosts) to other hosts */
    int n_hosts;
} counter;

/* A rank, by its numbers. */
typedef struct place {
    int rank, stage, tensor, data; /* data: among data and context ranks together */
} place;

static int rank_of(const tagc_mesh_question *q, int stage, int data, int tensor) {
    return (stage * (q->world_size / (q->n_pipeline * q->n_tensor)) + data) * q->n_tensor + tensor;
}

static int are_near(const tagc_mesh_question *q, int a, int b) {
    return a / q->ranks_per_host == b / q->ranks_per_host;
}

static void add(counter *c, int rank, tagc_mesh_leg leg, double n_bytes, double between, double *of_rank) {
    c->legs[leg].all += n_bytes;
    c->legs[leg].between += between;
    c->host_bytes[leg * c->n_hosts + rank / c->q->ranks_per_host] += between;
    of_rank[leg] += n_bytes;
}

static void add_to(counter *c, int rank, tagc_mesh_leg leg, double n_bytes, int peer, double *of_rank) {
    add(c, rank, leg, n_bytes, are_near(c->q, rank, peer) ? 0 : n_bytes, of_rank);
}

/* ---- within a stage ---- */

static double layers_of(const tagc_mesh_question *q) {
    int n = q->model.n_layer / q->n_pipeline;
    return n;
}

/* Of a rank in a step: two all-reduces of the tokens in each layer's forward pass, and two in its backward pass, each as a
 * reduce-scatter and a gather. Sequence parallelism sends the same. */
static double tensor_bytes(const tagc_mesh_question *q, int stage) {
    double legs = 8 * layers_of(q);
    if (q->recompute == TAGC_MESH_RECOMPUTE_ALL) legs *= 1.5;
    if (q->sequence == TAGC_MESH_SEQUENCE_REGATHER) legs += 2 * layers_of(q);
    if (stage == 0) legs += 2; /* the embedding, split by vocabulary */
    if (stage == q->n_pipeline - 1) legs += 2 + (q->sequence == TAGC_MESH_SEQUENCE_REGATHER); /* the head */
    return q->n_micro_batches * legs * tagc_mesh_tokens(q) * 2 * q->model.n_embd * (q->n_tensor - 1) /
           q->n_tensor;
}

/* Keys and values pass all other ranks in the forward pass, and again in the backward pass, where their gradients in fp32 go all
 * around, as in torch's ring attention. */
static double context_bytes(const tagc_mesh_question *q) {
    const tagc_mesh_model *m = &q->model;
    double n = 2 * tagc_mesh_tokens(q) * m->n_embd / m->n_head * m->n_kv_head / q->n_tensor;
    double passes = q->recompute == TAGC_MESH_KEEP ? 2 : 3;
    if (q->n_context == 1) return 0;
    return q->n_micro_batches * layers_of(q) * (passes * 2 * n * (q->n_context - 1) + 4 * n * q->n_context);
}

/* Tokens go to their experts and back, and so do the gradients; spread evenly. n_near: ranks of the group on a host, itself included. */
static void add_tokens(counter *c, int rank, int n_near, double *of_rank) {
    const tagc_mesh_question *q = c->q;
    const tagc_mesh_model *m = &q->model;
    double n_values = m->n_active * tagc_mesh_tokens(q) * m->n_embd / q->n_expert; /* for each rank */
    int n_hosts = q->n_expert / n_near;
    int is_torchs = q->token_forward == TAGC_FORMAT_BF16 && q->token_backward == TAGC_FORMAT_BF16;
    for (int i = 0; i < 2; i++) { /* forward, backward */
        int format = i == 0 ? q->token_forward : q->token_backward;
        double n_calls =
            q->n_micro_batches * layers_of(q) * (i == 0 && q->recompute == TAGC_MESH_RECOMPUTE_ALL ? 4 : 2);
        double within = 2 * n_values * (n_near - 1), between = 2 * n_values * (q->n_expert - n_near);
        if (n_hosts > 1 && !is_torchs) { /* neighbours first collect what leaves the host */
            within *= n_hosts;
            between = tagc_plan_all_to_all_bytes(format, q->block, 2, n_values, n_hosts, n_near);
        }
        add(c, rank, TAGC_MESH_LEG_EXPERT, n_calls * (within + between), n_calls * between, of_rank);
    }
}

static void add_within_stage(counter *c, const place *at, double *of_rank) {
    const tagc_mesh_question *q = c->q;
    int context = at->data % q->n_context, expert = at->data % q->n_expert, n_near = 0;
    int next = rank_of(q, at->stage, at->data, (at->tensor + 1) % q->n_tensor);
    add_to(c, at->rank, TAGC_MESH_LEG_TENSOR, tensor_bytes(q, at->stage), next, of_rank);
    next = rank_of(q, at->stage, at->data - context + (context + 1) % q->n_context, at->tensor);
    add_to(c, at->rank, TAGC_MESH_LEG_CONTEXT, context_bytes(q), next, of_rank);
    if (q->n_expert == 1) return;
    for (int i = 0; i < q->n_expert; i++)
        n_near += are_near(q, at->rank, rank_of(q, at->stage, at->data - expert + i, at->tensor));
    add_tokens(c, at->rank, n_near, of_rank);
}

/* ---- between stages ---- */

/* Of a message; whole between ranks of one host. */
static tagc_status message_bytes(const tagc_mesh_question *q, int format, int is_near, double *n_bytes) {
    int n_parts = q->sequence == TAGC_MESH_WHOLE_SEQUENCE ? 1 : q->n_tensor;
    uint64_t n = (uint64_t)(tagc_mesh_tokens(q) * q->model.n_embd / n_parts), n_encoded;
    tagc_blocks_options options;
    *n_bytes = 2 * (double)n;
    if (is_near || format == TAGC_FORMAT_BF16) return TAGC_OK;
    tagc_blocks_options_init(&options);
    options.format = format;
    options.block = q->block;
    TAGC_TRY(tagc_blocks_bytes(&options, n, &n_encoded));
    *n_bytes = (double)n_encoded;
    return TAGC_OK;
}

/* Activations to the stage after each of this rank's stages, and gradients to the one before. */
static tagc_status add_between_stages(counter *c, const place *at, double *of_rank) {
    const tagc_mesh_question *q = c->q;
    int n = q->n_pipeline, is_last = at->stage == n - 1, is_first = at->stage == 0;
    for (int direction = 0; n > 1 && direction < 2; direction++) {
        int peer = rank_of(q, (at->stage + (direction == 0 ? 1 : n - 1)) % n, at->data, at->tensor);
        double n_messages = (double)q->n_micro_batches *
                            (q->n_stages_per_rank - (direction == 0 ? is_last : is_first)),
               n_bytes;
        TAGC_TRY(message_bytes(q, direction == 0 ? q->forward : q->backward, are_near(q, at->rank, peer),
                               &n_bytes));
        add_to(c, at->rank, TAGC_MESH_LEG_PIPELINE, n_messages * n_bytes, peer, of_rank);
    }
    return TAGC_OK;
}

/* ---- data parallelism and offload ---- */

typedef struct stage_flows {
    tagc_mesh_flow flows[TAGC_MESH_N_UNITS][2]; /* gradients, parameters: of all units of the kind */
    double moved;
} stage_flows;

static tagc_status find_flows(const tagc_mesh_question *q, int at, stage_flows *to) {
    tagc_mesh_stage stage = tagc_mesh_stage_of(q, at);
    to->moved = tagc_mesh_state_moved(q, &stage) + tagc_mesh_activations_of(q, &stage, at).moved;
    for (int unit = 0; unit < TAGC_MESH_N_UNITS; unit++) {
        TAGC_TRY(tagc_mesh_flows(q, &stage, unit, &to->flows[unit][0], &to->flows[unit][1]));
        for (int i = 0; i < 2; i++) {
            tagc_mesh_flow *flow = &to->flows[unit][i];
            *flow = (tagc_mesh_flow){flow->ring * stage.n[unit], flow->within * stage.n[unit],
                                     flow->between * stage.n[unit]};
        }
    }
    return TAGC_OK;
}

static void add_data(counter *c, const place *at, const stage_flows *stage, double *of_rank) {
    const tagc_mesh_question *q = c->q;
    for (int unit = 0; unit < TAGC_MESH_N_UNITS; unit++) {
        tagc_mesh_group g = tagc_mesh_group_of(q, unit);
        int step = unit == TAGC_MESH_EXPERTS ? q->n_expert : 1, first = at->data % step;
        int next = first + (at->data - first + step) % (g.n_ranks * step);
        int peer = rank_of(q, at->stage, next, at->tensor);
        for (int i = 0; i < 2; i++) {
            const tagc_mesh_flow *flow = &stage->flows[unit][i];
            tagc_mesh_leg leg = i == 0 ? TAGC_MESH_LEG_GRADIENTS : TAGC_MESH_LEG_PARAMETERS;
            add_to(c, at->rank, leg, flow->ring, peer, of_rank);
            add(c, at->rank, leg, flow->within + flow->between, flow->between, of_rank);
        }
    }
    add(c, at->rank, TAGC_MESH_LEG_OFFLOAD, stage->moved, 0, of_rank);
}

static tagc_status count_stage(counter *c, int stage) {
    const tagc_mesh_question *q = c->q;
    int n_stage = q->world_size / q->n_pipeline;
    stage_flows flows;
    TAGC_TRY(find_flows(q, stage, &flows));
    for (int i = 0; i < n_stage; i++) {
        place at = {stage * n_stage + i, stage, i % q->n_tensor, i / q->n_tensor};
        double of_rank[TAGC_MESH_N_LEGS] = {0};
        add_within_stage(c, &at, of_rank);
        TAGC_TRY(add_between_stages(c, &at, of_rank));
        add_data(c, &at, &flows, of_rank);
        for (int leg = 0; leg < TAGC_MESH_N_LEGS; leg++)
            if (of_rank[leg] > c->legs[leg].rank) c->legs[leg].rank = of_rank[leg];
    }
    return TAGC_OK;
}

tagc_status tagc_mesh_count_legs(const tagc_mesh_question *q, tagc_mesh_bytes legs[TAGC_MESH_N_LEGS]) {
    counter c = {.q = q, .legs = legs, .n_hosts = q->world_size / q->ranks_per_host};
    c.host_bytes = calloc((size_t)c.n_hosts * TAGC_MESH_N_LEGS, sizeof *c.host_bytes);
    if (!c.host_bytes) return tagc_fail(TAGC_ERR_MEMORY, "no memory for the bytes of %d hosts", c.n_hosts);
    tagc_status status = TAGC_OK;
    for (int leg = 0; leg < TAGC_MESH_N_LEGS; leg++) legs[leg] = (tagc_mesh_bytes){0};
    for (int stage = 0; status == TAGC_OK && stage < q->n_pipeline; stage++) status = count_stage(&c, stage);
    for (int i = 0; i < c.n_hosts * TAGC_MESH_N_LEGS; i++)
        if (c.host_bytes[i] > legs[i / c.n_hosts].host) legs[i / c.n_hosts].host = c.host_bytes[i];
    free(c.host_bytes);
    return status;
}
