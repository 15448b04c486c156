/* Bitmaps and packed byte sums against one char per element. */
#define RANDOM_SEED 1
#include "sets.h"

static const double densities[] = {0, 0.001, 0.0125, 0.1, 0.5, 0.9, 1};
enum { N_DENSITIES = sizeof densities / sizeof *densities };

static void check_bitmap(size_t n, double density) {
    set a = set_make(n, density), b = set_make(n, 0.3);
    uint8_t *bits = dirty_bytes(tagc_bitmap_bytes(n)), *more = dirty_bytes(tagc_bitmap_bytes(n));
    tagc_bitmap_make(bits, n, a.indices, a.n_set);
    assert_bits(bits, n, a.is_set);
    assert_int_equal(tagc_bitmap_count(bits, n), a.n_set);
    assert_int_equal(tagc_bitmap_count_reference(bits, n), a.n_set);
    uint32_t *found = malloc(a.n_set * sizeof(uint32_t) + 1);
    assert_int_equal(tagc_bitmap_indices(bits, n, found), a.n_set);
    assert_memory_equal(found, a.indices, a.n_set * sizeof(uint32_t));
    memset(found, 0, a.n_set * sizeof(uint32_t));
    assert_int_equal(tagc_bitmap_indices_reference(bits, n, found), a.n_set);
    assert_memory_equal(found, a.indices, a.n_set * sizeof(uint32_t));

    tagc_bitmap_make(more, n, b.indices, b.n_set);
    tagc_bitmap_or(bits, more, n);
    for (size_t i = 0; i < n; i++) a.is_set[i] |= b.is_set[i];
    assert_bits(bits, n, a.is_set);
    free(found), free(bits), free(more);
    set_free(&a), set_free(&b);
}

TEST(bitmaps_hold_what_was_put_in) {
    for (int s = 0; s < N_SIZES; s++)
        for (int d = 0; d < N_DENSITIES; d++) check_bitmap(sizes[s], densities[d]);
}

TEST(bits_past_the_end_are_invalid) {
    for (size_t n = 1; n < 200; n++) {
        uint8_t bits[32] = {0};
        for (size_t i = n; i < 8 * tagc_bitmap_bytes(n); i++) {
            bits[i / 8] ^= (uint8_t)(1 << (i % 8));
            assert_int_equal(tagc_bitmap_valid(bits, n), 0);
            bits[i / 8] ^= (uint8_t)(1 << (i % 8));
        }
        assert_int_equal(tagc_bitmap_valid(bits, n), 1);
    }
}

/* Bytes of a bitmap whose size is no multiple of 8 may carry into bits that are no elements: those are
 * cleared. */
TEST(byte_sums_are_byte_sums) {
    for (int s = 0; s < N_SIZES; s++) {
        size_t n = sizes[s], n_bytes = tagc_bitmap_bytes(n);
        set a = set_make(n, 0.5), b = set_make(n, 0.5);
        uint8_t *x = dirty_bytes(n_bytes), *y = dirty_bytes(n_bytes), *sum = calloc(n_bytes + 1, 1);
        tagc_bitmap_make(x, n, a.indices, a.n_set);
        tagc_bitmap_make(y, n, b.indices, b.n_set);
        for (size_t i = 0; i < n_bytes; i++) sum[i] = (uint8_t)(x[i] + y[i]);
        for (size_t i = n; i < 8 * n_bytes; i++) sum[i / 8] &= (uint8_t) ~(1u << (i % 8));
        tagc_bitmap_add_bytes(x, y, n);
        assert_memory_equal(x, sum, n_bytes);
        assert_int_equal(tagc_bitmap_valid(x, n), 1);
        free(x), free(y), free(sum);
        set_free(&a), set_free(&b);
    }
}

/* Two ranks keep 1.25 % each, 30 % of that in common. */
TEST(summing_packed_bytes_loses_what_or_keeps) {
    enum { N = 400000 };
    set a = set_make(N, 0.0125), b = set_make(N, 0);
    b.indices = realloc(b.indices, N * sizeof(uint32_t));
    for (size_t i = 0; i < N; i++) {
        double common = a.is_set[i] ? 0.3 : 0.0125 * 0.7 / (1 - 0.0125);
        if (random_uniform() < common) b.is_set[i] = 1, b.indices[b.n_set++] = (uint32_t)i;
    }
    size_t n_bytes = tagc_bitmap_bytes(N), n_union = 0;
    uint8_t *x = dirty_bytes(n_bytes), *y = dirty_bytes(n_bytes), *both = dirty_bytes(n_bytes);
    tagc_bitmap_make(x, N, a.indices, a.n_set);
    tagc_bitmap_make(y, N, b.indices, b.n_set);
    memcpy(both, x, n_bytes);
    tagc_bitmap_or(both, y, N);
    tagc_bitmap_add_bytes(x, y, N);
    size_t lost = 0, spurious = 0;
    for (size_t i = 0; i < N; i++) {
        int sent = a.is_set[i] || b.is_set[i];
        n_union += (size_t)sent;
        assert_int_equal(bit_of(both, i), sent);
        lost += sent && !bit_of(x, i);
        spurious += !sent && bit_of(x, i);
    }
    assert_in_range(lost * 1000 / n_union, 160, 200);
    assert_in_range(spurious * 1000 / n_union, 140, 180);
    free(x), free(y), free(both);
    set_free(&a), set_free(&b);
}
