/* The candidates of --exchange auto, and the conversion of a measured machine to the setup and costs of a plan. */
#ifndef TAGC_AUTO_CANDIDATES_H
#define TAGC_AUTO_CANDIDATES_H

#include "auto/auto.h"
#include "measure/machine.h"

/* The candidates under these options, mildest first; the first is dense. */
int tagc_auto_candidates(const tagc_fsdp_options *engine,
                         tagc_candidate candidates[TAGC_MACHINE_MAX_CANDIDATES]);

/* dense_stats: of a step without compression. Reads comm, engine, model, n_batch and n_tokens of `setup`. */
void tagc_auto_plan(const tagc_auto_setup *setup, const tagc_machine *machine,
                    const tagc_fsdp_stats *dense_stats, tagc_setup *plan, tagc_costs *costs);

#endif
