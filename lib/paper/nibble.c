/* Four bits per element, sixteen elements to a word. */
#include "paper/nibble.h"
#include "codec/bitmap.h"

#include <string.h>

size_t tagc_nibble_bytes(size_t n) {
    return n / 16 * 8 + (n % 16 ? 8 : 0);
}

void tagc_nibble_make(uint8_t *nibbles, size_t n, const uint32_t *indices, size_t n_indices) {
    memset(nibbles, 0, tagc_nibble_bytes(n));
    for (size_t k = 0; k < n_indices; k++) nibbles[indices[k] / 2] |= (uint8_t)(indices[k] % 2 ? 16 : 1);
}

void tagc_nibble_add(uint8_t *into, const uint8_t *from, size_t n) {
    size_t n_bytes = tagc_nibble_bytes(n);
    for (size_t b = 0; b < n_bytes; b++) into[b] = (uint8_t)(into[b] + from[b]);
}

/* The 16 counts of a word as 16 bits: fold each nibble onto its lowest bit, then close the gaps by halves. */
static uint64_t nonzero_nibbles(uint64_t word) {
    word |= word >> 2;
    word = (word | word >> 1) & 0x1111111111111111u;
    word = (word | word >> 3) & 0x0303030303030303u;
    word = (word | word >> 6) & 0x000f000f000f000fu;
    word = (word | word >> 12) & 0x000000ff000000ffu;
    return (word | word >> 24) & 0xffff;
}

void tagc_nibble_to_bitmap(const uint8_t *nibbles, size_t n, uint8_t *bits) {
    size_t n_words = tagc_nibble_bytes(n) / 8;
    for (size_t w = 0; w < n_words; w += 4) {
        uint64_t word = 0;
        for (size_t part = 0; part < 4 && w + part < n_words; part++)
            word |= nonzero_nibbles(tagc_load_word(nibbles + 8 * (w + part))) << (16 * part);
        tagc_store_word(bits + 2 * w, word);
    }
}
