/* tagc over MPI (library tagc-mpi). MPI must be initialised with at least MPI_THREAD_SERIALIZED, and while a comm
 * lives the caller makes no MPI calls of its own unless the level is MPI_THREAD_MULTIPLE. */
#ifndef TAGC_MPI_H
#define TAGC_MPI_H

#include "tagc/tagc.h"
#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Collective over `mpi_comm`, which is duplicated. options may be NULL. */
TAGC_API tagc_status tagc_comm_create_mpi(MPI_Comm mpi_comm, const tagc_comm_options *options, tagc_comm **out);

#ifdef __cplusplus
}
#endif

#endif
