/* Bitmaps, nibbles and packed byte sums against one char per element. */
#define RANDOM_SEED 1
#include "codec/bitmap.h"
#include "codec/paper/nibble.h"
#include "random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* One char per element and its ascending positions; both exactly as long as needed, so that ASan sees a step
 * over. */
typedef struct set {
    size_t n, n_set;
    char *is_set;
    uint32_t *indices;
} set;

static set set_make(size_t n, double density) {
    set s = {.n = n, .is_set = malloc(n + 1)};
    for (size_t i = 0; i < n; i++) s.n_set += s.is_set[i] = random_uniform() < density;
    s.indices = malloc(s.n_set * sizeof(uint32_t) + 1);
    for (size_t i = 0, k = 0; i < n; i++)
        if (s.is_set[i]) s.indices[k++] = (uint32_t)i;
    return s;
}

static void set_free(set *s) {
    free(s->is_set);
    free(s->indices);
}

/* Room for n_bytes that nothing has cleared. */
static uint8_t *dirty_bytes(size_t n_bytes) {
    uint8_t *bytes = malloc(n_bytes + 1);
    memset(bytes, 0xa5, n_bytes + 1);
    return bytes;
}

static int bit_of(const uint8_t *bits, size_t i) {
    return bits[i / 8] >> (i % 8) & 1;
}

static void assert_bits(const uint8_t *bits, size_t n, const char *expected) {
    for (size_t i = 0; i < n; i++) assert_int_equal(bit_of(bits, i), expected[i] != 0);
    for (size_t i = n; i < 8 * tagc_bitmap_bytes(n); i++) assert_int_equal(bit_of(bits, i), 0);
    assert_int_equal(tagc_bitmap_valid(bits, n), 1);
}

static const size_t sizes[] = {0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 4095, 4097, 60011};
static const double densities[] = {0, 0.001, 0.0125, 0.1, 0.5, 0.9, 1};
enum { N_SIZES = sizeof sizes / sizeof *sizes, N_DENSITIES = sizeof densities / sizeof *densities };

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

static void bitmaps_hold_what_was_put_in(void **state) {
    (void)state;
    for (int s = 0; s < N_SIZES; s++)
        for (int d = 0; d < N_DENSITIES; d++) check_bitmap(sizes[s], densities[d]);
}

static void bits_past_the_end_are_invalid(void **state) {
    (void)state;
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

static void nibbles_count_up_to_15_ranks(void **state) {
    (void)state;
    for (int s = 0; s < N_SIZES; s++) {
        size_t n = sizes[s];
        uint8_t *sum = calloc(tagc_nibble_bytes(n) + 1, 1), *one = dirty_bytes(tagc_nibble_bytes(n));
        uint8_t *bits = dirty_bytes(tagc_bitmap_bytes(n));
        unsigned *counts = calloc(n + 1, sizeof *counts);
        char *any = calloc(n + 1, 1);
        for (int rank = 0; rank < 15; rank++) {
            set kept = set_make(n, rank < 5 ? 0.05 : rank < 8 ? 0.01 : 0.002);
            if (n > 8 && !kept.is_set[n - 1]) { /* one element that all 15 keep: the largest count */
                kept.indices = realloc(kept.indices, (kept.n_set + 1) * sizeof(uint32_t));
                kept.indices[kept.n_set++] = (uint32_t)(n - 1);
            }
            tagc_nibble_make(one, n, kept.indices, kept.n_set);
            tagc_nibble_add(sum, one, n);
            for (size_t k = 0; k < kept.n_set; k++) counts[kept.indices[k]]++, any[kept.indices[k]] = 1;
            set_free(&kept);
        }
        for (size_t i = 0; i < n; i++) assert_int_equal(sum[i / 2] >> (4 * (i % 2)) & 15, counts[i]);
        if (n > 8) assert_int_equal(counts[n - 1], 15);
        tagc_nibble_to_bitmap(sum, n, bits);
        assert_bits(bits, n, any);
        free(sum), free(one), free(bits), free(counts), free(any);
    }
}

static void every_count_becomes_its_bit(void **state) {
    (void)state;
    uint8_t nibbles[128], bits[32];
    for (int i = 0; i < 128; i++) nibbles[i] = (uint8_t)(2 * i % 16 + (2 * i + 1) % 16 * 16);
    tagc_nibble_to_bitmap(nibbles, 256, bits);
    for (size_t i = 0; i < 256; i++) assert_int_equal(bit_of(bits, i), i % 16 != 0);
}

/* Bytes of a bitmap whose size is no multiple of 8 may carry into bits that are no elements: those are
 * cleared. */
static void byte_sums_are_byte_sums(void **state) {
    (void)state;
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
static void summing_packed_bytes_loses_what_or_keeps(void **state) {
    (void)state;
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
        int kept = a.is_set[i] || b.is_set[i];
        n_union += (size_t)kept;
        assert_int_equal(bit_of(both, i), kept);
        lost += kept && !bit_of(x, i);
        spurious += !kept && bit_of(x, i);
    }
    assert_in_range(lost * 1000 / n_union, 160, 200);
    assert_in_range(spurious * 1000 / n_union, 140, 180);
    free(x), free(y), free(both);
    set_free(&a), set_free(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bitmaps_hold_what_was_put_in),
        cmocka_unit_test(bits_past_the_end_are_invalid),
        cmocka_unit_test(nibbles_count_up_to_15_ranks),
        cmocka_unit_test(every_count_becomes_its_bit),
        cmocka_unit_test(byte_sums_are_byte_sums),
        cmocka_unit_test(summing_packed_bytes_loses_what_or_keeps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
