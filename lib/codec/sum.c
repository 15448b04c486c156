/* Simple enough for the compiler to vectorise. Memory limits the speed. */
#include "codec/sum.h"

void tagc_sum_add(float *into, const float *from, size_t n) {
    for (size_t i = 0; i < n; i++) into[i] += from[i];
}
