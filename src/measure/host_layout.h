/* Whether the hosts that options speak of are those that the ranks are on. */
#ifndef TAGC_MEASURE_HOST_LAYOUT_H
#define TAGC_MEASURE_HOST_LAYOUT_H

#include "train/progress.h"
#include "train/ranks.h"

/* Collective. Ranks [g * ranks_per_host, (g + 1) * ranks_per_host) must share a host: TAGC_ERR_ARGUMENT on all ranks
 * where some do not, a note where several such groups do. Ranks that are threads may play any hosts. */
tagc_status tagc_host_layout_check(tagc_rank *rank, int is_local, int ranks_per_host,
                                   tagc_progress *progress);

#endif
