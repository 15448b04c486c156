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

/* The arms that simulation and measurement choose in each place. Points of a place are neighbours. */
typedef struct choice {
    const char *place;
    double simulated_s, chosen_s, measured_s; /* least simulated; measured of that arm; least measured */
    int n_arms, n_places, n_right;
    double most; /* excess of the chosen arm over the fastest, as a share */
} choice;

static void end_place(choice *c) {
    if (c->n_arms > 1) {
        double more = c->chosen_s / c->measured_s - 1;
        c->n_places++;
        c->n_right += more <= 0;
        c->most = fmax(c->most, more);
    }
    c->n_arms = 0;
}

static void compare_in_place(choice *c, const tagc_point *p, double simulated_s) {
    if (c->place && strcmp(c->place, p->place) != 0) end_place(c);
    c->place = p->place;
    if (c->n_arms == 0 || simulated_s < c->simulated_s) {
        c->simulated_s = simulated_s;
        c->chosen_s = p->total_s;
    }
    if (c->n_arms == 0 || p->total_s < c->measured_s) c->measured_s = p->total_s;
    c->n_arms++;
}

tagc_status tagc_plan_check(const tagc_plan_inputs *inputs, const tagc_points *points,
                            tagc_plan_checked *checked, tagc_plan_verdict *verdict) {
    choice best = {0};
    double sum = 0;
    *verdict = (tagc_plan_verdict){0};
    for (int i = 0; i < points->n_points; i++) {
        const tagc_point *p = &points->points[i];
        tagc_costs costs = inputs->costs;
        tagc_forecast f;
        if (p->cores > 0) costs.cores = p->cores;
        tagc_status status = tagc_plan_simulate(&p->setup, &costs, &p->link, &f);
        if (status != TAGC_OK) return tagc_fail_in(status, "arm %s, %s", p->arm, p->place);
        checked[i] =
            (tagc_plan_checked){f.iteration_s, f.iteration_s / p->total_s - 1, was_fitted(inputs, p)};
        compare_in_place(&best, p, f.iteration_s);
        if (checked[i].is_fitted) continue;
        verdict->most_error = fmax(verdict->most_error, fabs(checked[i].error));
        sum += fabs(checked[i].error);
        verdict->n_held_out++;
    }
    end_place(&best);
    if (verdict->n_held_out > 0) verdict->mean_error = sum / verdict->n_held_out;
    verdict->n_places = best.n_places;
    verdict->n_right = best.n_right;
    verdict->most_slower = best.most;
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
