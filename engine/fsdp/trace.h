/* Timeline of one rank: the spans of its compute, codec and comm streams, as Chrome trace events. */
#ifndef TAGC_FSDP_TRACE_H
#define TAGC_FSDP_TRACE_H

#include "tagc/tagc.h"

typedef struct tagc_trace tagc_trace;

/* Memory for n_events; later ones are counted as dropped. */
tagc_status tagc_trace_create(size_t n_events, tagc_trace **out);
void tagc_trace_destroy(tagc_trace *trace);
/* A tagc_trace_fn; the context is the trace. Thread-safe. Does nothing while paused. */
void tagc_trace_add(void *trace, const tagc_event *event);
void tagc_trace_pause(tagc_trace *trace, int paused);
/* Collective: rank 0 writes one JSON file, complete or not at all, with ranks as processes and streams as threads.
 * Simultaneous transfers have threads of their own: "comm", "comm 2", ...; those beyond 64 are dropped.
 * unit_names: (n_units) by tag. Events are named "<name> <unit>" and have n_bytes as an argument. */
tagc_status tagc_trace_write(tagc_trace *trace, tagc_comm *comm, const char *const *unit_names, int n_units,
                             const char *path);

#endif
