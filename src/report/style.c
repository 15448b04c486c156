/* Colours, once for light and once for dark. Fills and strokes follow Okabe and Ito, so that those who see few colours
 * tell them apart; strokes are darker on light pages, since a thin line needs more contrast than a box. */
#include "report/svg.h"

#include <stdio.h>
#include <string.h>

static const struct {
    const char *name, *light, *dark;
} colors[] = {
    {"page", "#ffffff", "#0d1117"}, {"panel", "#f6f8fa", "#161b22"},  {"ink", "#1f2328", "#e6edf3"},
    {"soft", "#59636e", "#9aa4ae"}, {"grid", "#dfe4e9", "#2b3138"},   {"frame", "#6e7781", "#8b949e"},
    {"idle", "#dde2e8", "#363d45"}, {"link", "#0a58a8", "#79b8ff"},   {"c0", "#0072b2", "#4aa8e8"},
    {"c1", "#d55e00", "#ff8c42"},   {"c2", "#009e73", "#3fd0a4"},     {"c3", "#b3568f", "#e79bc8"},
    {"c4", "#e69f00", "#f0c24a"},   {"c5", "#56b4e9", "#a5dcfa"},     {"c6", "#6f58b8", "#b7a0f0"},
    {"c7", "#6e7781", "#98a2ac"},   {"l0", "#0072b2", "#58b4f0"},     {"l1", "#d55e00", "#ff8c42"},
    {"l2", "#008c66", "#3fd0a4"},   {"l3", "#b3568f", "#e79bc8"},     {"l4", "#a87800", "#f0c24a"},
    {"l5", "#3187bd", "#a5dcfa"},   {"l6", "#6f58b8", "#b7a0f0"},     {"l7", "#6e7781", "#b1bac4"},
    {"on", "#ffffff", "#0d1117"},   {"ondark", "#12202c", "#0d1117"},
};
enum { N_COLORS = sizeof colors / sizeof colors[0] };

static const char rules[] =
    ".fig text { font: 13px system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif; fill: "
    "$ink }\n"
    ".fig .small { font-size: 11.5px } .fig .title { font-size: 15px; font-weight: 600 }\n"
    ".fig .strong { font-weight: 600 } .fig .soft { fill: $soft }\n"
    ".fig .on { fill: $on; font-size: 11.5px } .fig .ondark { fill: $ondark; font-size: 11.5px }\n"
    ".paper { fill: $page } .panel { fill: $panel } .idle { fill: $idle }\n"
    ".grid { stroke: $grid } .frame { stroke: $frame; fill: none } .mark { stroke: $ink; stroke-dasharray: 4 "
    "3 }\n"
    ".line { fill: none; stroke-width: 2; stroke-linejoin: round } .faint { stroke-width: 1.2; opacity: 0.55 "
    "}\n"
    ".whisker { stroke: $ink; stroke-width: 1.2; fill: none } .band { opacity: 0.18 }\n"
    ".window { fill: none; stroke: $ink; stroke-width: 1.5; stroke-dasharray: 5 3 }\n"
    ".point { stroke: $page; stroke-width: 1 }\n"
    ".c0 { fill: $c0 } .c1 { fill: $c1 } .c2 { fill: $c2 } .c3 { fill: $c3 }\n"
    ".c4 { fill: $c4 } .c5 { fill: $c5 } .c6 { fill: $c6 } .c7 { fill: $c7 }\n"
    ".p0 { fill: $l0 } .p1 { fill: $l1 } .p2 { fill: $l2 } .p3 { fill: $l3 }\n"
    ".p4 { fill: $l4 } .p5 { fill: $l5 } .p6 { fill: $l6 } .p7 { fill: $l7 }\n"
    ".l0 { stroke: $l0 } .l1 { stroke: $l1 } .l2 { stroke: $l2 } .l3 { stroke: $l3 }\n"
    ".l4 { stroke: $l4 } .l5 { stroke: $l5 } .l6 { stroke: $l6 } .l7 { stroke: $l7 }\n"
    ".d1 { stroke-dasharray: 8 3 } .d2 { stroke-dasharray: 2 3 } .d3 { stroke-dasharray: 10 3 2 3 }\n"
    ".d4 { stroke-dasharray: 14 4 } .sim { opacity: 0.75 }\n";

static const char page_rules[] =
    "* { box-sizing: border-box }\n"
    "body { margin: 0 auto; padding: 0 1.25rem 3rem; max-width: 52rem; background: $page; color: $ink;\n"
    "  font: 16px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif }\n"
    "h1 { font-size: 1.6rem; line-height: 1.25; margin: 2rem 0 .25rem } h2 { font-size: 1.25rem; margin: "
    "2.5rem 0 .5rem;\n"
    "  padding-top: .75rem; border-top: 1px solid $grid } h3 { font-size: 1rem; margin: 1.5rem 0 .25rem }\n"
    "p { margin: .5rem 0 } a { color: $link } .about, figcaption, .hint { color: $soft; font-size: .875rem "
    "}\n"
    "nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: .75rem 0 0; font-size: .9rem }\n"
    "figure { margin: .75rem 0 1.25rem } figcaption { margin-top: .4rem }\n"
    ".fig { display: block; width: 100%; height: auto } .narrow { display: none }\n"
    ".verdict { padding: .75rem 1rem; border-left: 4px solid $c0; background: $panel; border-radius: 0 6px "
    "6px 0 }\n"
    ".verdict p:first-child { margin-top: 0 } .verdict p:last-child { margin-bottom: 0 }\n"
    ".notes { padding: .5rem 1rem; border-left: 4px solid $c4; background: $panel; font-size: .9rem }\n"
    ".notes ul { margin: .25rem 0; padding-left: 1.2rem }\n"
    ".scroll { overflow-x: auto; margin: .75rem 0 } table { border-collapse: collapse; font-size: .875rem;\n"
    "  font-variant-numeric: tabular-nums; min-width: 60% } caption { text-align: left; font-weight: 600;\n"
    "  padding: .25rem 0 } th, td { padding: .3rem .45rem; border-bottom: 1px solid $grid; text-align: "
    "right;\n"
    "  vertical-align: top } th { font-weight: 600 } thead th { vertical-align: bottom; color: $soft }\n"
    "th:first-child, td.left, th.left { text-align: left } th:first-child, td:first-child { padding-left: 0 "
    "}\n"
    "td:not(.wrap), th[scope=row] { white-space: nowrap } td.wrap { min-width: 12rem }\n"
    "th.long { white-space: normal; min-width: 11rem; overflow-wrap: anywhere }\n"
    "tr.best td, tr.best th { background: $panel } code { font: .85em/1.4 ui-monospace, 'DejaVu Sans Mono', "
    "monospace;\n"
    "  overflow-wrap: anywhere } details { margin: .75rem 0 } summary { cursor: pointer; color: $link }\n"
    ".swatch { display: inline-block; width: .75em; height: .75em; border-radius: 2px; margin-right: .4em }\n"
    ".b0 { background: $l0 } .b1 { background: $l1 } .b2 { background: $l2 } .b3 { background: $l3 }\n"
    ".b4 { background: $l4 } .b5 { background: $l5 } .b6 { background: $l6 } .b7 { background: $l7 }\n"
    ".toggles { display: flex; flex-wrap: wrap; gap: .25rem 1rem; font-size: .875rem; margin: .5rem 0 }\n"
    ".off { display: none }\n"
    "@media (max-width: 600px) { body { padding: 0 .9rem 2rem } .wide { display: none } .narrow { display: "
    "block }\n"
    "  h1 { font-size: 1.35rem } th, td { padding: .3rem .5rem } }\n"
    "@media print { body { max-width: none; padding: 0; font-size: 10.5pt } nav, .toggles { display: none }\n"
    "  .wide { display: block; max-height: 222mm } .narrow { display: none } .scroll { overflow: visible }\n"
    "  table { font-size: 8.5pt; min-width: 0 } th, td { padding: .15rem .35rem }\n"
    "  td.left, th[scope=row] { white-space: normal }\n"
    "  section { break-before: page } section:first-of-type { break-before: auto }\n"
    "  h2 { border-top: none; margin-top: 0; break-after: avoid } h3, caption { break-after: avoid }\n"
    "  figure, tr, .verdict, .notes { break-inside: avoid } details > :not(summary) { display: block }\n"
    "  a { color: inherit; text-decoration: none }\n"
    "  * { print-color-adjust: exact; -webkit-print-color-adjust: exact } }\n"
    "@page { margin: 14mm }\n";

enum { LIGHT, DARK, VARIABLES };

static void add_rules(const char *text, int mode, tagc_text *out) {
    while (*text) {
        size_t n = strcspn(text, "$");
        tagc_text_add_bytes(out, text, n);
        text += n;
        if (!*text) break;
        size_t n_name = strspn(++text, "abcdefghijklmnopqrstuvwxyz0123456789");
        for (int i = 0; i < N_COLORS; i++) {
            if (strlen(colors[i].name) != n_name || strncmp(colors[i].name, text, n_name) != 0) continue;
            if (mode == VARIABLES)
                tagc_text_printf(out, "var(--%s)", colors[i].name);
            else
                tagc_text_add(out, mode == DARK ? colors[i].dark : colors[i].light);
        }
        text += n_name;
    }
}

/* Not all who draw SVG know variables, so that the rules are there twice. */
void tagc_style_alone(tagc_text *out) {
    tagc_text_add(out, "<style>\n");
    add_rules(rules, LIGHT, out);
    tagc_text_add(out, "@media screen and (prefers-color-scheme: dark) {\n");
    add_rules(rules, DARK, out);
    tagc_text_add(out, "}\n</style>\n");
}

void tagc_style_page(tagc_text *out) {
    tagc_text_add(out, "<style>\n:root { color-scheme: light dark");
    for (int i = 0; i < N_COLORS; i++) tagc_text_printf(out, "; --%s: %s", colors[i].name, colors[i].light);
    /* What is printed is on white paper, whatever the screen. */
    tagc_text_add(out, " }\n@media screen and (prefers-color-scheme: dark) { :root { color-scheme: dark");
    for (int i = 0; i < N_COLORS; i++) tagc_text_printf(out, "; --%s: %s", colors[i].name, colors[i].dark);
    tagc_text_add(out, " } }\n@media print { :root { color-scheme: light } }\n");
    add_rules(rules, VARIABLES, out);
    add_rules(page_rules, VARIABLES, out);
    tagc_text_add(out, "</style>\n");
}
