/* XXH64 by its specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md): stripes of 32 bytes into four lanes, then what is left. */
#include "data/xxh64.h"

#include <string.h>

#define PRIME_1 0x9E3779B185EBCA87u
#define PRIME_2 0xC2B2AE3D27D4EB4Fu
#define PRIME_3 0x165667B19E3779F9u
#define PRIME_4 0x85EBCA77C2B2AE63u
#define PRIME_5 0x27D4EB2F165667C5u

enum { STRIPE = 32 };

static uint64_t word(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t turn(uint64_t value, int n_bits) {
    return value << n_bits | value >> (64 - n_bits);
}

static uint64_t round_of(uint64_t lane, uint64_t value) {
    return turn(lane + value * PRIME_2, 31) * PRIME_1;
}

static uint64_t stripes(const uint8_t *at, size_t n_stripes, uint64_t seed) {
    uint64_t lanes[4] = {seed + PRIME_1 + PRIME_2, seed + PRIME_2, seed, seed - PRIME_1};
    for (; n_stripes > 0; n_stripes--, at += STRIPE)
        for (int i = 0; i < 4; i++) lanes[i] = round_of(lanes[i], word(at + 8 * i));
    uint64_t hash = turn(lanes[0], 1) + turn(lanes[1], 7) + turn(lanes[2], 12) + turn(lanes[3], 18);
    for (int i = 0; i < 4; i++) hash = (hash ^ round_of(0, lanes[i])) * PRIME_1 + PRIME_4;
    return hash;
}

uint64_t tagc_xxh64(const void *bytes, size_t n_bytes, uint64_t seed) {
    const uint8_t *at = bytes;
    size_t n = n_bytes % STRIPE;
    uint64_t hash = n_bytes + (n_bytes < STRIPE ? seed + PRIME_5 : stripes(at, n_bytes / STRIPE, seed));
    if (n_bytes >= STRIPE) at += n_bytes - n;
    for (; n >= 8; at += 8, n -= 8) hash = turn(hash ^ round_of(0, word(at)), 27) * PRIME_1 + PRIME_4;
    if (n >= 4) {
        uint32_t half;
        memcpy(&half, at, sizeof half);
        hash = turn(hash ^ half * PRIME_1, 23) * PRIME_2 + PRIME_3;
        at += 4;
        n -= 4;
    }
    for (; n > 0; at++, n--) hash = turn(hash ^ *at * PRIME_5, 11) * PRIME_1;
    hash = (hash ^ hash >> 33) * PRIME_2;
    hash = (hash ^ hash >> 29) * PRIME_3;
    return hash ^ hash >> 32;
}
