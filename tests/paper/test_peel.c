/* The sketch's shapes and hashes, that supports as they occur peel, and that the peeling is the peeling which a
 * brute force finds. */
#include "sketch_supports.h"

#ifdef TAGC_SANITIZED
enum { N_SEEDS = 12, N_BIG_SEEDS = 1, N_SMALL_SEEDS = 200, SLOW = 1 };
#else
enum { N_SEEDS = 100, N_BIG_SEEDS = 3, N_SMALL_SEEDS = 1000, SLOW = 0 };
#endif

static size_t unpeeled(size_t n, size_t n_cells, uint64_t seed, const uint32_t *indices, size_t n_items) {
    bench b = bench_make(n, n_cells, seed, indices, n_items);
    size_t n_left = n_items - b.peeling.n_peeled;
    bench_free(&b);
    return n_left;
}

/* ---- shapes and hashes ---- */

TEST(shapes_keep_their_promises) {
    for (int trial = 0; trial < 20000; trial++) {
        size_t asked = (size_t)exp2(random_uniform() * 31.9);
        tagc_sketch s;
        tagc_sketch_init(&s, 1000, asked, 7);
        assert_int_equal(s.n_cells, 3 * s.n_rows * s.width);
        assert_true(s.width >= 1 && s.width <= 1024 && (s.width & (s.width - 1)) == 0);
        assert_true(s.n_cells >= asked && s.n_cells >= 96 && s.n_cells <= UINT32_MAX);
        if (asked >= 12288) assert_true(s.n_cells - asked <= asked / 4096);
        if (asked >= 96 && asked < 12288) assert_true(s.n_cells - asked <= 2);
    }
    tagc_sketch s;
    tagc_sketch_init(&s, 1000, SIZE_MAX, 0);
    assert_true(s.n_cells <= UINT32_MAX);
    tagc_sketch_init(&s, 1000, 0, 0);
    assert_int_equal(s.n_cells, 96);
    tagc_sketch_init(&s, 2359296, 235930, 0); /* the example of sketch.c */
    assert_int_equal(s.width, 16);
    assert_int_equal(s.n_rows, 4916);
}

TEST(all_processors_find_the_same_cells) {
    for (int trial = 0; trial < 300; trial++) {
        tagc_sketch s;
        tagc_sketch_init(&s, UINT32_MAX, (size_t)exp2(5 + random_uniform() * 26.9), random_u64());
        tagc_locator locator;
        tagc_locator_init(&locator, &s);
        uint32_t indices[TAGC_LOCATE_CHUNK];
        for (int k = 0; k < TAGC_LOCATE_CHUNK; k++) indices[k] = (uint32_t)random_u64();
        size_t n = trial < 40 ? (size_t)trial : TAGC_LOCATE_CHUNK;
        tagc_located plain, best, avx2;
        memset(&plain, 0, sizeof plain), memset(&best, 0, sizeof best), memset(&avx2, 0, sizeof avx2);
        tagc_locate_reference(&locator, indices, n, &plain);
        tagc_locate(&locator, indices, n, &best);
        for (int t = 0; t < 3; t++) {
            assert_memory_equal(plain.cell[t], best.cell[t], sizeof plain.cell[t]);
            for (size_t k = 0; k < n; k++) assert_int_equal(plain.cell[t][k] / (s.n_rows * s.width), t);
        }
        for (size_t k = 0; k < n; k++) assert_int_equal((plain.signs[k] ^ best.signs[k]) >> 29, 0);
        if (tagc_locate_avx2(&locator, indices, n, &avx2)) {
            assert_memory_equal(plain.cell, avx2.cell, sizeof plain.cell);
            for (size_t k = 0; k < n; k++) assert_int_equal((plain.signs[k] ^ avx2.signs[k]) >> 29, 0);
        }
    }
}

/* Ranks with different builds must find the same cells. The numbers are those of a program in Python. */
TEST(cells_stay_where_they_are) {
    static const struct {
        uint32_t index, cells[3], signs;
    } known[] = {
        {0, {52895, 109566, 203291}, 3},
        {1, {52894, 109567, 203290}, 0},
        {4097, {36580, 80479, 202812}, 5},
        {2359295, {42638, 89762, 189770}, 6},
    };
    tagc_sketch s;
    tagc_sketch_init(&s, 2359296, 235930, 7);
    tagc_locator locator;
    tagc_locator_init(&locator, &s);
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        tagc_located at;
        tagc_locate_reference(&locator, &known[i].index, 1, &at);
        for (int t = 0; t < 3; t++) assert_int_equal(at.cell[t][0], known[i].cells[t]);
        assert_int_equal(at.signs[0] >> 29, known[i].signs);
    }
}

/* Items of one row never meet; the three signs are balanced and agree by chance only. */
TEST(hashes_spread) {
    tagc_sketch s;
    tagc_sketch_init(&s, 1 << 30, 3 * 1024 * 4096, 5);
    assert_int_equal(s.width, 1024);
    tagc_locator locator;
    tagc_locator_init(&locator, &s);
    tagc_located at;
    uint32_t indices[TAGC_LOCATE_CHUNK];
    int n_negative[3] = {0}, n_agree[3] = {0}, n_items = 0;
    for (int row = 0; row < 400; row++) {
        for (int k = 0; k < TAGC_LOCATE_CHUNK; k++) indices[k] = (uint32_t)(row * 1024 + 4 * k + row % 4);
        tagc_locate(&locator, indices, TAGC_LOCATE_CHUNK, &at);
        for (int t = 0; t < 3; t++) {
            char seen[1024] = {0};
            for (int k = 0; k < TAGC_LOCATE_CHUNK; k++) {
                assert_int_equal(at.cell[t][k] / 1024, at.cell[t][0] / 1024);
                assert_false(seen[at.cell[t][k] % 1024]++);
                n_negative[t] += at.signs[k] >> (31 - t) & 1;
                n_agree[t] += (at.signs[k] >> (31 - t) & 1) == (at.signs[k] >> (31 - (t + 1) % 3) & 1);
            }
        }
        n_items += TAGC_LOCATE_CHUNK;
    }
    double five_sigma = 2.5 * sqrt(n_items);
    for (int t = 0; t < 3; t++) {
        assert_true(fabs(n_negative[t] - 0.5 * n_items) < five_sigma);
        assert_true(fabs(n_agree[t] - 0.5 * n_items) < five_sigma);
    }
}

/* ---- peeling ---- */

/* The published setting: a tenth as many cells as elements, unions of 2 and 4 ranks that keep 1.25 %. */
TEST(gpt2_matrices_peel_at_ten_times) {
    enum { N = 2359296 };
    uint32_t *indices = malloc(N * sizeof *indices);
    for (size_t n = N; n >= N / 4; n /= 2)
        for (int u = 0; u < 2; u++) {
            size_t n_items = 0;
            for (int seed = 0; seed < N_SEEDS; seed++) {
                if (seed % 10 == 0) n_items = support_make(SCATTERED, n, u ? 0.05 : 0.025, indices);
                assert_int_equal(unpeeled(n, n / 10, (uint64_t)seed, indices, n_items), 0);
            }
        }
    free(indices);
}

TEST(embedding_peels_at_ten_times) {
    size_t n = SLOW ? 4000037 : 38597376;
    uint32_t *indices = malloc(n / 4 * sizeof *indices);
    for (int kind = SCATTERED; kind <= ROWS; kind++) {
        size_t n_items = support_make(kind, n, kind == ROWS ? 0.04 : 0.05, indices);
        for (int seed = 0; seed < N_BIG_SEEDS; seed++) {
            assert_int_equal(unpeeled(n, n / 10, (uint64_t)seed, indices, n_items), 0);
            assert_int_equal(unpeeled(n, n_items * 4 / 3, (uint64_t)seed, indices, n_items), 0);
        }
    }
    free(indices);
}

/* The same for the shards of the token embedding (50304 x 768) at W = 2 and 4. */
TEST(embedding_shards_peel_at_ten_times) {
    size_t n = SLOW ? 4000037 : 38633472;
    uint32_t *indices = malloc(n / 40 * sizeof *indices);
    for (size_t world_size = 2; world_size <= 4; world_size += 2) {
        size_t shard = n / world_size, n_items = 0;
        for (int seed = 0; seed < N_SEEDS; seed++) {
            if (seed % 20 == 0)
                n_items = support_make(SCATTERED, shard, 0.0125 * (double)world_size, indices);
            assert_int_equal(unpeeled(shard, shard / 10, (uint64_t)seed, indices, n_items), 0);
        }
    }
    free(indices);
}

/* Expected failures of all these seeds together: 0.02 at load 0.5, 0.1 at 0.75 (see sketch.c); one is let
 * pass. */
TEST(structured_supports_peel_as_scattered_ones_do) {
    enum { N = 2359296 };
    uint32_t *indices = malloc(N * sizeof *indices);
    for (int load = 2; load <= 3; load++) {
        int n_failed = 0;
        for (int kind = 0; kind < N_SHAPES; kind++)
            for (int seed = 0; seed < N_SEEDS / 3; seed++) {
                size_t n_items = support_make(kind, N, 0.05, indices);
                n_failed += unpeeled(N, n_items * 4 / (size_t)load, (uint64_t)seed, indices, n_items) != 0;
            }
        assert_true(n_failed <= 1);
    }
    free(indices);
}

/* In a small sketch two items share all their cells now and then, 4.5 load^2 * 3 / n_cells: another seed
 * helps. */
TEST(small_odd_sizes_peel_with_another_seed) {
    const size_t sizes[] = {17, 333, 1001, 2007, 10007, 50021};
    for (int s = 0; s < 6; s++) {
        size_t n = sizes[s], n_failed = 0;
        uint32_t *indices = malloc(n * sizeof *indices);
        double expected = 0;
        for (int trial = 0; trial < N_SMALL_SEEDS; trial++) {
            size_t n_items = support_make(trial % 2 ? SCATTERED : STRIDE, n, 0.05, indices);
            int seed = 0;
            while (unpeeled(n, n / 10, (uint64_t)(trial + 10000 * seed), indices, n_items)) seed++;
            assert_true(seed < 8);
            n_failed += seed > 0;
            double n_cells = n < 960 ? 96 : (double)n / 10;
            expected += 13.5 * pow((double)n_items / n_cells, 2) / n_cells;
        }
        assert_true((double)n_failed < 1.5 * expected + 6 * sqrt(expected) + 6);
        free(indices);
    }
}

/* Peels one item at a time, in any order: what stays is the 2-core whatever the order. stays (n_items). */
static void brute_force(const tagc_sketch *s, const uint32_t *indices, size_t n_items, uint32_t *cells,
                        char *stays) {
    tagc_locator locator;
    tagc_locator_init(&locator, s);
    uint32_t *counts = calloc(s->n_cells, sizeof *counts);
    tagc_located at;
    for (size_t j = 0; j < n_items; j++) {
        tagc_locate_reference(&locator, &indices[j], 1, &at);
        for (int t = 0; t < 3; t++) counts[cells[3 * j + (size_t)t] = at.cell[t][0]]++;
        stays[j] = 1;
    }
    for (int changed = 1; changed;) {
        changed = 0;
        for (size_t j = n_items; j-- > 0;) {
            const uint32_t *c = &cells[3 * j];
            if (!stays[j] || (counts[c[0]] != 1 && counts[c[1]] != 1 && counts[c[2]] != 1)) continue;
            stays[j] = 0;
            changed = 1;
            for (int t = 0; t < 3; t++) counts[c[t]]--;
        }
    }
    free(counts);
}

/* The order is a permutation, each peeled item is alone in its cell when its turn comes, rounds ascend, and
 * the leftovers are the brute force's. */
static void check_peeling(const tagc_peeling *peeling, const tagc_sketch *s, const uint32_t *indices,
                          size_t n_items) {
    uint32_t *cells = malloc((3 * n_items + 1) * sizeof *cells);
    uint32_t *counts = calloc(s->n_cells, sizeof *counts);
    char *stays = malloc(n_items + 1), *seen = calloc(n_items + 1, 1);
    brute_force(s, indices, n_items, cells, stays);
    size_t n_stay = 0;
    for (size_t j = 0; j < n_items; j++) {
        n_stay += (size_t)stays[j];
        for (int t = 0; t < 3; t++) counts[cells[3 * j + (size_t)t]]++;
    }
    assert_int_equal(peeling->n_items, n_items);
    assert_int_equal(peeling->n_peeled, n_items - n_stay);
    for (size_t q = 0; q < n_items; q++) {
        uint32_t j = peeling->order[q];
        assert_true(j < n_items);
        assert_false(seen[j]++);
        assert_int_equal(stays[j], q >= peeling->n_peeled);
        if (q >= peeling->n_peeled) {
            assert_true(q == peeling->n_peeled || j > peeling->order[q - 1]);
            continue;
        }
        int is_own = 0;
        for (int t = 0; t < 3; t++) is_own |= cells[3 * j + (size_t)t] == peeling->cell[q];
        assert_true(is_own);
        assert_int_equal(counts[peeling->cell[q]], 1);
        for (int t = 0; t < 3; t++) counts[cells[3 * j + (size_t)t]]--;
    }
    for (int r = 0; r < peeling->n_rounds; r++)
        for (size_t q = r ? peeling->round_end[r - 1] : 0; q + 1 < peeling->round_end[r]; q++)
            assert_true(peeling->order[q] < peeling->order[q + 1]);
    if (peeling->n_rounds) assert_int_equal(peeling->round_end[peeling->n_rounds - 1], peeling->n_peeled);
    free(cells), free(counts), free(stays), free(seen);
}

TEST(peelings_are_what_brute_force_finds) {
    const size_t sizes[] = {0, 1, 16, 300, 5000, SLOW ? 20000 : 200000};
    const double loads[] = {0.1, 0.5, 0.75, 0.8, 0.85, 0.98, 3, 60};
    uint32_t *indices = malloc(200000 * sizeof *indices);
    for (int s = 0; s < 6; s++)
        for (int l = 0; l < 8; l++)
            for (int kind = 0; kind < N_SHAPES; kind++) {
                size_t n = sizes[s], n_items = support_make(kind, n, n < 1000 ? 0.5 : 0.1, indices);
                bench b = bench_make(n, (size_t)((double)n_items / loads[l]), random_u64(), indices, n_items);
                check_peeling(&b.peeling, &b.sketch, indices, n_items);
                tagc_peeling again;
                void *memory = malloc(tagc_peeling_bytes(n_items));
                tagc_peeling_place(&again, memory, n_items);
                tagc_peeling_make_reference(&again, &b.sketch, indices, n_items, b.scratch);
                assert_int_equal(again.n_rounds, b.peeling.n_rounds);
                assert_memory_equal(again.order, b.peeling.order, n_items * sizeof *again.order);
                assert_memory_equal(again.cell, b.peeling.cell, b.peeling.n_peeled * sizeof *again.cell);
                free(memory);
                bench_free(&b);
            }
    free(indices);
}

/* W = 8 independent supports at 98.75 % and n / 10 cells: load 0.957. */
TEST(overload_leaves_the_core) {
    size_t n = SLOW ? 60000 : 400000;
    uint32_t *indices = malloc(n * sizeof *indices);
    size_t n_items = support_make(SCATTERED, n, 1 - pow(0.9875, 8), indices);
    bench b = bench_make(n, n / 10, 1, indices, n_items);
    assert_true(b.peeling.n_peeled > 0 && b.peeling.n_peeled < n_items / 2);
    check_peeling(&b.peeling, &b.sketch, indices, n_items);
    bench_free(&b);
    free(indices);
}

/* Cells with more items than a byte can count: the peeling may give up, but what it says must hold. */
TEST(crowded_cells_are_left_alone) {
    enum { N = 40000 };
    uint32_t *indices = malloc(N * sizeof *indices);
    for (uint32_t i = 0; i < N; i++) indices[i] = i;
    bench b = bench_make(N, 96, 1, indices, N); /* 1250 items per cell */
    assert_int_equal(b.peeling.n_peeled, 0);
    for (uint32_t i = 0; i < N; i++) assert_int_equal(b.peeling.order[i], i);
    bench_free(&b);
    free(indices);
}

/* 300 items of which all share one cell, and nearly none another: they all peel, but never by the shared cell
 * before the last one. A count that wrapped, or that came down from its limit, would say otherwise. */
TEST(a_crowded_cell_frees_no_one) {
    tagc_sketch s;
    tagc_sketch_init(&s, UINT32_MAX, 12288, 1);
    tagc_locator locator;
    tagc_locator_init(&locator, &s);
    uint32_t indices[300];
    size_t n_items = 0;
    for (uint32_t i = 0; n_items < 300; i++) {
        tagc_located at;
        tagc_locate(&locator, &i, 1, &at);
        if (at.cell[0][0] == 1234) indices[n_items++] = i;
    }
    bench b = bench_make(UINT32_MAX, 12288, 1, indices, n_items);
    assert_true(b.peeling.n_peeled > 290);
    check_peeling(&b.peeling, &b.sketch, indices, n_items);
    bench_free(&b);
}
