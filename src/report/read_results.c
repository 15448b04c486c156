/* What result files share, and results of tagc bench. */
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

tagc_status tagc_result_read_legs(const json_t *parent, const char *name, const tagc_json_place *at,
                                  double legs[TAGC_N_LEGS]) {
    const json_t *object;
    TAGC_TRY(tagc_json_object(parent, name, at, &object));
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
        double value = tagc_json_number_or_nan(object, tagc_leg_names[leg]);
        legs[leg] = isfinite(value) ? value : 0;
    }
    return TAGC_OK;
}

void tagc_result_read_memory(const json_t *object, double memory[TAGC_N_MEMORIES]) {
    for (int i = 0; i < TAGC_N_MEMORIES; i++)
        memory[i] = tagc_json_number_or_nan(object, tagc_memory_names[i]);
}

tagc_status tagc_result_read_spread(const json_t *parent, const char *name, const tagc_json_place *at,
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
    TAGC_TRY(tagc_result_read_spread(arm, "total_s", at, &out->total_s));
    TAGC_TRY(tagc_result_read_spread(arm, "exposed_s", at, &out->exposed_s));
    TAGC_TRY(tagc_result_read_spread(arm, "speedup", at, &out->speedup));
    TAGC_TRY(read_parts(arm, at, out));
    TAGC_TRY(tagc_result_read_legs(arm, "bits_per_param", at, out->bits));
    const json_t *memory;
    TAGC_TRY(tagc_json_object(arm, "memory_bytes", at, &memory));
    tagc_result_read_memory(memory, out->memory);
    TAGC_TRY(tagc_json_number(arm, "n_params", at, &out->n_params));
    out->n_compressed = tagc_json_number_or_nan(arm, "n_compressed");
    out->options = json_object_get(arm, "options");
    return TAGC_OK;
}

tagc_set *tagc_report_new_set(tagc_report *report) {
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
    arms = json_object_get(bench, "arms"); /* null when it was left out */
    if (!json_is_null(arms)) TAGC_TRY(tagc_json_list(bench, "arms", &at, &arms));
    TAGC_TRY(tagc_json_object(bench, "model", &at, &model));
    TAGC_TRY(tagc_json_text(model, "name", &at, &name));
    tagc_set *set = tagc_report_new_set(report);
    if (!set) return TAGC_ERR_MEMORY;
    set->kind = TAGC_SET_BENCH;
    set->bench = bench;
    TAGC_TRY(tagc_json_number(bench, "world_size", &at, &set->world_size));
    if (!(set->world_size >= 1))
        return tagc_fail(TAGC_ERR_CORRUPT, "%s: world_size is %g, must be at least 1", at.text,
                         set->world_size);
    TAGC_TRY(tagc_json_number(bench, "n_hosts", &at, &set->n_hosts));
    set->bits_per_s = 8 * tagc_json_number_or_nan(json_object_get(bench, "link"), "all_to_all_bytes_per_s");
    const char *transport = json_string_value(json_object_get(bench, "transport"));
    int is_local = transport && strcmp(transport, "local") == 0; /* then nothing travels over a network */
    char rate[TAGC_NUMBER_BYTES], text[64] = "";
    if (isfinite(set->bits_per_s))
        snprintf(text, sizeof text, ", %s %s", is_local ? "memory" : "link",
                 tagc_number_rate(set->bits_per_s, rate));
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
