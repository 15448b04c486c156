/* What tests/gpu/cuda/sides.h has, for tests that have no device. */
#ifndef TAGC_TESTS_EXCHANGE_HOST_SIDE_H
#define TAGC_TESTS_EXCHANGE_HOST_SIDE_H

#include "../exchange/ranks.h"
#include "tagc/device.h"

typedef struct side {
    tagc_kernels *kernels; /* NULL */
} side;

static inline void *take_bytes(side *own, size_t n_bytes) {
    (void)own;
    return aligned_alloc(64, (n_bytes + 63) / 64 * 64);
}
static inline void give_bytes(side *own, void *memory, size_t n_bytes) {
    (void)own, (void)n_bytes;
    free(memory);
}
static inline int write_bytes(side *own, void *to, const void *from, size_t n_bytes) {
    (void)own;
    memcpy(to, from, n_bytes);
    return 1;
}
static inline int read_bytes(side *own, void *to, const void *from, size_t n_bytes) {
    (void)own;
    memcpy(to, from, n_bytes);
    return 1;
}

#endif
