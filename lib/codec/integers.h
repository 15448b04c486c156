/* Streams of pairs of integers of which small ones are frequent, each with a code that fits the stream.
 *
 * A code's number is one of three families and a k:
 *
 *    0 + k    exponential Golomb (as in H.264), k up to 30. With q = value + 2^k and L = floor(log2 q): L - k zero bits, a one bit, the L
 *             lower bits of q
 *   32 + k    Rice, k up to 30: floor(value / 2^k) zero bits, a one bit, the k lower bits of the value
 *   64 + k    the k lower bits of the value, and it has no others; k up to 32
 *
 * Bits of a stream fill bytes from the lowest on. A pair is an integer of each code. Bits after the last one are zero. */
#ifndef TAGC_CODEC_INTEGERS_H
#define TAGC_CODEC_INTEGERS_H

#include <stddef.h>
#include <stdint.h>

enum { TAGC_INTEGERS_MAX_ORDER = 30, TAGC_INTEGERS_RICE = 32, TAGC_INTEGERS_FIXED = 64 };

static inline int tagc_integers_is_code(int code) {
    return code >= TAGC_INTEGERS_FIXED ? code <= TAGC_INTEGERS_FIXED + 32
                                       : code % TAGC_INTEGERS_RICE <= TAGC_INTEGERS_MAX_ORDER;
}

/* The code that takes the fewest bits: fixed by all values, others by a sample. */
int tagc_integers_code(const uint32_t *values, size_t n);

typedef struct tagc_integers_pairs {
    const uint32_t *values[2]; /* (n) each */
    int code[2];
    size_t n;
} tagc_integers_pairs;

/* The length of the stream. */
uint64_t tagc_integers_bytes(const tagc_integers_pairs *pairs);
/* Writes exactly as many bytes. */
void tagc_integers_write(const tagc_integers_pairs *pairs, uint8_t *bytes);

typedef struct tagc_integers_reader {
    const uint8_t *bytes;
    uint64_t n_bits, at; /* of the stream, n_bytes * 8; read so far */
} tagc_integers_reader;

/* Reads the next value, at most `most`. Accepts any bytes and any end: returns 0 if there is no such value, and the reader is of no use
 * then. */
int tagc_integers_read(tagc_integers_reader *reader, int code, uint32_t most, uint32_t *value);
/* 1 if what is left of the stream is what comes after a last code: fewer than 8 bits, all zero. */
int tagc_integers_ended(const tagc_integers_reader *reader);

#endif
