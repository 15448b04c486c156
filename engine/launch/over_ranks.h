/* What ranks share: doubles reduced to one. Also a comm of one rank, which shares nothing. */
#ifndef TAGC_LAUNCH_OVER_RANKS_H
#define TAGC_LAUNCH_OVER_RANKS_H

#include "tagc/tagc.h"

/* Collective: replaces each of values (n) by its maximum, or its mean, over all ranks. */
tagc_status tagc_max_over_ranks(tagc_comm *comm, double *values, int n);
tagc_status tagc_mean_over_ranks(tagc_comm *comm, double *values, int n);

/* A comm without peers, for collective functions. _close after success and failure alike. */
typedef struct tagc_alone {
    tagc_comm *comm;
    tagc_local_group *group; /* private */
} tagc_alone;

tagc_status tagc_alone_open(tagc_alone *out);
void tagc_alone_close(tagc_alone *alone);

#endif
