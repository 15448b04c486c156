/* Plans: a set of arms each, and points of the lines over link rate and number of ranks. */
#include "core/status.h"
#include "report/json_read.h"
#include "report/results.h"
#include "report/text.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* The line's rate, as it was asked for, says more to people than the payload that fits it. */
static double rate_of(const json_t *link) {
    double line = tagc_json_number_or_nan(link, "line_bits_per_s");
    return isfinite(line) ? line : 8 * tagc_json_number_or_nan(link, "bytes_per_s");
}

static tagc_spread only(double value) {
    return (tagc_spread){value, value, value, isfinite(value)};
}

static const char *placement_of(const json_t *row) {
    const char *name = json_string_value(json_object_get(json_object_get(row, "placement"), "name"));
    return name ? name : "";
}

/* One arm in several placements is several lines. */
static char *name_row(tagc_report *report, const json_t *rows, const json_t *row, const char *arm) {
    size_t n_same = 0;
    for (size_t i = 0; i < json_array_size(rows); i++) {
        const char *other = json_string_value(json_object_get(json_array_get(rows, i), "arm"));
        n_same += other && strcmp(other, arm) == 0;
    }
    return tagc_report_text(report, n_same > 1 ? "%s (%s)" : "%s%.0s", arm, placement_of(row));
}

static tagc_status read_row(tagc_report *report, const json_t *rows, size_t at_row, const char *model,
                            const tagc_json_place *at, tagc_set *set) {
    const json_t *row = json_array_get(rows, at_row), *memory;
    const char *arm;
    TAGC_TRY(tagc_json_text(row, "arm", at, &arm));
    char *name = name_row(report, rows, row, arm);
    if (!name) return TAGC_ERR_MEMORY;
    tagc_plan_point *points = tagc_report_grow(report->plan, &report->n_plan, sizeof *points);
    if (!points) return TAGC_ERR_MEMORY;
    report->plan = points;
    tagc_plan_point *point = &points[report->n_plan - 1];
    *point = (tagc_plan_point){.name = name,
                               .placement = placement_of(row),
                               .model = model,
                               .color = tagc_report_color(report, name),
                               .world_size = set->world_size,
                               .bits_per_s = set->bits_per_s};
    TAGC_TRY(tagc_json_number(row, "iteration_s", at, &point->iteration_s));
    TAGC_TRY(tagc_json_number(row, "exposed_s", at, &point->exposed_s));
    tagc_result *result = tagc_set_add(report, set, name);
    if (!result) return TAGC_ERR_MEMORY;
    TAGC_TRY(tagc_result_read_legs(row, "bits_per_param", at, result->bits));
    TAGC_TRY(tagc_json_object(row, "memory_bytes", at, &memory));
    tagc_result_read_memory(memory, result->memory);
    result->total_s = only(point->iteration_s);
    result->exposed_s = only(point->exposed_s);
    result->speedup = only(set->results[0].total_s.middle / point->iteration_s);
    return TAGC_OK;
}

static tagc_status read_checks(tagc_report *report, const json_t *plan, const tagc_json_place *above) {
    const json_t *list = json_object_get(plan, "checks");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *item = json_array_get(list, i);
        tagc_json_place at = tagc_json_at(above, "checks", (int)i);
        tagc_plan_check *checks = tagc_report_grow(report->checks, &report->n_checks, sizeof *checks);
        if (!checks) return TAGC_ERR_MEMORY;
        report->checks = checks;
        tagc_plan_check *check = &checks[report->n_checks - 1];
        check->arm = check->place = "";
        TAGC_TRY(tagc_json_text(item, "arm", &at, &check->arm));
        TAGC_TRY(tagc_json_number(item, "measured_s", &at, &check->measured_s));
        TAGC_TRY(tagc_json_number(item, "simulated_s", &at, &check->simulated_s));
        TAGC_TRY(tagc_json_number(item, "error", &at, &check->error));
        const char *place = json_string_value(json_object_get(item, "place"));
        check->place = place ? place : "";
        check->world_size = tagc_json_number_or_nan(item, "world_size");
        check->bits_per_s = 8 * tagc_json_number_or_nan(item, "link_bytes_per_s");
        check->is_held_out = json_is_true(json_object_get(item, "is_held_out"));
    }
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
    tagc_set *set = tagc_report_new_set(report);
    if (!set) return TAGC_ERR_MEMORY;
    set->kind = TAGC_SET_PLAN;
    TAGC_TRY(tagc_json_number(plan, "world_size", &at, &set->world_size));
    set->n_hosts = tagc_json_number_or_nan(plan, "n_hosts");
    set->bits_per_s = rate_of(json_object_get(plan, "link"));
    char rate[TAGC_NUMBER_BYTES], link[64] = "";
    if (isfinite(set->bits_per_s))
        snprintf(link, sizeof link, ", link %s", tagc_number_rate(set->bits_per_s, rate));
    set->title = tagc_report_text(report, "%.60s, %.0f ranks%s, simulated", name, set->world_size, link);
    for (size_t i = 0; i < json_array_size(rows); i++) {
        tagc_json_place inside = tagc_json_at(&at, "rows", (int)i);
        TAGC_TRY(read_row(report, rows, i, name, &inside, set));
    }
    return read_checks(report, plan, &at);
}
