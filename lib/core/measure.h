/* Tools for benchmarks and tagc bench: realistic gradients, and the memory floor. The library does not call them. */
#ifndef TAGC_CORE_MEASURE_H
#define TAGC_CORE_MEASURE_H

#include "core/clock.h"
#include "core/cpu.h"
#include "core/pool.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define TAGC_MEASURE_SCALES 4096

static inline uint64_t tagc_next_random(uint64_t *state) {
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static inline float tagc_normal_of(uint64_t bits) { /* four 12-bit uniforms */
    uint32_t sum = (bits & 4095) + (bits >> 12 & 4095) + (bits >> 24 & 4095) + (bits >> 36 & 4095);
    return ((float)sum - 8190.0f) * (1.0f / 2364.8f);
}

/* normal * exp(normal): a tail as heavy as that of real gradients. */
static inline void tagc_fill_gradient(float *gradient, size_t n, uint64_t *state) {
    float scales[TAGC_MEASURE_SCALES];
    for (int i = 0; i < TAGC_MEASURE_SCALES; i++) scales[i] = expf(tagc_normal_of(tagc_next_random(state)));
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = tagc_next_random(state);
        gradient[i] = 1e-3f * tagc_normal_of(bits) * scales[bits >> 52];
    }
}

/* ---- the floor: read gradient and residual, write the sum; 12 bytes per element ---- */

typedef struct tagc_floor_arrays {
    const float *gradient, *residual; /* (n) */
    float *next;                      /* (n); residual itself or another array */
    size_t n;
} tagc_floor_arrays;

static inline void tagc_floor_add_plain(float *next, const float *residual, const float *gradient, size_t n) {
    for (size_t i = 0; i < n; i++) next[i] = residual[i] + gradient[i];
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static inline __m512 tagc_floor_add_line(const float *residual,
                                                                            const float *gradient) {
    return _mm512_add_ps(_mm512_load_ps(residual), _mm512_load_ps(gradient));
}

/* The arrays come from tagc_memory_create and are split at multiples of 16. If `out` is another array, the function writes
 * around the cache, as selection does. */
__attribute__((target("avx512f"))) static inline void
tagc_floor_add_avx512(float *next, const float *residual, const float *gradient, size_t n) {
    size_t i = 0;
    if (next == residual)
        for (; i + 16 <= n; i += 16)
            _mm512_store_ps(next + i, tagc_floor_add_line(residual + i, gradient + i));
    else
        for (; i + 16 <= n; i += 16)
            _mm512_stream_ps(next + i, tagc_floor_add_line(residual + i, gradient + i));
    _mm_sfence();
    tagc_floor_add_plain(next + i, residual + i, gradient + i, n - i);
}

__attribute__((target("avx2"))) static inline void tagc_floor_add_avx2(float *next, const float *residual,
                                                                       const float *gradient, size_t n) {
    size_t i = 0;
    if (next == residual)
        for (; i + 8 <= n; i += 8)
            _mm256_store_ps(next + i,
                            _mm256_add_ps(_mm256_load_ps(residual + i), _mm256_load_ps(gradient + i)));
    else
        for (; i + 8 <= n; i += 8)
            _mm256_stream_ps(next + i,
                             _mm256_add_ps(_mm256_load_ps(residual + i), _mm256_load_ps(gradient + i)));
    _mm_sfence();
    tagc_floor_add_plain(next + i, residual + i, gradient + i, n - i);
}
#endif

static inline void tagc_floor_work(void *arg, int index, int n_threads) {
    const tagc_floor_arrays *a = arg;
    size_t n_lines = a->n / 16, begin = n_lines * (size_t)index / (size_t)n_threads * 16;
    size_t end = index + 1 == n_threads ? a->n : n_lines * (size_t)(index + 1) / (size_t)n_threads * 16;
    void (*add)(float *, const float *, const float *, size_t) = tagc_floor_add_plain;
#if defined(__x86_64__)
    if (tagc_cpu_has(TAGC_CPU_AVX512))
        add = tagc_floor_add_avx512;
    else if (tagc_cpu_has(TAGC_CPU_AVX2))
        add = tagc_floor_add_avx2;
#endif
    add(a->next + begin, a->residual + begin, a->gradient + begin, end - begin);
}

/* Seconds. */
static inline double tagc_time_floor(tagc_pool *pool, const float *gradient, const float *residual,
                                     float *next, size_t n) {
    tagc_floor_arrays a = {.gradient = gradient, .residual = residual, .next = next, .n = n};
    double start_s = tagc_clock_s();
    tagc_pool_run(pool, tagc_floor_work, &a);
    return tagc_clock_s() - start_s;
}

/* ---- the floor of a residual in one byte: read gradient and residual, write the residual into another array ---- */

typedef struct tagc_byte_floor_arrays {
    const uint8_t *gradient, *residual; /* (n * value_bytes), (n) */
    uint8_t *next;                      /* (n) */
    size_t n, value_bytes;
} tagc_byte_floor_arrays;

typedef uint64_t tagc_floor_line[8];

/* Lines [begin, end) of 64 residuals. Every byte of the gradient counts, so that no read can be left out. */
static inline void tagc_byte_floor_plain(const tagc_byte_floor_arrays *a, size_t begin, size_t end) {
    for (size_t i = begin; i < end; i++) {
        tagc_floor_line line, other;
        memcpy(line, a->residual + i * sizeof line, sizeof line);
        for (size_t v = 0; v < a->value_bytes; v++) {
            memcpy(other, a->gradient + (i * a->value_bytes + v) * sizeof line, sizeof line);
            for (int j = 0; j < 8; j++) line[j] ^= other[j];
        }
        memcpy(a->next + i * sizeof line, line, sizeof line);
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static inline void tagc_byte_floor_avx2(const tagc_byte_floor_arrays *a,
                                                                        size_t begin, size_t end) {
    for (size_t i = begin; i < end; i++)
        for (size_t half = 0; half < 64; half += 32) {
            __m256i line = _mm256_load_si256((const __m256i *)(const void *)(a->residual + i * 64 + half));
            for (size_t v = 0; v < a->value_bytes; v++) {
                const uint8_t *from = a->gradient + (i * a->value_bytes + v) * 64 + half;
                line = _mm256_xor_si256(line, _mm256_load_si256((const __m256i *)(const void *)from));
            }
            _mm256_stream_si256((__m256i *)(void *)(a->next + i * 64 + half), line);
        }
    _mm_sfence();
}
#endif

static inline void tagc_byte_floor_work(void *arg, int index, int n_threads) {
    const tagc_byte_floor_arrays *a = arg;
    size_t n_lines = a->n / 64, begin = n_lines * (size_t)index / (size_t)n_threads;
    size_t end = n_lines * (size_t)(index + 1) / (size_t)n_threads;
#if defined(__x86_64__)
    if (tagc_cpu_has(TAGC_CPU_AVX2)) {
        tagc_byte_floor_avx2(a, begin, end);
        return;
    }
#endif
    tagc_byte_floor_plain(a, begin, end);
}

/* Seconds. gradient, residual and next come from tagc_memory_create; value_bytes: of a value of the gradient. */
static inline double tagc_time_byte_floor(tagc_pool *pool, const void *gradient, size_t value_bytes,
                                          const uint8_t *residual, uint8_t *next, size_t n) {
    tagc_byte_floor_arrays a = {gradient, residual, next, n, value_bytes};
    double start_s = tagc_clock_s();
    tagc_pool_run(pool, tagc_byte_floor_work, &a);
    return tagc_clock_s() - start_s;
}

#endif
