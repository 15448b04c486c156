/* What changes are made of: where arrays differ, alike at every level of the processor; streams of integers against a coder that writes
 * bit by bit, which never read past their end; and bodies of any bytes, which are refused or decode within bounds. */
#define RANDOM_SEED 17
#include "../repeats.h"
#include "../test.h"
#include "codec/bitmap.h"
#include "codec/changes.h"
#include "codec/classes.h"
#include "codec/integers.h"
#include "core/memory.h"
#include "random.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const size_t widths[] = {1, 2, 4};

static void *room(size_t n_bytes) { /* exact, for the address sanitizer */
    void *memory = malloc(n_bytes ? n_bytes : 1);
    assert_non_null(memory);
    return memory;
}

TEST(test_differ) {
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

static void put_bits(uint8_t *bytes, uint64_t *at, int n_bits, uint64_t bits) {
    for (int b = 0; b < n_bits; b++) put_bit(bytes, at, bits >> b & 1);
}

static void put_naively(int code, uint32_t value, uint8_t *bytes, uint64_t *at) {
    int k = code % 32, length = k;
    uint64_t q = (uint64_t)value + ((uint64_t)1 << k);
    if (code >= 64) {
        put_bits(bytes, at, code - 64, value);
        return;
    }
    if (code >= 32)
        for (uint64_t z = value >> k; z > 0; z--) put_bit(bytes, at, 0);
    else
        for (; q >> (length + 1); length++) put_bit(bytes, at, 0);
    put_bit(bytes, at, 1);
    put_bits(bytes, at, length, code >= 32 ? value : q);
}

/* Any code that has this value, and few bits of it. */
static int any_code(uint32_t most) {
    int code = (int)random_below(97), bits = 0;
    while (bits < 32 && most >> bits) bits++;
    if (code >= 64) return 64 + bits + (int)random_below((size_t)(33 - bits));
    if (!tagc_integers_is_code(code)) return 30;
    return code >= 32 && most >> (code - 32) > 100 ? 30 : code;
}

static uint64_t write_naively(const tagc_integers_pairs *pairs, uint8_t *bytes) {
    uint64_t at = 0;
    for (size_t i = 0; i < 2 * pairs->n; i++)
        put_naively(pairs->code[i % 2], pairs->values[i % 2][i / 2], bytes, &at);
    return (at + 7) / 8;
}

static size_t n_readable(tagc_integers_reader reader, const tagc_integers_pairs *pairs) {
    size_t n = 0;
    uint32_t value;
    while (n < 2 * pairs->n && tagc_integers_read(&reader, pairs->code[n % 2], UINT32_MAX, &value)) n++;
    return n;
}

TEST(test_integers) {
    HAS_ONE_THREAD();
    enum { MOST = 200 };
    const int n_trials = REPEATS(3000, 500, 0);
    for (int trial = 0; trial < n_trials; trial++) {
        random_begin(2, (uint64_t)trial);
        uint32_t values[2][MOST], value = 0;
        tagc_integers_pairs pairs = {.values = {values[0], values[1]},
                                     .n = random_below(trial % 2 ? 5 : MOST)};
        for (int kind = 0; kind < 2; kind++) {
            unsigned bits = 1 + (unsigned)random_below(32);
            uint32_t most = 0;
            for (size_t i = 0; i < pairs.n; i++) {
                values[kind][i] = (uint32_t)(random_u64() >> (32 + random_below(bits)));
                if (trial % 4 && random_below(20) == 0) values[kind][i] = UINT32_MAX;
                if (values[kind][i] > most) most = values[kind][i];
            }
            pairs.code[kind] = trial % 3 ? tagc_integers_code(values[kind], pairs.n) : any_code(most);
        }
        uint8_t *expected = calloc(2 * 20 * MOST, 1);
        uint64_t n_bytes = write_naively(&pairs, expected);
        assert_int_equal(tagc_integers_bytes(&pairs), n_bytes);
        uint8_t *bytes = room((size_t)n_bytes);
        tagc_integers_write(&pairs, bytes);
        assert_memory_equal(bytes, expected, n_bytes);
        tagc_integers_reader reader = {.bytes = bytes, .n_bits = 8 * n_bytes};
        for (size_t i = 0; i < 2 * pairs.n; i++) {
            assert_true(tagc_integers_read(&reader, pairs.code[i % 2], UINT32_MAX, &value));
            assert_int_equal(value, values[i % 2][i / 2]);
        }
        assert_true(tagc_integers_ended(&reader));
        if (n_bytes > 0) { /* what is larger than the caller takes, and a stream with a byte less */
            reader = (tagc_integers_reader){.bytes = bytes, .n_bits = 8 * n_bytes};
            assert_int_equal(tagc_integers_read(&reader, pairs.code[0], values[0][0] - 1, &value),
                             values[0][0] == 0);
            reader = (tagc_integers_reader){.bytes = bytes, .n_bits = 8 * (n_bytes - 1)};
            assert_true(n_readable(reader, &pairs) < 2 * pairs.n);
        }
        free(expected), free(bytes);
    }
}

static uint64_t bytes_at(int code, const uint32_t *values, size_t n) {
    tagc_integers_pairs pairs = {.values = {values, values}, .code = {code, code}, .n = n};
    return tagc_integers_bytes(&pairs);
}

/* The code that was chosen takes no more than 2 % above what the best one takes for all: of magnitudes of a bell curve, of gaps of random
 * places, and of numbers of so many bits. A Rice code is never taken for values that the sample lacks. */
TEST(test_code) {
    HAS_ONE_THREAD();
    enum { N = 20000 };
    static uint32_t values[N];
    int n_families[3] = {0};
    for (int scale = 0; scale < 27; scale += 3)
        for (int shape = 0; shape < 4; shape++) {
            random_begin(3, (uint64_t)(4 * scale + shape));
            for (size_t i = 0; i < N; i++)
                values[i] = shape == 0   ? (uint32_t)(abs((int)(random_normal() * (float)(1 << scale))))
                            : shape == 1 ? (uint32_t)(-log(1 - random_uniform()) * (double)(1 << scale))
                                         : (uint32_t)random_below((size_t)1 << scale);
            if (shape == 3) values[N - 2] = UINT32_MAX; /* 1 + N / 4096 is even */
            int code = tagc_integers_code(values, N), n_zero_bits = 0;
            uint64_t best = UINT64_MAX, chosen = bytes_at(code, values, N);
            uint32_t most = 0;
            for (size_t i = 0; i < N; i++) most = values[i] > most ? values[i] : most;
            while (n_zero_bits < 32 && most >> n_zero_bits) n_zero_bits++;
            for (int other = 0; other <= 64 + n_zero_bits; other++) {
                if (!tagc_integers_is_code(other) || (other >= 64 && other < 64 + n_zero_bits)) continue;
                uint64_t n_bytes = bytes_at(other, values, N);
                best = n_bytes < best ? n_bytes : best;
            }
            assert_true((double)chosen <= (shape == 3 ? 1.2 : 1.02) * (double)best + 8);
            n_families[code / 32]++;
        }
    for (int family = 0; family < 3; family++) assert_true(n_families[family] > 3);
}

/* ---- classes ---- */

static int class_of(size_t width, const uint8_t *from, const tagc_classes *classes) {
    uint32_t value = 0;
    int c = 0;
    memcpy(&value, from, width);
    value &= (uint32_t)(((uint64_t)1 << (8 * width - 1)) - 1);
    for (int higher = 1; higher < classes->n; higher++)
        if (value >> (width == 1 ? 0 : 8 * width - 9) >= classes->first[higher]) c = higher;
    return c;
}

/* Any classes, at every level: lists as a plain count makes them, and positions from gaps alone. */
TEST(test_classes) {
    HAS_ONE_THREAD();
    enum { MOST = 3000 };
    const int n_trials = REPEATS(600, 150, 0);
    for (int trial = 0; trial < n_trials; trial++) {
        random_begin(5, (uint64_t)trial);
        size_t width = widths[trial % 3], n = 1 + random_below(trial % 8 ? 300 : MOST), n_items = 0;
        tagc_classes classes = {.n = 1};
        for (int grade = 1; grade < 256 && classes.n < TAGC_CLASSES_MAX; grade++)
            if (random_below(trial % 5 ? 12 : 300) == 0) classes.first[classes.n++] = (uint8_t)grade;
        uint8_t *values = room(n * width), *bits = calloc(tagc_bitmap_bytes(n) + 1, 1);
        uint32_t gaps[TAGC_CLASSES_MAX][MOST], items[TAGC_CLASSES_MAX][MOST], n_since[TAGC_CLASSES_MAX] = {0};
        size_t counts[TAGC_CLASSES_MAX] = {0};
        for (size_t i = 0; i < n * width; i++) values[i] = (uint8_t)random_u64();
        for (size_t i = 0; i < n; i++) {
            int c = class_of(width, values + i * width, &classes);
            if (random_below(trial % 4 ? 9 : 1) == 0) {
                bits[i / 8] |= (uint8_t)(1u << i % 8);
                gaps[c][counts[c]] = n_since[c], items[c][counts[c]++] = (uint32_t)i;
                n_since[c] = 0, n_items++;
            } else {
                n_since[c]++;
            }
        }
        for (const tagc_classes_kernels *const *k = tagc_classes_kernels_all(); *k; k++) {
            tagc_class_items of[TAGC_CLASSES_MAX] = {{0}}, lists[2 * TAGC_CLASSES_MAX];
            uint32_t *rooms[2] = {room(4 * n_items), room(4 * n_items)};
            size_t at = 0;
            for (int c = 0; c < classes.n; at += counts[c++])
                of[c] = (tagc_class_items){c, counts[c], rooms[0] + at, rooms[1] + at};
            tagc_classes_split(*k, width, &classes, values, bits, n, of);
            for (int c = 0; c < classes.n; c++)
                if (memcmp(of[c].gaps, gaps[c], 4 * counts[c]) ||
                    memcmp(of[c].items, items[c], 4 * counts[c]))
                    fail_msg("%s, width %zu, n %zu, class %d of %d", (*k)->name, width, n, c, classes.n);
            memset(rooms[1], 0xff, 4 * n_items);
            assert_true(tagc_classes_join(*k, width, &classes, values, n, of, classes.n));
            for (int c = 0; c < classes.n; c++) assert_memory_equal(of[c].items, items[c], 4 * counts[c]);
            for (int c = 0; c < classes.n; c++) { /* in two lists: some, and those behind them */
                size_t n_first = random_below(counts[c] + 1);
                lists[2 * c] = (tagc_class_items){c, n_first, of[c].gaps, of[c].items};
                lists[2 * c + 1] =
                    (tagc_class_items){c, counts[c] - n_first, of[c].gaps + n_first, of[c].items + n_first};
                for (size_t i = 0; i < n_first && n_first < counts[c]; i++)
                    of[c].gaps[n_first] += gaps[c][i] + 1;
            }
            assert_true(tagc_classes_join(*k, width, &classes, values, n, lists, 2 * classes.n));
            for (int c = 0; c < classes.n; c++) {
                assert_memory_equal(of[c].items, items[c], 4 * counts[c]);
                memcpy(of[c].gaps, gaps[c], 4 * counts[c]);
            }
            if (n_items > 0) { /* an element more than there is */
                int c = 0;
                while (counts[c] == 0) c++;
                of[c].gaps[counts[c] - 1] += n_since[c] + 1;
                assert_false(tagc_classes_join(*k, width, &classes, values, n, of, classes.n));
                of[c].gaps[counts[c] - 1] = UINT32_MAX;
                assert_false(tagc_classes_join(*k, width, &classes, values, n, of, classes.n));
            }
            free(rooms[0]), free(rooms[1]);
        }
        free(values), free(bits);
    }
}

/* ---- bodies of any bytes ---- */

/* A sound body of few elements, and what it was made of. */
static size_t make_body(size_t width, size_t n, uint8_t *before, uint8_t *after, uint8_t *body) {
    uint64_t n_changes;
    void *scratch;
    tagc_changes_kernels kernels = tagc_changes_best();
    for (size_t i = 0; i < n * width; i++) before[i] = after[i] = (uint8_t)random_u64();
    size_t step = 1 + random_below(40);
    for (size_t i = random_below(9); i < n; i += step)
        after[i * width] ^= (uint8_t)(1 + random_below(random_below(2) ? 2 : 200));
    assert_int_equal(tagc_memory_create(tagc_changes_scratch_bytes(n, n), "scratch", &scratch), TAGC_OK);
    size_t n_bytes =
        tagc_changes_body_encode(&kernels, width, before, after, n, 1, body, scratch, n, &n_changes);
    if (n_changes > 0) /* with room for one item less */
        assert_int_equal(tagc_changes_body_encode(&kernels, width, before, after, n, 1, body + n_bytes,
                                                  scratch, n_changes - 1, &n_changes),
                         SIZE_MAX);
    tagc_memory_destroy(scratch);
    return n_bytes;
}

/* Damaged in a few bytes or bits, cut or longer, in a room of exactly its size: refused, or decoded within the array. */
TEST(test_hostile) {
    HAS_ONE_THREAD();
    enum { MOST = 700 };
    const int n_trials = REPEATS(20000, 4000, 0);
    uint8_t before[4 * MOST], after[4 * MOST], sound[2 * (4 * MOST + 64)];
    const tagc_changes_kernels kernels = tagc_changes_best();
    size_t n_taken = 0, n_refused = 0;
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
        size_t most_items;
        tagc_changes_form form;
        int is_valid = tagc_changes_body_valid(width, body, n_given, n, &most_items, &form);
        int is_sound = n_given == n_bytes && memcmp(body, sound, n_bytes) == 0;
        assert_true(is_valid || !is_sound);
        is_valid ? n_taken++ : n_refused++;
        if (is_valid) {
            void *scratch;
            assert_int_equal(
                tagc_memory_create(tagc_changes_scratch_bytes(0, most_items), "scratch", &scratch), TAGC_OK);
            int is_done = tagc_changes_body_decode(&kernels, width, body, values, n, scratch, most_items);
            assert_true(is_done || !is_sound);
            tagc_memory_destroy(scratch);
        }
        if (is_sound) assert_memory_equal(values, after, n * width);
        free(body), free(values);
    }
    assert_true(n_taken > (size_t)n_trials / 8 && n_refused > (size_t)n_trials / 8);
}
