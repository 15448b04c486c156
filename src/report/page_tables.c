/* Tables of the page: numbers to the right, what is not known as a dash, everything from files escaped. */
#include "report/json_read.h"
#include "report/page.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void tagc_page_cell(tagc_text *out, const char *classes, const char *words) {
    if (*classes)
        tagc_text_printf(out, "<td class=\"%s\">", classes);
    else
        tagc_text_add(out, "<td>");
    tagc_text_escaped(out, *words ? words : "-");
    tagc_text_add(out, "</td>");
}

void tagc_page_swatch(tagc_text *out, int color) {
    tagc_text_printf(out, "<span class=\"swatch b%d\"></span>", color % TAGC_N_COLORS);
}

static void begin(tagc_text *out, const char *caption, const char *const *heads, int n_heads, int n_left) {
    tagc_text_add(out, "<div class=\"scroll\"><table>");
    if (*caption) {
        tagc_text_add(out, "<caption>");
        tagc_text_escaped(out, caption);
        tagc_text_add(out, "</caption>");
    }
    tagc_text_add(out, "\n<thead><tr>");
    for (int i = 0; i < n_heads; i++) {
        tagc_text_printf(out, "<th scope=\"col\"%s>", i < n_left ? " class=\"left\"" : "");
        tagc_text_escaped(out, heads[i]);
        tagc_text_add(out, "</th>");
    }
    tagc_text_add(out, "</tr></thead>\n<tbody>\n");
}

static void end(tagc_text *out) {
    tagc_text_add(out, "</tbody></table></div>\n");
}

static void add_arm(tagc_text *out, const char *name, int color) {
    /* A long name may break, a short one looks odd when it does. */
    tagc_text_add(out,
                  tagc_text_length(name) > 20 ? "<th scope=\"row\" class=\"long\">" : "<th scope=\"row\">");
    tagc_page_swatch(out, color);
    tagc_text_escaped(out, name);
    tagc_text_add(out, "</th>");
}

/* Columns that say nothing in this set are left out. */
void tagc_table_summary(const tagc_set *set, tagc_text *out) {
    char cells[TAGC_SUMMARY_COLUMNS][TAGC_CELL_BYTES];
    const char *heads[TAGC_SUMMARY_COLUMNS];
    int best = tagc_summary_best(set), is_used[TAGC_SUMMARY_COLUMNS] = {1}, n_heads = 0;
    for (int i = 0; i < set->n_results; i++) {
        tagc_summary_row(set, i, cells);
        for (int c = 1; c < TAGC_SUMMARY_COLUMNS; c++) is_used[c] |= cells[c][0] != 0;
    }
    for (int c = 0; c < TAGC_SUMMARY_COLUMNS; c++)
        if (is_used[c]) heads[n_heads++] = tagc_summary_heads[c];
    begin(out, set->title, heads, n_heads, 1);
    for (int i = 0; i < set->n_results; i++) {
        tagc_summary_row(set, i, cells);
        tagc_text_add(out, i == best && set->n_results > 1 ? "<tr class=\"best\">" : "<tr>");
        add_arm(out, set->results[i].name, set->results[i].color);
        for (int c = 1; c < TAGC_SUMMARY_COLUMNS; c++)
            if (is_used[c]) tagc_page_cell(out, "", cells[c]);
        tagc_text_add(out, "</tr>\n");
    }
    end(out);
}

static void add_shares(const tagc_trace_file *trace, const char *what, const tagc_shares *shares,
                       tagc_text *out) {
    char text[TAGC_NUMBER_BYTES];
    if (shares->n == 0) return;
    tagc_text_add(out, "<tr><th scope=\"row\">");
    tagc_text_escaped(out, trace->label);
    tagc_text_add(out, "</th>");
    tagc_page_cell(out, "left", what);
    tagc_page_cell(out, "", tagc_number_time(shares->length_s, text));
    const double values[] = {shares->model,      shares->computing,  shares->communicating,
                             shares->overlapped, shares->exchanging, shares->exchanging_with_gaps};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++)
        tagc_page_cell(out, "", tagc_number_percent(values[i], text));
    tagc_text_add(out, "</tr>\n");
}

void tagc_table_shares(const tagc_report *report, const tagc_view *view, tagc_text *out) {
    static const char *const heads[] = {"timeline",  "window",         "length",     "model",
                                        "computing", "communi­cating", "overlapped", "gradient exchange",
                                        "with gaps"};
    begin(out, "Shares of time", heads, sizeof heads / sizeof heads[0], 2);
    for (int t = 0; t < report->n_traces; t++) {
        const tagc_trace_file *trace = &report->traces[t];
        char units[TAGC_UNITS_BYTES], what[TAGC_UNITS_BYTES + 16];
        const char *of = tagc_view_units(view, trace, units);
        tagc_shares step = tagc_trace_shares(trace, NULL), window = tagc_trace_shares(trace, of);
        snprintf(what, sizeof what, "backward of %s", of);
        add_shares(trace, "whole step", &step, out);
        add_shares(trace, what, &window, out);
    }
    end(out);
    tagc_text_add(
        out, "<p class=\"hint\">Over all ranks and windows. Computing: the model or the codec is at work. "
             "Communicating: at least one transfer under way. "
             "Gradient exchange: at least one transfer of gradients; with gaps: from the first transfer of a "
             "unit's exchange to its last.</p>\n");
}

static void add_rate(tagc_text *out, double bits_per_s) {
    char text[TAGC_NUMBER_BYTES];
    tagc_page_cell(out, "", tagc_number_rate(bits_per_s, text));
}

void tagc_table_link(const tagc_report *report, tagc_text *out) {
    static const char *const heads[] = {"result", "latency", "one way", "both ways", "all to all"};
    int n = 0;
    for (int s = 0; s < report->n_sets; s++) {
        const json_t *link = json_object_get(report->sets[s].bench, "link");
        char text[TAGC_NUMBER_BYTES];
        if (!json_is_object(link)) continue;
        if (n++ == 0)
            begin(out, "The link, per rank and direction", heads, sizeof heads / sizeof heads[0], 1);
        tagc_text_add(out, "<tr><th scope=\"row\">");
        tagc_text_escaped(out, report->sets[s].title);
        tagc_text_add(out, "</th>");
        tagc_page_cell(out, "", tagc_number_time(tagc_json_number_or_nan(link, "latency_s"), text));
        add_rate(out, 8 * tagc_json_number_or_nan(link, "one_way_bytes_per_s"));
        add_rate(out, 8 * tagc_json_number_or_nan(link, "both_ways_bytes_per_s"));
        add_rate(out, 8 * tagc_json_number_or_nan(link, "all_to_all_bytes_per_s"));
        tagc_text_add(out, "</tr>\n");
    }
    if (n > 0) end(out);
}

static void add_range(tagc_text *out, const double range[2]) {
    char text[2 * TAGC_NUMBER_BYTES + 4], a[TAGC_NUMBER_BYTES], b[TAGC_NUMBER_BYTES];
    tagc_number_rate(range[0], a);
    tagc_number_rate(range[1], b);
    if (strcmp(a, b) != 0)
        snprintf(text, sizeof text, "%s to %s", a, b);
    else
        snprintf(text, sizeof text, "%s", a);
    tagc_page_cell(out, "", text);
}

static void lab_times(const tagc_report *report, tagc_text *out) {
    static const char *const heads[] = {"case",          "arm",    "step",    "ratio",
                                        "least to most", "rounds", "all bits"};
    int n = 0;
    for (int i = 0; i < report->n_cases; i++) {
        const tagc_set *set = report->cases[i].set >= 0 ? &report->sets[report->cases[i].set] : NULL;
        for (int r = 0; set && r < set->n_results; r++) {
            char cells[TAGC_SUMMARY_COLUMNS][TAGC_CELL_BYTES], rounds[TAGC_NUMBER_BYTES];
            if (n++ == 0) begin(out, "Iteration time", heads, sizeof heads / sizeof heads[0], 2);
            tagc_summary_row(set, r, cells);
            tagc_text_add(out, "<tr><th scope=\"row\">");
            tagc_text_escaped(out, r == 0 ? report->cases[i].title : "");
            tagc_text_add(out, "</th><td class=\"left\">");
            tagc_page_swatch(out, set->results[r].color);
            tagc_text_escaped(out, set->results[r].name);
            tagc_text_add(out, "</td>");
            tagc_page_cell(out, "", cells[1]);
            tagc_page_cell(out, "", cells[2]);
            tagc_page_cell(out, "", cells[3]);
            snprintf(rounds, sizeof rounds, "%d", set->results[r].speedup.n);
            tagc_page_cell(out, "", rounds);
            tagc_page_cell(out, "", cells[6]);
            tagc_text_add(out, "</tr>\n");
        }
    }
    if (n > 0) end(out);
}

void tagc_table_lab(const tagc_report *report, tagc_text *out) {
    static const char *const heads[] = {"case",          "ranks",          "link set to",       "MTU",
                                        "TCP, one way",  "TCP, both ways", "sent by all hosts", "received",
                                        "sent / counted"};
    for (int i = 0; i < report->n_cases; i++) { /* what the experiments were */
        const tagc_lab_case *one = &report->cases[i];
        const char *title = json_string_value(json_object_get(one->settings, "title"));
        if (!title || (i > 0 && one->settings == report->cases[i - 1].settings)) continue;
        tagc_text_add(out, "<p><strong>");
        tagc_text_escaped(out, one->experiment);
        tagc_text_add(out, "</strong>: ");
        tagc_text_escaped(out, title);
        tagc_text_add(out, "</p>\n");
    }
    lab_times(report, out);
    tagc_table_pairs(report, out);
    begin(out, "Links as iperf3 and the interfaces saw them", heads, sizeof heads / sizeof heads[0], 1);
    for (int i = 0; i < report->n_cases; i++) {
        const tagc_lab_case *one = &report->cases[i];
        char text[TAGC_NUMBER_BYTES];
        tagc_text_add(out, "<tr><th scope=\"row\">");
        tagc_text_escaped(out, one->title);
        tagc_text_add(out, "</th>");
        tagc_page_cell(out, "", tagc_number_count(one->n_ranks, text));
        tagc_page_cell(out, "", one->rate);
        tagc_page_cell(out, "", tagc_number_count(one->mtu, text));
        add_range(out, one->tcp_one_way);
        add_range(out, one->tcp_both_ways);
        tagc_page_cell(out, "", tagc_number_bytes(one->sent_bytes, text));
        tagc_page_cell(out, "", tagc_number_bytes(one->received_bytes, text));
        tagc_page_cell(out, "", tagc_number_fixed(one->overhead, 3, text));
        tagc_text_add(out, "</tr>\n");
    }
    end(out);
    tagc_text_add(out, "<p class=\"hint\">Ratio: the first arm's time over this arm's, per round; the arms "
                       "take turns.</p>\n");
}

void tagc_table_plan(const tagc_report *report, tagc_text *out) {
    static const char *const heads[] = {"arm", "ranks", "link", "placement", "step", "exposed"};
    if (report->n_plan > 400) return; /* a sweep: the lines say it better */
    begin(out, "Predictions, simulated", heads, sizeof heads / sizeof heads[0], 1);
    for (int i = 0; i < report->n_plan; i++) {
        const tagc_plan_point *point = &report->plan[i];
        char text[TAGC_NUMBER_BYTES];
        tagc_text_add(out, "<tr>");
        add_arm(out, point->name, point->color);
        tagc_page_cell(out, "", tagc_number_count(point->world_size, text));
        tagc_page_cell(out, "", tagc_number_rate(point->bits_per_s, text));
        tagc_page_cell(out, "", point->placement);
        tagc_page_cell(out, "", tagc_number_time(point->iteration_s, text));
        tagc_page_cell(out, "", tagc_number_time(point->exposed_s, text));
        tagc_text_add(out, "</tr>\n");
    }
    end(out);
}

void tagc_table_checks(const tagc_report *report, tagc_text *out) {
    static const char *const heads[] = {"arm",      "where",     "ranks", "link",
                                        "measured", "simulated", "error", "seen by the fit"};
    if (report->n_checks == 0) return;
    begin(out, "Predictions against measurements", heads, sizeof heads / sizeof heads[0], 2);
    for (int i = 0; i < report->n_checks; i++) {
        const tagc_plan_check *check = &report->checks[i];
        char text[TAGC_NUMBER_BYTES];
        tagc_text_add(out, "<tr><th scope=\"row\">");
        tagc_text_escaped(out, check->arm);
        tagc_text_add(out, "</th>");
        tagc_page_cell(out, "left wrap", check->place);
        tagc_page_cell(out, "", tagc_number_count(check->world_size, text));
        tagc_page_cell(out, "", tagc_number_rate(check->bits_per_s, text));
        tagc_page_cell(out, "", tagc_number_time(check->measured_s, text));
        tagc_page_cell(out, "", tagc_number_time(check->simulated_s, text));
        tagc_page_cell(out, "", tagc_number_change(check->error, text));
        tagc_page_cell(out, "", check->is_held_out ? "no" : "yes");
        tagc_text_add(out, "</tr>\n");
    }
    end(out);
}

/* ---- what the runs were ---- */

enum { MAX_ARMS = 64, MAX_OPTIONS = 96 };

/* A value as text: options of runs are texts already. out (80) */
static const char *value_of(const json_t *options, const char *name, char *out) {
    const json_t *value = json_object_get(options, name);
    if (json_is_string(value)) return json_string_value(value);
    if (json_is_number(value))
        snprintf(out, 80, "%.10g", json_number_value(value));
    else
        snprintf(out, 80, "%s", json_is_true(value) ? "yes" : json_is_false(value) ? "no" : "");
    return out;
}

static int differs(const tagc_result *const *arms, int n_arms, const char *name) {
    static const char *const places[] = {"out", "trace", "config", "quiet", "seed"};
    char first[80], other[80];
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++)
        if (strcmp(places[i], name) == 0) return 0;
    for (int i = 1; i < n_arms; i++)
        if (strcmp(value_of(arms[0]->options, name, first), value_of(arms[i]->options, name, other)) != 0)
            return 1;
    return 0;
}

void tagc_table_options(const tagc_report *report, tagc_text *out) {
    const tagc_result *arms[MAX_ARMS];
    const char *heads[MAX_OPTIONS + 1] = {"arm"};
    int n_arms = 0, n_heads = 1;
    for (int s = 0; s < report->n_sets; s++) {
        for (int i = 0; i < report->sets[s].n_results && n_arms < MAX_ARMS; i++) {
            const tagc_result *result = &report->sets[s].results[i];
            int is_new = json_is_object(result->options);
            for (int k = 0; is_new && k < n_arms; k++) is_new = arms[k]->color != result->color;
            if (is_new) arms[n_arms++] = result;
        }
    }
    for (int i = 0; i < n_arms; i++) {
        const char *name;
        json_t *value;
        json_object_foreach(arms[i]->options, name, value) {
            int is_new = n_heads <= MAX_OPTIONS && differs(arms, n_arms, name);
            for (int k = 1; is_new && k < n_heads; k++) is_new = strcmp(heads[k], name) != 0;
            if (is_new) heads[n_heads++] = name;
        }
    }
    if (n_heads == 1) return;
    begin(out, "Options that differ between the arms", heads, n_heads, n_heads);
    for (int i = 0; i < n_arms; i++) {
        char text[80];
        tagc_text_add(out, "<tr>");
        add_arm(out, arms[i]->name, arms[i]->color);
        for (int k = 1; k < n_heads; k++)
            tagc_page_cell(out, "left", value_of(arms[i]->options, heads[k], text));
        tagc_text_add(out, "</tr>\n");
    }
    end(out);
}

static void add_command(const json_t *command, tagc_text *out) {
    size_t n = json_array_size(command);
    tagc_text_add(out, "<code>");
    for (size_t i = 0; i < n && i < 200; i++) {
        const char *word = json_string_value(json_array_get(command, i));
        if (i > 0) tagc_text_add(out, " ");
        int is_quoted = word && (!*word || strpbrk(word, " \t\"'$*?;&|<>()"));
        if (is_quoted) tagc_text_add(out, "&quot;");
        tagc_text_escaped(out, word ? word : "?");
        if (is_quoted) tagc_text_add(out, "&quot;");
    }
    tagc_text_add(out, "</code>");
}

static void add_origin(const json_t *origin, tagc_text *out) {
    const json_t *machine = json_object_get(origin, "machine"), *command = json_object_get(origin, "command");
    const char *version = json_string_value(json_object_get(origin, "version"));
    const char *commit = json_string_value(json_object_get(origin, "commit"));
    const char *date = json_string_value(json_object_get(origin, "date"));
    const char *cpu = json_string_value(json_object_get(machine, "cpu"));
    const char *os = json_string_value(json_object_get(machine, "os"));
    double memory = tagc_json_number_or_nan(machine, "memory_bytes");
    char text[512], number[TAGC_NUMBER_BYTES];
    snprintf(text, sizeof text, "tagc %.40s%s%.60s%s%.40s", version ? version : "?",
             commit ? ", commit " : "", commit ? commit : "", date ? ", " : "", date ? date : "");
    tagc_text_escaped(out, text);
    if (cpu) {
        snprintf(text, sizeof text, "%.100s, %.0f CPUs, %s, %.100s", cpu,
                 tagc_json_number_or_nan(machine, "n_cpus"), tagc_number_bytes(memory, number), os ? os : "");
        tagc_text_add(out, "<br>");
        tagc_text_escaped(out, text);
    }
    if (json_is_array(command)) {
        tagc_text_add(out, "<br>");
        add_command(command, out);
    }
}

void tagc_table_sources(const tagc_report *report, tagc_text *out) {
    static const char *const heads[] = {"file", "what", "where it comes from"};
    begin(out, "What this page was made from", heads, 3, 3);
    int run = 0;
    for (int i = 0; i < report->n_sources; i++) {
        const tagc_source *source = &report->sources[i];
        const json_t *origin = source->origin;
        tagc_text_add(out, "<tr><td class=\"left wrap\"><code>");
        tagc_text_escaped(out, source->path);
        tagc_text_add(out, "</code></td>");
        tagc_page_cell(out, "left", source->what);
        tagc_text_add(out, "<td class=\"left wrap\">");
        if (strcmp(source->what, "run") == 0) {
            while (run < report->n_runs && report->runs[run].place > 0) run++;
            const tagc_runlog *log = run < report->n_runs ? &report->runs[run++] : NULL;
            char text[160], count[TAGC_NUMBER_BYTES];
            origin = json_object_get(log ? log->about : NULL, "origin");
            const char *version = json_string_value(json_object_get(log ? log->about : NULL, "tagc"));
            snprintf(text, sizeof text, "%s%.40s%s%d ranks, %d steps, %s parameters",
                     version && !origin ? "tagc " : "", version && !origin ? version : "",
                     version && !origin ? ", " : "", log ? log->world_size : 0, log ? log->n_steps : 0,
                     tagc_number_count(log ? log->n_params : (double)NAN, count));
            tagc_text_escaped(out, text);
            if (origin) tagc_text_add(out, "<br>");
        }
        if (origin) add_origin(origin, out);
        tagc_text_add(out, "</td></tr>\n");
    }
    end(out);
}
