/* XXH64, the checksum of token files, which is older than the XXH3 of messages (core/xxh3.h). The bits are those of xxHash. */
#ifndef TAGC_DATA_XXH64_H
#define TAGC_DATA_XXH64_H

#include <stddef.h>
#include <stdint.h>

uint64_t tagc_xxh64(const void *bytes, size_t n_bytes, uint64_t seed);

/* The same of bytes that come piece by piece, with seed 0. */
typedef struct tagc_xxh64_state {
    uint64_t lanes[4];
    uint64_t n_bytes;
    uint8_t waiting[32]; /* n_bytes % 32 of them */
} tagc_xxh64_state;

void tagc_xxh64_begin(tagc_xxh64_state *state);
void tagc_xxh64_add(tagc_xxh64_state *state, const void *bytes, size_t n_bytes);
uint64_t tagc_xxh64_end(const tagc_xxh64_state *state);

#endif
