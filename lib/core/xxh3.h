/* XXH3 of 64 bits: the checksum of messages and checkpoints. The bits are those of xxHash 0.8, whose header a build need not have. */
#ifndef TAGC_CORE_XXH3_H
#define TAGC_CORE_XXH3_H

#include <stddef.h>
#include <stdint.h>

/* `bytes` may be NULL if n_bytes is 0. */
uint64_t tagc_xxh3(const void *bytes, size_t n_bytes, uint64_t seed);

/* The same of bytes that come piece by piece, with seed 0. */
typedef struct tagc_xxh3_state {
    uint64_t lanes[8];
    uint64_t n_bytes;
    size_t n_waiting;
    uint8_t before[64]; /* the last of the block before: the last stripe may begin in it */
    uint8_t waiting[1024];
} tagc_xxh3_state;

void tagc_xxh3_begin(tagc_xxh3_state *state);
void tagc_xxh3_add(tagc_xxh3_state *state, const void *bytes, size_t n_bytes);
uint64_t tagc_xxh3_end(const tagc_xxh3_state *state);

#endif
