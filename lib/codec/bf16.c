/* Conversions written so that a compiler vectorises them. */
#include "codec/bf16.h"

#include <string.h>

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
