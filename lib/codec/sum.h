/* Sums of arrays that lie side by side. */
#ifndef TAGC_CODEC_SUM_H
#define TAGC_CODEC_SUM_H

#include <stddef.h>

/* into[i] += from[i] over (n): a caller that adds arrays one after the other fixes the order of the sum. */
void tagc_sum_add(float *into, const float *from, size_t n);

#endif
