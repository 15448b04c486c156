/* Values in few bits by plain code, one value at a time: scales, rounding to the nearest and at random. It shares nothing with lib/. */
#ifndef TAGC_TESTS_EXCHANGE_BLOCKS_ORACLE_H
#define TAGC_TESTS_EXCHANGE_BLOCKS_ORACLE_H

#include "../bits.h"
#include "tagc/tagc.h"

#include <math.h>
#include <stddef.h>

static inline uint16_t oracle_half(float x, int up) { /* of a finite x >= 0 */
    uint32_t bits = bits_of(x), low = bits >> 16;
    double below = (double)float_of(low << 16), above = (double)float_of((low + 1) << 16), exact = (double)x;
    if (below == exact) return (uint16_t)low;
    if (up) return (uint16_t)(low + 1);
    if (exact - below != above - exact) return (uint16_t)(exact - below < above - exact ? low : low + 1);
    return (uint16_t)(low & 1 ? low + 1 : low);
}

static inline float oracle_wide(uint16_t half) {
    return float_of((uint32_t)half << 16);
}

static inline uint64_t oracle_mixed(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* What the random bytes of one row in one step derive from. */
static inline uint32_t oracle_seed(uint64_t number, uint64_t step, uint32_t rank, uint32_t row) {
    uint64_t of_step = oracle_mixed(oracle_mixed(number + 0x9e3779b97f4a7c15u) + step);
    return (uint32_t)(oracle_mixed(of_step + ((uint64_t)rank << 32) + row) >> 32);
}

/* What the fraction of the value at a position has to reach for the integer above it, [0, 1) as 32 bits: the four bytes of a word,
 * from that of the position down and round. */
static inline uint32_t oracle_threshold(uint32_t seed, uint32_t position) {
    uint32_t threshold = 0;
    uint32_t x = seed + position / 4;
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15) * 0x735a2d97u;
    x ^= x >> 15;
    for (uint32_t i = 0; i < 4; i++) threshold = threshold << 8 | (x >> (position + 4 - i) % 4 * 8 & 255);
    return threshold;
}

/* The scale of a block (n) of int8 or int4, whose values are finite. 0: all of it becomes zero. */
static inline uint16_t oracle_scale(int format, int is_random, const float *x, size_t n) {
    float largest = 0;
    for (size_t i = 0; i < n; i++) largest = fmaxf(largest, fabsf(x[i]));
    float wanted = largest / (format == TAGC_FORMAT_INT8 ? 127 : 7);
    uint16_t half = wanted < 0x1p-126f ? 0 : oracle_half(wanted, is_random);
    uint16_t most =
        format == TAGC_FORMAT_INT8 ? 0x7bff : 0x7dff; /* the last whose 128-fold, or 8-fold, is finite */
    return half > most ? most : half;
}

/* threshold: NULL to the nearest. */
static inline int oracle_integer(int format, const uint32_t *threshold, float scale, float x) {
    const float most = format == TAGC_FORMAT_INT8 ? 127 : 7;
    float quotient = x * (1 / scale);
    quotient = quotient > most ? most : quotient < -most ? -most : quotient;
    if (!threshold) return (int)nearbyintf(quotient);
    int n_bits = format == TAGC_FORMAT_INT8 ? 24 : 28; /* that quotient and threshold have after the point */
    return (int)floor(
        ldexp(trunc(ldexp((double)quotient, n_bits)) + (double)(*threshold >> (32 - n_bits)), -n_bits));
}

#endif
