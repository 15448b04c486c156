/* Sets of elements as one char each, for tests of bitmaps and nibbles. Define RANDOM_SEED before including. */
#ifndef TAGC_TESTS_CODEC_SETS_H
#define TAGC_TESTS_CODEC_SETS_H

#include "../test.h"
#include "codec/bitmap.h"
#include "random.h"

#include <stdlib.h>
#include <string.h>

/* One char per element and its ascending positions; both exactly as long as needed, so that ASan sees a step
 * over. */
typedef struct set {
    size_t n, n_set;
    char *is_set;
    uint32_t *indices;
} set;

static inline set set_make(size_t n, double density) {
    set s = {.n = n, .is_set = malloc(n + 1)};
    for (size_t i = 0; i < n; i++) s.n_set += s.is_set[i] = random_uniform() < density;
    s.indices = malloc(s.n_set * sizeof(uint32_t) + 1);
    for (size_t i = 0, k = 0; i < n; i++)
        if (s.is_set[i]) s.indices[k++] = (uint32_t)i;
    return s;
}

static inline void set_free(set *s) {
    free(s->is_set);
    free(s->indices);
}

/* Room for n_bytes that nothing has cleared. */
static inline uint8_t *dirty_bytes(size_t n_bytes) {
    uint8_t *bytes = malloc(n_bytes + 1);
    memset(bytes, 0xa5, n_bytes + 1);
    return bytes;
}

static inline int bit_of(const uint8_t *bits, size_t i) {
    return bits[i / 8] >> (i % 8) & 1;
}

static inline void assert_bits(const uint8_t *bits, size_t n, const char *expected) {
    for (size_t i = 0; i < n; i++) assert_int_equal(bit_of(bits, i), expected[i] != 0);
    for (size_t i = n; i < 8 * tagc_bitmap_bytes(n); i++) assert_int_equal(bit_of(bits, i), 0);
    assert_int_equal(tagc_bitmap_valid(bits, n), 1);
}

static const size_t sizes[] = {0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 4095, 4097, 60011};
enum { N_SIZES = sizeof sizes / sizeof *sizes };

#endif
