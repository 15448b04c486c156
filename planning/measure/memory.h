/* The memory of ranks before they start, because without swap the system would kill them. */
#ifndef TAGC_MEASURE_MEMORY_H
#define TAGC_MEASURE_MEMORY_H

#include "plan/plan.h"

/* Local. TAGC_ERR_MEMORY with the figures if this host has not the memory for n_here ranks of the setup; `what` begins the
 * text. n_batch 0: an engine that computes nothing. TAGC_ERR_ARGUMENT if no such batch can be computed. */
tagc_status tagc_memory_check_setup(const char *what, const tagc_setup *setup, int n_here);

#endif
