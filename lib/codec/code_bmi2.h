/* Writes codes of gaps with pext. Included after code_body.h by the tables that have it, with FILL, a function like
 * NAME(fill_singly). */

/* Packs codes (n_codes, then zeros up to a multiple of 8). */
INLINE void NAME(write_bytes)(const uint8_t *codes, size_t n_codes, int bits, uint8_t *bytes) {
    const uint64_t eight = 0x0101010101010101u * ((1u << bits) - 1);
    const uint8_t *end = bytes + (n_codes * (size_t)bits + 7) / 8;
    for (size_t i = 0; i < n_codes; i += 8, bytes += bits) {
        uint64_t word;
        memcpy(&word, codes + i, sizeof word);
        word = _pext_u64(word, eight);
        if (end - bytes >= 8)
            memcpy(bytes, &word, sizeof word);
        else
            memcpy(bytes, &word, (size_t)(end - bytes < bits ? end - bytes : bits));
    }
}

/* Codes of at most 8 bits, first as bytes. The buffer already holds escapes, so a gap needs no branch. */
KERNEL void NAME(write_codes)(const uint32_t *indices, size_t n, uint32_t next, int bits, size_t n_codes,
                              uint8_t *bytes) {
    uint8_t codes[TAGC_CODE_MAX_CODES + 64];
    const int escape = (1 << bits) - 1;
    const float inverse = 1.0f / (float)escape;
    if (bits > 8 || n == 0) {
        NAME(write_any)(indices, n, next, bits, n_codes, bytes);
        return;
    }
    memset(codes, 255, n_codes);
    uint32_t gap = indices[0] - next;
    size_t at = NAME(escapes_of)(gap, inverse), i = 1;
    codes[at] = (uint8_t)(gap - at * (uint32_t)escape);
    at++;
    for (; i + WIDTH <= n; i += WIDTH) at = FILL(indices + i, escape, inverse, codes, at);
    for (; i < n; i++) {
        gap = indices[i] - indices[i - 1] - 1;
        uint32_t skip = NAME(escapes_of)(gap, inverse);
        at += skip;
        codes[at++] = (uint8_t)(gap - skip * (uint32_t)escape);
    }
    memset(codes + n_codes, 0, 8);
    NAME(write_bytes)(codes, n_codes, bits, bytes);
}
