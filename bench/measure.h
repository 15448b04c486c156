/* What the benches of the codec measure with: gradients as training makes them, the floor that memory sets,
 * and medians with their spread. */
#ifndef TAGC_BENCH_MEASURE_H
#define TAGC_BENCH_MEASURE_H

#include "core/clock.h"
#include "core/memory.h"
#include "core/pool.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MEASURE_SCALES 4096

static inline uint64_t next_random(uint64_t *state) {
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static inline float normal_of(uint64_t bits) { /* four 12-bit uniforms */
    uint32_t sum = (bits & 4095) + (bits >> 12 & 4095) + (bits >> 24 & 4095) + (bits >> 36 & 4095);
    return ((float)sum - 8190.0f) * (1.0f / 2364.8f);
}

/* normal * exp(normal): as heavy a tail as gradients have. */
static inline void fill_gradient(float *gradient, size_t n, uint64_t *state) {
    float scales[MEASURE_SCALES];
    for (int i = 0; i < MEASURE_SCALES; i++) scales[i] = expf(normal_of(next_random(state)));
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = next_random(state);
        gradient[i] = 1e-3f * normal_of(bits) * scales[bits >> 52];
    }
}

/* Zeroed memory that the library would get, or the end of the bench. */
static inline void *take(size_t n, size_t item_bytes, const char *what) {
    void *memory;
    if (tagc_memory_create(n * item_bytes, what, &memory) != TAGC_OK) {
        fprintf(stderr, "bench: %s\n", tagc_last_error());
        exit(1);
    }
    return memory;
}

/* ---- the floor: read gradient and residual, write the sum; 12 bytes per element ---- */

typedef struct floor_job {
    const float *gradient, *residual; /* (n) */
    float *next;                      /* (n); residual itself, or apart from it */
    size_t n;
} floor_job;

static inline void add_plain(float *next, const float *residual, const float *gradient, size_t n) {
    for (size_t i = 0; i < n; i++) next[i] = residual[i] + gradient[i];
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static inline __m512 add_line(const float *residual,
                                                                 const float *gradient) {
    return _mm512_add_ps(_mm512_load_ps(residual), _mm512_load_ps(gradient));
}

/* Arrays from take(), cut at multiples of 16. Apart, it writes around the cache, as selection does. */
__attribute__((target("avx512f"))) static inline void add_wide(float *next, const float *residual,
                                                               const float *gradient, size_t n) {
    size_t i = 0;
    if (next == residual)
        for (; i + 16 <= n; i += 16) _mm512_store_ps(next + i, add_line(residual + i, gradient + i));
    else
        for (; i + 16 <= n; i += 16) _mm512_stream_ps(next + i, add_line(residual + i, gradient + i));
    _mm_sfence();
    add_plain(next + i, residual + i, gradient + i, n - i);
}
#endif

static inline void floor_work(void *arg, int index, int n_threads) {
    const floor_job *job = arg;
    size_t n_lines = job->n / 16, begin = n_lines * (size_t)index / (size_t)n_threads * 16;
    size_t end = index + 1 == n_threads ? job->n : n_lines * (size_t)(index + 1) / (size_t)n_threads * 16;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
        add_wide(job->next + begin, job->residual + begin, job->gradient + begin, end - begin);
        return;
    }
#endif
    add_plain(job->next + begin, job->residual + begin, job->gradient + begin, end - begin);
}

/* Seconds. */
static inline double time_floor(tagc_pool *pool, const float *gradient, const float *residual, float *next,
                                size_t n) {
    floor_job job = {.gradient = gradient, .residual = residual, .next = next, .n = n};
    double start_s = tagc_clock_s();
    tagc_pool_run(pool, floor_work, &job);
    return tagc_clock_s() - start_s;
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
