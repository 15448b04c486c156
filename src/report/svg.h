/* Drawing by printing: a canvas of fixed width that grows downwards, texts, boxes, axes, a legend.
 *
 * Colours are classes, not values: style.c gives them for light and dark, in a page and in a file of its own. */
#ifndef TAGC_REPORT_SVG_H
#define TAGC_REPORT_SVG_H

#include "report/text.h"

enum { TAGC_N_COLORS = 8, TAGC_WIDE = 760, TAGC_NARROW = 360 };

typedef struct tagc_canvas {
    tagc_text body;
    double width, height; /* height: used so far */
    int id;               /* of this drawing on its page, so that its names are its own */
} tagc_canvas;

/* anchor: 's'tart, 'm'iddle, 'e'nd. classes: "" or some of style.c's. */
void tagc_svg_text(tagc_canvas *c, double x, double y, char anchor, const char *classes, const char *words);
/* The same, cut with an ellipsis to at most `width`. */
void tagc_svg_text_fit(tagc_canvas *c, double x, double y, char anchor, const char *classes,
                       const char *words, double width);
/* title: shown when pointed at; NULL: none. */
void tagc_svg_box(tagc_canvas *c, double x, double y, double width, double height, const char *classes,
                  const char *title);
void tagc_svg_line(tagc_canvas *c, double x1, double y1, double x2, double y2, const char *classes);
/* Estimated: nobody knows the reader's font. */
double tagc_svg_width(const char *words, double font_px);
/* Any number, as a coordinate that is one. */
double tagc_svg_clamp(double at);

typedef struct tagc_axis {
    double min, max, step;
    double from_px, to_px;
    int is_log;
} tagc_axis;

/* A step of 1, 2 or 5 times a power of ten that gives about n ticks; round_ends moves the ends out to ticks. */
tagc_axis tagc_axis_make(double min, double max, int n, int round_ends, double from_px, double to_px);
double tagc_axis_place(const tagc_axis *axis, double value);
int tagc_axis_n_ticks(const tagc_axis *axis);
double tagc_axis_tick(const tagc_axis *axis, int tick);
char *tagc_axis_label(const tagc_axis *axis, double value, char *out); /* out (TAGC_NUMBER_BYTES) */

typedef enum tagc_key_kind { TAGC_KEY_BOX, TAGC_KEY_LINE, TAGC_KEY_HEADING } tagc_key_kind;
typedef struct tagc_key {
    const char *label;
    const char *classes; /* of the box or line */
    tagc_key_kind kind;
    int color; /* TAGC_KEY_LINE: for the marker */
} tagc_key;

/* In rows from y downwards, within [left, right]; returns the y below it. */
double tagc_svg_legend(tagc_canvas *c, const tagc_key *keys, int n_keys, double left, double right, double y);

/* Points of one colour have a form of their own, too. */
void tagc_svg_marker(tagc_canvas *c, double x, double y, int color, const char *title);
/* "l3 d1": stroke and dashes of the line of a colour, however many there are. */
const char *tagc_svg_line_classes(int color, char *out); /* out (TAGC_NUMBER_BYTES) */

/* One SVG element. is_alone: a file of its own, with style, background and the title drawn in it. */
void tagc_svg_print(const tagc_canvas *c, const char *title, const char *description, int is_alone,
                    tagc_text *out);

/* Style sheets: of drawings in a file of their own, and of a page with drawings in it. */
void tagc_style_alone(tagc_text *out);
void tagc_style_page(tagc_text *out);

#endif
