/* XXH3 by its specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md): bytes go in stripes of 64, 16 stripes are a block, and inputs
 * of up to 240 bytes have ways of their own. */
#include "core/xxh3.h"

#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are read as they lie in memory"
#endif

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87u
#define PRIME64_2 0xC2B2AE3D27D4EB4Fu
#define PRIME64_3 0x165667B19E3779F9u
#define PRIME64_4 0x85EBCA77C2B2AE63u
#define PRIME64_5 0x27D4EB2F165667C5u

enum { STRIPE = 64, BLOCK = 1024, SECRET = 192 };

static const uint8_t secret_0[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

static uint64_t word(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint32_t half_word(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t turn(uint64_t value, int n_bits) {
    return value << n_bits | value >> (64 - n_bits);
}

static uint64_t fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* ---- up to 240 bytes ---- */

static uint64_t avalanche(uint64_t hash) {
    hash = (hash ^ hash >> 37) * 0x165667919E3779F9u;
    return hash ^ hash >> 32;
}

static uint64_t avalanche_of_xxh64(uint64_t hash) {
    hash = (hash ^ hash >> 33) * PRIME64_2;
    hash = (hash ^ hash >> 29) * PRIME64_3;
    return hash ^ hash >> 32;
}

static uint64_t up_to_16(const uint8_t *bytes, size_t n, uint64_t seed) {
    const uint8_t *secret = secret_0;
    if (n == 0) return avalanche_of_xxh64(seed ^ word(secret + 56) ^ word(secret + 64));
    if (n < 4) {
        uint32_t all =
            (uint32_t)bytes[0] << 16 | (uint32_t)bytes[n / 2] << 24 | bytes[n - 1] | (uint32_t)n << 8;
        return avalanche_of_xxh64(all ^ ((half_word(secret) ^ half_word(secret + 4)) + seed));
    }
    if (n <= 8) {
        seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
        uint64_t all = half_word(bytes + n - 4) + ((uint64_t)half_word(bytes) << 32);
        uint64_t hash = all ^ ((word(secret + 8) ^ word(secret + 16)) - seed);
        hash = (hash ^ turn(hash, 49) ^ turn(hash, 24)) * 0x9FB21C651E98DF25u;
        hash = (hash ^ ((hash >> 35) + n)) * 0x9FB21C651E98DF25u;
        return hash ^ hash >> 28;
    }
    uint64_t low = word(bytes) ^ ((word(secret + 24) ^ word(secret + 32)) + seed);
    uint64_t high = word(bytes + n - 8) ^ ((word(secret + 40) ^ word(secret + 48)) - seed);
    return avalanche(n + __builtin_bswap64(low) + high + fold(low, high));
}

static uint64_t mix(const uint8_t *bytes, const uint8_t *secret, uint64_t seed) { /* 16 bytes of each */
    return fold(word(bytes) ^ (word(secret) + seed), word(bytes + 8) ^ (word(secret + 8) - seed));
}

static uint64_t up_to_240(const uint8_t *bytes, size_t n, uint64_t seed) {
    const uint8_t *secret = secret_0;
    uint64_t hash = n * PRIME64_1;
    if (n <= 128) { /* from both ends to the middle */
        for (size_t i = 0; i <= (n - 1) / 32; i++)
            hash += mix(bytes + 16 * i, secret + 32 * i, seed) +
                    mix(bytes + n - 16 * (i + 1), secret + 32 * i + 16, seed);
        return avalanche(hash);
    }
    for (size_t i = 0; i < 8; i++) hash += mix(bytes + 16 * i, secret + 16 * i, seed);
    hash = avalanche(hash);
    for (size_t i = 8; i < n / 16; i++) hash += mix(bytes + 16 * i, secret + 16 * (i - 8) + 3, seed);
    return avalanche(hash + mix(bytes + n - 16, secret + 119, seed));
}

/* ---- more ---- */

static void begin_lanes(uint64_t lanes[8]) {
    static const uint64_t first[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                      PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(lanes, first, sizeof first);
}

#if defined(__SSE2__)
static void add_stripes(uint64_t lanes[8], const uint8_t *bytes, size_t n_stripes, const uint8_t *secret) {
    __m128i sums[4]; /* two lanes each */
    memcpy(sums, lanes, sizeof sums);
    for (size_t s = 0; s < n_stripes; s++, bytes += STRIPE, secret += 8)
        for (int i = 0; i < 4; i++) {
            __m128i values = _mm_loadu_si128((const __m128i *)bytes + i);
            __m128i keys = _mm_xor_si128(values, _mm_loadu_si128((const __m128i *)secret + i));
            __m128i products = _mm_mul_epu32(keys, _mm_srli_epi64(keys, 32));
            __m128i swapped = _mm_shuffle_epi32(values, _MM_SHUFFLE(1, 0, 3, 2));
            sums[i] = _mm_add_epi64(sums[i], _mm_add_epi64(products, swapped));
        }
    memcpy(lanes, sums, sizeof sums);
}
#else
static void add_stripes(uint64_t lanes[8], const uint8_t *bytes, size_t n_stripes, const uint8_t *secret) {
    for (size_t s = 0; s < n_stripes; s++, bytes += STRIPE, secret += 8)
        for (int i = 0; i < 8; i++) {
            uint64_t key = word(bytes + 8 * i) ^ word(secret + 8 * i);
            lanes[i ^ 1] += word(bytes + 8 * i);
            lanes[i] += (key & 0xFFFFFFFFu) * (key >> 32);
        }
}
#endif

static void add_block(uint64_t lanes[8], const uint8_t *bytes, const uint8_t *secret) {
    add_stripes(lanes, bytes, BLOCK / STRIPE, secret);
    for (int i = 0; i < 8; i++)
        lanes[i] = (lanes[i] ^ lanes[i] >> 47 ^ word(secret + SECRET - STRIPE + 8 * i)) * PRIME32_1;
}

/* `rest` has the last n_rest bytes, 1 to 1024; the stripe before it can be read, too. */
static uint64_t end_lanes(uint64_t lanes[8], const uint8_t *rest, size_t n_rest, uint64_t n_bytes,
                          const uint8_t *secret) {
    add_stripes(lanes, rest, (n_rest - 1) / STRIPE, secret);
    add_stripes(lanes, rest + n_rest - STRIPE, 1, secret + SECRET - STRIPE - 7);
    uint64_t hash = n_bytes * PRIME64_1;
    for (int i = 0; i < 8; i += 2)
        hash += fold(lanes[i] ^ word(secret + 11 + 8 * i), lanes[i + 1] ^ word(secret + 19 + 8 * i));
    return avalanche(hash);
}

uint64_t tagc_xxh3(const void *bytes, size_t n_bytes, uint64_t seed) {
    if (n_bytes <= 16) return up_to_16(bytes, n_bytes, seed);
    if (n_bytes <= 240) return up_to_240(bytes, n_bytes, seed);
    uint8_t seeded[SECRET];
    const uint8_t *secret = secret_0;
    if (seed != 0) {
        for (int i = 0; i < SECRET; i += 16) {
            uint64_t pair[2] = {word(secret_0 + i) + seed, word(secret_0 + i + 8) - seed};
            memcpy(seeded + i, pair, sizeof pair);
        }
        secret = seeded;
    }
    uint64_t lanes[8];
    begin_lanes(lanes);
    const uint8_t *at = bytes;
    size_t n_left = n_bytes;
    for (; n_left > BLOCK; at += BLOCK, n_left -= BLOCK) add_block(lanes, at, secret);
    return end_lanes(lanes, at, n_left, n_bytes, secret);
}

/* ---- piece by piece ---- */

void tagc_xxh3_begin(tagc_xxh3_state *state) {
    begin_lanes(state->lanes);
    state->n_bytes = 0;
    state->n_waiting = 0;
}

/* A whole block waits until another byte comes: the last one goes another way. */
void tagc_xxh3_add(tagc_xxh3_state *state, const void *bytes, size_t n_bytes) {
    const uint8_t *at = bytes;
    state->n_bytes += n_bytes;
    while (n_bytes > 0) {
        if (state->n_waiting == BLOCK) {
            add_block(state->lanes, state->waiting, secret_0);
            memcpy(state->before, state->waiting + BLOCK - STRIPE, STRIPE);
            state->n_waiting = 0;
        }
        if (state->n_waiting == 0 && n_bytes > BLOCK) {
            for (; n_bytes > BLOCK; at += BLOCK, n_bytes -= BLOCK) add_block(state->lanes, at, secret_0);
            memcpy(state->before, at - STRIPE, STRIPE);
        }
        size_t n_free = BLOCK - state->n_waiting, n = n_bytes < n_free ? n_bytes : n_free;
        memcpy(state->waiting + state->n_waiting, at, n);
        state->n_waiting += n;
        at += n;
        n_bytes -= n;
    }
}

uint64_t tagc_xxh3_end(const tagc_xxh3_state *state) {
    if (state->n_bytes <= 240) return tagc_xxh3(state->waiting, state->n_waiting, 0);
    uint64_t lanes[8];
    memcpy(lanes, state->lanes, sizeof lanes);
    uint8_t rest[STRIPE + BLOCK];
    memcpy(rest, state->before, STRIPE);
    memcpy(rest + STRIPE, state->waiting, state->n_waiting);
    return end_lanes(lanes, rest + STRIPE, state->n_waiting, state->n_bytes, secret_0);
}
