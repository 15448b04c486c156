/* tagc over MPI (library tagc-mpi, linked beside libtagc).
 *
 * MPI must be initialised with at least MPI_THREAD_SERIALIZED. A thread of tagc's makes the MPI calls, so while a
 * comm lives the caller makes none of its own, creating and destroying further comms included, unless the level is
 * MPI_THREAD_MULTIPLE. Destroy the comms before MPI_Finalize. A comm that broke (TAGC_ERR_TRANSPORT) leaves sends
 * behind that MPI cannot take back: end the job then, with tagc_comm_abort or MPI_Abort. */
#ifndef TAGC_MPI_H
#define TAGC_MPI_H

#include "tagc/tagc.h"
#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Optional, before MPI_Init_thread and before other threads: chooses, in the environment, the settings under which
 * Open MPI fills a TCP link in both directions at once. What the environment sets already stays. Elsewhere than over
 * Open MPI's TCP it changes nothing. */
TAGC_API void tagc_mpi_prepare(void);

/* Collective over `mpi_comm`, which is duplicated. options may be NULL. */
TAGC_API tagc_status tagc_comm_create_mpi(MPI_Comm mpi_comm, const tagc_comm_options *options,
                                          tagc_comm **out);

#ifdef __cplusplus
}
#endif

#endif
