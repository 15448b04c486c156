/* What --exchange auto measures before it chooses, and how that becomes a plan's setup and costs. */
#ifndef TAGC_AUTO_MACHINE_H
#define TAGC_AUTO_MACHINE_H

#include "auto/auto.h"
#include "plan/choose.h"

enum { TAGC_AUTO_MAX_CANDIDATES = 8 };

typedef struct tagc_machine {
    int n_hosts, n_here;                                 /* hosts, and ranks on this one */
    double cores;                                        /* of this host */
    double byte_s;                                       /* of memory, read or written */
    tagc_plan_link link;                                 /* as the slowest rank sees it */
    tagc_codec_cost codec[2 * TAGC_AUTO_MAX_CANDIDATES]; /* of what compressed and of what mild flats do */
    int n_codec;
} tagc_machine;

/* What can be chosen from with these options, mildest first; the first is dense. */
int tagc_auto_candidates(const tagc_fsdp_options *engine,
                         tagc_candidate candidates[TAGC_AUTO_MAX_CANDIDATES]);

/* Local: seconds per element of all that candidates do in an engine with these options, and of memory. */
tagc_status tagc_auto_measure_codec(const tagc_fsdp_options *engine, const tagc_candidate *candidates, int n,
                                    tagc_machine *machine);
/* Collective. */
tagc_status tagc_auto_find_hosts(tagc_comm *comm, tagc_machine *machine);
tagc_status tagc_auto_measure_link(tagc_comm *comm, tagc_machine *machine);

/* dense_stats: a step in which nothing was compressed. Of the setup comm, engine, model, n_batch and n_tokens are read. */
void tagc_auto_plan(const tagc_auto_setup *setup, const tagc_machine *machine,
                    const tagc_fsdp_stats *dense_stats, tagc_setup *plan, tagc_costs *costs);

#endif
