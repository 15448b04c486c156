/* The inputs of a report: told apart by what they hold, kept together, put side by side. */
#include "core/status.h"
#include "report/json_read.h"
#include "report/results.h"
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { PATH_BYTES = 4096, NOTE_BYTES = 1024, MAX_SETS = 256 };
#define MOST_BYTES ((off_t)1 << 30)

void *tagc_report_grow(void *array, int *n, size_t item_bytes) {
    if (!(*n & (*n - 1))) { /* full only at powers of two */
        void *grown = realloc(array, (*n ? 2 * (size_t)*n : 1) * item_bytes);
        if (!grown) {
            tagc_fail(TAGC_ERR_MEMORY, "out of memory for a report");
            return NULL;
        }
        array = grown;
    }
    memset((char *)array + (size_t)*n * item_bytes, 0, item_bytes);
    ++*n;
    return array;
}

char *tagc_report_text(tagc_report *report, const char *format, ...) {
    char *text = NULL;
    va_list arguments;
    va_start(arguments, format);
    int n = vasprintf(&text, format, arguments);
    va_end(arguments);
    void **texts = n >= 0 ? tagc_report_grow(report->texts, &report->n_texts, sizeof *texts) : NULL;
    if (!texts) {
        if (n >= 0) free(text);
        tagc_fail(TAGC_ERR_MEMORY, "out of memory for a report");
        return NULL;
    }
    report->texts = texts;
    return texts[report->n_texts - 1] = text;
}

tagc_status tagc_report_note(tagc_report *report, const char *format, ...) {
    char words[NOTE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(words, sizeof words, format, arguments);
    va_end(arguments);
    char *text = tagc_report_text(report, "%s", words);
    char **notes = text ? tagc_report_grow(report->notes, &report->n_notes, sizeof *notes) : NULL;
    if (!notes) return TAGC_ERR_MEMORY;
    report->notes = notes;
    notes[report->n_notes - 1] = text;
    return TAGC_OK;
}

int tagc_report_color(tagc_report *report, const char *name) {
    for (int i = 0; i < report->n_names; i++)
        if (strcmp(report->names[i], name) == 0) return i;
    char *text = tagc_report_text(report, "%s", name);
    char **names = text ? tagc_report_grow(report->names, &report->n_names, sizeof *names) : NULL;
    if (!names) return 0;
    report->names = names;
    names[report->n_names - 1] = text;
    return report->n_names - 1;
}

tagc_result *tagc_set_add(tagc_report *report, tagc_set *set, const char *name) {
    tagc_result *results = tagc_report_grow(set->results, &set->n_results, sizeof *results);
    if (!results) return NULL;
    set->results = results;
    tagc_result *result = &results[set->n_results - 1];
    const double unknown = (double)NAN;
    for (int i = 0; i < TAGC_N_PARTS; i++) result->part_s[i] = unknown;
    for (int i = 0; i < TAGC_N_LEGS; i++) result->bits[i] = unknown;
    for (int i = 0; i < TAGC_N_MEMORIES; i++) result->memory[i] = unknown;
    result->n_params = result->n_compressed = unknown;
    result->name = tagc_report_text(report, "%s", name);
    result->color = tagc_report_color(report, name);
    return result->name ? result : NULL;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

tagc_spread tagc_spread_of(double *values, int n, int is_mean) {
    int n_finite = 0;
    double sum = 0;
    for (int i = 0; i < n; i++)
        if (isfinite(values[i])) sum += values[n_finite++] = values[i];
    if (n_finite == 0) return (tagc_spread){(double)NAN, (double)NAN, (double)NAN, 0};
    qsort(values, (size_t)n_finite, sizeof *values, ascending);
    double median = values[(n_finite - 1) / 2] / 2 + values[n_finite / 2] / 2;
    return (tagc_spread){is_mean ? sum / n_finite : median, values[0], values[n_finite - 1], n_finite};
}

/* ---- recognition ---- */

static tagc_source *new_source(tagc_report *report, const char *path, const char *what) {
    char *copy = tagc_report_text(report, "%s", path);
    tagc_source *sources =
        copy ? tagc_report_grow(report->sources, &report->n_sources, sizeof *sources) : NULL;
    if (!sources) return NULL;
    report->sources = sources;
    tagc_source *source = &sources[report->n_sources - 1];
    source->path = copy;
    source->what = what;
    return source;
}

static tagc_status add_run(tagc_report *report, const char *path) {
    tagc_runlog log;
    TAGC_TRY(tagc_runlog_read(path, &log));
    tagc_runlog *runs = tagc_report_grow(report->runs, &report->n_runs, sizeof *runs);
    if (!runs) {
        tagc_runlog_destroy(&log);
        return TAGC_ERR_MEMORY;
    }
    report->runs = runs;
    runs[report->n_runs - 1] = log;
    if (!new_source(report, path, "run")) return TAGC_ERR_MEMORY;
    return log.is_torn
               ? tagc_report_note(report, "the last line of the run %s is not whole and was passed over",
                                  log.label)
               : TAGC_OK;
}

/* "runs/fsdp.trace.json" is about fsdp. */
static void make_label(const char *path, char *label, size_t n_bytes) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    size_t n = strlen(name);
    static const char *const endings[] = {".json", ".trace", "-trace"};
    for (size_t i = 0; i < sizeof endings / sizeof endings[0]; i++) {
        size_t n_ending = strlen(endings[i]);
        if (n > n_ending && strncmp(name + n - n_ending, endings[i], n_ending) == 0) n -= n_ending;
    }
    snprintf(label, n_bytes, "%.*s", (int)n, name);
}

static tagc_status add_trace(tagc_report *report, const json_t *root, const char *path, const char *label) {
    tagc_trace_file trace;
    TAGC_TRY(tagc_trace_file_read(root, path, label, &trace));
    tagc_trace_file *traces = tagc_report_grow(report->traces, &report->n_traces, sizeof *traces);
    if (!traces) {
        tagc_trace_file_destroy(&trace);
        return TAGC_ERR_MEMORY;
    }
    report->traces = traces;
    traces[report->n_traces - 1] = trace;
    if (trace.n_dropped > 0)
        return tagc_report_note(report, "the timeline of %s lacks %.0f events that there was no room for",
                                label, trace.n_dropped);
    return TAGC_OK;
}

static tagc_status load(const char *path, json_t **out) {
    json_error_t error;
    *out = NULL;
    FILE *file = fopen(path, "r");
    if (!file) return tagc_fail(TAGC_ERR_IO, "%s: %s", path, strerror(errno));
    struct stat about;
    if (fstat(fileno(file), &about) == 0 && about.st_size > MOST_BYTES) {
        fclose(file);
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "%s is larger than 1 GiB; a trace of fewer steps will do (--trace-steps)", path);
    }
    *out = json_loadf(file, 0, &error);
    fclose(file);
    if (!*out) return tagc_fail(TAGC_ERR_CORRUPT, "%s line %d is no JSON: %s", path, error.line, error.text);
    return TAGC_OK;
}

tagc_status tagc_report_add_trace(tagc_report *report, const char *path, const char *label) {
    json_t *root;
    TAGC_TRY(load(path, &root));
    tagc_status status = add_trace(report, root, path, label);
    json_decref(root);
    return status;
}

/* A result, or one of a list of plans. */
static tagc_status add_typed(tagc_report *report, const json_t *root, const char *path, tagc_source *source) {
    const char *type = json_string_value(json_object_get(root, "type"));
    double format = tagc_json_number_or_nan(root, "format");
    int is_bench = type && strcmp(type, "bench") == 0, is_plan = type && strcmp(type, "plan") == 0;
    int is_lab = type && strcmp(type, "lab") == 0;
    if (!type)
        return tagc_fail(TAGC_ERR_CORRUPT,
                         "%s has neither traceEvents nor a \"type\": it is no result, trace or run of tagc",
                         path);
    if (!is_bench && !is_plan && !is_lab)
        return tagc_fail(TAGC_ERR_CORRUPT,
                         "%s is of type \"%.40s\", allowed: bench, plan, lab, a trace, a run", path, type);
    if (format != 1) return tagc_fail(TAGC_ERR_CORRUPT, "%s: \"format\" is %g, allowed: 1", path, format);
    source->what = is_bench ? "bench" : is_plan ? "plan" : "lab";
    if (!source->origin) source->origin = json_object_get(root, "origin");
    if (is_bench) return tagc_report_add_bench(report, root, path, "");
    return is_plan ? tagc_report_add_plan(report, root, path) : tagc_report_add_lab(report, root, path);
}

static tagc_status add_result(tagc_report *report, json_t *root, const char *path) {
    tagc_source *source = new_source(report, path, "?");
    if (!source) return TAGC_ERR_MEMORY;
    source->root = json_incref(root);
    if (!json_is_array(root)) return add_typed(report, root, path, source);
    if (json_array_size(root) == 0) return tagc_fail(TAGC_ERR_CORRUPT, "%s is an empty list", path);
    for (size_t i = 0; i < json_array_size(root); i++)
        TAGC_TRY(add_typed(report, json_array_get(root, i), path, source));
    return TAGC_OK;
}

/* Metrics are an object per line. What their first line holds tells them from a result on one line. */
static int is_metrics(const char *path) {
    FILE *file = fopen(path, "r");
    char *line = NULL;
    size_t capacity = 0;
    json_t *object = file && getline(&line, &capacity, file) > 0 ? json_loads(line, 0, NULL) : NULL;
    const char *type = json_string_value(json_object_get(object, "type"));
    int is_it = type && (strcmp(type, "run") == 0 || strcmp(type, "step") == 0 || strcmp(type, "eval") == 0);
    json_decref(object);
    free(line);
    if (file) fclose(file);
    return is_it;
}

/* Twice the same run would look like two that do not differ. */
static int was_seen(const tagc_report *report, const struct stat *about) {
    for (int i = 0; i < report->n_seen; i++)
        if (report->seen[i].device == (uint64_t)about->st_dev &&
            report->seen[i].number == (uint64_t)about->st_ino)
            return 1;
    return 0;
}

static tagc_status see(tagc_report *report, const struct stat *about) {
    tagc_seen_file *seen = tagc_report_grow(report->seen, &report->n_seen, sizeof *seen);
    if (!seen) return TAGC_ERR_MEMORY;
    report->seen = seen;
    seen[report->n_seen - 1] = (tagc_seen_file){(uint64_t)about->st_dev, (uint64_t)about->st_ino};
    return TAGC_OK;
}

tagc_status tagc_report_add(tagc_report *report, const char *path) {
    char metrics[PATH_BYTES];
    struct stat about;
    if (stat(path, &about) != 0) return tagc_fail(TAGC_ERR_IO, "%s: %s", path, strerror(errno));
    if (report->n_sets > MAX_SETS || report->n_runs > MAX_SETS)
        return tagc_fail(TAGC_ERR_ARGUMENT, "more than %d runs or results", MAX_SETS);
    int is_folder = S_ISDIR(about.st_mode);
    if (is_folder && (size_t)snprintf(metrics, sizeof metrics, "%s/metrics.jsonl", path) < sizeof metrics &&
        stat(metrics, &about) != 0 && errno == ENOENT)
        return tagc_report_note(report, "%s holds no metrics.jsonl and is left out", path);
    if (was_seen(report, &about)) return TAGC_OK;
    TAGC_TRY(see(report, &about));
    if (is_folder || is_metrics(path)) return add_run(report, path);
    json_t *root;
    TAGC_TRY(load(path, &root));
    tagc_status status;
    if (json_object_get(root, "traceEvents")) {
        char label[64];
        make_label(path, label, sizeof label);
        status = add_trace(report, root, path, label);
        if (status == TAGC_OK && !new_source(report, path, "trace")) status = TAGC_ERR_MEMORY;
    } else {
        status = add_result(report, root, path);
    }
    json_decref(root);
    return status;
}

/* ---- putting side by side ---- */

/* Medians of parts do not add up to the median of their sum: what is left is the rest. */
static void fill_rest(tagc_result *result) {
    double sum = 0;
    for (int part = 0; part < TAGC_PART_OTHER; part++)
        if (isfinite(result->part_s[part])) sum += result->part_s[part] = fmax(result->part_s[part], 0);
    if (result->total_s.n > 0) result->part_s[TAGC_PART_OTHER] = fmax(result->total_s.middle - sum, 0);
}

tagc_status tagc_report_finish(tagc_report *report) {
    TAGC_TRY(tagc_report_make_runs(report));
    for (int s = 0; s < report->n_sets; s++)
        for (int i = 0; i < report->sets[s].n_results && report->sets[s].kind != TAGC_SET_PLAN; i++)
            fill_rest(&report->sets[s].results[i]);
    return TAGC_OK;
}

void tagc_report_destroy(tagc_report *report) {
    for (int i = 0; i < report->n_sources; i++) json_decref(report->sources[i].root);
    for (int i = 0; i < report->n_runs; i++) tagc_runlog_destroy(&report->runs[i]);
    for (int i = 0; i < report->n_groups; i++) {
        free(report->groups[i].runs);
        free(report->groups[i].key);
    }
    for (int i = 0; i < report->n_sets; i++) free(report->sets[i].results);
    for (int i = 0; i < report->n_traces; i++) tagc_trace_file_destroy(&report->traces[i]);
    for (int i = 0; i < report->n_texts; i++) free(report->texts[i]);
    void *arrays[] = {report->sources, report->runs,  report->groups, report->sets,
                      report->traces,  report->plan,  report->checks, report->cases,
                      report->notes,   report->names, report->texts,  report->seen};
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) free(arrays[i]);
    *report = (tagc_report){0};
}
