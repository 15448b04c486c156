/* Drawing by printing: axes with round ticks, a line per series, a legend. Colours are told apart by people
 * who see few of them (Okabe and Ito's palette), and by dashes. */
#include "report/chart.h"

#include "core/status.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { WIDTH = 760, HEIGHT = 440, LEFT = 70, RIGHT = 24, TOP = 48, BOTTOM = 56, MAX_SERIES = 8 };

typedef struct axis {
    double min, max, step;
    double from_px, to_px;
} axis;

static const char style[] =
    "<style>\n"
    "text { font: 13px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #24292f }\n"
    ".title { font-size: 15px; font-weight: 600 }\n"
    ".page { fill: #ffffff } .grid { stroke: #d0d7de; stroke-width: 1 } .frame { stroke: #57606a; "
    "stroke-width: 1 }\n"
    ".line { fill: none; stroke-width: 2; stroke-linejoin: round }\n"
    ".s0 { stroke: #0072b2 } .s1 { stroke: #d55e00 } .s2 { stroke: #009e73 } .s3 { stroke: #b3568f }\n"
    ".s4 { stroke: #b07d00 } .s5 { stroke: #3f9bd1 } .s6 { stroke: #7a5cc4 } .s7 { stroke: #6e7781 }\n"
    ".s1 { stroke-dasharray: 8 3 } .s2 { stroke-dasharray: 2 3 } .s3 { stroke-dasharray: 10 3 2 3 }\n"
    ".s5 { stroke-dasharray: 8 3 } .s6 { stroke-dasharray: 2 3 } .s7 { stroke-dasharray: 10 3 2 3 }\n"
    "@media (prefers-color-scheme: dark) {\n"
    "text { fill: #e6edf3 } .page { fill: #0d1117 } .grid { stroke: #30363d } .frame { stroke: #8b949e }\n"
    ".s0 { stroke: #58b4f0 } .s1 { stroke: #ff8c42 } .s2 { stroke: #3fd0a4 } .s3 { stroke: #e79bc8 }\n"
    ".s4 { stroke: #f0c24a } .s5 { stroke: #9bd3f5 } .s6 { stroke: #b7a0f0 } .s7 { stroke: #b1bac4 }\n"
    "}\n"
    "</style>\n";

/* A step of 1, 2 or 5 times a power of ten that gives about `n` ticks; the ends move out to ticks where
 * asked. */
static axis make_axis(double min, double max, int n, int round_ends, double from_px, double to_px) {
    if (!(max > min)) {
        min -= 0.5;
        max = min + 1;
    }
    double rough = (max - min) / n, power = pow(10, floor(log10(rough))), lead = rough / power;
    double step = power * (lead < 1.5 ? 1 : lead < 3.5 ? 2 : lead < 7.5 ? 5 : 10);
    if (round_ends) {
        min = floor(min / step) * step;
        max = ceil(max / step) * step;
    }
    return (axis){min, max, step, from_px, to_px};
}

static double place(const axis *a, double value) {
    return a->from_px + (value - a->min) / (a->max - a->min) * (a->to_px - a->from_px);
}

static void print_escaped(FILE *out, const char *text) {
    for (; *text; text++) {
        if (*text == '<')
            fputs("&lt;", out);
        else if (*text == '&')
            fputs("&amp;", out);
        else if ((unsigned char)*text >= ' ')
            fputc(*text, out);
    }
}

static void print_text(FILE *out, double x, double y, const char *attributes, const char *text) {
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, attributes);
    print_escaped(out, text);
    fputs("</text>\n", out);
}

static int tick_digits(double step) {
    int digits = (int)ceil(-log10(step) - 1e-9);
    return digits < 0 ? 0 : digits > 9 ? 9 : digits;
}

/* Ticks are whole multiples of the step: the number of the first, and how many there are. */
static double first_tick(const axis *a) {
    return ceil(a->min / a->step - 1e-9);
}

static int n_ticks(const axis *a) {
    return (int)(floor(a->max / a->step + 1e-9) - first_tick(a)) + 1;
}

static void print_axes(FILE *out, const tagc_chart *chart, const axis *x, const axis *y) {
    char text[40];
    for (int tick = 0; tick < n_ticks(y); tick++) {
        double value = (first_tick(y) + tick) * y->step;
        double at = place(y, value);
        fprintf(out, "<path class=\"grid\" d=\"M%d %.1fH%d\"/>\n", LEFT, at, WIDTH - RIGHT);
        snprintf(text, sizeof text, "%.*f", tick_digits(y->step), value + 0.0);
        print_text(out, LEFT - 8, at + 4.5, "text-anchor=\"end\"", text);
    }
    for (int tick = 0; tick < n_ticks(x); tick++) {
        double value = (first_tick(x) + tick) * x->step;
        double at = place(x, value);
        fprintf(out, "<path class=\"frame\" d=\"M%.1f %dv5\"/>\n", at, HEIGHT - BOTTOM);
        snprintf(text, sizeof text, "%.*f", tick_digits(x->step), value + 0.0);
        print_text(out, at, HEIGHT - BOTTOM + 20, "text-anchor=\"middle\"", text);
    }
    fprintf(out, "<path class=\"frame\" fill=\"none\" d=\"M%d %dV%dH%d\"/>\n", LEFT, TOP, HEIGHT - BOTTOM,
            WIDTH - RIGHT);
    print_text(out, LEFT, 28, "class=\"title\"", chart->title);
    print_text(out, (LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 14, "text-anchor=\"middle\"", chart->x_label);
    fprintf(out, "<g transform=\"translate(20 %d) rotate(-90)\">", (TOP + HEIGHT - BOTTOM) / 2);
    print_text(out, 0, 0, "text-anchor=\"middle\"", chart->y_label);
    fputs("</g>\n", out);
}

static void print_series(FILE *out, const tagc_chart *chart, const axis *x, const axis *y) {
    fprintf(out, "<clipPath id=\"plot\"><rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\"/></clipPath>\n",
            LEFT, TOP, WIDTH - RIGHT - LEFT, HEIGHT - BOTTOM - TOP);
    for (int s = 0; s < chart->n_series; s++) {
        const tagc_series *series = &chart->series[s];
        fprintf(out, "<path class=\"line s%d\" clip-path=\"url(#plot)\" d=\"", s % MAX_SERIES);
        int is_open = 0;
        for (int i = 0; i < series->n_points; i++) {
            if (!isfinite(series->y[i])) {
                is_open = 0;
                continue;
            }
            fprintf(out, "%c%.1f %.1f", is_open ? 'L' : 'M', place(x, series->x[i]), place(y, series->y[i]));
            is_open = 1;
        }
        fputs("\"/>\n", out);
    }
    /* Curves that fall leave the upper right free. */
    size_t longest = 0;
    for (int s = 0; s < chart->n_series; s++)
        if (strlen(chart->series[s].label) > longest) longest = strlen(chart->series[s].label);
    double left = WIDTH - RIGHT - 60 - 7.2 * (double)longest;
    if (left < LEFT + 20) left = LEFT + 20;
    fprintf(out, "<rect class=\"page\" opacity=\"0.85\" x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\"/>\n",
            left - 8, TOP + 2, WIDTH - RIGHT - left + 8, 22 * chart->n_series + 6);
    for (int s = 0; s < chart->n_series; s++) {
        double at = TOP + 18 + 22.0 * s;
        fprintf(out, "<path class=\"line s%d\" d=\"M%.1f %.1fh36\"/>\n", s % MAX_SERIES, left, at);
        print_text(out, left + 44, at + 4.5, "", chart->series[s].label);
    }
}

static void find_ranges(const tagc_chart *chart, double range[4]) {
    range[0] = range[2] = (double)INFINITY;
    range[1] = range[3] = -(double)INFINITY;
    for (int s = 0; s < chart->n_series; s++) {
        for (int i = 0; i < chart->series[s].n_points; i++) {
            double x = chart->series[s].x[i], y = chart->series[s].y[i];
            if (!isfinite(x) || !isfinite(y)) continue;
            range[0] = fmin(range[0], x);
            range[1] = fmax(range[1], x);
            range[2] = fmin(range[2], y);
            range[3] = fmax(range[3], y);
        }
    }
    if (chart->y_max > range[2] && chart->y_max < range[3]) range[3] = chart->y_max;
}

tagc_status tagc_chart_write(const tagc_chart *chart, const char *path) {
    double range[4];
    find_ranges(chart, range);
    if (!isfinite(range[0])) return tagc_fail(TAGC_ERR_ARGUMENT, "%s: there are no points to draw", path);
    axis x = make_axis(range[0], range[1], 8, 0, LEFT, WIDTH - RIGHT);
    axis y = make_axis(range[2], range[3], 6, 1, HEIGHT - BOTTOM, TOP);
    FILE *out = fopen(path, "w");
    if (!out) return tagc_fail(TAGC_ERR_IO, "%s: %s", path, strerror(errno));
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\">\n",
            WIDTH, HEIGHT, WIDTH, HEIGHT);
    fputs(style, out);
    fprintf(out, "<rect class=\"page\" width=\"%d\" height=\"%d\"/>\n", WIDTH, HEIGHT);
    print_axes(out, chart, &x, &y);
    print_series(out, chart, &x, &y);
    fputs("</svg>\n", out);
    int failed = ferror(out);
    failed |= fclose(out) != 0;
    return failed ? tagc_fail(TAGC_ERR_IO, "%s: %s", path, strerror(errno)) : TAGC_OK;
}
