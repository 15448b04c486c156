/* Link, codec and hosts within about a second, with a training engine in memory: what --exchange auto and --bucket-elems
 * auto decide by. */
#ifndef TAGC_MEASURE_MACHINE_H
#define TAGC_MEASURE_MACHINE_H

#include "plan/choose.h"

enum { TAGC_MACHINE_MAX_CANDIDATES = 8 };

typedef struct tagc_machine {
    int n_hosts, n_here;                                    /* hosts, and ranks on this one */
    double cores;                                           /* of this host */
    double byte_s;                                          /* of memory, read or written */
    tagc_plan_link link;                                    /* as the slowest rank sees it */
    tagc_codec_cost codec[2 * TAGC_MACHINE_MAX_CANDIDATES]; /* of what compressed and of what mild flats do */
    int n_codec;
} tagc_machine;

/* Local: seconds per element of all that candidates (n) do in an engine with these options, and of memory. */
tagc_status tagc_machine_measure_codec(const tagc_fsdp_options *engine, const tagc_candidate *candidates,
                                       int n, tagc_machine *machine);
/* Collective. */
tagc_status tagc_machine_find_hosts(tagc_comm *comm, tagc_machine *machine);
tagc_status tagc_machine_measure_link(tagc_comm *comm, tagc_machine *machine);

#endif
