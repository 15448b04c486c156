/* Formats of values: n floats as plain fp32 or bf16, or as integers with one scale per block of `block` values (the last
 * block may be shorter). Bytes, little-endian, unaligned:
 *
 *   fp32    n x 4 bytes, finite
 *   bf16    n x 2 bytes: the upper half of an fp32, finite
 *   others  ceil(n / block) x 2 bytes: scales, as bf16, from 0 to the largest of the format
 *           ceil(n * bits / 8) bytes: value i is bits [i * bits, (i + 1) * bits), lowest first; bits past the last are zero
 *
 *   int8    two's complement; value = scale * integer; -128 is not written
 *   int4    the same; -8 is not written
 *   int2    bit 1 is the sign (1: negative), bit 0 the magnitude: scale * 1 or scale * 4 (sparse: * 2)
 *   sign    1: negative; magnitude = scale
 *
 * The product is one fp32 multiplication. Scales are 0 or normal numbers, and so small that no value, and no transformed
 * block, comes near Inf: a block of which that cannot be said has scale 0, and all of it stays with the sender. */
#ifndef TAGC_CODEC_VALUES_H
#define TAGC_CODEC_VALUES_H

#include "codec/code_kernels.h"
#include "tagc/tagc.h"
#include <stddef.h>
#include <stdint.h>

#define TAGC_VALUES_MAX_BLOCK 4096

typedef struct tagc_value_format {
    int values; /* tagc_format */
    int block;  /* a power of two in [16, 4096] */
    int sparse; /* the values are the largest of many: none is near zero */
    int rotate; /* integers: each whole block is transformed (Hadamard, orthonormal); a shorter last one is not */
    uint32_t largest_scale;           /* bits of a bf16 */
    const tagc_code_kernels *kernels; /* the best; tests put another here */
} tagc_value_format;

tagc_value_format tagc_values_format(int values, int block, int sparse, int rotate);

size_t tagc_values_bytes(const tagc_value_format *format, size_t n);

/* values (n), all finite. decoded (n): what a receiver gets; errors (n): what it lacks, zeros as -0.0f. Both may be NULL
 * or values itself. first: of these among all n_all, a multiple of block; `bytes` are those of all. Ranges that do not
 * overlap may be encoded at once, but for the last of them end on whole blocks. */
void tagc_values_encode(const tagc_value_format *format, const float *values, float *decoded, float *errors,
                        size_t first, size_t n, size_t n_all, uint8_t *bytes);

/* 1 when every value that these tagc_values_bytes(n) decode to is finite and in order. */
int tagc_values_valid(const tagc_value_format *format, const uint8_t *bytes, size_t n);

/* values [first, first + n) of n_all; first a multiple of TAGC_CODE_LANES. With rotate, first is a multiple of block, and
 * so is n unless it ends at n_all. */
void tagc_values_decode(const tagc_value_format *format, const uint8_t *bytes, size_t first, size_t n,
                        size_t n_all, float *values);

#endif
