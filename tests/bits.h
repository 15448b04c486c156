/* A float as its bits, and back. */
#ifndef TAGC_TESTS_BITS_H
#define TAGC_TESTS_BITS_H

#include <stdint.h>
#include <string.h>

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#endif
