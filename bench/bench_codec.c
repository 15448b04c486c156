/* What selection costs beside the floor of its memory traffic: reading the gradient and the residual and
 * writing the residual, 12 bytes per element, in place or into another array around the cache. Floor and
 * selection take turns in one process, so that a busy machine slows both; the ratio printed is the median
 * over the turns.
 *
 *     bench_codec [n_elems [n_threads [n_repeats [kernels]]]]
 *
 * Default: 38633472 and 2359296 elements (50304 x 768 and 768 x 3072), 1 thread, 15 repeats, the best kernels
 * (else scalar, avx2 or avx512). */
#include "codec/select.h"
#include "codec/select_kernels.h"
#include "core/clock.h"
#include "core/memory.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { MAX_REPEATS = 1000, N_STEPS_BEFORE = 4, N_SCALES = 4096 };

static uint64_t next_random(uint64_t *state) {
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static float normal_of(uint64_t bits) { /* four 12-bit uniforms */
    uint32_t sum = (bits & 4095) + (bits >> 12 & 4095) + (bits >> 24 & 4095) + (bits >> 36 & 4095);
    return ((float)sum - 8190.0f) * (1.0f / 2364.8f);
}

/* normal * exp(normal): as heavy a tail as gradients have. */
static void fill_gradient(float *gradient, size_t n, uint64_t *state) {
    static float scales[N_SCALES];
    for (int i = 0; i < N_SCALES; i++) scales[i] = expf(normal_of(next_random(state)));
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = next_random(state);
        gradient[i] = 1e-3f * normal_of(bits) * scales[bits >> 52];
    }
}

static void *take(size_t n_bytes, const char *what) {
    void *memory;
    if (tagc_memory_create(n_bytes, what, &memory) != TAGC_OK) {
        fprintf(stderr, "bench_codec: %s\n", tagc_last_error());
        exit(1);
    }
    return memory;
}

/* ---- the floor ---- */

typedef struct floor_job {
    const float *gradient;  /* (n) */
    float *residual, *next; /* (n); next is residual or apart from it */
    size_t n;
    int wide;
} floor_job;

static void add_plain(float *next, const float *residual, const float *gradient, size_t n) {
    for (size_t i = 0; i < n; i++) next[i] = residual[i] + gradient[i];
}

#if defined(__x86_64__)
#define WIDE __attribute__((target("avx512f")))

WIDE static inline __m512 add_line(const float *residual, const float *gradient) {
    return _mm512_add_ps(_mm512_load_ps(residual), _mm512_load_ps(gradient));
}

/* Arrays from tagc_memory_create, cut at multiples of 16. */
WIDE static void add_wide(float *next, const float *residual, const float *gradient, size_t n) {
    size_t i = 0;
    if (next == residual)
        for (; i + 16 <= n; i += 16) _mm512_store_ps(next + i, add_line(residual + i, gradient + i));
    else
        for (; i + 16 <= n; i += 16) _mm512_stream_ps(next + i, add_line(residual + i, gradient + i));
    _mm_sfence();
    add_plain(next + i, residual + i, gradient + i, n - i);
}
#endif

static void floor_work(void *arg, int index, int n_threads) {
    const floor_job *job = arg;
    size_t begin = job->n / 16 * (size_t)index / (size_t)n_threads * 16;
    size_t end = index + 1 == n_threads ? job->n : job->n / 16 * (size_t)(index + 1) / (size_t)n_threads * 16;
#if defined(__x86_64__)
    if (job->wide) {
        add_wide(job->next + begin, job->residual + begin, job->gradient + begin, end - begin);
        return;
    }
#endif
    add_plain(job->next + begin, job->residual + begin, job->gradient + begin, end - begin);
}

/* Seconds of the floor, in place or apart. */
static double time_floor(tagc_pool *pool, floor_job job, int in_place) {
    if (in_place) job.next = job.residual;
    double t = tagc_clock_s();
    tagc_pool_run(pool, floor_work, &job);
    return tagc_clock_s() - t;
}

/* ---- selection ---- */

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *times, int n) {
    qsort(times, (size_t)n, sizeof times[0], by_value);
    return times[n / 2];
}

typedef struct arrays {
    float *gradient, *residual, *next, *values, *floor_residual;
    uint32_t *indices;
    void *scratch;
} arrays;

static arrays arrays_make(size_t n, size_t k, int n_threads) {
    return (arrays){.gradient = take(n * 4, "gradient"),
                    .residual = take(n * 4, "residual"),
                    .next = take(n * 4, "next residual"),
                    .floor_residual = take(n * 4, "floor residual"),
                    .values = take(k * 4, "values"),
                    .indices = take(k * 4, "indices"),
                    .scratch = take(tagc_select_scratch_bytes(n, k, n_threads), "scratch")};
}

static void arrays_free(arrays *a) {
    tagc_memory_destroy(a->gradient);
    tagc_memory_destroy(a->residual);
    tagc_memory_destroy(a->next);
    tagc_memory_destroy(a->floor_residual);
    tagc_memory_destroy(a->values);
    tagc_memory_destroy(a->indices);
    tagc_memory_destroy(a->scratch);
}

typedef struct timings {
    double floor_in_place[MAX_REPEATS], floor_apart[MAX_REPEATS];
    double in_place[MAX_REPEATS], apart[MAX_REPEATS];
    double ratio_in_place[MAX_REPEATS], ratio_apart[MAX_REPEATS], ratio_cross[MAX_REPEATS];
    int n_two_passes;
} timings;

static void print_line(const char *name, size_t n, double sparsity, int n_threads, timings *t,
                       int n_repeats) {
    double floor_s = median(t->floor_in_place, n_repeats);
    printf("%10zu %3d  %-6s %6.2f %% | %8.3f ms %5.1f GB/s %8.3f ms %6.3f | %8.3f ms %8.3f ms %6.3f %6.3f | "
           "%d of %d\n",
           n, n_threads, name, 100 * sparsity, 1e3 * floor_s, 12e-9 * (double)n / floor_s,
           1e3 * median(t->in_place, n_repeats), median(t->ratio_in_place, n_repeats),
           1e3 * median(t->floor_apart, n_repeats), 1e3 * median(t->apart, n_repeats),
           median(t->ratio_apart, n_repeats), median(t->ratio_cross, n_repeats), t->n_two_passes,
           2 * n_repeats);
}

/* One line of the table: k of n, with the new residual in place of the old one and apart from it. */
static void bench_selection(const tagc_select_kernels *kernels, size_t n, double sparsity, int n_threads,
                            int n_repeats) {
    uint64_t state = 1;
    size_t k = tagc_select_count(n, sparsity);
    arrays a = arrays_make(n, k, n_threads);
    tagc_pool *pool;
    if (tagc_pool_create(n_threads, &pool) != TAGC_OK) {
        fprintf(stderr, "bench_codec: %s\n", tagc_last_error());
        exit(1);
    }
    tagc_selection result;
    for (int step = 0; step < N_STEPS_BEFORE;
         step++) { /* so that the residual is one of a running training */
        fill_gradient(a.gradient, n, &state);
        tagc_select_with(kernels, a.gradient, a.residual, a.next, n, k, a.indices, a.values, a.scratch, pool,
                         &result);
        memcpy(a.residual, a.next, n * 4);
    }
    fill_gradient(a.gradient, n, &state);
    floor_job job = {.gradient = a.gradient, .residual = a.floor_residual, .next = a.next, .n = n};
#if defined(__x86_64__)
    job.wide = __builtin_cpu_supports("avx512f");
#endif
    timings t = {.n_two_passes = 0};
    for (int i = -1; i < n_repeats; i++) { /* -1: warm up */
        int slot = i < 0 ? 0 : i;
        t.floor_apart[slot] = time_floor(pool, job, 0);
        double start = tagc_clock_s();
        tagc_select_with(kernels, a.gradient, a.residual, a.next, n, k, a.indices, a.values, a.scratch, pool,
                         &result);
        t.apart[slot] = tagc_clock_s() - start;
        t.n_two_passes += i >= 0 && result.n_passes == 2;
        memcpy(a.next, a.residual, n * 4); /* the same work each time */
        t.floor_in_place[slot] = time_floor(pool, job, 1);
        start = tagc_clock_s();
        tagc_select_with(kernels, a.gradient, a.next, a.next, n, k, a.indices, a.values, a.scratch, pool,
                         &result);
        t.in_place[slot] = tagc_clock_s() - start;
        t.n_two_passes += i >= 0 && result.n_passes == 2;
        t.ratio_in_place[slot] = t.in_place[slot] / t.floor_in_place[slot];
        t.ratio_apart[slot] = t.apart[slot] / t.floor_apart[slot];
        t.ratio_cross[slot] = t.apart[slot] / t.floor_in_place[slot];
    }
    print_line(kernels->name, n, sparsity, n_threads, &t, n_repeats);
    tagc_pool_destroy(pool);
    arrays_free(&a);
}

int main(int argc, char **argv) {
    const double sparsities[] = {0.9875, 0.95, 0.9, 0.8};
    size_t shapes[] = {38633472, 2359296}, n_shapes = 2;
    int n_threads = argc > 2 ? atoi(argv[2]) : 1, n_repeats = argc > 3 ? atoi(argv[3]) : 15;
    if (argc > 1) {
        shapes[0] = strtoull(argv[1], NULL, 10);
        n_shapes = 1;
    }
    if (shapes[0] == 0 || shapes[0] >> 32 || n_repeats < 1 || n_repeats > MAX_REPEATS) {
        fprintf(stderr,
                "usage: bench_codec [n_elems (1 to 2^32 - 1) [n_threads [n_repeats (1 to %d) [kernels]]]]\n",
                MAX_REPEATS);
        return 1;
    }
    const tagc_select_kernels *available[TAGC_SELECT_MAX_KERNELS], *kernels = NULL;
    size_t n_available = tagc_select_available(available);
    for (size_t i = n_available; i-- > 0;)
        if (argc <= 4 || !strcmp(argv[4], available[i]->name)) kernels = available[i];
    if (!kernels) {
        fprintf(stderr, "bench_codec: this processor has no kernels named %s\n", argv[4]);
        return 1;
    }
    printf("%35s| residual in place%26s | residual apart: ratio to its floor, and in place | two passes\n",
           "", "");
    printf("%10s %3s  %-6s %8s | %11s %10s %11s %6s | %11s %11s %6s %6s |\n", "n_elems", "thr", "kernel",
           "sparsity", "floor", "", "selection", "ratio", "floor", "selection", "ratio", "ratio");
    for (size_t i = 0; i < n_shapes; i++)
        for (int j = 0; j < 4; j++) bench_selection(kernels, shapes[i], sparsities[j], n_threads, n_repeats);
    return 0;
}
