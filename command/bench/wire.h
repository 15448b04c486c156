/* Plain messages between ranks, by MPI or by the local transport, to measure a link with and to compare exchanges with. */
#ifndef TAGC_BENCH_WIRE_H
#define TAGC_BENCH_WIRE_H

#include "tagc/tagc.h"

/* Transfers between ranks by plain MPI, or by the local transport. */
typedef struct tagc_wire {
    tagc_comm *comm;
    int is_mpi;
    double timeout_s;
    char *send, *recv;                  /* (n_max), sent to every rank; (W, n_max) */
    uint64_t n_max;                     /* bytes per peer */
    uint64_t *n_send, *n_recv;          /* (W) of this transfer; data of rank r arrives at recv + r * n_max */
    struct tagc_part *sends, *receives; /* (W) the same, for the local transport */
} tagc_wire;

/* n_max 0: the size that measuring a link needs. Call _destroy after failure, too. */
tagc_status tagc_wire_create(tagc_comm *comm, int is_mpi, double timeout_s, uint64_t n_max, tagc_wire *out);
void tagc_wire_destroy(tagc_wire *wire);
/* Collective: seconds of the slowest rank for n_times exchanges, in each of which every rank sends n_bytes to each other. */
tagc_status tagc_wire_all(tagc_wire *wire, uint64_t n_bytes, int n_times, double *seconds);

/* ---- plain MPI, to compare exchanges with ---- */

/* Call these only while no transfer of the comm is under way, because the comm's thread calls MPI, too. TAGC_ERR_UNSUPPORTED
 * in a build without MPI. */
tagc_status tagc_plain_mpi_exchange(const tagc_wire *wire);

/* float32, summed. n: values that a rank gets from a reduce-scatter, gets from an all-reduce, gives to an all-gather. */
typedef enum tagc_mpi_collective {
    TAGC_MPI_REDUCE_SCATTER, /* send (W, n), recv (n) */
    TAGC_MPI_ALL_REDUCE,     /* send (n), recv (n) */
    TAGC_MPI_ALL_GATHER      /* send (n), recv (W, n) */
} tagc_mpi_collective;
tagc_status tagc_plain_mpi_collective(tagc_mpi_collective kind, const float *send, float *recv, uint64_t n);

#endif
