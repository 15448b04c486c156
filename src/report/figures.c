/* The list of figures, and those that are bars. */
#include "report/figures.h"

#include "core/status.h"
#include "report/charts.h"
#include "report/json_read.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const part_names[] = {"compute", "exposed: parameters", "exposed: gradients", "optimizer",
                                         "other"};
static const char *const part_classes[] = {"c0", "c4", "c1", "c2", "c7"};
static const char *const leg_classes[] = {"c5", "c1", "c6", "c3", "c4", "c7"};
static const char *const memory_classes[] = {"c0", "c1", "c2", "c6", "c7"};

/* Bars under way: rows with memory of their own. */
typedef struct bar_list {
    tagc_bar *bars;
    double *parts; /* (n_most, n_parts) */
    char (*ends)[80], (*labels)[96];
    int n, n_most, n_parts;
} bar_list;

static int make_list(bar_list *list, int n_most, int n_parts) {
    size_t n = (size_t)n_most + 1;
    *list = (bar_list){calloc(n, sizeof *list->bars),
                       calloc(n * (size_t)n_parts, sizeof *list->parts),
                       calloc(n, sizeof *list->ends),
                       calloc(n, sizeof *list->labels),
                       0,
                       n_most,
                       n_parts};
    return list->bars && list->parts && list->ends && list->labels;
}

static void free_list(bar_list *list) {
    free(list->bars);
    free(list->parts);
    free(list->ends);
    free(list->labels);
}

static tagc_bar *add_bar(bar_list *list, const char *label, const double *parts) {
    tagc_bar *bar = &list->bars[list->n];
    snprintf(list->labels[list->n], sizeof list->labels[0], "%.90s", label);
    *bar = (tagc_bar){.label = list->labels[list->n],
                      .low = (double)NAN,
                      .high = (double)NAN,
                      .end = list->ends[list->n],
                      .color = -1,
                      .is_heading = !parts};
    if (parts)
        bar->parts = memcpy(list->parts + (size_t)list->n * (size_t)list->n_parts, parts,
                            (size_t)list->n_parts * sizeof *parts);
    list->n++;
    return bar;
}

static double sum_of(const double *parts, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++)
        if (isfinite(parts[i])) sum += fmax(parts[i], 0);
    return sum;
}

static int count_rows(const tagc_report *report) {
    int n = 0;
    for (int s = 0; s < report->n_sets; s++) n += 1 + report->sets[s].n_results;
    return n;
}

/* ---- sets of arms as bars ---- */

typedef const double *(*parts_of)(const tagc_result *result);
static const double *times(const tagc_result *result) {
    return result->part_s;
}
static const double *bits(const tagc_result *result) {
    return result->bits;
}
static const double *memories(const tagc_result *result) {
    return result->memory;
}

static int has_any(const tagc_set *set, parts_of parts, int n_parts) {
    for (int i = 0; i < set->n_results; i++)
        if (sum_of(parts(&set->results[i]), n_parts) > 0) return 1;
    return 0;
}

/* A sweep of the link repeats the same bytes and memory: once is enough. */
static int is_repeated(const tagc_report *report, int s, parts_of parts, int n_parts) {
    const tagc_set *set = &report->sets[s];
    for (int before = 0; before < s; before++) {
        const tagc_set *other = &report->sets[before];
        int is_same = other->n_results == set->n_results &&
                      (other->kind == TAGC_SET_PLAN) == (set->kind == TAGC_SET_PLAN);
        for (int i = 0; is_same && i < set->n_results; i++) {
            is_same = set->results[i].color == other->results[i].color;
            for (int part = 0; is_same && part < n_parts; part++) {
                double a = parts(&set->results[i])[part], b = parts(&other->results[i])[part];
                is_same =
                    (!isfinite(a) && !isfinite(b)) || fabs(a - b) <= 1e-3 * fmax(fabs(a), fabs(b)) + 1e-3;
            }
        }
        if (is_same) return 1;
    }
    return 0;
}

typedef struct set_chart {
    parts_of parts;
    int n_parts;
    int has_plans, leaves_out_repeats;
    void (*set_unit)(double most, tagc_bar_chart *chart);
    void (*finish)(const tagc_result *result, tagc_bar *bar, char *end, size_t n_bytes);
} set_chart;

static double most_of(const tagc_set *set, const set_chart *what) {
    double most = 0;
    for (int i = 0; i < set->n_results; i++)
        most = fmax(most, sum_of(what->parts(&set->results[i]), what->n_parts));
    return most;
}

/* Sets of one size share an axis; a model of megabytes beside one of gigabytes would be a row of dots. */
static int have_one_scale(const tagc_report *report, const set_chart *what, const int *drawn, int n_sets) {
    double least = (double)INFINITY, most = 0;
    for (int k = 0; k < n_sets; k++) {
        double own = most_of(&report->sets[drawn[k]], what);
        least = fmin(least, own);
        most = fmax(most, own);
    }
    return most <= 6 * least;
}

static void draw_list(bar_list *list, const set_chart *what, double most, tagc_bar_chart *chart,
                      tagc_canvas *canvas) {
    what->set_unit(most, chart);
    chart->bars = list->bars;
    chart->n_bars = list->n;
    tagc_bars_draw(chart, canvas);
    chart->has_no_legend = 1;
    list->n = 0;
}

static int draw_sets(const tagc_report *report, const set_chart *what, tagc_bar_chart *chart,
                     tagc_canvas *canvas) {
    enum { MOST_SETS = 512 };
    bar_list list;
    int n_sets = 0, drawn[MOST_SETS];
    double most = 0;
    for (int s = 0; s < report->n_sets && n_sets < MOST_SETS; s++) {
        const tagc_set *set = &report->sets[s];
        if ((set->kind == TAGC_SET_PLAN && !what->has_plans) || !has_any(set, what->parts, what->n_parts))
            continue;
        if (what->leaves_out_repeats && is_repeated(report, s, what->parts, what->n_parts)) continue;
        drawn[n_sets++] = s;
    }
    if (!make_list(&list, count_rows(report), what->n_parts)) n_sets = 0;
    int is_one_scale = have_one_scale(report, what, drawn, n_sets);
    chart->n_parts = what->n_parts;
    for (int k = 0; k < n_sets; k++)
        for (int i = 0; i < report->sets[drawn[k]].n_results; i++)
            for (int part = 0; part < what->n_parts; part++)
                if (what->parts(&report->sets[drawn[k]].results[i])[part] > 0)
                    chart->legend_parts |= 1u << part;
    for (int k = 0; k < n_sets; k++) {
        const tagc_set *set = &report->sets[drawn[k]];
        if (n_sets > 1 || set->kind == TAGC_SET_PLAN) add_bar(&list, set->title, NULL);
        for (int i = 0; i < set->n_results; i++) {
            const tagc_result *result = &set->results[i];
            tagc_bar *bar = add_bar(&list, result->name, what->parts(result));
            what->finish(result, bar, list.ends[list.n - 1], sizeof list.ends[0]);
        }
        most = is_one_scale ? fmax(most, most_of(set, what)) : most_of(set, what);
        if (!is_one_scale || k == n_sets - 1) draw_list(&list, what, most, chart, canvas);
    }
    free_list(&list);
    return n_sets > 0;
}

static void finish_time(const tagc_result *result, tagc_bar *bar, char *end, size_t n_bytes) {
    char total[TAGC_NUMBER_BYTES];
    bar->low = result->total_s.n > 1 ? result->total_s.min : (double)NAN;
    bar->high = result->total_s.max;
    tagc_number_time(result->total_s.middle, total);
    if (result->speedup.n > 0)
        snprintf(end, n_bytes, "%s, %.2fx", total, fmin(result->speedup.middle, 9999));
    else
        snprintf(end, n_bytes, "%s", total);
}

static void set_time_unit(double most, tagc_bar_chart *chart) {
    chart->x_label =
        most < 1 ? "time of an optimizer step, median (ms)" : "time of an optimizer step, median (s)";
    chart->scale = most < 1 ? 1e-3 : 1;
}

static int draw_time(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas) {
    (void)view;
    tagc_bar_chart chart = {
        .part_names = part_names, .part_classes = part_classes, .format = tagc_number_time};
    set_chart what = {times, TAGC_N_PARTS, 0, 0, set_time_unit, finish_time};
    return draw_sets(report, &what, &chart, canvas);
}

static char *format_bits(double value, char *out) {
    return tagc_number_fixed(value, value < 10 ? 2 : 1, out);
}

static void finish_bits(const tagc_result *result, tagc_bar *bar, char *end, size_t n_bytes) {
    char total[TAGC_NUMBER_BYTES];
    (void)bar;
    snprintf(end, n_bytes, "%s", tagc_number_fixed(sum_of(result->bits, TAGC_N_LEGS), 2, total));
}

static void set_bits_unit(double most, tagc_bar_chart *chart) {
    (void)most;
    chart->x_label = "bits per parameter, rank and step, before (W-1)/W";
    chart->scale = 1;
}

static int draw_bits(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas) {
    (void)view;
    tagc_bar_chart chart = {.part_names = tagc_leg_names, .part_classes = leg_classes, .format = format_bits};
    set_chart what = {bits, TAGC_N_LEGS, 1, 1, set_bits_unit, finish_bits};
    return draw_sets(report, &what, &chart, canvas);
}

static void finish_memory(const tagc_result *result, tagc_bar *bar, char *end, size_t n_bytes) {
    char total[TAGC_NUMBER_BYTES];
    (void)bar;
    snprintf(end, n_bytes, "%s", tagc_number_bytes(sum_of(result->memory, TAGC_N_MEMORIES), total));
}

static void set_memory_unit(double most, tagc_bar_chart *chart) {
    chart->x_label = most < 1e9 ? "memory of a rank (MB)" : "memory of a rank (GB)";
    chart->scale = most < 1e9 ? 1e6 : 1e9;
}

static int draw_memory(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas) {
    (void)view;
    tagc_bar_chart chart = {
        .part_names = tagc_memory_names, .part_classes = memory_classes, .format = tagc_number_bytes};
    set_chart what = {memories, TAGC_N_MEMORIES, 1, 1, set_memory_unit, finish_memory};
    return draw_sets(report, &what, &chart, canvas);
}

/* ---- what a bench says of codec and link ---- */

static int has_several_benches(const tagc_report *report, const char *name) {
    int n = 0;
    for (int s = 0; s < report->n_sets; s++)
        n += json_array_size(json_object_get(report->sets[s].bench, name)) > 0;
    return n > 1;
}

static size_t count_entries(const tagc_report *report, const char *name) {
    size_t n = 1;
    for (int s = 0; s < report->n_sets; s++)
        n += 1 + json_array_size(json_object_get(report->sets[s].bench, name));
    return n < 4096 ? n : 4096;
}

static const char *text_of(const json_t *object, const char *name) {
    const char *text = json_string_value(json_object_get(object, name));
    return text ? text : "?";
}

enum { N_PHASES = 4 };
static const char *const phase_names[N_PHASES] = {"select", "index", "encode", "decode"};
static const char *const phase_classes[N_PHASES] = {"c3", "c5", "c6", "c2"};

static char *format_floor(double value, char *out) {
    return tagc_number_fixed(value, 2, out);
}

static void add_codec(const json_t *entry, bar_list *list) {
    double parts[N_PHASES], sparsity = tagc_json_number_or_nan(entry, "sparsity");
    double ratio = tagc_json_number_or_nan(entry, "ratio");
    char label[96], count[TAGC_NUMBER_BYTES], sketch[24] = "", at[24] = "";
    const json_t *to_floor = json_object_get(entry, "to_floor");
    for (int i = 0; i < N_PHASES; i++) parts[i] = tagc_json_number_or_nan(to_floor, phase_names[i]);
    if (ratio > 0) snprintf(sketch, sizeof sketch, " %.3gx", ratio);
    if (sparsity > 0) snprintf(at, sizeof at, ", %.4g %%", 100 * sparsity);
    const char *wire = json_string_value(json_object_get(entry, "wire"));
    const char *index = json_string_value(json_object_get(entry, "index"));
    int is_odd_index = index && strcmp(index, "or") != 0 && strcmp(index, "none") != 0;
    snprintf(label, sizeof label, "%.20s%s%s%.8s%s%.8s%s, %s", text_of(entry, "exchange"), sketch,
             is_odd_index ? " " : "", is_odd_index ? index : "", wire && strcmp(wire, "fp32") != 0 ? " " : "",
             wire && strcmp(wire, "fp32") != 0 ? wire : "", at,
             tagc_number_count(tagc_json_number_or_nan(entry, "n_elems"), count));
    if (json_is_true(json_object_get(entry, "all_reduce"))) strcat(label, ", all-reduce");
    add_bar(list, label, parts);
    double total = tagc_json_number_or_nan(entry, "total_to_floor");
    snprintf(list->ends[list->n - 1], sizeof list->ends[0], "%.3g",
             isfinite(total) ? total : sum_of(parts, N_PHASES));
}

static void add_exchange(const json_t *entry, bar_list *list) {
    double share = tagc_json_number_or_nan(entry, "share"),
           rate = 8 * tagc_json_number_or_nan(entry, "bytes_per_s");
    char text[TAGC_NUMBER_BYTES], percent[TAGC_NUMBER_BYTES];
    add_bar(list, text_of(entry, "name"), &share)->color = 0;
    snprintf(list->ends[list->n - 1], sizeof list->ends[0], "%s, %s", tagc_number_percent(share, percent),
             tagc_number_rate(rate, text));
}

static int draw_entries(const tagc_report *report, const char *name, int n_parts,
                        void (*add)(const json_t *, bar_list *), tagc_bar_chart *chart, tagc_canvas *canvas) {
    bar_list list;
    int is_several = has_several_benches(report, name), n_drawn = 0;
    int has_memory = make_list(&list, (int)count_entries(report, name), n_parts);
    for (int s = 0; has_memory && s < report->n_sets; s++) {
        const json_t *entries = json_object_get(report->sets[s].bench, name);
        if (is_several && json_array_size(entries) > 0 && list.n < list.n_most)
            add_bar(&list, report->sets[s].title, NULL);
        for (size_t i = 0; i < json_array_size(entries) && list.n < list.n_most; i++, n_drawn++)
            add(json_array_get(entries, i), &list);
    }
    chart->bars = list.bars;
    chart->n_bars = list.n;
    chart->n_parts = n_parts;
    if (n_drawn > 0) tagc_bars_draw(chart, canvas);
    free_list(&list);
    return n_drawn > 0;
}

static int draw_codec(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas) {
    (void)view;
    tagc_bar_chart chart = {.x_label = "time as a multiple of the memory floor (dashed: 1)",
                            .part_names = phase_names,
                            .part_classes = phase_classes,
                            .mark = 1,
                            .format = format_floor,
                            .scale = 1};
    return draw_entries(report, "codec", N_PHASES, add_codec, &chart, canvas);
}

static int draw_link(const tagc_report *report, const tagc_view *view, tagc_canvas *canvas) {
    static const char *const names[] = {"share of the link"}, *const classes[] = {"c0"};
    (void)view;
    tagc_bar_chart chart = {.x_label = "share of what all ranks exchanging with all reach (%)",
                            .part_names = names,
                            .part_classes = classes,
                            .mark = 1,
                            .format = tagc_number_percent,
                            .scale = 0.01};
    return draw_entries(report, "exchanges", 1, add_exchange, &chart, canvas);
}

/* ---- the list ---- */

#define RUNS "runs that tagc train wrote"
const tagc_figure tagc_figures[] = {
    {"loss", "Loss against step",
     "Points: validation. Thin lines: training, smoothed over a fortieth of the run. Several seeds of one "
     "arm are their "
     "mean, in a band from least to most.",
     RUNS, tagc_draw_loss},
    {"loss-time", "Loss against time",
     "The same over the time that the steps took, validation and saving not counted. This is what a user "
     "waits for.",
     "runs with steps that tagc train wrote", tagc_draw_loss_time},
    {"gap", "Validation loss against the first arm",
     "Runs of the same seed are held against each other where there are such; the band is the spread over "
     "seeds. That "
     "of the first arm is how far its seeds are from their mean: a gap inside it says nothing.",
     "two or more runs with validation losses", tagc_draw_gap},
    {"pareto", "Loss against bits of gradients",
     "Logarithmic. Each mark is an arm, mean over seeds; whiskers from least to most, paired with the first "
     "arm's run of the same seed. Line: what nothing else beats in both. Named in bold: the paper's sketch. "
     "Bits are counted over the whole model, before the factor (W-1)/W.",
     "runs of two or more ranks with validation losses, of two or more arms", tagc_draw_pareto},
    {"pareto-all", "Loss against bits of all legs", "The same with the bits of the parameters.",
     "runs of two or more ranks with validation losses, of two or more arms", tagc_draw_pareto_all},
    {"loss-slow", "Loss over simulated time, slowest link",
     "Losses are measured; the time of a step is simulated by tagc plan for a larger model, under the costs "
     "that the result holds under \"assumed\". Shown: the first arm, the paper's, and those that nothing "
     "beats in bits of all legs and loss.",
     "a lab result with simulated steps", tagc_draw_loss_slow},
    {"loss-fast", "Loss over simulated time, fastest link", "The same over the fastest link.",
     "a lab result with steps simulated over two links", tagc_draw_loss_fast},
    {"time", "Where the time of a step goes",
     "Exposed: compute stands still and waits for the network. At the end of a bar: median, and how many "
     "times as fast "
     "as the first arm. Whisker: least to most of the iterations of a bench or of a run of the lab, middle "
     "80 % "
     "of the steps of other training runs.",
     "runs, a bench result or a lab result", draw_time},
    {"bits", "Bits per parameter on the wire",
     "Counted from the bytes sent (what is simulated: computed), over the whole model, what travels dense "
     "included. gather is the "
     "parameters; the "
     "other legs are the gradients and what it takes to agree on them.",
     "runs of two or more ranks, a bench, lab or plan result", draw_bits},
    {"timeline", "Timeline of a step",
     "The step of middle length. All timelines have one scale. comm: transfers under way, coloured by leg; "
     "those that "
     "run together lie in lanes. Outlined: the window that is shown larger below.",
     "a trace (tagc train --trace FILE)", tagc_draw_step_line},
    {"window", "Backward pass of neighbouring units",
     "From where the first unit's backward pass begins to where that of the next unit begins. All timelines "
     "have one "
     "scale.",
     "a trace (tagc train --trace FILE) that holds backward passes of the units", tagc_draw_window_line},
    {"memory", "Memory of a rank",
     "Parameters, gradients, optimizer state and residuals that stay from step to step; where simulated, "
     "the buffers of exchanges, too, which measured rows do not count.",
     "a bench, lab or plan result", draw_memory},
    {"codec", "Codec against the memory floor",
     "Floor: reading two arrays and writing one, 12 bytes per element, on the same threads. Decoding is on "
     "the owner.",
     "a bench or lab result", draw_codec},
    {"link", "What each exchange reaches of the link",
     "100 % is a plain exchange of all ranks with all, in the same run.", "a bench or lab result", draw_link},
    {"plan", "Iteration time against link rate, simulated",
     "Lines: simulated. Points: measured, where a bench of as many ranks was given.",
     "plan results (tagc plan --json)", tagc_draw_plan},
    {"plan-world", "Iteration time against number of ranks, simulated", "Lines: simulated. Points: measured.",
     "plan results of two or more numbers of ranks", tagc_draw_plan_world},
};
const int tagc_n_figures = sizeof tagc_figures / sizeof tagc_figures[0];

const tagc_figure *tagc_figure_find(const char *name) {
    for (int i = 0; i < tagc_n_figures; i++)
        if (strcmp(tagc_figures[i].name, name) == 0) return &tagc_figures[i];
    return NULL;
}

tagc_status tagc_figure_write(const tagc_report *report, const tagc_view *view, const tagc_figure *figure,
                              const char *path) {
    tagc_canvas canvas = {.width = TAGC_WIDE};
    tagc_text file = {0};
    tagc_status status;
    if (figure->draw(report, view, &canvas)) {
        tagc_svg_print(&canvas, figure->title, figure->caption, 1, &file);
        status = tagc_text_write(&file, path);
    } else {
        status =
            tagc_fail(TAGC_ERR_ARGUMENT, "nothing to draw as %s: it needs %s", figure->name, figure->needs);
    }
    tagc_text_destroy(&canvas.body);
    tagc_text_destroy(&file);
    return status;
}
