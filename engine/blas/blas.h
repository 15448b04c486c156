/* OpenBLAS: which kernel computes the products, how many threads, and buffers that are there before they are needed.
 *
 * OpenBLAS chooses its kernel when it is loaded. A processor that is newer than it gets the kernel of 2004, which is several
 * times slower. Only its environment can change that, so the program begins again with another one. */
#ifndef TAGC_BLAS_BLAS_H
#define TAGC_BLAS_BLAS_H

#include "core/cpu.h"
#include "tagc/tagc.h"

/* ---- the kernel ---- */

typedef struct tagc_blas_facts {
    const char *kernel; /* what OpenBLAS says that it uses */
    tagc_cpu cpu;       /* what the processor has */
    const char *asked;  /* OPENBLAS_CORETYPE; NULL or "": unset */
    const char *begun;  /* TAGC_BLAS_KERNEL, which the program sets where it begins again; NULL: it has not */
} tagc_blas_facts;

typedef enum tagc_blas_choice {
    TAGC_BLAS_RIGHT = 0,      /* the kernel is the processor's, or unknown here */
    TAGC_BLAS_AGAIN = 1,      /* begin again with *better as OPENBLAS_CORETYPE */
    TAGC_BLAS_USERS_SLOW = 2, /* the user asked for a kernel below the processor */
    TAGC_BLAS_STAYS_SLOW = 3  /* beginning again did not help: this OpenBLAS has no such kernel */
} tagc_blas_choice;

/* Pure. *better: the kernel that the processor could run; NULL with TAGC_BLAS_RIGHT. */
tagc_blas_choice tagc_blas_choose(const tagc_blas_facts *facts, const char **better);

/* Call it first in main(), before there are threads. Begins the program again, at most once, where the kernel is below the
 * processor or where OpenBLAS has started one worker per core (OPENBLAS_NUM_THREADS is not set). Returns if nothing is to be
 * changed, or cannot be. */
void tagc_blas_begin(char **argv);

enum { TAGC_BLAS_TEXT_BYTES = 200 };

/* "" if the kernel is right; else one line for the user. */
void tagc_blas_warning(char text[TAGC_BLAS_TEXT_BYTES]);

/* ---- what products run on ---- */

typedef struct tagc_blas_about {
    char name[64];      /* "OpenBLAS 0.3.21" */
    const char *kernel; /* "SkylakeX" */
    int n_threads;      /* of a product */
} tagc_blas_about;

void tagc_blas_describe(tagc_blas_about *out);

/* ---- buffers ---- */

/* Call it before the first product. Reserves a buffer for each of n_callers simultaneous threads, without which OpenBLAS would
 * wait forever where address space is short, and sets the threads of a product. n_threads 0: OPENBLAS_NUM_THREADS if the user
 * set it; else the processors that this process may use, divided by n_ranks if all ranks of this host may use them.
 * TAGC_ERR_MEMORY if the address space does not suffice. */
tagc_status tagc_blas_prepare(int n_callers, int n_ranks, int n_threads);

#endif
