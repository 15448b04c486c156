/* Random numbers of the codec's tests. Each file has a seed of its own: #define RANDOM_SEED before including. Each test
 * and each trial of it begins anew with random_begin, so that what it draws does not depend on what ran before it.
 * What runs once per level of the processor puts random_state back, so that the draws after it are the same on every
 * processor. */
#ifndef TAGC_TESTS_CODEC_RANDOM_H
#define TAGC_TESTS_CODEC_RANDOM_H

#include <stddef.h>
#include <stdint.h>

static uint64_t random_state = RANDOM_SEED;

static inline uint64_t random_u64(void) {
    uint64_t x = random_state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Begins the draws of one trial of one test. */
static inline void random_begin(uint64_t test, uint64_t trial) {
    random_state = RANDOM_SEED;
    random_state = random_u64() + test;
    random_state = random_u64() + trial;
    random_state = random_u64();
}

static inline size_t random_below(size_t limit) {
    return (size_t)(random_u64() % limit);
}

static inline double random_uniform(void) { /* [0, 1) */
    return (double)(random_u64() >> 11) * 0x1p-53;
}

static inline float random_normal(void) {
    double sum = 0;
    for (int i = 0; i < 6; i++) sum += random_uniform();
    return (float)((sum - 3) * 1.41421356);
}

#endif
