/* Residuals one value at a time: the definition, and what remains where the kernels of code_kernels.h end. */
#include "codec/residual.h"
#include "codec/code_kernels.h"
#include "core/memory.h"

#include <math.h>
#include <string.h>

enum { PIECE = 1024, INF_BITS = 0x7f800000 };

static size_t block_of(int format) {
    return format == TAGC_FORMAT_INT8 ? 128 : 32;
}

static int has_exponents(int format) {
    return format == TAGC_FORMAT_INT8 || format == TAGC_FORMAT_INT4;
}

size_t tagc_residual_exponent_bytes(int format, size_t n) {
    return has_exponents(format) ? tagc_aligned((n + block_of(format) - 1) / block_of(format)) : 0;
}

size_t tagc_residual_bytes(int format, size_t n) {
    switch (format) {
    case TAGC_FORMAT_INT8:
        return tagc_residual_exponent_bytes(format, n) + tagc_aligned(n);
    case TAGC_FORMAT_INT4:
        return tagc_residual_exponent_bytes(format, n) + tagc_aligned((n + 1) / 2);
    default:
        return n * sizeof(float);
    }
}

static uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

uint32_t tagc_residual_seed(uint64_t number, uint64_t step, uint32_t rank, uint32_t row) {
    uint64_t of_step = mixed(mixed(number + 0x9e3779b97f4a7c15u) + step);
    return (uint32_t)(mixed(of_step + ((uint64_t)rank << 32 | row)) >> 32);
}

uint32_t tagc_residual_zeros(int format) {
    return has_exponents(format) ? 0 : 0x80000000u;
}

/* ---- one value ---- */

static uint32_t threshold_of(uint32_t seed, size_t i) {
    return tagc_residual_threshold(tagc_residual_random(seed, (uint32_t)(i / 4)), (uint32_t)(i % 4));
}

static float step_of(uint32_t exponent) {
    return tagc_bits_float(0x80000000u | exponent << 23);
}

static uint32_t code_of(int format, float value, uint32_t exponent, uint32_t threshold) {
    int bits = format == TAGC_FORMAT_INT8 ? 8 : 4;
    float most = format == TAGC_FORMAT_INT8 ? 127 * 0x1p24f : 7 * 0x1p28f;
    float scaled = value * tagc_bits_float(tagc_residual_scale(bits, exponent));
    return tagc_residual_code(bits, scaled > most ? most : scaled < -most ? -most : scaled, threshold);
}

/* ---- rows ---- */

static int code_at(int format, const uint8_t *codes, size_t i) {
    if (format == TAGC_FORMAT_INT8) return (int8_t)codes[i];
    return ((codes[i / 2] >> i % 2 * 4 & 15) ^ 8) - 8;
}

void tagc_residual_read(int format, size_t n, const void *row, size_t first, size_t n_here, float *values) {
    tagc_residual_read_ahead(format, n, row, first, n_here, values, values);
}

void tagc_residual_read_ahead(int format, size_t n, const void *row, size_t first, size_t n_here,
                              const void *ahead, float *values) {
    const uint8_t *exponents = row, *codes = exponents + tagc_residual_exponent_bytes(format, n);
    if (!has_exponents(format)) {
        memcpy(values, (const float *)row + first, n_here * sizeof *values);
        return;
    }
    size_t i = tagc_code_best()->read_residual(format, exponents, codes, first, n_here, ahead, values);
    for (; i < n_here; i++)
        values[i] =
            (float)code_at(format, codes, first + i) * step_of(exponents[(first + i) / block_of(format)]);
}

static uint32_t largest_of(const float *values, size_t n) {
    uint32_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = tagc_float_bits(values[i]) & 0x7fffffffu;
        if (bits > largest) largest = bits;
    }
    return largest < INF_BITS ? largest : INF_BITS - 1;
}

void tagc_residual_pad(int format, size_t n, void *row) {
    uint8_t *exponents = row, *codes = exponents + tagc_residual_exponent_bytes(format, n);
    if (!has_exponents(format)) return;
    size_t n_blocks = (n + block_of(format) - 1) / block_of(format), n_bytes = tagc_residual_bytes(format, n);
    uint8_t *end = codes + (format == TAGC_FORMAT_INT8 ? n : (n + 1) / 2);
    memset(exponents + n_blocks, 0, (size_t)(codes - exponents) - n_blocks);
    memset(end, 0, (size_t)(exponents + n_bytes - end));
}

/* One block. */
static void write_codes(int format, const float *values, size_t first, size_t n, uint32_t seed,
                        uint8_t *exponent, uint8_t *codes) {
    *exponent = (uint8_t)tagc_residual_exponent(format, largest_of(values, n));
    for (size_t i = 0; i < n; i++) {
        float value = isfinite(values[i]) ? values[i] : 0;
        uint32_t code = code_of(format, value, *exponent, threshold_of(seed, first + i));
        if (format == TAGC_FORMAT_INT8)
            codes[first + i] = (uint8_t)code;
        else if (i % 2 == 0)
            codes[(first + i) / 2] = (uint8_t)code;
        else
            codes[(first + i) / 2] |= (uint8_t)(code << 4);
    }
}

void tagc_residual_write_int8(const float *values, size_t first, uint32_t seed, uint8_t *exponent,
                              uint8_t *codes) {
    write_codes(TAGC_FORMAT_INT8, values, first, TAGC_RESIDUAL_BLOCK, seed, exponent, codes);
}

void tagc_residual_write(int format, size_t n, const float *values, size_t first, size_t n_here,
                         uint32_t seed, void *row) {
    uint8_t *exponents = row, *codes = exponents + tagc_residual_exponent_bytes(format, n);
    for (size_t i = 0; format == TAGC_FORMAT_FP32 && i < n_here; i++)
        ((float *)row)[first + i] = values[i] == 0 ? -0.0f : values[i];
    if (!has_exponents(format)) return;
    size_t block = block_of(format), i = 0;
    while (n_here - i >= TAGC_RESIDUAL_BLOCK) {
        i += tagc_code_best()->write_residual(format, values + i, first + i, n_here - i, seed, exponents,
                                              codes);
        for (size_t end = i + TAGC_RESIDUAL_BLOCK; i < end && end <= n_here;
             i += block) /* the one that it left out */
            write_codes(format, values + i, first + i, block, seed, exponents + (first + i) / block, codes);
    }
    for (; i < n_here; i += block)
        write_codes(format, values + i, first + i, n_here - i < block ? n_here - i : block, seed,
                    exponents + (first + i) / block, codes);
    if (first + n_here == n) tagc_residual_pad(format, n, row);
}

static void put_code(int format, uint8_t *codes, size_t i, uint32_t code) {
    if (format == TAGC_FORMAT_INT8)
        codes[i] = (uint8_t)code;
    else
        codes[i / 2] = (uint8_t)((codes[i / 2] & (i % 2 ? 15 : 240)) | code << i % 2 * 4);
}

/* Integers. */
static size_t put_codes(int format, const uint32_t *indices, const float *values, size_t n, uint32_t seed,
                        const uint8_t *exponents, uint8_t *codes, uint32_t *misfits) {
    size_t block = block_of(format), n_misfits = 0, i = 0;
    if (format == TAGC_FORMAT_INT8)
        i = tagc_code_best()->put_int8(indices, values, n, seed, exponents, codes, misfits, &n_misfits);
    for (; i < n; i++) {
        uint32_t at = indices[i], exponent = exponents[at / block];
        if (tagc_residual_exponent(format, tagc_float_bits(values[i]) & 0x7fffffffu) > exponent)
            misfits[n_misfits++] = at;
        else
            put_code(format, codes, at, code_of(format, values[i], exponent, threshold_of(seed, at)));
    }
    return n_misfits;
}

size_t tagc_residual_put(int format, size_t n, const uint32_t *indices, const float *values, size_t n_here,
                         uint32_t seed, void *row, uint32_t *misfits) {
    uint8_t *exponents = row, *codes = exponents + tagc_residual_exponent_bytes(format, n);
    if (has_exponents(format))
        return put_codes(format, indices, values, n_here, seed, exponents, codes, misfits);
    for (size_t i = 0; i < n_here; i++) ((float *)row)[indices[i]] = values[i] == 0 ? -0.0f : values[i];
    return 0;
}

tagc_status tagc_residual_check(int format, size_t n, const void *row) {
    float values[PIECE] = {0};
    for (size_t at = 0; at < n; at += PIECE) {
        size_t n_here = n - at < PIECE ? n - at : PIECE;
        tagc_residual_read(format, n, row, at, n_here, values);
        for (size_t i = 0; i < n_here; i++)
            if (!isfinite(values[i]))
                return tagc_fail(TAGC_ERR_CORRUPT, "residual: value %zu of %zu is not finite", at + i, n);
    }
    return TAGC_OK;
}
