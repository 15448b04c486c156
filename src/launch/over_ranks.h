/* Doubles of all ranks reduced to one. */
#ifndef TAGC_LAUNCH_OVER_RANKS_H
#define TAGC_LAUNCH_OVER_RANKS_H

#include "tagc/tagc.h"

/* Collective: replaces each of values (n) by its maximum, or its mean, over all ranks. */
tagc_status tagc_max_over_ranks(tagc_comm *comm, double *values, int n);
tagc_status tagc_mean_over_ranks(tagc_comm *comm, double *values, int n);

#endif
