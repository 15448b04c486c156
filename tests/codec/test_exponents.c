/* bf16 with exponents in codes, against a reader that follows the format bit by bit: every pattern of 16 bits, arrays of
 * every length around groups, words and chunks, the fewest bytes that any width and base give, and bytes of any content,
 * which both refuse or read alike. */
#define RANDOM_SEED 23
#include "../repeats.h"
#include "../test.h"
#include "codec/exponents.h"
#include "random.h"

#include <stdlib.h>
#include <string.h>

enum { CHUNK = TAGC_EXPONENTS_CHUNK };

static void *room(size_t n_bytes) { /* exact, for the address sanitizer */
    void *memory = malloc(n_bytes ? n_bytes : 1);
    assert_non_null(memory);
    return memory;
}

/* ---- the naive reader ---- */

static unsigned bit_at(const uint8_t *bytes, size_t bit) {
    return bytes[bit / 8] >> bit % 8 & 1;
}

/* Returns the bytes of a chunk, or 0. */
static size_t read_chunk(const uint8_t *body, size_t n_bytes, uint16_t *values, size_t n) {
    if (n_bytes < 4) return 0;
    size_t w = body[0], base = body[1], n_escapes = body[2] + 256u * body[3], n_codes = (n + 7) / 8 * 8,
           used = 0;
    if (w == 8) {
        if (base || n_escapes || n_bytes < 4 + 2 * n) return 0;
        for (size_t i = 0; i < n; i++) values[i] = (uint16_t)(body[4 + 2 * i] | body[5 + 2 * i] << 8);
        return 4 + 2 * n;
    }
    if (w > 4 || n_bytes < 4 + n + w * n_codes / 8 + n_escapes) return 0;
    const uint8_t *codes = body + 4 + n, *escapes = codes + w * n_codes / 8;
    for (size_t i = 0; i < n_codes; i++) {
        size_t code = 0, exponent;
        for (size_t b = 0; b < w; b++) code |= (size_t)bit_at(codes, i * w + b) << b;
        if (w > 0 && code == ((size_t)1 << w) - 1) {
            if (used == n_escapes) return 0;
            exponent = escapes[used++];
        } else {
            exponent = (base + code) & 255;
        }
        if (i < n) values[i] = (uint16_t)((body[4 + i] & 0x80u) << 8 | exponent << 7 | (body[4 + i] & 0x7fu));
    }
    return used == n_escapes ? 4 + n + w * n_codes / 8 + n_escapes : 0;
}

static int read_naively(const uint8_t *body, size_t n_bytes, uint16_t *values, size_t n) {
    for (size_t at = 0; at < n; at += CHUNK) {
        size_t here = read_chunk(body, n_bytes, values + at, n - at < CHUNK ? n - at : CHUNK);
        if (here == 0) return 0;
        body += here;
        n_bytes -= here;
    }
    return n_bytes == 0;
}

/* The fewest bytes of a chunk, by trying all widths and bases. */
static size_t fewest(const uint16_t *values, size_t n) {
    size_t best = 4 + 2 * n;
    for (size_t w = 0; w <= 4; w++)
        for (size_t base = 0; base < 256; base++) {
            size_t n_named = w ? ((size_t)1 << w) - 1 : 1, n_outside = 0;
            for (size_t i = 0; i < n; i++) n_outside += (size_t)(values[i] >> 7 & 255) - base >= n_named;
            size_t n_bytes = 4 + n + w * ((n + 7) / 8) + n_outside;
            if ((w > 0 || n_outside == 0) && n_bytes < best) best = n_bytes;
        }
    return best;
}

/* ---- arrays ---- */

enum { WEIGHTS, ANYTHING, ALIKE, TWO, SPECIAL, N_CONTENTS };

/* width: of the exponents' spread. */
static void fill(uint16_t *values, size_t n, int content, unsigned width) {
    static const uint16_t special[] = {0,      0x8000, 0x7f80, 0xff80, 0x7f81, 0xffff,
                                       0x7fc0, 0xff91, 0x0001, 0x807f, 0x7f7f};
    for (size_t i = 0; i < n; i++) {
        uint16_t any = (uint16_t)random_u64(), exponent = 120;
        while (content == WEIGHTS && exponent > 2 && random_below(width) != 0) exponent--;
        if (content == TWO) exponent = random_below(20) ? 3 : 250;
        values[i] = content == ANYTHING  ? any
                    : content == SPECIAL ? special[random_below(sizeof special / sizeof special[0])]
                                         : (uint16_t)((any & 0x807f) | exponent << 7);
    }
}

static void check_array(const uint16_t *values, size_t n) {
    size_t most = tagc_exponents_max_bytes(n);
    uint8_t *body = room(most + 1), *exact;
    uint16_t *back = room(n * sizeof *back), *naive = room(n * sizeof *naive);
    body[most] = 0xa5;
    size_t n_bytes = tagc_exponents_encode(values, n, body);
    assert_true(n_bytes <= most && body[most] == 0xa5);
    exact = memcpy(room(n_bytes), body, n_bytes);
    assert_int_equal(read_naively(exact, n_bytes, naive, n), 1);
    assert_int_equal(tagc_exponents_decode(exact, n_bytes, back, n), 1);
    assert_memory_equal(naive, values, n * sizeof *values);
    assert_memory_equal(back, values, n * sizeof *values);
    if (n > 0 && n <= 300) assert_int_equal(n_bytes, fewest(values, n));
    free(body), free(exact), free(back), free(naive);
}

TEST(test_every_pattern) {
    uint16_t *values = room(65536 * sizeof *values);
    for (size_t i = 0; i < 65536; i++) values[i] = (uint16_t)(i * 257 % 65536);
    check_array(values, 65536);
    for (size_t i = 0; i < 65536; i++) values[i] = (uint16_t)i; /* exponents in a row: 32 to a chunk */
    check_array(values, 65536);
    free(values);
}

/* docs/reference/wire-format.md */
TEST(test_worked_example) {
    static const uint16_t values[] = {0x3f80, 0xbfc0, 0x3f40, 0x3f00, 0};
    static const uint8_t expected[] = {2, 0x7d, 1, 0, 0, 0xc0, 0x40, 0, 0, 0x5a, 3, 0};
    uint8_t body[14];
    assert_int_equal(tagc_exponents_max_bytes(5), sizeof body);
    assert_int_equal(tagc_exponents_encode(values, 5, body), sizeof expected);
    assert_memory_equal(body, expected, sizeof expected);
}

TEST(test_lengths_and_contents) {
    static const size_t lengths[] = {
        0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 300, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77};
    for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++)
        for (int trial = 0; trial < 4 * N_CONTENTS; trial++) {
            uint16_t *values = room(lengths[l] * sizeof *values);
            random_begin(1, (uint64_t)trial);
            fill(values, lengths[l], trial % N_CONTENTS, 1 + (unsigned)trial / N_CONTENTS);
            check_array(values, lengths[l]);
            free(values);
        }
}

/* A bell curve takes 11.2 bits; alike exponents take none. */
TEST(test_size) {
    enum { N = 8 * CHUNK };
    uint16_t *values = room(N * sizeof *values);
    uint8_t *body = room(tagc_exponents_max_bytes(N));
    random_begin(2, 0);
    for (size_t i = 0; i < N; i++) {
        float sum = 0; /* of twelve: nearly a bell curve */
        uint32_t bits;
        for (int k = 0; k < 12; k++) sum += (float)random_uniform() - 0.5f;
        memcpy(&bits, &sum, sizeof bits);
        values[i] = (uint16_t)(bits >> 16);
    }
    double bits = 8.0 * (double)tagc_exponents_encode(values, N, body) / N;
    assert_true(bits > 11 && bits < 11.3);
    fill(values, N, ALIKE, 0);
    assert_int_equal(tagc_exponents_encode(values, N, body), N + 4 * (N / CHUNK));
    fill(values, N, ANYTHING, 0);
    assert_int_equal(tagc_exponents_encode(values, N, body), tagc_exponents_max_bytes(N));
    free(values), free(body);
}

TEST(test_hostile) {
    const int n_trials = REPEATS(4000, 800, 0);
    int n_taken = 0;
    for (int trial = 0; trial < n_trials; trial++) {
        random_begin(3, (uint64_t)trial);
        size_t n = 1 + random_below(trial % 16 ? 200 : 2 * CHUNK), most = tagc_exponents_max_bytes(n);
        uint16_t *values = room(n * sizeof *values), *back = room(n * sizeof *back),
                 *naive = room(n * sizeof *naive);
        uint8_t *body = room(most);
        fill(values, n, trial % N_CONTENTS, 2);
        size_t n_bytes = tagc_exponents_encode(values, n, body);
        int kind = trial / N_CONTENTS % 4;
        if (kind == 0) n_bytes -= 1 + random_below(n_bytes); /* cut off */
        if (kind == 1 && n_bytes < most) body[n_bytes++] = 0;
        for (size_t hits = kind >= 2 ? 1 + random_below(3) : 0; hits > 0; hits--)
            body[kind == 2 ? random_below(4) : random_below(n_bytes)] =
                (uint8_t)random_below(random_below(2) ? 10 : 256);
        uint8_t *exact = memcpy(room(n_bytes), body, n_bytes);
        int taken = tagc_exponents_decode(exact, n_bytes, back, n);
        assert_int_equal(taken, read_naively(exact, n_bytes, naive, n));
        if (taken) assert_memory_equal(back, naive, n * sizeof *back);
        n_taken += taken;
        free(values), free(back), free(naive), free(body), free(exact);
    }
    assert_true(n_trials == 0 || (n_taken > n_trials / 20 && n_taken < n_trials / 2));
}
