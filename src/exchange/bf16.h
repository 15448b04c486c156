/* bfloat16: the upper half of an fp32, for wires that carry half the bytes. */
#ifndef TAGC_EXCHANGE_BF16_H
#define TAGC_EXCHANGE_BF16_H

#include <stddef.h>
#include <stdint.h>

/* To nearest, ties to even; NaN stays NaN. */
void tagc_bf16_narrow(const float *from, uint16_t *to, size_t n);
void tagc_bf16_widen(const uint16_t *from, float *to, size_t n);

#endif
