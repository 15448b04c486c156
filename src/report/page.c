/* The page, from the summary down to where everything comes from. Only what there is data for. */
#include "report/page.h"

#include <stdio.h>
#include <string.h>

/* Nothing may be fetched: the browser is told so, too. The script adds switches for arms; without it nothing lacks. */
static const char head[] =
    "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
    "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:\">\n"
    "<meta name=\"generator\" content=\"tagc report\">\n<link rel=\"icon\" href=\"data:,\">\n";

static const char script[] =
    "<script>\n"
    "for (const box of document.querySelectorAll('.toggles')) {\n"
    "  for (const from of box.querySelectorAll('[data-name]')) {\n"
    "    const label = document.createElement('label'), input = document.createElement('input');\n"
    "    input.type = 'checkbox'; input.checked = true;\n"
    "    input.onchange = () => { for (const g of document.querySelectorAll('[data-arm=\"' + "
    "from.dataset.name + '\"]'))\n"
    "      g.classList.toggle('off', !input.checked); };\n"
    "    label.append(input, ' ', ...from.childNodes); from.replaceWith(label);\n"
    "  }\n"
    "  box.hidden = false;\n"
    "}\n"
    "</script>\n";

typedef struct section {
    const char *id, *title;
    const char *figures[4];
} section;

static const section sections[] = {
    {"loss", "Loss", {"loss", "loss-time", "gap"}},
    {"quality", "Loss against bits", {"pareto", "pareto-all", "loss-slow", "loss-fast"}},
    {"time", "Time of a step", {"time"}},
    {"bits", "Bytes on the wire", {"bits"}},
    {"timeline", "Timeline", {"timeline", "window"}},
    {"memory", "Memory", {"memory"}},
    {"codec", "Codec and link", {"codec", "link"}},
    {"plan", "Plan", {"plan", "plan-world"}},
};
enum { N_SECTIONS = sizeof sections / sizeof sections[0] };

typedef struct page {
    const tagc_report *report;
    const tagc_view *view;
    tagc_text *out, nav;
    int n_drawings;
} page;

static void begin_section(page *p, const char *id, const char *title) {
    tagc_text_printf(p->out, "<section id=\"%s\">\n<h2>%s</h2>\n", id, title);
    tagc_text_printf(&p->nav, "<a href=\"#%s\">%s</a>\n", id, title);
}

/* Wide for screens and paper, narrow for phones; the style shows one of the two. */
static int add_figure(page *p, const tagc_figure *figure, int has_heading) {
    static const double widths[] = {TAGC_WIDE, TAGC_NARROW};
    for (int i = 0; i < 2; i++) {
        tagc_canvas canvas = {.width = widths[i], .id = ++p->n_drawings};
        int drawn = figure->draw(p->report, p->view, &canvas);
        if (drawn && i == 0 && has_heading) tagc_text_printf(p->out, "<h3>%s</h3>\n", figure->title);
        if (drawn && i == 0) tagc_text_printf(p->out, "<figure id=\"figure-%s\">\n", figure->name);
        if (drawn) tagc_svg_print(&canvas, figure->title, figure->caption, 0, p->out);
        p->out->failed |= canvas.body.failed;
        tagc_text_destroy(&canvas.body);
        if (!drawn) return 0;
    }
    tagc_text_add(p->out, "<figcaption>");
    tagc_text_escaped(p->out, figure->caption);
    tagc_text_add(p->out, "</figcaption>\n</figure>\n");
    return 1;
}

static void add_toggles(page *p) {
    if (p->report->n_groups < 2) return;
    tagc_text_add(p->out, "<div class=\"toggles\" hidden>");
    for (int g = 0; g < p->report->n_groups; g++) {
        const tagc_group *group = &p->report->groups[g];
        tagc_text_printf(p->out, "<span data-name=\"%d\">", group->color);
        tagc_page_swatch(p->out, group->color);
        tagc_text_escaped(p->out, group->name);
        tagc_text_add(p->out, "</span>");
    }
    tagc_text_add(p->out, "</div>\n");
}

static void add_section(page *p, const section *s) {
    size_t start = p->out->n_bytes, nav_start = p->nav.n_bytes;
    int n = 0;
    begin_section(p, s->id, s->title);
    if (strcmp(s->id, "loss") == 0) add_toggles(p);
    for (int i = 0; i < 4 && s->figures[i]; i++)
        n += add_figure(p, tagc_figure_find(s->figures[i]), s->figures[1] != NULL);
    if (n == 0) { /* nothing to show: as if it had not begun */
        p->out->n_bytes = start;
        p->nav.n_bytes = nav_start;
        return;
    }
    if (strcmp(s->id, "timeline") == 0) tagc_table_shares(p->report, p->view, p->out);
    if (strcmp(s->id, "codec") == 0) tagc_table_link(p->report, p->out);
    if (strcmp(s->id, "plan") == 0) {
        tagc_table_checks(p->report, p->out);
        tagc_table_plan(p->report, p->out);
    }
    tagc_text_add(p->out, "</section>\n");
}

static void add_summary(page *p) {
    tagc_text words = {0};
    tagc_summary_words(p->report, p->view, &words);
    tagc_text_add(p->out, "<section id=\"summary\">\n<h2>Summary</h2>\n");
    if (words.n_bytes > 0) {
        tagc_text_add(p->out, "<div class=\"verdict\">\n");
        for (char *line = words.data; *line;) {
            size_t n = strcspn(line, "\n");
            int has_more = line[n] != 0;
            line[n] = 0;
            tagc_text_add(p->out, "<p>");
            tagc_text_escaped(p->out, line);
            tagc_text_add(p->out, "</p>\n");
            line += n + (size_t)has_more;
        }
        tagc_text_add(p->out, "</div>\n");
    }
    p->out->failed |= words.failed;
    tagc_text_destroy(&words);
    int n_tables = 0;
    for (int s = 0; s < p->report->n_sets; s++)
        if (p->report->sets[s].n_results > 0 && (p->report->sets[s].kind != TAGC_SET_PLAN || s < 4)) {
            tagc_table_summary(&p->report->sets[s], p->out);
            n_tables++;
        }
    if (n_tables > 0)
        tagc_text_add(p->out, "<p class=\"hint\">step: time of an optimizer step, median. speed-up: the "
                              "first arm's time over this "
                              "arm's. exposed: share of the step in which compute waits for the network. "
                              "bits: per parameter, rank "
                              "and step, before the factor (W-1)/W, over the whole model. gap: validation "
                              "loss against the first "
                              "arm. Shaded: the shortest step.</p>\n");
    if (p->report->n_notes > 0) {
        tagc_text_add(p->out, "<div class=\"notes\"><ul>\n");
        for (int i = 0; i < p->report->n_notes; i++) {
            tagc_text_add(p->out, "<li>");
            tagc_text_escaped(p->out, p->report->notes[i]);
            tagc_text_add(p->out, "</li>\n");
        }
        tagc_text_add(p->out, "</ul></div>\n");
    }
    tagc_text_add(p->out, "</section>\n");
}

void tagc_page_print(const tagc_report *report, const tagc_view *view, const char *title, tagc_text *out) {
    tagc_text body = {0};
    page p = {.report = report, .view = view, .out = &body};
    add_summary(&p);
    for (int i = 0; i < N_SECTIONS; i++) add_section(&p, &sections[i]);
    if (report->n_cases > 0) {
        begin_section(&p, "lab", "Lab");
        tagc_table_lab(report, &body);
        tagc_text_add(&body, "</section>\n");
    }
    begin_section(&p, "origin", "What the runs were");
    tagc_table_options(report, &body);
    tagc_table_sources(report, &body);
    tagc_text_add(&body, "</section>\n");

    if (!title || !*title) title = "tagc: measurements";
    tagc_text_add(out, head);
    tagc_text_add(out, "<title>");
    tagc_text_escaped(out, title);
    tagc_text_add(out, "</title>\n");
    tagc_style_page(out);
    tagc_text_add(out, "</head>\n<body>\n<header>\n<h1>");
    tagc_text_escaped(out, title);
    tagc_text_add(out, "</h1>\n<nav aria-label=\"Sections\">\n");
    tagc_text_add_bytes(out, p.nav.data ? p.nav.data : "", p.nav.n_bytes);
    tagc_text_add(out, "</nav>\n</header>\n<main>\n");
    tagc_text_add_bytes(out, body.data ? body.data : "", body.n_bytes);
    tagc_text_add(out, "</main>\n");
    tagc_text_add(out, script);
    tagc_text_add(out, "</body>\n</html>\n");
    out->failed |= body.failed || p.nav.failed;
    tagc_text_destroy(&body);
    tagc_text_destroy(&p.nav);
}
