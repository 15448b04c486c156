/* The inner loops of low-bit blocks, one table per processor level. All tables give the same bits. Only delta.c and tests
 * include this file. */
#ifndef TAGC_CODEC_DELTA_KERNELS_H
#define TAGC_CODEC_DELTA_KERNELS_H

#include "codec/delta.h"

typedef struct tagc_delta_kernels {
    const char *name;
    /* One block of 256. codes: 256 * bits / 8 bytes. Returns the scale as bf16, or 0x7fc0 (NaN) if a value is not finite. base
     * may be NULL. width: bytes of one of its values. */
    uint16_t (*encode)(int bits, const float *values, const void *base, size_t width, uint8_t *codes);
    /* n_blocks of them. width: bytes of a value of `replica`. */
    void (*apply)(int bits, const uint8_t *scales, const uint8_t *codes, void *replica, size_t width,
                  size_t n_blocks);
    void (*decode)(int bits, const uint8_t *scales, const uint8_t *codes, float *values, size_t n_blocks);
} tagc_delta_kernels;

/* NULL-terminated, best first: what this processor can run. */
const tagc_delta_kernels *const *tagc_delta_kernels_all(void);

void tagc_delta_apply_with(const tagc_delta_kernels *kernels, int bits, const uint8_t *body, void *replica,
                           size_t width, size_t n);
void tagc_delta_decode_with(const tagc_delta_kernels *kernels, int bits, const uint8_t *body, float *values,
                            size_t n);
int tagc_delta_encode_with(const tagc_delta_kernels *kernels, int bits, const float *values, const void *base,
                           size_t width, size_t n, uint8_t *body);

#endif
