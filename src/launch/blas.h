/* OpenBLAS in little memory. It waits for ever where it gets no address space: for its buffers in the first matrix product, and
 * for its workers at exit. */
#ifndef TAGC_LAUNCH_BLAS_H
#define TAGC_LAUNCH_BLAS_H

#include "tagc/tagc.h"

/* First in main(): starts the program again with OPENBLAS_NUM_THREADS=1, unless it is set, because OpenBLAS starts one worker per core
 * as it is loaded. Returns where that has been done or cannot be done. */
void tagc_blas_without_workers(char **argv);

/* Before the first product: n_threads threads for each (0: OPENBLAS_NUM_THREADS where the user set it, else the processors that this process may use, or its share of them where
 * n_ranks ranks of this host may use all), and a buffer for each of n_callers threads at once. TAGC_ERR_MEMORY where the address space
 * does not suffice. */
tagc_status tagc_blas_prepare(int n_callers, int n_ranks, int n_threads);

#endif
