/* A reducer's residual as fp32 values, for tests and fuzzers. */
#ifndef TAGC_TESTS_RESIDUAL_H
#define TAGC_TESTS_RESIDUAL_H

#include "tagc/tagc.h"
#include <stdlib.h>

/* Copies it to `values`, which has room for it. Returns the number of values; 0 if there is no residual. */
static inline uint64_t residual_to(const tagc_reducer *reducer, float *values) {
    uint64_t n = tagc_reducer_residual_elems(reducer);
    if (n && tagc_reducer_get_residual(reducer, values, n) != TAGC_OK) abort();
    return n;
}

/* Every way to store a residual, and the default. */
static inline int residual_of(int variant) {
    static const int formats[] = {-1, TAGC_FORMAT_FP32, TAGC_FORMAT_INT8, TAGC_FORMAT_INT4};
    return formats[variant % 4];
}

/* A copy, which the caller frees, or NULL if there is no residual. n_elems may be NULL. */
static inline float *copy_of_residual(const tagc_reducer *reducer, uint64_t *n_elems) {
    uint64_t n = tagc_reducer_residual_elems(reducer);
    float *values = n ? malloc(n * sizeof *values) : NULL;
    if (n && !values) abort();
    if (n_elems) *n_elems = n;
    residual_to(reducer, values);
    return values;
}

#endif
