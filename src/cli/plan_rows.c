/* One world size of a plan: what each arm holds and sends in each placement, and how long a step takes on each link. */
#include "cli/plan.h"

#include "core/status.h"
#include "files/origin.h"
#include "files/result_file.h"
#include "launch/human.h"
#include "train/progress.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { HUMAN_BYTES = 16 };

static const double bucket_tolerance = 0.02; /* so much slower than the fastest a smaller bucket may be */

/* ---- rows ---- */

static int compresses(const tagc_setup *setup) {
    return setup->engine.policy != TAGC_POLICY_NONE && setup->engine.reducer.exchange != TAGC_EXCHANGE_DENSE;
}

/* What direct sends does not depend on what others keep, where nothing comes back. */
static int has_union(const tagc_setup *setup) {
    int comes_back = setup->placement == TAGC_PLACE_NONE || setup->placement == TAGC_PLACE_HYBRID;
    return compresses(setup) && (comes_back || setup->engine.reducer.exchange != TAGC_EXCHANGE_DIRECT);
}

/* Measured, or as many as the sparsity lets. */
static void find_kept(const tagc_plan_request *request, tagc_plan_row *row) {
    tagc_setup *s = &row->setup;
    if (!compresses(s) || s->engine.reducer.exchange != TAGC_EXCHANGE_DIRECT) return;
    s->kept_density = 1 - s->engine.reducer.sparsity;
    (void)tagc_points_kept(&request->profile, s->engine.reducer.sparsity, &s->kept_density);
}

/* Given, measured, or as if ranks chose independently of each other. */
static void find_union(const tagc_plan_request *request, tagc_plan_row *row) {
    row->setup.union_density = -1;
    if (!has_union(&row->setup)) return;
    row->union_source = "independent choices";
    if (request->options.union_density > 0) {
        row->setup.union_density = request->options.union_density;
        row->union_source = "given";
    } else if (tagc_points_union(&request->profile, row->setup.engine.reducer.sparsity,
                                 tagc_setup_senders(&row->setup), &row->setup.union_density)) {
        row->union_source = "profile";
    }
    row->setup.union_density = tagc_setup_union(&row->setup);
}

static int has_auto_buckets(const tagc_plan_row *row) {
    return row->arm->options.bucket_elems < 0;
}

static tagc_status forecast_link(const tagc_plan_request *request, tagc_plan_row *row, int i) {
    const tagc_plan_link *link = &request->links[i];
    tagc_setup setup = row->setup;
    if (has_auto_buckets(row)) {
        TAGC_TRY(tagc_plan_choose_bucket(&setup, &request->costs, link, bucket_tolerance, &row->buckets[i]));
        setup.engine.bucket_elems = row->buckets[i].bucket_elems;
    }
    return tagc_plan_simulate(&setup, &request->costs, link, &row->forecasts[i]);
}

static void forecast(const tagc_plan_request *request, tagc_plan_row *row) {
    int per_host = row->setup.world_size / row->setup.n_hosts;
    if (!request->has_costs) {
        snprintf(row->note, sizeof row->note, "no time without --profile or --compute-s");
    } else if (request->n_links == 0) {
        snprintf(row->note, sizeof row->note, "no time without --link-rate or --bytes-per-s");
    } else if ((row->setup.placement == TAGC_PLACE_HYBRID || row->setup.engine.two_level) && per_host > 1 &&
               !request->options.host_rate) {
        snprintf(row->note, sizeof row->note, "no time for %s without --host-rate",
                 row->setup.engine.two_level ? "two levels" : "hybrid");
    }
    for (int i = 0; !row->note[0] && i < request->n_links; i++) {
        if (forecast_link(request, row, i) == TAGC_OK) continue;
        row->forecasts[i] = (tagc_forecast){0};
        snprintf(row->note, sizeof row->note, "no time: %.200s", tagc_last_error());
    }
    row->setup.engine.bucket_elems =
        has_auto_buckets(row) ? row->buckets[0].bucket_elems : row->setup.engine.bucket_elems;
}

static tagc_status make_row(const tagc_plan_request *request, int world_size, const tagc_arm *arm,
                            int placement, tagc_plan_row *row) {
    const tagc_plan_options *o = &request->options;
    *row = (tagc_plan_row){.arm = arm};
    tagc_setup *s = &row->setup;
    s->model = request->model;
    s->world_size = world_size;
    s->n_hosts = o->hosts > 0            ? (int)o->hosts
                 : o->ranks_per_host > 0 ? world_size / (int)o->ranks_per_host
                                         : world_size;
    s->n_batch = (int)arm->options.batch_size;
    s->n_tokens = arm->options.seq_len > 0 ? (int)arm->options.seq_len : request->n_tokens;
    tagc_train_fsdp(&arm->options, &s->engine);
    s->placement = placement >= 0 ? placement : tagc_placement_of_sharding(s->engine.sharding);
    /* Whatever an arm says of hosts, these are the ones that there are. */
    if (s->engine.two_level || s->placement == TAGC_PLACE_HYBRID)
        s->engine.ranks_per_host = world_size / s->n_hosts;
    find_kept(request, row);
    find_union(request, row);
    TAGC_TRY(tagc_setup_check(s));
    forecast(request, row);
    tagc_status status = tagc_plan_count(s, &row->volume, &row->memory);
    return status == TAGC_OK ? status : tagc_fail_in(status, "arm %s", arm->name);
}

/* Per parameter of the whole model and optimizer step, before the factor (W-1)/W. */
static double bits(const tagc_plan_row *row, double n_bytes, uint64_t n_params) {
    double n_ranks = row->setup.world_size;
    return n_ranks > 1 && n_params > 0 ? 8 * n_bytes / (double)n_params * n_ranks / (n_ranks - 1) : 0;
}

static double sum(const double legs[TAGC_N_LEGS]) {
    double all = 0;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) all += legs[leg];
    return all;
}

/* ---- tables ---- */

/* With its latency where there are several. */
static const char *link_text(const tagc_plan_request *request, int link, char text[40]) {
    double bits_per_s = request->line_bits_per_s[link] > 0 ? request->line_bits_per_s[link]
                                                           : 8 * request->links[link].bytes_per_s;
    if (bits_per_s >= 0.9995e9)
        snprintf(text, 40, "%.3g Gbit/s", 1e-9 * bits_per_s);
    else
        snprintf(text, 40, "%.3g Mbit/s", 1e-6 * bits_per_s);
    size_t used = strlen(text);
    if (request->n_latencies > 1)
        snprintf(text + used, 40 - used, " %.3g ms", 1e3 * request->links[link].latency_s);
    return text;
}

static const char *time_text(double seconds, char text[24]) {
    if (!(seconds > 0))
        snprintf(text, 24, "-");
    else if (seconds >= 0.9995)
        snprintf(text, 24, "%.2f s", seconds);
    else
        snprintf(text, 24, "%.3g ms", 1e3 * seconds);
    return text;
}

static void print_placements(const tagc_plan_row *rows, int n) {
    int seen[TAGC_PLACE_HYBRID + 1] = {0};
    printf("\n  %-10s %-38s %-22s %-22s %s\n", "placement", "parameters", "gradients", "optimizer",
           "residuals");
    for (int i = 0; i < n; i++) {
        const tagc_placement_info *p = tagc_placement_describe(rows[i].setup.placement);
        if (seen[rows[i].setup.placement]++) continue;
        printf("  %-10s %-38s %-22s %-22s %s%s\n", p->name, p->parameters, p->gradients, p->optimizer,
               p->residuals, p->is_run ? "" : " (not run by tagc train)");
    }
}

static void print_memory(const tagc_plan_row *rows, int n) {
    printf("\n  Memory of a rank, without activations\n  %-28s %-9s %11s %11s %11s %11s %11s %11s\n", "",
           "placement", "parameters", "gradients", "optimizer", "residuals", "buffers", "all");
    for (int i = 0; i < n; i++) {
        const tagc_plan_memory *m = &rows[i].memory;
        const uint64_t values[] = {m->engine.parameters, m->engine.gradients, m->engine.optimizer,
                                   m->engine.residuals,  m->buffers,          m->total};
        printf("  %-28s %-9s", rows[i].arm->name, tagc_placement_describe(rows[i].setup.placement)->name);
        for (int k = 0; k < 6; k++) {
            char text[HUMAN_BYTES];
            printf(" %11s", tagc_human_bytes((double)values[k], text));
        }
        printf("\n");
    }
}

static int is_same_union(const tagc_plan_row *a, const tagc_plan_row *b) {
    return a->union_source && b->union_source && a->setup.union_density == b->setup.union_density;
}

static int is_union_said(const tagc_plan_row *rows, int i) {
    for (int k = 0; k < i; k++)
        if ((k == i - 1 || rows[k].arm == rows[i].arm) && is_same_union(&rows[k], &rows[i])) return 1;
    return 0;
}

static void print_union(const tagc_plan_row *rows, int n, int i) {
    const tagc_plan_row *row = &rows[i];
    const char *placement = NULL; /* named where it makes a difference */
    for (int k = 0; k < n; k++)
        if (rows[k].arm == row->arm && rows[k].union_source && !is_same_union(&rows[k], row))
            placement = tagc_placement_describe(row->setup.placement)->name;
    printf("  %s%s%s%s: ranks together keep %.3f %% of what is compressed (%s)\n", row->arm->name,
           placement ? ", " : "", placement ? placement : "",
           i + 1 < n && is_same_union(row, &rows[i + 1]) ? " and below" : "", 100 * row->setup.union_density,
           row->union_source);
}

static void print_bits(const tagc_plan_row *rows, int n) {
    printf("\n  Sent in an optimizer step: bits per parameter and rank before (W-1)/W; bytes of a host to "
           "others\n"
           "  %-28s %-9s",
           "", "placement");
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) printf(" %8s", tagc_leg_name(leg));
    printf(" %8s %11s\n", "all", "host");
    for (int i = 0; i < n; i++) {
        const tagc_plan_volume *v = &rows[i].volume;
        char text[HUMAN_BYTES];
        printf("  %-28s %-9s", rows[i].arm->name, tagc_placement_describe(rows[i].setup.placement)->name);
        for (int leg = 0; leg < TAGC_N_LEGS; leg++)
            printf(" %8.3f", bits(&rows[i], v->n_bytes[leg], v->n_params));
        printf(" %8.2f %11s\n", bits(&rows[i], sum(v->n_bytes), v->n_params),
               tagc_human_bytes(sum(v->n_host_bytes), text));
    }
    for (int i = 0; i < n; i++) {
        const tagc_plan_row *row = &rows[i], *before = i > 0 ? &rows[i - 1] : NULL;
        if (row->arm->options.exchange == TAGC_TRAIN_EXCHANGE_AUTO && (!before || before->arm != row->arm))
            printf("  %s: planned as if compressing paid for every flat\n", row->arm->name);
        if (row->union_source && !is_union_said(rows, i)) print_union(rows, n, i);
        if (row->volume.unpeeled > 0)
            printf("  %s: %.2f items per cell are too many for its sketch; %.1f %% of them do not peel\n",
                   row->arm->name, row->volume.load, 100 * row->volume.unpeeled);
    }
}

/* What auto came to, link by link. */
static void print_buckets(const tagc_plan_request *request, const tagc_plan_row *row) {
    char text[40];
    if (!has_auto_buckets(row) || row->note[0]) return;
    printf("  %s: bucket-elems", row->arm->name);
    for (int k = 0; k < request->n_links; k++)
        printf("%s %llu at %s (%d units)", k ? "," : "", (unsigned long long)row->buckets[k].bucket_elems,
               link_text(request, k, text), row->buckets[k].n_units);
    printf("\n");
}

static void print_times(const tagc_plan_request *request, const tagc_plan_row *rows, int n) {
    char text[40];
    const char *note = "";
    int width = request->n_latencies > 1 ? 18 : 12;
    printf("\n  Time of an optimizer step, simulated (exposed: computing waits)");
    if (request->n_latencies == 1) printf("; latency %.3g us", 1e6 * request->links[0].latency_s);
    printf("\n  %-28s %-9s", "", "placement");
    for (int k = 0; k < request->n_links; k++)
        printf(" %*s %8s", width, link_text(request, k, text), "exposed");
    printf("\n");
    for (int i = 0; i < n; i++) {
        printf("  %-28s %-9s", rows[i].arm->name, tagc_placement_describe(rows[i].setup.placement)->name);
        for (int k = 0; k < request->n_links; k++) {
            const tagc_forecast *f = &rows[i].forecasts[k];
            printf(" %*s", width, time_text(f->iteration_s, text));
            if (f->iteration_s > 0)
                printf(" %6.0f %%", 100 * (f->wait_gather_s + f->wait_reduce_s) / f->iteration_s);
            else
                printf(" %8s", "");
        }
        printf("\n");
        if (rows[i].note[0] && strcmp(note, rows[i].note) != 0) printf("  (%s)\n", rows[i].note);
        if (rows[i].note[0]) note = rows[i].note;
    }
    for (int i = 0; i < n; i++) print_buckets(request, &rows[i]);
    int seen = tagc_plan_largest_seen(request), n_ranks = rows[0].setup.world_size;
    if (seen > 0 && n_ranks > seen)
        printf("  (extrapolated: the costs come from %d ranks; what it takes to talk to %d is not in them)\n",
               seen, n_ranks);
}

static int is_local(const tagc_plan_row *row) {
    return row->setup.engine.local_steps > 0;
}

/* The fastest over a link with or without local steps; NULL: there is none with a time. */
static const tagc_plan_row *fastest(const tagc_plan_row *rows, int n, int link, int with_local_steps) {
    const tagc_plan_row *best = NULL;
    for (int i = 0; i < n; i++)
        if (is_local(&rows[i]) == with_local_steps && rows[i].forecasts[link].iteration_s > 0 &&
            (!best || rows[i].forecasts[link].iteration_s < best->forecasts[link].iteration_s))
            best = &rows[i];
    return best;
}

/* Local steps cost loss, so they have to save this much; tagc.torch.advise() asks for the same. */
static const double least_local_gain = 1.2;

static void print_local(const tagc_plan_request *request, const tagc_plan_row *rows, int n) {
    int is_said = 0;
    for (int k = 0; k < request->n_links; k++) {
        const tagc_plan_row *local = fastest(rows, n, k, 1), *every = fastest(rows, n, k, 0);
        char link[40], a[24], b[24];
        if (!local || !every) continue;
        if (!is_said++) printf("\n  Local steps or an exchange at every step\n");
        double with_s = local->forecasts[k].iteration_s, without_s = every->forecasts[k].iteration_s;
        printf("  %s: %s %s a step and %.3f bits, %s %s and %.2f bits: ", link_text(request, k, link),
               local->arm->name, time_text(with_s, a),
               bits(local, sum(local->volume.n_bytes), local->volume.n_params), every->arm->name,
               time_text(without_s, b), bits(every, sum(every->volume.n_bytes), every->volume.n_params));
        if (without_s >= least_local_gain * with_s)
            printf("local steps are %.2f times as fast\n", without_s / with_s);
        else
            printf(
                "exchange at every step; local steps would be %.2f times as fast, less than the %g that are "
                "worth their loss\n",
                without_s / with_s, least_local_gain);
    }
    if (is_said) printf("  (what local steps cost in loss: docs/choosing-options.md)\n");
}

static void print_world(const tagc_plan_request *request, const tagc_plan_row *rows, int n) {
    const tagc_setup *s = &rows[0].setup;
    char params[HUMAN_BYTES];
    printf("\n%s, %s parameters: %d rank%s on %d host%s, %d x %d tokens a rank and micro-step\n",
           request->model_name, tagc_human((double)rows[0].volume.n_params, params), s->world_size,
           s->world_size > 1 ? "s" : "", s->n_hosts, s->n_hosts > 1 ? "s" : "", s->n_batch, s->n_tokens);
    print_placements(rows, n);
    print_memory(rows, n);
    print_bits(rows, n);
    if (request->has_costs && request->n_links > 0) {
        print_times(request, rows, n);
        print_local(request, rows, n);
    } else {
        printf("\n  (%s)\n", rows[0].note);
    }
}

/* ---- JSON ---- */

static json_t *memory_json(const tagc_plan_memory *m) {
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "parameters", (json_int_t)m->engine.parameters,
                     "gradients", (json_int_t)m->engine.gradients, "optimizer",
                     (json_int_t)m->engine.optimizer, "residuals", (json_int_t)m->engine.residuals, "buffers",
                     (json_int_t)m->buffers, "total", (json_int_t)m->total, "state", (json_int_t)m->state);
}

static json_t *placement_json(int placement) {
    const tagc_placement_info *p = tagc_placement_describe(placement);
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:b}", "name", p->name, "parameters", p->parameters,
                     "gradients", p->gradients, "optimizer", p->optimizer, "residuals", p->residuals,
                     "is_run", p->is_run);
}

static json_t *row_json(const tagc_plan_row *row, int link) {
    const tagc_plan_volume *v = &row->volume;
    const tagc_forecast *f = link >= 0 ? &row->forecasts[link] : NULL;
    double n_bits[TAGC_N_LEGS], none = (double)NAN;
    int has_time = f && f->iteration_s > 0;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) n_bits[leg] = bits(row, v->n_bytes[leg], v->n_params);
    json_t *json = json_pack(
        "{s:s, s:o, s:o, s:o, s:o, s:o, s:I, s:o, s:o}", "arm", row->arm->name, "placement",
        placement_json(row->setup.placement), "memory_bytes", memory_json(&row->memory), "n_bytes_sent",
        tagc_json_leg_reals(v->n_bytes), "n_host_bytes_sent", tagc_json_leg_reals(v->n_host_bytes),
        "bits_per_param", tagc_json_leg_reals(n_bits), "n_compressed", (json_int_t)v->n_compressed,
        "compressed_bits_per_param", tagc_json_real(bits(row, v->n_bytes_compressed, v->n_compressed)),
        "union_density", row->union_source ? tagc_json_real(row->setup.union_density) : json_null());
    json_object_set_new(json, "union_source",
                        row->union_source ? json_string(row->union_source) : json_null());
    uint64_t bucket_elems =
        has_auto_buckets(row) && link >= 0 ? row->buckets[link].bucket_elems : row->setup.engine.bucket_elems;
    json_object_set_new(json, "bucket_elems", json_integer((json_int_t)bucket_elems));
    json_object_set_new(json, "n_mild", json_integer((json_int_t)v->n_mild));
    json_object_set_new(json, "kept_density",
                        row->setup.kept_density > 0 ? tagc_json_real(row->setup.kept_density) : json_null());
    json_object_set_new(json, "load", v->load > 0 ? tagc_json_real(v->load) : json_null());
    json_object_set_new(json, "unpeeled", v->load > 0 ? tagc_json_real(v->unpeeled) : json_null());
    json_object_set_new(json, "iteration_s", tagc_json_real(has_time ? f->iteration_s : none));
    json_object_set_new(json, "exposed_s",
                        tagc_json_real(has_time ? f->wait_gather_s + f->wait_reduce_s : none));
    json_object_set_new(json, "compute_s", tagc_json_real(has_time ? f->compute_s : none));
    json_object_set_new(json, "wait_gather_s", tagc_json_real(has_time ? f->wait_gather_s : none));
    json_object_set_new(json, "wait_reduce_s", tagc_json_real(has_time ? f->wait_reduce_s : none));
    json_object_set_new(json, "optimizer_s", tagc_json_real(has_time ? f->optimizer_s : none));
    json_object_set_new(json, "note", row->note[0] ? json_string(row->note) : json_null());
    return json;
}

/* link: -1 when there is none. */
static json_t *plan_json(const tagc_plan_request *request, const tagc_plan_row *rows, int n, int link) {
    const tagc_setup *s = &rows[0].setup;
    const tagc_gpt2_config *c = &s->model;
    json_t *list = json_array(), *about_link = json_null();
    for (int i = 0; i < n; i++) json_array_append_new(list, row_json(&rows[i], link));
    if (link >= 0) {
        const tagc_plan_link *l = &request->links[link];
        double line = request->line_bits_per_s[link];
        about_link =
            json_pack("{s:f, s:f, s:f, s:o, s:o}", "latency_s", l->latency_s, "large_latency_s",
                      fmax(l->large_latency_s, l->latency_s), "bytes_per_s", l->bytes_per_s,
                      "line_bits_per_s", line > 0 ? json_real(line) : json_null(), "host_bytes_per_s",
                      l->host_bytes_per_s > 0 ? json_real(l->host_bytes_per_s) : json_null());
    }
    json_t *model = json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:b, s:I}", "name", request->model_name,
                              "n_layer", c->n_layer, "n_head", c->n_head, "n_embd", c->n_embd, "block_size",
                              c->block_size, "vocab_size", c->vocab_size, "tied", c->tied, "n_params",
                              (json_int_t)rows[0].volume.n_params);
    return json_pack("{s:s, s:i, s:o, s:o, s:i, s:i, s:i, s:i, s:b, s:o, s:o, s:o}", "type", "plan", "format",
                     1, "origin", tagc_origin("plan", request->argc, request->argv, NULL), "model", model,
                     "world_size", s->world_size, "n_hosts", s->n_hosts, "batch_size", s->n_batch, "seq_len",
                     s->n_tokens, "simulated", 1, "link", about_link, "costs", tagc_plan_costs_json(request),
                     "rows", list);
}

/* Of several placements some do not go with every arm. */
static void add_left_out(char *text, size_t n_bytes, const char *placement) {
    size_t used = strlen(text);
    snprintf(text + used, n_bytes - used, "  (left out, %s: %.200s)\n", placement, tagc_last_error());
}

tagc_status tagc_plan_world(const tagc_plan_request *request, int world, json_t *results) {
    int n_placements = request->n_placements > 0 ? request->n_placements : 1, n = 0;
    tagc_plan_row *rows = calloc((size_t)(request->n_arms * n_placements), sizeof *rows);
    if (!rows) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for a plan");
    tagc_status status = TAGC_OK, refusal = TAGC_OK;
    char left_out[1024] = "";
    for (int i = 0; status == TAGC_OK && i < request->n_arms; i++)
        for (int k = 0; status == TAGC_OK && k < n_placements; k++) {
            status = make_row(request, request->worlds[world], &request->arms[i],
                              request->n_placements > 0 ? request->placements[k] : -1, &rows[n]);
            n += status == TAGC_OK;
            if ((status != TAGC_ERR_UNSUPPORTED && status != TAGC_ERR_ARGUMENT) || request->n_placements < 2)
                continue;
            add_left_out(left_out, sizeof left_out, tagc_placement_describe(request->placements[k])->name);
            refusal = status;
            status = TAGC_OK;
        }
    if (status == TAGC_OK && n == 0)
        status = tagc_fail_in(refusal, "no arm can be placed so, the last because");
    if (status == TAGC_OK && !request->options.train.quiet) {
        print_world(request, rows, n);
        fputs(left_out, stdout);
    }
    if (status == TAGC_OK && request->n_links == 0)
        json_array_append_new(results, plan_json(request, rows, n, -1));
    for (int link = 0; status == TAGC_OK && link < request->n_links; link++)
        json_array_append_new(results, plan_json(request, rows, n, link));
    free(rows);
    return status;
}
