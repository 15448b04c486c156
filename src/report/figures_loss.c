/* Loss curves: several seeds of an arm are one line, their mean, in a band from least to most. */
#include "report/charts.h"
#include "report/figures.h"
#include <math.h>
#include <stdlib.h>

enum { MAX_GROUPS = 64 };

typedef enum curve_kind { TRAINING, VALIDATION, GAP } curve_kind;

/* One line and its memory. */
typedef struct curve {
    double *x, *y, *low, *high; /* (n) */
    int n;
} curve;

static int make_curve(curve *c, int n) {
    size_t n_bytes = ((size_t)n + 1) * sizeof(double);
    *c = (curve){malloc(n_bytes), malloc(n_bytes), malloc(n_bytes), malloc(n_bytes), n};
    return c->x && c->y && c->low && c->high;
}

static void free_curve(curve *c) {
    free(c->x);
    free(c->y);
    free(c->low);
    free(c->high);
    *c = (curve){0};
}

/* Seconds of training before the end of `step`. */
static double time_of(const tagc_runlog *run, const double *until, double step) {
    int low = 0, high = run->n_steps; /* steps ascend */
    while (low < high) {
        int middle = (low + high) / 2;
        if (run->steps[middle].step <= step)
            low = middle + 1;
        else
            high = middle;
    }
    return low > 0 ? until[low - 1] : step <= 0 ? 0 : (double)NAN;
}

static double *times_of(const tagc_runlog *run) {
    double *until = malloc(((size_t)run->n_steps + 1) * sizeof *until), sum = 0;
    for (int i = 0; until && i < run->n_steps; i++)
        until[i] = sum += isfinite(run->steps[i].wall_s) ? fmax(run->steps[i].wall_s, 0) : 0;
    return until;
}

/* Mean of a fortieth of the run around each step: the eye cannot follow single batches. */
static void smooth(const tagc_runlog *run, int n, double *out) {
    int half = run->n_steps / 80, from = 0, to = 0, n_in = 0;
    double sum = 0;
    for (int i = 0; i < n; i++) {
        for (; to < run->n_steps && to <= i + half; to++)
            if (isfinite(run->steps[to].loss)) sum += run->steps[to].loss, n_in++;
        for (; from < i - half; from++)
            if (isfinite(run->steps[from].loss)) sum -= run->steps[from].loss, n_in--;
        out[i] = n_in > 0 ? sum / n_in : (double)NAN;
    }
}

static int training_curve(const tagc_report *report, const tagc_group *group, curve *out) {
    int n = report->runs[group->runs[0]].n_steps;
    for (int i = 1; i < group->n_runs; i++) {
        int other = report->runs[group->runs[i]].n_steps;
        n = other < n ? other : n;
    }
    if (!make_curve(out, n)) return 0;
    for (int k = 0; k < n; k++) out->y[k] = 0;
    for (int i = 0; i < group->n_runs; i++) {
        const tagc_runlog *run = &report->runs[group->runs[i]];
        smooth(run, n, out->low);
        for (int k = 0; k < n; k++) out->y[k] += out->low[k] / group->n_runs;
        for (int k = 0; k < n && i == 0; k++) out->x[k] = run->steps[k].step;
    }
    return 1;
}

static double loss_at(const tagc_runlog *run, int guess, double step) {
    if (guess < run->n_evals && run->eval_steps[guess] == step) return run->val_losses[guess];
    for (int i = 0; i < run->n_evals; i++)
        if (run->eval_steps[i] == step) return run->val_losses[i];
    return (double)NAN;
}

static int validation_curve(const tagc_report *report, const tagc_group *group, curve_kind kind, curve *out) {
    const tagc_runlog *first = &report->runs[group->runs[0]];
    double *values = malloc((size_t)group->n_runs * sizeof *values);
    int ok = make_curve(out, first->n_evals) && values;
    for (int e = 0; ok && e < first->n_evals; e++) {
        double step = first->eval_steps[e];
        for (int i = 0; i < group->n_runs; i++) values[i] = loss_at(&report->runs[group->runs[i]], e, step);
        tagc_spread spread = tagc_spread_of(values, group->n_runs, 1);
        if (kind == GAP) {
            spread = tagc_group_gap(report, group, &report->groups[group->first], step);
            spread = (tagc_spread){100 * spread.middle, 100 * spread.min, 100 * spread.max, spread.n};
        }
        out->x[e] = step;
        out->y[e] = spread.n > 0 ? spread.middle : (double)NAN;
        out->low[e] = spread.min;
        out->high[e] = spread.max;
    }
    free(values);
    return ok;
}

/* From steps to seconds, mean over the runs of the group. */
static void to_time(const tagc_report *report, const tagc_group *group, curve *c) {
    double *steps = malloc(((size_t)c->n + 1) * sizeof *steps);
    for (int k = 0; steps && k < c->n; k++) {
        steps[k] = c->x[k];
        c->x[k] = 0;
    }
    for (int i = 0; steps && i < group->n_runs; i++) {
        const tagc_runlog *run = &report->runs[group->runs[i]];
        double *until = times_of(run);
        for (int k = 0; until && k < c->n; k++) c->x[k] += time_of(run, until, steps[k]) / group->n_runs;
        free(until);
    }
    free(steps);
}

/* Where the interesting part begins: the highest loss past the first tenth of the way. */
static double interesting_max(const tagc_series *series, int n_series) {
    double max = 0;
    for (int s = 0; s < n_series; s++)
        for (int i = 0; i < series[s].n_points; i++)
            if (series[s].x[i] >= series[s].x[series[s].n_points - 1] / 10 && isfinite(series[s].y[i]))
                max = fmax(max, series[s].y[i]);
    return max;
}

typedef struct plot {
    curve curves[2 * MAX_GROUPS];
    tagc_series series[2 * MAX_GROUPS];
    int n;
} plot;

static void add(plot *p, const tagc_group *group, curve_kind kind, int is_only) {
    curve *c = &p->curves[p->n];
    int has_band = kind != TRAINING && group->n_runs > 1;
    p->series[p->n++] = (tagc_series){.label = group->name,
                                      .color = group->color,
                                      .x = c->x,
                                      .y = c->y,
                                      .low = has_band ? c->low : NULL,
                                      .high = has_band ? c->high : NULL,
                                      .n_points = c->n,
                                      .is_faint = kind == TRAINING && !is_only,
                                      .has_points = kind != TRAINING};
}

static int has_evals(const tagc_report *report) {
    for (int i = 0; i < report->n_runs; i++)
        if (report->runs[i].n_evals > 1) return 1;
    return 0;
}

static double end_of(const plot *p) {
    double end = 0;
    for (int s = 0; s < p->n; s++)
        for (int i = 0; i < p->series[s].n_points; i++)
            if (isfinite(p->series[s].x[i])) end = fmax(end, p->series[s].x[i]);
    return end;
}

static void collect(const tagc_report *report, int is_time, int is_gap, plot *p) {
    int any_evals = has_evals(report), ok = 1;
    for (int g = 0; ok && g < report->n_groups && g < MAX_GROUPS; g++) {
        const tagc_group *group = &report->groups[g];
        const tagc_runlog *run = &report->runs[group->runs[0]];
        if (is_time && run->n_steps == 0) continue;
        if (!is_gap && run->n_steps > 0) {
            ok = training_curve(report, group, &p->curves[p->n]);
            if (ok && is_time) to_time(report, group, &p->curves[p->n]);
            add(p, group, TRAINING, !any_evals);
        }
        if (ok && any_evals && run->n_evals > 0) {
            ok = validation_curve(report, group, is_gap ? GAP : VALIDATION, &p->curves[p->n]);
            if (ok && is_time) to_time(report, group, &p->curves[p->n]);
            add(p, group, is_gap ? GAP : VALIDATION, 1);
        }
    }
}

static int draw(const tagc_report *report, int is_time, int is_gap, tagc_canvas *canvas) {
    plot *p = calloc(1, sizeof *p);
    if (!p) return 0;
    collect(report, is_time, is_gap, p);
    static const struct {
        double most_s, scale;
        const char *label;
    } units[] = {{300, 1, "time of training (s)"},
                 {18000, 60, "time of training (min)"},
                 {INFINITY, 3600, "time of training (h)"}};
    const char *x_label = "optimizer step";
    int unit = 0;
    double end = is_time ? end_of(p) : 0;
    while (end > units[unit].most_s) unit++;
    for (int s = 0; s < p->n && is_time; s++)
        for (int i = 0; i < p->curves[s].n; i++) p->curves[s].x[i] /= units[unit].scale;
    if (is_time) x_label = units[unit].label;
    tagc_chart chart = {.title = "loss",
                        .x_label = x_label,
                        .y_label =
                            is_gap ? "validation loss against the first arm (%)" : "loss (nats per token)",
                        .series = p->series,
                        .n_series = p->n,
                        .has_zero_line = is_gap};
    if (!is_gap) chart.y_max = interesting_max(p->series, p->n);
    int drawn = p->n > 0 && (!is_time || end > 0) && tagc_chart_draw(&chart, canvas) == TAGC_OK;
    for (int s = 0; s < 2 * MAX_GROUPS; s++) free_curve(&p->curves[s]);
    free(p);
    return drawn;
}

int tagc_draw_loss(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas) {
    (void)view;
    return draw(report, 0, 0, canvas);
}

int tagc_draw_loss_time(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas) {
    (void)view;
    return draw(report, 1, 0, canvas);
}

int tagc_draw_gap(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas) {
    (void)view;
    int n = 0;
    for (int g = 0; g < report->n_groups; g++) n += report->runs[report->groups[g].runs[0]].n_evals > 1;
    return n > 1 && draw(report, 0, 1, canvas);
}
