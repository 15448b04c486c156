/* The figures of a report, by name: each drawn on a canvas of any width, for the page and as a file of its own. */
#ifndef TAGC_REPORT_FIGURES_H
#define TAGC_REPORT_FIGURES_H

#include "report/results.h"
#include "report/svg.h"

enum { TAGC_UNITS_BYTES = 256 };

typedef struct tagc_view {
    const char
        *units; /* of the timeline's window, as tagc_trace_shares takes them; NULL: two in the middle */
} tagc_view;

typedef struct tagc_figure {
    const char *name, *title, *caption;
    const char *needs; /* what there must be for it */
    /* 0 when there is nothing to draw. */
    int (*draw)(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas);
} tagc_figure;

extern const tagc_figure tagc_figures[];
extern const int tagc_n_figures;

const tagc_figure *tagc_figure_find(const char *name); /* NULL when there is none of this name */
/* As an SVG file of its own. TAGC_ERR_ARGUMENT says what would be needed when there is nothing to draw. */
tagc_status tagc_figure_write(const tagc_report *report, const tagc_view *view, const tagc_figure *figure,
                              const char *path);

/* view->units, or the default for this trace in out (TAGC_UNITS_BYTES); "" when there are no such units. */
const char *tagc_view_units(const tagc_view *view, const tagc_trace_file *trace, char *out);

int tagc_draw_loss(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas);
int tagc_draw_loss_time(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas);
int tagc_draw_gap(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas);
int tagc_draw_pareto(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas);
int tagc_draw_pareto_all(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas);
int tagc_draw_loss_slow(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas);
int tagc_draw_loss_fast(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas);
int tagc_draw_step_line(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas);
int tagc_draw_window_line(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas);
int tagc_draw_plan(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas);
int tagc_draw_plan_world(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas);

#endif
