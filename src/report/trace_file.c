/* Reading of Chrome trace events. Streams are known by the names of their threads, as src/fsdp/trace.c gives them. */
#include "report/trace_file.h"

#include "core/status.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_UNITS = 4096, MAX_RANKS = 4096, MAX_LANES = 64 };

typedef struct thread {
    json_int_t pid, tid;
    int track;
} thread;

typedef struct reader {
    const char *file;
    tagc_trace_file *out;
    thread *threads; /* (n_threads), sorted */
    int n_threads;
    const thread *last; /* most events follow one of the same thread */
} reader;

static const struct {
    const char *name;
    int track;
    tagc_span_kind kind;
} kinds[] = {
    {"forward", 0, TAGC_SPAN_FORWARD},
    {"backward", 0, TAGC_SPAN_BACKWARD},
    {"optimizer", 0, TAGC_SPAN_OPTIMIZER},
    {"wait", 0, TAGC_SPAN_STALL},
    {"select", 1, TAGC_SPAN_SELECT},
    {"index", 1, TAGC_SPAN_INDEX},
    {"encode", 1, TAGC_SPAN_ENCODE},
    {"decode", 1, TAGC_SPAN_DECODE},
    {"wait", 1, TAGC_SPAN_IDLE},
    {"index", 2, TAGC_SPAN_LEG + TAGC_LEG_INDEX},
    {"values", 2, TAGC_SPAN_LEG + TAGC_LEG_VALUES},
    {"leftover", 2, TAGC_SPAN_LEG + TAGC_LEG_LEFTOVER},
    {"result", 2, TAGC_SPAN_LEG + TAGC_LEG_RESULT},
    {"gather", 2, TAGC_SPAN_LEG + TAGC_LEG_GATHER},
    {"control", 2, TAGC_SPAN_LEG + TAGC_LEG_CONTROL},
};

static tagc_span_kind kind_of(const char *name, int track) {
    size_t n = strcspn(name, " ");
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (kinds[i].track == (track > 2 ? 2 : track) && strlen(kinds[i].name) == n &&
            strncmp(kinds[i].name, name, n) == 0)
            return kinds[i].kind;
    return TAGC_SPAN_OTHER;
}

static int track_of(const char *name) {
    if (strcmp(name, "compute") == 0) return 0;
    if (strcmp(name, "codec") == 0) return 1;
    if (strcmp(name, "comm") == 0) return 2;
    if (strncmp(name, "comm ", 5) != 0) return -1;
    long lane = strtol(name + 5, NULL, 10);
    return lane >= 1 && lane <= MAX_LANES ? (int)lane + 1 : -1;
}

static int by_thread(const void *a, const void *b) {
    const thread *x = a, *y = b;
    return x->pid != y->pid ? (x->pid > y->pid) - (x->pid < y->pid) : (x->tid > y->tid) - (x->tid < y->tid);
}

static const char *text_of(const json_t *object, const char *name) {
    const char *text = json_string_value(json_object_get(object, name));
    return text ? text : "";
}

static tagc_status read_threads(reader *r, const json_t *events) {
    r->threads = calloc(json_array_size(events) + 1, sizeof *r->threads);
    if (!r->threads) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for %s", r->file);
    for (size_t i = 0; i < json_array_size(events); i++) {
        const json_t *event = json_array_get(events, i), *about = json_object_get(event, "args");
        if (strcmp(text_of(event, "ph"), "M") != 0) continue;
        if (strcmp(text_of(event, "name"), "tagc") == 0)
            r->out->n_dropped = json_number_value(json_object_get(about, "n_dropped"));
        if (strcmp(text_of(event, "name"), "thread_name") != 0) continue;
        int track = track_of(text_of(about, "name"));
        if (track >= 0)
            r->threads[r->n_threads++] = (thread){json_integer_value(json_object_get(event, "pid")),
                                                  json_integer_value(json_object_get(event, "tid")), track};
    }
    qsort(r->threads, (size_t)r->n_threads, sizeof *r->threads, by_thread);
    return TAGC_OK;
}

static int find_rank(tagc_trace_file *trace, json_int_t pid) {
    if (pid < 0 || pid >= 1 << 20) return -1;
    if (trace->n_spans > 0) { /* most events follow one of the same rank */
        int last = trace->spans[trace->n_spans - 1].rank;
        if (trace->ranks[last] == (int)pid) return last;
    }
    for (int i = 0; i < trace->n_ranks; i++)
        if (trace->ranks[i] == (int)pid) return i;
    if (trace->n_ranks == MAX_RANKS) return -1;
    trace->ranks[trace->n_ranks] = (int)pid;
    return trace->n_ranks++;
}

static int find_unit(tagc_trace_file *trace, const char *name) {
    if (!*name) return -1;
    for (int i = 0; i < trace->n_units; i++)
        if (strcmp(trace->units[i], name) == 0) return i;
    if (trace->n_units == MAX_UNITS) return -1;
    char *copy = strdup(name);
    if (!copy) return -1;
    trace->units[trace->n_units] = copy;
    return trace->n_units++;
}

static tagc_status add_event(reader *r, const json_t *event, size_t at) {
    const json_t *ts = json_object_get(event, "ts"), *dur = json_object_get(event, "dur");
    if (!json_is_number(ts) || !json_is_number(dur) || !isfinite(json_number_value(ts)) ||
        !(json_number_value(dur) >= 0) || !isfinite(json_number_value(ts) + json_number_value(dur)))
        return tagc_fail(TAGC_ERR_CORRUPT, "%s: traceEvents[%zu] lacks a number as \"%s\"", r->file, at,
                         json_is_number(ts) ? "dur" : "ts");
    thread wanted = {json_integer_value(json_object_get(event, "pid")),
                     json_integer_value(json_object_get(event, "tid")), 0};
    if (!r->last || by_thread(r->last, &wanted) != 0)
        r->last = bsearch(&wanted, r->threads, (size_t)r->n_threads, sizeof *r->threads, by_thread);
    int rank = r->last ? find_rank(r->out, wanted.pid) : -1;
    if (rank < 0) return TAGC_OK; /* of another program, or beyond what is drawn */
    const json_t *about = json_object_get(event, "args");
    double start_s = 1e-6 * json_number_value(ts);
    r->out->spans[r->out->n_spans++] = (tagc_span){
        .start_s = start_s,
        .end_s = start_s + 1e-6 * json_number_value(dur),
        .rank = rank,
        .track = r->last->track,
        .kind = kind_of(text_of(event, "name"), r->last->track),
        .unit = find_unit(r->out, text_of(about, "unit")),
        .n_bytes = json_number_value(json_object_get(about, "n_bytes")),
    };
    return TAGC_OK;
}

static int by_start(const void *a, const void *b) {
    const tagc_span *x = a, *y = b;
    if (x->start_s != y->start_s) return x->start_s > y->start_s ? 1 : -1;
    return (x->end_s > y->end_s) - (x->end_s < y->end_s);
}

static int ascending(const void *a, const void *b) {
    return (*(const int *)a > *(const int *)b) - (*(const int *)a < *(const int *)b);
}

/* Ranks are numbered in the order in which they were met; their own order is wanted. */
static tagc_status sort_ranks(tagc_trace_file *trace) {
    size_t n = (size_t)trace->n_ranks;
    int *met = malloc((n + 1) * sizeof *met), *place = calloc(n + 1, sizeof *place);
    if (met && place) {
        memcpy(met, trace->ranks, n * sizeof *met);
        qsort(trace->ranks, n, sizeof *trace->ranks, ascending);
        for (size_t i = 0; i < n; i++)
            place[i] = (int)((int *)bsearch(&met[i], trace->ranks, n, sizeof *met, ascending) - trace->ranks);
        for (int s = 0; s < trace->n_spans; s++) trace->spans[s].rank = place[trace->spans[s].rank];
    }
    int failed = !met || !place;
    free(met);
    free(place);
    return failed ? tagc_fail(TAGC_ERR_MEMORY, "out of memory for a trace") : TAGC_OK;
}

static tagc_status read_events(reader *r, const json_t *events) {
    size_t n = json_array_size(events);
    tagc_trace_file *out = r->out;
    if (n > 1u << 26) return tagc_fail(TAGC_ERR_CORRUPT, "%s holds %zu events, allowed: 2^26", r->file, n);
    out->spans = calloc(n + 1, sizeof *out->spans);
    out->ranks = calloc(MAX_RANKS, sizeof *out->ranks);
    out->units = calloc(MAX_UNITS, sizeof *out->units);
    if (!out->spans || !out->ranks || !out->units)
        return tagc_fail(TAGC_ERR_MEMORY, "out of memory for %s", r->file);
    TAGC_TRY(read_threads(r, events));
    for (size_t i = 0; i < n; i++) {
        const json_t *event = json_array_get(events, i);
        if (strcmp(text_of(event, "ph"), "X") == 0) TAGC_TRY(add_event(r, event, i));
    }
    if (out->n_spans == 0)
        return tagc_fail(TAGC_ERR_CORRUPT,
                         "%s: no event of a stream compute, codec or comm; tagc train --trace writes such",
                         r->file);
    TAGC_TRY(sort_ranks(out));
    qsort(out->spans, (size_t)out->n_spans, sizeof *out->spans, by_start);
    return TAGC_OK;
}

tagc_status tagc_trace_file_read(const json_t *root, const char *file, const char *label,
                                 tagc_trace_file *out) {
    *out = (tagc_trace_file){0};
    snprintf(out->label, sizeof out->label, "%s", label);
    const json_t *events = json_object_get(root, "traceEvents");
    if (!json_is_array(events)) return tagc_fail(TAGC_ERR_CORRUPT, "%s: traceEvents is no list", file);
    reader r = {.file = file, .out = out};
    tagc_status status = read_events(&r, events);
    free(r.threads);
    if (status != TAGC_OK) tagc_trace_file_destroy(out);
    return status;
}

void tagc_trace_file_destroy(tagc_trace_file *trace) {
    for (int i = 0; i < trace->n_units; i++) free(trace->units[i]);
    free(trace->units);
    free(trace->ranks);
    free(trace->spans);
    *trace = (tagc_trace_file){0};
}
