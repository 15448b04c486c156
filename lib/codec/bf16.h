/* bfloat16: the upper half of an fp32. Only this file rounds to it; kernels use the macro on whole vectors. */
#ifndef TAGC_CODEC_BF16_H
#define TAGC_CODEC_BF16_H

#include <stddef.h>
#include <stdint.h>

/* The bf16 nearest to an fp32, ties to even, in the low 16 bits of the result. `bits` are those of the fp32, a uint32_t or
 * a vector of them. Not for NaN, whose mantissa would carry into the exponent. Large values round to Inf. */
#define TAGC_BF16_NEAREST(bits) (((bits) + 0x7fffu + ((bits) >> 16 & 1u)) >> 16)

#define TAGC_BF16_NAN 0x7fc0u

/* Bits of the fp32 with the value of a bf16. */
#define TAGC_BF16_WIDE(half) ((uint32_t)(half) << 16)

/* Arrays of n. To nearest, ties to even; NaN stays NaN. */
void tagc_bf16_narrow(const float *from, uint16_t *to, size_t n);
void tagc_bf16_widen(const uint16_t *from, float *to, size_t n);

#endif
