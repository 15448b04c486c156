/* Loss gap against bits: a cloud of named points, the edge of what is worth having as a line, and the spread of dense
 * seeds as a band in which differences mean nothing. Bits are logarithmic; so are gaps, unless some are well below zero. */
#include "report/figures.h"
#include "report/pareto.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FLOOR 0.01 /* percent: what is below is drawn there on a logarithmic axis */

enum { COLOR_FIRST = 0, COLOR_PAPER = 1, COLOR_FRONT = 2, COLOR_OTHER = 15, FONT = 12, MAX_BOXES = 512 };

typedef struct box {
    double left, top, right, bottom;
} box;

typedef struct cloud {
    tagc_pareto_point points[TAGC_MAX_PARETO];
    int n;
    double dense_spread; /* percent; 0: not known */
    tagc_axis x, y;
    double left, right, top, bottom;
    box boxes[MAX_BOXES]; /* taken places */
    int n_boxes;
} cloud;

static double place_gap(const cloud *p, double gap) {
    return tagc_axis_place(&p->y, p->y.is_log ? fmax(gap, FLOOR) : gap);
}

/* Distance of the first arm's seeds from their mean. */
static double dense_spread(const tagc_report *report) {
    for (int g = 0; g < report->n_groups; g++) {
        const tagc_group *group = &report->groups[g];
        const tagc_runlog *run = &report->runs[group->runs[0]];
        if (group->first != g || group->n_runs < 2 || run->n_evals == 0) continue;
        tagc_spread own = tagc_group_gap(report, group, group, run->eval_steps[run->n_evals - 1]);
        if (own.n > 1) return 100 * fmax(fabs(own.min), fabs(own.max));
    }
    return 0;
}

static void find_axes(cloud *p, const tagc_canvas *c) {
    int is_narrow = c->width < TAGC_WIDE;
    double least = INFINITY, most = 0, highest = 0.1, lowest = 0;
    for (int i = 0; i < p->n; i++) {
        least = fmin(least, p->points[i].bits);
        most = fmax(most, p->points[i].bits);
        const tagc_spread *gap = &p->points[i].gap;
        if (isfinite(gap->middle)) highest = fmax(highest, gap->middle), lowest = fmin(lowest, gap->middle);
        if (isfinite(gap->max)) highest = fmax(highest, gap->max);
        if (isfinite(gap->min)) lowest = fmin(lowest, gap->min);
    }
    p->left = is_narrow ? 50 : 70;
    p->right = c->width - 16;
    p->top = c->height + 8;
    p->bottom = p->top + (is_narrow ? 300 : 420);
    p->x = (tagc_axis){least / 1.3, most * 1.3, 1, p->left, p->right, 1};
    if (lowest < -highest / 10)
        p->y = tagc_axis_make(fmin(lowest, -p->dense_spread), highest, 8, 1, p->bottom, p->top);
    else
        p->y = (tagc_axis){FLOOR * 0.8, highest * 1.3, 1, p->bottom, p->top, 1};
}

static void draw_tick(const cloud *p, int is_x, double at, const char *text, tagc_canvas *c) {
    if (is_x) {
        tagc_svg_line(c, at, p->top, at, p->bottom, "grid");
        tagc_svg_text(c, at, p->bottom + 20, 'm', "", text);
    } else {
        tagc_svg_line(c, p->left, at, p->right, at, "grid");
        tagc_svg_text(c, p->left - 8, at + 4.5, 'e', "", text);
    }
}

static void draw_log_ticks(const cloud *p, const tagc_axis *axis, int is_x, tagc_canvas *c) {
    static const double leads[] = {1, 2, 5};
    double last = -1e9;
    for (int power = -4; power < 5; power++)
        for (int i = 0; i < 3; i++) {
            double value = leads[i] * pow(10, power), at = tagc_axis_place(axis, value);
            char text[TAGC_NUMBER_BYTES];
            if (value < axis->min || value > axis->max) continue;
            int is_floor = !is_x && fabs(value - FLOOR) < 1e-9;
            snprintf(text, sizeof text, "%s%g", is_floor ? "≤ " : "", value);
            double room = is_x ? tagc_svg_width(text, 13) + 10 : 16;
            if (fabs(at - last) < room) continue;
            last = at;
            draw_tick(p, is_x, at, text, c);
        }
}

static void draw_ticks(const cloud *p, tagc_canvas *c) {
    draw_log_ticks(p, &p->x, 1, c);
    if (p->y.is_log) draw_log_ticks(p, &p->y, 0, c);
    for (int i = 0; !p->y.is_log && i < tagc_axis_n_ticks(&p->y); i++) {
        char text[TAGC_NUMBER_BYTES];
        double value = tagc_axis_tick(&p->y, i);
        draw_tick(p, 0, tagc_axis_place(&p->y, value), tagc_axis_label(&p->y, value, text), c);
    }
}

static void draw_frame(const cloud *p, const char *x_label, tagc_canvas *c) {
    draw_ticks(p, c);
    tagc_text_printf(&c->body, "<path class=\"frame\" d=\"M%.1f %.1fV%.1fH%.1f\"/>\n", p->left, p->top,
                     p->bottom, p->right);
    tagc_svg_text(c, (p->left + p->right) / 2, p->bottom + 40, 'm', "soft", x_label);
    tagc_text_printf(&c->body, "<g transform=\"translate(%d %.1f) rotate(-90)\">",
                     c->width < TAGC_WIDE ? 11 : 18, (p->top + p->bottom) / 2);
    tagc_svg_text(c, 0, 0, 'm', "soft", "loss above the first arm's (%)");
    tagc_text_add(&c->body, "</g>\n");
}

static void draw_band(const cloud *p, tagc_canvas *c) {
    if (!(p->dense_spread > FLOOR)) return;
    double at = fmax(place_gap(p, p->dense_spread), p->top);
    double end = fmin(place_gap(p, -p->dense_spread), p->bottom);
    tagc_svg_box(c, p->left, at, p->right - p->left, (p->y.is_log ? p->bottom : end) - at, "band p0",
                 "the first arm's seeds are as far from their mean");
    tagc_svg_text(c, p->right - 4, at + 13, 'e', "small soft", "spread of the first arm's seeds");
}

static int by_bits(const void *a, const void *b) {
    const tagc_pareto_point *x = a, *y = b;
    return (x->bits > y->bits) - (x->bits < y->bits);
}

/* What can be had for at most so many bits. */
static void draw_edge(const cloud *p, tagc_canvas *c) {
    char classes[TAGC_NUMBER_BYTES];
    int is_open = 0;
    double y = 0;
    tagc_text_printf(&c->body, "<path class=\"line faint %s\" d=\"",
                     tagc_svg_line_classes(COLOR_FRONT, classes));
    for (int i = 0; i < p->n; i++) { /* ascending in bits */
        double x = tagc_axis_place(&p->x, p->points[i].bits), before = y;
        double at = place_gap(p, p->points[i].gap.middle);
        int first_wins = p->points[i].is_first && is_open && at > y; /* down is less */
        if (!p->points[i].is_front && !first_wins) continue;
        y = at;
        if (is_open) tagc_text_printf(&c->body, "L%.1f %.1f", x, before);
        tagc_text_printf(&c->body, "%c%.1f %.1f", is_open ? 'L' : 'M', x, y);
        is_open = 1;
    }
    if (is_open) tagc_text_printf(&c->body, "H%.1f", p->right);
    tagc_text_add(&c->body, "\"/>\n");
}

static void take(cloud *p, box taken) {
    if (p->n_boxes < MAX_BOXES) p->boxes[p->n_boxes++] = taken;
}

static int is_free(const cloud *p, const box *b) {
    if (b->left < p->left || b->right > p->right || b->top < p->top || b->bottom > p->bottom) return 0;
    for (int i = 0; i < p->n_boxes; i++) {
        const box *o = &p->boxes[i];
        if (b->left < o->right && o->left < b->right && b->top < o->bottom && o->top < b->bottom) return 0;
    }
    return 1;
}

static void draw_mark(cloud *p, const tagc_pareto_point *point, tagc_canvas *c) {
    double x = tagc_axis_place(&p->x, point->bits), y = place_gap(p, point->gap.middle);
    int color = point->is_first   ? COLOR_FIRST
                : point->is_paper ? COLOR_PAPER
                : point->is_front ? COLOR_FRONT
                                  : COLOR_OTHER;
    char title[200];
    snprintf(title, sizeof title, "%.80s: %+.3f %% (%+.3f to %+.3f) at %.3g bits", point->result->name,
             point->gap.middle, point->gap.min, point->gap.max, point->bits);
    if (point->gap.n > 1)
        tagc_svg_line(c, x, fmin(place_gap(p, point->gap.min), p->bottom), x, place_gap(p, point->gap.max),
                      "whisker");
    tagc_svg_marker(c, x, y, color, title);
    take(p, (box){x - 5, y - 5, x + 5, y + 5});
}

/* Beside its mark wherever there is room, else not at all: the mark tells its name when pointed at. */
static void draw_name(cloud *p, const tagc_pareto_point *point, tagc_canvas *c) {
    static const struct {
        double x, y; /* of the text's start, middle or end */
        char anchor;
    } places[] = {{8, 4, 's'},  {-8, 4, 'e'}, {6, -7, 's'},   {6, 15, 's'},  {-6, -7, 'e'},   {-6, 15, 'e'},
                  {0, -9, 'm'}, {0, 18, 'm'}, {10, -19, 's'}, {10, 27, 's'}, {-10, -19, 'e'}, {-10, 27, 'e'}};
    double x = tagc_axis_place(&p->x, point->bits), y = place_gap(p, point->gap.middle);
    double width = tagc_svg_width(point->result->name, FONT);
    enum { N_PLACES = sizeof places / sizeof places[0] };
    for (int k = 0; k < N_PLACES; k++) {
        int i =
            (k + (point->is_front ? 2 : 0)) % N_PLACES; /* the edge runs through what is beside its marks */
        char anchor = places[i].anchor;
        double at = x + places[i].x, left = at - (anchor == 'e' ? width : anchor == 'm' ? width / 2 : 0);
        box wanted = {left, y + places[i].y - 10, left + width, y + places[i].y + 3};
        if (!is_free(p, &wanted)) continue;
        take(p, wanted);
        const char *classes = point->is_paper ? "small strong" : point->is_front ? "small" : "small soft";
        tagc_svg_text(c, at, y + places[i].y, anchor, classes, point->result->name);
        return;
    }
}

static int draw(const tagc_report *report, int is_all, tagc_canvas *c) {
    cloud *p = calloc(1, sizeof *p);
    if (!p) return 0;
    p->n = tagc_pareto_find(report, is_all, FLOOR, p->points);
    if (p->n > 0) {
        qsort(p->points, (size_t)p->n, sizeof p->points[0], by_bits);
        p->dense_spread = dense_spread(report);
        find_axes(p, c);
        draw_frame(
            p, is_all ? "bits per parameter and step, all legs" : "bits per parameter and step, gradients",
            c);
        draw_band(p, c);
        draw_edge(p, c);
        for (int i = 0; i < p->n; i++) draw_mark(p, &p->points[i], c);
        for (int rank = 0; rank < 2; rank++) /* the important ones have the first choice */
            for (int i = 0; i < p->n; i++) {
                const tagc_pareto_point *point = &p->points[i];
                int is_important = point->is_first || point->is_paper || point->is_front;
                if (is_important == !rank) draw_name(p, point, c);
            }
        c->height = p->bottom + 52;
    }
    int drawn = p->n > 0;
    free(p);
    return drawn;
}

int tagc_draw_pareto(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas) {
    (void)view;
    return draw(report, 0, canvas);
}

int tagc_draw_pareto_all(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas) {
    (void)view;
    return draw(report, 1, canvas);
}
