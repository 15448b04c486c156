/* Plain MPI, to compare exchanges with. Call it only while no transfer of the comm is under way, because the comm's thread
 * calls MPI, too. TAGC_ERR_UNSUPPORTED in a build without MPI. */
#ifndef TAGC_MEASURE_MPI_H
#define TAGC_MEASURE_MPI_H

#include "measure/link.h"

tagc_status tagc_plain_mpi_exchange(const tagc_wire *wire);
/* send (W, shard), recv (shard) */
tagc_status tagc_plain_mpi_reduce_scatter(const float *send, float *recv, uint64_t shard);
tagc_status tagc_plain_mpi_all_reduce(const float *send, float *recv, uint64_t n); /* (n) each */
/* send (shard), recv (W, shard) */
tagc_status tagc_plain_mpi_all_gather(const float *send, float *recv, uint64_t shard);

#endif
