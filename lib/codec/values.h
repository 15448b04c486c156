/* Formats of values: n floats as fp32, as bf16, or as integers with one scale per block of `block` values (the last block may
 * be shorter). Bytes, little-endian, unaligned:
 *
 *   fp32    n x 4 bytes, finite
 *   bf16    n x 2 bytes: the upper half of an fp32, finite
 *   others  ceil(n / block) x 2 bytes: scales, as bf16, from 0 to the largest of the format
 *           ceil(n * bits / 8) bytes: value i is bits [i * bits, (i + 1) * bits), lowest first; bits past the last are zero
 *
 *   int8    two's complement; value = scale * integer; -128 is not written
 *   int4    the same; -8 is not written
 *   int2    bit 1 is the sign (1: negative), bit 0 the magnitude: scale * 1 or scale * 4 (sparse: * 2)
 *
 * The product is one fp32 multiplication. Scales are 0 or normal numbers, and small enough that no value comes near
 * Inf. If a block cannot meet that, its scale is 0, and all of it stays in the sender's residual.
 *
 * Stochastic rounding makes the integer of v * (1 / scale), in fp32, as a stored residual makes a code of its quotient, with the threshold
 * of the value's position (residual.h). Its scale is rounded up, so that the largest value has an integer on both sides. */
#ifndef TAGC_CODEC_VALUES_H
#define TAGC_CODEC_VALUES_H

#include "codec/code_kernels.h"
#include "tagc/tagc.h"
#include <stddef.h>
#include <stdint.h>

#define TAGC_VALUES_MAX_BLOCK 4096

typedef struct tagc_value_format {
    int values;                       /* tagc_format */
    int block;                        /* a power of two in [16, 4096] */
    int sparse;                       /* the values are the largest of many, so none is near zero */
    uint32_t largest_scale;           /* bits of a bf16 */
    const tagc_code_kernels *kernels; /* the best; tests put another here */
    /* Integers that are sent once, without a residual; 0 for all others. Where one of these two is set, `decoded` and `errors`
     * are NULL. */
    int marks_nonfinite; /* values may be NaN or Inf: the scale of their block is TAGC_BF16_NAN, and all of it arrives as NaN */
    int is_stochastic; /* int8 and int4: rounding is, with random numbers of `seed` and the position, as of a residual */
    uint32_t seed;
} tagc_value_format;

tagc_value_format tagc_values_format(int values, int block, int sparse);

size_t tagc_values_bytes(const tagc_value_format *format, size_t n);

/* values (n), all finite unless the format marks those that are not. decoded (n): what a receiver gets; errors (n): the difference,
 * zeros as -0.0f. Both may be NULL or values itself. first: position among all n_all values, a multiple of block; `bytes` belongs to all of them. Ranges that do
 * not overlap may be encoded at the same time; all but the last must end on whole blocks. */
void tagc_values_encode(const tagc_value_format *format, const float *values, float *decoded, float *errors,
                        size_t first, size_t n, size_t n_all, uint8_t *bytes);

/* Returns 1 if all values of these tagc_values_bytes(n) are finite and well-formed. */
int tagc_values_valid(const tagc_value_format *format, const uint8_t *bytes, size_t n);

/* values [first, first + n) of n_all; first a multiple of TAGC_CODE_LANES. */
void tagc_values_decode(const tagc_value_format *format, const uint8_t *bytes, size_t first, size_t n,
                        size_t n_all, float *values);

#endif
