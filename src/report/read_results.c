/* Bench, plan and lab results brought to sets of arms. */
#include "core/status.h"
#include "report/json_read.h"
#include "report/results.h"
#include "report/text.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const tagc_memory_names[TAGC_N_MEMORIES] = {"parameters", "gradients", "optimizer", "residuals",
                                                        "buffers"};
const char *const tagc_leg_names[TAGC_N_LEGS] = {"index",  "values", "leftover",
                                                 "result", "gather", "control"};

/* A leg that is not named did not travel. */
static tagc_status read_legs(const json_t *parent, const char *name, const tagc_json_place *at,
                             double legs[TAGC_N_LEGS]) {
    const json_t *object;
    TAGC_TRY(tagc_json_object(parent, name, at, &object));
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
        double value = tagc_json_number_or_nan(object, tagc_leg_names[leg]);
        legs[leg] = isfinite(value) ? value : 0;
    }
    return TAGC_OK;
}

static void read_memory(const json_t *object, double memory[TAGC_N_MEMORIES]) {
    for (int i = 0; i < TAGC_N_MEMORIES; i++)
        memory[i] = tagc_json_number_or_nan(object, tagc_memory_names[i]);
}

static tagc_status read_spread(const json_t *parent, const char *name, const tagc_json_place *at,
                               tagc_spread *out) {
    const json_t *object;
    TAGC_TRY(tagc_json_object(parent, name, at, &object));
    tagc_json_place inside = tagc_json_at(at, name, -1);
    double n = 0;
    TAGC_TRY(tagc_json_number(object, "median", &inside, &out->middle));
    TAGC_TRY(tagc_json_number(object, "min", &inside, &out->min));
    TAGC_TRY(tagc_json_number(object, "max", &inside, &out->max));
    TAGC_TRY(tagc_json_number(object, "n", &inside, &n));
    out->n = isfinite(out->middle) ? n >= 1 && n < 1e9 ? (int)n : 1 : 0;
    return TAGC_OK;
}

/* ---- bench ---- */

static tagc_status read_parts(const json_t *arm, const tagc_json_place *at, tagc_result *out) {
    static const char *const names[] = {"compute_s", "wait_gather_s", "wait_reduce_s", "optimizer_s"};
    enum { N_NAMES = sizeof names / sizeof names[0] };
    const json_t *iterations;
    TAGC_TRY(tagc_json_list(arm, "iterations", at, &iterations));
    size_t n = json_array_size(iterations);
    double *values = calloc(n + 1, N_NAMES * sizeof *values);
    if (!values) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for %s", at->text);
    tagc_status status = TAGC_OK;
    for (size_t i = 0; i < n && status == TAGC_OK; i++) {
        tagc_json_place inside = tagc_json_at(at, "iterations", (int)i);
        for (size_t k = 0; k < N_NAMES && status == TAGC_OK; k++)
            status = tagc_json_number(json_array_get(iterations, i), names[k], &inside, &values[k * n + i]);
    }
    for (size_t k = 0; k < N_NAMES && status == TAGC_OK; k++)
        out->part_s[k] = tagc_spread_of(values + k * n, (int)n, 0).middle;
    free(values);
    return status;
}

static tagc_status read_arm(const json_t *arm, const tagc_json_place *at, tagc_result *out) {
    TAGC_TRY(read_spread(arm, "total_s", at, &out->total_s));
    TAGC_TRY(read_spread(arm, "exposed_s", at, &out->exposed_s));
    TAGC_TRY(read_spread(arm, "speedup", at, &out->speedup));
    TAGC_TRY(read_parts(arm, at, out));
    TAGC_TRY(read_legs(arm, "bits_per_param", at, out->bits));
    const json_t *memory;
    TAGC_TRY(tagc_json_object(arm, "memory_bytes", at, &memory));
    read_memory(memory, out->memory);
    TAGC_TRY(tagc_json_number(arm, "n_params", at, &out->n_params));
    out->n_compressed = tagc_json_number_or_nan(arm, "n_compressed");
    out->options = json_object_get(arm, "options");
    return TAGC_OK;
}

static tagc_set *new_set(tagc_report *report) {
    tagc_set *sets = tagc_report_grow(report->sets, &report->n_sets, sizeof *sets);
    if (!sets) return NULL;
    report->sets = sets;
    return &sets[report->n_sets - 1];
}

tagc_status tagc_report_add_bench(tagc_report *report, const json_t *bench, const char *file,
                                  const char *place) {
    tagc_json_place at;
    const json_t *arms, *model;
    const char *name;
    snprintf(at.text, sizeof at.text, "%.200s%s%.40s", file, *place ? " " : "", place);
    TAGC_TRY(tagc_json_list(bench, "arms", &at, &arms));
    TAGC_TRY(tagc_json_object(bench, "model", &at, &model));
    TAGC_TRY(tagc_json_text(model, "name", &at, &name));
    tagc_set *set = new_set(report);
    if (!set) return TAGC_ERR_MEMORY;
    set->kind = TAGC_SET_BENCH;
    set->bench = bench;
    TAGC_TRY(tagc_json_number(bench, "world_size", &at, &set->world_size));
    TAGC_TRY(tagc_json_number(bench, "n_hosts", &at, &set->n_hosts));
    set->bits_per_s = 8 * tagc_json_number_or_nan(json_object_get(bench, "link"), "all_to_all_bytes_per_s");
    char rate[TAGC_NUMBER_BYTES], text[64] = "";
    if (isfinite(set->bits_per_s))
        snprintf(text, sizeof text, ", link %s", tagc_number_rate(set->bits_per_s, rate));
    set->title =
        tagc_report_text(report, "%.60s, %.0f rank%s on %.0f host%s%s", name, set->world_size,
                         set->world_size == 1 ? "" : "s", set->n_hosts, set->n_hosts == 1 ? "" : "s", text);
    for (size_t i = 0; i < json_array_size(arms); i++) {
        const json_t *arm = json_array_get(arms, i);
        tagc_json_place inside = tagc_json_at(&at, "arms", (int)i);
        TAGC_TRY(tagc_json_text(arm, "name", &inside, &name));
        tagc_result *result = tagc_set_add(report, set, name);
        if (!result) return TAGC_ERR_MEMORY;
        result->n_runs = 1;
        TAGC_TRY(read_arm(arm, &inside, result));
    }
    return TAGC_OK;
}

/* ---- plan ---- */

/* A row may have its own world, link and placement; else the file's hold. */
static const json_t *of_row(const json_t *row, const json_t *plan, const char *name) {
    const json_t *own = json_object_get(row, name);
    return own ? own : json_object_get(plan, name);
}

static tagc_status read_plan_row(tagc_report *report, const json_t *row, const json_t *plan,
                                 const char *model, const tagc_json_place *at, tagc_set *set) {
    tagc_plan_point *points = tagc_report_grow(report->plan, &report->n_plan, sizeof *points);
    if (!points) return TAGC_ERR_MEMORY;
    report->plan = points;
    tagc_plan_point *point = &points[report->n_plan - 1];
    const char *placement = json_string_value(json_object_get(of_row(row, plan, "placement"), "name"));
    point->placement = placement ? placement : "";
    point->model = model;
    TAGC_TRY(tagc_json_text(row, "arm", at, &point->arm));
    TAGC_TRY(tagc_json_number(row, "iteration_s", at, &point->iteration_s));
    TAGC_TRY(tagc_json_number(row, "exposed_s", at, &point->exposed_s));
    const json_t *memory, *world = of_row(row, plan, "world_size");
    point->world_size = json_is_number(world) ? json_number_value(world) : (double)NAN;
    point->bits_per_s = 8 * tagc_json_number_or_nan(of_row(row, plan, "link"), "bytes_per_s");
    point->color = tagc_report_color(report, point->arm);
    tagc_result *result = tagc_set_add(report, set, point->arm);
    if (!result) return TAGC_ERR_MEMORY;
    TAGC_TRY(read_legs(row, "bits_per_param", at, result->bits));
    TAGC_TRY(tagc_json_object(row, "memory_bytes", at, &memory));
    read_memory(memory, result->memory);
    result->total_s = (tagc_spread){point->iteration_s, point->iteration_s, point->iteration_s,
                                    isfinite(point->iteration_s)};
    result->exposed_s =
        (tagc_spread){point->exposed_s, point->exposed_s, point->exposed_s, isfinite(point->exposed_s)};
    return TAGC_OK;
}

tagc_status tagc_report_add_plan(tagc_report *report, const json_t *plan, const char *file) {
    tagc_json_place at;
    const json_t *rows, *model;
    const char *name;
    snprintf(at.text, sizeof at.text, "%.200s", file);
    TAGC_TRY(tagc_json_list(plan, "rows", &at, &rows));
    TAGC_TRY(tagc_json_object(plan, "model", &at, &model));
    TAGC_TRY(tagc_json_text(model, "name", &at, &name));
    tagc_set *set = new_set(report);
    if (!set) return TAGC_ERR_MEMORY;
    set->kind = TAGC_SET_PLAN;
    TAGC_TRY(tagc_json_number(plan, "world_size", &at, &set->world_size));
    set->n_hosts = tagc_json_number_or_nan(plan, "n_hosts");
    set->bits_per_s = 8 * tagc_json_number_or_nan(json_object_get(plan, "link"), "bytes_per_s");
    const char *placement = json_string_value(json_object_get(json_object_get(plan, "placement"), "name"));
    char rate[TAGC_NUMBER_BYTES];
    set->title = tagc_report_text(report, "%.60s, %.0f ranks, link %s%s%.40s, simulated", name,
                                  set->world_size, tagc_number_rate(set->bits_per_s, rate),
                                  placement ? ", " : "", placement ? placement : "");
    for (size_t i = 0; i < json_array_size(rows); i++) {
        tagc_json_place inside = tagc_json_at(&at, "rows", (int)i);
        TAGC_TRY(read_plan_row(report, json_array_get(rows, i), plan, name, &inside, set));
    }
    return TAGC_OK;
}
