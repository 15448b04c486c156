/* Plain enough for the compiler's own vectors: memory sets its pace. */
#include "codec/sum.h"

void tagc_sum_add(float *into, const float *from, size_t n) {
    for (size_t i = 0; i < n; i++) into[i] += from[i];
}
