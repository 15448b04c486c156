/* The primitives of all drawings. */
#include "report/svg.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

double tagc_svg_clamp(double at) {
    return at > -1e5 ? at < 1e5 ? at : 1e5 : -1e5; /* NaN, too */
}

double tagc_svg_width(const char *words, double font_px) {
    double units = 0;
    while (*words) {
        int is_valid;
        size_t n = tagc_text_character(words, &is_valid);
        units += n > 2                                     ? 1.0
                 : n == 2 || strchr("mwMW%@+=<>~", *words) ? 0.85
                 : strchr("iljftI.,:;'|!()[]/ -", *words)  ? 0.36
                 : *words >= 'A' && *words <= 'Z'          ? 0.7
                                                           : 0.63;
        words += n;
    }
    return units * font_px;
}

void tagc_svg_text(tagc_canvas *c, double x, double y, char anchor, const char *classes, const char *words) {
    const char *where = anchor == 'm'   ? " text-anchor=\"middle\""
                        : anchor == 'e' ? " text-anchor=\"end\""
                                        : "";
    tagc_text_printf(&c->body, "<text x=\"%.1f\" y=\"%.1f\"%s", tagc_svg_clamp(x), tagc_svg_clamp(y), where);
    if (*classes) tagc_text_printf(&c->body, " class=\"%s\"", classes);
    tagc_text_add(&c->body, ">");
    tagc_text_escaped(&c->body, words);
    tagc_text_add(&c->body, "</text>\n");
}

void tagc_svg_text_fit(tagc_canvas *c, double x, double y, char anchor, const char *classes,
                       const char *words, double width) {
    double font_px = strstr(classes, "small") || strstr(classes, "on") ? 11.5 : 13;
    if (tagc_svg_width(words, font_px) <= width) {
        tagc_svg_text(c, x, y, anchor, classes, words);
        return;
    }
    char cut[256];
    size_t n = 0;
    while (words[n] && n + 8 < sizeof cut) {
        int is_valid;
        size_t n_next = tagc_text_character(words + n, &is_valid);
        memcpy(cut + n, words + n, n_next);
        strcpy(cut + n + n_next, "…");
        if (tagc_svg_width(cut, font_px) > width) break;
        n += n_next;
    }
    strcpy(cut + n, "…");
    tagc_svg_text(c, x, y, anchor, classes, cut);
}

void tagc_svg_box(tagc_canvas *c, double x, double y, double width, double height, const char *classes,
                  const char *title) {
    tagc_text_printf(&c->body, "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.1f\" class=\"%s\"",
                     tagc_svg_clamp(x), tagc_svg_clamp(y), fmax(tagc_svg_clamp(width), 0),
                     fmax(tagc_svg_clamp(height), 0), classes);
    if (title) {
        tagc_text_add(&c->body, "><title>");
        tagc_text_escaped(&c->body, title);
        tagc_text_add(&c->body, "</title></rect>\n");
    } else {
        tagc_text_add(&c->body, "/>\n");
    }
}

void tagc_svg_line(tagc_canvas *c, double x1, double y1, double x2, double y2, const char *classes) {
    tagc_text_printf(&c->body, "<path class=\"%s\" d=\"M%.1f %.1fL%.1f %.1f\"/>\n", classes,
                     tagc_svg_clamp(x1), tagc_svg_clamp(y1), tagc_svg_clamp(x2), tagc_svg_clamp(y2));
}

/* ---- axes ---- */

tagc_axis tagc_axis_make(double min, double max, int n, int round_ends, double from_px, double to_px) {
    if (!isfinite(min) || !isfinite(max)) min = max = 0;
    min = fmax(min, -1e300);
    max = fmin(max, 1e300);
    if (!(max - min > fmax(1e-12 * fmax(fabs(min), fabs(max)), 1e-300))) {
        double around = fmax(fabs(min) / 10, 1e-9);
        min -= min == 0 ? 0 : around;
        max = min == 0 ? 1 : min + 2 * around;
    }
    double rough = max / n - min / n, power = pow(10, floor(log10(rough))), lead = rough / power;
    double step = power * (lead < 1.5 ? 1 : lead < 3.5 ? 2 : lead < 7.5 ? 5 : 10);
    if (round_ends) {
        min = floor(min / step + 1e-9) * step;
        max = ceil(max / step - 1e-9) * step;
    }
    return (tagc_axis){min, max, step, from_px, to_px, 0};
}

double tagc_axis_place(const tagc_axis *a, double value) {
    double share = a->is_log ? log(value / a->min) / log(a->max / a->min)
                             : (value / 2 - a->min / 2) / (a->max / 2 - a->min / 2);
    return tagc_svg_clamp(a->from_px + share * (a->to_px - a->from_px));
}

/* Ticks are whole multiples of the step. */
static double first_tick(const tagc_axis *a) {
    return ceil(a->min / a->step - 1e-9);
}

int tagc_axis_n_ticks(const tagc_axis *a) {
    double n = floor(a->max / a->step + 1e-9) - first_tick(a) + 1;
    return n >= 0 && n < 50 ? (int)n : 0;
}

double tagc_axis_tick(const tagc_axis *a, int tick) {
    return (first_tick(a) + tick) * a->step + 0.0;
}

char *tagc_axis_label(const tagc_axis *a, double value, char *out) {
    int digits = (int)ceil(-log10(a->step) - 1e-9);
    if (fabs(value) >= 1e6 || digits > 5)
        snprintf(out, TAGC_NUMBER_BYTES, "%.4g", value);
    else
        snprintf(out, TAGC_NUMBER_BYTES, "%.*f", digits < 0 ? 0 : digits, value);
    return out;
}

/* ---- legend and markers ---- */

const char *tagc_svg_line_classes(int color, char *out) {
    static const char *const dashes[] = {"", " d1", " d2", " d3", " d4"};
    snprintf(out, TAGC_NUMBER_BYTES, "l%d%s", color % TAGC_N_COLORS,
             dashes[(color / TAGC_N_COLORS) % (int)(sizeof dashes / sizeof dashes[0])]);
    return out;
}

void tagc_svg_marker(tagc_canvas *c, double x, double y, int color, const char *title) {
    static const char *const forms[] = {"m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z",
                                        "m-3.2 -3.2h6.4v6.4h-6.4z", "m0 -4.4l4.2 7.2h-8.4z",
                                        "m0 -4.6l4.6 4.6l-4.6 4.6l-4.6 -4.6z", "m0 4.4l4.2 -7.2h-8.4z"};
    tagc_text_printf(&c->body, "<path class=\"point p%d\" d=\"M%.1f %.1f%s\"", color % TAGC_N_COLORS,
                     tagc_svg_clamp(x), tagc_svg_clamp(y),
                     forms[color % (int)(sizeof forms / sizeof forms[0])]);
    if (title) {
        tagc_text_add(&c->body, "><title>");
        tagc_text_escaped(&c->body, title);
        tagc_text_add(&c->body, "</title></path>\n");
    } else {
        tagc_text_add(&c->body, "/>\n");
    }
}

double tagc_svg_legend(tagc_canvas *c, const tagc_key *keys, int n_keys, double left, double right,
                       double y) {
    enum { ROW = 20, GAP = 16 };
    double x = left;
    for (int i = 0; i < n_keys; i++) {
        double symbol = keys[i].kind == TAGC_KEY_BOX ? 17 : keys[i].kind == TAGC_KEY_LINE ? 34 : 0;
        double width = fmin(symbol + tagc_svg_width(keys[i].label, 13), right - left);
        if (x > left && x + width > right) {
            x = left;
            y += ROW;
        }
        double middle = y + ROW / 2.0;
        if (keys[i].kind == TAGC_KEY_BOX) tagc_svg_box(c, x, middle - 6, 12, 12, keys[i].classes, NULL);
        if (keys[i].kind == TAGC_KEY_LINE) {
            char classes[TAGC_NUMBER_BYTES + 16];
            snprintf(classes, sizeof classes, "line %s", keys[i].classes);
            tagc_svg_line(c, x, middle, x + 28, middle, classes);
            if (keys[i].color >= 0) tagc_svg_marker(c, x + 14, middle, keys[i].color, NULL);
        }
        tagc_svg_text_fit(c, x + symbol, middle + 4.5, 's', keys[i].kind == TAGC_KEY_HEADING ? "soft" : "",
                          keys[i].label, right - x - symbol + 6);
        x += width + (keys[i].kind == TAGC_KEY_HEADING ? 8 : GAP);
    }
    return n_keys > 0 ? y + ROW : y;
}

/* ---- the whole ---- */

void tagc_svg_print(const tagc_canvas *c, const char *title, const char *description, int is_alone,
                    tagc_text *out) {
    double top = is_alone ? 34 : 0, height = c->height + top;
    const char *size = c->width < TAGC_WIDE ? "narrow" : "wide";
    tagc_text_printf(out, "<svg class=\"fig%s%s\" viewBox=\"0 0 %.0f %.0f\" role=\"img\"",
                     is_alone ? "" : " ", is_alone ? "" : size, c->width, height);
    tagc_text_printf(out, " aria-labelledby=\"t%d d%d\"", c->id, c->id);
    if (is_alone)
        tagc_text_printf(out, " width=\"%.0f\" height=\"%.0f\" xmlns=\"http://www.w3.org/2000/svg\"",
                         c->width, height);
    tagc_text_printf(out, ">\n<title id=\"t%d\">", c->id);
    tagc_text_escaped(out, title);
    tagc_text_printf(out, "</title>\n<desc id=\"d%d\">", c->id);
    tagc_text_escaped(out, description);
    tagc_text_add(out, "</desc>\n");
    if (is_alone) {
        tagc_style_alone(out);
        tagc_text_printf(out, "<rect class=\"paper\" width=\"%.0f\" height=\"%.0f\"/>\n", c->width, height);
        tagc_text_add(out, "<text class=\"title\" x=\"12\" y=\"23\">");
        tagc_text_escaped(out, title);
        tagc_text_printf(out, "</text>\n<g transform=\"translate(0 %.0f)\">\n", top);
    }
    if (c->body.data) tagc_text_add_bytes(out, c->body.data, c->body.n_bytes);
    out->failed |= c->body.failed;
    tagc_text_add(out, is_alone ? "</g>\n</svg>\n" : "</svg>\n");
}
