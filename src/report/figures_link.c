/* Validation loss over the time that steps would take on a link: runs tell the loss, a plan the time of a step. */
#include "report/charts.h"
#include "report/figures.h"
#include "report/pareto.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FLOOR 0.01
enum { MOST_LINES = 8 };

typedef struct plot {
    tagc_series series[MOST_LINES];
    double *x[MOST_LINES], *y[MOST_LINES];
    int n;
} plot;

static const tagc_group *group_of(const tagc_report *report, const tagc_pareto_point *point) {
    for (int g = 0; g < report->n_groups; g++)
        if (report->groups[g].place == point->set->place &&
            strcmp(report->groups[g].name, point->result->name) == 0)
            return &report->groups[g];
    return NULL;
}

/* The slowest or the fastest link that anything was simulated for; NaN without one. */
static double find_link(const tagc_report *report, int is_fast) {
    double found = (double)NAN;
    for (int r = 0; r < report->n_runs; r++)
        for (int i = 0; i < report->runs[r].n_links; i++) {
            double rate = report->runs[r].link_bits_per_s[i];
            if (isnan(found) || (is_fast ? rate > found : rate < found)) found = rate;
        }
    return found;
}

static double step_s(const tagc_runlog *run, double bits_per_s) {
    for (int i = 0; i < run->n_links; i++)
        if (run->link_bits_per_s[i] == bits_per_s) return run->link_step_s[i];
    return (double)NAN;
}

/* Mean over seeds at each validation, from where the runs begin. */
static void add_line(const tagc_report *report, const tagc_pareto_point *point, double bits_per_s, plot *p) {
    const tagc_group *group = group_of(report, point);
    const tagc_runlog *run = group ? &report->runs[group->runs[0]] : NULL;
    double seconds = run ? step_s(run, bits_per_s) : (double)NAN;
    if (!(seconds > 0) || run->n_evals < 2 || p->n == MOST_LINES) return;
    double *x = p->x[p->n] = calloc((size_t)run->n_evals, sizeof *x);
    double *y = p->y[p->n] = calloc((size_t)run->n_evals, sizeof *y);
    for (int e = 0; x && y && e < run->n_evals; e++) {
        x[e] = (run->eval_steps[e] - run->eval_steps[0]) * seconds;
        for (int i = 0; i < group->n_runs; i++) {
            const tagc_runlog *other = &report->runs[group->runs[i]];
            int is_there = e < other->n_evals && other->eval_steps[e] == run->eval_steps[e];
            y[e] += is_there ? other->val_losses[e] / group->n_runs : (double)NAN;
        }
    }
    int i = p->n++;
    p->series[i] = (tagc_series){.label = group->name,
                                 .color = point->is_first   ? 0
                                          : point->is_paper ? 1
                                                            : i + 2,
                                 .x = x,
                                 .y = y,
                                 .n_points = x && y ? run->n_evals : 0,
                                 .has_points = 1};
}

static int draw(const tagc_report *report, int is_fast, tagc_canvas *canvas) {
    plot *p = calloc(1, sizeof *p);
    tagc_pareto_point *points = calloc(TAGC_MAX_PARETO, sizeof *points);
    double bits_per_s = find_link(report, is_fast);
    int n = p && points && !(is_fast && bits_per_s == find_link(report, 0))
                ? tagc_pareto_find(report, 1, FLOOR, points)
                : 0;
    for (int pass = 0; pass < 3; pass++) /* the first arm, the paper's, what nothing beats */
        for (int i = 0; i < n; i++) {
            const tagc_pareto_point *point = &points[i];
            int kind = point->is_first ? 0 : point->is_paper ? 1 : point->is_front ? 2 : 3;
            if (kind == pass && point->set == points[0].set) add_line(report, point, bits_per_s, p);
        }
    double end = 0, scale = 1;
    for (int s = 0; p && s < p->n; s++)
        if (p->series[s].n_points > 0) end = fmax(end, p->x[s][p->series[s].n_points - 1]);
    const char *unit = "s";
    if (end > 600) scale = 60, unit = "min";
    if (end > 36000) scale = 3600, unit = "h";
    for (int s = 0; p && s < p->n; s++)
        for (int i = 0; i < p->series[s].n_points; i++) p->x[s][i] /= scale;
    char rate[TAGC_NUMBER_BYTES], x_label[120];
    snprintf(x_label, sizeof x_label, "simulated time at %s (%s)", tagc_number_rate(bits_per_s, rate), unit);
    tagc_chart chart = {.title = "loss over simulated time",
                        .x_label = x_label,
                        .y_label = "validation loss (nats per token)",
                        .series = p ? p->series : NULL,
                        .n_series = p ? p->n : 0};
    int drawn = p && p->n > 1 && tagc_chart_draw(&chart, canvas) == TAGC_OK;
    for (int s = 0; p && s < MOST_LINES; s++) {
        free(p->x[s]);
        free(p->y[s]);
    }
    free(points);
    free(p);
    return drawn;
}

int tagc_draw_loss_slow(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas) {
    (void)view;
    return draw(report, 0, canvas);
}

int tagc_draw_loss_fast(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas) {
    (void)view;
    return draw(report, 1, canvas);
}
