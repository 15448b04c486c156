/* Spans of a step in a fixed table, merged when the step is over. */
#include "launch/busy.h"

#include "core/status.h"
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SPANS = 1 << 16 };

enum { COMM = 1, CODEC = 2, GRADIENT = 4 };

typedef struct span {
    double start_s, end_s;
    int kinds; /* of the above */
} span;

struct tagc_busy {
    tagc_trace *trace;
    pthread_mutex_t lock;
    int n_spans, n_dropped;
    span spans[MAX_SPANS];
};

tagc_status tagc_busy_create(tagc_trace *trace, tagc_busy **out) {
    *out = malloc(sizeof **out);
    if (!*out) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for the clock of the streams");
    (*out)->trace = trace;
    (*out)->n_spans = (*out)->n_dropped = 0;
    pthread_mutex_init(&(*out)->lock, NULL);
    return TAGC_OK;
}

void tagc_busy_destroy(tagc_busy *busy) {
    if (!busy) return;
    pthread_mutex_destroy(&busy->lock);
    free(busy);
}

void tagc_busy_event(void *context, const tagc_event *event) {
    tagc_busy *busy = context;
    int is_codec = strcmp(event->stream, "codec") == 0;
    /* Waiting is not work. */
    int counts = !(is_codec && strcmp(event->name, tagc_phase_name(TAGC_PHASE_WAIT)) == 0);
    int kinds = is_codec ? CODEC | GRADIENT : COMM;
    if (!is_codec && strcmp(event->name, tagc_leg_name(TAGC_LEG_GATHER)) != 0) kinds |= GRADIENT;
    pthread_mutex_lock(&busy->lock);
    if (counts && busy->n_spans < MAX_SPANS)
        busy->spans[busy->n_spans++] = (span){event->start_s, event->end_s, kinds};
    else
        busy->n_dropped += counts;
    pthread_mutex_unlock(&busy->lock);
    if (busy->trace) tagc_trace_add(busy->trace, event);
}

static int by_start(const void *a, const void *b) {
    const span *x = a, *y = b;
    return (x->start_s > y->start_s) - (x->start_s < y->start_s);
}

/* Length of the union of the spans of any of these kinds; sorted by start. */
static double union_s(const span *spans, int n, int kinds) {
    double total = 0, until = -1;
    for (int i = 0; i < n; i++) {
        if (!(spans[i].kinds & kinds)) continue;
        double from = spans[i].start_s > until ? spans[i].start_s : until;
        if (spans[i].end_s > from) {
            total += spans[i].end_s - from;
            until = spans[i].end_s;
        }
    }
    return total;
}

void tagc_busy_take(tagc_busy *busy, tagc_busy_times *out) {
    pthread_mutex_lock(&busy->lock);
    qsort(busy->spans, (size_t)busy->n_spans, sizeof busy->spans[0], by_start);
    out->comm_s = union_s(busy->spans, busy->n_spans, COMM);
    out->codec_s = union_s(busy->spans, busy->n_spans, CODEC);
    out->exchange_s = union_s(busy->spans, busy->n_spans, COMM | CODEC);
    out->gradient_s = union_s(busy->spans, busy->n_spans, GRADIENT);
    if (busy->n_dropped > 0) out->comm_s = out->codec_s = out->exchange_s = out->gradient_s = (double)NAN;
    busy->n_spans = busy->n_dropped = 0;
    pthread_mutex_unlock(&busy->lock);
}
