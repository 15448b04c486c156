/* Data parallelism on a mesh: what a rank sends of gradients and parameters, and what it holds. torch's own collectives are rings;
 * tagc's exchanges are counted by the code that runs them, between hosts, after a sum within each. */
#include "mesh/parts.h"

#include "core/status.h"
#include "exchange/options.h"
#include "exchange/volume.h"
#include "plan/bytes.h"
#include "plan/plan.h"
#include "tagc/policy.h"
#include "transport/work.h"
#include "unit/options.h"
#include <math.h>
#include <stdlib.h>

tagc_mesh_group tagc_mesh_group_of(const tagc_mesh_question *q, int unit) {
    int n_stage = q->world_size / q->n_pipeline, stride = q->n_tensor;
    if (unit == TAGC_MESH_EXPERTS) stride *= q->n_expert;
    int near = q->ranks_per_host < n_stage ? q->ranks_per_host : n_stage;
    int n_ranks = n_stage / stride, per_host = near > stride ? near / stride : 1;
    return (tagc_mesh_group){.n_ranks = n_ranks, .n_hosts = n_ranks / per_host, .per_host = per_host};
}

/* Gathers of a unit in a step: for the forward and for the backward pass of each micro-batch, or once. torch's pipelines keep a
 * stage gathered between backward passes; reshard_after_forward=False, which torchtitan sets there, keeps it between all. */
static int count_gathers(const tagc_mesh_question *q) {
    if (q->sharding == TAGC_SHARD_NONE) return 0;
    return q->sharding != TAGC_SHARD_GRAD && q->n_pipeline == 1 ? 2 * q->n_micro_batches : 1;
}

static int is_delta(const tagc_mesh_question *q) {
    return q->gather >= TAGC_GATHER_DELTA8;
}

/* Whether tagc exchanges the gradients of these ranks: within one host it leaves them to torch. */
static int compresses(const tagc_mesh_question *q, const tagc_mesh_group *g) {
    return q->format != TAGC_FORMAT_BF16 && g->n_hosts > 1;
}

/* As gradients: what is gathered within one host is left to torch. */
static int gathers_by_tagc(const tagc_mesh_question *q, const tagc_mesh_group *g) {
    return q->gather > TAGC_GATHER_BF16 && g->n_hosts > 1;
}

/* Ranks over which the optimizer's state is shared out. */
static int n_owners(const tagc_mesh_question *q, const tagc_mesh_group *g) {
    return q->sharding == TAGC_SHARD_NONE ? 1 : q->sharding == TAGC_SHARD_HYBRID ? g->per_host : g->n_ranks;
}

/* ---- tagc's exchanges ---- */

/* Returns how many values a unit has of a class, and writes the options of their reducer. */
static double reducer_of(const tagc_mesh_question *q, const tagc_mesh_values *unit, int class_,
                         const tagc_mesh_group *g, tagc_reducer_options *r) {
    const double n_values[TAGC_N_CLASSES] = {unit->compressed, unit->mild, unit->dense};
    tagc_schedule_options schedule;
    tagc_model_options model;
    tagc_schedule_options_init(&schedule);
    schedule.format = (tagc_format)q->format;
    schedule.sparsity = q->sparsity;
    schedule.mild_sparsity = fmin(schedule.mild_sparsity, q->sparsity);
    if (q->sparsity == 0) schedule.mild_format = schedule.format;
    tagc_model_options_init(&model);
    model.formats.gradient = model.formats.sum = TAGC_ELEMENT_BF16;
    model.formats.dense = TAGC_FORMAT_BF16; /* as the gradients are */
    if (q->sharding == TAGC_SHARD_NONE || q->sharding == TAGC_SHARD_HYBRID)
        model.layout.output = TAGC_OUTPUT_UNIT;
    const tagc_exchanged what = {.kind = (tagc_class)class_,
                                 .plan = tagc_class_plan(&schedule, model.formats.dense, (tagc_class)class_),
                                 .n_elems = tagc_plan_own_elems(n_values[class_], g->n_hosts, g->per_host),
                                 .n_hosts = g->n_hosts,
                                 .n_places = g->per_host};
    tagc_options_between(&model, &what, r);
    return n_values[class_];
}

static tagc_status exchanged_bytes(const tagc_mesh_question *q, const tagc_mesh_values *unit,
                                   const tagc_mesh_group *g, double *n_bytes) {
    tagc_reducer_options options;
    *n_bytes = 0;
    for (int class_ = 0; class_ < TAGC_N_CLASSES; class_++) {
        double n_values = reducer_of(q, unit, class_, g, &options), of_class;
        if (!(n_values > 0)) continue;
        TAGC_TRY(tagc_plan_reduced_bytes(&options, n_values, g->n_hosts, g->per_host, &of_class));
        *n_bytes += of_class;
    }
    return TAGC_OK;
}

tagc_status tagc_mesh_flows(const tagc_mesh_question *q, const tagc_mesh_stage *stage, int unit,
                            tagc_mesh_flow *gradients, tagc_mesh_flow *parameters) {
    const tagc_mesh_group g = tagc_mesh_group_of(q, unit);
    const tagc_mesh_values *values = &stage->units[unit];
    double n = tagc_mesh_count(values), n_bf16 = 2 * n, n_gathers = count_gathers(q);
    double around = n_bf16 * (g.n_ranks - 1) / g.n_ranks, inside = n_bf16 * (g.per_host - 1) / g.per_host;
    *gradients = *parameters = (tagc_mesh_flow){0};
    if (!(n > 0) || stage->n[unit] == 0) return TAGC_OK;
    int is_hybrid = q->sharding == TAGC_SHARD_HYBRID, is_ddp = q->sharding == TAGC_SHARD_NONE;
    if (compresses(q, &g)) {
        gradients->within = is_ddp ? 2 * inside : inside;
        TAGC_TRY(exchanged_bytes(q, values, &g, &gradients->between));
    } else if (is_hybrid) {
        gradients->within = inside;
        gradients->between = 2 * n_bf16 / g.per_host * (g.n_hosts - 1) / g.n_hosts;
    } else {
        gradients->ring = is_ddp ? 2 * around : around;
    }
    if (is_hybrid) {
        parameters->within = n_gathers * inside;
    } else if (gathers_by_tagc(q, &g)) {
        parameters->within = n_gathers * inside;
        TAGC_TRY(tagc_plan_gathered_bytes(q->gather, n, g.n_hosts, g.per_host, &parameters->between));
        if (!is_delta(q)) parameters->between *= n_gathers; /* values change once in a step */
    } else {
        parameters->ring = n_gathers * around;
    }
    return TAGC_OK;
}

/* ---- memory ---- */

/* The options of a group's reducers, unit by unit. */
typedef struct exchanges {
    tagc_reducer_options *parts;
    uint32_t *units;
    size_t n;
    int n_hosts;
} exchanges;

static void list_unit(const tagc_mesh_question *q, const tagc_mesh_values *unit, const tagc_mesh_group *g,
                      uint32_t number, exchanges *to) {
    to->n_hosts = g->n_hosts;
    for (int class_ = 0; class_ < TAGC_N_CLASSES; class_++) {
        if (!(reducer_of(q, unit, class_, g, &to->parts[to->n]) > 0)) continue;
        to->units[to->n++] = number;
    }
}

/* Of a group. With its codec on the device, its buffers are those of the device's other groups. */
static tagc_status add_group(const tagc_mesh_question *q, const exchanges *group, double *device,
                             double *host) {
    if (group->n == 0) return TAGC_OK;
    if (q->codec_on_host) {
        tagc_host_memory held;
        tagc_model_options model;
        tagc_model_options_init(&model);
        TAGC_TRY(tagc_plan_reducers(group->parts, group->units, group->n, group->n_hosts, 1, &model,
                                    TAGC_MORE_WORK_BYTES, &held));
        host[TAGC_MESH_RESIDUAL] += (double)held.residual;
        host[TAGC_MESH_BUFFERS] += (double)(held.buffers + held.transient);
        host[TAGC_MESH_BUFFERS] +=
            (double)tagc_plan_pinned(group->parts, group->units, group->n, group->n_hosts, 2);
        return TAGC_OK;
    }
    tagc_device_memory held;
    TAGC_TRY(tagc_plan_device_memory(group->parts, group->units, group->n, group->n_hosts, 2,
                                     TAGC_SAMPLE_LINES * TAGC_SAMPLE_LINE, &held));
    device[TAGC_MESH_RESIDUAL] += (double)held.residual;
    device[TAGC_MESH_BUFFERS] = fmax(device[TAGC_MESH_BUFFERS], (double)held.buffers);
    host[TAGC_MESH_BUFFERS] = fmax(host[TAGC_MESH_BUFFERS], (double)held.pinned);
    return TAGC_OK;
}

static tagc_status add_exchanges(const tagc_mesh_question *q, const tagc_mesh_stage *stage, double *device,
                                 double *host) {
    size_t n_parts = 0;
    for (int unit = 0; unit < TAGC_MESH_N_UNITS; unit++) n_parts += (size_t)stage->n[unit] * TAGC_N_CLASSES;
    tagc_reducer_options *parts = calloc(2 * n_parts + 1, sizeof *parts);
    uint32_t *units = calloc(2 * n_parts + 1, sizeof *units), number = 0;
    tagc_status status = parts && units
                             ? TAGC_OK
                             : tagc_fail(TAGC_ERR_MEMORY, "out of memory for a plan of %zu parts", n_parts);
    exchanges of_all = {.parts = parts, .units = units},
              of_experts = {.parts = parts + n_parts, .units = units + n_parts}; /* over other ranks */
    for (int unit = 0; unit < TAGC_MESH_N_UNITS && status == TAGC_OK; unit++) {
        tagc_mesh_group g = tagc_mesh_group_of(q, unit);
        for (int i = 0; i < stage->n[unit] && compresses(q, &g); i++)
            list_unit(q, &stage->units[unit], &g, number++,
                      unit == TAGC_MESH_EXPERTS ? &of_experts : &of_all);
        if (is_delta(q) && gathers_by_tagc(q, &g))
            (q->codec_on_host ? host : device)[TAGC_MESH_REPLICAS] +=
                2 * stage->n[unit] * tagc_mesh_count(&stage->units[unit]) / g.per_host;
    }
    double own_device[TAGC_MESH_N_KINDS] = {0}, own_host[TAGC_MESH_N_KINDS] = {0};
    if (status == TAGC_OK) status = add_group(q, &of_all, own_device, own_host);
    if (status == TAGC_OK) status = add_group(q, &of_experts, own_device, own_host);
    for (int kind = 0; kind < TAGC_MESH_N_KINDS; kind++) {
        device[kind] += own_device[kind];
        host[kind] += own_host[kind];
    }
    free(parts);
    free(units);
    return status;
}

/* What FSDP2 gathers and reduces at once, in bf16: a unit in use and one ahead; the gradient of one, and a copy of it in the order
 * of ranks. What is gathered once in a step stays. */
static void add_torch(const tagc_mesh_question *q, double n, double largest, double *out) {
    int accumulates = q->n_micro_batches > 1;
    if (q->sharding == TAGC_SHARD_NONE) return;
    if (q->sharding == TAGC_SHARD_GRAD || q->n_pipeline > 1)
        out[TAGC_MESH_REPLICAS] += 2 * n;
    else
        out[TAGC_MESH_BUFFERS] += 2 * 2 * largest;
    out[TAGC_MESH_BUFFERS] += (accumulates ? 1 : 2) * 2 * largest;
    if (accumulates) out[TAGC_MESH_GRADIENTS] += 2 * n;
}

tagc_status tagc_mesh_data_memory(const tagc_mesh_question *q, const tagc_mesh_stage *stage, double *device,
                                  double *host) {
    double n = 0, owned = 0, largest = 0;
    int is_on_host = q->offload & (TAGC_MESH_OFFLOAD_PARAMETERS | TAGC_MESH_OFFLOAD_OPTIMIZER);
    int has_whole_gradients = q->sharding == TAGC_SHARD_NONE;
    for (int unit = 0; unit < TAGC_MESH_N_UNITS; unit++) {
        tagc_mesh_group g = tagc_mesh_group_of(q, unit);
        double of_unit = tagc_mesh_count(&stage->units[unit]);
        n += stage->n[unit] * of_unit;
        owned += stage->n[unit] * of_unit / n_owners(q, &g);
        if (stage->n[unit] > 0) largest = fmax(largest, of_unit);
    }
    double *parameters = q->offload & TAGC_MESH_OFFLOAD_PARAMETERS ? host : device;
    double *state = is_on_host ? host : device;
    parameters[TAGC_MESH_PARAMETERS] += 4 * (has_whole_gradients ? n : owned);
    state[TAGC_MESH_OPTIMIZER] += 8 * owned;
    if (has_whole_gradients) device[TAGC_MESH_GRADIENTS] += 4 * n;
    if (!has_whole_gradients || is_on_host) state[TAGC_MESH_GRADIENTS] += 4 * owned;
    add_torch(q, n, largest, device);
    return add_exchanges(q, stage, device, host);
}

double tagc_mesh_state_moved(const tagc_mesh_question *q, const tagc_mesh_stage *stage) {
    double owned = 0;
    for (int unit = 0; unit < TAGC_MESH_N_UNITS; unit++) {
        tagc_mesh_group g = tagc_mesh_group_of(q, unit);
        owned += stage->n[unit] * tagc_mesh_count(&stage->units[unit]) / n_owners(q, &g);
    }
    if (q->offload & TAGC_MESH_OFFLOAD_PARAMETERS) return 4 * owned * (1 + count_gathers(q));
    return q->offload & TAGC_MESH_OFFLOAD_OPTIMIZER ? 2 * 4 * owned : 0;
}
