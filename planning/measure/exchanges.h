/* Times each exchange alone, beside plain transfers and MPI's own collectives. */
#ifndef TAGC_MEASURE_EXCHANGES_H
#define TAGC_MEASURE_EXCHANGES_H

#include "files/result_file.h"
#include "launch/ranks.h"

typedef struct tagc_exchanges_setup {
    tagc_rank *rank; /* learns of a failure before its objects are destroyed */
    int is_mpi;
    double timeout_s;
    int n_threads, n_here;   /* of the codec; ranks on this rank's host */
    uint64_t most_elems;     /* of a unit */
    double link_bytes_per_s; /* sent per rank, all to all; sets the number of values */
} tagc_exchanges_setup;

typedef struct tagc_exchange_time {
    const char *name;
    double n_bytes;             /* sent per rank, mean over ranks */
    tagc_result_spread total_s; /* of the slowest rank */
} tagc_exchange_time;

enum { TAGC_MAX_EXCHANGE_TIMES = 24 };

typedef struct tagc_exchange_times {
    uint64_t n_elems;
    int n;
    tagc_exchange_time items[TAGC_MAX_EXCHANGE_TIMES]; /* (n) the first is the link itself */
    double link_bytes_per_s;                           /* in the same turns */
    double to_mpi; /* time of our fp32 reduce-scatter over that of MPI's own; 0 without MPI */
} tagc_exchange_times;

/* Collective. */
tagc_status tagc_measure_exchanges(const tagc_exchanges_setup *setup, tagc_exchange_times *out);

#endif
