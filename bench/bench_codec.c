/* What selection costs beside the floor of its memory traffic: reading the gradient and the residual and
 * writing the residual, 12 bytes per element. Floor and selection take turns in one process, so that a busy
 * machine slows both; the ratio printed is the median over the turns.
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
    const float *gradient; /* (n) */
    float *residual;       /* (n) */
    size_t n;
    int wide;
} floor_job;

static void add_plain(float *residual, const float *gradient, size_t n) {
    for (size_t i = 0; i < n; i++) residual[i] += gradient[i];
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static void add_wide(float *residual, const float *gradient, size_t n) {
    size_t i = 0;
    for (; i + 64 <= n; i += 64)
        for (size_t j = i; j < i + 64; j += 16)
            _mm512_storeu_ps(residual + j,
                             _mm512_add_ps(_mm512_loadu_ps(residual + j), _mm512_loadu_ps(gradient + j)));
    add_plain(residual + i, gradient + i, n - i);
}
#endif

static void floor_work(void *arg, int index, int n_threads) {
    const floor_job *job = arg;
    size_t begin = job->n / 64 * (size_t)index / (size_t)n_threads * 64;
    size_t end = index + 1 == n_threads ? job->n : job->n / 64 * (size_t)(index + 1) / (size_t)n_threads * 64;
#if defined(__x86_64__)
    if (job->wide) {
        add_wide(job->residual + begin, job->gradient + begin, end - begin);
        return;
    }
#endif
    add_plain(job->residual + begin, job->gradient + begin, end - begin);
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

static void bench_selection(const tagc_select_kernels *kernels, size_t n, double sparsity, int n_threads,
                            int n_repeats) {
    uint64_t state = 1;
    size_t k = tagc_select_count(n, sparsity);
    float *gradient = take(n * 4, "gradient"), *floor_residual = take(n * 4, "floor residual");
    float *residual = take(n * 4, "residual"), *next = take(n * 4, "next residual");
    uint32_t *indices = take(k * 4, "indices");
    float *values = take(k * 4, "values");
    void *scratch = take(tagc_select_scratch_bytes(n, k, n_threads), "scratch");
    tagc_pool *pool;
    if (tagc_pool_create(n_threads, &pool) != TAGC_OK) {
        fprintf(stderr, "bench_codec: %s\n", tagc_last_error());
        exit(1);
    }
    tagc_selection result;
    for (int step = 0; step < N_STEPS_BEFORE; step++) {
        fill_gradient(gradient, n, &state);
        tagc_select_with(kernels, gradient, residual, next, n, k, indices, values, scratch, pool, &result);
        float *swap = residual;
        residual = next;
        next = swap;
    }
    fill_gradient(gradient, n, &state);
    memcpy(floor_residual, residual, n * 4);
    floor_job job = {gradient, floor_residual, n, 0};
#if defined(__x86_64__)
    job.wide = __builtin_cpu_supports("avx512f");
#endif
    double floors[MAX_REPEATS], times[MAX_REPEATS], in_place[MAX_REPEATS], ratios[MAX_REPEATS],
        ratios_in[MAX_REPEATS];
    int n_two_passes = 0;
    for (int i = -1; i < n_repeats; i++) { /* -1: warm up */
        int slot = i < 0 ? 0 : i;
        double t0 = tagc_clock_s();
        tagc_pool_run(pool, floor_work, &job);
        double t1 = tagc_clock_s();
        tagc_select_with(kernels, gradient, residual, next, n, k, indices, values, scratch, pool, &result);
        double t2 = tagc_clock_s();
        n_two_passes += i >= 0 && result.n_passes == 2;
        memcpy(next, residual, n * 4);
        double t3 = tagc_clock_s();
        tagc_pool_run(pool, floor_work, &job);
        double t4 = tagc_clock_s();
        tagc_select_with(kernels, gradient, next, next, n, k, indices, values, scratch, pool, &result);
        double t5 = tagc_clock_s();
        floors[slot] = t1 - t0;
        times[slot] = t2 - t1;
        in_place[slot] = t5 - t4;
        ratios[slot] = (t2 - t1) / (t1 - t0);
        ratios_in[slot] = (t5 - t4) / (t4 - t3);
    }
    double floor_s = median(floors, n_repeats);
    printf("%10zu %3d %-7s %6.2f %% %8.3f ms %6.1f GB/s %8.3f ms %6.3f %8.3f ms %6.3f %4d of %d\n", n,
           n_threads, kernels->name, 100 * sparsity, 1e3 * floor_s, 12e-9 * (double)n / floor_s,
           1e3 * median(times, n_repeats), median(ratios, n_repeats), 1e3 * median(in_place, n_repeats),
           median(ratios_in, n_repeats), n_two_passes, n_repeats);
    tagc_pool_destroy(pool);
    tagc_memory_destroy(gradient);
    tagc_memory_destroy(floor_residual);
    tagc_memory_destroy(residual);
    tagc_memory_destroy(next);
    tagc_memory_destroy(indices);
    tagc_memory_destroy(values);
    tagc_memory_destroy(scratch);
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
    printf("%10s %3s %-7s %8s %11s %11s %11s %6s %11s %6s %s\n", "n_elems", "thr", "kernels", "sparsity",
           "floor", "", "selection", "ratio", "in place", "ratio", "two passes");
    for (size_t i = 0; i < n_shapes; i++)
        for (int j = 0; j < 4; j++) bench_selection(kernels, shapes[i], sparsities[j], n_threads, n_repeats);
    return 0;
}
