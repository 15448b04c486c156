/* Chooses the scale of a block and lays out its bytes. The loops are kernels.
 *
 * The scales were chosen by squared error and by the energy of the residual in the steady state of error feedback, on normal
 * values and on normal * exp(normal), in blocks of 128:
 *   int8, int4  The largest value is the largest integer. If all values are sent, searching the best scale leaves 15 % less of
 *               int4's error (1.0 instead of 1.2 % of the gradient's energy). If 1 to 5 % are sent, it leaves 1 to 2 % less
 *               residual. That does not justify its time.
 *   int2        Levels a and L a. If all values are sent, L = 4: normal values alone would need 3, heavy tails 5 and more.
 *               Refitting a to its levels by least squares saves a fifth of the error on heavy tails. If only the largest
 *               are sent, they start at the threshold: L = 2. There a = 0.9 of the mean magnitude is as good as refitting. */
#include "codec/values.h"
#include "codec/bf16.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum { N_REFITS = 2, PIECE = 1024, INF_BITS = 0x7f800000 };

/* ---- formats ---- */

static int bits_per_value(int values) {
    static const int bits[] = {32, 16, 8, 4, 2};
    return bits[values];
}

static int has_scales(int values) {
    return values >= TAGC_FORMAT_INT8;
}

static size_t n_blocks(const tagc_value_format *format, size_t n) {
    return has_scales(format->values) ? (n + (size_t)format->block - 1) / (size_t)format->block : 0;
}

static size_t packed_bytes(const tagc_value_format *format, size_t n) {
    return (size_t)(((uint64_t)n * (unsigned)bits_per_value(format->values) + 7) / 8);
}

size_t tagc_values_bytes(const tagc_value_format *format, size_t n) {
    return 2 * n_blocks(format, n) + packed_bytes(format, n);
}

static float level_of_int2(const tagc_value_format *format) {
    return format->sparse ? 2.0f : 4.0f;
}

/* The largest multiple of a scale that any bytes can decode to. */
static float largest_multiple(const tagc_value_format *format) {
    switch (format->values) {
    case TAGC_FORMAT_INT8:
        return 128;
    case TAGC_FORMAT_INT4:
        return 8;
    case TAGC_FORMAT_INT2:
        return level_of_int2(format);
    default:
        return 1;
    }
}

/* Down to a bf16. */
static uint32_t bf16_below(float x) {
    return tagc_float_bits(x) >> 16;
}

tagc_value_format tagc_values_format(int values, int block, int sparse) {
    tagc_value_format format = {
        .values = values, .block = block, .sparse = sparse, .kernels = tagc_code_best()};
    format.largest_scale = bf16_below(FLT_MAX / largest_multiple(&format));
    return format;
}

/* ---- encode ---- */

static float wanted_scale(const tagc_value_format *format, const float *x, size_t n) {
    const tagc_code_kernels *k = format->kernels;
    float level = level_of_int2(format), scale;
    switch (format->values) {
    case TAGC_FORMAT_INT8:
        return tagc_bits_float(k->largest(x, n)) / 127;
    case TAGC_FORMAT_INT4:
        return tagc_bits_float(k->largest(x, n)) / 7;
    default:
        scale = k->mean(x, n) * (format->sparse ? 0.9f : 0.5f);
        for (int i = 0; !format->sparse && i < N_REFITS; i++) scale = k->refit(x, n, level, scale);
        return scale;
    }
}

/* As bf16. 0 where 1 / scale would overflow. */
static uint32_t scale_of(const tagc_value_format *format, const float *x, size_t n) {
    if (format->marks_nonfinite && format->kernels->largest(x, n) >= INF_BITS) return TAGC_BF16_NAN;
    float wanted = wanted_scale(format, x, n);
    if (wanted < FLT_MIN) return 0;
    uint32_t bits = tagc_float_bits(wanted), most = format->largest_scale;
    uint32_t scale = format->is_stochastic ? (bits + 0xffffu) >> 16 : TAGC_BF16_NEAREST(bits);
    return scale < most ? scale : most;
}

/* Nothing of the block is sent. */
static void send_nothing(const float *values, float *decoded, float *errors, size_t n, uint8_t *packed,
                         size_t n_packed) {
    memset(packed, 0, n_packed);
    for (size_t i = 0; i < n; i++) {
        float value = values[i];
        if (decoded) decoded[i] = 0;
        if (errors) errors[i] = value == 0 ? -0.0f : value;
    }
}

static void encode_block(const tagc_value_format *format, const float *values, float *decoded, float *errors,
                         size_t first, size_t n, uint8_t *scale_bytes, uint8_t *packed) {
    uint32_t scale_bits = scale_of(format, values, n);
    float scale = tagc_bits_float(TAGC_BF16_WIDE(scale_bits));
    tagc_store16(scale_bytes, scale_bits);
    if (scale_bits == 0 || scale_bits == TAGC_BF16_NAN) {
        send_nothing(values, decoded, errors, n, packed, packed_bytes(format, n));
        return;
    }
    if (format->is_stochastic)
        format->kernels->dither(format->values, values, first, n, format->seed, scale, packed);
    else
        format->kernels->round(format->values, level_of_int2(format), scale, values, n, decoded, errors,
                               packed);
}

void tagc_values_encode(const tagc_value_format *format, const float *values, float *decoded, float *errors,
                        size_t first, size_t n, size_t n_all, uint8_t *bytes) {
    size_t block = (size_t)format->block, bits = (size_t)bits_per_value(format->values);
    if (format->values == TAGC_FORMAT_FP32) {
        memcpy(bytes + 4 * first, values, 4 * n);
        if (decoded && decoded != values) memcpy(decoded, values, 4 * n);
        for (size_t i = 0; errors && i < n; i++) errors[i] = -0.0f;
        return;
    }
    if (format->values == TAGC_FORMAT_BF16) {
        format->kernels->narrow(values, n, decoded, errors, bytes + 2 * first);
        return;
    }
    for (size_t i = 0; i < n; i += block)
        encode_block(format, values + i, decoded ? decoded + i : NULL, errors ? errors + i : NULL, first + i,
                     n - i < block ? n - i : block, bytes + 2 * ((first + i) / block),
                     bytes + 2 * n_blocks(format, n_all) + (first + i) * bits / 8);
}

/* ---- decode ---- */

static int all_finite(const tagc_value_format *format, const uint8_t *bytes, size_t n) {
    float values[PIECE];
    size_t width = (size_t)bits_per_value(format->values) / 8;
    for (size_t i = 0; i < n; i += PIECE) {
        size_t n_here = n - i < PIECE ? n - i : PIECE;
        if (format->values == TAGC_FORMAT_FP32)
            memcpy(values, bytes + width * i, width * n_here);
        else
            format->kernels->widen_halves(bytes + width * i, n_here, values);
        if (format->kernels->largest(values, n_here) >= INF_BITS) return 0;
    }
    return 1;
}

int tagc_values_valid(const tagc_value_format *format, const uint8_t *bytes, size_t n) {
    if (!has_scales(format->values)) return all_finite(format, bytes, n);
    uint32_t n_bad = 0, bits = (uint32_t)bits_per_value(format->values);
    size_t n_scales = n_blocks(format, n), n_rest = n * bits % 8;
    uint32_t most = format->largest_scale;
    for (size_t i = 0; i < n_scales; i++) {
        uint32_t scale = tagc_load16(bytes + 2 * i);
        uint32_t is_bad = scale > most || (scale > 0 && scale < 0x80u);
        n_bad += is_bad && !(format->marks_nonfinite && scale == TAGC_BF16_NAN);
    }
    if (n_rest) n_bad += bytes[2 * n_scales + n * bits / 8] >> n_rest != 0;
    return n_bad == 0;
}

void tagc_values_decode(const tagc_value_format *format, const uint8_t *bytes, size_t first, size_t n,
                        size_t n_all, float *values) {
    if (format->values == TAGC_FORMAT_FP32) {
        memcpy(values, bytes + 4 * first, 4 * n);
        return;
    }
    if (format->values == TAGC_FORMAT_BF16) {
        format->kernels->widen_halves(bytes + 2 * first, n, values);
        return;
    }
    format->kernels->widen(format->values, level_of_int2(format), bytes, format->block,
                           bytes + 2 * n_blocks(format, n_all), first, n, values);
    /* one NaN on all processors, which differ in what they make of a product with it */
    for (size_t i = 0, block = (size_t)format->block; format->marks_nonfinite && i < n; i++) {
        size_t to_end = block - (first + i) % block, end = n - i < to_end ? n : i + to_end;
        if (tagc_load16(bytes + 2 * ((first + i) / block)) == TAGC_BF16_NAN)
            for (size_t j = i; j < end; j++) values[j] = tagc_bits_float(TAGC_BF16_WIDE(TAGC_BF16_NAN));
        i = end - 1;
    }
}
