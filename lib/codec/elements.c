/* Conversions written so that a compiler vectorises them. */
#include "codec/elements.h"

#include <string.h>

size_t tagc_element_bytes(int element) {
    return element == TAGC_ELEMENT_FP32                                   ? 4
           : element == TAGC_ELEMENT_BF16 || element == TAGC_ELEMENT_FP16 ? 2
                                                                          : 0;
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
    for (uint64_t i = 0; i < n; i++) to[i] = tagc_fp16_wide(from[i]);
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
    for (uint64_t i = 0; i < n; i++) to[i] = tagc_fp16_nearest(from[i]);
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

/* ---- bf16 ---- */

void tagc_bf16_narrow(const float *from, uint16_t *to, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &from[i], sizeof bits);
        uint32_t rounded = TAGC_BF16_NEAREST(bits), quiet = bits >> 16 | 0x40u;
        to[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
    }
}

void tagc_bf16_widen(const uint16_t *from, float *to, size_t n) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = TAGC_BF16_WIDE(from[i]);
        memcpy(&to[i], &bits, sizeof bits);
    }
}

/* ---- sums; memory limits their speed ---- */

void tagc_sum_add(float *into, const float *from, size_t n) {
    for (size_t i = 0; i < n; i++) into[i] += from[i];
}
