/* Finds the ranks that share a host, and the memory that it has for them. */
#ifndef TAGC_LAUNCH_HOSTS_H
#define TAGC_LAUNCH_HOSTS_H

#include "launch/ranks.h"

enum { TAGC_HOST_NAME_BYTES = 64, TAGC_HOSTS_NOTE_BYTES = 192 };

typedef struct tagc_hosts {
    int n_hosts;
    int *of_rank;                        /* (W) */
    int *leaders;                        /* (n_hosts) lowest rank of each */
    int n_here;                          /* ranks on this rank's host */
    char (*names)[TAGC_HOST_NAME_BYTES]; /* (n_hosts) */
} tagc_hosts;

/* Collective. _destroy after success and failure alike. */
tagc_status tagc_hosts_find(tagc_comm *comm, tagc_hosts *out);
void tagc_hosts_destroy(tagc_hosts *hosts);

/* Local: bytes that this rank has sent to ranks of other hosts since the comm was created. */
tagc_status tagc_hosts_sent(const tagc_hosts *hosts, const tagc_comm *comm, double *n_bytes);

/* Collective. Ranks [g * ranks_per_host, (g + 1) * ranks_per_host) must share a host; otherwise TAGC_ERR_ARGUMENT on all
 * ranks. note: a text on the effect if several such groups share a host, else "". Ranks that are threads may
 * simulate any hosts; do not check them. */
tagc_status tagc_hosts_check_groups(tagc_comm *comm, int ranks_per_host, char note[TAGC_HOSTS_NOTE_BYTES]);

/* Collective. The number of ranks on this rank's host. */
tagc_status tagc_ranks_here(const tagc_rank *rank, int *n_here);

/* Local: TAGC_ERR_MEMORY, naming `what`, if n_bytes for each of the n_here ranks of this host exceed its free memory. */
tagc_status tagc_check_memory(const char *what, uint64_t n_bytes, int n_here);

#endif
