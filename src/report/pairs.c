/* Ratios of pairs of arms that an experiment of the lab asks for: per round, since arms take turns. */
#include "report/json_read.h"
#include "report/page.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const json_t *find_arm(const json_t *bench, const char *name) {
    const json_t *arms = json_object_get(bench, "arms");
    for (size_t i = 0; name && i < json_array_size(arms); i++) {
        const json_t *arm = json_array_get(arms, i);
        const char *other = json_string_value(json_object_get(arm, "name"));
        if (other && strcmp(other, name) == 0) return arm;
    }
    return NULL;
}

/* Median of the iterations of a round; NaN when it has none. */
static double median_of_round(const json_t *arm, double round) {
    const json_t *iterations = json_object_get(arm, "iterations");
    size_t n = json_array_size(iterations), n_in = 0;
    double *values = malloc((n + 1) * sizeof *values), median = (double)NAN;
    for (size_t i = 0; values && i < n; i++) {
        const json_t *iteration = json_array_get(iterations, i);
        if (tagc_json_number_or_nan(iteration, "round") == round)
            values[n_in++] = tagc_json_number_or_nan(iteration, "total_s");
    }
    if (values) median = tagc_spread_of(values, (int)n_in, 0).middle;
    free(values);
    return median;
}

tagc_spread tagc_pair_ratio(const json_t *bench, const char *first, const char *second) {
    enum { MOST_ROUNDS = 1000 };
    const json_t *a = find_arm(bench, first), *b = find_arm(bench, second);
    double ratios[MOST_ROUNDS];
    int n = 0;
    for (; a && b && n < MOST_ROUNDS; n++) {
        ratios[n] = median_of_round(a, n) / median_of_round(b, n);
        if (!isfinite(ratios[n])) break;
    }
    return tagc_spread_of(ratios, n, 0);
}

static void add_pair(const char *title, const char *first, const char *second, const tagc_spread *ratio,
                     tagc_text *out) {
    char text[64];
    tagc_text_add(out, "<tr><td class=\"left wrap\">");
    tagc_text_escaped(out, title);
    tagc_text_add(out, "</td>");
    tagc_page_cell(out, "left wrap", first);
    tagc_page_cell(out, "left wrap", second);
    snprintf(text, sizeof text, "%.3f", fmin(ratio->middle, 9999));
    tagc_page_cell(out, "", text);
    snprintf(text, sizeof text, "%.3f–%.3f", fmin(ratio->min, 9999), fmin(ratio->max, 9999));
    tagc_page_cell(out, "", ratio->n > 1 ? text : "");
    snprintf(text, sizeof text, "%d", ratio->n);
    tagc_page_cell(out, "", text);
    tagc_text_add(out, "</tr>\n");
}

void tagc_table_pairs(const tagc_report *report, tagc_text *out) {
    int n = 0;
    for (int i = 0; i < report->n_cases; i++) {
        const tagc_lab_case *one = &report->cases[i];
        const json_t *pairs = json_object_get(one->settings, "pairs");
        for (size_t k = 0; one->set >= 0 && k < json_array_size(pairs); k++) {
            const json_t *pair = json_array_get(pairs, k);
            const char *first = json_string_value(json_array_get(pair, 0));
            const char *second = json_string_value(json_array_get(pair, 1));
            if (!first || !second) continue;
            tagc_spread ratio = tagc_pair_ratio(report->sets[one->set].bench, first, second);
            if (ratio.n == 0) continue;
            if (n++ == 0)
                tagc_text_add(
                    out,
                    "<div class=\"scroll\"><table><caption>Ratio per pair</caption>\n<thead><tr>"
                    "<th scope=\"col\" class=\"left\">case</th><th scope=\"col\" class=\"left\">time of</th>"
                    "<th scope=\"col\" class=\"left\">over that of</th><th scope=\"col\">median</th>"
                    "<th scope=\"col\">least–most</th><th scope=\"col\">rounds</th></tr></thead>\n<tbody>\n");
            add_pair(one->title, first, second, &ratio, out);
        }
    }
    if (n > 0) tagc_text_add(out, "</tbody></table></div>\n");
}
