/* What --exchange auto may choose, and how a measured machine becomes a plan's setup and costs. */
#ifndef TAGC_AUTO_CANDIDATES_H
#define TAGC_AUTO_CANDIDATES_H

#include "auto/auto.h"
#include "measure/machine.h"

/* What can be chosen from with these options, mildest first; the first is dense. */
int tagc_auto_candidates(const tagc_fsdp_options *engine,
                         tagc_candidate candidates[TAGC_MACHINE_MAX_CANDIDATES]);

/* dense_stats: a step in which nothing was compressed. Of the setup comm, engine, model, n_batch and n_tokens are read. */
void tagc_auto_plan(const tagc_auto_setup *setup, const tagc_machine *machine,
                    const tagc_fsdp_stats *dense_stats, tagc_setup *plan, tagc_costs *costs);

#endif
