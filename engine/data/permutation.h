/* A random order of [0, n) without a table: item i of it is computed. So a corpus of any size is shuffled without memory, and
 * a loader can start anywhere.
 *
 * A Feistel network permutes the smallest domain of 4^k values that holds n. A result outside [0, n) is permuted again until
 * it is inside, which keeps the map one-to-one and takes fewer than 4 turns on average. */
#ifndef TAGC_DATA_PERMUTATION_H
#define TAGC_DATA_PERMUTATION_H

#include <stdint.h>

typedef struct tagc_permutation {
    uint64_t n, key;
    int half_bits; /* k */
} tagc_permutation;

uint64_t
tagc_mix64(uint64_t value); /* a bijection of 64 bits in which every input bit moves every output bit */

tagc_permutation tagc_permutation_make(uint64_t n, uint64_t key);              /* n in [1, 2^62] */
uint64_t tagc_permutation_at(const tagc_permutation *permutation, uint64_t i); /* i < n */

#endif
