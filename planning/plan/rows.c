/* Rows of a plan: from what was measured or given to bytes, memory and time. */
#include "plan/rows.h"

#include "core/status.h"

static int compresses(const tagc_setup *setup) {
    return setup->engine.policy != TAGC_POLICY_NONE && setup->engine.reducer.exchange != TAGC_EXCHANGE_DENSE;
}

/* What direct sends does not depend on what others keep, where nothing comes back. */
static int has_union(const tagc_setup *setup) {
    int comes_back = setup->placement == TAGC_PLACE_NONE || setup->placement == TAGC_PLACE_HYBRID;
    return compresses(setup) && (comes_back || setup->engine.reducer.exchange != TAGC_EXCHANGE_DIRECT);
}

/* Measured, or as many as the sparsity lets. */
static void find_sent(const tagc_plan_inputs *inputs, tagc_plan_row *row) {
    tagc_setup *s = &row->setup;
    if (!compresses(s) || s->engine.reducer.exchange != TAGC_EXCHANGE_DIRECT) return;
    s->sent_density = 1 - s->engine.reducer.sparsity;
    (void)tagc_points_sent(&inputs->profile, s->engine.reducer.sparsity, &s->sent_density);
}

/* Given, measured, or as if ranks chose independently of each other. */
static void find_union(const tagc_plan_inputs *inputs, tagc_plan_row *row) {
    row->setup.union_density = -1;
    if (!has_union(&row->setup)) return;
    row->union_source = "independent choices";
    if (inputs->union_density > 0) {
        row->setup.union_density = inputs->union_density;
        row->union_source = "given";
    } else if (tagc_points_union(&inputs->profile, row->setup.engine.reducer.sparsity,
                                 tagc_setup_senders(&row->setup), &row->setup.union_density)) {
        row->union_source = "profile";
    } else {
        row->is_union_guessed = 1;
    }
    row->setup.union_density = tagc_setup_union(&row->setup);
}

static void forecast(const tagc_plan_inputs *inputs, tagc_plan_row *row) {
    int per_host = row->setup.world_size / row->setup.n_hosts;
    if (!inputs->has_costs) {
        snprintf(row->note, sizeof row->note, "no time without --profile or --compute-s");
    } else if (inputs->n_links == 0) {
        snprintf(row->note, sizeof row->note, "no time without --link-rate or --bytes-per-s");
    } else if ((row->setup.placement == TAGC_PLACE_HYBRID || row->setup.engine.two_level) && per_host > 1 &&
               !inputs->has_host_rate) {
        snprintf(row->note, sizeof row->note, "no time for %s without --host-rate",
                 row->setup.engine.two_level ? "two levels" : "hybrid");
    }
    for (int i = 0; !row->note[0] && i < inputs->n_links; i++) {
        if (tagc_plan_simulate(&row->setup, &inputs->costs, &inputs->links[i], &row->forecasts[i]) == TAGC_OK)
            continue;
        row->forecasts[i] = (tagc_forecast){0};
        snprintf(row->note, sizeof row->note, "no time: %.200s", tagc_last_error());
    }
}

tagc_status tagc_plan_make_row(const tagc_plan_inputs *inputs, tagc_plan_row *row) {
    find_sent(inputs, row);
    find_union(inputs, row);
    TAGC_TRY(tagc_setup_check(&row->setup));
    forecast(inputs, row);
    tagc_status status = tagc_plan_count(&row->setup, &row->volume, &row->memory);
    if (status == TAGC_OK) tagc_plan_count_card(row);
    return status == TAGC_OK ? status : tagc_fail_in(status, "arm %s", row->arm);
}

double tagc_plan_bits(const tagc_plan_row *row, double n_bytes, uint64_t n_params) {
    double n_ranks = row->setup.world_size;
    return n_ranks > 1 && n_params > 0 ? 8 * n_bytes / (double)n_params * n_ranks / (n_ranks - 1) : 0;
}

double tagc_plan_sum(const double legs[TAGC_N_LEGS]) {
    double all = 0;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) all += legs[leg];
    return all;
}

/* Of large messages and of small ones. */
static double large_ways(const tagc_points *profile) {
    const tagc_plan_link *measured = profile->n_points > 0 ? &profile->points[0].link : NULL;
    if (!measured || !(measured->latency_s > 0)) return TAGC_LARGE_MESSAGE_WAYS;
    return measured->large_latency_s > 0 ? measured->large_latency_s / measured->latency_s : 1;
}

tagc_status tagc_plan_cross_links(tagc_plan_inputs *inputs, const double *latencies_s, int n_latencies,
                                  double host_bytes_per_s) {
    int n = inputs->n_links * n_latencies;
    if (n > TAGC_PLAN_MAX_LIST)
        return tagc_fail(TAGC_ERR_ARGUMENT, "--link-rate and --latency make %d links, allowed are %d", n,
                         TAGC_PLAN_MAX_LIST);
    for (int i = n - 1; i >= 0; i--) { /* backwards, so that no rate is overwritten before it is copied */
        double latency_s = latencies_s[i % n_latencies];
        inputs->links[i] = inputs->links[i / n_latencies];
        inputs->line_bits_per_s[i] = inputs->line_bits_per_s[i / n_latencies];
        inputs->links[i].latency_s = latency_s;
        inputs->links[i].large_latency_s = latency_s * large_ways(&inputs->profile);
        inputs->links[i].host_bytes_per_s = host_bytes_per_s;
    }
    inputs->n_links = n;
    return TAGC_OK;
}
