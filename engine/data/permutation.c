/* See permutation.h. */
#include "data/permutation.h"

enum { N_ROUNDS = 6 };

uint64_t tagc_mix64(uint64_t value) {
    value += 0x9e3779b97f4a7c15u;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
}

tagc_permutation tagc_permutation_make(uint64_t n, uint64_t key) {
    tagc_permutation permutation = {n, key, 1};
    while (permutation.half_bits < 31 && (UINT64_C(1) << (2 * permutation.half_bits)) < n)
        permutation.half_bits++;
    return permutation;
}

static uint64_t feistel(const tagc_permutation *p, uint64_t value) {
    uint64_t mask = (UINT64_C(1) << p->half_bits) - 1;
    uint64_t left = value >> p->half_bits, right = value & mask;
    for (uint64_t round = 0; round < N_ROUNDS; round++) {
        uint64_t next = left ^ (tagc_mix64(p->key ^ tagc_mix64(right << 3 | round)) & mask);
        left = right;
        right = next;
    }
    return left << p->half_bits | right;
}

uint64_t tagc_permutation_at(const tagc_permutation *permutation, uint64_t i) {
    do {
        i = feistel(permutation, i);
    } while (i >= permutation->n);
    return i;
}
