/* What changes are made of: where arrays differ, alike at every level of the processor; streams of integers against a coder that writes
 * bit by bit, which never read past their end; and bodies of any bytes, which are refused or decode within bounds. */
#define RANDOM_SEED 17
#include "../repeats.h"
#include "codec/bitmap.h"
#include "codec/changes.h"
#include "codec/integers.h"
#include "core/memory.h"
#include "random.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

static const size_t widths[] = {1, 2, 4};

static void *room(size_t n_bytes) { /* exact, for the address sanitizer */
    void *memory = malloc(n_bytes ? n_bytes : 1);
    assert_non_null(memory);
    return memory;
}

static void test_differ(void **state) {
    (void)state;
    HAS_ONE_THREAD();
    const int n_trials = REPEATS(600, 150, 0);
    for (int trial = 0; trial < n_trials; trial++) {
        random_begin(1, (uint64_t)trial);
        size_t width = widths[trial % 3], n = random_below(trial % 8 ? 300 : 3000),
               n_bits = tagc_bitmap_bytes(n);
        double density = (double[]){0, 0.01, 0.5, 1}[random_below(4)];
        uint8_t *a = room(n * width), *b = room(n * width), *expected = calloc(n_bits + 1, 1),
                *bits = room(n_bits);
        for (size_t i = 0; i < n * width; i++) a[i] = b[i] = (uint8_t)random_u64();
        for (size_t i = 0; i < n; i++) /* any single bit of it */
            if (random_uniform() < density) {
                b[i * width + random_below(width)] ^= (uint8_t)(1u << random_below(8));
                expected[i / 8] |= (uint8_t)(1u << i % 8);
            }
        for (const tagc_differ_kernels *const *k = tagc_differ_kernels_all(); *k; k++) {
            memset(bits, 0xa5, n_bits);
            tagc_differ(*k, width, a, b, n, bits);
            if (memcmp(bits, expected, n_bits) != 0) fail_msg("%s, width %zu, n %zu", (*k)->name, width, n);
        }
        free(a), free(b), free(expected), free(bits);
    }
}

/* ---- integers ---- */

static void put_bit(uint8_t *bytes, uint64_t *at, unsigned bit) {
    bytes[*at / 8] |= (uint8_t)(bit << *at % 8);
    ++*at;
}

static uint64_t write_naively(int order, const uint32_t *values, size_t n, uint8_t *bytes) {
    uint64_t at = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t q = (uint64_t)values[i] + ((uint64_t)1 << order);
        int length = 0;
        while (q >> (length + 1)) length++;
        for (int z = order; z < length; z++) put_bit(bytes, &at, 0);
        put_bit(bytes, &at, 1);
        for (int b = 0; b < length; b++) put_bit(bytes, &at, q >> b & 1);
    }
    return (at + 7) / 8;
}

static void test_integers(void **state) {
    (void)state;
    HAS_ONE_THREAD();
    enum { MOST = 400 };
    const int n_trials = REPEATS(3000, 500, 0);
    for (int trial = 0; trial < n_trials; trial++) {
        random_begin(2, (uint64_t)trial);
        size_t n = random_below(trial % 2 ? 5 : MOST);
        unsigned bits = 1 + (unsigned)random_below(32);
        uint32_t values[MOST], value = 0;
        for (size_t i = 0; i < n; i++) {
            values[i] = (uint32_t)(random_u64() >> (32 + random_below(bits)));
            if (random_below(20) == 0) values[i] = UINT32_MAX;
        }
        int order =
            trial % 3 ? tagc_integers_order(values, n) : (int)random_below(TAGC_INTEGERS_MAX_ORDER + 1);
        uint8_t *expected = calloc(9 * MOST, 1);
        uint64_t n_bytes = write_naively(order, values, n, expected);
        assert_int_equal(tagc_integers_bytes(order, values, n), n_bytes);
        uint8_t *bytes = room((size_t)n_bytes);
        tagc_integers_write(order, values, n, bytes);
        assert_memory_equal(bytes, expected, n_bytes);
        tagc_integers_reader reader = {.bytes = bytes, .n_bits = 8 * n_bytes, .order = order};
        for (size_t i = 0; i < n; i++) {
            assert_true(tagc_integers_read(&reader, UINT32_MAX, &value));
            assert_int_equal(value, values[i]);
        }
        assert_true(tagc_integers_ended(&reader));
        if (n >
            0) { /* what is larger than the caller takes, a stream with a byte less, and one with a bit behind the last code */
            reader = (tagc_integers_reader){.bytes = bytes, .n_bits = 8 * n_bytes, .order = order};
            assert_int_equal(tagc_integers_read(&reader, values[0] - 1, &value), values[0] == 0);
            reader = (tagc_integers_reader){.bytes = bytes, .n_bits = 8 * (n_bytes - 1), .order = order};
            size_t n_read = 0;
            while (n_read < n && tagc_integers_read(&reader, UINT32_MAX, &value)) n_read++;
            assert_true(n_read < n);
        }
        free(expected), free(bytes);
    }
}

/* The order that was chosen for a sample takes no more than 2 % above what the best one takes for all. */
static void test_order(void **state) {
    (void)state;
    HAS_ONE_THREAD();
    enum { N = 20000 };
    static uint32_t values[N];
    for (int scale = 0; scale < 28; scale += 3) {
        random_begin(3, (uint64_t)scale);
        for (size_t i = 0; i < N; i++)
            values[i] = (uint32_t)(abs((int)(random_normal() * (float)(1 << scale))));
        uint64_t best = UINT64_MAX, chosen = tagc_integers_bytes(tagc_integers_order(values, N), values, N);
        for (int order = 0; order <= TAGC_INTEGERS_MAX_ORDER; order++) {
            uint64_t n_bytes = tagc_integers_bytes(order, values, N);
            best = n_bytes < best ? n_bytes : best;
        }
        assert_true((double)chosen <= 1.02 * (double)best);
    }
}

/* ---- bodies of any bytes ---- */

/* A sound body of few elements, and what it was made of. */
static size_t make_body(size_t width, size_t n, uint8_t *before, uint8_t *after, uint8_t *body) {
    uint64_t n_changes;
    void *scratch;
    for (size_t i = 0; i < n * width; i++) before[i] = after[i] = (uint8_t)random_u64();
    size_t step = 1 + random_below(40);
    for (size_t i = random_below(9); i < n; i += step)
        after[i * width] ^= (uint8_t)(1 + random_below(random_below(2) ? 2 : 200));
    assert_int_equal(tagc_memory_create(tagc_changes_encode_scratch_bytes(n), "scratch", &scratch), TAGC_OK);
    size_t n_bytes = tagc_changes_body_encode(tagc_differ_kernels_all()[0], width, before, after, n, body,
                                              scratch, &n_changes);
    tagc_memory_destroy(scratch);
    return n_bytes;
}

/* Damaged in a few bytes or bits, cut or longer, in a room of exactly its size: refused, or decoded within the array. */
static void test_hostile(void **state) {
    (void)state;
    HAS_ONE_THREAD();
    enum { MOST = 700 };
    const int n_trials = REPEATS(20000, 4000, 0);
    uint8_t before[4 * MOST], after[4 * MOST], sound[4 * MOST + 64];
    void *scratch;
    size_t n_taken = 0, n_refused = 0;
    assert_int_equal(tagc_memory_create(tagc_changes_decode_scratch_bytes(), "scratch", &scratch), TAGC_OK);
    for (int trial = 0; trial < n_trials; trial++) {
        random_begin(4, (uint64_t)trial);
        size_t width = widths[trial % 3], n = 1 + random_below(MOST),
               n_bytes = make_body(width, n, before, after, sound);
        assert_true(n_bytes <= tagc_changes_body_max_bytes(width, n));
        size_t n_given = random_below(8) ? n_bytes : random_below(n_bytes + 8);
        uint8_t *body = room(n_given), *values = room(n * width);
        for (size_t i = 0; i < n_given; i++) body[i] = i < n_bytes ? sound[i] : (uint8_t)random_u64();
        for (size_t flips = random_below(4); flips > 0 && n_given > 0; flips--)
            body[random_below(random_below(2) ? n_given : 1 + n_given / 4)] ^=
                (uint8_t)(1u << random_below(8));
        memcpy(values, before, n * width);
        int is_whole, is_valid = tagc_changes_body_valid(width, body, n_given, n, &is_whole);
        int is_sound = n_given == n_bytes && memcmp(body, sound, n_bytes) == 0;
        assert_true(is_valid || !is_sound);
        is_valid ? n_taken++ : n_refused++;
        if (is_valid) tagc_changes_body_decode(width, body, values, n, scratch);
        if (is_sound) assert_memory_equal(values, after, n * width);
        free(body), free(values);
    }
    assert_true(n_taken > (size_t)n_trials / 8 && n_refused > (size_t)n_trials / 8);
    tagc_memory_destroy(scratch);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_differ),
        cmocka_unit_test(test_integers),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_hostile),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
