/* A grid of characters. A cell that several runs share shows each in turn, from column to column, so that no run hides another. */
#include "cli/curves.h"

#include <math.h>
#include <string.h>

enum { COLUMNS = 72, ROWS = 18, LABEL = 10 };
#define MOST 1e300 /* differences of larger numbers are not finite */

static const char marks[TAGC_CURVES_MOST + 1] = "ox+*#@%&";

typedef struct grid {
    unsigned char cells[ROWS][COLUMNS]; /* a bit per curve */
    double left, right, bottom, top;
} grid;

static double x_of(const tagc_curve *curve, int i) {
    return curve->x[(size_t)i * curve->stride];
}

static double y_of(const tagc_curve *curve, int i) {
    return curve->y[(size_t)i * curve->stride];
}

static int is_point(const tagc_curve *curve, int i) {
    return fabs(x_of(curve, i)) < MOST && fabs(y_of(curve, i)) < MOST; /* not for NaN */
}

static int find_width(const tagc_curve *curves, int n_curves, grid *g) {
    g->left = INFINITY;
    g->right = -INFINITY;
    for (int c = 0; c < n_curves; c++)
        for (int i = 0; i < curves[c].n_points; i++)
            if (is_point(&curves[c], i)) {
                g->left = fmin(g->left, x_of(&curves[c], i));
                g->right = fmax(g->right, x_of(&curves[c], i));
            }
    if (!(g->left <= g->right)) return 0;
    if (g->left == g->right) g->right += fmax(1, fabs(g->right));
    return 1;
}

/* From the least value up to the highest past the first tenth of the way: there the interesting part begins. */
static void find_height(const tagc_curve *curves, int n_curves, grid *g) {
    double from = g->left + (g->right - g->left) / 10;
    g->bottom = INFINITY;
    g->top = -INFINITY;
    for (int c = 0; c < n_curves; c++) {
        int before = -1;
        for (int i = 0; i < curves[c].n_points; i++) {
            if (!is_point(&curves[c], i)) continue;
            double x = x_of(&curves[c], i), y = y_of(&curves[c], i);
            g->bottom = fmin(g->bottom, y);
            if (x >= from) g->top = fmax(g->top, y);
            if (x >= from && before >= 0 && x_of(&curves[c], before) < from) {
                double share = (from - x_of(&curves[c], before)) / (x - x_of(&curves[c], before));
                g->top = fmax(g->top, y_of(&curves[c], before) * (1 - share) + y * share);
            }
            before = i;
        }
    }
    if (!(g->top > g->bottom)) g->top = g->bottom + fmax(1e-3 * fabs(g->bottom), 1e-3);
}

static int column_of(const grid *g, double x) {
    return (int)lround((x - g->left) / (g->right - g->left) * (COLUMNS - 1));
}

static void put(grid *g, int curve, int column, double y) {
    if (y > g->top) return; /* above the interesting part */
    int row = (int)lround((g->top - y) / (g->top - g->bottom) * (ROWS - 1));
    g->cells[row][column] |= (unsigned char)(1u << curve);
}

/* Straight lines between neighbouring points. */
static void draw(const tagc_curve *curve, int c, grid *g) {
    int before = -1;
    for (int i = 0; i < curve->n_points; i++) {
        if (!is_point(curve, i)) continue;
        int to = column_of(g, x_of(curve, i)), from = before >= 0 ? column_of(g, x_of(curve, before)) : to;
        for (int column = from + 1; column < to; column++) {
            double share = (double)(column - from) / (to - from);
            put(g, c, column, y_of(curve, before) * (1 - share) + y_of(curve, i) * share);
        }
        put(g, c, to, y_of(curve, i));
        before = i;
    }
}

static char mark_at(const grid *g, int row, int column) {
    int there[TAGC_CURVES_MOST], n = 0;
    for (int c = 0; c < TAGC_CURVES_MOST; c++)
        if (g->cells[row][column] & 1u << c) there[n++] = c;
    return n > 0 ? marks[there[column % n]] : ' ';
}

/* Names of folders: a terminal gets no control characters. */
static void print_label(const char *label, FILE *out) {
    for (; *label; label++) fputc((unsigned char)*label < 0x20 || *label == 0x7f ? '?' : *label, out);
}

void tagc_curves_print(const tagc_curve *curves, int n_curves, const char *y_label, const char *x_label,
                       FILE *out) {
    grid g = {{{0}}, 0, 0, 0, 0};
    if (!find_width(curves, n_curves, &g)) return;
    find_height(curves, n_curves, &g);
    for (int c = 0; c < n_curves; c++) draw(&curves[c], c, &g);
    fprintf(out, "%s\n", y_label);
    for (int row = 0; row < ROWS; row++) {
        char line[COLUMNS + 1];
        int n = 0;
        for (int column = 0; column < COLUMNS; column++) {
            line[column] = mark_at(&g, row, column);
            if (line[column] != ' ') n = column + 1;
        }
        line[n] = 0;
        if (row % 4 == 0 || row == ROWS - 1)
            fprintf(out, "%*.5g |%s\n", LABEL, g.top - (g.top - g.bottom) * row / (ROWS - 1), line);
        else
            fprintf(out, "%*s |%s\n", LABEL, "", line);
    }
    char axis[COLUMNS + 1], right[32];
    memset(axis, '-', COLUMNS);
    axis[COLUMNS] = 0;
    int n_right = snprintf(right, sizeof right, "%.6g", g.right);
    fprintf(out, "%*s +%s\n%*s  %-*.6g%s  %s\n", LABEL, "", axis, LABEL, "", COLUMNS - n_right, g.left, right,
            x_label);
    fprintf(out, "%*s", LABEL + 2, "");
    for (int c = 0; c < n_curves; c++) {
        fprintf(out, "%s%c ", c > 0 ? "   " : "", marks[c]);
        print_label(curves[c].label, out);
    }
    fputc('\n', out);
}
