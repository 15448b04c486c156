/* Simulates a step within a site, and adds the rounds between sites, one for each fragment, divided by local_steps. A delay
 * hides what a round exchanges behind so many steps. */
#include "fsdp/local_steps.h"
#include "core/status.h"
#include "fsdp/agree.h"
#include "plan/deployment.h"
#include <math.h>
#include <stdlib.h>

typedef struct round_plan {
    tagc_layout *layout;
    tagc_reduction *reductions; /* (layout->n_parts) */
    double agree_bytes;         /* of one rank and agreement */
    int n_agreements;           /* of a round: before the exchange, unless there is a delay, and after it */
} round_plan;

/* One site, on one host. */
static tagc_status site_of(const tagc_setup *s, tagc_setup *site) {
    TAGC_TRY(tagc_setup_check(s));
    tagc_fsdp_options engine = tagc_setup_engine(s);
    if (s->placement != TAGC_PLACE_NONE && s->placement != TAGC_PLACE_HYBRID)
        return tagc_fail(TAGC_ERR_ARGUMENT, "local steps are placed as %s, allowed: none or hybrid",
                         tagc_placement_describe(s->placement)->name);
    *site = *s;
    site->engine = tagc_local_inner(&engine);
    site->placement = s->placement == TAGC_PLACE_NONE ? TAGC_PLACE_NONE : TAGC_PLACE_ZERO3;
    site->world_size = tagc_local_site_ranks(&engine);
    site->n_hosts = site->n_machines = 1;
    site->flat_reducers = NULL;
    site->union_density = -1;
    site->kept_density = 0;
    return TAGC_OK;
}

static void destroy_round(round_plan *round) {
    tagc_layout_destroy(round->layout);
    free(round->reductions);
}

static tagc_status make_round(const tagc_setup *s, round_plan *round) {
    tagc_fsdp_options engine = tagc_setup_engine(s);
    *round = (round_plan){.agree_bytes = (double)tagc_agree_bytes(s->world_size),
                          .n_agreements = engine.local_delay > 0 ? 1 : 2};
    TAGC_TRY(tagc_model_layout(&s->model, &engine, s->world_size, &round->layout));
    const tagc_layout *layout = round->layout;
    round->reductions = calloc((size_t)layout->n_parts, sizeof *round->reductions);
    tagc_status status = TAGC_OK;
    if (!round->reductions)
        status = tagc_fail(TAGC_ERR_MEMORY, "no memory to plan %d parts", layout->n_parts);
    for (int i = 0; status == TAGC_OK && i < layout->n_parts; i++) {
        tagc_reduction *r = &round->reductions[i];
        *r = (tagc_reduction){
            .options = layout->parts[i].reducer, .n_ranks = layout->n_sites, .remote_share = 1};
        status = tagc_reduction_count(s, r);
    }
    if (status != TAGC_OK) destroy_round(round);
    return status;
}

/* ---- bytes and memory ---- */

tagc_status tagc_plan_count_local(const tagc_setup *s, tagc_plan_volume *volume, tagc_plan_memory *memory) {
    tagc_setup site;
    round_plan round;
    double per_host = (double)s->world_size / s->n_hosts, share = 1.0 / s->engine.local_steps;
    TAGC_TRY(site_of(s, &site));
    TAGC_TRY(tagc_plan_count(&site, volume, memory));
    TAGC_TRY(make_round(s, &round));
    const tagc_layout *layout = round.layout;
    volume->n_compressed = layout->n_compressed;
    volume->n_mild = layout->n_mild;
    if (memory) {
        uint64_t inner = memory->engine.residuals;
        memory->engine = layout->memory;
        memory->engine.residuals += inner;
    }
    for (int i = 0; i < layout->n_parts; i++) {
        const tagc_reduction *r = &round.reductions[i];
        for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
            volume->n_bytes[leg] += share * r->volume.n_bytes[leg];
            volume->n_host_bytes[leg] += share * per_host * r->volume.n_bytes[leg];
            if (layout->parts[i].class_ == TAGC_CLASS_COMPRESSED && leg <= TAGC_LEG_RESULT)
                volume->n_bytes_compressed += share * r->volume.n_bytes[leg];
        }
        tagc_exchange_memory exchange = {0};
        (void)tagc_reducer_memory(&r->options, r->n_ranks, 0, &exchange);
        if (memory) memory->buffers += exchange.buffers + exchange.spare;
    }
    double n_bytes = share * layout->n_fragments * round.n_agreements * round.agree_bytes;
    double others = s->world_size > 1 ? (s->world_size - per_host) / (s->world_size - 1) : 0;
    volume->n_bytes[TAGC_LEG_CONTROL] += n_bytes;
    volume->n_host_bytes[TAGC_LEG_CONTROL] += n_bytes * per_host * others;
    if (memory)
        memory->total = memory->engine.parameters + memory->engine.gradients + memory->engine.optimizer +
                        memory->engine.residuals + memory->buffers;
    destroy_round(&round);
    return TAGC_OK;
}

/* ---- time ---- */

static void agree(tagc_clock *clock, double n_bytes) {
    tagc_sim_transfer word = {.remote_bytes = n_bytes};
    tagc_clock_post(clock, &word);
    tagc_clock_wait(clock, &word);
}

/* Of one round. */
typedef struct round_times {
    double total_s;    /* not hidden */
    double exchange_s; /* from when it begins to when all is received */
    double outer_s;
} round_times;

/* Begins all parts of a fragment at once, as the engine does, and counts its memory traffic before and after. */
static tagc_status run_round(const round_plan *round, int fragment, const tagc_costs *costs,
                             tagc_clock *clock, round_times *out) {
    const tagc_layout *layout = round->layout;
    tagc_sim_job *jobs = calloc((size_t)layout->n_parts, sizeof *jobs);
    tagc_status status = jobs ? TAGC_OK : tagc_fail(TAGC_ERR_MEMORY, "no memory to simulate a round");
    double n_elems = 0, first_s = clock->now_s;
    int n_jobs = 0;
    for (int i = 0; status == TAGC_OK && i < layout->n_parts; i++) {
        if (layout->parts[i].unit != fragment) continue;
        status = tagc_job_create(&round->reductions[i], costs, &jobs[n_jobs]);
        n_jobs += status == TAGC_OK;
        n_elems += (double)layout->parts[i].n_padded;
    }
    if (status == TAGC_OK) {
        tagc_clock_work(clock,
                        16 * n_elems * costs->byte_s); /* reads anchor and master, writes delta, checks it */
        if (round->n_agreements > 1) agree(clock, round->agree_bytes);
        double begin_s = clock->now_s;
        for (int i = 0; i < n_jobs; i++) tagc_clock_submit(clock, &jobs[i]);
        for (int i = 0; i < n_jobs; i++) tagc_clock_join(clock, &jobs[i]);
        out->exchange_s = clock->now_s - begin_s;
        agree(clock, round->agree_bytes);
        double start_s = clock->now_s;
        tagc_clock_work(clock, 20 * n_elems * costs->byte_s); /* mean, anchor, master */
        out->outer_s = clock->now_s - start_s;
        out->total_s = clock->now_s - first_s;
    }
    for (int i = 0; i < n_jobs; i++) tagc_job_destroy(&jobs[i]);
    free(jobs);
    return status;
}

/* Adds the rounds of all fragments, of which each step has its share. If they follow each other faster than the link
 * carries them, the link decides. */
static tagc_status run_rounds(const tagc_setup *s, const round_plan *round, const tagc_costs *costs,
                              tagc_clock *clock, tagc_forecast *out) {
    double site_s = out->iteration_s, share = 1.0 / s->engine.local_steps;
    double all_s = 0, hidden_s = 0, outer_s = 0;
    for (int i = 0; i < round->layout->n_fragments; i++) {
        round_times times = {0};
        TAGC_TRY(run_round(round, i, costs, clock, &times));
        all_s += times.total_s;
        hidden_s += fmin(times.exchange_s, s->engine.local_delay * site_s);
        outer_s += times.outer_s;
    }
    hidden_s = fmin(hidden_s, s->engine.local_steps * site_s);
    out->iteration_s += share * (all_s - hidden_s);
    out->wait_reduce_s += share * (all_s - hidden_s - outer_s);
    out->optimizer_s += share * outer_s;
    out->comm_s += share * clock->comm_s;
    out->codec_s += share * clock->codec_s;
    return TAGC_OK;
}

tagc_status tagc_plan_simulate_local(const tagc_setup *s, const tagc_costs *costs, const tagc_plan_link *link,
                                     tagc_forecast *out) {
    tagc_setup site;
    round_plan round;
    TAGC_TRY(site_of(s, &site));
    tagc_costs of_site = *costs; /* hosts of a lab may share a machine */
    of_site.cores *= s->n_machines > 0 ? (double)s->n_machines / s->n_hosts : 1;
    TAGC_TRY(tagc_plan_simulate(&site, &of_site, link, out));
    tagc_sim_machine machine = tagc_sim_machine_of(s, costs, link);
    tagc_clock clock;
    double share = 1.0 / s->engine.local_steps;
    TAGC_TRY(make_round(s, &round));
    tagc_clock_init(&clock, &machine);
    clock.worker_cores = s->engine.reducer.n_threads;
    tagc_status status = run_rounds(s, &round, costs, &clock, out);
    for (int i = 0; status == TAGC_OK && i < round.layout->n_parts; i++)
        for (int leg = 0; leg < TAGC_N_LEGS; leg++)
            out->n_bytes[leg] += share * round.reductions[i].volume.n_bytes[leg];
    out->n_bytes[TAGC_LEG_CONTROL] +=
        share * round.layout->n_fragments * round.n_agreements * round.agree_bytes;
    destroy_round(&round);
    return status;
}
