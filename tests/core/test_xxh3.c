/* XXH3 against what the xxHash library made: stored values, and the library itself where its header is installed. */
#include <stdlib.h>
#include <string.h>

#ifdef __has_include
#if __has_include(<xxhash.h>)
#define XXH_INLINE_ALL
#include <xxhash.h>
#endif
#endif

#include "../test.h"
#include "core/xxh3.h"

enum { MOST = 5000 };
static const uint64_t a_seed = 0xfedcba9876543210u;
static const struct {
    size_t n_bytes;
    uint64_t hash, seeded;
} stored[] = {
    {0, 0x2d06800538d394c2u, 0xe2bda2b8c0a330dau},    {1, 0x662d28d3d13f026eu, 0xedf8d05df3bf4756u},
    {3, 0x2c747287eb3e71ecu, 0xcce13d54a1f2451bu},    {4, 0x21b1c2dec620522fu, 0x170496f5679a914au},
    {8, 0xb7bf5a524935ee10u, 0x29d928d614573ba4u},    {9, 0x887f0bc55af03f6cu, 0xe6d7259ea8f3ba7eu},
    {16, 0xc88dbf6c83286cb2u, 0x89685fb30ca456deu},   {17, 0xa7ad52ac4307465bu, 0xee1a41d72eb9e356u},
    {128, 0x2983b0ea14e3d154u, 0xd9b2357739d8e69cu},  {129, 0x3c3aff74fcd86166u, 0xff5ab71ccd521335u},
    {240, 0x72d73668964d64dau, 0xdb107f50b33cfca7u},  {241, 0x709cc6b0bb10cecfu, 0xede3cdbfa1d2ec6du},
    {1024, 0xea7f8a03d630ab8eu, 0x18dea53767345778u}, {1025, 0x9b6b34fbb489ff25u, 0xc8dca565e0648a08u},
    {5000, 0xf7c86d7b3b47e0d6u, 0xfc103954242aff5fu}};
static unsigned char bytes[MOST];

static int fill(void **state) {
    (void)state;
    uint64_t x = 0x9E3779B185EBCA87u;
    for (int i = 0; i < MOST; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        bytes[i] = (unsigned char)(x >> 32);
    }
    return 0;
}

TEST(gives_the_stored_values) {
    for (size_t i = 0; i < sizeof stored / sizeof *stored; i++) {
        assert_int_equal(tagc_xxh3(bytes, stored[i].n_bytes, 0), stored[i].hash);
        assert_int_equal(tagc_xxh3(bytes, stored[i].n_bytes, a_seed), stored[i].seeded);
    }
    assert_int_equal(tagc_xxh3(NULL, 0, 0), stored[0].hash);
}

/* Copies of exactly these bytes: a sanitizer sees what is read beside them. */
TEST(gives_the_values_of_the_library) {
#ifdef XXH_INLINE_ALL
    for (size_t n = 1; n < MOST; n += n < 1200 ? 1 : 61) {
        unsigned char *copy = malloc(n);
        memcpy(copy, bytes + MOST - n, n);
        assert_int_equal(tagc_xxh3(copy, n, 0), XXH3_64bits(copy, n));
        assert_int_equal(tagc_xxh3(copy, n, a_seed), XXH3_64bits_withSeed(copy, n, a_seed));
        free(copy);
    }
#else
    skip();
#endif
}

TEST(pieces_give_the_same) {
    for (size_t n = 0; n < MOST; n += n < 1200 ? 1 : 61)
        for (size_t piece = 1; piece < 2 * n + 2; piece = 3 * piece + 1) {
            tagc_xxh3_state hash;
            tagc_xxh3_begin(&hash);
            for (size_t at = 0; at < n; at += piece)
                tagc_xxh3_add(&hash, bytes + at, n - at < piece ? n - at : piece);
            tagc_xxh3_add(&hash, NULL, 0);
            assert_int_equal(tagc_xxh3_end(&hash), tagc_xxh3(bytes, n, 0));
        }
}

int main(void) {
    return test_run(fill, NULL);
}
