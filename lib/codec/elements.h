/* Elements of a caller's array as fp32, and back: runs of them, which lie elsewhere there. */
#ifndef TAGC_CODEC_ELEMENTS_H
#define TAGC_CODEC_ELEMENTS_H

#include "codec/bf16.h"
#include "tagc/tagc.h"

#include <string.h>

#if defined(__CUDACC__)
#define TAGC_ELEMENT_FN static __host__ __device__ inline
#else
#define TAGC_ELEMENT_FN static inline
#endif

/* ---- one element, on the processor or in a kernel ---- */

TAGC_ELEMENT_FN float tagc_float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

TAGC_ELEMENT_FN uint32_t tagc_bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* 5 bits of exponent, bias 15, and 10 of the fraction. */
TAGC_ELEMENT_FN float tagc_fp16_wide(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = half & 0x7fffu;
    if (rest >= 0x7c00u) return tagc_float_of(sign | 0x7f800000u | (rest & 0x3ffu) << 13); /* Inf, NaN */
    if (rest >= 0x400u) return tagc_float_of(sign | ((rest << 13) + (112u << 23)));
    float small = (float)rest * 5.9604644775390625e-8f; /* 2^-24 */
    return sign ? -small : small;
}

TAGC_ELEMENT_FN uint16_t tagc_fp16_nearest(float value) {
    uint32_t bits = tagc_bits_of(value), rest = bits & 0x7fffffffu, half;
    if (rest > 0x7f800000u)
        half = 0x7e00u; /* NaN */
    else if (rest >= 0x477ff000u)
        half = 0x7c00u; /* rounds to more than the largest */
    else if (rest >= 0x38800000u)
        half = (rest + 0xfffu + (rest >> 13 & 1u) - (112u << 23)) >> 13;
    else /* the sum's last bit is worth 2^-24, the smallest fp16 */
        half = tagc_bits_of(tagc_float_of(rest) + 0.5f) - tagc_bits_of(0.5f);
    return (uint16_t)(half | (bits >> 16 & 0x8000u));
}

TAGC_ELEMENT_FN float tagc_element_read(const void *array, int element, uint64_t i) {
    if (element == TAGC_ELEMENT_FP32) return ((const float *)array)[i];
    uint16_t half = ((const uint16_t *)array)[i];
    return element == TAGC_ELEMENT_BF16 ? tagc_float_of(TAGC_BF16_WIDE(half)) : tagc_fp16_wide(half);
}

TAGC_ELEMENT_FN void tagc_element_write(float value, void *array, int element, uint64_t i) {
    uint32_t bits = tagc_bits_of(value);
    if (element == TAGC_ELEMENT_FP32)
        ((float *)array)[i] = value;
    else if (element == TAGC_ELEMENT_FP16)
        ((uint16_t *)array)[i] = tagc_fp16_nearest(value);
    else
        ((uint16_t *)array)[i] =
            (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : TAGC_BF16_NEAREST(bits));
}

/* ---- arrays, on the processor ---- */

/* Bytes of one; 0: there is no such tagc_element. */
size_t tagc_element_bytes(int element);

/* n elements from number `first` of an array. Narrowing is to nearest, ties to even. */
void tagc_elements_read(const void *array, int element, uint64_t first, uint64_t n, float *to);
void tagc_elements_write(const float *from, void *array, int element, uint64_t first, uint64_t n);

/* into[i] += from[i] over (n): a caller that adds arrays one after the other fixes the order of the sum. */
void tagc_sum_add(float *into, const float *from, size_t n);

/* The sum of their squares. */
double tagc_elements_square(const void *array, int element, uint64_t first, uint64_t n);

#endif
