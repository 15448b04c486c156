/* Messages of tagc/changes.h: another decoder, written from docs/reference/wire-format.md, reads the same arrays from them, bit for bit,
 * at every level of the processor; their lengths are near the entropy of what changed; what is damaged, forged or meant for other arrays
 * is refused by name and changes nothing. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../bits.h"
#include "../repeats.h"
#include "../test.h"
#include "core/measure.h"
#include "exchange/wire.h"
#include "tagc/changes.h"

enum { HEADER = 64, SEGMENT = 1 << 20 };

static uint64_t random_state;

static size_t below(size_t limit) {
    return (size_t)(tagc_next_random(&random_state) % limit);
}

static double uniform(void) {
    return (double)(tagc_next_random(&random_state) >> 11) * 0x1p-53;
}

static void *room(size_t n_bytes) { /* exact, for the address sanitizer */
    void *memory = malloc(n_bytes ? n_bytes : 1);
    assert_non_null(memory);
    return memory;
}

/* ---- the oracle: decodes a sound body, bit by bit ---- */

static uint32_t number(const uint8_t *from, size_t n_bytes) {
    uint32_t x = 0;
    for (size_t i = 0; i < n_bytes; i++) x |= (uint32_t)from[i] << 8 * i;
    return x;
}

static uint64_t bits_at(const uint8_t *from, uint64_t *at, int n_bits) {
    uint64_t x = 0;
    for (int b = 0; b < n_bits; b++, ++*at) x |= (uint64_t)(from[*at / 8] >> *at % 8 & 1) << b;
    return x;
}

/* The number of an element in the order of numbers, and the element of a number modulo 2^bits. */
static int64_t rank_of(int bits, uint32_t element) {
    int64_t half = (int64_t)1 << (bits - 1);
    return (int64_t)element >= half ? half - 1 - (int64_t)element : (int64_t)element;
}

static uint32_t element_of(int bits, int64_t rank) {
    int64_t half = (int64_t)1 << (bits - 1);
    while (rank >= half) rank -= 2 * half;
    while (rank < -half) rank += 2 * half;
    return (uint32_t)(rank < 0 ? half - 1 - rank : rank);
}

static uint64_t integer_of(const uint8_t *from, uint64_t *at, int code) {
    uint64_t n_zeros = 0, k = (uint64_t)code % 32;
    if (code >= 64) return bits_at(from, at, code - 64);
    while (!bits_at(from, at, 1)) n_zeros++;
    if (code >= 32) return n_zeros << k | bits_at(from, at, (int)k);
    return ((uint64_t)1 << (k + n_zeros) | bits_at(from, at, (int)(k + n_zeros))) - ((uint64_t)1 << k);
}

static uint32_t grade_of(const uint8_t *element, size_t width) {
    uint32_t magnitude = number(element, width) & (uint32_t)(((uint64_t)1 << (8 * width - 1)) - 1);
    return width == 1 ? magnitude : magnitude >> (8 * width - 9);
}

/* List by list: walks through the elements of its class, as the array was before. */
static size_t oracle_segment(const uint8_t *from, size_t width, size_t n, uint8_t *values) {
    size_t k = number(from, 4), n_lists = from[5], at = 8 + 12 * n_lists, n_read = 0;
    int bits = 8 * (int)width;
    assert_int_equal(number(from + 6, 2), 0);
    if (from[4] == 0) {
        assert_int_equal(k, n);
        memcpy(values, from + at, n * width);
        return at + n * width;
    }
    uint8_t *before = room(n * width);
    memcpy(before, values, n * width);
    for (size_t list = 0; list < n_lists; list++) {
        const uint8_t *row = from + 8 + 12 * list;
        uint32_t first = row[0], end = 256;
        uint64_t bit = 0;
        size_t i = 0;
        for (size_t other = n_lists; other > list; other--)
            if (from[8 + 12 * (other - 1)] > first) end = from[8 + 12 * (other - 1)];
        for (uint32_t item = 0; item < number(row + 4, 4); item++, n_read++) {
            uint64_t gap = integer_of(from + at, &bit, row[1]);
            int64_t integer = (int64_t)integer_of(from + at, &bit, row[2]) + ((int64_t)2 << row[3]) - 2;
            int64_t difference = integer % 2 ? (integer + 1) / 2 : -(integer + 2) / 2;
            for (;; i++) {
                assert_true(i < n);
                uint32_t grade = grade_of(before + i * width, width);
                if (grade >= first && grade < end && gap-- == 0) break;
            }
            uint32_t after = element_of(bits, rank_of(bits, number(before + i * width, width)) + difference);
            memcpy(values + i++ * width, &after, width);
        }
        assert_int_equal((bit + 7) / 8, number(row + 8, 4));
        at += number(row + 8, 4);
    }
    assert_int_equal(n_read, k);
    free(before);
    return at;
}

static void oracle(const uint8_t *message, uint64_t n_bytes, size_t width, size_t n, uint8_t *values) {
    size_t at = HEADER;
    for (size_t first = 0; first < n; first += SEGMENT)
        at += oracle_segment(message + at, width, n - first < SEGMENT ? n - first : SEGMENT,
                             values + first * width);
    assert_int_equal(at, n_bytes);
}

/* ---- arrays ---- */

static const uint32_t specials[] = {0x7fc0, 0xffc1, 0x7f80, 0xff80, 0x8000, 0, 1, 0x8001, 0xffff, 0x7fff};

static void put(uint8_t *array, size_t width, size_t i, uint32_t element) {
    memcpy(array + i * width, &element, width);
}

static uint32_t any_element(size_t width, int is_special) {
    uint32_t x = (uint32_t)tagc_next_random(&random_state);
    if (is_special) x = specials[below(10)] << (width == 4 ? 16 : 0) >> (width == 1 ? 8 : 0);
    return x & (uint32_t)(((uint64_t)1 << 8 * width) - 1);
}

/* Of weights: near a normal distribution, with special ones; after it, some moved by a few units, some made anew. */
static void fill(uint8_t *before, uint8_t *after, size_t width, size_t n, double density, double share_anew) {
    for (size_t i = 0; i < n; i++) {
        float x = 0.02f * tagc_normal_of(tagc_next_random(&random_state));
        uint32_t element = bits_of(x) >> (width == 4 ? 0 : 16) & (width == 1 ? 0xff : 0xffffffff);
        if (below(50) == 0) element = any_element(width, 1);
        uint32_t changed = element;
        if (uniform() < share_anew)
            changed = any_element(width, below(3) == 0);
        else if (uniform() < density)
            changed = element_of(8 * (int)width, rank_of(8 * (int)width, element) +
                                                     (below(2) ? 1 : -1) * (int64_t)(1 + below(3)));
        put(before, width, i, element);
        put(after, width, i, changed);
    }
}

static uint64_t n_different(const uint8_t *a, const uint8_t *b, size_t width, size_t n) {
    uint64_t n_found = 0;
    for (size_t i = 0; i < n; i++) n_found += memcmp(a + i * width, b + i * width, width) != 0;
    return n_found;
}

static void check_form(const uint8_t *before, const uint8_t *after, size_t width, size_t n, int whole,
                       int by_magnitude) {
    uint64_t most = 0, n_bytes = 0, n_changes = 0;
    tagc_changes_form form;
    assert_int_equal(tagc_changes_max_bytes((int)width, n, &most), TAGC_OK);
    uint8_t *message = room(most + 1), *values = room(n * width), *oracles = room(n * width);
    assert_int_equal(tagc_changes_encode((int)width, whole ? NULL : before, after, n, by_magnitude,
                                         message + 1, most, &n_bytes, &n_changes),
                     TAGC_OK);
    assert_true(n_bytes <= most);
    assert_int_equal(n_changes, whole ? n : n_different(before, after, width, n));
    uint8_t *exact = room(n_bytes);
    memcpy(exact, message + 1, n_bytes);
    assert_int_equal(tagc_changes_check((int)width, exact, n_bytes, n, &form), TAGC_OK);
    assert_int_equal(form == TAGC_CHANGES_WHOLE, whole);
    assert_true(by_magnitude || form != TAGC_CHANGES_BY_MAGNITUDE);
    memcpy(values, before, n * width), memcpy(oracles, before, n * width);
    if (whole) memset(values, 0x5a, n * width), memset(oracles, 0xa5, n * width);
    assert_int_equal(tagc_changes_apply((int)width, exact, n_bytes, values, n), TAGC_OK);
    assert_memory_equal(values, after, n * width);
    oracle(exact, n_bytes, width, n, oracles);
    assert_memory_equal(oracles, after, n * width);
    free(message), free(values), free(oracles), free(exact);
}

static void check_round_trip(const uint8_t *before, const uint8_t *after, size_t width, size_t n, int whole) {
    check_form(before, after, width, n, whole, 0);
    check_form(before, after, width, n, whole, 1);
}

TEST(test_exact) {
    static const double densities[] = {0, 0.0005, 0.01, 0.1, 0.5, 0.95, 1};
    const int n_trials = REPEATS(500, 120, 60);
    random_state = 3;
    for (int trial = 0; trial < n_trials; trial++) {
        size_t width = (size_t)1 << trial % 3, n = trial < 3 ? 0 : 1 + below(trial % 5 ? 500 : 40000);
        uint8_t *before = room(n * width), *after = room(n * width);
        fill(before, after, width, n, densities[below(7)], (double[]){0, 0, 0.01, 1}[below(4)]);
        check_round_trip(before, after, width, n, trial % 7 == 0);
        free(before), free(after);
    }
}

/* Every bf16 becomes every tenth other one, -0, NaN and their neighbours among them. */
TEST(test_every_element) {
    enum { N = 65536 };
    static uint16_t before[N], after[N];
    for (size_t i = 0; i < N; i++) before[i] = (uint16_t)i, after[i] = (uint16_t)(i * 6553 + 8);
    for (int round = 0; round < 3; round++) {
        check_round_trip((uint8_t *)before, (uint8_t *)after, 2, N, 0);
        for (size_t i = 0; i < N; i++)
            after[i] = (uint16_t)element_of(16, rank_of(16, before[i]) + (round ? 1 : -1));
    }
}

/* More than one segment, each of another form. */
TEST(test_segments) {
    HAS_ONE_THREAD();
    size_t n = 4 * (size_t)SEGMENT + 77, width = 2;
    uint8_t *before = room(n * width), *after = room(n * width);
    random_state = 5;
    fill(before, after, width, SEGMENT, 0.02, 0);
    fill(before + SEGMENT * width, after + SEGMENT * width, width, SEGMENT, 0, 1);
    fill(before + 2 * SEGMENT * width, after + 2 * SEGMENT * width, width, SEGMENT, 0, 0);
    fill(before + 3 * SEGMENT * width, after + 3 * SEGMENT * width, width, SEGMENT, 0.3, 0.2);
    fill(before + 4 * SEGMENT * width, after + 4 * SEGMENT * width, width, 77, 0, 0);
    after[n * width - 1] ^= 0x80; /* 0 becomes -0, or the like */
    check_round_trip(before, after, width, n, 0);
    check_round_trip(before, after, width, n, 1);
    free(before), free(after);
}

static double entropy_of(double p) { /* of a place, for each change */
    return p > 0 && p < 1 ? -(p * log2(p) + (1 - p) * log2(1 - p)) / p : 0;
}

static double bits_per_change(const uint16_t *before, const uint16_t *after, size_t n, int by_magnitude,
                              double *n_changed) {
    uint64_t n_bytes, n_changes, most;
    assert_int_equal(tagc_changes_max_bytes(2, n, &most), TAGC_OK);
    uint8_t *message = room(most);
    assert_int_equal(
        tagc_changes_encode(2, before, after, n, by_magnitude, message, most, &n_bytes, &n_changes), TAGC_OK);
    free(message);
    *n_changed = (double)n_changes;
    return 8 * (double)n_bytes / (double)n_changes;
}

/* Of changes by one unit up or down at random places: the entropy of the places and a bit for the sign at least; a fiftieth of the first
 * more for gaps (a seventh where many change), and the header and the table. */
TEST(test_size) {
    enum { N = 1 << 18 };
    static uint16_t before[N], after[N];
    static const double densities[] = {0.003, 0.01, 0.03, 0.1, 0.3};
    random_state = 9;
    for (int c = 0; c < 5; c++) {
        double p = densities[c], n_changes;
        for (size_t i = 0; i < N; i++) {
            before[i] = (uint16_t)(0x3c00 + below(256));
            after[i] = (uint16_t)(before[i] + (uniform() < p ? (below(2) ? 1 : -1) : 0));
        }
        double bits = bits_per_change(before, after, N, 1, &n_changes), tables = 8.0 * (HEADER + 8 + 12);
        assert_true(bits > entropy_of(n_changes / N) + 1);
        assert_true(bits < (p < 0.05 ? 1.02 : 1.14) * entropy_of(n_changes / N) + 1.01 + tables / n_changes);
    }
}

/* As a step moves weights, each about as far: what is small changes more often. */
static void step_weights(uint16_t *before, uint16_t *after, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float weight = 0.02f * tagc_normal_of(tagc_next_random(&random_state));
        before[i] = (uint16_t)(bits_of(weight) >> 16);
        double unit = ldexp(1, (before[i] >> 7 & 0xff) - 127 - 7);
        after[i] = (uint16_t)(before[i] + (uniform() < 3e-7 / unit ? (below(2) ? 1 : -1) : 0));
    }
}

/* The message takes fewer bits than the places alone would if all changed alike, and at most a seventh and a table above their entropy
 * among weights of one exponent. */
TEST(test_clusters) {
    enum { N = 1 << 20 };
    static uint16_t before[N], after[N];
    double n_of[256] = {0}, changes_of[256] = {0}, by_exponent = 0, n_changes;
    random_state = 10;
    step_weights(before, after, N);
    for (size_t i = 0; i < N; i++) {
        n_of[before[i] >> 7 & 0xff]++;
        changes_of[before[i] >> 7 & 0xff] += before[i] != after[i];
    }
    double bits = bits_per_change(before, after, N, 1, &n_changes);
    for (int e = 0; e < 256; e++)
        if (n_of[e] > 0) by_exponent += changes_of[e] * entropy_of(changes_of[e] / n_of[e]) / n_changes;
    assert_true(n_changes / N > 0.002 && n_changes / N < 0.05);
    assert_true(by_exponent < entropy_of(n_changes / N) - 1);
    assert_true(bits < entropy_of(n_changes / N) + 1);
    assert_true(bits < 1.14 * by_exponent + 2.05 + 8.0 * 16 * 12 / n_changes);
}

/* Who has a part of the array, and anything else in the place of the rest, gets that part right by place. By magnitude, the message says
 * that this cannot be. */
TEST(test_parts) {
    enum { N = 1 << 16, FROM = 1000, TO = 1 << 15 };
    static uint16_t before[N], after[N], values[N];
    uint64_t n_bytes, most;
    tagc_changes_form form;
    random_state = 11;
    step_weights(before, after, N);
    assert_int_equal(tagc_changes_max_bytes(2, N, &most), TAGC_OK);
    uint8_t *message = room(most);
    assert_int_equal(tagc_changes_encode(2, before, after, N, 1, message, most, &n_bytes, NULL), TAGC_OK);
    assert_int_equal(tagc_changes_check(2, message, n_bytes, N, &form), TAGC_OK);
    assert_int_equal(form, TAGC_CHANGES_BY_MAGNITUDE);
    assert_int_equal(tagc_changes_encode(2, before, after, N, 0, message, most, &n_bytes, NULL), TAGC_OK);
    assert_int_equal(tagc_changes_check(2, message, n_bytes, N, &form), TAGC_OK);
    assert_int_equal(form, TAGC_CHANGES_BY_PLACE);
    for (size_t i = 0; i < N; i++) values[i] = i < FROM || i >= TO ? (uint16_t)below(1 << 16) : before[i];
    assert_int_equal(tagc_changes_apply(2, message, n_bytes, values, N), TAGC_OK);
    assert_memory_equal(values + FROM, after + FROM, (TO - FROM) * sizeof *values);
    free(message);
}

/* ---- what is refused ---- */

static void refused(tagc_status status, tagc_status expected, const char *text) {
    if (status != expected || !strstr(tagc_last_error(), text))
        print_message("status %d, \"%s\", expected %d, \"%s\"\n", (int)status, tagc_last_error(),
                      (int)expected, text);
    assert_int_equal(status, expected);
    assert_non_null(strstr(tagc_last_error(), text));
}

TEST(test_arguments) {
    uint16_t values[4] = {0};
    uint8_t message[HEADER + 8 + 8];
    uint64_t n_bytes;
    static const int wrong[] = {0, 3, 8, -1};
    for (int i = 0; i < 4; i++) {
        char text[80];
        snprintf(text, sizeof text, "element_bytes is %d, must be 1, 2 or 4", wrong[i]);
        refused(tagc_changes_max_bytes(wrong[i], 4, &n_bytes), TAGC_ERR_ARGUMENT, text);
        refused(tagc_changes_encode(wrong[i], values, values, 4, 1, message, sizeof message, &n_bytes, NULL),
                TAGC_ERR_ARGUMENT, text);
        refused(tagc_changes_check(wrong[i], message, sizeof message, 4, NULL), TAGC_ERR_ARGUMENT, text);
        refused(tagc_changes_apply(wrong[i], message, sizeof message, values, 4), TAGC_ERR_ARGUMENT, text);
    }
    refused(tagc_changes_max_bytes(2, UINT64_C(1) << 32, &n_bytes), TAGC_ERR_ARGUMENT,
            "n_elems is 4294967296, must be in [0, 4294967232]");
    refused(tagc_changes_max_bytes(2, 4, NULL), TAGC_ERR_ARGUMENT, "n_bytes is NULL");
    refused(tagc_changes_encode(2, values, NULL, 4, 1, message, sizeof message, &n_bytes, NULL),
            TAGC_ERR_ARGUMENT, "after is NULL");
    refused(tagc_changes_encode(2, values, values, 4, 1, NULL, sizeof message, &n_bytes, NULL),
            TAGC_ERR_ARGUMENT, "message is NULL");
    refused(tagc_changes_encode(2, values, values, 4, 1, message, sizeof message, NULL, NULL),
            TAGC_ERR_ARGUMENT, "n_bytes is NULL");
    refused(tagc_changes_encode(2, values, values, 4, 1, message, sizeof message - 1, &n_bytes, NULL),
            TAGC_ERR_ARGUMENT, "max_bytes is 79, a message of 4 elements may need 80");
    refused(tagc_changes_check(2, NULL, sizeof message, 4, NULL), TAGC_ERR_ARGUMENT, "message is NULL");
    refused(tagc_changes_apply(2, message, sizeof message, NULL, 4), TAGC_ERR_ARGUMENT, "values is NULL");
}

enum { N = 300, MOST = HEADER + 8 + 2 * N };

/* Some hundred bf16, of which some changed. */
static uint64_t make_small(uint16_t *before, uint8_t *message) {
    uint16_t after[N];
    uint64_t n_bytes;
    for (size_t i = 0; i < N; i++)
        before[i] = (uint16_t)(0x3c00 + i), after[i] = (uint16_t)(before[i] + (i % 29 == 3 ? i % 5 - 2 : 0));
    assert_int_equal(tagc_changes_encode(2, before, after, N, 1, message, MOST, &n_bytes, NULL), TAGC_OK);
    return n_bytes;
}

static void apply_refused(size_t width, const uint8_t *message, uint64_t n_bytes, uint64_t n,
                          tagc_status expected, const char *text) {
    uint8_t *values = room(n * width), *before = room(n * width), *exact = room(n_bytes);
    for (size_t i = 0; i < n * width; i++) values[i] = before[i] = (uint8_t)(i * 7);
    memcpy(exact, message, n_bytes);
    refused(tagc_changes_apply((int)width, exact, n_bytes, values, n), expected, text);
    assert_memory_equal(values, before, n * width);
    refused(tagc_changes_check((int)width, exact, n_bytes, n, NULL), expected, text);
    free(values), free(before), free(exact);
}

/* Every single bit, and every length. */
TEST(test_damage) {
    uint16_t before[N];
    uint8_t message[MOST];
    uint64_t n_bytes = make_small(before, message);
    for (size_t bit = 0; bit < 8 * n_bytes; bit++) {
        message[bit / 8] ^= (uint8_t)(1u << bit % 8);
        apply_refused(2, message, n_bytes, N, TAGC_ERR_CORRUPT, "");
        message[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    for (uint64_t shorter = 0; shorter < n_bytes; shorter++)
        apply_refused(2, message, shorter, N, TAGC_ERR_CORRUPT, "");
    message[n_bytes - 1] ^= 1;
    apply_refused(2, message, n_bytes, N, TAGC_ERR_CORRUPT, "the checksum is wrong");
}

TEST(test_mismatch) {
    uint16_t before[N];
    uint8_t message[MOST];
    uint64_t n_bytes = make_small(before, message);
    apply_refused(2, message, n_bytes, N - 1, TAGC_ERR_MISMATCH,
                  "the message has 300 elements, expected 299");
    apply_refused(4, message, n_bytes, N, TAGC_ERR_MISMATCH,
                  "the message has elements of 2 bytes, expected 4");
}

/* With a checksum to match, what would leave the array, or has bits or bytes too many, is refused all the same. */
TEST(test_forged) {
    enum { ROW = HEADER + 8, CASES = 15 };
    for (int c = 0; c < CASES; c++) {
        uint16_t before[N];
        uint8_t message[MOST + 8] = {0};
        uint64_t n_bytes = make_small(before, message);
        tagc_wire_header header;
        const char *text = "the message's positions or values are damaged";
        assert_int_equal(tagc_wire_read(message, n_bytes, &header), TAGC_OK);
        if (c == 0) message[HEADER] = 255, message[HEADER + 1] = 255; /* more items than elements */
        if (c == 1) message[HEADER + 4] = 2;                          /* no such form */
        if (c == 2) message[HEADER + 4] = 0;                          /* all, of which there are not enough */
        if (c == 3) message[HEADER + 5] = 0;                          /* no list */
        if (c == 4) message[HEADER + 5] = 65;                         /* too many */
        if (c == 5) message[HEADER + 6] = 1;
        if (c == 6) message[ROW] = 1;      /* no class has grade 0 */
        if (c == 7) message[ROW + 1] = 31; /* no such code */
        if (c == 8) message[ROW + 2] = 31;
        if (c == 9) message[ROW + 3] = 16;  /* no such size */
        if (c == 10) message[ROW + 4]++;    /* an item more than all lists have */
        if (c == 11) message[ROW + 8]++;    /* a byte more of the stream than there is */
        if (c == 12) message[ROW + 8] -= 1; /* a byte less */
        if (c == 13) header.body_bytes++, n_bytes++;
        if (c == 14) header.coding = 0; /* changes that say they are all */
        tagc_wire_write(&header, message);
        apply_refused(2, message, n_bytes, N, TAGC_ERR_CORRUPT, text);
    }
    uint16_t before[N];
    uint8_t message[MOST];
    uint64_t n_bytes = make_small(before, message);
    tagc_wire_header header;
    assert_int_equal(tagc_wire_read(message, n_bytes, &header), TAGC_OK);
    header.coding = 2;
    tagc_wire_write(&header, message);
    apply_refused(2, message, n_bytes, N, TAGC_ERR_CORRUPT, "changes coding is 2, must be in [0, 1]");
    header.coding = 1, header.kind = TAGC_WIRE_BLOCKS;
    tagc_wire_write(&header, message);
    apply_refused(2, message, n_bytes, N, TAGC_ERR_CORRUPT, "message kind is 8, expected 9 (changes)");
}

/* Rows of lists: class, codes, size, items, bytes of a stream of zeros, which with codes of fixed widths are gaps and integers of 0. */
static uint64_t make_rows(const uint8_t (*rows)[6], int n_rows, uint64_t n, uint8_t *message) {
    uint8_t *body = message + HEADER, *row = body + 8;
    size_t n_streams = 0;
    memset(message, 0, HEADER + 2048);
    for (int i = 0; i < n_rows; i++, row += 12) {
        memcpy(row, rows[i], 4);
        row[4] = rows[i][4], row[8] = rows[i][5];
        body[0] = (uint8_t)(body[0] + rows[i][4]), n_streams += rows[i][5];
    }
    body[4] = 1, body[5] = (uint8_t)n_rows;
    tagc_wire_header header = {.kind = TAGC_WIRE_CHANGES,
                               .coding = 1,
                               .k = 2,
                               .n_elems = n,
                               .body_bytes = 8 + 12 * (size_t)n_rows + n_streams};
    tagc_wire_write(&header, message);
    return HEADER + header.body_bytes;
}

/* Lists ascend by class and size, and end where the array does. What is sound by a row, and refused with its neighbour. */
TEST(test_forged_lists) {
    static const uint8_t sound[2][6] = {{0, 64, 64, 0, 4, 0}, {0, 65, 66, 1, 2, 1}};
    static const uint8_t wrong[][2][6] = {
        {{0, 64, 64, 0, 4, 0}, {0, 65, 66, 0, 2, 1}}, /* the same list again */
        {{0, 64, 64, 2, 4, 0}, {0, 65, 66, 1, 2, 1}}, /* out of order */
        {{1, 64, 64, 0, 4, 0}, {0, 65, 66, 1, 2, 1}},
        {{0, 63, 64, 0, 4, 0}, {0, 65, 66, 1, 2, 1}},  /* no such code */
        {{0, 97, 64, 0, 4, 0}, {0, 65, 66, 1, 2, 1}},  /* nor this */
        {{0, 64, 64, 0, 11, 0}, {0, 65, 66, 1, 2, 1}}, /* more than there are elements */
        {{0, 64, 64, 0, 4, 0}, {0, 65, 66, 1, 3, 1}},  /* more than the stream has */
    };
    uint8_t message[HEADER + 2048], many[17][6] = {{0}};
    uint16_t values[10] = {0};
    uint64_t n_bytes = make_rows(sound, 2, 10, message);
    assert_int_equal(tagc_changes_apply(2, message, n_bytes, values, 10), TAGC_OK);
    assert_int_equal(values[3], 0x8000);
    assert_int_equal(values[4], 0);
    tagc_wire_header header;
    assert_int_equal(tagc_wire_read(message, n_bytes, &header), TAGC_OK);
    message[n_bytes - 1] = 0x80; /* a bit behind the last integer */
    tagc_wire_write(&header, message);
    apply_refused(2, message, n_bytes, 10, TAGC_ERR_CORRUPT, "the message's positions or values are damaged");
    for (size_t c = 0; c < sizeof wrong / sizeof *wrong; c++) {
        n_bytes = make_rows(wrong[c], 2, 10, message);
        apply_refused(2, message, n_bytes, 10, TAGC_ERR_CORRUPT,
                      "the message's positions or values are damaged");
    }
    for (int i = 0; i < 17; i++) many[i][0] = (uint8_t)i, many[i][1] = many[i][2] = 64, many[i][4] = i == 0;
    n_bytes = make_rows(many, 16, 10, message);
    assert_int_equal(tagc_changes_check(2, message, n_bytes, 10, NULL), TAGC_OK);
    n_bytes = make_rows(many, 17, 10, message); /* classes */
    apply_refused(2, message, n_bytes, 10, TAGC_ERR_CORRUPT, "the message's positions or values are damaged");
}

/* Positions and sizes say most of it: of steps of one size, like those of lab/studies/weight_speed.py, 10.3 bits a change at 1 %. */
TEST(test_one_size) {
    enum { MANY = 1 << 20 };
    static uint16_t before[MANY], after[MANY];
    double n_changes;
    random_state = 12;
    for (size_t i = 0; i < MANY; i++) {
        float weight = 0.02f * tagc_normal_of(tagc_next_random(&random_state));
        float moved = weight + 2.49e-7f * tagc_normal_of(tagc_next_random(&random_state));
        before[i] = (uint16_t)((bits_of(weight) + 0x8000) >> 16);
        after[i] = (uint16_t)((bits_of(moved) + 0x8000) >> 16);
    }
    double bits = bits_per_change(before, after, MANY, 0, &n_changes);
    print_message("%.3f %%, %.2f bits by place, %.2f by magnitude\n", 100 * n_changes / MANY, bits,
                  bits_per_change(before, after, MANY, 1, &n_changes));
    assert_true(n_changes / MANY > 0.0099 && n_changes / MANY < 0.0101);
    assert_true(bits < 10.3);
}

/* Where an array is not what the sender had, and has fewer elements of a class, that is seen. */
TEST(test_another_array) {
    uint16_t before[N], after[N];
    uint8_t message[MOST];
    uint64_t n_bytes;
    for (size_t i = 0; i < N; i++) before[i] = (uint16_t)(i % 3 ? 0x3c00 : 0x2000), after[i] = before[i];
    for (size_t i = 0; i < N; i += 3) after[i]++; /* all small ones */
    assert_int_equal(tagc_changes_encode(2, before, after, N, 1, message, MOST, &n_bytes, NULL), TAGC_OK);
    for (size_t i = 0; i < N; i++) before[i] = 0x3c00;
    refused(tagc_changes_apply(2, message, n_bytes, before, N), TAGC_ERR_MISMATCH,
            "the array is not what the sender had before");
}

/* The example of docs/reference/wire-format.md. */
TEST(test_documented) {
    static const uint16_t before[20] = {0x3f80, [7] = 0x0000, [18] = 0xbc01};
    static const uint16_t after[20] = {0x3f81, [7] = 0x8000, [18] = 0xbc03};
    static const uint8_t body[8 + 12 + 3] = {
        3,    0,    0,    0, 1, 1, 0, 0,             /* n_items, form, lists */
        0,    0x44, 0x42, 0, 3, 0, 0, 0, 3, 0, 0, 0, /* first grade, codes, size, items, bytes */
        0x90, 0xa1, 0x02, /* gaps 0, 6 and 10, integers 1, 0 and 2: +1, -1 and -2 */
    };
    uint8_t message[HEADER + 12 + 40];
    uint64_t n_bytes;
    uint16_t values[20];
    assert_int_equal(tagc_changes_encode(2, before, after, 20, 1, message, sizeof message, &n_bytes, NULL),
                     TAGC_OK);
    assert_int_equal(n_bytes, HEADER + sizeof body);
    assert_memory_equal(message + HEADER, body, sizeof body);
    memcpy(values, before, sizeof values);
    assert_int_equal(tagc_changes_apply(2, message, n_bytes, values, 20), TAGC_OK);
    assert_memory_equal(values, after, sizeof after);
}
