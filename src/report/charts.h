/* The two kinds of chart: lines over an axis, and stacked bars of one row per arm. */
#ifndef TAGC_REPORT_CHARTS_H
#define TAGC_REPORT_CHARTS_H

#include "report/svg.h"

typedef struct tagc_series {
    const char *label;
    int color;
    const double *x, *y;      /* (n_points), x ascending; what is not finite is a hole */
    const double *low, *high; /* (n_points), drawn as a band; NULL: none */
    int n_points;
    int is_faint;   /* thin, without points or a label of its own */
    int has_points; /* a mark at each */
    int has_no_line;
} tagc_series;

typedef struct tagc_chart {
    const char *title, *x_label, *y_label;
    const tagc_series *series;
    int n_series;
    double y_max;  /* above this lines are cut off; 0: the largest y */
    int is_log_x;  /* ticks are the values of x */
    int from_zero; /* the y axis starts at 0 */
    int has_zero_line;
} tagc_chart;

/* TAGC_ERR_ARGUMENT when there is no point. */
tagc_status tagc_chart_draw(const tagc_chart *chart, tagc_canvas *canvas);
/* As an SVG file of its own. */
tagc_status tagc_chart_write(const tagc_chart *chart, const char *path);

typedef struct tagc_bar {
    const char *label;
    int is_heading;      /* of the bars below: no bar of its own */
    const double *parts; /* (n_parts); what is not finite or below 0 is nothing */
    double low, high;    /* spread of the sum; NaN: not known */
    const char *end;     /* beside the bar */
    int color;           /* of all parts when n_parts is 1; -1: the part's */
} tagc_bar;

typedef struct tagc_bar_chart {
    const char *x_label;
    const char *const *part_names;   /* (n_parts) */
    const char *const *part_classes; /* (n_parts), fills */
    int n_parts;
    const tagc_bar *bars;
    int n_bars;
    double x_max;                             /* 0: what the bars need */
    double mark;                              /* a line across all bars; 0: none */
    char *(*format)(double value, char *out); /* of a part when pointed at */
    double scale;                             /* values are shown divided by this */
    int has_no_legend;
    unsigned legend_parts; /* a bit for each part that the legend explains; 0: those of the bars */
} tagc_bar_chart;

void tagc_bars_draw(const tagc_bar_chart *chart, tagc_canvas *canvas);

#endif
