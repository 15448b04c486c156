/* Makes the measurements of --exchange auto before the engine exists, since buckets are part of its layout. There is no
 * step to time yet, so a small model of the same width gives the speed of computing. */
#include "auto/candidates.h"

#include "core/clock.h"
#include "core/status.h"
#include "launch/over_ranks.h"
#include "plan/choose.h"
#include <stdio.h>
#include <stdlib.h>

enum { PROBE_LAYERS = 2, PROBE_TOKENS = 128, PROBE_WORDS = 512 };

static const double tolerance = 0.02;        /* a smaller bucket may be so much slower than the fastest */
static const double optimizer_elem_s = 2e-9; /* of AdamW, about the time of its memory accesses */

/* ---- computing ---- */

/* All tensors share one array, all gradients another: only the time counts. */
typedef struct probe {
    float *values, *gradient; /* of the largest tensor */
} probe;

static tagc_status use(void *context, int tensor, const float **out) {
    (void)tensor;
    *out = ((probe *)context)->values;
    return TAGC_OK;
}

static void done(void *context, int tensor) {
    (void)context, (void)tensor;
}

static tagc_status grad(void *context, int tensor, float **out) {
    (void)tensor;
    *out = ((probe *)context)->gradient;
    return TAGC_OK;
}

static tagc_status grad_done(void *context, int tensor) {
    (void)context, (void)tensor;
    return TAGC_OK;
}

static tagc_status run_probe(tagc_gpt2 *model, const tagc_params *params, int n_tokens, double *seconds) {
    int tokens[PROBE_TOKENS] = {0};
    double loss, start_s = tagc_clock_s();
    TAGC_TRY(tagc_gpt2_forward(model, params, tokens, tokens, 1, n_tokens, &loss));
    TAGC_TRY(tagc_gpt2_backward(model, params, 1.0f));
    *seconds = tagc_clock_s() - start_s;
    return TAGC_OK;
}

/* Seconds per floating point operation of a model of the same width. */
static tagc_status time_computing(const tagc_auto_setup *setup, double *flop_s) {
    tagc_setup small = {.model = setup->model, .world_size = 1, .n_hosts = 1, .n_batch = 1};
    small.n_tokens = setup->n_tokens < PROBE_TOKENS ? setup->n_tokens : PROBE_TOKENS;
    if (small.model.n_layer > PROBE_LAYERS) small.model.n_layer = PROBE_LAYERS;
    if (small.model.vocab_size > PROBE_WORDS) small.model.vocab_size = PROBE_WORDS;
    tagc_fsdp_options_init(&small.engine);
    size_t most = 0;
    for (int i = 0; i < tagc_gpt2_n_tensors(&small.model); i++) {
        tagc_tensor_info info;
        tagc_gpt2_tensor(&small.model, i, &info);
        most = info.n_elems > most ? info.n_elems : most;
    }
    probe p = {calloc(most, sizeof(float)), calloc(most, sizeof(float))};
    tagc_params params = {&p, use, done, grad, grad_done};
    tagc_gpt2 *model = NULL;
    double seconds = 0;
    tagc_status status = TAGC_OK;
    if (!p.values || !p.gradient) status = tagc_fail(TAGC_ERR_MEMORY, "no memory to time a model");
    for (size_t i = 0; status == TAGC_OK && i < most; i++) p.values[i] = i % 2 ? 0.01f : -0.01f;
    if (status == TAGC_OK) status = tagc_gpt2_create(&small.model, 1, small.n_tokens, &model);
    for (int turn = 0; status == TAGC_OK && turn < 2;
         turn++) /* the first turn touches memory for the first time */
        status = run_probe(model, &params, small.n_tokens, &seconds);
    *flop_s = seconds / tagc_setup_flops(&small);
    tagc_gpt2_destroy(model);
    free(p.values);
    free(p.gradient);
    return status;
}

/* ---- choosing ---- */

/* Dense and compressed units have different best buckets. If auto will choose between them, take that of the faster. */
static tagc_status choose(const tagc_auto_setup *setup, const tagc_machine *machine, double flop_s,
                          int chooses_exchange, tagc_bucket_choice *out) {
    tagc_setup plan = {.model = setup->model, .n_batch = setup->n_batch, .n_tokens = setup->n_tokens};
    tagc_costs costs;
    tagc_bucket_choice dense;
    plan.engine = setup->engine;
    tagc_fsdp_stats stats = {.compute_s = flop_s * tagc_setup_flops(&plan)};
    int n_owners = setup->engine.sharding == TAGC_SHARD_NONE ? 1 : tagc_comm_world_size(setup->comm);
    stats.optimizer_s = optimizer_elem_s * (double)tagc_gpt2_n_params(&setup->model) / n_owners;
    tagc_auto_plan(setup, machine, &stats, &plan, &costs);
    TAGC_TRY(tagc_plan_choose_bucket(&plan, &costs, &machine->link, tolerance, out));
    if (!chooses_exchange) return TAGC_OK;
    plan.engine.policy = TAGC_POLICY_NONE;
    plan.engine.mild.exchange = TAGC_EXCHANGE_DENSE;
    TAGC_TRY(tagc_plan_choose_bucket(&plan, &costs, &machine->link, tolerance, &dense));
    if (dense.chosen_s <= out->chosen_s) *out = dense;
    return TAGC_OK;
}

static void explain(const tagc_auto_setup *setup, const tagc_machine *machine,
                    const tagc_bucket_choice *choice) {
    char line[256];
    int n =
        snprintf(line, sizeof line, "buckets: link %.3g Gbit/s, %.0f us: ", machine->link.bytes_per_s * 8e-9,
                 machine->link.latency_s * 1e6);
    if (choice->bucket_elems == 0)
        snprintf(line + n, sizeof line - (size_t)n,
                 "every block stays a unit of its own, forecast %.3g s a step", choice->without_s);
    else
        snprintf(line + n, sizeof line - (size_t)n,
                 "--bucket-elems %llu, %d units, forecast %.3g s a step against %.3g s without",
                 (unsigned long long)choice->bucket_elems, choice->n_units, choice->chosen_s,
                 choice->without_s);
    if (setup->say && tagc_comm_rank(setup->comm) == 0) setup->say(setup->context, line);
}

/* All local work comes before the first collective call that follows the measurement of the link. */
static tagc_status measure(const tagc_auto_setup *setup, tagc_machine *machine, double *flop_s) {
    tagc_candidate candidate = {.compressed = setup->engine.reducer, .mild = setup->engine.mild};
    TAGC_TRY(tagc_machine_measure_codec(&setup->engine, &candidate, 1, machine));
    return time_computing(setup, flop_s);
}

tagc_status tagc_bucket_choose(const tagc_auto_setup *setup, int chooses_exchange, int64_t *bucket_elems) {
    tagc_comm *comm = setup->comm;
    tagc_machine machine = {0};
    tagc_bucket_choice choice = {0};
    double flop_s = 0;
    *bucket_elems = 0;
    if (tagc_comm_world_size(comm) == 1) return TAGC_OK; /* nothing travels */
    TAGC_TRY(tagc_abort_unless_ok(comm, measure(setup, &machine, &flop_s)));
    TAGC_TRY(tagc_machine_find_hosts(comm, &machine));
    TAGC_TRY(tagc_machine_measure_link(comm, &machine));
    TAGC_TRY(tagc_max_over_ranks(comm, &flop_s, 1));
    TAGC_TRY(tagc_abort_unless_ok(comm, choose(setup, &machine, flop_s, chooses_exchange, &choice)));
    TAGC_TRY(tagc_take_from_rank_0(comm, &choice, sizeof choice));
    explain(setup, &machine, &choice);
    *bucket_elems = (int64_t)choice.bucket_elems;
    return TAGC_OK;
}
