/* Results of the lab: each case is hosts on a link, with a bench, training runs, or both. */
#include "core/status.h"
#include "report/json_read.h"
#include "report/results.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Least and most of the hosts. */
static void read_range(const json_t *link, const char *name, double range[2]) {
    const json_t *list = json_object_get(link, name);
    range[0] = range[1] = (double)NAN;
    for (size_t i = 0; i < json_array_size(list); i++) {
        range[0] = fmin(range[0], json_number_value(json_array_get(list, i)));
        range[1] = fmax(range[1], json_number_value(json_array_get(list, i)));
    }
}

/* "2gbit", as tc takes it. */
static double rate_of(const char *text) {
    static const struct {
        const char *unit;
        double scale;
    } units[] = {{"kbit", 1e3}, {"mbit", 1e6}, {"gbit", 1e9}, {"tbit", 1e12}, {"bit", 1}};
    char *end;
    double rate = strtod(text, &end);
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++)
        if (end > text && strcmp(end, units[i].unit) == 0) return rate * units[i].scale;
    return (double)NAN;
}

static double sum_of(const json_t *list) {
    double sum = json_array_size(list) > 0 ? 0 : (double)NAN;
    for (size_t i = 0; i < json_array_size(list); i++) sum += json_number_value(json_array_get(list, i));
    return sum;
}

/* As the first line of metrics.jsonl would have it. */
static json_t *about_run(const json_t *run) {
    json_t *about = json_object(), *options = json_object_get(run, "options");
    if (options) json_object_set(about, "options", options);
    return about;
}

static tagc_status read_evals(tagc_runlog *log, const json_t *run, const tagc_json_place *at) {
    const json_t *evals;
    TAGC_TRY(tagc_json_list(run, "evals", at, &evals));
    for (size_t i = 0; i < json_array_size(evals); i++) {
        tagc_json_place inside = tagc_json_at(at, "evals", (int)i);
        double step, loss;
        TAGC_TRY(tagc_json_number(json_array_get(evals, i), "step", &inside, &step));
        TAGC_TRY(tagc_json_number(json_array_get(evals, i), "val_loss", &inside, &loss));
        if (isfinite(step)) TAGC_TRY(tagc_runlog_add_eval(log, step, loss));
    }
    return TAGC_OK;
}

static tagc_status read_trace(tagc_report *report, const json_t *run, const char *file, const char *label) {
    const char *name = json_string_value(json_object_get(run, "trace"));
    if (!name) return TAGC_OK;
    const char *slash = strrchr(file, '/');
    char *path =
        tagc_report_text(report, "%.*s%s", *name == '/' || !slash ? 0 : (int)(slash + 1 - file), file, name);
    if (!path) return TAGC_ERR_MEMORY;
    if (tagc_report_add_trace(report, path, label) == TAGC_OK) return TAGC_OK;
    return tagc_report_note(report, "the timeline of %.60s is left out: %.300s", label, tagc_last_error());
}

/* Legs and times of the steps, as means. */
static tagc_status read_steps(tagc_runlog *log, const json_t *run, const tagc_json_place *at) {
    const json_t *bits = json_object_get(run, "bits_per_param");
    tagc_spread total = {(double)NAN, (double)NAN, (double)NAN, 0};
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) log->bits[leg] = (double)NAN;
    if (json_is_object(bits)) TAGC_TRY(tagc_result_read_legs(run, "bits_per_param", at, log->bits));
    if (json_is_object(json_object_get(run, "total_s")))
        TAGC_TRY(tagc_result_read_spread(run, "total_s", at, &total));
    log->total_s[0] = total.middle;
    log->total_s[1] = total.min;
    log->total_s[2] = total.max;
    log->n_total = total.n;
    return TAGC_OK;
}

/* Steps of this arm as a plan has them. */
static tagc_status read_simulated(tagc_runlog *log, const json_t *item, const char *label,
                                  const tagc_json_place *at) {
    const json_t *arms = json_object_get(json_object_get(item, "simulated"), "arms");
    const json_t *steps = json_object_get(arms, label);
    for (size_t i = 0; i < json_array_size(steps) && i < TAGC_MAX_LINKS; i++) {
        tagc_json_place inside = tagc_json_at(at, "simulated", (int)i);
        const json_t *step = json_array_get(steps, i);
        TAGC_TRY(tagc_json_number(step, "bits_per_s", &inside, &log->link_bits_per_s[log->n_links]));
        TAGC_TRY(tagc_json_number(step, "step_s", &inside, &log->link_step_s[log->n_links]));
        log->n_links++;
    }
    return TAGC_OK;
}

static tagc_status read_run(tagc_report *report, const json_t *item, const json_t *run, const char *file,
                            const char *suffix, const tagc_json_place *at) {
    const char *label;
    double world_size;
    char name[96];
    TAGC_TRY(tagc_json_text(run, "label", at, &label));
    TAGC_TRY(tagc_json_number(run, "world_size", at, &world_size));
    snprintf(name, sizeof name, "%.68s%.24s", label, suffix);
    TAGC_TRY(read_trace(report, run, file, name));
    if (!json_is_object(json_object_get(run, "bits_per_param")) &&
        json_array_size(json_object_get(run, "evals")) == 0)
        return TAGC_OK; /* made for its timeline only */
    tagc_runlog *runs = tagc_report_grow(report->runs, &report->n_runs, sizeof *runs);
    if (!runs) return TAGC_ERR_MEMORY;
    report->runs = runs;
    tagc_runlog *log = &runs[report->n_runs - 1];
    snprintf(log->label, sizeof log->label, "%s", name);
    log->world_size = world_size >= 1 && world_size < 1e6 ? (int)world_size : 1;
    log->about = about_run(run);
    log->place = report->n_cases;
    TAGC_TRY(tagc_json_number(run, "seed", at, &log->seed));
    TAGC_TRY(tagc_json_number(run, "n_params", at, &log->n_params));
    log->n_compressed = tagc_json_number_or_nan(run, "n_compressed");
    TAGC_TRY(read_steps(log, run, at));
    TAGC_TRY(read_simulated(log, item, label, at));
    return read_evals(log, run, at);
}

static tagc_lab_case *new_case(tagc_report *report) {
    tagc_lab_case *cases = tagc_report_grow(report->cases, &report->n_cases, sizeof *cases);
    if (!cases) return NULL;
    report->cases = cases;
    cases[report->n_cases - 1].set = -1;
    return &cases[report->n_cases - 1];
}

static tagc_status read_case(tagc_report *report, const json_t *item, const json_t *lab,
                             const char *experiment, const char *file, int n_cases,
                             const tagc_json_place *at) {
    tagc_lab_case *one = new_case(report);
    if (!one) return TAGC_ERR_MEMORY;
    double per_host;
    TAGC_TRY(tagc_json_number(item, "hosts", at, &one->n_hosts));
    TAGC_TRY(tagc_json_number(item, "ranks_per_host", at, &per_host));
    one->n_ranks = one->n_hosts * per_host;
    one->experiment = experiment;
    one->settings = json_object_get(lab, "settings");
    const json_t *link = json_object_get(item, "link"), *interface = json_object_get(item, "interface");
    const char *rate = json_string_value(json_object_get(link, "rate"));
    one->rate = rate ? rate : "";
    one->mtu = tagc_json_number_or_nan(link, "mtu");
    read_range(link, "tcp_one_way_bits_per_s", one->tcp_one_way);
    read_range(link, "tcp_both_ways_bits_per_s", one->tcp_both_ways);
    one->overhead = tagc_json_number_or_nan(interface, "overhead");
    one->sent_bytes = sum_of(json_object_get(interface, "sent_bytes"));
    one->received_bytes = sum_of(json_object_get(interface, "received_bytes"));
    one->title = tagc_report_text(report, "%.60s: %.0f hosts x %.0f rank%s%s%.30s", experiment, one->n_hosts,
                                  per_host, per_host == 1 ? "" : "s", rate ? ", " : "", one->rate);
    if (!one->title) return TAGC_ERR_MEMORY;
    const json_t *bench = json_object_get(item, "bench"), *runs = json_object_get(item, "runs");
    char suffix[64] = "";
    if (n_cases > 1)
        snprintf(suffix, sizeof suffix, " (%.0f x %.0f%s%.12s)", one->n_hosts, per_host, rate ? ", " : "",
                 one->rate);
    if (json_is_object(bench)) {
        int at_case = report->n_cases - 1;
        TAGC_TRY(tagc_report_add_bench(report, bench, file,
                                       strchr(at->text, ' ') ? strrchr(at->text, ' ') + 1 : ""));
        report->cases[at_case].set = report->n_sets - 1;
        tagc_set *set = &report->sets[report->n_sets - 1];
        set->title = report->cases[at_case].title;
        if (isfinite(rate_of(report->cases[at_case].rate)))
            set->bits_per_s = rate_of(report->cases[at_case].rate);
    }
    for (size_t i = 0; i < json_array_size(runs); i++) {
        tagc_json_place inside = tagc_json_at(at, "runs", (int)i);
        TAGC_TRY(read_run(report, item, json_array_get(runs, i), file, suffix, &inside));
    }
    return TAGC_OK;
}

tagc_status tagc_report_add_lab(tagc_report *report, const json_t *lab, const char *file) {
    tagc_json_place at;
    const char *experiment;
    const json_t *cases;
    snprintf(at.text, sizeof at.text, "%.200s", file);
    TAGC_TRY(tagc_json_text(lab, "experiment", &at, &experiment));
    TAGC_TRY(tagc_json_list(lab, "cases", &at, &cases));
    if (json_is_true(json_object_get(json_object_get(lab, "settings"), "is_quick")))
        TAGC_TRY(tagc_report_note(
            report, "%s was a quick run of the experiment, to try it out: its times mean nothing",
            experiment));
    for (size_t i = 0; i < json_array_size(cases); i++) {
        tagc_json_place inside = tagc_json_at(&at, "cases", (int)i);
        TAGC_TRY(read_case(report, json_array_get(cases, i), lab, experiment, file,
                           (int)json_array_size(cases), &inside));
    }
    return TAGC_OK;
}
