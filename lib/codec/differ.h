/* Where two arrays differ, bit for bit, one table per processor level. All give the same bits. */
#ifndef TAGC_CODEC_DIFFER_H
#define TAGC_CODEC_DIFFER_H

#include <stddef.h>
#include <stdint.h>

/* Calls a function of a width of 1, 2 or 4 bytes with a constant, so that there is a loop for each. */
#define TAGC_BY_WIDTH(width, call, ...)                                                                      \
    ((width) == 1 ? call(1, __VA_ARGS__) : (width) == 2 ? call(2, __VA_ARGS__) : call(4, __VA_ARGS__))

typedef struct tagc_differ_kernels {
    const char *name;
    /* Compares n_words * 64 elements of `width` bytes, 1, 2 or 4. Bit i of word w of `bits` (n_words * 8 bytes) becomes 1 if element
     * 64 * w + i differs. */
    void (*differ)(size_t width, const uint8_t *a, const uint8_t *b, size_t n_words, uint8_t *bits);
} tagc_differ_kernels;

/* NULL-terminated, best first: what this processor can run. */
const tagc_differ_kernels *const *tagc_differ_kernels_all(void);

/* The same of n elements; the last word has zeros behind them. bits: tagc_bitmap_bytes(n). */
void tagc_differ(const tagc_differ_kernels *kernels, size_t width, const uint8_t *a, const uint8_t *b,
                 size_t n, uint8_t *bits);

#endif
