/* Ranks with comms (../ranks.h), and random gradients for them. */
#ifndef TAGC_TESTS_EXCHANGE_RANKS_H
#define TAGC_TESTS_EXCHANGE_RANKS_H

#include "../ranks.h"
#include "../residual.h"

#define MAX_RANKS 16

static inline uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Heavy-tailed, and about half alike between ranks, so that what they keep overlaps in part. */
static inline float random_gradient(uint64_t seed, int rank, uint64_t i) {
    double common = (double)(mix(seed * 7919 + i) >> 11) / 9007199254740992.0 - 0.5;
    double own =
        (double)(mix((seed * 64 + (uint64_t)rank + 1) * 1000003 + i) >> 11) / 9007199254740992.0 - 0.5;
    double x = common + own;
    return (float)(x * x * x * 1e-2);
}

#endif
