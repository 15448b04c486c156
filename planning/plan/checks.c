/* Compares forecasts with measured iterations. */
#include "plan/rows.h"

#include "core/status.h"
#include <math.h>
#include <string.h>

static int was_fitted(const tagc_plan_inputs *inputs, const tagc_point *point) {
    for (int i = 0; i < inputs->profile.n_points; i++) {
        const tagc_point *other = &inputs->profile.points[i];
        if (!other->is_held_out && strcmp(other->arm, point->arm) == 0 &&
            strcmp(other->place, point->place) == 0)
            return 1;
    }
    return 0;
}

/* Whether simulation and measurement choose the same arm of each place. Points of a place are neighbours. */
static void compare_places(const tagc_points *points, const tagc_plan_checked *checked,
                           tagc_plan_accuracy *accuracy) {
    const tagc_point *p = points->points;
    for (int first = 0, end; first < points->n_points; first = end) {
        int fastest = first, chosen = first;
        for (end = first; end < points->n_points && strcmp(p[end].place, p[first].place) == 0; end++) {
            if (p[end].total_s < p[fastest].total_s) fastest = end;
            if (checked[end].simulated_s < checked[chosen].simulated_s) chosen = end;
        }
        if (end - first == 1) continue;
        accuracy->n_places++;
        accuracy->n_right += p[chosen].total_s <= p[fastest].total_s;
        accuracy->most_slower = fmax(accuracy->most_slower, p[chosen].total_s / p[fastest].total_s - 1);
    }
}

tagc_status tagc_plan_check(const tagc_plan_inputs *inputs, const tagc_points *points,
                            tagc_plan_checked *checked, tagc_plan_accuracy *accuracy) {
    double sum = 0;
    *accuracy = (tagc_plan_accuracy){0};
    for (int i = 0; i < points->n_points; i++) {
        const tagc_point *p = &points->points[i];
        tagc_costs costs = inputs->costs;
        tagc_forecast f;
        if (p->cores > 0) costs.cores = p->cores;
        tagc_status status = tagc_plan_simulate(&p->setup, &costs, &p->link, &f);
        if (status != TAGC_OK) return tagc_fail_in(status, "arm %s, %s", p->arm, p->place);
        checked[i] =
            (tagc_plan_checked){f.iteration_s, f.iteration_s / p->total_s - 1, was_fitted(inputs, p)};
        if (checked[i].is_fitted) continue;
        accuracy->most_error = fmax(accuracy->most_error, fabs(checked[i].error));
        sum += fabs(checked[i].error);
        accuracy->n_held_out++;
    }
    compare_places(points, checked, accuracy);
    if (accuracy->n_held_out > 0) accuracy->mean_error = sum / accuracy->n_held_out;
    return TAGC_OK;
}

json_t *tagc_plan_checks_json(const tagc_points *points, const tagc_plan_checked *checked) {
    json_t *list = json_array();
    for (int i = 0; i < points->n_points; i++) {
        const tagc_point *p = &points->points[i];
        json_array_append_new(list, json_pack("{s:s, s:s, s:i, s:f, s:f, s:f, s:f, s:f, s:b}", "arm", p->arm,
                                              "place", p->place, "world_size", p->setup.world_size,
                                              "link_bytes_per_s",
                                              isfinite(p->link.bytes_per_s) ? p->link.bytes_per_s : 0.0,
                                              "latency_s", p->link.latency_s, "measured_s", p->total_s,
                                              "simulated_s", checked[i].simulated_s, "error",
                                              checked[i].error, "is_held_out", !checked[i].is_fitted));
    }
    return list;
}
