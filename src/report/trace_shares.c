/* Windows of a trace and the shares of time in them: lengths of unions of spans, since transfers overlap each other. */
#include "report/trace_file.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_WINDOWS = 64 };

typedef struct span_list {
    tagc_window *spans; /* (n), by start */
    int n;
} span_list;

static double covered_s(const span_list *list, tagc_window window) {
    double total = 0, until = window.start_s;
    for (int i = 0; i < list->n && list->spans[i].start_s < window.end_s; i++) {
        double from = fmax(list->spans[i].start_s, until), to = fmin(list->spans[i].end_s, window.end_s);
        if (to <= from) continue;
        total += to - from;
        until = to;
    }
    return total;
}

static int is_model(const tagc_span *span) {
    return span->track == 0 && span->kind != TAGC_SPAN_STALL;
}
/* Compressing counts as computing, as in the paper. */
static int is_computing(const tagc_span *span) {
    return is_model(span) || (span->track == 1 && span->kind != TAGC_SPAN_IDLE);
}
static int is_communicating(const tagc_span *span) {
    return span->track >= 2;
}
static int is_exchanging(const tagc_span *span) {
    return span->track >= 2 && span->kind >= TAGC_SPAN_LEG && span->kind < TAGC_SPAN_LEG + TAGC_LEG_GATHER;
}
static int is_either(const tagc_span *span) {
    return is_computing(span) || is_communicating(span);
}

static int select_spans(const tagc_trace_file *trace, int rank, int (*is_wanted)(const tagc_span *),
                        span_list *out) {
    out->n = 0;
    out->spans = malloc(((size_t)trace->n_spans + 1) * sizeof *out->spans);
    for (int i = 0; out->spans && i < trace->n_spans; i++)
        if (trace->spans[i].rank == rank && is_wanted(&trace->spans[i]))
            out->spans[out->n++] = (tagc_window){trace->spans[i].start_s, trace->spans[i].end_s};
    return out->spans != NULL;
}

static int by_start(const void *a, const void *b) {
    const tagc_window *x = a, *y = b;
    return (x->start_s > y->start_s) - (x->start_s < y->start_s);
}

/* From the first transfer of a unit's exchange to its last; the unit's next forward pass ends it. */
static int select_exchanges(const tagc_trace_file *trace, int rank, span_list *out) {
    out->n = 0;
    out->spans = malloc(((size_t)trace->n_spans + 1) * sizeof *out->spans);
    int *open = malloc(((size_t)trace->n_units + 1) * sizeof *open); /* the place in out, or -1 */
    int has_memory = out->spans && open;
    for (int u = 0; has_memory && u < trace->n_units; u++) open[u] = -1;
    for (int i = 0; has_memory && i < trace->n_spans; i++) {
        const tagc_span *span = &trace->spans[i];
        if (span->rank != rank || span->unit < 0) continue;
        if (span->kind == TAGC_SPAN_FORWARD) open[span->unit] = -1;
        if (!is_exchanging(span)) continue;
        if (open[span->unit] < 0) {
            open[span->unit] = out->n;
            out->spans[out->n++] = (tagc_window){span->start_s, span->end_s};
        }
        tagc_window *exchange = &out->spans[open[span->unit]];
        exchange->end_s = fmax(exchange->end_s, span->end_s);
    }
    if (has_memory) qsort(out->spans, (size_t)out->n, sizeof *out->spans, by_start);
    free(open);
    return has_memory;
}

int tagc_trace_has_unit(const char *units, const char *unit) {
    while (*units) {
        size_t n = strcspn(units, ",");
        if (n > 0 && strncmp(units, unit, n) == 0 && (unit[n] == 0 || unit[n] == '.')) return 1;
        units += n + (units[n] == ',');
    }
    return 0;
}

/* From the first thing that compute does to the last part of the optimizer: validation between steps is left out. */
static int find_steps(const tagc_trace_file *trace, int rank, tagc_window *windows) {
    double from = 0, optimizer_end = 0;
    int n = 0, is_open = 0, is_past = 0; /* is_past: the optimizer was seen */
    for (int i = 0; i < trace->n_spans && n < MAX_WINDOWS; i++) {
        const tagc_span *span = &trace->spans[i];
        if (span->rank != rank || span->track != 0) continue;
        int ends = is_past && (span->kind == TAGC_SPAN_FORWARD || span->unit >= 0);
        if (is_open && ends) {
            windows[n++] = (tagc_window){from, optimizer_end};
            is_open = is_past = 0;
        }
        if (!is_open) from = span->start_s;
        is_open = 1;
        is_past |= span->kind == TAGC_SPAN_OPTIMIZER;
        if (span->kind == TAGC_SPAN_OPTIMIZER) optimizer_end = span->end_s;
    }
    if (n < MAX_WINDOWS && is_past) windows[n++] = (tagc_window){from, optimizer_end};
    if (n == 0 && trace->n_spans > 0) {
        double last = 0;
        for (int i = 0; i < trace->n_spans; i++) last = fmax(last, trace->spans[i].end_s);
        windows[n++] = (tagc_window){trace->spans[0].start_s, last};
    }
    return n;
}

/* From where the first of the units begins to where the first other one begins that is new in this backward pass: a
 * unit of what is wrapped alone comes back again and again. */
static int find_backwards(const tagc_trace_file *trace, int rank, const char *units, tagc_window *windows) {
    int n = 0, is_open = 0, pass = 1;
    int *met = calloc((size_t)trace->n_units + 1, sizeof *met); /* the pass in which a unit was met last */
    for (int i = 0; met && i < trace->n_spans && n < MAX_WINDOWS; i++) {
        const tagc_span *span = &trace->spans[i];
        if (span->rank != rank || !is_model(span)) continue;
        if (span->kind != TAGC_SPAN_BACKWARD || span->unit < 0) {
            n += is_open;
            is_open = 0;
            pass += span->kind == TAGC_SPAN_FORWARD;
            continue;
        }
        int is_new = met[span->unit] != pass,
            is_wanted = tagc_trace_has_unit(units, trace->units[span->unit]);
        met[span->unit] = pass;
        if (is_open && is_new && !is_wanted) {
            windows[n++].end_s = span->start_s;
            is_open = 0;
        } else if (is_open) {
            windows[n].end_s = span->end_s;
        } else if (is_new && is_wanted) {
            windows[n] = (tagc_window){span->start_s, span->end_s};
            is_open = 1;
        }
    }
    free(met);
    return n < MAX_WINDOWS ? n + is_open : n;
}

static int find_windows(const tagc_trace_file *trace, int rank, const char *units, tagc_window *windows) {
    return units ? find_backwards(trace, rank, units, windows) : find_steps(trace, rank, windows);
}

static int by_length(const void *a, const void *b) {
    const tagc_window *x = a, *y = b;
    double first = x->end_s - x->start_s, second = y->end_s - y->start_s;
    return (first > second) - (first < second);
}

tagc_window tagc_trace_step(const tagc_trace_file *trace, tagc_window inside) {
    tagc_window windows[MAX_WINDOWS] = {{0}};
    int n = find_steps(trace, 0, windows);
    for (int i = 0; i < n && inside.end_s > inside.start_s; i++)
        if (windows[i].start_s <= inside.start_s && inside.end_s <= windows[i].end_s) return windows[i];
    qsort(windows, (size_t)n, sizeof windows[0], by_length);
    return windows[n > 0 ? (n - 1) / 2 : 0];
}

static void add_rank(const tagc_trace_file *trace, int rank, const tagc_window *windows, int n,
                     tagc_shares *sum) {
    enum { MODEL, COMPUTING, COMMUNICATING, EXCHANGING, GAPS, EITHER, N_LISTS };
    span_list lists[N_LISTS] = {{0}};
    int has_memory = select_spans(trace, rank, is_model, &lists[MODEL]) &&
                     select_spans(trace, rank, is_computing, &lists[COMPUTING]) &&
                     select_spans(trace, rank, is_communicating, &lists[COMMUNICATING]) &&
                     select_spans(trace, rank, is_exchanging, &lists[EXCHANGING]) &&
                     select_exchanges(trace, rank, &lists[GAPS]) &&
                     select_spans(trace, rank, is_either, &lists[EITHER]);
    for (int w = 0; has_memory && w < n; w++) {
        double length = windows[w].end_s - windows[w].start_s, part_s[N_LISTS];
        if (!(length > 0)) continue;
        for (int k = 0; k < N_LISTS; k++) part_s[k] = covered_s(&lists[k], windows[w]);
        sum->model += part_s[MODEL];
        sum->computing += part_s[COMPUTING];
        sum->communicating += part_s[COMMUNICATING];
        sum->exchanging += part_s[EXCHANGING];
        sum->exchanging_with_gaps += part_s[GAPS];
        sum->overlapped += part_s[COMPUTING] + part_s[COMMUNICATING] - part_s[EITHER];
        sum->length_s += length;
        sum->n++;
    }
    for (int k = 0; k < N_LISTS; k++) free(lists[k].spans);
}

tagc_shares tagc_trace_shares(const tagc_trace_file *trace, const char *units) {
    enum { MOST_RANKS = 16 }; /* enough for a mean */
    tagc_shares shares = {0};
    for (int rank = 0; rank < trace->n_ranks && rank < MOST_RANKS; rank++) {
        tagc_window windows[MAX_WINDOWS];
        int n = find_windows(trace, rank, units, windows);
        add_rank(trace, rank, windows, n, &shares);
        if (rank > 0 || n == 0) continue;
        qsort(windows, (size_t)n, sizeof windows[0], by_length);
        shares.shown = windows[(n - 1) / 2];
    }
    if (shares.n == 0) return (tagc_shares){0};
    double *const parts[] = {&shares.model,
                             &shares.computing,
                             &shares.communicating,
                             &shares.exchanging,
                             &shares.exchanging_with_gaps,
                             &shares.overlapped};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        *parts[i] = fmax(*parts[i], 0) / shares.length_s;
    shares.length_s /= shares.n;
    return shares;
}
