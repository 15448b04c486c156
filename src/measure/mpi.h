/* Plain MPI, to compare exchanges with. Call it only while no transfer of the comm is under way, because the comm's thread
 * calls MPI, too. TAGC_ERR_UNSUPPORTED in a build without MPI. */
#ifndef TAGC_MEASURE_MPI_H
#define TAGC_MEASURE_MPI_H

#include "measure/link.h"

tagc_status tagc_plain_mpi_exchange(const tagc_wire *wire);

/* float32, summed. n: values that a rank gets from a reduce-scatter, gets from an all-reduce, gives to an all-gather. */
typedef enum tagc_mpi_collective {
    TAGC_MPI_REDUCE_SCATTER, /* send (W, n), recv (n) */
    TAGC_MPI_ALL_REDUCE,     /* send (n), recv (n) */
    TAGC_MPI_ALL_GATHER      /* send (n), recv (W, n) */
} tagc_mpi_collective;
tagc_status tagc_plain_mpi_collective(tagc_mpi_collective kind, const float *send, float *recv, uint64_t n);

#endif
