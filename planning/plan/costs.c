/* What a plan takes from a profile: costs that fit its arms, densities, and what was seen. Or costs that are given. */
#include "plan/rows.h"

#include "core/status.h"
#include <math.h>
#include <string.h>

static int is_in_list(const char *list, const char *name) {
    for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (strcspn(at, ",") == strlen(name) && strncmp(at, name, strlen(name)) == 0) return 1;
    return 0;
}

static tagc_status hold_out(tagc_points *points, const char *list) {
    int n_left = 0;
    for (int i = 0; i < points->n_points; i++) {
        points->points[i].is_held_out = list && !is_in_list(list, points->points[i].arm);
        n_left += !points->points[i].is_held_out;
    }
    if (n_left > 0) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT,
                     "--fit-arms is \"%.80s\"; the profile has no such arm (it begins with %s)",
                     list ? list : "", points->n_points > 0 ? points->points[0].arm : "none at all");
}

tagc_status tagc_plan_fit_costs(tagc_plan_inputs *inputs, const char *arms) {
    TAGC_TRY(hold_out(&inputs->profile, arms));
    TAGC_TRY(tagc_costs_fit(&inputs->profile, &inputs->costs, &inputs->fit_rms));
    inputs->has_costs = 1;
    return TAGC_OK;
}

void tagc_plan_take_costs(tagc_plan_inputs *inputs, const tagc_setup *setup, double compute_s,
                          double codec_ns, double optimizer_ns) {
    tagc_costs_give(&inputs->costs, compute_s / tagc_setup_flops(setup), codec_ns > 0 ? 1e-9 * codec_ns : -1,
                    1e-9 * optimizer_ns);
    inputs->has_costs = 1;
}

void tagc_points_seen(const tagc_points *points, int world_sizes[2], double bytes_per_s[2]) {
    world_sizes[0] = world_sizes[1] = 0;
    bytes_per_s[0] = bytes_per_s[1] = 0;
    for (int i = 0, n = 0; i < points->n_points; i++) {
        const tagc_point *p = &points->points[i];
        if (p->is_held_out) continue;
        int is_first = n++ == 0;
        if (is_first || p->setup.world_size < world_sizes[0]) world_sizes[0] = p->setup.world_size;
        if (is_first || p->setup.world_size > world_sizes[1]) world_sizes[1] = p->setup.world_size;
        if (is_first || p->link.bytes_per_s < bytes_per_s[0]) bytes_per_s[0] = p->link.bytes_per_s;
        if (is_first || p->link.bytes_per_s > bytes_per_s[1]) bytes_per_s[1] = p->link.bytes_per_s;
    }
}

int tagc_plan_largest_seen(const tagc_plan_inputs *inputs) {
    int world_sizes[2];
    double bytes_per_s[2];
    tagc_points_seen(&inputs->profile, world_sizes, bytes_per_s);
    return world_sizes[1];
}

int tagc_points_sent(const tagc_points *points, double sparsity, double *density) {
    double sum = 0;
    int n = 0;
    for (int i = 0; i < points->n_points; i++) {
        const tagc_setup *s = &points->points[i].setup;
        if (s->sent_density <= 0 || fabs(s->engine.reducer.sparsity - sparsity) > 1e-9) continue;
        sum += s->sent_density;
        n++;
    }
    if (n > 0) *density = sum / n;
    return n > 0;
}

int tagc_points_union(const tagc_points *points, double sparsity, int n_ranks, double *density) {
    double sum = 0, exact = 0;
    int n = 0, n_exact = 0;
    if (!(sparsity > 0 && sparsity < 1)) return 0;
    for (int i = 0; i < points->n_points; i++) {
        const tagc_point *p = &points->points[i];
        int world_size = p->setup.world_size;
        if (p->union_density <= 0 || p->union_density >= 1 || world_size < 2) continue;
        if (fabs(p->setup.engine.reducer.sparsity - sparsity) > 1e-9) continue;
        /* 1 - u = sparsity^e; if ranks chose independently, e would be their number */
        double e = log(1 - p->union_density) / log(sparsity), part = (e - 1) / (world_size - 1);
        sum += part < 0 ? 0 : part > 1 ? 1 : part;
        n++;
        if (world_size != n_ranks) continue;
        exact += p->union_density;
        n_exact++;
    }
    if (n == 0) return 0;
    *density = n_exact > 0 ? exact / n_exact : 1 - pow(sparsity, 1 + (n_ranks - 1) * (sum / n));
    return 1;
}
