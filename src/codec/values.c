/* The plain versions. Every operation is one IEEE operation in a fixed order, so that vector versions can give the same
 * bits. Sums run in LANES partial sums for the same reason. */
#include "codec/values.h"
#include "codec/select.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum { LANES = 16 };

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t load16(const uint8_t *bytes) {
    return bytes[0] | (uint32_t)bytes[1] << 8;
}

static void store16(uint8_t *bytes, uint32_t value) {
    bytes[0] = (uint8_t)value;
    bytes[1] = (uint8_t)(value >> 8);
}

/* ---- formats ---- */

static int bits_per_value(int values) {
    static const int bits[] = {32, 16, 8, 4, 2, 1};
    return bits[values];
}

static int has_scales(int values) {
    return values >= TAGC_VALUES_INT8;
}

static size_t n_blocks(const tagc_value_format *format, size_t n) {
    return has_scales(format->values) ? (n + (size_t)format->block - 1) / (size_t)format->block : 0;
}

size_t tagc_values_bytes(const tagc_value_format *format, size_t n) {
    return 2 * n_blocks(format, n) +
           (size_t)(((uint64_t)n * (unsigned)bits_per_value(format->values) + 7) / 8);
}

static float level_of_int2(const tagc_value_format *format) {
    return format->sparse ? 2.0f : 3.0f;
}

/* The largest multiple of a scale that any bytes can make. */
static float largest_multiple(const tagc_value_format *format) {
    switch (format->values) {
    case TAGC_VALUES_INT8:
        return 128;
    case TAGC_VALUES_INT4:
        return 8;
    case TAGC_VALUES_INT2:
        return level_of_int2(format);
    default:
        return 1;
    }
}

/* Down to a bf16. */
static uint32_t bf16_below(float x) {
    return bits_of(x) >> 16;
}

static uint32_t bf16_nearest(float x) {
    uint32_t bits = bits_of(x);
    return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

/* A transform adds up to `block` values divided by the root of `block`; on its way in at most all of them. */
static uint32_t largest_scale(const tagc_value_format *format) {
    float room = format->rotate ? TAGC_VALUES_MAX_BLOCK : 1;
    return bf16_below(FLT_MAX / room / largest_multiple(format));
}

/* ---- the transform ---- */

static float root_of(int block) { /* 1 / sqrt(block), correctly rounded */
    return 1.0f / sqrtf((float)block);
}

static void transform(float *x, int block) {
    float norm = root_of(block);
    for (int half = 1; half < block; half *= 2)
        for (int i = 0; i < block; i += 2 * half)
            for (int j = i; j < i + half; j++) {
                float a = x[j], b = x[j + half];
                x[j] = a + b;
                x[j + half] = a - b;
            }
    for (int i = 0; i < block; i++) x[i] *= norm;
}

/* ---- scales ---- */

static float largest_of(const float *x, size_t n) {
    uint32_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = bits_of(x[i]) & 0x7fffffffu;
        if (bits > largest) largest = bits;
    }
    return float_of(largest);
}

/* Mean magnitude; sums of scaled values, so that they cannot overflow. */
static float mean_of(const float *x, size_t n) {
    float sums[LANES] = {0};
    for (size_t i = 0; i < n; i++) sums[i % LANES] += fabsf(x[i]) * 0x1p-12f;
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) sums[i] += sums[i + width];
    return sums[0] * (4096.0f / (float)n);
}

static uint32_t scale_of(const tagc_value_format *format, const float *x, size_t n) {
    float largest = largest_of(x, n), wanted;
    if (format->rotate && largest >= 0x1p100f) return 0;
    switch (format->values) {
    case TAGC_VALUES_INT8:
        wanted = largest / 127;
        break;
    case TAGC_VALUES_INT4:
        wanted = largest / 7;
        break;
    case TAGC_VALUES_INT2:
        wanted = mean_of(x, n) / (format->sparse ? 1.25f : 1.6f);
        break;
    default:
        wanted = mean_of(x, n);
    }
    uint32_t scale = bf16_nearest(wanted), most = largest_scale(format);
    if (wanted < FLT_MIN) return 0; /* 1 / scale would overflow */
    return scale < most ? scale : most;
}

/* ---- one block ---- */

static float clamp(float x, float most) {
    x = x > -most ? x : -most; /* NaN too */
    return x < most ? x : most;
}

/* x (n) becomes what is decoded; codes (n). */
static void round_block(const tagc_value_format *format, uint32_t scale_bits, float *x, size_t n,
                        uint8_t *codes) {
    float scale = float_of(scale_bits << 16), inverse = scale_bits ? 1 / scale : 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t negative = bits_of(x[i]) >> 31;
        if (format->values == TAGC_VALUES_INT8 || format->values == TAGC_VALUES_INT4) {
            float most = format->values == TAGC_VALUES_INT8 ? 127 : 7;
            float rounded = (clamp(x[i] * inverse, most) + 12582912.0f) - 12582912.0f;
            codes[i] = (uint8_t)(int8_t)rounded;
            x[i] = scale * rounded;
        } else if (format->values == TAGC_VALUES_INT2) {
            float level = level_of_int2(format);
            uint32_t large = fabsf(x[i]) > scale * ((1 + level) / 2);
            codes[i] = (uint8_t)(negative << 1 | large);
            x[i] = (negative ? -1.0f : 1.0f) * (scale * (large ? level : 1.0f));
        } else {
            codes[i] = (uint8_t)negative;
            x[i] = negative ? -scale : scale;
        }
    }
}

static void pack(const uint8_t *codes, size_t n, int bits, uint8_t *bytes) {
    uint32_t mask = (1u << bits) - 1;
    memset(bytes, 0, (n * (unsigned)bits + 7) / 8);
    for (size_t i = 0; i < n; i++)
        bytes[i * (unsigned)bits / 8] |= (uint8_t)((codes[i] & mask) << i * (unsigned)bits % 8);
}

static void encode_block(const tagc_value_format *format, float *values, float *errors, size_t n,
                         uint8_t *scale_bytes, uint8_t *bytes) {
    float wanted[TAGC_VALUES_MAX_BLOCK];
    uint8_t codes[TAGC_VALUES_MAX_BLOCK];
    int rotated = format->rotate && n == (size_t)format->block;
    memcpy(wanted, values, n * sizeof *values);
    uint32_t scale = 0;
    if (!format->rotate || largest_of(values, n) < 0x1p100f) {
        if (rotated) transform(values, format->block);
        scale = scale_of(format, values, n);
    }
    store16(scale_bytes, scale);
    round_block(format, scale, values, n, codes);
    if (scale == 0) memset(values, 0, n * sizeof *values);
    pack(codes, n, bits_per_value(format->values), bytes);
    if (rotated) transform(values, format->block);
    for (size_t i = 0; i < n; i++) {
        float error = wanted[i] - values[i];
        errors[i] = error == 0 ? TAGC_ZERO_RESIDUAL : error;
    }
}

static void encode_bf16(float *values, float *errors, size_t n, uint8_t *bytes) {
    for (size_t i = 0; i < n; i++) {
        uint32_t half = bf16_nearest(values[i]);
        if ((half & 0x7fffu) == 0x7f80u) half--; /* not up to Inf */
        store16(bytes + 2 * i, half);
        float error = values[i] - float_of(half << 16);
        errors[i] = error == 0 ? TAGC_ZERO_RESIDUAL : error;
        values[i] = float_of(half << 16);
    }
}

void tagc_values_encode(const tagc_value_format *format, float *values, float *errors, size_t first, size_t n,
                        size_t n_all, uint8_t *bytes) {
    size_t block = (size_t)format->block, bits = (size_t)bits_per_value(format->values);
    if (format->values == TAGC_VALUES_FP32) {
        memcpy(bytes + 4 * first, values, 4 * n);
        for (size_t i = 0; i < n; i++) errors[i] = TAGC_ZERO_RESIDUAL;
        return;
    }
    if (format->values == TAGC_VALUES_BF16) {
        encode_bf16(values, errors, n, bytes + 2 * first);
        return;
    }
    for (size_t i = 0; i < n; i += block)
        encode_block(format, values + i, errors + i, n - i < block ? n - i : block,
                     bytes + 2 * ((first + i) / block),
                     bytes + 2 * n_blocks(format, n_all) + (first + i) * bits / 8);
}

/* ---- decode ---- */

int tagc_values_valid(const tagc_value_format *format, const uint8_t *bytes, size_t n) {
    uint32_t exponent = 0x7f80u, n_bad = 0, bits = (uint32_t)bits_per_value(format->values);
    if (!has_scales(format->values)) {
        for (size_t i = 0; i < n; i++)
            n_bad += (load16(bytes + (i + 1) * bits / 8 - 2) & exponent) == exponent;
        return n_bad == 0;
    }
    size_t n_scales = n_blocks(format, n), n_rest = n * bits % 8;
    uint32_t most = largest_scale(format);
    for (size_t i = 0; i < n_scales; i++) {
        uint32_t scale = load16(bytes + 2 * i);
        n_bad += scale > most || (scale > 0 && scale < 0x80u);
    }
    if (n_rest) n_bad += bytes[2 * n_scales + n * bits / 8] >> n_rest != 0;
    return n_bad == 0;
}

static float decode_one(const tagc_value_format *format, const uint8_t *packed, size_t i, float scale) {
    uint32_t code;
    switch (format->values) {
    case TAGC_VALUES_INT8:
        return scale * (float)(int8_t)packed[i];
    case TAGC_VALUES_INT4:
        code = packed[i / 2] >> 4 * (i % 2) & 15;
        return scale * (float)((int)(code ^ 8) - 8);
    case TAGC_VALUES_INT2:
        code = packed[i / 4] >> 2 * (i % 4) & 3;
        scale = scale * (code & 1 ? level_of_int2(format) : 1.0f);
        return code & 2 ? -scale : scale;
    default:
        code = packed[i / 8] >> i % 8 & 1;
        return code ? -scale : scale;
    }
}

void tagc_values_decode(const tagc_value_format *format, const uint8_t *bytes, size_t first, size_t n,
                        size_t n_all, float *values) {
    if (format->values == TAGC_VALUES_FP32) {
        memcpy(values, bytes + 4 * first, 4 * n);
        return;
    }
    if (format->values == TAGC_VALUES_BF16) {
        for (size_t i = 0; i < n; i++) values[i] = float_of(load16(bytes + 2 * (first + i)) << 16);
        return;
    }
    size_t block = (size_t)format->block;
    const uint8_t *packed = bytes + 2 * n_blocks(format, n_all);
    for (size_t i = first; i < first + n; i++)
        values[i - first] = decode_one(format, packed, i, float_of(load16(bytes + 2 * (i / block)) << 16));
    if (format->rotate)
        for (size_t i = 0; i + block <= n; i += block) transform(values + i, format->block);
}
