/* What exchanges take with their codec on a GPU, without making one: the sizes that lib/gpu lays memory out by, and their sums. */
#ifndef TAGC_EXCHANGE_DEVICE_MEMORY_H
#define TAGC_EXCHANGE_DEVICE_MEMORY_H

#include "core/status.h"
#include "tagc/tagc.h"
#include <math.h>

enum {
    /* Each room has pages of its own. So memory that a copy reads or writes can be kept from the host, which tests do. */
    TAGC_ROOM_BYTES = 4096,
    TAGC_LEAST_PINNED_BYTES = 1 << 18, /* of the kernels */
    TAGC_SAMPLE_LINE = 16,             /* neighbouring values of the sample that a selection takes */
    TAGC_SAMPLE_LINES = 512            /* and how many of these lines */
};

/* Four standard deviations of what a sample finds, at most, if large values come in whole lines. */
static inline double tagc_sample_margin(double expected) {
    return 4 * sqrt(TAGC_SAMPLE_LINE * (expected + 4 * TAGC_SAMPLE_LINE));
}

/* Candidates that have room where k of n values are selected and n_sampled are looked at: the sample's prediction, plus as much again
 * for its spread. 0: there is no sample. */
static inline double tagc_sample_room(double n, double k, double n_sampled) {
    double expected = k * (n_sampled / n), reach = expected + tagc_sample_margin(expected);
    if (n < 4 * n_sampled || k == 0 || k == n) return 0;
    return fmin(n, (reach + tagc_sample_margin(reach)) * (n / n_sampled));
}

/* Bytes of a rank. */
typedef struct tagc_device_memory {
    uint64_t residual, buffers; /* on the GPU */
    uint64_t pinned;            /* in the host's memory */
} tagc_device_memory;

/* parts (n): options of the reducers; units (n): the unit of each, those of a unit one after the other. n_bytes: of a value of the
 * gradient, 2 or 4. n_sampled: values of a sample. n_buffers: exchanges under way. TAGC_ERR_ARGUMENT if there is no such reducer. */
tagc_status tagc_device_memory_of(const tagc_reducer_options *parts, const uint32_t *units, size_t n,
                                  int world_size, int n_bytes, uint32_t n_sampled, int n_buffers,
                                  tagc_device_memory *out);

#endif
