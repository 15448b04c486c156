/* See sha256.h. The constants are the first 32 bits of the fractions of the square roots of the first 8 primes, and of the cube roots of
 * the first 64 (FIPS 180-4, 4.2.2 and 5.3.3). */
#include "core/sha256.h"

#include <string.h>

static const uint32_t roots[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t turn(uint32_t x, int n) {
    return x >> n | x << (32 - n);
}

static uint32_t get(const unsigned char *from) {
    return (uint32_t)from[0] << 24 | (uint32_t)from[1] << 16 | (uint32_t)from[2] << 8 | from[3];
}

static void put(unsigned char *to, uint32_t value) {
    for (int i = 0; i < 4; i++) to[i] = (unsigned char)(value >> (24 - 8 * i));
}

/* FIPS 180-4, 6.2.2; its a to h are s[0] to s[7]. */
static void mix(uint32_t words[8], const unsigned char *block) {
    uint32_t w[64], s[8];
    memcpy(s, words, sizeof s);
    for (int t = 0; t < 16; t++) w[t] = get(block + (size_t)4 * (size_t)t);
    for (int t = 16; t < 64; t++) {
        uint32_t far = turn(w[t - 15], 7) ^ turn(w[t - 15], 18) ^ w[t - 15] >> 3,
                 near = turn(w[t - 2], 17) ^ turn(w[t - 2], 19) ^ w[t - 2] >> 10;
        w[t] = near + w[t - 7] + far + w[t - 16];
    }
    for (int t = 0; t < 64; t++) {
        uint32_t choice = (s[4] & s[5]) ^ (~s[4] & s[6]),
                 most = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]),
                 first = s[7] + (turn(s[4], 6) ^ turn(s[4], 11) ^ turn(s[4], 25)) + choice + roots[t] + w[t],
                 second = (turn(s[0], 2) ^ turn(s[0], 13) ^ turn(s[0], 22)) + most;
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += first;
        s[0] = first + second;
    }
    for (int i = 0; i < 8; i++) words[i] += s[i];
}

void tagc_sha256_begin(tagc_sha256 *hash) {
    *hash = (tagc_sha256){.words = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c,
                                    0x1f83d9ab, 0x5be0cd19}};
}

void tagc_sha256_add(tagc_sha256 *hash, const void *bytes, size_t n_bytes) {
    const unsigned char *from = bytes;
    while (n_bytes > 0) {
        size_t at = (size_t)(hash->n_bytes % TAGC_SHA256_BLOCK), n = TAGC_SHA256_BLOCK - at;
        if (n > n_bytes) n = n_bytes;
        memcpy(hash->waiting + at, from, n);
        if (at + n == TAGC_SHA256_BLOCK) mix(hash->words, hash->waiting);
        hash->n_bytes += n;
        from += n;
        n_bytes -= n;
    }
}

/* A bit, zeros, and the number of bits, so that a block is full. */
void tagc_sha256_end(tagc_sha256 *hash, unsigned char out[TAGC_SHA256_BYTES]) {
    static const unsigned char padding[TAGC_SHA256_BLOCK] = {0x80};
    unsigned char length[8];
    uint64_t n_bits = 8 * hash->n_bytes;
    put(length, (uint32_t)(n_bits >> 32));
    put(length + 4, (uint32_t)n_bits);
    size_t at = (size_t)(hash->n_bytes % TAGC_SHA256_BLOCK), end = TAGC_SHA256_BLOCK - sizeof length;
    tagc_sha256_add(hash, padding, at < end ? end - at : end + TAGC_SHA256_BLOCK - at);
    tagc_sha256_add(hash, length, sizeof length);
    for (size_t i = 0; i < 8; i++) put(out + 4 * i, hash->words[i]);
}

static void begin_with(tagc_sha256 *hash, const unsigned char *key, unsigned char pad) {
    unsigned char block[TAGC_SHA256_BLOCK];
    for (int i = 0; i < TAGC_SHA256_BLOCK; i++) block[i] = key[i] ^ pad;
    tagc_sha256_begin(hash);
    tagc_sha256_add(hash, block, sizeof block);
}

void tagc_hmac_sha256(const void *key, size_t n_key, const void *bytes, size_t n_bytes,
                      unsigned char out[TAGC_SHA256_BYTES]) {
    unsigned char block[TAGC_SHA256_BLOCK] = {0};
    tagc_sha256 hash;
    if (n_key > sizeof block) {
        tagc_sha256_begin(&hash);
        tagc_sha256_add(&hash, key, n_key);
        tagc_sha256_end(&hash, block);
    } else if (n_key > 0) {
        memcpy(block, key, n_key);
    }
    begin_with(&hash, block, 0x36);
    tagc_sha256_add(&hash, bytes, n_bytes);
    tagc_sha256_end(&hash, out);
    begin_with(&hash, block, 0x5c);
    tagc_sha256_add(&hash, out, TAGC_SHA256_BYTES);
    tagc_sha256_end(&hash, out);
}

int tagc_is_same_secret(const void *a, const void *b, size_t n_bytes) {
    const volatile unsigned char *left = a, *right = b; /* volatile: a compiler may not end the loop early */
    unsigned char difference = 0;
    for (size_t i = 0; i < n_bytes; i++) difference |= left[i] ^ right[i];
    return difference == 0;
}
