/* Lines: axes with round ticks, bands of spread, and names at the ends of lines where there is room, else in a legend. */
#include "core/status.h"
#include "report/charts.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_POINTS = 500, MOST_MARKS = 60, MOST_DIRECT = 8, LABEL_ROW = 16, HEIGHT = 330 };

typedef struct frame {
    tagc_axis x, y;
    double left, right, top, bottom;
    int is_direct; /* names at the ends of lines */
} frame;

typedef struct range {
    double x_min, x_max, y_min, y_max;
} range;

static void widen(range *r, double x, double y, int is_log) {
    if (!isfinite(x) || !isfinite(y) || (is_log && !(x > 0))) return;
    r->x_min = fmin(r->x_min, x);
    r->x_max = fmax(r->x_max, x);
    r->y_min = fmin(r->y_min, y);
    r->y_max = fmax(r->y_max, y);
}

static range find_range(const tagc_chart *chart) {
    const double most = (double)INFINITY;
    range r = {most, -most, most, -most};
    for (int s = 0; s < chart->n_series; s++) {
        const tagc_series *series = &chart->series[s];
        for (int i = 0; i < series->n_points; i++) {
            widen(&r, series->x[i], series->y[i], chart->is_log_x);
            if (!series->low || !isfinite(series->y[i])) continue;
            widen(&r, series->x[i], series->low[i], chart->is_log_x);
            widen(&r, series->x[i], series->high[i], chart->is_log_x);
        }
    }
    if (chart->y_max != 0 && chart->y_max > r.y_min && chart->y_max < r.y_max) r.y_max = chart->y_max;
    if (chart->from_zero) r.y_min = fmin(r.y_min, 0);
    return r;
}

static int is_named(const tagc_series *series) {
    return !series->is_faint && series->n_points > 0;
}

static frame make_frame(const tagc_chart *chart, const range *r, tagc_canvas *c) {
    int is_narrow = c->width < TAGC_WIDE, n_named = 0;
    double longest = 0, lowest = INFINITY, highest = -INFINITY;
    for (int s = 0; s < chart->n_series; s++) {
        const tagc_series *series = &chart->series[s];
        if (!is_named(series)) continue;
        n_named++;
        longest = fmax(longest, tagc_svg_width(series->label, 13));
        lowest = fmin(lowest, series->y[series->n_points - 1]);
        highest = fmax(highest, series->y[series->n_points - 1]);
    }
    frame f = {.left = is_narrow ? 50 : 70, .right = c->width - 16, .top = c->height + 8};
    f.is_direct = !is_narrow && n_named <= MOST_DIRECT && longest <= 170;
    /* Names at the ends of lines that end in one place say nothing. */
    f.is_direct &= (highest - lowest) / (r->y_max - r->y_min) * HEIGHT >= 0.3 * LABEL_ROW * (n_named - 1);
    if (f.is_direct) f.right = c->width - 24 - longest;
    f.bottom = f.top + (is_narrow ? 240 : HEIGHT);
    f.x = tagc_axis_make(r->x_min, r->x_max, is_narrow ? 4 : 8, 0, f.left, f.right);
    f.y = tagc_axis_make(r->y_min, r->y_max, 6, 1, f.bottom, f.top);
    if (chart->is_log_x && r->x_max > r->x_min) {
        f.x.min = r->x_min;
        f.x.max = r->x_max;
        f.x.is_log = 1;
    }
    return f;
}

static double legend(const tagc_chart *chart, tagc_canvas *c) {
    tagc_key *keys = calloc((size_t)chart->n_series + 1, sizeof *keys);
    char(*classes)[TAGC_NUMBER_BYTES] = calloc((size_t)chart->n_series + 1, sizeof *classes);
    int n = 0;
    for (int s = 0; keys && classes && s < chart->n_series; s++) {
        const tagc_series *series = &chart->series[s];
        if (!is_named(series)) continue;
        tagc_svg_line_classes(series->color, classes[n]);
        if (series->has_no_line) strcpy(classes[n], "");
        keys[n] =
            (tagc_key){series->label, classes[n], TAGC_KEY_LINE, series->has_points ? series->color : -1};
        n++;
    }
    double y = tagc_svg_legend(c, keys, n, c->width < TAGC_WIDE ? 8 : 70, c->width - 8, c->height);
    free(keys);
    free(classes);
    return y;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* On a logarithmic axis the ticks are the values themselves, as far as there is room. */
static void draw_log_ticks(const tagc_chart *chart, const frame *f, tagc_canvas *c) {
    double values[256], last = -1e9;
    size_t n = 0;
    for (int s = 0; s < chart->n_series; s++)
        for (int i = 0; i < chart->series[s].n_points && n < 256; i++)
            if (isfinite(chart->series[s].y[i]) && chart->series[s].x[i] > 0)
                values[n++] = chart->series[s].x[i];
    qsort(values, n, sizeof values[0], ascending);
    for (size_t i = 0; i < n; i++) {
        double at = tagc_axis_place(&f->x, values[i]);
        char text[TAGC_NUMBER_BYTES];
        snprintf(text, sizeof text, "%.4g", values[i]);
        if (at - last < tagc_svg_width(text, 13) + 8) continue;
        tagc_svg_line(c, at, f->bottom, at, f->bottom + 5, "frame");
        tagc_svg_text(c, at, f->bottom + 20, 'm', "", text);
        last = at;
    }
}

static void draw_axes(const tagc_chart *chart, const frame *f, tagc_canvas *c) {
    char text[TAGC_NUMBER_BYTES];
    for (int tick = 0; tick < tagc_axis_n_ticks(&f->y); tick++) {
        double value = tagc_axis_tick(&f->y, tick), at = tagc_axis_place(&f->y, value);
        int is_zero = chart->has_zero_line && fabs(value) < f->y.step / 2;
        tagc_svg_line(c, f->left, at, f->right, at, is_zero ? "frame" : "grid");
        tagc_svg_text(c, f->left - 8, at + 4.5, 'e', "", tagc_axis_label(&f->y, value, text));
    }
    if (f->x.is_log) draw_log_ticks(chart, f, c);
    for (int tick = 0; !f->x.is_log && tick < tagc_axis_n_ticks(&f->x); tick++) {
        double value = tagc_axis_tick(&f->x, tick), at = tagc_axis_place(&f->x, value);
        tagc_svg_line(c, at, f->bottom, at, f->bottom + 5, "frame");
        tagc_svg_text(c, at, f->bottom + 20, 'm', "", tagc_axis_label(&f->x, value, text));
    }
    tagc_text_printf(&c->body, "<path class=\"frame\" d=\"M%.1f %.1fV%.1fH%.1f\"/>\n", f->left, f->top,
                     f->bottom, f->right);
    tagc_svg_text(c, (f->left + f->right) / 2, f->bottom + 40, 'm', "soft", chart->x_label);
    double middle = (f->top + f->bottom) / 2;
    tagc_text_printf(&c->body, "<g transform=\"translate(%d %.1f) rotate(-90)\">",
                     c->width < TAGC_WIDE ? 11 : 18, middle);
    tagc_svg_text(c, 0, 0, 'm', "soft", chart->y_label);
    tagc_text_add(&c->body, "</g>\n");
}

/* Every n-th point is enough for the eye; the last one is always there. */
static int stride_of(int n_points) {
    return n_points > MOST_POINTS ? (n_points + MOST_POINTS - 1) / MOST_POINTS : 1;
}

static int is_drawn(const tagc_series *series, const frame *f, int i) {
    return isfinite(series->x[i]) && isfinite(series->y[i]) && (!f->x.is_log || series->x[i] > 0);
}

static void add_place(tagc_canvas *c, const frame *f, char command, double x, double y) {
    tagc_text_printf(&c->body, "%c%.1f %.1f", command, tagc_axis_place(&f->x, x), tagc_axis_place(&f->y, y));
}

static void draw_band(const tagc_series *series, const frame *f, tagc_canvas *c) {
    tagc_text_printf(&c->body, "<path class=\"band p%d\" d=\"", series->color % TAGC_N_COLORS);
    int is_open = 0, stride = stride_of(series->n_points);
    for (int i = 0; i < series->n_points; i += stride) {
        if (!is_drawn(series, f, i) || !isfinite(series->high[i])) continue;
        add_place(c, f, is_open ? 'L' : 'M', series->x[i], series->high[i]);
        is_open = 1;
    }
    for (int i = (series->n_points - 1) / stride * stride; i >= 0; i -= stride)
        if (is_drawn(series, f, i) && isfinite(series->low[i]))
            add_place(c, f, is_open ? 'L' : 'M', series->x[i], series->low[i]);
    tagc_text_add(&c->body, is_open ? "Z\"/>\n" : "\"/>\n");
}

static void draw_marks(const tagc_series *series, const frame *f, tagc_canvas *c) {
    int stride = series->n_points > MOST_MARKS ? (series->n_points + MOST_MARKS - 1) / MOST_MARKS : 1;
    for (int i = 0; i < series->n_points; i += stride) {
        if (!is_drawn(series, f, i) || series->y[i] > f->y.max || series->y[i] < f->y.min) continue;
        char title[160];
        snprintf(title, sizeof title, "%.60s: %.6g at %.6g", series->label, series->y[i], series->x[i]);
        tagc_svg_marker(c, tagc_axis_place(&f->x, series->x[i]), tagc_axis_place(&f->y, series->y[i]),
                        series->color, title);
    }
}

static void draw_line(const tagc_series *series, const frame *f, tagc_canvas *c) {
    char classes[TAGC_NUMBER_BYTES];
    int is_open = 0, stride = stride_of(series->n_points);
    tagc_text_printf(&c->body, "<path class=\"line %s%s\" d=\"",
                     tagc_svg_line_classes(series->color, classes), series->is_faint ? " faint" : "");
    for (int i = 0; i < series->n_points; i += i + stride < series->n_points || i == series->n_points - 1
                                                   ? stride
                                                   : series->n_points - 1 - i) {
        if (is_drawn(series, f, i)) add_place(c, f, is_open ? 'L' : 'M', series->x[i], series->y[i]);
        is_open = is_drawn(series, f, i);
    }
    tagc_text_add(&c->body, "\"/>\n");
}

static void draw_series(const tagc_chart *chart, const frame *f, tagc_canvas *c) {
    tagc_text_printf(
        &c->body,
        "<clipPath id=\"k%d\"><rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"/></clipPath>\n",
        c->id, f->left, f->top - 4, f->right - f->left + 5, f->bottom - f->top + 4);
    tagc_text_printf(&c->body, "<g clip-path=\"url(#k%d)\">\n", c->id);
    for (int pass = 0; pass < 2; pass++) { /* what is faint lies below */
        for (int s = 0; s < chart->n_series; s++) {
            const tagc_series *series = &chart->series[s];
            if (series->is_faint == pass || series->n_points == 0) continue;
            tagc_text_printf(&c->body, "<g data-arm=\"%d\">", series->color);
            if (series->low) draw_band(series, f, c);
            if (!series->has_no_line) draw_line(series, f, c);
            if (series->has_points) draw_marks(series, f, c);
            tagc_text_add(&c->body, "</g>\n");
        }
    }
    tagc_text_add(&c->body, "</g>\n");
}

typedef struct end_label {
    double y, at_y; /* wanted, given */
    double x;
    const tagc_series *series;
} end_label;

static int by_height(const void *a, const void *b) {
    const end_label *x = a, *y = b;
    return (x->y > y->y) - (x->y < y->y);
}

/* Names beside the last points, pushed apart where they would meet. */
static void draw_names(const tagc_chart *chart, const frame *f, tagc_canvas *c) {
    end_label labels[MOST_DIRECT];
    int n = 0;
    for (int s = 0; s < chart->n_series && n < MOST_DIRECT; s++) {
        const tagc_series *series = &chart->series[s];
        int last = series->n_points - 1;
        while (last >= 0 && !is_drawn(series, f, last)) last--;
        if (!is_named(series) || last < 0) continue;
        double y = fmax(fmin(tagc_axis_place(&f->y, series->y[last]), f->bottom), f->top);
        labels[n++] = (end_label){y, y, tagc_axis_place(&f->x, series->x[last]), series};
    }
    qsort(labels, (size_t)n, sizeof labels[0], by_height);
    for (int i = 1; i < n; i++) labels[i].at_y = fmax(labels[i].at_y, labels[i - 1].at_y + LABEL_ROW);
    double limit = f->bottom;
    for (int i = n - 1; i >= 0; i--) {
        labels[i].at_y = fmin(labels[i].at_y, limit);
        limit = labels[i].at_y - LABEL_ROW;
    }
    for (int i = 0; i < n; i++) {
        char classes[TAGC_NUMBER_BYTES], both[TAGC_NUMBER_BYTES + 16];
        snprintf(both, sizeof both, "line faint %s", tagc_svg_line_classes(labels[i].series->color, classes));
        tagc_text_printf(&c->body, "<g data-arm=\"%d\">", labels[i].series->color);
        tagc_svg_line(c, labels[i].x + 5, labels[i].y, f->right + 10, labels[i].at_y, both);
        tagc_svg_text(c, f->right + 14, labels[i].at_y + 4.5, 's', "", labels[i].series->label);
        tagc_text_add(&c->body, "</g>\n");
    }
}

tagc_status tagc_chart_draw(const tagc_chart *chart, tagc_canvas *c) {
    range r = find_range(chart);
    if (!isfinite(r.x_min))
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s: there are no points to draw", chart->title);
    frame f = make_frame(chart, &r, c);
    if (!f.is_direct) {
        double below = legend(chart, c), moved = below + 4 - c->height;
        f.top += moved;
        f.bottom += moved;
        f.y.from_px = f.bottom;
        f.y.to_px = f.top;
    }
    draw_axes(chart, &f, c);
    draw_series(chart, &f, c);
    if (f.is_direct) draw_names(chart, &f, c);
    c->height = f.bottom + 52;
    return TAGC_OK;
}

tagc_status tagc_chart_write(const tagc_chart *chart, const char *path) {
    tagc_canvas canvas = {.width = TAGC_WIDE};
    tagc_text file = {0};
    tagc_status status = tagc_chart_draw(chart, &canvas);
    if (status == TAGC_OK) {
        tagc_svg_print(&canvas, chart->title, chart->y_label, 1, &file);
        status = tagc_text_write(&file, path);
    }
    tagc_text_destroy(&canvas.body);
    tagc_text_destroy(&file);
    return status;
}
