/* SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104): how ranks prove that they have a key (transport/native). It is here so that a build
 * needs nothing but a C compiler. */
#ifndef TAGC_CORE_SHA256_H
#define TAGC_CORE_SHA256_H

#include <stddef.h>
#include <stdint.h>

enum { TAGC_SHA256_BYTES = 32, TAGC_SHA256_BLOCK = 64 };

typedef struct tagc_sha256 {
    uint32_t words[8];
    uint64_t n_bytes;
    unsigned char waiting[TAGC_SHA256_BLOCK]; /* n_bytes % 64 of them */
} tagc_sha256;

void tagc_sha256_begin(tagc_sha256 *hash);
/* `bytes` may be NULL if n_bytes is 0. */
void tagc_sha256_add(tagc_sha256 *hash, const void *bytes, size_t n_bytes);
void tagc_sha256_end(tagc_sha256 *hash, unsigned char out[TAGC_SHA256_BYTES]);

void tagc_hmac_sha256(const void *key, size_t n_key, const void *bytes, size_t n_bytes,
                      unsigned char out[TAGC_SHA256_BYTES]);

/* Takes as long wherever the first difference is. */
int tagc_is_same_secret(const void *a, const void *b, size_t n_bytes);

#endif
