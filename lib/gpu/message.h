/* The header of a message that kernels write (tagc_blocks_encode_on). Its checksums are sums over words, so that threads can share the
 * work; docs/reference/wire-format.md draws it. */
#ifndef TAGC_GPU_MESSAGE_H
#define TAGC_GPU_MESSAGE_H

#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define TAGC_MESSAGE_FN static __host__ __device__ inline
#else
#define TAGC_MESSAGE_FN static inline
#endif

enum {
    TAGC_MESSAGE_HEADER_BYTES = 64,
    TAGC_MESSAGE_MAGIC = 0x53474154, /* "TAGS" */
    TAGC_MESSAGE_VERSION = 1,
    TAGC_MESSAGE_BLOCKS = 3,
};

/* As it travels, little-endian. */
typedef struct tagc_message_header {
    uint32_t magic;
    uint8_t version, kind, coding, zero;
    uint64_t zeros;
    uint64_t n_elems;
    uint32_t more_zeros, block; /* values per scale */
    uint64_t body_bytes, last_zeros;
    uint64_t body_sum, sum; /* tagc_message_sum of the body, and of the header up to here */
} tagc_message_header;

TAGC_MESSAGE_FN uint64_t tagc_message_mix(uint64_t word, uint64_t index) {
    uint64_t x = word + (index + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Word `index` of n_bytes that begin at a multiple of eight; zeros behind the last byte. */
TAGC_MESSAGE_FN uint64_t tagc_message_word(const uint8_t *bytes, uint64_t n_bytes, uint64_t index) {
    uint64_t word = 0;
    if (8 * index + 8 <= n_bytes) {
#if defined(__CUDACC__)
        return ((const uint64_t *)(const void *)bytes)[index];
#else
        memcpy(&word, bytes + 8 * index, 8);
        return word;
#endif
    }
    for (uint64_t i = 8 * index; i < n_bytes; i++) word |= (uint64_t)bytes[i] << i % 8 * 8;
    return word;
}

/* Of words [begin, end). */
TAGC_MESSAGE_FN uint64_t tagc_message_sum_words(const uint8_t *bytes, uint64_t n_bytes, uint64_t begin,
                                                uint64_t end, uint64_t every) {
    uint64_t sum = 0;
    for (uint64_t i = begin; i < end; i += every)
        sum += tagc_message_mix(tagc_message_word(bytes, n_bytes, i), i);
    return sum;
}

TAGC_MESSAGE_FN uint64_t tagc_message_sum_end(uint64_t sum, uint64_t n_bytes) {
    return tagc_message_mix(sum, n_bytes);
}

TAGC_MESSAGE_FN uint64_t tagc_message_sum(const uint8_t *bytes, uint64_t n_bytes) {
    return tagc_message_sum_end(tagc_message_sum_words(bytes, n_bytes, 0, (n_bytes + 7) / 8, 1), n_bytes);
}

TAGC_MESSAGE_FN uint64_t tagc_message_header_sum(const tagc_message_header *header) {
    return tagc_message_sum((const uint8_t *)header, TAGC_MESSAGE_HEADER_BYTES - 8);
}

#endif
