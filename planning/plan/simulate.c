/* Simulates the engine of engine/fsdp: the engine's own order of gathers and exchanges (fsdp/gather_order.h), with a clock in
 * place of the threads and the network of pass.c and step.c. */
#include "core/status.h"
#include "exchange/options.h"
#include "exchange/wire.h"
#include "plan/deployment.h"
#include "plan/program.h"

#include <math.h>
#include <stdlib.h>

enum { MAX_WHOLE_STEPS = 4 };

/* ---- jobs: the order of work and transfers in lib/exchange/direct, whole.c and direct.c. Many small pieces are merged into a few,
 * because the order of waits matters much more than the number of pieces ---- */

enum { MAX_CHUNKS = 16, MAX_PEERS = 12 };
/* Of a job, with room to spare. The longest is direct in two levels with MAX_PEERS batches and sums that return. */
enum { MAX_OPS = 160, MAX_TRANSFERS = 80 };

/* Seconds of work of one step over a whole unit. */
typedef struct codec_work {
    double encode_s, decode_s;
} codec_work;

typedef struct builder {
    tagc_sim_job *job;
    double remote_share; /* of the transfers posted next */
} builder;

/* Every value as fp32 or bf16. */
static int is_plain(const tagc_reducer_options *o) {
    return o->sparsity == 0 && o->format <= TAGC_FORMAT_BF16;
}

/* Selecting and encoding is one pass over what the ranks of a host have added up. */
static codec_work find_work(const tagc_reduction *r, const tagc_costs *costs) {
    if (is_plain(&r->options)) return (codec_work){0, 0};
    double n = (double)r->options.n_elems;
    return (codec_work){costs->encode_s * n, costs->decode_s * n};
}

/* ---- building ---- */

static void add_op(builder *b, tagc_sim_op op) {
    if (b->job->n_ops == MAX_OPS) abort(); /* only a new kind of step could */
    b->job->ops[b->job->n_ops++] = op;
}

static void work(builder *b, double s) {
    if (s > 0) add_op(b, (tagc_sim_op){.kind = TAGC_SIM_WORK, .work_s = s});
}

static void wait(builder *b, int transfer) {
    add_op(b, (tagc_sim_op){.kind = TAGC_SIM_WAIT, .transfer = transfer});
}

/* Returns the transfer's number. */
static int add_transfer(builder *b, double n_bytes) {
    tagc_sim_job *job = b->job;
    if (job->n_transfers == MAX_TRANSFERS) abort();
    job->transfers[job->n_transfers] = (tagc_sim_transfer){.remote_bytes = n_bytes * b->remote_share,
                                                           .local_bytes = n_bytes * (1 - b->remote_share)};
    return job->n_transfers++;
}

static int post(builder *b, int lane, double n_bytes) {
    int transfer = add_transfer(b, n_bytes);
    add_op(b, (tagc_sim_op){.kind = TAGC_SIM_POST, .transfer = transfer, .lane = lane});
    return transfer;
}

/* A few bytes from each rank to each other. */
static void agree(builder *b, int lane, double n_bytes) {
    wait(b, post(b, lane, n_bytes));
}

/* A lane is a round of an exchange, as for tagc_then in lib/exchange. */
static void dense_step(builder *b, const tagc_reduction *r) {
    enum { IN, OUT, AGREEMENT };
    const double *n_bytes = r->volume.n_bytes;
    int depth = r->volume.n_moving;
    int in[MAX_CHUNKS], out[MAX_CHUNKS];
    size_t chunk = r->volume.chunk_elems, shard = (size_t)(r->options.n_elems / (uint64_t)r->n_ranks);
    size_t n_real = chunk ? (shard + chunk - 1) / chunk : 1;
    int n = n_real < MAX_CHUNKS ? (int)n_real : MAX_CHUNKS, is_all = r->options.output != TAGC_OUTPUT_SHARD;
    for (int c = 0; c < n && c < depth; c++) in[c] = post(b, IN, n_bytes[TAGC_LEG_VALUES] / n);
    for (int c = 0; c < n; c++) {
        wait(b, in[c]);
        if (is_all && c >= depth) wait(b, out[c - depth]);
        if (is_all) out[c] = post(b, OUT, n_bytes[TAGC_LEG_RESULT] / n);
        if (c + depth < n) in[c + depth] = post(b, IN, n_bytes[TAGC_LEG_VALUES] / n);
    }
    int agreement = post(b, AGREEMENT, n_bytes[TAGC_LEG_CONTROL]); /* beside the sums */
    for (int c = n > depth ? n - depth : 0; is_all && c < n; c++) wait(b, out[c]);
    wait(b, agreement);
}

enum { ROWS, HEADERS, BODIES, RESULTS, RESULT_RESTS, DIRECT_AGREEMENT };

typedef struct direct_builder {
    builder *b;
    const tagc_reduction *r;
    const codec_work *w;
    int n, n_turns;               /* parcels of other hosts, merged; turns include the own one */
    double turn_share, own_share; /* shares of the unit in a turn */
    double front, rest;           /* bytes of a batch: headers with the start of the bodies, and the rest */
    int front_out[MAX_PEERS], rest_out[MAX_PEERS];
} direct_builder;

/* Among the ranks of a host, before what follows. */
static void exchange_within(builder *b, const tagc_reduction *r, double n_bytes) {
    if (n_bytes == 0) return;
    b->remote_share = r->within_share;
    wait(b, post(b, ROWS, n_bytes));
    b->remote_share = r->remote_share;
}

/* The rank encodes its own fragment last, while others are on the wire. Of several batches, the rest of one is posted as
 * soon as its headers have arrived, between two pieces of work. */
static void send_fragments(direct_builder *d) {
    tagc_sim_transfer *transfers = d->b->job->transfers;
    for (int s = 0; s < d->n_turns; s++) {
        work(d->b, (s < d->n ? d->turn_share : d->own_share) * d->w->encode_s);
        if (s < d->n) d->front_out[s] = post(d->b, HEADERS, d->front);
        if (s >= d->n || d->n == 1) continue;
        d->rest_out[s] = add_transfer(d->b, d->rest);
        transfers[d->front_out[s]].then = &transfers[d->rest_out[s]];
    }
    for (int s = 0; s < d->n; s++) {
        wait(d->b, d->front_out[s]);
        if (d->n == 1) d->rest_out[s] = post(d->b, BODIES, d->rest);
    }
}

/* The sums that return. Those of small units are in one message with their headers. */
static void return_results(builder *b, const tagc_reduction *r, double headers, double results) {
    if (r->volume.eager_bytes > 0 || headers == 0) {
        wait(b, post(b, RESULTS, headers + results));
        return;
    }
    wait(b, post(b, RESULTS, headers));
    wait(b, post(b, RESULT_RESTS, results));
}

static void direct_step(builder *b, const tagc_reduction *r, const codec_work *w) {
    const double *n_bytes = r->volume.n_bytes;
    int n_others = r->n_ranks - 1;
    int n = r->volume.n_parcels < MAX_PEERS ? r->volume.n_parcels : MAX_PEERS;
    double agreement = (double)n_others * TAGC_WIRE_HEADER_BYTES, headers = agreement;
    direct_builder d = {.b = b, .r = r, .w = w, .n = n, .n_turns = n + 1, .own_share = 1.0 / r->n_ranks};
    if (n > 0) {
        double eager = n_others * r->volume.eager_bytes;
        d.turn_share = (1 - d.own_share) / n;
        d.front = (headers + eager) / n;
        double rest = n_bytes[TAGC_LEG_INDEX] + n_bytes[TAGC_LEG_VALUES] - eager;
        d.rest = rest < 1 ? 0 : rest / n; /* less than a byte is rounding */
    }
    send_fragments(&d);
    double results = n_bytes[TAGC_LEG_RESULT];
    double others = n_bytes[TAGC_LEG_CONTROL] - agreement - headers;
    double decode_s = w->decode_s, first = r->sent_density / tagc_reduction_decoded(r);
    for (int s = 0; s < n; s++) {
        wait(b, d.rest_out[s]);
        work(b, first * decode_s * d.turn_share);
    }
    work(b, first * decode_s * d.own_share);
    if (results > 0) {
        return_results(b, r, others, results);
        work(b, (1 - first) * decode_s);
    }
    agree(b, DIRECT_AGREEMENT, agreement);
}

static void destroy_job(tagc_sim_job *job) {
    free(job->ops);
    free(job->transfers);
    *job = (tagc_sim_job){0};
}

/* The work of a reducer on its worker, as a job of the clock. costs NULL: bytes are counted, and the job is empty. */
static tagc_status create_job(const tagc_reduction *r, const tagc_costs *costs, tagc_sim_job *out) {
    *out = (tagc_sim_job){0};
    builder b = {.job = out, .remote_share = r->remote_share};
    int exchange = r->options.exchange;
    if (r->n_ranks * r->n_adding == 1 || !costs)
        return TAGC_OK; /* a single rank sends nothing, and its work is negligible */
    if (exchange != TAGC_EXCHANGE_DIRECT)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "exchange is %s, allowed in a forecast: direct",
                         tagc_exchange_names[exchange]);
    codec_work work = find_work(r, costs);
    out->ops = malloc(MAX_OPS * sizeof *out->ops);
    out->transfers = malloc(MAX_TRANSFERS * sizeof *out->transfers);
    if (!out->ops || !out->transfers) {
        destroy_job(out);
        return tagc_fail(TAGC_ERR_MEMORY, "no memory for the steps of a reducer");
    }
    /* In two levels it begins with the sum over the ranks of the host. */
    exchange_within(&b, r, r->within.n_bytes[TAGC_LEG_VALUES] + r->within.n_bytes[TAGC_LEG_CONTROL]);
    if (r->n_ranks > 1 && tagc_reducer_options_are_whole(&r->options))
        dense_step(&b, r);
    else if (r->n_ranks > 1)
        direct_step(&b, r, &work);
    exchange_within(&b, r, r->within.n_bytes[TAGC_LEG_RESULT]);
    return TAGC_OK;
}

/* ---- a step ---- */

typedef struct simulation {
    const tagc_deployment *d;
    const tagc_layout *layout;
    const tagc_costs *costs;
    int is_timed; /* 0: bytes are counted */
    tagc_fsdp_options options;
    tagc_program program;
    tagc_clock clock;
    tagc_gather_order order;
    tagc_sim_transfer *gathers; /* (n_flats, TAGC_N_GATHER_LEVELS) */
    tagc_sim_job *jobs;         /* (n_flats) */
    tagc_forecast forecast;
} simulation;

static void count(simulation *s, tagc_leg leg, double n_bytes, double remote_bytes) {
    s->forecast.n_bytes[leg] += n_bytes;
    s->forecast.n_remote_bytes[leg] += remote_bytes;
}

static void blocked(simulation *s, double start_s, double *total_s) {
    *total_s += s->clock.now_s - start_s;
}

/* ---- callbacks of the order, as in pass.c ---- */

/* Per element. fp32 and bf16 are copied beside what they take to arrive. */
static double gather_work(const simulation *s, const tagc_gatherer_options *gather, int decodes) {
    int kind = tagc_gatherer_options_kind(gather);
    if (gather->format == TAGC_FORMAT_FP32 || kind == TAGC_GATHER_BF16) return 0;
    return decodes ? s->costs->gather_decode_s : s->costs->gather_encode_s;
}

/* The comm thread starts the second level when the first has arrived, without the caller. */
static void post_gather(simulation *s, int flat) {
    const tagc_gather_plan *plan = &s->d->flats[flat].gather;
    tagc_sim_transfer *levels = s->gathers + (size_t)flat * TAGC_N_GATHER_LEVELS;
    for (int i = 0; i < TAGC_N_GATHER_LEVELS; i++) {
        levels[i] = (tagc_sim_transfer){.remote_bytes = plan->remote_bytes[i],
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
    double start_s = s->clock.now_s;
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++) tagc_clock_join(&s->clock, &s->jobs[i]);
    blocked(s, start_s, &s->forecast.wait_reduce_s);
    return TAGC_OK;
}

static void clear_gradients(void *context, int unit) {
    (void)context, (void)unit;
}

static tagc_status begin_exchange(void *context, int unit) {
    simulation *s = context;
    const tagc_layout_unit *u = &s->layout->units[unit];
    for (int i = u->first_flat; i < u->first_flat + u->n_flats; i++) {
        tagc_clock_submit(&s->clock, &s->jobs[i]);
        const tagc_reduction *r = &s->d->flats[i].reduction;
        for (int leg = 0; leg < TAGC_N_LEGS; leg++)
            count(s, leg, tagc_reduction_bytes(r, leg), tagc_reduction_remote(r, leg));
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
        if (s->d->setup->engine.sharding == TAGC_SHARD_GRAD)
            TAGC_TRY(tagc_order_begin_gather(&s->order, unit));
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
        TAGC_TRY(create_job(&s->d->flats[i].reduction, s->is_timed ? s->costs : NULL, &s->jobs[i]));
    return TAGC_OK;
}

static void destroy(simulation *s) {
    for (int i = 0; s->jobs && i < s->layout->n_flats; i++) destroy_job(&s->jobs[i]);
    tagc_order_destroy(&s->order);
    free(s->gathers);
    free(s->jobs);
    tagc_program_destroy(&s->program);
}

/* The links of one rank, of which the ranks of a host share the one to other hosts. */
static tagc_sim_machine machine_of(const tagc_setup *setup, const tagc_plan_link *link) {
    int per_host = setup->world_size / setup->n_hosts;
    return (tagc_sim_machine){.latency_s = link->latency_s,
                              .remote_bytes_per_s = link->bytes_per_s / per_host,
                              .local_bytes_per_s =
                                  link->host_bytes_per_s > 0 ? link->host_bytes_per_s : (double)INFINITY};
}

static tagc_status run_steps(const tagc_deployment *d, const tagc_costs *costs, const tagc_plan_link *link,
                             int n_micro_steps, tagc_forecast *forecast) {
    static const tagc_costs nothing = {0};
    simulation s = {.d = d,
                    .layout = d->layout,
                    .costs = costs ? costs : &nothing,
                    .is_timed = costs != NULL,
                    .options = d->setup->engine};
    s.options.n_micro_steps = n_micro_steps; /* of which the first ones are simulated */
    tagc_sim_machine machine = machine_of(d->setup, link);
    tagc_clock_init(&s.clock, &machine);
    tagc_status status = prepare(&s);
    /* A step begins with the gathers that the update before it left under way. */
    if (status == TAGC_OK && d->setup->engine.sharding == TAGC_SHARD_GRAD) status = update(&s);
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
    int n = d->setup->engine.n_micro_steps, n_more = n - MAX_WHOLE_STEPS;
    if (n_more <= 0) return run_steps(d, costs, link, n, out);
    tagc_forecast before;
    double *value = (double *)out, *value_before = (double *)&before;
    TAGC_TRY(run_steps(d, costs, link, MAX_WHOLE_STEPS - 1, &before));
    TAGC_TRY(run_steps(d, costs, link, MAX_WHOLE_STEPS, out));
    for (size_t i = 0; i < sizeof *out / sizeof *value; i++)
        value[i] += n_more * (value[i] - value_before[i]);
    return TAGC_OK;
}

tagc_status tagc_plan_simulate(const tagc_setup *setup, const tagc_costs *costs, const tagc_plan_link *link,
                               tagc_forecast *out) {
    tagc_deployment d;
    if (!(link->bytes_per_s > 0) || !(link->latency_s >= 0))
        return tagc_fail(TAGC_ERR_ARGUMENT, "a link of %g bytes per second and a latency of %g s",
                         link->bytes_per_s, link->latency_s);
    TAGC_TRY(tagc_deployment_create(setup, &d));
    tagc_status status = tagc_deployment_run(&d, costs, link, out);
    tagc_deployment_destroy(&d);
    return status;
}
