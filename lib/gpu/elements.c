/* Conversions written so that a compiler vectorises them. fp16 has no other user in the library. */
#include "gpu/elements.h"
#include "codec/bf16.h"

#include <string.h>

size_t tagc_element_bytes(int element) {
    return element == TAGC_ELEMENT_FP32                                   ? 4
           : element == TAGC_ELEMENT_BF16 || element == TAGC_ELEMENT_FP16 ? 2
                                                                          : 0;
}

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* 5 bits of exponent, bias 15, and 10 of the fraction. */
static float widened(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = half & 0x7fffu;
    if (rest >= 0x7c00u) return float_of(sign | 0x7f800000u | (rest & 0x3ffu) << 13); /* Inf, NaN */
    if (rest >= 0x400u) return float_of(sign | ((rest << 13) + (112u << 23)));
    float small = (float)rest * 0x1p-24f;
    return sign ? -small : small;
}

static uint16_t narrowed(float value) {
    uint32_t bits = bits_of(value), rest = bits & 0x7fffffffu, half;
    if (rest > 0x7f800000u)
        half = 0x7e00u; /* NaN */
    else if (rest >= 0x477ff000u)
        half = 0x7c00u; /* rounds to more than the largest */
    else if (rest >= 0x38800000u)
        half = (rest + 0xfffu + (rest >> 13 & 1u) - (112u << 23)) >> 13;
    else /* the sum's last bit is worth 2^-24, the smallest fp16 */
        half = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f);
    return (uint16_t)(half | (bits >> 16 & 0x8000u));
}

void tagc_elements_read(const void *array, int element, uint64_t first, uint64_t n, float *to) {
    if (element == TAGC_ELEMENT_FP32) {
        memcpy(to, (const float *)array + first, n * sizeof *to);
        return;
    }
    const uint16_t *from = (const uint16_t *)array + first;
    if (element == TAGC_ELEMENT_BF16) {
        tagc_bf16_widen(from, to, n);
        return;
    }
    for (uint64_t i = 0; i < n; i++) to[i] = widened(from[i]);
}

void tagc_elements_write(const float *from, void *array, int element, uint64_t first, uint64_t n) {
    if (element == TAGC_ELEMENT_FP32) {
        memcpy((float *)array + first, from, n * sizeof *from);
        return;
    }
    uint16_t *to = (uint16_t *)array + first;
    if (element == TAGC_ELEMENT_BF16) {
        tagc_bf16_narrow(from, to, n);
        return;
    }
    for (uint64_t i = 0; i < n; i++) to[i] = narrowed(from[i]);
}

double tagc_elements_square(const void *array, int element, uint64_t first, uint64_t n) {
    enum { PIECE = 512 };
    float values[PIECE];
    double sum = 0;
    for (uint64_t at = 0; at < n; at += PIECE) {
        uint64_t n_here = n - at < PIECE ? n - at : PIECE;
        double part = 0;
        tagc_elements_read(array, element, first + at, n_here, values);
        for (uint64_t i = 0; i < n_here; i++) part += (double)values[i] * (double)values[i];
        sum += part;
    }
    return sum;
}
