/* Turns a setup into flats with their reductions, and computes volumes and memory. */
#include "plan/deployment.h"

#include "core/status.h"
#include "exchange/options.h"
#include "plan/bytes.h"
#include "transport/work.h"
#include "unit/gather.h"
#include "unit/unit.h"
#include <math.h>
#include <stdlib.h>

/* TAGC_ERR_ARGUMENT names the field, its value and what is allowed. */
static tagc_status check_setup(const tagc_setup *s) {
    TAGC_TRY(tagc_gpt2_config_check(&s->model));
    if (s->world_size < 1 || s->world_size > 65536)
        return tagc_fail(TAGC_ERR_ARGUMENT, "world-size is %d, allowed: 1 to 65536", s->world_size);
    if (s->n_hosts < 1 || s->world_size % s->n_hosts != 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "hosts is %d, which does not divide the world size of %d",
                         s->n_hosts, s->world_size);
    if (!(s->union_density <= 1))
        return tagc_fail(TAGC_ERR_ARGUMENT, "union-density is %g, allowed: 0 to 1", s->union_density);
    return TAGC_OK;
}

/* ---- reductions ---- */

double tagc_reduction_bytes(const tagc_reduction *r, int leg) {
    return r->volume.n_bytes[leg] + r->within.n_bytes[leg];
}

double tagc_reduction_remote(const tagc_reduction *r, int leg) {
    return r->volume.n_bytes[leg] * r->remote_share + r->within.n_bytes[leg] * r->within_share;
}

double tagc_reduction_decoded(const tagc_reduction *r) {
    return r->sent_density + (tagc_results_are_sent(&r->options) ? 1 - tagc_result_sparsity(&r->options) : 0);
}

/* The mean number of other ranks in a rank's group that are on other hosts. Groups of neighbouring ranks may differ from
 * the real hosts. */
static double remote_within(const tagc_setup *s, int per_group) {
    int per_host = s->world_size / s->n_hosts, n_near = per_group < per_host ? per_group : per_host;
    return per_group > 1 ? (double)(per_group - n_near) / (per_group - 1) : 0;
}

/* The shares that leave the host in two levels: of the bytes that a rank sends within its group of neighbouring ranks, and
 * of those to one rank of each other group. */
static void find_shares(const tagc_setup *s, int per_group, double *within, double *across) {
    int per_host = s->world_size / s->n_hosts, n_groups = s->world_size / per_group;
    int n_near = per_host > per_group ? per_host / per_group : 1;
    *within = remote_within(s, per_group);
    *across = n_groups > 1 ? (double)(n_groups - n_near) / (n_groups - 1) : 0;
}

/* Sets densities and volume of a reduction whose options and ranks are set. What was measured or given of densities belongs
 * to the engine's sparsity; other reductions are taken as if ranks chose independently. */
static tagc_status count_reduction(const tagc_setup *s, tagc_reduction *r) {
    int is_the_engines = r->options.sparsity == s->engine.reducer.sparsity;
    r->sent_density = is_the_engines && s->sent_density > 0 ? s->sent_density : 1 - r->options.sparsity;
    tagc_volume_data data = {.union_density = is_the_engines && s->union_density >= 0
                                                  ? s->union_density
                                                  : 1 - pow(1 - r->sent_density, r->n_ranks),
                             .sent_density = r->sent_density};
    return tagc_reducer_volume(&r->options, r->n_ranks, 0, &data, &r->volume);
}

/* As lib/unit: the ranks of a host add up, rows of the sums are encoded and go to the ranks of their place, and where all ranks get all
 * sums, those of a host send each other theirs. Once per unit, they agree. */
static tagc_status plan_reduction(const tagc_deployment *d, int flat, tagc_reduction *r) {
    const tagc_layout_flat *from = &d->layout->flats[flat];
    int n_others = from->n_adding - 1, is_first = flat == 0 || from[-1].unit != from->unit;
    *r = (tagc_reduction){.options = from->reducer,
                          .n_ranks = d->setup->world_size / from->n_adding,
                          .n_adding = from->n_adding};
    find_shares(d->setup, r->n_adding, &r->within_share, &r->remote_share);
    TAGC_TRY(count_reduction(d->setup, r));
    if (n_others == 0) return TAGC_OK;
    TAGC_TRY(tagc_reducer_volume(&from->within, r->n_adding, 0, NULL, &r->within));
    if (d->setup->engine.sharding == TAGC_SHARD_NONE)
        tagc_volume_add(&r->within, TAGC_LEG_RESULT, n_others * sizeof(float) * (double)r->options.n_elems);
    if (is_first) tagc_volume_add(&r->within, TAGC_LEG_CONTROL, n_others * (double)TAGC_VERDICT_BYTES);
    return TAGC_OK;
}

static tagc_status plan_gather(const tagc_deployment *d, const tagc_gatherer_options *options,
                               tagc_gather_plan *to) {
    const tagc_setup *s = d->setup;
    int per_host = d->setup->engine.ranks_per_host,
        is_hybrid = d->setup->engine.sharding == TAGC_SHARD_HYBRID;
    int n_ranks = is_hybrid ? per_host : s->world_size;
    tagc_gatherer_options between, inside;
    tagc_volume volume, volume_inside;
    double within, across;
    if (!tagc_fsdp_gathers_in_levels(&d->setup->engine)) {
        TAGC_TRY(tagc_gatherer_volume(options, n_ranks, &volume));
        double n_bytes = volume.n_bytes[TAGC_LEG_GATHER];
        *to = (tagc_gather_plan){.n_bytes = {n_bytes}, .remote_bytes = {n_bytes * remote_within(s, n_ranks)}};
        return TAGC_OK;
    }
    int n_hosts = s->world_size / per_host;
    tagc_flat_gather_split(options, n_hosts, per_host, &between, &inside);
    TAGC_TRY(tagc_gatherer_volume(&between, n_hosts, &volume));
    TAGC_TRY(tagc_gatherer_volume(&inside, per_host, &volume_inside));
    double n_between = volume.n_bytes[TAGC_LEG_GATHER],
           n_inside = n_hosts * volume_inside.n_bytes[TAGC_LEG_GATHER];
    find_shares(s, per_host, &within, &across);
    *to = (tagc_gather_plan){.n_bytes = {n_between, n_inside},
                             .remote_bytes = {n_between * across, n_inside * within}};
    return TAGC_OK;
}

static tagc_status plan_flat(const tagc_deployment *d, int flat, tagc_flat_plan *to) {
    const tagc_layout_flat *from = &d->layout->flats[flat];
    int n_ranks = d->setup->world_size;
    int n_owners = d->setup->engine.sharding == TAGC_SHARD_HYBRID ? d->setup->engine.ranks_per_host : n_ranks;
    *to = (tagc_flat_plan){.n_owned = from->n_padded / (uint64_t)(from->has_gatherer ? n_owners : 1)};
    if (from->has_gatherer) TAGC_TRY(plan_gather(d, &from->gatherer, &to->gather));
    return plan_reduction(d, flat, &to->reduction);
}

tagc_status tagc_model_layout(const tagc_gpt2_config *model, const tagc_fsdp_options *engine, int world_size,
                              tagc_layout **out) {
    tagc_tensor_info *tensors;
    *out = NULL;
    TAGC_TRY(tagc_gpt2_tensors(model, &tensors));
    tagc_status status = tagc_layout_create(tensors, tagc_gpt2_n_tensors(model), engine, world_size, out);
    free(tensors);
    return status;
}

tagc_status tagc_deployment_create(const tagc_setup *setup, tagc_deployment *out) {
    TAGC_TRY(check_setup(setup));
    tagc_deployment *d = out;
    *d = (tagc_deployment){.setup = setup};
    TAGC_TRY(tagc_model_layout(&setup->model, &setup->engine, setup->world_size, &d->layout));
    d->flats = calloc((size_t)d->layout->n_flats, sizeof *d->flats);
    tagc_status status = TAGC_OK;
    if (!d->flats) status = tagc_fail(TAGC_ERR_MEMORY, "no memory for %d flats", d->layout->n_flats);
    for (int i = 0; status == TAGC_OK && i < d->layout->n_flats; i++) status = plan_flat(d, i, &d->flats[i]);
    if (status != TAGC_OK) tagc_deployment_destroy(d);
    return status;
}

void tagc_deployment_destroy(tagc_deployment *d) {
    tagc_layout_destroy(d->layout);
    free(d->flats);
    *d = (tagc_deployment){0};
}

/* ---- memory ---- */

/* What outlives a pass: masters, gradients and moments of the owner, and whole copies if they are replicated. */
static uint64_t state_bytes(const tagc_deployment *d, int flat) {
    uint64_t n_owned = d->flats[flat].n_owned, n_padded = d->layout->flats[flat].n_padded;
    uint64_t n_elems = 4 * n_owned;
    if (d->setup->engine.sharding == TAGC_SHARD_GRAD) n_elems += n_padded;
    return n_elems * sizeof(float);
}

/* Between hosts, or of the only level; and within a host. */
static void measure_gather(const tagc_deployment *d, const tagc_gatherer_options *options,
                           tagc_exchange_memory out[2]) {
    int per_host = d->setup->engine.ranks_per_host, n_hosts = d->setup->world_size / per_host;
    tagc_gatherer_options between, inside;
    if (!tagc_fsdp_gathers_in_levels(&d->setup->engine)) {
        int is_hybrid = d->setup->engine.sharding == TAGC_SHARD_HYBRID;
        (void)tagc_gatherer_memory(options, is_hybrid ? per_host : d->setup->world_size, &out[0]);
        return;
    }
    tagc_flat_gather_split(options, n_hosts, per_host, &between, &inside);
    (void)tagc_gatherer_memory(&between, n_hosts, &out[0]);
    (void)tagc_gatherer_memory(&inside, per_host, &out[1]);
    out[1].buffers *= (uint64_t)n_hosts;
    out[1].work *= (uint64_t)n_hosts;
}

/* Flats of one unit are neighbours, and their exchanges have one tag. */
static tagc_status add_reducers(const tagc_deployment *d, tagc_plan_memory *out) {
    size_t n = (size_t)d->layout->n_flats;
    int n_adding = d->flats[0].reduction.n_adding, n_places = n_adding > 1 ? n_adding : 0;
    tagc_reducer_options *parts = calloc(n, sizeof *parts);
    uint32_t *units = calloc(n, sizeof *units);
    tagc_host_memory held = {0};
    tagc_model_options model; /* the engine's are the default */
    tagc_status status = TAGC_OK;
    tagc_model_options_init(&model);
    if (!parts || !units) status = tagc_fail(TAGC_ERR_MEMORY, "no memory for the options of %zu flats", n);
    for (size_t i = 0; status == TAGC_OK && i < n; i++) {
        parts[i] = d->flats[i].reduction.options;
        units[i] = (uint32_t)d->layout->flats[i].unit;
    }
    if (status == TAGC_OK)
        status = tagc_plan_reducers(parts, units, n, d->setup->world_size / n_adding, n_places, &model,
                                    TAGC_MORE_WORK_BYTES, &held);
    out->engine.residuals = held.residual;
    out->buffers += held.buffers + held.transient;
    if (n_places > 0 && d->setup->engine.sharding == TAGC_SHARD_NONE)
        out->buffers += (1 + (uint64_t)n_places) * TAGC_SPREAD_BYTES;
    free(parts);
    free(units);
    return status;
}

static void add_gatherers(const tagc_deployment *d, tagc_plan_memory *out) {
    tagc_work_sum taken[2] = {{0}};
    for (int i = 0; i < d->layout->n_flats; i++) {
        const tagc_layout_flat *flat = &d->layout->flats[i];
        tagc_exchange_memory memory[2] = {{0}, {0}};
        if (flat->has_gatherer) measure_gather(d, &flat->gatherer, memory);
        for (int level = 0; level < 2; level++) {
            out->buffers += memory[level].buffers;
            tagc_work_add(&taken[level], i == 0 || flat[-1].unit != flat->unit, memory[level].work);
        }
    }
    for (int level = 0; level < 2; level++)
        out->buffers +=
            tagc_work_capacity(TAGC_WORK_GATHER, TAGC_MORE_WORK_BYTES, taken[level].most, taken[level].total);
}

static tagc_status measure_memory(const tagc_deployment *d, tagc_plan_memory *out) {
    *out = (tagc_plan_memory){.engine = d->layout->memory};
    TAGC_TRY(add_reducers(d, out));
    add_gatherers(d, out);
    for (int i = 0; i < d->layout->n_flats; i++) out->state += state_bytes(d, i);
    out->total = out->engine.parameters + out->engine.gradients + out->engine.optimizer +
                 out->engine.residuals + out->buffers;
    return TAGC_OK;
}

tagc_status tagc_plan_memory_of(const tagc_setup *setup, tagc_plan_memory *out) {
    tagc_deployment d;
    TAGC_TRY(tagc_deployment_create(setup, &d));
    tagc_status status = measure_memory(&d, out);
    tagc_deployment_destroy(&d);
    return status;
}

tagc_status tagc_plan_count(const tagc_setup *setup, tagc_plan_volume *volume, tagc_plan_memory *memory) {
    tagc_deployment d;
    tagc_forecast forecast = {0};
    tagc_plan_link link = {.bytes_per_s = (double)INFINITY};
    *volume = (tagc_plan_volume){0};
    TAGC_TRY(tagc_deployment_create(setup, &d));
    tagc_status status = tagc_deployment_run(&d, NULL, &link, &forecast);
    int per_host = setup->world_size / setup->n_hosts;
    volume->n_params = d.layout->n_params;
    volume->n_compressed = d.layout->n_compressed;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
        volume->n_bytes[leg] = forecast.n_bytes[leg];
        volume->n_host_bytes[leg] = per_host * forecast.n_remote_bytes[leg];
    }
    int n_exchanges = setup->engine.exchange_each_micro_step ? setup->engine.n_micro_steps : 1;
    for (int i = 0; i < d.layout->n_flats; i++)
        for (int leg = TAGC_LEG_INDEX; leg <= TAGC_LEG_RESULT; leg++)
            if (d.layout->flats[i].class_ == TAGC_CLASS_COMPRESSED)
                volume->n_bytes_compressed += n_exchanges * tagc_reduction_bytes(&d.flats[i].reduction, leg);
    if (memory && status == TAGC_OK) status = measure_memory(&d, memory);
    tagc_deployment_destroy(&d);
    return status;
}
