/* XXH64 against what the xxHash library made: stored values, and the library itself where its header is installed. */
#include <stdlib.h>
#include <string.h>

#ifdef __has_include
#if __has_include(<xxhash.h>)
#define XXH_INLINE_ALL
#include <xxhash.h>
#endif
#endif

#include "../test.h"
#include "data/xxh64.h"

enum { MOST = 5000 };
static const uint64_t a_seed = 0xfedcba9876543210u;
static const struct {
    size_t n_bytes;
    uint64_t hash, seeded;
} stored[] = {{0, 0xef46db3751d8e999u, 0x7cc8df76db892f66u},   {1, 0x572d9776245c85e8u, 0x83f2784f307aa8bcu},
              {3, 0x3ad3cf99e7d69857u, 0xb318347ba3fa0de7u},   {4, 0x0494f29e4fce505au, 0x64dd51c2d33871fdu},
              {7, 0xd7be5e44ff7951d0u, 0x814368dd1ae34fd3u},   {8, 0x9a1b98124e5a6fe2u, 0x21f890d08c1a467au},
              {31, 0x5f495491d6a3f4f5u, 0xa4fd8e46711031b6u},  {32, 0x7752321664d3c9a2u, 0xa0c8130a3182213bu},
              {33, 0x1226309ab5837a0du, 0x111ff368cb337d49u},  {64, 0xc9e644e7cf60bc09u, 0x5a3e1410d4106ce4u},
              {5000, 0x32aa4b4f99bf9ae5u, 0x7e6229128f706b49u}};
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
        assert_int_equal(tagc_xxh64(bytes, stored[i].n_bytes, 0), stored[i].hash);
        assert_int_equal(tagc_xxh64(bytes, stored[i].n_bytes, a_seed), stored[i].seeded);
    }
    assert_int_equal(tagc_xxh64(NULL, 0, 0), stored[0].hash);
}

/* Copies of exactly these bytes: a sanitizer sees what is read beside them. */
TEST(gives_the_values_of_the_library) {
#ifdef XXH_INLINE_ALL
    for (size_t n = 1; n < MOST; n += n < 1200 ? 1 : 61) {
        unsigned char *copy = malloc(n);
        memcpy(copy, bytes + MOST - n, n);
        assert_int_equal(tagc_xxh64(copy, n, 0), XXH64(copy, n, 0));
        assert_int_equal(tagc_xxh64(copy, n, a_seed), XXH64(copy, n, a_seed));
        free(copy);
    }
#else
    skip();
#endif
}

int main(void) {
    return test_run(fill, NULL);
}
