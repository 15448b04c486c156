/* Stacked bars, lying: a row per arm takes names of any length and arms of any number. */
#include "report/charts.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BAR = 22, ROW = 34, NARROW_ROW = 50, HEADING = 28 };

static double part_of(const tagc_bar *bar, int part) {
    double value = bar->parts ? bar->parts[part] : 0;
    return isfinite(value) && value > 0 ? fmin(value, 1e300) : 0;
}

static double sum_of(const tagc_bar_chart *chart, const tagc_bar *bar) {
    double sum = 0;
    for (int part = 0; part < chart->n_parts; part++) sum += part_of(bar, part);
    return fmin(sum, 1e300);
}

static double largest(const tagc_bar_chart *chart) {
    double most = chart->mark;
    for (int b = 0; b < chart->n_bars; b++) {
        most = fmax(most, sum_of(chart, &chart->bars[b]));
        if (isfinite(chart->bars[b].high)) most = fmax(most, chart->bars[b].high);
    }
    return most > 0 ? most : 1;
}

static int is_met(const tagc_bar_chart *chart, int part) {
    for (int b = 0; b < chart->n_bars; b++)
        if (part_of(&chart->bars[b], part) > 0) return 1;
    return 0;
}

static void draw_bar(const tagc_bar_chart *chart, const tagc_bar *bar, const tagc_axis *x, double y,
                     tagc_canvas *c) {
    double sum = 0;
    for (int part = 0; part < chart->n_parts; part++) {
        double value = part_of(bar, part), from = tagc_axis_place(x, sum),
               to = tagc_axis_place(x, sum + value);
        sum += value;
        if (!(to > from)) continue;
        char classes[32], number[TAGC_NUMBER_BYTES], title[200];
        if (bar->color >= 0)
            snprintf(classes, sizeof classes, "p%d", bar->color % TAGC_N_COLORS);
        else
            snprintf(classes, sizeof classes, "%.20s", chart->part_classes[part]);
        chart->format(value, number);
        snprintf(title, sizeof title, "%.80s%s%.40s: %s", bar->label, chart->n_parts > 1 ? ", " : "",
                 chart->n_parts > 1 ? chart->part_names[part] : "", number);
        tagc_svg_box(c, from, y, to - from - (to - from > 3 ? 0.8 : 0), BAR, classes, title);
        int is_pale = strcmp(classes, "c4") == 0 || strcmp(classes, "c5") == 0;
        if (chart->n_parts > 1 && to - from > tagc_svg_width(number, 11.5) + 8)
            tagc_svg_text(c, (from + to) / 2, y + BAR / 2.0 + 4, 'm', is_pale ? "ondark" : "on", number);
    }
    if (isfinite(bar->low) && isfinite(bar->high) && bar->high > bar->low) {
        double from = tagc_axis_place(x, bar->low), to = tagc_axis_place(x, bar->high), at = y + BAR + 3.5;
        tagc_text_printf(&c->body, "<path class=\"whisker\" d=\"M%.1f %.1fv5m0 -2.5H%.1fm0 -2.5v5\"/>\n",
                         from, at - 2.5, to);
    }
}

static void draw_axis(const tagc_bar_chart *chart, const tagc_axis *x, double top, double bottom,
                      tagc_canvas *c) {
    char text[TAGC_NUMBER_BYTES];
    tagc_axis shown = *x;
    shown.min /= chart->scale;
    shown.max /= chart->scale;
    shown.step /= chart->scale;
    for (int tick = 0; tick < tagc_axis_n_ticks(x); tick++) {
        double value = tagc_axis_tick(x, tick), at = tagc_axis_place(x, value);
        tagc_svg_line(c, at, top, at, bottom, "grid");
        tagc_svg_text(c, at, bottom + 17, 'm', "", tagc_axis_label(&shown, value / chart->scale, text));
    }
}

/* Names stand left of the bars, or above them on a narrow canvas. What is said at the ends of the bars needs room, too. */
void tagc_bars_draw(const tagc_bar_chart *chart, tagc_canvas *c) {
    int is_narrow = c->width < TAGC_WIDE;
    double name = 0, end = 0, height = 0;
    for (int b = 0; b < chart->n_bars; b++) {
        const tagc_bar *bar = &chart->bars[b];
        if (!bar->is_heading) name = fmax(name, tagc_svg_width(bar->label, 13));
        if (bar->end) end = fmax(end, tagc_svg_width(bar->end, 13));
        height += bar->is_heading ? HEADING : is_narrow ? NARROW_ROW : ROW;
    }
    name = fmin(name, 300);
    double left = is_narrow ? 8 : 16 + name,
           right = is_narrow ? c->width - 16 : c->width - 12 - fmin(end, 230);
    double y = c->height;
    if (chart->n_parts > 1 && !chart->has_no_legend) {
        tagc_key *keys = calloc((size_t)chart->n_parts, sizeof *keys);
        int n_keys = 0;
        for (int part = 0; keys && part < chart->n_parts; part++)
            if (chart->legend_parts ? (int)(chart->legend_parts >> part & 1) : is_met(chart, part))
                keys[n_keys++] =
                    (tagc_key){chart->part_names[part], chart->part_classes[part], TAGC_KEY_BOX, -1};
        double needed = 0;
        for (int k = 0; k < n_keys; k++) needed += 33 + tagc_svg_width(keys[k].label, 13);
        if (keys)
            y = tagc_svg_legend(c, keys, n_keys, left + needed > c->width ? 8 : left, c->width - 8, y) + 6;
        free(keys);
    }
    double most = chart->x_max > 0 ? chart->x_max : largest(chart);
    tagc_axis x = tagc_axis_make(0, most, is_narrow ? 4 : 6, 0, left, right);
    draw_axis(chart, &x, y, y + height + 4, c);
    for (int b = 0; b < chart->n_bars; b++) {
        const tagc_bar *bar = &chart->bars[b];
        if (bar->is_heading) {
            tagc_svg_box(c, 0, y - 1, c->width, HEADING - 1, "paper", NULL);
            tagc_svg_text_fit(c, 8, y + 19, 's', "strong", bar->label, c->width - 16);
            y += HEADING;
            continue;
        }
        double at = is_narrow ? y + 20 : y + 4;
        if (is_narrow) {
            double room = c->width - 24 - (bar->end ? tagc_svg_width(bar->end, 13) : 0);
            tagc_svg_box(c, 0, y + 2, c->width, 17, "paper", NULL);
            tagc_svg_text_fit(c, left, y + 15, 's', "", bar->label, room);
            if (bar->end) tagc_svg_text(c, c->width - 8, y + 15, 'e', "", bar->end);
        } else {
            tagc_svg_text_fit(c, left - 8, at + BAR / 2.0 + 4.5, 'e', "", bar->label, name);
        }
        draw_bar(chart, bar, &x, at, c);
        if (chart->mark > 0) {
            double mark = tagc_axis_place(&x, chart->mark);
            tagc_svg_line(c, mark, is_narrow ? at : at - 4, mark, at + BAR + 4, "mark");
        }
        if (!is_narrow && bar->end) {
            double until = fmax(sum_of(chart, bar), isfinite(bar->high) ? bar->high : 0);
            double at_x = fmin(tagc_axis_place(&x, until), right);
            tagc_svg_text(c, at_x + 8, at + BAR / 2.0 + 4.5, 's', "", bar->end);
        }
        y += is_narrow ? NARROW_ROW : ROW;
    }
    tagc_svg_text(c, (left + right) / 2, y + 40, 'm', "soft", chart->x_label);
    c->height = y + 50;
}
