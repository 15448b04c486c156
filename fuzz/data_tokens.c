/* Headers of token files from hostile bytes. What is accepted must describe exactly the bytes there are. */
#include "core/xxh3.h"
#include "data/token_file.h"
#include "data/xxh64.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void check(const uint8_t *data, size_t n_bytes) {
    static const char *const names[] = {"x.bin", "x"};
    for (int i = 0; i < 2; i++) {
        tagc_tokens_info info;
        if (tagc_token_file_parse(data, n_bytes, names[i], &info) != TAGC_OK) continue;
        if (info.n_tokens == 0 || info.first_byte + info.n_tokens * (uint64_t)info.token_bytes != n_bytes)
            abort();
        if (!memchr(info.tokenizer, '\0', sizeof info.tokenizer)) abort();
        if (info.vocab_size && info.end_of_text >= (int64_t)info.vocab_size) abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    check(data, n_bytes);
    if (n_bytes < TAGC_TOKEN_HEADER_BYTES) return 0;
    /* Again with checksums that are right, or no mutation would get past them. */
    uint8_t *fixed = malloc(n_bytes);
    if (!fixed) return 0;
    memcpy(fixed, data, n_bytes);
    const uint8_t *tokens = fixed + TAGC_TOKEN_HEADER_BYTES;
    size_t n_payload = n_bytes - TAGC_TOKEN_HEADER_BYTES;
    int is_first = fixed[8] == 1; /* version 1 has another checksum */
    uint64_t payload = is_first ? tagc_xxh64(tokens, n_payload, 0) : tagc_xxh3(tokens, n_payload, 0);
    for (int i = 0; i < 8; i++) fixed[32 + i] = (uint8_t)(payload >> (8 * i));
    uint64_t header = is_first ? tagc_xxh64(fixed, 120, 0) : tagc_xxh3(fixed, 120, 0);
    for (int i = 0; i < 8; i++) fixed[120 + i] = (uint8_t)(header >> (8 * i));
    check(fixed, n_bytes);
    free(fixed);
    return 0;
}
