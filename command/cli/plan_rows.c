/* Tables of one world size: what each arm holds and sends in each placement, and how long a step takes on each link. */
#include "cli/plan.h"

#include "core/status.h"
#include "files/result_file.h"
#include "launch/human.h"
#include "train/progress.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { HUMAN_BYTES = 16 };

/* ---- tables ---- */

/* With its latency where there are several. */
static const char *link_text(const tagc_plan_request *request, int link, char text[40]) {
    double bits_per_s = request->inputs.line_bits_per_s[link] > 0
                            ? request->inputs.line_bits_per_s[link]
                            : 8 * request->inputs.links[link].bytes_per_s;
    if (bits_per_s >= 0.9995e9)
        snprintf(text, 40, "%.3g Gbit/s", 1e-9 * bits_per_s);
    else
        snprintf(text, 40, "%.3g Mbit/s", 1e-6 * bits_per_s);
    size_t used = strlen(text);
    if (request->n_latencies > 1)
        snprintf(text + used, 40 - used, " %.3g ms", 1e3 * request->inputs.links[link].latency_s);
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
    for (int i = 0; i < n; i++) {
        if (!tagc_setup_keeps_replicas(&rows[i].setup)) continue;
        printf("  zero3 with deltas: as PyTorch's FSDP2, with a replica of parameters in bf16 (not run by "
               "tagc train)\n");
        break;
    }
}

static void print_memory(const tagc_plan_row *rows, int n) {
    printf("\n  Memory of a rank, without activations\n  %-28s %-9s %11s %11s %11s %11s %11s %11s\n", "",
           "placement", "parameters", "gradients", "optimizer", "residuals", "buffers", "all");
    for (int i = 0; i < n; i++) {
        const tagc_plan_memory *m = &rows[i].memory;
        const uint64_t values[] = {m->engine.parameters, m->engine.gradients, m->engine.optimizer,
                                   m->engine.residuals,  m->buffers,          m->total};
        printf("  %-28s %-9s", rows[i].arm, tagc_placement_describe(rows[i].setup.placement)->name);
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
    printf("  %s%s%s%s: ranks together keep %.3f %% of what is compressed (%s)\n", row->arm,
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
        printf("  %-28s %-9s", rows[i].arm, tagc_placement_describe(rows[i].setup.placement)->name);
        for (int leg = 0; leg < TAGC_N_LEGS; leg++)
            printf(" %8.3f", tagc_plan_bits(&rows[i], v->n_bytes[leg], v->n_params));
        printf(" %8.2f %11s\n", tagc_plan_bits(&rows[i], tagc_plan_sum(v->n_bytes), v->n_params),
               tagc_human_bytes(tagc_plan_sum(v->n_host_bytes), text));
    }
    for (int i = 0; i < n; i++) {
        const tagc_plan_row *row = &rows[i];
        if (row->union_source && !is_union_said(rows, i)) print_union(rows, n, i);
        if (row->volume.unpeeled > 0)
            printf("  %s: %.2f items per cell are too many for its sketch; %.1f %% of them do not peel\n",
                   row->arm, row->volume.load, 100 * row->volume.unpeeled);
    }
}

static const char *bytes_text(double n_bytes, char text[HUMAN_BYTES]) {
    return isnan(n_bytes) ? "-" : tagc_human_bytes(n_bytes, text);
}

/* Where hosts have several ranks. */
static void print_card(const tagc_plan_row *rows, int n) {
    int per_host = rows[0].setup.world_size / rows[0].setup.n_hosts;
    if (per_host == 1 || rows[0].setup.n_hosts == 1) return;
    printf(
        "\n  Through the network card of a host in an optimizer step, in each direction; and in other ways: "
        "a "
        "ring of all\n  ranks, each rank by itself (one level), ranks of a host first among themselves (two "
        "levels)\n  %-28s %-9s %11s %11s %11s %11s %11s %11s %11s\n",
        "", "placement", "gradients", "parameters", "all", "of a rank", "ring", "one level", "two levels");
    for (int i = 0; i < n; i++) {
        const double *legs = rows[i].volume.n_host_bytes;
        double all = tagc_plan_sum(legs), gathered = legs[TAGC_LEG_GATHER];
        const double values[] = {all - gathered,         gathered,          all,
                                 all / per_host,         rows[i].card.ring, rows[i].card.one_level,
                                 rows[i].card.two_levels};
        printf("  %-28s %-9s", rows[i].arm, tagc_placement_describe(rows[i].setup.placement)->name);
        for (int k = 0; k < 7; k++) {
            char text[HUMAN_BYTES];
            printf(" %11s", bytes_text(values[k], text));
        }
        printf("\n");
    }
}

static void print_times(const tagc_plan_request *request, const tagc_plan_row *rows, int n) {
    char text[40];
    const char *note = "";
    int width = request->n_latencies > 1 ? 18 : 12;
    printf("\n  Time of an optimizer step, simulated (exposed: computing waits)");
    if (request->n_latencies == 1) printf("; latency %.3g us", 1e6 * request->inputs.links[0].latency_s);
    printf("\n  %-28s %-9s", "", "placement");
    for (int k = 0; k < request->inputs.n_links; k++)
        printf(" %*s %8s", width, link_text(request, k, text), "exposed");
    printf("\n");
    for (int i = 0; i < n; i++) {
        printf("  %-28s %-9s", rows[i].arm, tagc_placement_describe(rows[i].setup.placement)->name);
        for (int k = 0; k < request->inputs.n_links; k++) {
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
    int seen = tagc_plan_largest_seen(&request->inputs), n_ranks = rows[0].setup.world_size;
    if (seen > 0 && n_ranks > seen)
        printf("  (extrapolated: the costs come from %d ranks; what it takes to talk to %d is not in them)\n",
               seen, n_ranks);
}

static void print_verdicts(const tagc_plan_request *request, const tagc_plan_row *rows, int n) {
    int is_said = 0;
    for (int k = 0; k < request->inputs.n_links; k++) {
        tagc_plan_answer a;
        char link[40], with[24], without[24];
        if (!tagc_plan_judge(rows, n, k, &a)) continue;
        if (!is_said++)
            printf("\n  Does compression pay? (by these forecasts; only training shows its loss)\n");
        printf("  %s: %s %s: %s a step, %s without it by %s (%.2fx)\n", link_text(request, k, link),
               a.packed->arm, tagc_verdict_name((int)a.verdict),
               time_text(a.packed->forecasts[k].iteration_s, with),
               time_text(a.plain->forecasts[k].iteration_s, without), a.plain->arm, a.speedup);
    }
}

static void print_world(const tagc_plan_request *request, const tagc_plan_row *rows, int n) {
    const tagc_setup *s = &rows[0].setup;
    char params[HUMAN_BYTES];
    printf("\n%s, %s parameters: %d rank%s on %d host%s, %d x %d tokens a rank and micro-step\n",
           request->inputs.model_name, tagc_human((double)rows[0].volume.n_params, params), s->world_size,
           s->world_size > 1 ? "s" : "", s->n_hosts, s->n_hosts > 1 ? "s" : "", s->n_batch, s->n_tokens);
    print_placements(rows, n);
    print_memory(rows, n);
    print_bits(rows, n);
    print_card(rows, n);
    if (request->inputs.has_costs && request->inputs.n_links > 0) {
        print_times(request, rows, n);
        print_verdicts(request, rows, n);
    } else {
        printf("\n  (%s)\n", rows[0].note);
    }
}

static tagc_status make_row(const tagc_plan_request *request, int world_size, const tagc_arm *arm,
                            int placement, tagc_plan_row *row) {
    const tagc_plan_options *o = &request->options;
    *row = (tagc_plan_row){.arm = arm->name};
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
    return tagc_plan_make_row(&request->inputs, row);
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
    int n_links = request->inputs.n_links;
    for (int link = n_links > 0 ? 0 : -1; status == TAGC_OK && (link < n_links || link < 0); link++) {
        json_t *origin = tagc_origin("plan", request->parsed->argc, request->parsed->argv, NULL);
        json_array_append_new(results, tagc_plan_json(&request->inputs, rows, n, link, origin));
    }
    free(rows);
    return status;
}
