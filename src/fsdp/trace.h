/* Timeline of one rank: what ran when on the compute, codec and comm streams, as Chrome trace events. */
#ifndef TAGC_FSDP_TRACE_H
#define TAGC_FSDP_TRACE_H

#include "tagc/tagc.h"

typedef struct tagc_trace tagc_trace;

/* Room for n_events; later ones are counted as dropped. */
tagc_status tagc_trace_create(size_t n_events, tagc_trace **out);
void tagc_trace_destroy(tagc_trace *trace);
/* Thread-safe; a tagc_trace_fn with the trace as context. Nothing when paused. */
void tagc_trace_add(void *trace, const tagc_event *event);
void tagc_trace_pause(tagc_trace *trace, int paused);
/* Local: can `path` be written? Asked before hours of work whose timeline goes there. */
tagc_status tagc_trace_check_path(const char *path);
/* Collective: rank 0 writes one JSON file with all ranks as processes and streams as threads (whole or not at all).
 * Transfers that run at the same time are on threads of their own: "comm", "comm 2", ...; beyond 64 they are dropped.
 * unit_names: (n_units) by tag. The file names events "<name> <unit>", with n_bytes as an argument. */
tagc_status tagc_trace_write(tagc_trace *trace, tagc_comm *comm, const char *const *unit_names, int n_units,
                             const char *path);

#endif
