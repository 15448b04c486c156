/* A trace read back, and what it says about a window: who was at work, and for which share of the time. */
#ifndef TAGC_REPORT_TRACE_FILE_H
#define TAGC_REPORT_TRACE_FILE_H

#include "tagc/tagc.h"
#include <jansson.h>

typedef enum tagc_span_kind {
    /* compute */
    TAGC_SPAN_FORWARD,
    TAGC_SPAN_BACKWARD,
    TAGC_SPAN_OPTIMIZER,
    TAGC_SPAN_STALL, /* compute waits */
    /* codec */
    TAGC_SPAN_SELECT,
    TAGC_SPAN_INDEX,
    TAGC_SPAN_ENCODE,
    TAGC_SPAN_DECODE,
    TAGC_SPAN_IDLE, /* codec waits */
    /* transfers, by leg */
    TAGC_SPAN_LEG,
    TAGC_SPAN_OTHER = TAGC_SPAN_LEG + TAGC_N_LEGS,
    TAGC_N_SPANS
} tagc_span_kind;

typedef struct tagc_span {
    double start_s, end_s;
    int rank, track; /* track: 0 compute, 1 codec, 2 and up the lanes of transfers */
    tagc_span_kind kind;
    int unit; /* among the units of the file, or -1 */
    double n_bytes;
} tagc_span;

typedef struct tagc_trace_file {
    char label[96];
    tagc_span *spans; /* (n_spans), by start */
    int n_spans, n_ranks, n_units;
    int *ranks;   /* (n_ranks), ascending */
    char **units; /* (n_units), of the first appearance */
    double n_dropped;
} tagc_trace_file;

/* root: an object with traceEvents. TAGC_ERR_CORRUPT names `file` and what is wrong: no events, an event without a
 * time. */
tagc_status tagc_trace_file_read(const json_t *root, const char *file, const char *label,
                                 tagc_trace_file *out);
void tagc_trace_file_destroy(tagc_trace_file *trace);

typedef struct tagc_window {
    double start_s, end_s;
} tagc_window;

/* Shares of all windows together, on all ranks. computing: the model or the codec is at work; model: the model. */
typedef struct tagc_shares {
    int n;           /* occurrences times ranks */
    double length_s; /* mean */
    double model, computing, communicating, exchanging, exchanging_with_gaps, overlapped;
    tagc_window shown; /* the occurrence of middle length on the first rank */
} tagc_shares;

/* The optimizer step that `inside` lies in, or the one of middle length. */
tagc_window tagc_trace_step(const tagc_trace_file *trace, tagc_window inside);
/* units: names with commas between; a name stands for the unit and for what is in it (h.5 for h.5.mlp, too).
 * A window runs from where the first of them begins its backward pass to where the next unit that is none of them
 * begins its own.
 * n = 0: there is no such window. NULL: whole steps. */
tagc_shares tagc_trace_shares(const tagc_trace_file *trace, const char *units);
/* Is this unit one of `units`? */
int tagc_trace_has_unit(const char *units, const char *unit);

#endif
