/* Which arms are worth their bits. */
#include "report/pareto.h"
#include <math.h>
#include <string.h>

static double bits_of(const tagc_result *result, int is_all) {
    double sum = 0;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++)
        if (is_all || (leg != TAGC_LEG_GATHER && leg != TAGC_LEG_CONTROL))
            sum += isfinite(result->bits[leg]) ? result->bits[leg] : 0;
    return sum;
}

/* Count sketches are the paper's way. */
static int is_paper(const tagc_result *result) {
    const char *exchange = json_string_value(json_object_get(result->options, "exchange"));
    return exchange && strcmp(exchange, "sketch") == 0;
}

static int beats(const tagc_pareto_point *a, const tagc_pareto_point *b, double floor) {
    double x = fmax(a->gap.middle, floor), y = fmax(b->gap.middle, floor);
    return a->bits <= b->bits && x <= y && (a->bits < b->bits || x < y);
}

int tagc_pareto_find(const tagc_report *report, int is_all, double floor, tagc_pareto_point *points) {
    int n = 0;
    for (int s = 0; s < report->n_sets; s++) {
        const tagc_set *set = &report->sets[s];
        for (int i = 0; set->kind == TAGC_SET_RUNS && i < set->n_results && n < TAGC_MAX_PARETO; i++) {
            const tagc_result *result = &set->results[i];
            double bits = bits_of(result, is_all);
            if (!(bits > 0) || (i > 0 && result->gap.n == 0)) continue;
            tagc_spread gap = {100 * result->gap.middle, 100 * result->gap.min, 100 * result->gap.max,
                               result->gap.n};
            if (i == 0) gap = (tagc_spread){0, 0, 0, 0};
            points[n++] = (tagc_pareto_point){set, result, bits, gap, i == 0, is_paper(result), 0};
        }
    }
    int n_others = 0;
    for (int i = 0; i < n; i++) {
        n_others += !points[i].is_first;
        points[i].is_front = !points[i].is_first;
        for (int k = 0; k < n && points[i].is_front; k++)
            points[i].is_front = points[k].is_first || !beats(&points[k], &points[i], floor);
    }
    return n_others > 0 ? n : 0;
}
