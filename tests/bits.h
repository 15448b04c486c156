/* A float as its bits, and back; and rounded to bf16. */
#ifndef TAGC_TESTS_BITS_H
#define TAGC_TESTS_BITS_H

#include <math.h>
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

/* The nearest of what bf16 has, the even one of two; beyond the largest, where infinity would be next, that. */
static inline float bf16_nearest(float x) {
    uint32_t low = bits_of(x) & 0xffff0000u;
    float a = float_of(low), b = float_of(low + 0x10000u);
    double beyond = isinf(b) ? copysign(0x1p128, (double)a) : (double)b;
    double below = fabs((double)a - (double)x), above = fabs(beyond - (double)x);
    if (below != above) return below < above ? a : b;
    return low & 0x10000u ? b : a;
}

static inline float bf16_wide(uint16_t half) {
    return float_of((uint32_t)half << 16);
}

#endif
