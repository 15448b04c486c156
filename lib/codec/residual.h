/* Residuals as they are stored: rows of n values as fp32, or as integers of 8 or 4 bits with one scale per block.
 *
 *   fp32    n x 4 bytes
 *   int8    ceil(n / 128) exponents, one byte each, then zeros up to a multiple of 64 bytes
 *           n x 1 byte: codes, two's complement, then zeros up to a multiple of 64 bytes
 *   int4    ceil(n / 32) exponents and zeros as above
 *           ceil(n / 2) bytes: codes, that of an even value in the low half, then zeros up to a multiple of 64 bytes
 *
 * A value is code * -(2^(exponent - 127)). The exponent of a block is the smallest for which the largest magnitude is at most
 * 127 (int4: 7) times 2^(exponent - 127), from 24 (int4: 28), so that the arithmetic below cannot overflow, up to the last whose
 * values cannot. Any other is read, too. Hence:
 *
 *   - Code 0 is -0.0f, which changes no bit of a gradient that it is added to. (fp32 holds zeros as -0.0f, too.) A row
 *     of zero bytes in int8 or int4 is a residual of zeros.
 *   - Every value is a bf16. What was read is written again without loss.
 *
 * Rounding is stochastic, so that what a step rounds off is missing on average in no direction: a residual that was rounded
 * to the nearest would never take up a gradient of less than half a code. The random numbers are a hash of a seed and
 * the position, in integers, so that all processor levels, thread counts and GPUs write the same bytes. The threshold of
 * position i has 32 random bits: tagc_residual_random(seed, i / 4), turned so that its byte i % 4 is the highest. The code of v at
 * position i is, in integers,
 *
 *   (q + threshold / 2^8) >> 24             int8; q = -v / 2^(exponent - 127) * 2^24, cut to an integer
 *   (q + threshold / 2^4) >> 28             int4; q = -v / 2^(exponent - 127) * 2^28
 *
 * So each of v's two neighbours is taken with the probability that makes the mean v, but for what is cut off of q: less than 2^-24 of a step (int4: 2^-28), which is 10^-9 of the
 * block's largest value. With 8 random bits and a constant for the rest, what is below 1/512 of a step would become zero in
 * every step. The lower bits of a threshold are the upper ones of its neighbours: they are correlated by 1/256. */
#ifndef TAGC_CODEC_RESIDUAL_H
#define TAGC_CODEC_RESIDUAL_H

#include "core/status.h"
#include "tagc/tagc.h"
#include <stddef.h>
#include <stdint.h>

/* Kernels of a GPU (lib/gpu/cuda) use these functions, too. */
#if defined(__CUDACC__)
#define TAGC_RESIDUAL_FN static __host__ __device__ inline
#else
#define TAGC_RESIDUAL_FN static inline
#endif

/* Values at whose multiples a row can be cut: ranges that begin there are written independently. */
#define TAGC_RESIDUAL_BLOCK 128

static inline int tagc_residual_is_format(int format) {
    return format == TAGC_FORMAT_FP32 || format == TAGC_FORMAT_INT8 || format == TAGC_FORMAT_INT4;
}

/* Bytes of a row. Rows follow each other without a gap. */
size_t tagc_residual_bytes(int format, size_t n);

/* Of the exponents, at the start of a row; 0 where there are none. */
size_t tagc_residual_exponent_bytes(int format, size_t n);

/* What all random numbers of one row in one step derive from. number: of the reducer. A row that is written twice in a step needs
 * another one the second time. */
uint32_t tagc_residual_seed(uint64_t number, uint64_t step, uint32_t rank, uint32_t row);

/* Four random bytes, for the values at positions 4 * group to 4 * group + 3; that of the first is the lowest. */
TAGC_RESIDUAL_FN uint32_t tagc_residual_random(uint32_t seed, uint32_t group) {
    uint32_t x = seed + group;
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15) * 0x735a2d97u;
    return x ^ x >> 15;
}

/* The threshold of the value at position 4 * group + j, given the random bytes of the group. */
TAGC_RESIDUAL_FN uint32_t tagc_residual_threshold(uint32_t random, uint32_t j) {
    return random >> 8 >> 8 * j | random << (24 - 8 * j);
}

/* The code in `bits` (8 or 4). scaled: the quotient times 2^(32 - bits); the quotient is at most 127 or 7 in size. */
TAGC_RESIDUAL_FN uint32_t tagc_residual_code(int bits, float scaled, uint32_t threshold) {
    return ((uint32_t)(int32_t)scaled + (threshold >> bits)) >> (32 - bits);
}

/* The bits of what scales a value for tagc_residual_code, of an exponent that is written. */
TAGC_RESIDUAL_FN uint32_t tagc_residual_scale(int bits, uint32_t exponent) {
    return 0x80000000u | (254 + 32 - (uint32_t)bits - exponent) << 23;
}

/* The exponent of a block of int8 or int4 whose largest magnitude has these bits, which are finite. */
TAGC_RESIDUAL_FN uint32_t tagc_residual_exponent(int format, uint32_t largest_bits) {
    const uint32_t is_int8 = format == TAGC_FORMAT_INT8, most = is_int8 ? 248 : 252, bits = is_int8 ? 6 : 2,
                   fewest = is_int8 ? 24 : 28;
    /* 127 is 2^6 * (1 + 0x7e0000 / 2^23), 7 is 2^2 * (1 + 0x600000 / 2^23); a larger mantissa carries */
    uint32_t exponent = (largest_bits + (is_int8 ? 0x1ffffu : 0x1fffffu)) >> 23;
    exponent = exponent > bits + fewest ? exponent - bits : fewest;
    return exponent < most ? exponent : most;
}

/* The word of which a row of zeros consists. */
uint32_t tagc_residual_zeros(int format);

/* values = those at [first, first + n_here) of a row of n. */
void tagc_residual_read(int format, size_t n, const void *row, size_t first, size_t n_here, float *values);

/* The same, and asks for the memory at ahead (4 * n_here bytes), which the caller will read next. */
void tagc_residual_read_ahead(int format, size_t n, const void *row, size_t first, size_t n_here,
                              const void *ahead, float *values);

/* Writes values (n_here) at [first, first + n_here). first is a multiple of TAGC_RESIDUAL_BLOCK, n_here too unless the range ends
 * the row. What a value that is not finite becomes is undefined. A finite one beyond the reach of the largest exponent,
 * within 0.8 % of the largest fp32 (int4: 13 %), becomes the largest that can be stored. */
void tagc_residual_write(int format, size_t n, const float *values, size_t first, size_t n_here,
                         uint32_t seed, void *row);

/* Writes the zeros that follow the last exponent and the last code. */
void tagc_residual_pad(int format, size_t n, void *row);

/* One whole block of int8 at position `first`, in the plain way. Kernels leave it those whose largest magnitude has bits from
 * TAGC_RESIDUAL_PLAIN on: too large for the last exponent, or not finite. */
#define TAGC_RESIDUAL_PLAIN 0x7f000000u
void tagc_residual_write_int8(const float *values, size_t first, uint32_t seed, uint8_t *exponent,
                              uint8_t *codes);

/* Writes values (n_here) at indices (n_here), and changes no exponent. If the exponent of a value's block is too small for it, what is
 * written is undefined, and the index goes into misfits (n_here), in order. Returns the number of these. */
size_t tagc_residual_put(int format, size_t n, const uint32_t *indices, const float *values, size_t n_here,
                         uint32_t seed, void *row, uint32_t *misfits);

/* For rows from a file, of any bytes: TAGC_ERR_CORRUPT if some value would not be finite. */
tagc_status tagc_residual_check(int format, size_t n, const void *row);

#endif
