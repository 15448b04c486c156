/* Timelines: per trace and rank a row for compute, one for the codec, and one per lane of transfers. All traces of a
 * picture have one scale.
 *
 * A trace has far more spans than a page has pixels: what is narrower than three of them is drawn together. */
#include "report/figures.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROW = 16, GAP = 3, BOX = 3, MAX_TRACES = 8, MOST_LANES = 6 };

static const struct {
    const char *name, *classes;
} looks[TAGC_N_SPANS] = {
    [TAGC_SPAN_FORWARD] = {"forward", "c5"},
    [TAGC_SPAN_BACKWARD] = {"backward", "c0"},
    [TAGC_SPAN_OPTIMIZER] = {"optimizer", "c2"},
    [TAGC_SPAN_STALL] = {"waits", "idle"},
    [TAGC_SPAN_SELECT] = {"select", "c3"},
    [TAGC_SPAN_INDEX] = {"index", "c5"},
    [TAGC_SPAN_ENCODE] = {"encode", "c6"},
    [TAGC_SPAN_DECODE] = {"decode", "c2"},
    [TAGC_SPAN_IDLE] = {"waits", "idle"},
    [TAGC_SPAN_LEG + TAGC_LEG_INDEX] = {"index", "c5"},
    [TAGC_SPAN_LEG + TAGC_LEG_VALUES] = {"values", "c1"},
    [TAGC_SPAN_LEG + TAGC_LEG_LEFTOVER] = {"leftover", "c6"},
    [TAGC_SPAN_LEG + TAGC_LEG_RESULT] = {"result", "c3"},
    [TAGC_SPAN_LEG + TAGC_LEG_GATHER] = {"gather", "c4"},
    [TAGC_SPAN_LEG + TAGC_LEG_CONTROL] = {"control", "c7"},
    [TAGC_SPAN_OTHER] = {"other", "c7"},
};

typedef struct picture {
    const tagc_trace_file *traces[MAX_TRACES];
    tagc_window windows[MAX_TRACES], marks[MAX_TRACES]; /* marks: outlined; empty: none */
    int n, most_ranks;
    double length_s;
    uint8_t met[TAGC_N_SPANS]; /* kinds that were drawn: what the legend must explain */
    tagc_axis x;
} picture;

static int is_inside(const tagc_span *span, tagc_window window) {
    return span->end_s > window.start_s && span->start_s < window.end_s;
}

static void describe(const tagc_trace_file *trace, const tagc_span *span, char *out, size_t n_bytes) {
    char length[TAGC_NUMBER_BYTES], bytes[TAGC_NUMBER_BYTES] = "";
    if (span->n_bytes > 0) tagc_number_bytes(span->n_bytes, bytes);
    snprintf(out, n_bytes, "%s %.60s, %s%s%s", looks[span->kind].name,
             span->unit >= 0 ? trace->units[span->unit] : "",
             tagc_number_time(span->end_s - span->start_s, length), *bytes ? ", " : "", bytes);
}

/* Spans of a row narrower than BOX pixels: one path per kind, in whole pixels. spans (n) */
static void draw_narrow(const picture *p, int t, const tagc_span *const *spans, int n, double y,
                        tagc_canvas *c) {
    for (int kind = 0; kind < TAGC_N_SPANS; kind++) {
        double until = -1;
        int is_open = 0;
        for (int i = 0; i < n; i++) {
            if ((int)spans[i]->kind != kind) continue;
            double from = tagc_axis_place(&p->x, fmax(spans[i]->start_s - p->windows[t].start_s, 0));
            double to =
                tagc_axis_place(&p->x, fmin(spans[i]->end_s, p->windows[t].end_s) - p->windows[t].start_s);
            if (to - from >= BOX) continue;
            from = fmax(floor(from), until);
            to = ceil(to);
            if (to <= from) continue;
            if (!is_open) tagc_text_printf(&c->body, "<path class=\"%s\" d=\"", looks[kind].classes);
            is_open = 1;
            tagc_text_printf(&c->body, "M%.0f %.0fh%.0fv%dh-%.0fz", from, y, to - from, ROW, to - from);
            until = to;
        }
        if (is_open) tagc_text_add(&c->body, "\"/>\n");
    }
}

static void draw_wide(const picture *p, int t, const tagc_span *span, double y, tagc_canvas *c) {
    double from = tagc_axis_place(&p->x, fmax(span->start_s - p->windows[t].start_s, 0));
    double to = tagc_axis_place(&p->x, fmin(span->end_s, p->windows[t].end_s) - p->windows[t].start_s);
    if (to - from < BOX) return;
    char title[160];
    describe(p->traces[t], span, title, sizeof title);
    tagc_svg_box(c, from, y, to - from - 0.5, ROW, looks[span->kind].classes,
                 c->width < TAGC_WIDE ? NULL : title);
    const char *unit = span->unit >= 0 ? p->traces[t]->units[span->unit] : "";
    int is_idle = span->kind == TAGC_SPAN_STALL || span->kind == TAGC_SPAN_IDLE;
    if (!*unit || is_idle || tagc_svg_width(unit, 11.5) + 6 > to - from) return;
    int is_pale =
        strcmp(looks[span->kind].classes, "c4") == 0 || strcmp(looks[span->kind].classes, "c5") == 0;
    tagc_svg_text(c, (from + to) / 2, y + 12, 'm', is_pale ? "ondark" : "on", unit);
}

static void draw_track(picture *p, int t, int rank, int track, double y, tagc_canvas *c) {
    const tagc_trace_file *trace = p->traces[t];
    const tagc_span **spans = malloc(((size_t)trace->n_spans + 1) * sizeof(const tagc_span *));
    int n = 0;
    for (int i = 0; spans && i < trace->n_spans; i++) {
        const tagc_span *span = &trace->spans[i];
        if (span->rank == rank && span->track == track && is_inside(span, p->windows[t])) spans[n++] = span;
    }
    for (int i = 0; i < n; i++) {
        p->met[spans[i]->kind] = 1;
        draw_wide(p, t, spans[i], y, c);
    }
    if (spans) draw_narrow(p, t, spans, n, y, c);
    free(spans);
}

/* Tracks of a rank that have spans in the window. */
static int find_tracks(const picture *p, int t, int rank, uint8_t *has) {
    int n = 0;
    memset(has, 0, 2 + MOST_LANES);
    for (int i = 0; i < p->traces[t]->n_spans; i++) {
        const tagc_span *span = &p->traces[t]->spans[i];
        if (span->rank != rank || span->track >= 2 + MOST_LANES || !is_inside(span, p->windows[t])) continue;
        n += !has[span->track];
        has[span->track] = 1;
    }
    return n;
}

static void draw_rank(picture *p, int t, int rank, double left, tagc_canvas *c) {
    uint8_t has[2 + MOST_LANES];
    char name[64];
    int is_narrow = c->width < TAGC_WIDE;
    if (find_tracks(p, t, rank, has) == 0) return;
    double top = c->height;
    snprintf(name, sizeof name, "rank %d", p->traces[t]->ranks[rank]);
    if (p->traces[t]->n_ranks > 1) {
        tagc_svg_text(c, 8, c->height + 12, 's', "small soft", name);
        if (is_narrow) c->height += 16;
    }
    for (int track = 0; track < 2 + MOST_LANES; track++) {
        if (!has[track]) continue;
        const char *names[] = {"compute", "codec", "comm"};
        if (track < 3) tagc_svg_text(c, left - 6, c->height + 12, 'e', "small", names[track]);
        tagc_svg_box(c, left, c->height, p->x.to_px - left, ROW, "panel", NULL);
        draw_track(p, t, rank, track, c->height, c);
        c->height += ROW + (track < 2 ? GAP : 1);
    }
    if (p->marks[t].end_s > p->marks[t].start_s && rank == 0) {
        double from = tagc_axis_place(&p->x, p->marks[t].start_s - p->windows[t].start_s);
        double to = tagc_axis_place(&p->x, p->marks[t].end_s - p->windows[t].start_s);
        double y = is_narrow && p->traces[t]->n_ranks > 1 ? top + 16 : top;
        tagc_svg_box(c, from, y - 2, to - from, c->height - y + 3, "window", NULL);
    }
    c->height += 7;
}

static void draw_scale(const picture *p, double left, double scale, const char *label, tagc_canvas *c) {
    char text[TAGC_NUMBER_BYTES];
    tagc_axis shown = p->x;
    shown.step /= scale;
    tagc_svg_line(c, left, c->height, p->x.to_px, c->height, "frame");
    for (int tick = 0; tick < tagc_axis_n_ticks(&p->x); tick++) {
        double value = tagc_axis_tick(&p->x, tick), at = tagc_axis_place(&p->x, value);
        tagc_svg_line(c, at, c->height, at, c->height + 5, "frame");
        tagc_svg_text(c, at, c->height + 19, 'm', "", tagc_axis_label(&shown, value / scale, text));
    }
    tagc_svg_text(c, (left + p->x.to_px) / 2, c->height + 38, 'm', "soft", label);
    c->height += 48;
}

static void draw_legend(const picture *p, tagc_canvas *c) {
    static const struct {
        const char *name;
        int first, last;
    } groups[] = {{"compute:", TAGC_SPAN_FORWARD, TAGC_SPAN_STALL},
                  {"codec:", TAGC_SPAN_SELECT, TAGC_SPAN_IDLE},
                  {"comm:", TAGC_SPAN_LEG, TAGC_SPAN_OTHER}};
    for (size_t g = 0; g < sizeof groups / sizeof groups[0]; g++) {
        tagc_key keys[TAGC_N_SPANS];
        int n = 0;
        keys[n++] = (tagc_key){groups[g].name, "", TAGC_KEY_HEADING, -1};
        for (int kind = groups[g].first; kind <= groups[g].last; kind++)
            if (p->met[kind]) keys[n++] = (tagc_key){looks[kind].name, looks[kind].classes, TAGC_KEY_BOX, -1};
        if (n > 1) c->height = tagc_svg_legend(c, keys, n, 8, c->width - 8, c->height);
    }
}

static int draw(picture *p, tagc_canvas *c) {
    int is_narrow = c->width < TAGC_WIDE;
    double left = is_narrow ? 58 : 110;
    if (p->n == 0 || !(p->length_s > 0)) return 0;
    p->x = tagc_axis_make(0, p->length_s, is_narrow ? 4 : 8, 0, left, c->width - 14);
    p->most_ranks = p->n > 2 ? 1 : 2;
    c->height += 4;
    for (int t = 0; t < p->n; t++) {
        char name[128], length[TAGC_NUMBER_BYTES];
        snprintf(name, sizeof name, "%s, %s", p->traces[t]->label,
                 tagc_number_time(p->windows[t].end_s - p->windows[t].start_s, length));
        tagc_svg_text_fit(c, 8, c->height + 14, 's', "strong", name, c->width - 16);
        c->height += 24;
        for (int rank = 0; rank < p->traces[t]->n_ranks && rank < p->most_ranks; rank++)
            draw_rank(p, t, rank, left, c);
        c->height += 4;
    }
    int is_short = p->length_s < 1;
    draw_scale(p, left, is_short ? 1e-3 : 1, is_short ? "time (ms)" : "time (s)", c);
    draw_legend(p, c);
    c->height += 6;
    return 1;
}

/* Two neighbours in the middle of the order of backward passes: neither the first, which has nothing to hide behind,
 * nor the last. */
const char *tagc_view_units(const tagc_view *view, const tagc_trace_file *trace, char *out) {
    if (view->units) return view->units;
    int order[512], n = 0;
    for (int i = 0; i < trace->n_spans && n < 512; i++) {
        const tagc_span *span = &trace->spans[i];
        if (span->kind != TAGC_SPAN_BACKWARD || span->unit < 0 || span->rank != 0) continue;
        int is_new = 1;
        for (int k = 0; k < n && is_new; k++) is_new = order[k] != span->unit;
        if (is_new) order[n++] = span->unit;
    }
    out[0] = 0;
    int first = n > 2 ? (n - 1) / 2 : 0;
    for (int k = first; k < first + 2 && k < n; k++)
        if (strlen(out) + strlen(trace->units[order[k]]) + 2 < TAGC_UNITS_BYTES) {
            if (*out) strcat(out, ",");
            strcat(out, trace->units[order[k]]);
        }
    return out;
}

static void collect(const tagc_report *report, const tagc_view *view, int is_window, picture *p) {
    for (int t = 0; t < report->n_traces && p->n < MAX_TRACES; t++) {
        char units[TAGC_UNITS_BYTES];
        const tagc_trace_file *trace = &report->traces[t];
        tagc_window window = tagc_trace_shares(trace, tagc_view_units(view, trace, units)).shown;
        tagc_window step = tagc_trace_step(trace, window);
        tagc_window shown = is_window ? window : step;
        if (!(shown.end_s > shown.start_s)) continue;
        p->traces[p->n] = trace;
        p->windows[p->n] = shown;
        if (!is_window && window.start_s >= step.start_s && window.end_s <= step.end_s)
            p->marks[p->n] = window;
        p->length_s = fmax(p->length_s, shown.end_s - shown.start_s);
        p->n++;
    }
}

static int draw_kind(const tagc_report *report, const tagc_view *view, int is_window, tagc_canvas *canvas) {
    picture p = {.n = 0};
    collect(report, view, is_window, &p);
    return draw(&p, canvas);
}

int tagc_draw_step_line(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas) {
    return draw_kind(report, view, 0, canvas);
}

int tagc_draw_window_line(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas) {
    return draw_kind(report, view, 1, canvas);
}
