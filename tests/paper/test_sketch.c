/* Values through the sketch: that they come back, and that wrong indices and overload show. */
#include "sketch_supports.h"

#ifdef TAGC_SANITIZED
enum { SLOW = 1 };
#else
enum { SLOW = 0 };
#endif

/* Close to normal, and not zero. */
static float next_value(void) {
    double sum = -6;
    for (int i = 0; i < 12; i++) sum += random_uniform();
    return sum == 0 ? 1 : (float)sum;
}

/* ---- values ---- */

TEST(fp32_values_come_back_to_rounding) {
    enum { N = SLOW ? 300000 : 2359296 };
    const double loads[] = {0.25, 0.5, 0.75}, limits[] = {5e-8, 1e-7, 5e-7};
    uint32_t *indices = malloc(N * sizeof *indices);
    for (int l = 0; l < 3; l++)
        for (int kind = SCATTERED; kind <= ONE_RUN; kind++) {
            size_t n_items = support_make(kind, N, 0.05, indices);
            float *values = malloc(n_items * sizeof *values), *found = malloc(n_items * sizeof *found);
            for (size_t j = 0; j < n_items; j++) values[j] = next_value();
            bench b = bench_make(N, (size_t)((double)n_items / loads[l]), 1, indices, n_items);
            assert_int_equal(b.peeling.n_peeled, n_items);
            float *cells = calloc(b.sketch.n_cells, sizeof *cells);
            tagc_sketch_encode(TAGC_CELLS_FP32, &b.sketch, indices, values, n_items, cells);
            tagc_peeling_replay(TAGC_CELLS_FP32, &b.peeling, &b.sketch, indices, cells, found);
            double error = 0, total = 0;
            for (size_t j = 0; j < n_items; j++) {
                error += pow((double)found[j] - values[j], 2);
                total += pow(values[j], 2);
            }
            assert_true(sqrt(error / total) < limits[l]);
            assert_false(tagc_peeling_dirty(TAGC_CELLS_FP32, &b.peeling, &b.sketch, cells, 1e-4f));
            free(values), free(found), free(cells);
            bench_free(&b);
        }
    free(indices);
}

/* W ranks' own items in fixed point: encoded apart, added modulo 2^32, peeled with the union. */
typedef struct world {
    size_t n, n_union;
    uint32_t *joint;
    int32_t *sums;  /* (n_union) of the rounded values */
    int32_t *cells; /* of all ranks */
    bench b;
} world;

static world world_make(size_t n, int n_ranks, double density, double load) {
    world w = {.n = n, .joint = malloc(n * sizeof(uint32_t))};
    uint32_t **indices = malloc((size_t)n_ranks * sizeof *indices);
    size_t *n_items = malloc((size_t)n_ranks * sizeof *n_items);
    int32_t *dense = calloc(n, sizeof *dense);
    char *in_union = calloc(n, 1);
    for (int rank = 0; rank < n_ranks; rank++) {
        indices[rank] = malloc(n * sizeof(uint32_t));
        n_items[rank] = support_make(SCATTERED, n, density, indices[rank]);
        for (size_t k = 0; k < n_items[rank]; k++) in_union[indices[rank][k]] = 1;
    }
    for (size_t i = 0; i < n; i++)
        if (in_union[i]) w.joint[w.n_union++] = (uint32_t)i;
    w.b = bench_make(n, (size_t)((double)w.n_union / load), 9, w.joint, w.n_union);
    w.cells = calloc(w.b.sketch.n_cells, sizeof *w.cells);
    int exponent = tagc_sketch_scale_exponent(8, n_ranks);
    for (int rank = 0; rank < n_ranks; rank++) {
        float *values = malloc(n * sizeof *values);
        int32_t *fixed = malloc(n * sizeof *fixed), *cells = calloc(w.b.sketch.n_cells, sizeof *cells);
        for (size_t k = 0; k < n_items[rank]; k++) values[k] = next_value();
        tagc_sketch_round(values, n_items[rank], exponent, fixed);
        tagc_sketch_encode(TAGC_CELLS_FIXED, &w.b.sketch, indices[rank], fixed, n_items[rank], cells);
        for (size_t k = 0; k < n_items[rank]; k++) {
            assert_int_equal(fixed[k], (int32_t)rint(ldexp(values[k], exponent)));
            dense[indices[rank][k]] += fixed[k];
        }
        for (size_t c = 0; c < w.b.sketch.n_cells; c++)
            w.cells[c] = (int32_t)((uint32_t)w.cells[c] + (uint32_t)cells[c]);
        free(values), free(fixed), free(cells), free(indices[rank]);
    }
    w.sums = malloc(w.n_union * sizeof *w.sums + 1);
    for (size_t j = 0; j < w.n_union; j++) w.sums[j] = dense[w.joint[j]];
    free(indices), free(n_items), free(dense), free(in_union);
    return w;
}

static void world_free(world *w) {
    free(w->joint), free(w->sums), free(w->cells);
    bench_free(&w->b);
}

TEST(fixed_point_is_exact) {
    for (int n_ranks = 1; n_ranks <= 8; n_ranks += n_ranks < 4 ? 1 : 4) {
        world w = world_make(SLOW ? 60000 : 400000, n_ranks, 0.0125, 0.75);
        assert_int_equal(w.b.peeling.n_peeled, w.n_union);
        int32_t *found = malloc(w.n_union * sizeof *found);
        tagc_peeling_replay(TAGC_CELLS_FIXED, &w.b.peeling, &w.b.sketch, w.joint, w.cells, found);
        assert_memory_equal(found, w.sums, w.n_union * sizeof *found);
        assert_false(tagc_peeling_dirty(TAGC_CELLS_FIXED, &w.b.peeling, &w.b.sketch, w.cells, 0));
        for (size_t c = 0; c < w.b.sketch.n_cells; c++) assert_int_equal(w.cells[c], 0);
        free(found);
        world_free(&w);
    }
}

TEST(fixed_point_rounds_to_even) {
    const float values[] = {0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 1e-40f, -2.5000002f};
    const int32_t expected[] = {0, 2, 2, 0, -2, 0, -3};
    int32_t fixed[7];
    tagc_sketch_round(values, 7, 0, fixed);
    assert_memory_equal(fixed, expected, sizeof fixed);
}

TEST(scale_is_the_largest_that_fits) {
    assert_int_equal(tagc_sketch_scale_exponent(0, 4), 0);
    for (int trial = 0; trial < 100000; trial++) {
        float max_abs = ldexpf(0.5f + (float)random_uniform() / 2, (int)(random_u64() % 270) - 140);
        if (trial % 7 == 0) max_abs = ldexpf(1, (int)(random_u64() % 200) - 100);
        if (trial % 7 == 1) max_abs = nextafterf(ldexpf(1, (int)(random_u64() % 200) - 100), 0);
        int n_ranks = trial % 3 ? 1 + (int)(random_u64() % 1024) : 1 << (trial % 11);
        if (max_abs == 0 || isinf(max_abs)) continue;
        int e = tagc_sketch_scale_exponent(max_abs, n_ranks);
        assert_in_range(e + 126, 0, 252);
        assert_true(rint(ldexp(max_abs, e)) * n_ranks < 0x1p31);
        if (e < 126) assert_true(rint(ldexp(max_abs, e + 1)) * n_ranks >= 0x1p31);
    }
}

/* ---- wrong indices and overload ---- */

/* Items [0, n_items) as encoded; the planner is given the indices without item `missing` and with `spurious`.
 */
static void check_wrong_index(int is_missing) {
    enum { N = 20000 };
    uint32_t *indices = malloc(N * sizeof *indices), *wrong = malloc(N * sizeof *wrong);
    float *values = malloc(N * sizeof *values), *found = malloc(N * sizeof *found);
    int32_t *fixed = malloc(N * sizeof *fixed), *found_fixed = malloc(N * sizeof *found_fixed);
    for (int trial = 0; trial < 50; trial++) {
        size_t n_items = support_make(SCATTERED, N, 0.05, indices), n_wrong = 0;
        for (size_t j = 0; j < n_items; j++) values[j] = next_value() < 0 ? -1 : 1;
        size_t victim = (size_t)random_u64() % n_items;
        for (size_t j = 0; j < n_items; j++) {
            if (j != victim || !is_missing) wrong[n_wrong++] = indices[j];
            if (j == victim && !is_missing && indices[j] + 1 < N &&
                (j + 1 == n_items || indices[j + 1] > indices[j] + 1))
                wrong[n_wrong++] = indices[j] + 1;
        }
        bench right = bench_make(N, N / 10, (uint64_t)trial, indices, n_items);
        bench b = bench_make(N, N / 10, (uint64_t)trial, wrong, n_wrong);
        if (right.peeling.n_peeled == n_items && b.peeling.n_peeled == n_wrong) {
            float *cells = calloc(b.sketch.n_cells, sizeof *cells);
            int32_t *cells_fixed = calloc(b.sketch.n_cells, sizeof *cells_fixed);
            tagc_sketch_encode(TAGC_CELLS_FP32, &b.sketch, indices, values, n_items, cells);
            tagc_sketch_round(values, n_items, 20, fixed);
            tagc_sketch_encode(TAGC_CELLS_FIXED, &b.sketch, indices, fixed, n_items, cells_fixed);
            tagc_peeling_replay(TAGC_CELLS_FP32, &b.peeling, &b.sketch, wrong, cells, found);
            tagc_peeling_replay(TAGC_CELLS_FIXED, &b.peeling, &b.sketch, wrong, cells_fixed, found_fixed);
            assert_int_equal(tagc_peeling_dirty(TAGC_CELLS_FP32, &b.peeling, &b.sketch, cells, 1e-3f),
                             is_missing);
            assert_int_equal(tagc_peeling_dirty(TAGC_CELLS_FIXED, &b.peeling, &b.sketch, cells_fixed, 0),
                             is_missing);
            for (size_t j = 0, k = 0; j < n_wrong && !is_missing; j++) {
                int is_spurious = wrong[j] != indices[k];
                assert_int_equal(found_fixed[j], is_spurious ? 0 : fixed[k]);
                assert_true(fabsf(found[j] - (is_spurious ? 0 : values[k])) < 1e-4f);
                k += !is_spurious;
            }
            free(cells), free(cells_fixed);
        }
        bench_free(&right), bench_free(&b);
    }
    free(indices), free(wrong), free(values), free(found), free(fixed), free(found_fixed);
}

TEST(a_spurious_bit_peels_to_zero) {
    check_wrong_index(0);
}

TEST(a_missing_bit_is_seen) {
    check_wrong_index(1);
}

TEST(not_a_number_is_dirty) {
    const uint32_t index = 5;
    bench b = bench_make(100, 96, 0, &index, 1);
    float *cells = calloc(b.sketch.n_cells, sizeof *cells);
    assert_false(tagc_peeling_dirty(TAGC_CELLS_FP32, &b.peeling, &b.sketch, cells, 0));
    cells[95] = NAN;
    assert_true(tagc_peeling_dirty(TAGC_CELLS_FP32, &b.peeling, &b.sketch, cells, 1e30f));
    free(cells);
    bench_free(&b);
}

static int by_value(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* W = 8 independent supports at 98.75 %, n / 10 cells: load 0.956, most of it cannot peel. */
TEST(overload_is_estimated) {
    size_t n = SLOW ? 60000 : 400000;
    world w = world_make(n, 8, 0.0125, 0.956);
    assert_true(w.b.peeling.n_peeled < w.n_union / 2);
    int32_t *found = malloc(w.n_union * sizeof *found);
    float *found_float = malloc(w.n_union * sizeof *found_float);
    float *cells = malloc(w.b.sketch.n_cells * sizeof *cells);
    tagc_peeling_replay(TAGC_CELLS_FIXED, &w.b.peeling, &w.b.sketch, w.joint, w.cells, found);
    for (size_t q = 0; q < w.n_union; q++) {
        uint32_t j = w.b.peeling.order[q];
        assert_int_equal(found[j], q < w.b.peeling.n_peeled ? w.sums[j] : 0);
    }
    assert_false(tagc_peeling_dirty(TAGC_CELLS_FIXED, &w.b.peeling, &w.b.sketch, w.cells, 0));
    tagc_peeling_estimate(TAGC_CELLS_FIXED, &w.b.peeling, &w.b.sketch, w.joint, w.cells, found);
    for (size_t c = 0; c < w.b.sketch.n_cells; c++) cells[c] = (float)w.cells[c];
    assert_false(tagc_peeling_dirty(TAGC_CELLS_FP32, &w.b.peeling, &w.b.sketch, cells, 0));
    tagc_peeling_estimate(TAGC_CELLS_FP32, &w.b.peeling, &w.b.sketch, w.joint, cells, found_float);
    tagc_locator locator;
    tagc_locator_init(&locator, &w.b.sketch);
    for (size_t q = w.b.peeling.n_peeled; q < w.n_union; q++) {
        uint32_t j = w.b.peeling.order[q];
        tagc_located at;
        tagc_locate_reference(&locator, &w.joint[j], 1, &at);
        int32_t v[3];
        for (int t = 0; t < 3; t++) {
            int32_t cell = w.cells[at.cell[t][0]];
            v[t] = at.signs[0] >> (31 - t) & 1 ? -cell : cell;
        }
        qsort(v, 3, sizeof *v, by_value);
        assert_int_equal(found[j], v[1]);
        assert_true(found_float[j] == (float)v[1]);
    }
    free(found), free(found_float), free(cells);
    world_free(&w);
}
