/* A line chart as one SVG file that reads well on light and on dark pages. */
#ifndef TAGC_REPORT_CHART_H
#define TAGC_REPORT_CHART_H

#include "tagc/tagc.h"

typedef struct tagc_series {
    const char *label;
    const double *x, *y; /* (n_points), x ascending */
    int n_points;
} tagc_series;

typedef struct tagc_chart {
    const char *title, *x_label, *y_label;
    const tagc_series *series;
    int n_series; /* [1, 8] */
    double y_max; /* above this lines are cut off; 0: the largest y */
} tagc_chart;

tagc_status tagc_chart_write(const tagc_chart *chart, const char *path);

#endif
