/* --levels: sites, hosts and ranks by name, as the options of tagc train that follow from them. */
#ifndef TAGC_OPTIONS_LEVELS_H
#define TAGC_OPTIONS_LEVELS_H

#include "options/options.h"

/* Sets --ranks, --ranks-per-host, --two-level and --sharding in `parsed`, of tagc train, where the levels say them, and counts them
 * as given. n_ranks: of the run; 0 if the levels decide. TAGC_ERR_ARGUMENT if the text is wrong, another option says something
 * else, or the counts do not give n_ranks; TAGC_ERR_UNSUPPORTED for hosts inside sites. */
tagc_status tagc_levels_apply(const char *text, int n_ranks, tagc_parsed *parsed);

#endif
