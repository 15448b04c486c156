/* What ranks share: doubles reduced to one, a choice of rank 0, a failure. Also a comm of one rank, which shares nothing. */
#ifndef TAGC_LAUNCH_OVER_RANKS_H
#define TAGC_LAUNCH_OVER_RANKS_H

#include "tagc/tagc.h"

/* Collective: replaces each of values (n) by its maximum, or its mean, over all ranks. */
tagc_status tagc_max_over_ranks(tagc_comm *comm, double *values, int n);
tagc_status tagc_mean_over_ranks(tagc_comm *comm, double *values, int n);

/* Collective: replaces data (n_bytes) by that of rank 0. Forecasts are sums of doubles, whose last bits may differ between
 * hosts, so rank 0 chooses for all. */
tagc_status tagc_take_from_rank_0(tagc_comm *comm, void *data, size_t n_bytes);

/* Local. Call it with the status of work between collectives: after a failure it wakes the ranks that would wait for this
 * one. Returns `status`. */
tagc_status tagc_abort_unless_ok(tagc_comm *comm, tagc_status status);

/* A comm without peers, for collective functions. _close after success and failure alike. */
typedef struct tagc_alone {
    tagc_comm *comm;
    tagc_local_group *group; /* private */
} tagc_alone;

tagc_status tagc_alone_open(tagc_alone *out);
void tagc_alone_close(tagc_alone *alone);

#endif
