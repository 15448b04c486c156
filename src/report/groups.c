/* Runs that differ in their seeds only are one arm. Their figures are taken together. */
#include "core/status.h"
#include "report/results.h"
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Options that say nothing of what a run computes or sends. */
static const char *const no_matter[] = {"seed",   "out",     "trace",       "trace-steps",
                                        "quiet",  "resume",  "keep",        "save-every",
                                        "config", "timeout", "eval-batches"};

/* Two runs with one key are of one group. NULL when out of memory. */
static char *make_key(const tagc_runlog *run) {
    if (run->place > 0 || !run->about) {
        json_t *key = json_pack("[s?i]", run->label, run->place);
        char *text = key ? json_dumps(key, 0) : strdup(run->label); /* no UTF-8 */
        json_decref(key);
        return text;
    }
    json_t *key = json_deep_copy(run->about), *options = json_object_get(key, "options");
    for (size_t i = 0; i < sizeof no_matter / sizeof no_matter[0]; i++)
        json_object_del(options, no_matter[i]);
    json_object_del(key, "from_step");
    json_object_del(key, "origin");
    char *text = json_dumps(key, JSON_SORT_KEYS | JSON_COMPACT);
    json_decref(key);
    return text;
}

static void read_seed(tagc_runlog *run) {
    if (isfinite(run->seed)) return;
    const char *text = json_string_value(json_object_get(json_object_get(run->about, "options"), "seed"));
    if (text) run->seed = strtod(text, NULL);
}

static tagc_status add_to_group(tagc_report *report, int run) {
    read_seed(&report->runs[run]);
    char *key = make_key(&report->runs[run]);
    if (!key) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for a report");
    tagc_group *group = NULL;
    for (int g = 0; g < report->n_groups && !group; g++)
        if (strcmp(report->groups[g].key, key) == 0) group = &report->groups[g];
    if (!group) {
        tagc_group *groups = tagc_report_grow(report->groups, &report->n_groups, sizeof *groups);
        if (!groups) {
            free(key);
            return TAGC_ERR_MEMORY;
        }
        report->groups = groups;
        group = &groups[report->n_groups - 1];
        group->key = key;
        group->place = report->runs[run].place;
    } else {
        free(key);
    }
    int *runs = tagc_report_grow(group->runs, &group->n_runs, sizeof *runs);
    if (!runs) return TAGC_ERR_MEMORY;
    group->runs = runs;
    runs[group->n_runs - 1] = run;
    return TAGC_OK;
}

/* What the names of the runs begin with, less a trailing "-seed" and such: packed-s1, packed-s2 are packed. */
static tagc_status name_group(tagc_report *report, int g) {
    tagc_group *group = &report->groups[g];
    const char *first = report->runs[group->runs[0]].label;
    size_t n = strlen(first);
    for (int i = 1; i < group->n_runs; i++) {
        const char *other = report->runs[group->runs[i]].label;
        size_t same = 0;
        while (same < n && other[same] == first[same]) same++;
        n = same;
    }
    char base[64];
    snprintf(base, sizeof base, "%.*s", (int)n, first);
    if (first[n] || group->n_runs > 1) {
        static const char *const endings[] = {"seed", "s"};
        size_t end = strlen(base);
        for (size_t i = 0; i < sizeof endings / sizeof endings[0]; i++) {
            size_t n_ending = strlen(endings[i]);
            if (end > n_ending + 1 && strcmp(base + end - n_ending, endings[i]) == 0 &&
                !isalnum((unsigned char)base[end - n_ending - 1])) {
                end -= n_ending;
                break;
            }
        }
        int was_cut = first[n] != 0;
        while (was_cut && end > 0 && strchr("-_. ", base[end - 1])) end--;
        base[end] = 0;
    }
    const char *name = base[0] ? base : first;
    int n_before = 0;
    for (int i = 0; i < g; i++) {
        size_t n_name = strlen(name);
        const char *other = report->groups[i].name;
        n_before += report->groups[i].place == group->place && strncmp(other, name, n_name) == 0 &&
                    (!other[n_name] || other[n_name] == ' ');
    }
    int n_elsewhere = 0;
    for (int i = 0; i < g; i++)
        n_elsewhere += report->groups[i].place != group->place && strcmp(report->groups[i].name, name) == 0;
    char placed[160];
    if (n_elsewhere > 0 && group->place > 0) {
        snprintf(placed, sizeof placed, "%s (%.40s)", name, report->cases[group->place - 1].experiment);
        name = placed;
    }
    group->name = n_before ? tagc_report_text(report, "%s (%d)", name, n_before + 1)
                           : tagc_report_text(report, "%s", name);
    if (!group->name) return TAGC_ERR_MEMORY;
    group->color = tagc_report_color(report, group->name);
    return TAGC_OK;
}

/* ---- figures of a group ---- */

enum { FIELDS = TAGC_N_PARTS };
static const size_t part_offsets[] = {
    offsetof(tagc_runlog_step, compute_s), offsetof(tagc_runlog_step, wait_gather_s),
    offsetof(tagc_runlog_step, wait_reduce_s), offsetof(tagc_runlog_step, optimizer_s)};

static double field(const tagc_runlog_step *step, size_t offset) {
    return *(const double *)((const char *)step + offset);
}

/* Over the steps of all runs that do not warm up. least_share: 0 gives minimum and maximum; 0.1 leaves out the
 * tenth at each end. */
static tagc_spread over_steps(const tagc_report *report, const tagc_group *group, double least_share,
                              double (*value)(const tagc_runlog_step *, size_t), size_t offset) {
    size_t n = 0, n_most = 1;
    for (int i = 0; i < group->n_runs; i++) n_most += (size_t)report->runs[group->runs[i]].n_steps;
    double *values = malloc(n_most * sizeof *values);
    if (!values) return (tagc_spread){0};
    for (int i = 0; i < group->n_runs; i++) {
        const tagc_runlog *run = &report->runs[group->runs[i]];
        for (int s = tagc_runlog_first(run); s < run->n_steps; s++)
            values[n++] = value(&run->steps[s], offset);
    }
    tagc_spread spread = tagc_spread_of(values, (int)n, 0);
    if (spread.n > 0) {
        spread.min = values[(int)(least_share * (spread.n - 1))];
        spread.max = values[spread.n - 1 - (int)(least_share * (spread.n - 1))];
    }
    free(values);
    return spread;
}

static double exposed(const tagc_runlog_step *step, size_t offset) {
    (void)offset;
    return step->wait_gather_s + step->wait_reduce_s;
}

static double bits_of(const tagc_report *report, const tagc_group *group, int leg) {
    double sum = 0;
    int n = 0;
    for (int i = 0; i < group->n_runs; i++) {
        const tagc_runlog *run = &report->runs[group->runs[i]];
        double bits = run->bits[leg];
        if (run->n_steps > 0)
            bits = tagc_runlog_mean(run, offsetof(tagc_runlog_step, bits) + (size_t)leg * sizeof(double));
        if (!isfinite(bits)) continue;
        sum += bits;
        n++;
    }
    return n > 0 ? sum / n : (double)NAN;
}

/* The loss at `step`; NaN when it was not evaluated then. */
static double loss_at(const tagc_runlog *run, double step) {
    for (int i = run->n_evals - 1; i >= 0; i--)
        if (run->eval_steps[i] == step) return run->val_losses[i];
    return (double)NAN;
}

/* The last step at which every run of the groups was evaluated; NaN when there is none. */
static double last_common_step(const tagc_report *report, const tagc_group *const *groups, int n_groups) {
    const tagc_runlog *first = &report->runs[groups[0]->runs[0]];
    for (int e = first->n_evals - 1; e >= 0; e--) {
        int is_common = 1;
        for (int g = 0; g < n_groups && is_common; g++)
            for (int i = 0; i < groups[g]->n_runs && is_common; i++)
                is_common = isfinite(loss_at(&report->runs[groups[g]->runs[i]], first->eval_steps[e]));
        if (is_common) return first->eval_steps[e];
    }
    return (double)NAN;
}

static tagc_spread losses_at(const tagc_report *report, const tagc_group *group, double step) {
    double *values = malloc((size_t)group->n_runs * sizeof *values);
    if (!values) return (tagc_spread){0};
    for (int i = 0; i < group->n_runs; i++) values[i] = loss_at(&report->runs[group->runs[i]], step);
    tagc_spread spread = tagc_spread_of(values, group->n_runs, 1);
    free(values);
    return spread;
}

tagc_spread tagc_group_gap(const tagc_report *report, const tagc_group *group, const tagc_group *first,
                           double step) {
    double *values = malloc(((size_t)group->n_runs + 1) * sizeof *values);
    if (!values) return (tagc_spread){0};
    tagc_spread base = losses_at(report, first, step);
    int n = 0;
    for (int i = 0; i < group->n_runs; i++) {
        const tagc_runlog *run = &report->runs[group->runs[i]];
        double against = base.middle;
        for (int k = 0; k < first->n_runs && group != first; k++)
            if (report->runs[first->runs[k]].seed == run->seed) {
                double paired = loss_at(&report->runs[first->runs[k]], step);
                if (isfinite(paired)) against = paired;
            }
        values[n++] = loss_at(run, step) / against - 1;
    }
    tagc_spread spread = tagc_spread_of(values, n, 1);
    free(values);
    return spread;
}

static void fill_result(const tagc_report *report, const tagc_group *group, tagc_result *out) {
    const tagc_runlog *run = &report->runs[group->runs[0]];
    out->n_runs = group->n_runs;
    out->n_params = run->n_params;
    out->n_compressed = run->n_compressed;
    out->options = json_object_get(run->about, "options");
    if (run->n_total > 0) { /* the first run stands for the others */
        out->total_s = (tagc_spread){run->total_s[0], run->total_s[1], run->total_s[2], run->n_total};
    } else {
        out->total_s = over_steps(report, group, 0.1, field, offsetof(tagc_runlog_step, wall_s));
    }
    out->exposed_s = over_steps(report, group, 0.1, exposed, 0);
    for (int part = 0; part < TAGC_PART_OTHER; part++)
        out->part_s[part] = over_steps(report, group, 0, field, part_offsets[part]).middle;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++)
        out->bits[leg] = run->world_size > 1 ? bits_of(report, group, leg) : 0;
    double step = last_common_step(report, (const tagc_group *const[]){group}, 1);
    out->loss = losses_at(report, group, step);
}

/* Runs of folders are one set, those of each case of the lab another. */
static tagc_set *set_of(tagc_report *report, int place, int first_set) {
    for (int s = first_set; s < report->n_sets; s++)
        if (report->sets[s].place == place) return &report->sets[s];
    tagc_set *set = tagc_report_new_set(report);
    if (!set) return NULL;
    const tagc_lab_case *one = place > 0 ? &report->cases[place - 1] : NULL;
    set->kind = TAGC_SET_RUNS;
    set->place = place;
    set->title = one ? tagc_report_text(report, "%s, training runs", one->title)
                     : tagc_report_text(report, "Training runs");
    set->n_hosts = set->bits_per_s = (double)NAN;
    return set;
}

static tagc_status add_to_set(tagc_report *report, int g, int first_set) {
    tagc_group *group = &report->groups[g];
    group->first = g;
    for (int other = g - 1; other >= 0; other--)
        if (report->groups[other].place == group->place) group->first = other;
    tagc_set *set = set_of(report, group->place, first_set);
    tagc_result *result = set ? tagc_set_add(report, set, group->name) : NULL;
    if (!result) return TAGC_ERR_MEMORY;
    set->world_size = report->runs[group->runs[0]].world_size;
    fill_result(report, group, result);
    const tagc_group *first = &report->groups[group->first];
    double step = last_common_step(report, (const tagc_group *const[]){first, group}, 2);
    if (g != group->first) result->gap = tagc_group_gap(report, group, first, step);
    double ratio = set->results[0].total_s.middle / result->total_s.middle;
    if (isfinite(ratio)) result->speedup = (tagc_spread){ratio, ratio, ratio, 1};
    return TAGC_OK;
}

tagc_status tagc_report_make_runs(tagc_report *report) {
    int first_set = report->n_sets;
    for (int run = 0; run < report->n_runs; run++) TAGC_TRY(add_to_group(report, run));
    for (int g = 0; g < report->n_groups; g++) TAGC_TRY(name_group(report, g));
    for (int g = 0; g < report->n_groups; g++) TAGC_TRY(add_to_set(report, g, first_set));
    return TAGC_OK;
}
