/* Keeps OpenBLAS from hanging if address space is short: without it, OpenBLAS waits forever for its buffers in the first
 * matrix product, and for its workers at exit. */
#ifndef TAGC_LAUNCH_BLAS_H
#define TAGC_LAUNCH_BLAS_H

#include "tagc/tagc.h"

/* Call it first in main(). OpenBLAS starts one worker per core when it is loaded, so this starts the program again with
 * OPENBLAS_NUM_THREADS=1, unless the variable is set. Returns if that was done or cannot be done. */
void tagc_blas_without_workers(char **argv);

/* Call it before the first product. Reserves a buffer for each of n_callers simultaneous threads, and sets the threads of a
 * product. n_threads 0: OPENBLAS_NUM_THREADS if the user set it; else the processors that this process may use, divided by
 * n_ranks if all ranks of this host may use them. TAGC_ERR_MEMORY if the address space does not suffice. */
tagc_status tagc_blas_prepare(int n_callers, int n_ranks, int n_threads);

#endif
