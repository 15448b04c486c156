/* Curves of several runs in a terminal, as plain text: every run has a mark of its own. */
#ifndef TAGC_CLI_CURVES_H
#define TAGC_CLI_CURVES_H

#include <stddef.h>
#include <stdio.h>

enum { TAGC_CURVES_MOST = 8 };

typedef struct tagc_curve {
    const char *label;
    const double *x, *y; /* of the first point; points that are not finite are left out */
    int n_points;
    size_t stride; /* doubles from a point to the next */
} tagc_curve;

/* n_curves: 1 to TAGC_CURVES_MOST. Nothing is printed when no curve has a point. */
void tagc_curves_print(const tagc_curve *curves, int n_curves, const char *y_label, const char *x_label,
                       FILE *out);

#endif
