/* What the benches of the codec measure with, beside core/measure.h: memory or the end, and medians with their
 * spread. */
#ifndef TAGC_BENCH_MEASURE_H
#define TAGC_BENCH_MEASURE_H

#include "core/measure.h"
#include "core/memory.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Zeroed memory, aligned as the library's. Ends the bench on failure. */
static inline void *take(size_t n, size_t item_bytes, const char *what) {
    void *memory;
    if (tagc_memory_create(n * item_bytes, what, &memory) != TAGC_OK) {
        fprintf(stderr, "bench: %s\n", tagc_last_error());
        exit(1);
    }
    return memory;
}

/* The name of the kernels' processor level. Ends the bench if TAGC_CPU names one that is not available. */
static inline const char *level_in_use(void) {
    if (tagc_cpu_check() != TAGC_OK) {
        fprintf(stderr, "bench: %s\n", tagc_last_error());
        exit(2);
    }
    return tagc_cpu_name(tagc_cpu_best());
}

/* ---- options ---- */

_Noreturn static inline void refuse(const char *name, const char *text, const char *allowed) {
    fprintf(stderr, "bench: %s is %s, must be %s\n", name, text, allowed);
    exit(2);
}

static inline uint64_t number(const char *name, const char *text, uint64_t low, uint64_t high) {
    char *end, allowed[64];
    snprintf(allowed, sizeof allowed, "a whole number from %llu to %llu", (unsigned long long)low,
             (unsigned long long)high);
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end || errno || value < low || value > high)
        refuse(name, text, allowed);
    return value;
}

/* ---- statistics ---- */

typedef struct spread {
    double quarter, median, three_quarters;
} spread;

static inline int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts values (n). */
static inline spread spread_of(double *values, int n) {
    qsort(values, (size_t)n, sizeof *values, by_value);
    return (spread){values[n / 4], values[n / 2], values[n - 1 - n / 4]};
}

#endif
