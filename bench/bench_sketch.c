/* What the index, packing and the sketch cost per parameter, beside the floor of reading the gradient and the
 * residual and writing the residual once (12 bytes per parameter, measured in the same process).
 *
 *     bench_sketch [n_elems ...]          default 2359296 and 38597376 (768 x 3072 and 50257 x 768)
 *
 * One thread, one rank's work for one whole unit; median of interleaved repetitions. */
#include "codec/bitmap.h"
#include "codec/pack.h"
#include "codec/sketch.h"
#include "core/clock.h"
#include "core/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N_REPEATS = 7, N_STEPS = 12 };
static const char *const step_names[N_STEPS] = {"floor",  "bitmap make", "bitmap or", "bitmap indices",
                                                "pack",   "pack fill",   "add",       "unpack",
                                                "encode", "plan",        "peel",      "peel fixed"};

static uint64_t next_random(uint64_t *state) {
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static void *take(size_t n_bytes) {
    void *memory = NULL;
    if (tagc_memory_create(n_bytes, "the bench", &memory) != TAGC_OK) {
        fprintf(stderr, "bench_sketch: %s\n", tagc_last_error());
        exit(1);
    }
    return memory;
}

static size_t random_support(size_t n, double density, uint32_t *indices, float *values, uint64_t *state) {
    uint64_t limit = (uint64_t)(density * 0x1p64);
    size_t n_kept = 0;
    for (size_t i = 0; i < n; i++)
        if (next_random(state) < limit) {
            indices[n_kept] = (uint32_t)i;
            values[n_kept++] = (float)(int64_t)next_random(state) * 0x1p-63f;
        }
    return n_kept;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void bench(size_t n, double sparsity, double ratio) {
    uint64_t state = 1;
    size_t n_bitmap = tagc_bitmap_bytes(n);
    uint32_t *kept[2] = {take(n * 4), take(n * 4)}, *joint = take(n * 4);
    float *values[2] = {take(n * 4), take(n * 4)}, *packed = take(n * 4), *other = take(n * 4);
    float *gradient = take(n * 4), *residual = take(n * 4), *out = take(n * 4);
    uint8_t *bits[2] = {take(n_bitmap), take(n_bitmap)};
    size_t n_kept[2], n_union = 0;
    for (int w = 0; w < 2; w++) {
        n_kept[w] = random_support(n, 1 - sparsity, kept[w], values[w], &state);
        tagc_bitmap_make(bits[w], n, kept[w], n_kept[w]);
    }
    tagc_sketch sketch;
    tagc_plan plan;
    tagc_sketch_init(&sketch, n, (size_t)((double)n / ratio), 0);
    float *cells = take(sketch.n_cells * 4);
    int32_t *fixed = take(sketch.n_cells * 4);
    void *plan_memory = take(tagc_plan_bytes(n)), *scratch = take(tagc_plan_scratch_bytes(&sketch, n));
    double time[N_STEPS][N_REPEATS];
    for (int r = 0; r < N_REPEATS; r++) {
        double mark[N_STEPS + 1];
        int step = 0;
#define STEP(statement)                                                                                      \
    mark[step++] = tagc_clock_s();                                                                           \
    statement
        STEP(for (size_t i = 0; i < n; i++) residual[i] += gradient[i]);
        STEP(tagc_bitmap_make(bits[0], n, kept[0], n_kept[0]));
        STEP(tagc_bitmap_or(bits[0], bits[1], n));
        STEP(n_union = tagc_bitmap_indices(bits[0], n, joint));
        STEP(tagc_pack(joint, n_union, kept[0], values[0], n_kept[0], NULL, packed));
        STEP(tagc_pack(joint, n_union, kept[1], values[1], n_kept[1], residual, other));
        STEP(tagc_pack_add(packed, other, n_union));
        STEP(tagc_unpack(joint, n_union, packed, 0.5f, out, n));
        STEP(memset(cells, 0, sketch.n_cells * 4));
        tagc_sketch_encode(&sketch, kept[0], values[0], n_kept[0], cells);
        tagc_plan_place(&plan, plan_memory, n_union);
        STEP(tagc_plan_make(&plan, &sketch, joint, n_union, scratch));
        STEP(tagc_plan_peel(&plan, &sketch, joint, cells, packed));
        STEP(tagc_plan_peel_fixed(&plan, &sketch, joint, fixed, (int32_t *)other));
        mark[step] = tagc_clock_s();
#undef STEP
        for (int s = 0; s < N_STEPS; s++) time[s][r] = mark[s + 1] - mark[s];
    }
    printf("\nn = %zu, theta = %.2f %%, W = 2, union %.2f %%, n / cells = %g: load %.3f, %d rounds, %zu "
           "unpeeled\n",
           n, 100 * sparsity, 100.0 * (double)n_union / (double)n, ratio,
           (double)n_union / (double)sketch.n_cells, plan.n_rounds, n_union - plan.n_peeled);
    printf("%-16s %10s %10s\n", "step", "ns/param", "x floor");
    double floor_s = 0;
    for (int s = 0; s < N_STEPS; s++) {
        qsort(time[s], N_REPEATS, sizeof(double), by_value);
        double median = time[s][N_REPEATS / 2];
        if (s == 0) floor_s = median;
        printf("%-16s %10.4f %10.3f\n", step_names[s], median / (double)n * 1e9, median / floor_s);
    }
    void *all[] = {kept[0],  kept[1], joint,   values[0], values[1], packed, other,       gradient,
                   residual, out,     bits[0], bits[1],   cells,     fixed,  plan_memory, scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) tagc_memory_destroy(all[i]);
}

int main(int argc, char **argv) {
    size_t sizes[2] = {2359296, 38597376};
    int n_sizes = argc > 1 ? argc - 1 : 2;
    for (int i = 0; i < n_sizes; i++) {
        size_t n = argc > 1 ? strtoull(argv[i + 1], NULL, 10) : sizes[i];
        if (n < 64 || n >= (size_t)1 << 31) {
            fprintf(stderr, "bench_sketch: n_elems must be in [64, 2^31)\n");
            return 2;
        }
        bench(n, 0.9875, 10);
        bench(n, 0.9, 4);
    }
    return 0;
}
