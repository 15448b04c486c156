/* Measures link, codec and hosts within about a second, beside a training engine in memory, for --exchange auto and
 * --bucket-elems auto. */
#ifndef TAGC_MEASURE_MACHINE_H
#define TAGC_MEASURE_MACHINE_H

#include "plan/choose.h"

enum { TAGC_MACHINE_MAX_CANDIDATES = 8 };

typedef struct tagc_machine {
    int n_hosts, n_here;                                    /* number of hosts, and of ranks on this one */
    double cores;                                           /* of this host */
    double byte_s;                                          /* of memory, read or written */
    tagc_plan_link link;                                    /* as the slowest rank sees it */
    tagc_codec_cost codec[2 * TAGC_MACHINE_MAX_CANDIDATES]; /* for compressed and for mild flats */
    int n_codec;
} tagc_machine;

/* Local: seconds per element of memory, and of the codecs of candidates (n) in an engine with these options. */
tagc_status tagc_machine_measure_codec(const tagc_fsdp_options *engine, const tagc_candidate *candidates,
                                       int n, tagc_machine *machine);
/* Collective. */
tagc_status tagc_machine_find_hosts(tagc_comm *comm, tagc_machine *machine);
tagc_status tagc_machine_measure_link(tagc_comm *comm, tagc_machine *machine);

#endif
