#include "codec/select_sample.h"
#include "codec/select_kernels.h"

#include <math.h>
#include <string.h>

enum {
    LINE = 16,             /* elements of 64 bytes */
    LEAST_SAMPLED = 256,   /* elements of an array; below, all of them are candidates */
    LEAST_LINES = 1 << 15, /* elements from which lines are sampled: below, they would be too few */
    N_SINGLE = 512,    /* elements at least that are sampled one by one, of arrays of twice as many or more */
    LINES_SHIFT = 16,  /* buckets by 8 exponent and 7 mantissa bits */
    SINGLE_SHIFT = 19, /* 4 mantissa bits: clearing more would take longer than sampling */
    AHEAD = 24         /* lines on their way at a time */
};

static size_t size_min(size_t a, size_t b) {
    return a < b ? a : b;
}

static size_t size_max(size_t a, size_t b) {
    return a > b ? a : b;
}

tagc_sample_shape tagc_sample_shape_of(size_t n, size_t k) {
    tagc_sample_shape shape = {.unit = 1, .stride = size_max(n / N_SINGLE, 2), .bucket_shift = SINGLE_SHIFT};
    if (n >= LEAST_LINES)
        shape = (tagc_sample_shape){.unit = LINE,
                                    .stride = size_min(size_max(n / LINE / 8192, 64), 256),
                                    .bucket_shift = LINES_SHIFT};
    if (n >= LEAST_SAMPLED && k > 0 && k < n) shape.n_windows = n / shape.unit / shape.stride;
    shape.expected = (double)k * ((double)tagc_sample_elems(&shape) / (double)size_max(n, 1));
    return shape;
}

size_t tagc_sample_elems(const tagc_sample_shape *shape) {
    return shape->n_windows * shape->unit;
}

size_t tagc_sample_buckets(const tagc_sample_shape *shape) {
    return shape->n_windows ? (size_t)1 << (31 - shape->bucket_shift) : 0;
}

/* Four standard deviations in sampled elements. clump: how many elements of a unit tend to be large together. */
static double margin_of(double expected, double clump) {
    return 4 * sqrt(clump * (expected + 4 * clump));
}

/* The sample puts t_lo below its `reach` largest elements. The array has as many elements above t_lo as these
 * represent, plus four standard deviations for the worst clump. */
double tagc_sample_candidates(const tagc_sample_shape *shape, size_t n) {
    double unit = (double)shape->unit, reach = shape->expected + margin_of(shape->expected, unit);
    if (!shape->n_windows) return (double)n;
    return (reach + margin_of(reach, unit)) * (double)n / (double)tagc_sample_elems(shape);
}

/* Unit of window w: at a random place in the window, so that the stride does not interfere with rows and columns of a
 * matrix. */
static inline size_t sampled_unit(const tagc_sample_shape *shape, size_t w) {
    uint32_t x = (uint32_t)w;
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return w * shape->stride + (size_t)((uint64_t)(x ^ x >> 16) * shape->stride >> 32);
}

/* Fills sample and buckets; returns the largest bits seen. */
static uint32_t take_lines(const tagc_sample_shape *shape, const tagc_addends *addends, uint32_t *sample,
                           uint32_t *buckets) {
    float gradient_room[LINE], residual_room[LINE];
    const float *gradient, *residual;
    uint32_t max_bits = 0;
    for (size_t w = 0; w < shape->n_windows; w++) {
        size_t next = sampled_unit(shape, size_min(w + AHEAD, shape->n_windows - 1)) * LINE;
        uint32_t *line = sample + w * LINE;
        tagc_addends_prefetch(addends, next);
        tagc_addends_parts(addends, sampled_unit(shape, w) * LINE, LINE, gradient_room, residual_room,
                           &gradient, &residual);
        for (size_t i = 0; i < LINE; i++) line[i] = tagc_abs_bits(gradient[i] + residual[i]);
        for (size_t i = 0; i < LINE; i++) {
            buckets[line[i] >> LINES_SHIFT]++;
            if (line[i] > max_bits) max_bits = line[i];
        }
    }
    return max_bits;
}

/* The same without a sample; only clumps are measured. */
static uint32_t take_elements(const tagc_sample_shape *shape, const tagc_addends *addends,
                              uint32_t *buckets) {
    uint32_t max_bits = 0;
    for (size_t w = 0; w < shape->n_windows; w++) {
        float gradient_room, residual_room;
        const float *gradient, *residual;
        tagc_addends_parts(addends, sampled_unit(shape, w), 1, &gradient_room, &residual_room, &gradient,
                           &residual);
        uint32_t bits = tagc_abs_bits(*gradient + *residual);
        buckets[bits >> SINGLE_SHIFT]++;
        if (bits > max_bits) max_bits = bits;
    }
    return max_bits;
}

/* The bucket that holds the sampled element of this rank from the top; 0 if there are fewer elements. */
static uint32_t bucket_of_rank(const uint32_t *buckets, uint32_t top, double rank) {
    double n_above = 0;
    uint32_t b = top;
    while (b > 0 && (n_above += buckets[b]) < rank) b--;
    return b;
}

/* Variance of the count of large elements in the sample, relative to independent elements: 1 if large elements are
 * scattered, LINE if they come in whole lines. */
static double measure_clump(const tagc_sample_shape *shape, const uint32_t *sample, uint32_t at_least) {
    uint64_t sum = 0, sum_of_squares = 0; /* gcc 12 miscompiles sums of double here for aarch64 at -O3 */
    for (size_t w = 0; w < shape->n_windows; w++) {
        uint64_t n_large = 0;
        for (size_t i = 0; i < LINE; i++) n_large += sample[w * LINE + i] >= at_least;
        sum += n_large;
        sum_of_squares += n_large * n_large;
    }
    if (sum < 64) return LINE; /* too few to tell, and too few for a wide band to cost much */
    double clump = (double)sum_of_squares / (double)sum - (double)sum / (double)shape->n_windows;
    return fmin(fmax(clump, 0.5), LINE);
}

void tagc_sample_predict(const tagc_sample_shape *shape, const tagc_addends *addends, uint32_t *sample,
                         uint32_t *buckets, uint32_t *t_lo, uint32_t *t_hi) {
    if (!shape->n_windows) return;
    int is_lines = shape->unit == LINE, shift = shape->bucket_shift;
    memset(buckets, 0, tagc_sample_buckets(shape) * sizeof *buckets);
    uint32_t max_bits =
        is_lines ? take_lines(shape, addends, sample, buckets) : take_elements(shape, addends, buckets);
    uint32_t top = max_bits >> shift;
    double expected = shape->expected, clump = 1;
    if (is_lines) clump = measure_clump(shape, sample, bucket_of_rank(buckets, top, expected) << shift);
    double margin = margin_of(expected, clump);
    uint32_t low = bucket_of_rank(buckets, top, expected + margin) << shift;
    if (low > *t_lo) *t_lo = low;
    if (expected > margin) *t_hi = (bucket_of_rank(buckets, top, expected - margin) + 1) << shift;
}
