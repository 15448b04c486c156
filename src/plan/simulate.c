/* The engine of src/fsdp in simulated time: the same decisions in the same order as pass.c and step.c, with a clock
 * where those have threads and a network. */
#include "core/status.h"
#include "exchange/options.h"
#include "plan/jobs.h"
#include "plan/program.h"

#include <math.h>
#include <stdlib.h>

enum { ABSENT = 0, COMING = 1, PRESENT = 2, FORWARD = 0, BACKWARD = 1, MAX_WHOLE_STEPS = 4 };

typedef struct unit_state {
    int residency, n_in_use, n_done, n_gradients_done, gradients_open;
    int gradients_zeroed, exchanging, used_backward, stays;
} unit_state;

typedef struct simulation {
    const tagc_deployment *d;
    const tagc_layout *layout;
    const tagc_costs *costs;
    tagc_program program;
    tagc_clock clock;
    unit_state *units;             /* (n_units) */
    int *holder, *gradient_holder; /* (n_units) of each slot: unit, or -1 */
    tagc_sim_transfer *gathers;    /* (n_flats, TAGC_N_GATHER_LEVELS) */
    tagc_sim_job *jobs;            /* (n_flats) */
    int pass, micro_step, n_micro_steps, gather_next, gather_reach;
    tagc_forecast forecast;
    double remote[TAGC_N_LEGS];
} simulation;

static void touch(simulation *s, double n_bytes) {
    tagc_clock_work(&s->clock, n_bytes * s->costs->byte_s);
}

static void count(simulation *s, tagc_leg leg, double n_bytes, double remote_bytes) {
    s->forecast.n_bytes[leg] += n_bytes;
    s->remote[leg] += remote_bytes;
}

static void blocked(simulation *s, double start_s, double *total_s) {
    *total_s += s->clock.now_s - start_s;
}

/* ---- parameters, as in pass.c ---- */

/* bf16 is narrowed and widened at the speed of memory; codes of few bits were measured, or read and write the master
 * and the replica. */
static double gather_work(const simulation *s, const tagc_gatherer_options *gather, int decodes) {
    if (gather->format == TAGC_FORMAT_FP32) return 0;
    if (gather->format == TAGC_FORMAT_BF16) return 6 * s->costs->byte_s;
    const tagc_gather_cost *cost = &s->costs->gather[tagc_gatherer_options_kind(gather)];
    double elem_s = decodes ? cost->decode_s : cost->encode_s;
    return (cost->weight > 0 ? elem_s : 9 * s->costs->byte_s) * s->costs->codec_factor;
}

/* The comm starts the second level when the first is there, whatever the caller does. */
static void post_gather(simulation *s, int flat) {
    const tagc_gather_plan *plan = &s->d->flats[flat].gather;
    tagc_sim_transfer *levels = s->gathers + (size_t)flat * TAGC_N_GATHER_LEVELS;
    for (int i = 0; i < TAGC_N_GATHER_LEVELS; i++) {
        levels[i] = (tagc_sim_transfer){.message_bytes = plan->message_bytes[i],
                                        .remote_bytes = plan->remote_bytes[i],
                                        .local_bytes = plan->n_bytes[i] - plan->remote_bytes[i]};
        if (i > 0) levels[i - 1].then = &levels[i];
        count(s, TAGC_LEG_GATHER, plan->n_bytes[i], plan->remote_bytes[i]);
    }
    tagc_clock_post(&s->clock, &levels[0]);
}

static void begin_gather(simulation *s, int unit) {
    const tagc_layout_unit *u = &s->layout->units[unit];
    s->holder[u->slot] = unit;
    s->units[unit].residency = COMING;
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++) {
        const tagc_gatherer_options *gather = &s->layout->flats[i].gatherer;
        tagc_clock_work(&s->clock, gather_work(s, gather, 0) * (double)s->d->flats[i].n_owned);
        post_gather(s, i);
    }
}

static void end_gather(simulation *s, int unit) {
    const tagc_layout_unit *u = &s->layout->units[unit];
    if (s->units[unit].residency != COMING) return;
    double start_s = s->clock.now_s;
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++) {
        const tagc_sim_transfer *levels = s->gathers + (size_t)i * TAGC_N_GATHER_LEVELS;
        tagc_clock_wait(&s->clock, &levels[TAGC_N_GATHER_LEVELS - 1]);
        const tagc_layout_flat *flat = &s->layout->flats[i];
        tagc_clock_work(&s->clock, gather_work(s, &flat->gatherer, 1) * (double)flat->n_padded);
    }
    s->units[unit].residency = PRESENT;
    blocked(s, start_s, &s->forecast.wait_gather_s);
}

static int unit_at(const simulation *s, int position) {
    return s->pass == BACKWARD ? s->layout->backward_order[position] : position;
}

static int comes_ahead(const simulation *s, int unit) {
    return !s->units[unit].stays && (s->pass == FORWARD || s->units[unit].used_backward);
}

static void reach_from(simulation *s, int position) {
    for (int n = s->d->engine.prefetch; n > 0 && position + 1 < s->layout->n_units;)
        n -= comes_ahead(s, unit_at(s, ++position));
    if (position > s->gather_reach) s->gather_reach = position;
}

static void gather_ahead(simulation *s) {
    for (; s->gather_next < s->layout->n_units && s->gather_next <= s->gather_reach; s->gather_next++) {
        int unit = unit_at(s, s->gather_next);
        if (s->units[unit].residency != ABSENT || !comes_ahead(s, unit)) continue;
        if (s->holder[s->layout->units[unit].slot] >= 0) return;
        begin_gather(s, unit);
    }
}

static tagc_status need(simulation *s, int unit) {
    const tagc_layout_unit *u = &s->layout->units[unit];
    reach_from(s, u->position[s->pass]);
    if (s->units[unit].residency == ABSENT) {
        if (s->holder[u->slot] >= 0)
            return tagc_fail(TAGC_ERR_STATE, "unit %s is used while another is in its place: prefetch is %d",
                             u->name, s->d->engine.prefetch);
        begin_gather(s, unit);
    }
    gather_ahead(s);
    end_gather(s, unit);
    return TAGC_OK;
}

static int releases(const simulation *s) {
    return s->d->engine.sharding == TAGC_SHARD_FULL || s->d->engine.sharding == TAGC_SHARD_HYBRID;
}

static void release(simulation *s, int unit) {
    const tagc_layout_unit *u = &s->layout->units[unit];
    if (!releases(s) || s->units[unit].residency == ABSENT) return;
    if (u->spans && s->pass == FORWARD) return;
    end_gather(s, unit);
    s->units[unit].residency = ABSENT;
    s->holder[u->slot] = -1;
    reach_from(s, u->position[s->pass] + 1);
    gather_ahead(s);
}

static void make_absent(simulation *s) {
    for (int i = 0; i < s->layout->n_units; i++) {
        s->units[i].residency = ABSENT;
        s->holder[i] = -1;
    }
}

/* ---- gradients ---- */

static void end_exchange(simulation *s, int unit) {
    const tagc_layout_unit *u = &s->layout->units[unit];
    const tagc_fsdp_options *o = &s->d->engine;
    if (!s->units[unit].exchanging) return;
    double start_s = s->clock.now_s;
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++) tagc_clock_join(&s->clock, &s->jobs[i]);
    s->units[unit].exchanging = 0;
    s->gradient_holder[u->gradient_slot] = -1;
    blocked(s, start_s, &s->forecast.wait_reduce_s);
    if (!o->exchange_each_micro_step || o->n_micro_steps == 1) return;
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++)
        touch(s, 12 * (double)s->d->flats[i].n_owned);
}

static tagc_status open_gradients(simulation *s, int unit) {
    const tagc_layout_unit *u = &s->layout->units[unit];
    int *holder = &s->gradient_holder[u->gradient_slot];
    if (*holder >= 0) end_exchange(s, *holder);
    if (*holder >= 0 && *holder != unit)
        return tagc_fail(TAGC_ERR_STATE, "gradients of unit %s are asked for while others are in their place",
                         u->name);
    *holder = unit;
    s->units[unit].gradients_open = 1;
    if (!s->units[unit].gradients_zeroed) touch(s, 4 * (double)u->n_padded);
    s->units[unit].gradients_zeroed = 1;
    return TAGC_OK;
}

static void begin_exchange(simulation *s, int unit) {
    const tagc_layout_unit *u = &s->layout->units[unit];
    s->units[unit].exchanging = 1;
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++) {
        tagc_clock_submit(&s->clock, &s->jobs[i]);
        const tagc_reduction *r = &s->d->flats[i].reduction;
        for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
            s->forecast.n_bytes[leg] += r->volume.n_bytes[leg];
            s->remote[leg] += tagc_reduction_remote(r, leg);
        }
    }
}

/* ---- a micro-step ---- */

static void begin_pass(simulation *s, int pass) {
    s->pass = pass;
    s->gather_next = 0;
    s->gather_reach = -1;
    for (int i = 0; i < s->layout->n_units; i++) {
        unit_state *u = &s->units[i];
        u->n_in_use = u->n_done = u->n_gradients_done = u->gradients_open = 0;
        u->stays = u->residency == PRESENT || (u->residency == COMING && pass == FORWARD);
    }
    if (s->d->engine.sharding == TAGC_SHARD_NONE) return;
    reach_from(s, 0);
    gather_ahead(s);
}

static void finish_unit(simulation *s, int unit) {
    const tagc_layout_unit *u = &s->layout->units[unit];
    const unit_state *state = &s->units[unit];
    int finished = s->pass == FORWARD ? state->n_done == u->n_uses : state->n_gradients_done == u->n_tensors;
    if (finished && state->n_in_use == 0) release(s, unit);
}

static tagc_status call(simulation *s, const tagc_call *c) {
    if (c->kind == TAGC_CALL_COMPUTE) {
        tagc_clock_work(&s->clock, c->flops * s->costs->flop_s);
        return TAGC_OK;
    }
    int unit = s->layout->unit_of_tensor[c->tensor];
    unit_state *state = &s->units[unit];
    int exchanges = s->d->engine.exchange_each_micro_step || s->micro_step == s->n_micro_steps;
    switch (c->kind) {
    case TAGC_CALL_USE:
        if (s->d->engine.sharding != TAGC_SHARD_NONE) TAGC_TRY(need(s, unit));
        state->n_in_use++;
        return TAGC_OK;
    case TAGC_CALL_DONE:
        state->n_in_use--;
        state->n_done++;
        break;
    case TAGC_CALL_GRAD:
        return state->gradients_open ? TAGC_OK : open_gradients(s, unit);
    default:
        state->n_gradients_done++;
        finish_unit(s, unit);
        if (state->n_gradients_done == s->layout->units[unit].n_tensors && exchanges) begin_exchange(s, unit);
        return TAGC_OK;
    }
    finish_unit(s, unit);
    return TAGC_OK;
}

static tagc_status run_micro_step(simulation *s) {
    const tagc_program *p = &s->program;
    const tagc_fsdp_options *o = &s->d->engine;
    if (releases(s)) make_absent(s);
    begin_pass(s, FORWARD);
    for (int i = 0; i < p->n_forward; i++) TAGC_TRY(call(s, &p->calls[i]));
    s->micro_step++;
    if (o->n_micro_steps == 1 || o->exchange_each_micro_step)
        for (int i = 0; i < s->layout->n_units; i++) s->units[i].gradients_zeroed = 0;
    begin_pass(s, BACKWARD);
    for (int i = p->n_forward; i < p->n_calls; i++) TAGC_TRY(call(s, &p->calls[i]));
    return TAGC_OK;
}

/* As in step.c: where parameters stay gathered, a unit's gather begins when its owners have updated it. */
static void update(simulation *s) {
    make_absent(s);
    for (int unit = 0; unit < s->layout->n_units; unit++) {
        const tagc_layout_unit *u = &s->layout->units[unit];
        double n_owned = 0;
        for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++)
            n_owned += (double)s->d->flats[i].n_owned;
        tagc_clock_work(&s->clock, n_owned * s->costs->optimizer_s);
        if (s->d->engine.sharding == TAGC_SHARD_GRAD) begin_gather(s, unit);
    }
}

static void finish_step(simulation *s) {
    double n_ranks = s->d->setup->world_size;
    for (int at = 0; at < s->layout->n_units; at++) end_exchange(s, s->layout->backward_order[at]);
    tagc_sim_transfer norm = {.remote_bytes = (double)tagc_norm_bytes((int)n_ranks)};
    double share = n_ranks > 1 ? (n_ranks - n_ranks / s->d->setup->n_hosts) / (n_ranks - 1) : 0;
    count(s, TAGC_LEG_CONTROL, norm.remote_bytes, norm.remote_bytes * share);
    double start_s = s->clock.now_s;
    tagc_clock_post(&s->clock, &norm);
    tagc_clock_wait(&s->clock, &norm);
    blocked(s, start_s, &s->forecast.wait_reduce_s);
    start_s = s->clock.now_s;
    update(s);
    s->forecast.optimizer_s = s->clock.now_s - start_s;
}

/* ---- a step ---- */

static void find_used_backward(simulation *s) {
    for (int i = s->program.n_forward; i < s->program.n_calls; i++)
        if (s->program.calls[i].kind == TAGC_CALL_USE)
            s->units[s->layout->unit_of_tensor[s->program.calls[i].tensor]].used_backward = 1;
}

static tagc_status prepare(simulation *s) {
    const tagc_setup *setup = s->d->setup;
    size_t n_units = (size_t)s->layout->n_units, n_flats = (size_t)s->layout->n_flats;
    s->units = calloc(n_units, sizeof *s->units);
    s->holder = calloc(n_units, sizeof *s->holder);
    s->gradient_holder = calloc(n_units, sizeof *s->gradient_holder);
    s->gathers = calloc(n_flats * TAGC_N_GATHER_LEVELS, sizeof *s->gathers);
    s->jobs = calloc(n_flats, sizeof *s->jobs);
    if (!s->units || !s->holder || !s->gradient_holder || !s->gathers || !s->jobs)
        return tagc_fail(TAGC_ERR_MEMORY, "no memory to simulate %d units", s->layout->n_units);
    TAGC_TRY(tagc_program_create(&setup->model, setup->n_batch, setup->n_tokens, &s->program));
    find_used_backward(s);
    for (int i = 0; i < s->layout->n_units; i++) s->gradient_holder[i] = -1;
    make_absent(s);
    for (size_t i = 0; i < n_flats; i++) {
        const tagc_reduction *r = &s->d->flats[i].reduction;
        tagc_phase_work work;
        TAGC_TRY(tagc_reduction_work(r, s->costs->n_codec >= 0 ? s->costs : NULL, &work));
        TAGC_TRY(tagc_job_create(r, &work, &s->jobs[i]));
    }
    return TAGC_OK;
}

static void destroy(simulation *s) {
    for (int i = 0; s->jobs && i < s->layout->n_flats; i++) tagc_job_destroy(&s->jobs[i]);
    free(s->units);
    free(s->holder);
    free(s->gradient_holder);
    free(s->gathers);
    free(s->jobs);
    tagc_program_destroy(&s->program);
}

static tagc_sim_machine machine_of(const tagc_deployment *d, const tagc_costs *costs,
                                   const tagc_plan_link *link) {
    int per_host = d->setup->world_size / d->setup->n_hosts;
    int n_machines = d->setup->n_machines > 0 ? d->setup->n_machines : d->setup->n_hosts;
    return (tagc_sim_machine){.latency_s = link->latency_s,
                              .large_latency_s = link->large_latency_s,
                              .large_bytes = TAGC_LARGE_MESSAGE_BYTES,
                              .remote_bytes_per_s = link->bytes_per_s * costs->link_share / per_host,
                              .local_bytes_per_s =
                                  link->host_bytes_per_s > 0 ? link->host_bytes_per_s : (double)INFINITY,
                              .overhead_s = costs->overhead_s,
                              .queue_bytes = costs->queue_bytes,
                              .cores = costs->cores * n_machines / d->setup->world_size,
                              .cpu_s_per_byte = costs->cpu_s_per_byte,
                              .poll_cores = costs->poll_cores};
}

static tagc_status run_steps(const tagc_deployment *d, const tagc_costs *costs, const tagc_plan_link *link,
                             int n_micro_steps, tagc_forecast *forecast, double *remote) {
    simulation s = {.d = d, .layout = d->layout, .costs = costs, .n_micro_steps = n_micro_steps};
    tagc_sim_machine machine = machine_of(d, costs, link);
    tagc_clock_init(&s.clock, &machine);
    s.clock.worker_cores = d->engine.reducer.n_threads;
    tagc_status status = prepare(&s);
    /* What the update before has left under way is the start of a step; its own leaves as much to the next. */
    if (status == TAGC_OK && d->engine.sharding == TAGC_SHARD_GRAD) update(&s);
    double start_s = s.clock.now_s, comm_s = s.clock.comm_s, n_gathered = s.forecast.n_bytes[TAGC_LEG_GATHER],
           remote_gathered = s.remote[TAGC_LEG_GATHER];
    for (int i = 0; status == TAGC_OK && i < n_micro_steps; i++) status = run_micro_step(&s);
    if (status == TAGC_OK) {
        finish_step(&s);
        s.forecast.n_bytes[TAGC_LEG_GATHER] -= n_gathered;
        s.remote[TAGC_LEG_GATHER] -= remote_gathered;
        s.forecast.iteration_s = s.clock.now_s - start_s;
        s.forecast.comm_s = s.clock.comm_s - comm_s;
        s.forecast.codec_s = s.clock.codec_s;
        s.forecast.compute_s = s.forecast.iteration_s - s.forecast.wait_gather_s - s.forecast.wait_reduce_s -
                               s.forecast.optimizer_s;
        *forecast = s.forecast;
        for (int leg = 0; leg < TAGC_N_LEGS; leg++) remote[leg] = s.remote[leg];
    }
    destroy(&s);
    return status;
}

/* Micro-steps in the middle are all alike: some are run, the rest are added. */
static void extend(double *value, double before, int n) {
    *value += n * (*value - before);
}

tagc_status tagc_deployment_run(const tagc_deployment *d, const tagc_costs *costs, const tagc_plan_link *link,
                                tagc_forecast *out, double remote[TAGC_N_LEGS]) {
    tagc_costs free_costs;
    tagc_costs_init(&free_costs);
    free_costs.n_codec = -1; /* nothing is known, and nothing asked for */
    if (!costs) costs = &free_costs;
    int n = d->engine.n_micro_steps, n_more = n - MAX_WHOLE_STEPS;
    double before_remote[TAGC_N_LEGS];
    if (n_more <= 0) return run_steps(d, costs, link, n, out, remote);
    tagc_forecast before;
    TAGC_TRY(run_steps(d, costs, link, MAX_WHOLE_STEPS - 1, &before, before_remote));
    TAGC_TRY(run_steps(d, costs, link, MAX_WHOLE_STEPS, out, remote));
    extend(&out->iteration_s, before.iteration_s, n_more);
    extend(&out->compute_s, before.compute_s, n_more);
    extend(&out->wait_gather_s, before.wait_gather_s, n_more);
    extend(&out->wait_reduce_s, before.wait_reduce_s, n_more);
    extend(&out->comm_s, before.comm_s, n_more);
    extend(&out->codec_s, before.codec_s, n_more);
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
        extend(&out->n_bytes[leg], before.n_bytes[leg], n_more);
        extend(&remote[leg], before_remote[leg], n_more);
    }
    return TAGC_OK;
}

void tagc_costs_init(tagc_costs *costs) {
    *costs = (tagc_costs){.codec_factor = 1, .link_share = 1, .cores = 1e9};
}

tagc_status tagc_plan_simulate(const tagc_setup *setup, const tagc_costs *costs, const tagc_plan_link *link,
                               tagc_forecast *out) {
    tagc_deployment d;
    double remote[TAGC_N_LEGS];
    if (!(link->bytes_per_s > 0) || !(link->latency_s >= 0) || !(link->large_latency_s >= 0))
        return tagc_fail(TAGC_ERR_ARGUMENT, "a link of %g bytes per second and a latency of %g s",
                         link->bytes_per_s, link->latency_s);
    TAGC_TRY(tagc_deployment_create(setup, &d));
    tagc_status status = tagc_deployment_run(&d, costs, link, out, remote);
    tagc_deployment_destroy(&d);
    return status;
}
