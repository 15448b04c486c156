/* Simulates the engine of engine/fsdp: the engine's own order of gathers and exchanges (fsdp/gather_order.h), with a clock in
 * place of the threads and the network of pass.c and step.c. */
#include "core/status.h"
#include "exchange/options.h"
#include "plan/deployment.h"
#include "plan/program.h"

#include <math.h>
#include <stdlib.h>

enum { MAX_WHOLE_STEPS = 4 };

typedef struct simulation {
    const tagc_deployment *d;
    const tagc_layout *layout;
    const tagc_costs *costs;
    tagc_fsdp_options options;
    tagc_program program;
    tagc_clock clock;
    tagc_gather_order order;
    tagc_sim_transfer *gathers; /* (n_flats, TAGC_N_GATHER_LEVELS) */
    tagc_sim_job *jobs;         /* (n_flats) */
    tagc_forecast forecast;
} simulation;

static void touch(simulation *s, double n_bytes) {
    tagc_clock_work(&s->clock, n_bytes * s->costs->byte_s);
}

static void count(simulation *s, tagc_leg leg, double n_bytes, double remote_bytes) {
    s->forecast.n_bytes[leg] += n_bytes;
    s->forecast.n_remote_bytes[leg] += remote_bytes;
}

static void blocked(simulation *s, double start_s, double *total_s) {
    *total_s += s->clock.now_s - start_s;
}

/* ---- callbacks of the order, as in pass.c ---- */

/* bf16 converts at the speed of memory. Codes of few bits were measured; otherwise they read and write the master and the
 * replica. */
static double gather_work(const simulation *s, const tagc_gatherer_options *gather, int decodes) {
    if (gather->format == TAGC_FORMAT_FP32) return 0;
    int kind = tagc_gatherer_options_kind(gather);
    if (kind == TAGC_GATHER_BF16) return 6 * s->costs->byte_s;
    const tagc_gather_cost *cost = &s->costs->gather[kind];
    double elem_s = decodes ? cost->decode_s : cost->encode_s;
    return (cost->weight > 0 ? elem_s : 9 * s->costs->byte_s) * s->costs->codec_factor;
}

/* The comm thread starts the second level when the first has arrived, without the caller. */
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

static tagc_status begin_gather(void *context, int unit) {
    simulation *s = context;
    const tagc_layout_unit *u = &s->layout->units[unit];
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++) {
        const tagc_gatherer_options *gather = &s->layout->flats[i].gatherer;
        tagc_clock_work(&s->clock, gather_work(s, gather, 0) * (double)s->d->flats[i].n_owned);
        post_gather(s, i);
    }
    return TAGC_OK;
}

static tagc_status end_gather(void *context, int unit) {
    simulation *s = context;
    const tagc_layout_unit *u = &s->layout->units[unit];
    double start_s = s->clock.now_s;
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++) {
        const tagc_sim_transfer *levels = s->gathers + (size_t)i * TAGC_N_GATHER_LEVELS;
        tagc_clock_wait(&s->clock, &levels[TAGC_N_GATHER_LEVELS - 1]);
        const tagc_layout_flat *flat = &s->layout->flats[i];
        tagc_clock_work(&s->clock, gather_work(s, &flat->gatherer, 1) * (double)flat->n_padded);
    }
    blocked(s, start_s, &s->forecast.wait_gather_s);
    return TAGC_OK;
}

static tagc_status end_exchange(void *context, int unit) {
    simulation *s = context;
    const tagc_layout_unit *u = &s->layout->units[unit];
    const tagc_fsdp_options *o = &s->d->engine;
    double start_s = s->clock.now_s;
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++) tagc_clock_join(&s->clock, &s->jobs[i]);
    blocked(s, start_s, &s->forecast.wait_reduce_s);
    if (!o->exchange_each_micro_step || o->n_micro_steps == 1) return TAGC_OK;
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++)
        touch(s, 12 * (double)s->d->flats[i].n_owned);
    return TAGC_OK;
}

static void clear_gradients(void *context, int unit) {
    simulation *s = context;
    touch(s, 4 * (double)s->layout->units[unit].n_padded);
}

static tagc_status begin_exchange(void *context, int unit) {
    simulation *s = context;
    const tagc_layout_unit *u = &s->layout->units[unit];
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++) {
        tagc_clock_submit(&s->clock, &s->jobs[i]);
        const tagc_reduction *r = &s->d->flats[i].reduction;
        for (int leg = 0; leg < TAGC_N_LEGS; leg++)
            count(s, leg, r->volume.n_bytes[leg], tagc_reduction_remote(r, leg));
    }
    return TAGC_OK;
}

static void pass_done(void *context) {
    (void)context;
}

static const char *unit_name(const void *context, int unit) {
    return ((const simulation *)context)->layout->units[unit].name;
}

static const tagc_order_calls order_calls = {.begin_gather = begin_gather,
                                             .end_gather = end_gather,
                                             .begin_exchange = begin_exchange,
                                             .end_exchange = end_exchange,
                                             .clear_gradients = clear_gradients,
                                             .pass_done = pass_done,
                                             .name = unit_name};

/* ---- a micro-step ---- */

static tagc_status call(simulation *s, const tagc_call *c) {
    if (c->kind == TAGC_CALL_COMPUTE) {
        tagc_clock_work(&s->clock, c->flops * s->costs->flop_s);
        return TAGC_OK;
    }
    int unit = s->layout->unit_of_tensor[c->tensor];
    switch (c->kind) {
    case TAGC_CALL_USE:
        return tagc_order_use(&s->order, unit);
    case TAGC_CALL_DONE:
        return tagc_order_done(&s->order, unit);
    case TAGC_CALL_GRAD:
        return tagc_order_grad(&s->order, unit);
    default:
        return tagc_order_grad_done(&s->order, unit);
    }
}

static tagc_status run_micro_step(simulation *s) {
    const tagc_program *p = &s->program;
    TAGC_TRY(tagc_order_finish_backward(&s->order));
    TAGC_TRY(tagc_order_give_up(&s->order));
    TAGC_TRY(tagc_order_forward(&s->order, 1));
    for (int i = 0; i < p->n_forward; i++) TAGC_TRY(call(s, &p->calls[i]));
    TAGC_TRY(tagc_order_backward(&s->order));
    for (int i = p->n_forward; i < p->n_calls; i++) TAGC_TRY(call(s, &p->calls[i]));
    return TAGC_OK;
}

/* As in step.c: with sharding GRAD a unit's gather begins when its owners have updated it. */
static tagc_status update(simulation *s) {
    tagc_order_make_absent(&s->order);
    for (int unit = 0; unit < s->layout->n_units; unit++) {
        const tagc_layout_unit *u = &s->layout->units[unit];
        double n_owned = 0;
        for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++)
            n_owned += (double)s->d->flats[i].n_owned;
        tagc_clock_work(&s->clock, n_owned * s->costs->optimizer_s);
        if (s->d->engine.sharding == TAGC_SHARD_GRAD) TAGC_TRY(tagc_order_begin_gather(&s->order, unit));
    }
    return TAGC_OK;
}

static tagc_status finish_step(simulation *s) {
    double n_ranks = s->d->setup->world_size;
    TAGC_TRY(tagc_order_finish_backward(&s->order));
    TAGC_TRY(tagc_order_end_exchanges(&s->order));
    TAGC_TRY(tagc_order_end_gathers(&s->order));
    tagc_sim_transfer norm = {.remote_bytes = (double)tagc_norm_bytes((int)n_ranks)};
    double share = n_ranks > 1 ? (n_ranks - n_ranks / s->d->setup->n_hosts) / (n_ranks - 1) : 0;
    count(s, TAGC_LEG_CONTROL, norm.remote_bytes, norm.remote_bytes * share);
    double start_s = s->clock.now_s;
    tagc_clock_post(&s->clock, &norm);
    tagc_clock_wait(&s->clock, &norm);
    blocked(s, start_s, &s->forecast.wait_reduce_s);
    start_s = s->clock.now_s;
    TAGC_TRY(update(s));
    s->forecast.optimizer_s = s->clock.now_s - start_s;
    tagc_order_end_step(&s->order);
    return TAGC_OK;
}

/* ---- a step ---- */

static void find_used_backward(simulation *s) {
    for (int i = s->program.n_forward; i < s->program.n_calls; i++)
        if (s->program.calls[i].kind == TAGC_CALL_USE)
            s->order.units[s->layout->unit_of_tensor[s->program.calls[i].tensor]].used_backward = 1;
}

static tagc_status make_order(simulation *s) {
    const tagc_layout *layout = s->layout;
    TAGC_TRY(tagc_order_create(&order_calls, s, &s->options, layout->n_units, layout->n_buffers,
                               layout->backward_order, &s->order));
    s->order.observer = s->d->observer;
    for (int i = 0; i < layout->n_units; i++) tagc_order_set_unit(&s->order, i, &layout->units[i]);
    return TAGC_OK;
}

static tagc_status prepare(simulation *s) {
    const tagc_setup *setup = s->d->setup;
    size_t n_flats = (size_t)s->layout->n_flats;
    s->gathers = calloc(n_flats * TAGC_N_GATHER_LEVELS, sizeof *s->gathers);
    s->jobs = calloc(n_flats, sizeof *s->jobs);
    if (!s->gathers || !s->jobs)
        return tagc_fail(TAGC_ERR_MEMORY, "no memory to simulate %d units", s->layout->n_units);
    TAGC_TRY(tagc_program_create(&setup->model, setup->n_batch, setup->n_tokens, &s->program));
    TAGC_TRY(make_order(s));
    find_used_backward(s);
    for (size_t i = 0; i < n_flats; i++)
        TAGC_TRY(tagc_job_create(&s->d->flats[i].reduction, s->costs->n_codec >= 0 ? s->costs : NULL,
                                 &s->jobs[i]));
    return TAGC_OK;
}

static void destroy(simulation *s) {
    for (int i = 0; s->jobs && i < s->layout->n_flats; i++) tagc_job_destroy(&s->jobs[i]);
    tagc_order_destroy(&s->order);
    free(s->gathers);
    free(s->jobs);
    tagc_program_destroy(&s->program);
}

/* The machine and links of one rank: the ranks of a host share them, and hosts may share a machine. */
static tagc_sim_machine machine_of(const tagc_setup *setup, const tagc_costs *costs,
                                   const tagc_plan_link *link) {
    int per_host = setup->world_size / setup->n_hosts;
    int n_machines = setup->n_machines > 0 ? setup->n_machines : setup->n_hosts;
    return (tagc_sim_machine){.latency_s = link->latency_s,
                              .large_latency_s = link->large_latency_s,
                              .large_bytes = TAGC_LARGE_MESSAGE_BYTES,
                              .remote_bytes_per_s = link->bytes_per_s * costs->link_share / per_host,
                              .local_bytes_per_s =
                                  link->host_bytes_per_s > 0 ? link->host_bytes_per_s : (double)INFINITY,
                              .overhead_s = costs->overhead_s,
                              .queue_bytes = costs->queue_bytes,
                              .cores = costs->cores * n_machines / setup->world_size,
                              .cpu_s_per_byte = costs->cpu_s_per_byte,
                              .poll_cores = costs->poll_cores};
}

static tagc_status run_steps(const tagc_deployment *d, const tagc_costs *costs, const tagc_plan_link *link,
                             int n_micro_steps, tagc_forecast *forecast) {
    simulation s = {.d = d, .layout = d->layout, .costs = costs, .options = d->engine};
    s.options.n_micro_steps = n_micro_steps; /* of which the first ones are simulated */
    tagc_sim_machine machine = machine_of(d->setup, costs, link);
    tagc_clock_init(&s.clock, &machine);
    s.clock.worker_cores = d->engine.reducer.n_threads;
    tagc_status status = prepare(&s);
    /* A step begins with the gathers that the update before it left under way. */
    if (status == TAGC_OK && d->engine.sharding == TAGC_SHARD_GRAD) status = update(&s);
    double start_s = s.clock.now_s, comm_s = s.clock.comm_s;
    s.forecast = (tagc_forecast){0};
    for (int i = 0; status == TAGC_OK && i < n_micro_steps; i++) status = run_micro_step(&s);
    if (status == TAGC_OK) status = finish_step(&s);
    if (status == TAGC_OK) {
        s.forecast.iteration_s = s.clock.now_s - start_s;
        s.forecast.comm_s = s.clock.comm_s - comm_s;
        s.forecast.codec_s = s.clock.codec_s;
        s.forecast.compute_s = s.forecast.iteration_s - s.forecast.wait_gather_s - s.forecast.wait_reduce_s -
                               s.forecast.optimizer_s;
        *forecast = s.forecast;
    }
    destroy(&s);
    return status;
}

/* Micro-steps in the middle are equal: a few are simulated, the rest are added. */
tagc_status tagc_deployment_run(const tagc_deployment *d, const tagc_costs *costs, const tagc_plan_link *link,
                                tagc_forecast *out) {
    tagc_costs free_costs;
    tagc_costs_init(&free_costs);
    free_costs.n_codec = -1; /* no cost is known, and none is asked for */
    if (!costs) costs = &free_costs;
    int n = d->engine.n_micro_steps, n_more = n - MAX_WHOLE_STEPS;
    if (n_more <= 0) return run_steps(d, costs, link, n, out);
    tagc_forecast before;
    double *value = (double *)out, *value_before = (double *)&before;
    TAGC_TRY(run_steps(d, costs, link, MAX_WHOLE_STEPS - 1, &before));
    TAGC_TRY(run_steps(d, costs, link, MAX_WHOLE_STEPS, out));
    for (size_t i = 0; i < sizeof *out / sizeof *value; i++)
        value[i] += n_more * (value[i] - value_before[i]);
    return TAGC_OK;
}

void tagc_costs_init(tagc_costs *costs) {
    *costs = (tagc_costs){.codec_factor = 1, .link_share = 1, .cores = 1e9};
}

void tagc_costs_give(tagc_costs *costs, double flop_s, double codec_s, double optimizer_s) {
    static const tagc_codec_cost kinds[] = {{.exchange = TAGC_EXCHANGE_PACKED, .sparsity = 0.9875},
                                            {.exchange = TAGC_EXCHANGE_SKETCH, .sparsity = 0.9875},
                                            {.exchange = TAGC_EXCHANGE_DIRECT, .sparsity = 0.9875},
                                            {.exchange = TAGC_EXCHANGE_DIRECT, .sparsity = 0}};
    tagc_costs_init(costs);
    costs->flop_s = flop_s;
    costs->optimizer_s = optimizer_s;
    for (size_t i = 0; codec_s >= 0 && i < sizeof kinds / sizeof kinds[0]; i++) {
        tagc_codec_cost *codec = &costs->codec[costs->n_codec++];
        *codec = kinds[i];
        for (int phase = 0; phase < TAGC_PHASE_WAIT; phase++)
            codec->elem_s[phase] = codec_s / TAGC_PHASE_WAIT;
    }
}

tagc_status tagc_plan_simulate(const tagc_setup *setup, const tagc_costs *costs, const tagc_plan_link *link,
                               tagc_forecast *out) {
    tagc_deployment d;
    if (!(link->bytes_per_s > 0) || !(link->latency_s >= 0) || !(link->large_latency_s >= 0))
        return tagc_fail(TAGC_ERR_ARGUMENT, "a link of %g bytes per second and a latency of %g s",
                         link->bytes_per_s, link->latency_s);
    TAGC_TRY(tagc_deployment_create(setup, &d));
    tagc_status status = tagc_deployment_run(&d, costs, link, out);
    tagc_deployment_destroy(&d);
    return status;
}
