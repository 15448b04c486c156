/* bf16 values without loss, in about 11 bits: exponents in few bits, signs and mantissas as they are.
 *
 * Exponents of weights lie close together: of a bell curve's, seven neighbouring ones have 97 %. So a code of 3 bits
 * names one of seven neighbours, or says that the exponent follows as a byte. Huffman's codes take 0.3 bit less of the
 * 16; but codes of one width are written and read eight at a time, and no bytes of a table or of a stream decide where
 * they lie, so that a decoder has little to check.
 *
 * A body is a sequence of chunks of 4096 values (the last may be shorter), little-endian, unaligned:
 *
 *   0   u8    width w of a code in bits, 0 to 4; 8: no codes
 *   1   u8    base
 *   2   u16   n_escapes
 *   4         n bytes: sign (bit 7) and mantissa of each value
 *             ceil(n / 8) groups of w bytes: the codes of eight values, the first in the lowest bits; those behind the last value are 0
 *             n_escapes bytes: the exponents of the values whose code is 2^w - 1, in their order
 *
 * The exponent of any other value is base + code; with w = 0 it is the base. With w = 8, base and n_escapes are 0, and
 * behind them are the values as they are. The sender chooses width and base so that the chunk takes the fewest bytes. */
#ifndef TAGC_CODEC_EXPONENTS_H
#define TAGC_CODEC_EXPONENTS_H

#include <stddef.h>
#include <stdint.h>

#define TAGC_EXPONENTS_CHUNK ((size_t)4096) /* values */

/* The most that a body of n values takes. */
size_t tagc_exponents_max_bytes(size_t n);
/* Writes at most that many bytes; returns how many. */
size_t tagc_exponents_encode(const uint16_t *values, size_t n, uint8_t *body);
/* Accepts any bytes. Returns 1 if they are exactly a body of n values, which it writes, else 0 with any `values`. */
int tagc_exponents_decode(const uint8_t *body, size_t n_bytes, uint16_t *values, size_t n);

#endif
