/* tagc over MPI. Link tagc-mpi in addition to libtagc.
 *
 * - Initialise MPI with MPI_THREAD_MULTIPLE, and check that it is provided: tagc makes its MPI calls from its own thread. With
 *   MPI_THREAD_SERIALIZED, your program must make no MPI call while a comm exists. That includes creating or destroying another comm.
 * - Destroy all comms before MPI_Finalize. A transfer that starts later fails with TAGC_ERR_STATE.
 * - After a comm broke it may leave sends behind that MPI cannot cancel. End the job with tagc_comm_abort or
 *   MPI_Abort. */
#ifndef TAGC_MPI_H
#define TAGC_MPI_H

#include "tagc/tagc.h"
#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Optional. Sets environment variables that make Open MPI use both directions of a TCP link at once. It does not
 * override variables that are already set, and other MPIs and networks ignore them. Call it before MPI_Init_thread and
 * before you start threads. */
TAGC_API void tagc_mpi_prepare(void);

/* Collective over `mpi_comm`, which tagc duplicates. `options` may be NULL. If those of one rank are wrong, all fail. */
TAGC_API tagc_status tagc_comm_create_mpi(MPI_Comm mpi_comm, const tagc_comm_options *options,
                                          tagc_comm **out);

#ifdef __cplusplus
}
#endif

#endif
