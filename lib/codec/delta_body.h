/* The loops of delta_kernels.h. delta.c includes it once per instruction set, with TARGET (a function attribute), NAME(x)
 * (the suffix) and KERNELS_NAME defined; hence no include guard. Trip counts are constants and every operation uses one
 * element, so compilers can vectorise to any width, and all widths give the same bits.
 *
 * A byte holds elements that are a half or a quarter of a block apart, so neither side shuffles. */

#define INLINE TARGET static inline __attribute__((always_inline))
#define KERNEL TARGET static

/* The sign puts the largest value at the lowest code, because there is one more code below the middle than above.
 * up: the largest positive difference, down: the largest magnitude of the others, as bits. */
INLINE uint16_t NAME(choose_scale)(int bits, int32_t up, int32_t down) {
    int32_t largest = up > down ? up : down;
    if (largest >= 0x7f800000) return SCALE_NAN;
    float scale;
    memcpy(&scale, &largest, sizeof scale);
    scale *= share_of_largest(bits);
    uint32_t rounded;
    memcpy(&rounded, &scale, sizeof rounded);
    if (rounded < MIN_NORMAL_BITS) return 0;
    return (uint16_t)(TAGC_BF16_NEAREST(rounded) | (up > down ? 0x8000u : 0));
}

INLINE float NAME(wide_at)(const uint16_t *restrict halves, size_t i) {
    uint32_t bits = TAGC_BF16_WIDE(halves[i]);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* width: bytes of a value of base; 0: none is subtracted. A constant at each call. */
INLINE void NAME(differ)(const float *restrict values, const void *restrict base, size_t width,
                         float *restrict difference, int32_t *restrict up, int32_t *restrict down) {
    const uint16_t *restrict halves = base;
    const float *restrict wides = base;
    int32_t most = 0, least = 0;
    for (size_t i = 0; i < TAGC_DELTA_BLOCK; i++) {
        int32_t as_integer, flipped;
        difference[i] = width == 0                ? values[i]
                        : width == sizeof *halves ? values[i] - NAME(wide_at)(halves, i)
                                                  : values[i] - wides[i];
        memcpy(&as_integer, &difference[i], sizeof as_integer);
        flipped = (int32_t)((uint32_t)as_integer ^ 0x80000000u);
        most = as_integer > most ? as_integer : most;
        least = flipped > least ? flipped : least;
    }
    *up = most;
    *down = least;
}

/* Codes start at 0. Rounds to the nearest integer, ties to even: adding 1.5 * 2^23 cuts off the fraction, and the same
 * addition adds the middle code. */
INLINE uint32_t NAME(code_of)(float difference, float inverse, int32_t n_half) {
    float shifted = difference * inverse + 12582912.0f;
    int32_t code;
    memcpy(&code, &shifted, sizeof code);
    code -= 0x4b400000 - n_half;
    code = code > 2 * n_half - 1 ? 2 * n_half - 1 : code;
    return (uint32_t)(code < 0 ? 0 : code);
}

KERNEL uint16_t NAME(encode)(int bits, const float *restrict values, const void *restrict base, size_t width,
                             uint8_t *restrict codes) {
    enum { HALF = TAGC_DELTA_BLOCK / 2, QUARTER = TAGC_DELTA_BLOCK / 4 };
    float difference[TAGC_DELTA_BLOCK];
    int32_t up = 0, down = 0;
    if (!base) /* the choice is outside the loop, because compilers do not vectorise a loop that contains it */
        NAME(differ)(values, NULL, 0, difference, &up, &down);
    else if (width == sizeof(uint16_t))
        NAME(differ)(values, base, sizeof(uint16_t), difference, &up, &down);
    else
        NAME(differ)(values, base, sizeof(float), difference, &up, &down);
    const uint16_t scale = NAME(choose_scale)(bits, up, down);
    const float inverse = inverse_of(scale);
#define CODE(i) NAME(code_of)(difference[i], inverse, (int32_t)1 << (bits - 1))
    if (bits == 8)
        for (size_t i = 0; i < TAGC_DELTA_BLOCK; i++) codes[i] = (uint8_t)CODE(i);
    else if (bits == 4)
        for (size_t i = 0; i < HALF; i++) codes[i] = (uint8_t)(CODE(i) | CODE(i + HALF) << 4);
    else
        for (size_t i = 0; i < QUARTER; i++)
            codes[i] = (uint8_t)(CODE(i) | CODE(i + QUARTER) << 2 | CODE(i + 2 * QUARTER) << 4 |
                                 CODE(i + 3 * QUARTER) << 6);
#undef CODE
    return scale;
}

/* As bf16, in the low half. */
INLINE uint32_t NAME(moved)(float replica, float change) {
    float sum = replica + change;
    uint32_t bits;
    memcpy(&bits, &sum, sizeof bits);
    return TAGC_BF16_NEAREST(bits);
}

/* Decodes to out (width 0), or adds to a replica of `width` bytes per value and rounds. width and bits are constants at each
 * call. */
INLINE void NAME(open)(size_t width, int bits, const uint8_t *restrict scales, const uint8_t *restrict codes,
                       void *restrict out, size_t n_blocks) {
    const size_t n_bytes = TAGC_DELTA_BLOCK * (size_t)bits / 8;
    const int32_t n_half = 1 << (bits - 1);
    size_t at = 0;
    for (size_t b = 0; b < n_blocks; b++, scales += 2, codes += n_bytes) {
        const float scale = scale_at(scales);
        for (int shift = 0; shift < 8; shift += bits, at += n_bytes) {
            uint16_t *restrict halves = (uint16_t *)out + (width == sizeof *halves ? at : 0);
            float *restrict values = (float *)out + (width == sizeof *halves ? 0 : at);
            for (size_t i = 0; i < n_bytes; i++) {
                float value = (float)((codes[i] >> shift & (2 * n_half - 1)) - n_half) * scale;
                if (width == sizeof *halves) {
                    halves[i] = (uint16_t)NAME(moved)(NAME(wide_at)(halves, i), value);
                } else if (width == sizeof *values) {
                    uint32_t wide = TAGC_BF16_WIDE(NAME(moved)(values[i], value));
                    memcpy(&values[i], &wide, sizeof wide);
                } else {
                    values[i] = value;
                }
            }
        }
    }
}

INLINE void NAME(open_all)(size_t width, int bits, const uint8_t *scales, const uint8_t *codes, void *out,
                           size_t n_blocks) {
    if (bits == 8)
        NAME(open)(width, 8, scales, codes, out, n_blocks);
    else if (bits == 4)
        NAME(open)(width, 4, scales, codes, out, n_blocks);
    else
        NAME(open)(width, 2, scales, codes, out, n_blocks);
}

KERNEL void NAME(apply)(int bits, const uint8_t *scales, const uint8_t *codes, void *replica, size_t width,
                        size_t n_blocks) {
    if (width == sizeof(uint16_t))
        NAME(open_all)(sizeof(uint16_t), bits, scales, codes, replica, n_blocks);
    else
        NAME(open_all)(sizeof(float), bits, scales, codes, replica, n_blocks);
}

KERNEL void NAME(decode)(int bits, const uint8_t *scales, const uint8_t *codes, float *out, size_t n_blocks) {
    NAME(open_all)(0, bits, scales, codes, out, n_blocks);
}

static const tagc_delta_kernels NAME(kernels) = {KERNELS_NAME, NAME(encode), NAME(apply), NAME(decode)};

#undef INLINE
#undef KERNEL
