/* Options as a table: one row per field says its range and default and whether all ranks must agree on it. */
#ifndef TAGC_EXCHANGE_OPTIONS_H
#define TAGC_EXCHANGE_OPTIONS_H

#include "core/status.h"
#include "tagc/tagc.h"

/* In the place of a default that depends on other fields (sparsity -1): what it means. */
void tagc_reducer_options_resolve(tagc_reducer_options *options);

/* Local checks of everything that one rank can see. *out: the options with defaults resolved (sparsity, fill_union,
 * a gatherer's ranks_per_host). */
tagc_status tagc_reducer_options_check(const tagc_reducer_options *options, int world_size,
                                       tagc_reducer_options *out);
tagc_status tagc_gatherer_options_check(const tagc_gatherer_options *options, int world_size,
                                        tagc_gatherer_options *out);

/* Collective: every rank brings the status of its own preparations (its text is tagc_last_error()), and all
 * return the same: the status of the lowest rank that failed, "rank 2: <its text>", or TAGC_ERR_MISMATCH
 * where options differ. */
tagc_status tagc_reducer_options_agree(tagc_comm *comm, tagc_status local,
                                       const tagc_reducer_options *options);
tagc_status tagc_gatherer_options_agree(tagc_comm *comm, tagc_status local,
                                        const tagc_gatherer_options *options);

#endif
