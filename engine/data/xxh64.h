/* XXH64, the checksum of token files of version 1, which is older than the XXH3 of messages (core/xxh3.h). The bits are those of xxHash. */
#ifndef TAGC_DATA_XXH64_H
#define TAGC_DATA_XXH64_H

#include <stddef.h>
#include <stdint.h>

uint64_t tagc_xxh64(const void *bytes, size_t n_bytes, uint64_t seed);

#endif
