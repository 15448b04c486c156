/* Predicted iteration times as lines; where plans do not vary, as bars. */
#include "report/charts.h"
#include "report/figures.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_ARMS = 64 };

typedef double (*coordinate)(const tagc_plan_point *point);
static double rate_of(const tagc_plan_point *point) {
    return point->bits_per_s;
}
static double world_of(const tagc_plan_point *point) {
    return point->world_size;
}

/* Points of one model that differ in x only are of one chart. */
static int same_chart(const tagc_plan_point *a, const tagc_plan_point *b, coordinate fixed) {
    return strcmp(a->model, b->model) == 0 && fabs(fixed(a) - fixed(b)) <= 1e-6 * fabs(fixed(a));
}

static int n_values(const tagc_report *report, const tagc_plan_point *like, coordinate x, coordinate fixed) {
    double seen[256];
    int n = 0;
    for (int i = 0; i < report->n_plan && n < 256; i++) {
        const tagc_plan_point *point = &report->plan[i];
        int is_new = same_chart(like, point, fixed) && isfinite(point->iteration_s) && x(point) > 0;
        for (int k = 0; is_new && k < n; k++) is_new = seen[k] != x(point);
        if (is_new) seen[n++] = x(point);
    }
    return n;
}

/* The chart with the most values of x; NULL when none has two. */
static const tagc_plan_point *find_chart(const tagc_report *report, coordinate x, coordinate fixed) {
    const tagc_plan_point *best = NULL;
    int most = 1, n_most = report->n_plan < 2000 ? report->n_plan : 2000;
    for (int i = 0; i < n_most; i++) {
        int is_first = 1;
        for (int k = 0; k < i && is_first; k++)
            is_first = !same_chart(&report->plan[k], &report->plan[i], fixed);
        int n = is_first ? n_values(report, &report->plan[i], x, fixed) : 0;
        if (n > most) {
            most = n;
            best = &report->plan[i];
        }
    }
    return best;
}

typedef struct plan_plot {
    tagc_series series[2 * MAX_ARMS];
    double *x[2 * MAX_ARMS], *y[2 * MAX_ARMS];
    int n;
} plan_plot;

static tagc_series *new_series(plan_plot *p, const char *label, int color, int n_most) {
    p->x[p->n] = malloc(((size_t)n_most + 1) * sizeof(double));
    p->y[p->n] = malloc(((size_t)n_most + 1) * sizeof(double));
    tagc_series *series = &p->series[p->n++];
    *series = (tagc_series){.label = label, .color = color, .x = p->x[p->n - 1], .y = p->y[p->n - 1]};
    return p->x[p->n - 1] && p->y[p->n - 1] ? series : NULL;
}

/* x ascending: points come in the order of the files. */
static void insert(plan_plot *p, tagc_series *series, double at, double value) {
    double *x = p->x[series - p->series], *y = p->y[series - p->series];
    int i = series->n_points++;
    for (; i > 0 && x[i - 1] > at; i--) {
        x[i] = x[i - 1];
        y[i] = y[i - 1];
    }
    x[i] = at;
    y[i] = value;
}

static void add_simulated(const tagc_report *report, const tagc_plan_point *chart, coordinate x,
                          coordinate fixed, double x_scale, plan_plot *p) {
    for (int i = 0; i < report->n_plan; i++) {
        const tagc_plan_point *point = &report->plan[i];
        if (!same_chart(chart, point, fixed) || !(x(point) > 0)) continue;
        tagc_series *series = NULL;
        for (int s = 0; s < p->n && !series; s++)
            if (p->series[s].color == point->color) series = &p->series[s];
        if (!series && p->n < MAX_ARMS) series = new_series(p, point->name, point->color, report->n_plan);
        if (series && series->n_points < 1000) insert(p, series, x(point) / x_scale, point->iteration_s);
    }
}

/* Benches of the same arm; where the chart fixes the number of ranks, of as many. The rate that a lab case was set to
 * is known only by its own measure, so that a chart over ranks takes benches within a tenth of its rate. */
static void add_measured(const tagc_report *report, const tagc_plan_point *chart, int is_over_rate,
                         double x_scale, plan_plot *p) {
    int n_lines = p->n;
    for (int s = 0; s < n_lines && p->n < 2 * MAX_ARMS; s++) {
        tagc_series *series = NULL;
        for (int k = 0; k < report->n_sets; k++) {
            const tagc_set *set = &report->sets[k];
            int fits = is_over_rate ? set->world_size == chart->world_size
                                    : fabs(set->bits_per_s / chart->bits_per_s - 1) < 0.1;
            double at = is_over_rate ? set->bits_per_s : set->world_size;
            if (set->kind != TAGC_SET_BENCH || !fits || !(at > 0)) continue;
            for (int i = 0; i < set->n_results; i++) {
                if (set->results[i].color != p->series[s].color || set->results[i].total_s.n == 0) continue;
                if (!series) series = new_series(p, "measured", p->series[s].color, report->n_sets);
                if (!series) return;
                series->has_points = series->has_no_line = series->is_faint = 1;
                if (series->n_points < report->n_sets)
                    insert(p, series, at / x_scale, set->results[i].total_s.middle);
            }
        }
    }
}

static int draw_bars(const tagc_report *report, tagc_canvas *canvas) {
    static const char *const names[] = {"compute, and communication behind it", "exposed communication"};
    static const char *const classes[] = {"c0", "c4"};
    size_t n_most = (size_t)report->n_plan + (size_t)report->n_sets + 1;
    tagc_bar *bars = calloc(n_most, sizeof *bars);
    double(*parts)[2] = calloc(n_most, sizeof *parts), most = 0;
    char(*ends)[TAGC_NUMBER_BYTES] = calloc(n_most, sizeof *ends);
    int n = 0, n_arms = 0;
    for (int s = 0; bars && parts && ends && s < report->n_sets; s++) {
        const tagc_set *set = &report->sets[s];
        if (set->kind != TAGC_SET_PLAN) continue;
        bars[n++] = (tagc_bar){.label = set->title, .is_heading = 1, .color = -1};
        for (int i = 0; i < set->n_results && (size_t)n < n_most; i++) {
            const tagc_result *result = &set->results[i];
            parts[n][0] = result->total_s.middle - result->exposed_s.middle;
            parts[n][1] = result->exposed_s.middle;
            most = fmax(most, result->total_s.middle);
            n_arms += result->total_s.n > 0;
            tagc_number_time(result->total_s.n > 0 ? result->total_s.middle : (double)NAN, ends[n]);
            bars[n] = (tagc_bar){result->name, 0, parts[n], (double)NAN, (double)NAN, ends[n], -1};
            n++;
        }
    }
    tagc_bar_chart chart = {.x_label = most < 1 ? "time of an optimizer step (ms), simulated"
                                                : "time of an optimizer step (s), simulated",
                            .part_names = names,
                            .part_classes = classes,
                            .n_parts = 2,
                            .bars = bars,
                            .n_bars = n,
                            .format = tagc_number_time,
                            .scale = most < 1 ? 1e-3 : 1};
    if (n_arms > 0) tagc_bars_draw(&chart, canvas);
    free(bars);
    free(parts);
    free(ends);
    return n_arms > 0;
}

static int draw_lines(const tagc_report *report, int is_over_rate, tagc_canvas *canvas) {
    coordinate x = is_over_rate ? rate_of : world_of, fixed = is_over_rate ? world_of : rate_of;
    const tagc_plan_point *chart = find_chart(report, x, fixed);
    plan_plot *p = chart ? calloc(1, sizeof *p) : NULL;
    if (!p) return 0;
    double x_scale = is_over_rate ? 1e9 : 1;
    add_simulated(report, chart, x, fixed, x_scale, p);
    int n_lines = p->n;
    for (int s = 0; s < n_lines; s++) p->series[s].has_points = p->series[s].n_points == 1;
    add_measured(report, chart, is_over_rate, x_scale, p);
    char label[160], rate[TAGC_NUMBER_BYTES];
    if (is_over_rate)
        snprintf(label, sizeof label, "link (Gbit/s); %.40s, %.0f ranks", chart->model, chart->world_size);
    else
        snprintf(label, sizeof label, "ranks; %.40s, link %s", chart->model,
                 tagc_number_rate(chart->bits_per_s, rate));
    tagc_chart lines = {.title = "plan",
                        .x_label = label,
                        .y_label = "time of an optimizer step (s)",
                        .series = p->series,
                        .n_series = p->n,
                        .is_log_x = 1,
                        .from_zero = 1};
    int drawn = tagc_chart_draw(&lines, canvas) == TAGC_OK;
    for (int s = 0; s < 2 * MAX_ARMS; s++) {
        free(p->x[s]);
        free(p->y[s]);
    }
    free(p);
    return drawn;
}

int tagc_draw_plan(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas) {
    (void)view;
    if (draw_lines(report, 1, canvas)) return 1;
    return !find_chart(report, world_of, rate_of) && draw_bars(report, canvas);
}

int tagc_draw_plan_world(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas) {
    (void)view;
    return draw_lines(report, 0, canvas);
}
