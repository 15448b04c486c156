/* tagc report: what was measured, as one page, as pictures, and in words. */
#include "cli/commands.h"
#include "files/paths.h"
#include "launch/ranks.h"
#include "core/status.h"
#include "report/page.h"
#include <stdlib.h>
#include <string.h>

typedef struct report_options {
    const char *out, *svg, *svg_dir, *title, *units;
    int quiet;
} report_options;

#define AT(field) offsetof(report_options, field)
/* clang-format off */
static const tagc_option rows[] = {
    {"What", "out", TAGC_OPTION_TEXT, 0, AT(out), 0, 0, NULL, NULL, "FILE", "one HTML page that needs nothing else, no network either"},
    {NULL, "svg", TAGC_OPTION_TEXT, 0, AT(svg), 0, 0, NULL, NULL, "FIGURE=FILE",
     "one figure as a picture, or several with commas between: loss, loss-time, gap, pareto, pareto-all, loss-slow, loss-fast, time, bits, timeline, window, memory, codec, link, plan, plan-world"},
    {NULL, "svg-dir", TAGC_OPTION_TEXT, 0, AT(svg_dir), 0, 0, NULL, NULL, "DIR", "every figure that there is data for as DIR/FIGURE.svg; made when missing"},
    {NULL, "title", TAGC_OPTION_TEXT, 0, AT(title), 0, 0, NULL, NULL, "TEXT", "heading of the page"},
    {NULL, "units", TAGC_OPTION_TEXT, 0, AT(units), 0, 0, NULL, NULL, "NAMES",
     "neighbouring units whose backward pass the timeline shows larger, as in h.5,h.6; without it two in the middle"},
    {NULL, "quiet", TAGC_OPTION_FLAG, TAGC_ROLE_LOCAL, AT(quiet), 0, 0, NULL, "no", NULL, "no summary on the terminal"},
};
/* clang-format on */

static const tagc_command command = {
    .name = "report",
    .summary = "a page and pictures of what was measured; the first arm is what the others are held against",
    .usage = "[--out page.html] PATH...",
    .examples = "  # Runs' folders, timelines, results of tagc bench and tagc plan and of the lab: told "
                "apart by what they hold.\n"
                "  tagc report --out page.html runs/fsdp runs/packed runs/*.trace.json bench.json\n"
                "  tagc report --svg loss=loss.svg,time=time.svg runs/fsdp runs/packed\n",
    .options = rows,
    .n_options = sizeof rows / sizeof rows[0],
    .positionals = 1,
};

static tagc_status write_figure(const tagc_report *report, const tagc_view *view, const char *name,
                                size_t n_name, const char *path) {
    char word[64], known[512] = "";
    snprintf(word, sizeof word, "%.*s", (int)(n_name < 60 ? n_name : 60), name);
    const tagc_figure *figure = tagc_figure_find(word);
    if (figure) return tagc_figure_write(report, view, figure, path);
    for (int i = 0; i < tagc_n_figures; i++) {
        strcat(known, i > 0 ? ", " : "");
        strcat(known, tagc_figures[i].name);
    }
    return tagc_fail(TAGC_ERR_ARGUMENT, "--svg: \"%s\" is no figure, allowed: %s", word, known);
}

static tagc_status write_figures(const tagc_report *report, const tagc_view *view, const char *list) {
    while (*list) {
        char path[TAGC_PATH_BYTES];
        size_t n = strcspn(list, ","), n_name = strcspn(list, "=,");
        if (n_name == n || n_name + 1 == n)
            return tagc_fail(TAGC_ERR_ARGUMENT, "--svg: \"%.*s\" is not of the form FIGURE=FILE",
                             (int)(n < 200 ? n : 200), list);
        if (n - n_name > sizeof path) return tagc_fail(TAGC_ERR_ARGUMENT, "--svg: a path is too long");
        snprintf(path, sizeof path, "%.*s", (int)(n - n_name - 1), list + n_name + 1);
        TAGC_TRY(write_figure(report, view, list, n_name, path));
        list += n + (list[n] == ',');
    }
    return TAGC_OK;
}

static tagc_status write_all(const tagc_report *report, const tagc_view *view, const char *dir) {
    TAGC_TRY(tagc_path_make_dirs(dir));
    for (int i = 0; i < tagc_n_figures; i++) {
        char path[TAGC_PATH_BYTES], name[64];
        tagc_canvas canvas = {.width = TAGC_WIDE};
        int has_any = tagc_figures[i].draw(report, view, &canvas);
        tagc_text_destroy(&canvas.body);
        if (!has_any) continue;
        snprintf(name, sizeof name, "%s.svg", tagc_figures[i].name);
        TAGC_TRY(tagc_path_join(dir, name, path));
        TAGC_TRY(tagc_figure_write(report, view, &tagc_figures[i], path));
    }
    return TAGC_OK;
}

static tagc_status write_page(const tagc_report *report, const tagc_view *view,
                              const report_options *options) {
    tagc_text page = {0};
    tagc_page_print(report, view, options->title, &page);
    tagc_status status = tagc_text_write(&page, options->out);
    tagc_text_destroy(&page);
    return status;
}

static tagc_status print_summary(const tagc_report *report, const tagc_view *view) {
    tagc_text text = {0};
    tagc_summary_print(report, view, &text);
    tagc_status status = text.failed ? tagc_fail(TAGC_ERR_MEMORY, "out of memory for the summary") : TAGC_OK;
    if (status == TAGC_OK && (fputs(text.data ? text.data : "", stdout) == EOF || fflush(stdout) != 0))
        status = tagc_fail(TAGC_ERR_IO, "the summary cannot be printed");
    tagc_text_destroy(&text);
    return status;
}

/* A window that a user asked for and that is in no timeline is a mistake. */
static tagc_status check_units(const tagc_report *report, const char *units) {
    if (!units) return TAGC_OK;
    if (report->n_traces == 0)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "--units needs a timeline among the files: tagc train --trace makes one");
    for (int t = 0; t < report->n_traces; t++)
        if (tagc_trace_shares(&report->traces[t], units).n > 0) return TAGC_OK;
    char known[200] = "";
    const tagc_trace_file *trace = &report->traces[0];
    for (int u = 0; u < trace->n_units && strlen(known) + strlen(trace->units[u]) + 3 < sizeof known; u++) {
        strcat(known, *known ? ", " : "");
        strcat(known, trace->units[u]);
    }
    return tagc_fail(TAGC_ERR_ARGUMENT,
                     "--units: no backward pass of \"%.100s\" in a timeline, which hold %s", units, known);
}

static tagc_status make_report(const tagc_parsed *parsed, const report_options *options,
                               tagc_report *report) {
    tagc_view view = {.units = options->units};
    for (int i = 0; i < parsed->n_words; i++) TAGC_TRY(tagc_report_add(report, parsed->words[i]));
    TAGC_TRY(tagc_report_finish(report));
    if (report->n_sets == 0 && report->n_traces == 0)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "nothing to report: name folders of runs, timelines, or results of bench, plan or "
                         "the lab%s%.300s",
                         report->n_notes > 0 ? "; " : "", report->n_notes > 0 ? report->notes[0] : "");
    TAGC_TRY(check_units(report, options->units));
    if (!options->quiet) TAGC_TRY(print_summary(report, &view));
    if (options->out) TAGC_TRY(write_page(report, &view, options));
    if (options->svg) TAGC_TRY(write_figures(report, &view, options->svg));
    if (options->svg_dir) TAGC_TRY(write_all(report, &view, options->svg_dir));
    if (options->out && !options->quiet) printf("page: %s\n", options->out);
    return TAGC_OK;
}

int tagc_command_report(int argc, char **argv) {
    report_options options = {0};
    tagc_parsed parsed;
    int code = tagc_command_parse(&command, argc, argv, &options, &parsed);
    if (code == TAGC_GO_ON && parsed.n_words < 1) {
        tagc_fail(TAGC_ERR_ARGUMENT, "what is to be reported? Name runs, timelines or results");
        code = tagc_command_refuse(&command);
    }
    if (code == TAGC_GO_ON) {
        tagc_report report = {0};
        code = make_report(&parsed, &options, &report) == TAGC_OK ? TAGC_EXIT_OK : tagc_command_fail();
        tagc_report_destroy(&report);
    }
    tagc_options_destroy(&parsed);
    return code;
}
