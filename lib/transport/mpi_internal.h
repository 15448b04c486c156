/* For tests of the MPI transport: a split size small enough to be reached. */
#ifndef TAGC_TRANSPORT_MPI_INTERNAL_H
#define TAGC_TRANSPORT_MPI_INTERNAL_H

#include "tagc/mpi.h"

/* As tagc_comm_create_mpi, with messages of more than split_bytes in [1, 2^30] cut into pieces. */
tagc_status tagc_comm_create_mpi_split(MPI_Comm mpi_comm, const tagc_comm_options *options,
                                       uint64_t split_bytes, tagc_comm **out);

#endif
