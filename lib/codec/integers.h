/* Streams of pairs of integers of which small ones are frequent, as exponential Golomb codes (as in H.264) of orders that fit the stream.
 *
 * With q = value + 2^order and L = floor(log2 q), a code is L - order zero bits, a one bit, then the L lower bits of q: bits of a
 * stream fill bytes from the lowest on. A pair is a code of each order. Bits after the last code are zero. */
#ifndef TAGC_CODEC_INTEGERS_H
#define TAGC_CODEC_INTEGERS_H

#include <stddef.h>
#include <stdint.h>

#define TAGC_INTEGERS_MAX_ORDER 30

/* The order that takes the fewest bits, in a sample of the values. */
int tagc_integers_order(const uint32_t *values, size_t n);

typedef struct tagc_integers_pairs {
    const uint32_t *values[2]; /* (n) each */
    int order[2];
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
int tagc_integers_read(tagc_integers_reader *reader, int order, uint32_t most, uint32_t *value);
/* 1 if what is left of the stream is what comes after a last code: fewer than 8 bits, all zero. */
int tagc_integers_ended(const tagc_integers_reader *reader);

#endif
