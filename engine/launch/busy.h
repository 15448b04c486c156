/* The time in which the comm and codec streams worked: the union of their spans, because transfers overlap.
 *
 * A comm reports its events here. Each is counted and passed on to the trace. */
#ifndef TAGC_LAUNCH_BUSY_H
#define TAGC_LAUNCH_BUSY_H

#include "fsdp/trace.h"

typedef struct tagc_busy tagc_busy;

typedef struct tagc_busy_times {
    double comm_s;     /* at least one transfer under way */
    double codec_s;    /* selecting, encoding or decoding */
    double exchange_s; /* either */
    double gradient_s; /* the codec, or a transfer other than of parameters */
} tagc_busy_times;

tagc_status tagc_busy_create(tagc_trace *trace, tagc_busy **out); /* trace may be NULL */
void tagc_busy_destroy(tagc_busy *busy);
void tagc_busy_event(void *busy, const tagc_event *event); /* a tagc_trace_fn */
/* Writes what was measured since the last take; NaN if the table was full. */
void tagc_busy_take(tagc_busy *busy, tagc_busy_times *out);

#endif
