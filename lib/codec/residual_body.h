/* Reading and writing stored residuals (residual.h) in vectors of WIDTH lanes. Included after code_body.h, which says what an includer
 * defines. TAGC_RESIDUAL_BLOCK values are written together: several blocks of int4, for which random bytes are made at once. Values
 * that are rounded at random without a residual (values.h) are here, too. */

enum { NAME(GROUP) = TAGC_RESIDUAL_BLOCK };

INLINE UVEC NAME(random_of)(UVEC x) {
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15) * 0x735a2d97u;
    return x ^ x >> 15;
}

/* The random bytes of n values up to GROUP, the first at a multiple of LANES; of some more if n is none of 4 * WIDTH. */
INLINE void NAME(random_bytes)(uint32_t seed, size_t first, size_t n, uint8_t *bytes) {
    UVEC group;
    for (int lane = 0; lane < WIDTH; lane++) group[lane] = (uint32_t)lane;
    group += seed + (uint32_t)(first / 4);
    for (size_t i = 0; i < n; i += 4 * WIDTH, group += WIDTH) {
        UVEC x = NAME(random_of)(group);
        memcpy(bytes + i, &x, sizeof x);
    }
}

/* tagc_residual_code. */
INLINE UVEC NAME(code_of)(VEC scaled, UVEC threshold, int bits) {
    return ((UVEC) __builtin_convertvector(scaled, IVEC) + (threshold >> bits)) >> (32 - bits);
}

/* ---- values without a residual ---- */

INLINE void NAME(dither_as)(int bits, const float *x, size_t first, size_t n, uint32_t seed, float scale,
                            uint8_t *packed) {
    const float most = bits == 8 ? 127 : 7, one = bits == 8 ? 0x1p24f : 0x1p28f, inverse = 1 / scale;
    uint8_t random[NAME(GROUP)], last[LANES];
    UVEC thresholds[PARTS], codes[PARTS];
    for (size_t i = 0; i < n; i += LANES, packed += LANES * bits / 8) {
        size_t n_left = n - i, at = i % NAME(GROUP);
        if (at == 0) NAME(random_bytes)(seed, first + i, n_left < NAME(GROUP) ? n_left : NAME(GROUP), random);
        NAME(spread)(random + at, thresholds);
        for (int p = 0; p < PARTS; p++)
            codes[p] = NAME(code_of)(NAME(clamp)(NAME(load_of)(x, i, p, n) * inverse, most) * one,
                                     thresholds[p], bits);
        NAME(pack)(codes, bits, n_left < LANES ? last : packed);
        if (n_left < LANES) memcpy(packed, last, (n_left * (size_t)bits + 7) / 8); /* bits past n are zero */
    }
}

KERNEL void NAME(dither)(int values, const float *x, size_t first, size_t n, uint32_t seed, float scale,
                         uint8_t *packed) {
    values == TAGC_FORMAT_INT8 ? NAME(dither_as)(8, x, first, n, seed, scale, packed)
                               : NAME(dither_as)(4, x, first, n, seed, scale, packed);
}

/* ---- integers ---- */

/* LANES values with tagc_residual_scale as `scale`. */
INLINE void NAME(round_codes)(const float *x, float scale, const uint8_t *random, int bits, uint8_t *packed) {
    UVEC thresholds[PARTS], codes[PARTS];
    NAME(spread)(random, thresholds);
    for (int p = 0; p < PARTS; p++)
        codes[p] = NAME(code_of)(NAME(load)(x + p * WIDTH) * scale, thresholds[p], bits);
    NAME(pack)(codes, bits, packed);
}

/* One group in integers of `bits`; the largest magnitude of each block must be finite and within the largest exponent's reach: else
 * returns 0, and the caller does it in the plain way. */
INLINE int NAME(write_group)(int format, int bits, int block, const float *x, const uint8_t *random,
                             uint8_t *exponents, uint8_t *codes) {
    for (int b = 0; b < NAME(GROUP) / block; b++, x += block, random += block) {
        UVEC top = {0}, other = {0};
        for (int i = 0; i < block; i += 2 * WIDTH) {
            top = NAME(max)(top, (UVEC)NAME(magnitude)(NAME(load)(x + i)));
            other = NAME(max)(other, (UVEC)NAME(magnitude)(NAME(load)(x + i + WIDTH)));
        }
        uint32_t largest = NAME(top)(NAME(max)(top, other));
        if (largest >= TAGC_RESIDUAL_PLAIN) return 0;
        uint32_t exponent = tagc_residual_exponent(format, largest);
        float scale = tagc_bits_float(tagc_residual_scale(bits, exponent));
        exponents[b] = (uint8_t)exponent;
        for (int i = 0; i < block; i += LANES)
            NAME(round_codes)(x + i, scale, random + i, bits, codes + (b * block + i) * bits / 8);
    }
    return 1;
}

KERNEL size_t NAME(write_residual)(int format, const float *x, size_t first, size_t n, uint32_t seed,
                                   uint8_t *exponents, uint8_t *codes) {
    const size_t bits = format == TAGC_FORMAT_INT8 ? 8 : 4, block = format == TAGC_FORMAT_INT8 ? 128 : 32;
    uint8_t random[NAME(GROUP)];
    size_t i = 0;
    for (; i + NAME(GROUP) <= n; i += NAME(GROUP)) {
        NAME(random_bytes)(seed, first + i, NAME(GROUP), random);
        uint8_t *to = codes + (first + i) * bits / 8, *exponent = exponents + (first + i) / block;
        int is_done = format == TAGC_FORMAT_INT8
                          ? NAME(write_group)(TAGC_FORMAT_INT8, 8, 128, x + i, random, exponent, to)
                          : NAME(write_group)(TAGC_FORMAT_INT4, 4, 32, x + i, random, exponent, to);
        if (!is_done) break;
    }
    return i;
}

KERNEL size_t NAME(put_int8)(const uint32_t *indices, const float *values, size_t n, uint32_t seed,
                             const uint8_t *exponents, uint8_t *codes, uint32_t *misfits, size_t *n_misfits) {
    size_t i = 0, n_found = *n_misfits;
    for (; i + LANES <= n; i += LANES) {
        UVEC rounded[PARTS];
        uint32_t wide[LANES];
        uint8_t bytes[LANES];
        IVEC too_large = {0};
        for (int lane = 0; lane < LANES; lane++) wide[lane] = exponents[indices[i + (size_t)lane] / 128];
        for (int p = 0; p < PARTS; p++) {
            UVEC at, exponent;
            memcpy(&at, indices + i + p * WIDTH, sizeof at);
            memcpy(&exponent, wide + p * WIDTH, sizeof exponent);
            VEC x = NAME(load)(values + i + p * WIDTH), scale = (VEC)(0x80000000u | (278 - exponent) << 23);
            UVEC random = NAME(random_of)(seed + (at >> 2)), turn = (at & 3u) * 8;
            UVEC threshold = random >> 8 >> turn | random << (24 - turn);
            rounded[p] = NAME(code_of)(NAME(clamp)(x * scale, 127 * 0x1p24f), threshold, 8);
            /* exponents of values, as tagc_residual_exponent has them: 6 more than of their blocks */
            IVEC wanted = (IVEC)(((UVEC)NAME(magnitude)(x) + 0x1ffffu) >> 23) - 6;
            too_large |= (wanted > (IVEC)exponent) & (exponent < 248);
        }
        NAME(pack)(rounded, 8, bytes);
        for (int lane = 0; lane < LANES; lane++) codes[indices[i + (size_t)lane]] = bytes[lane];
        if (NAME(top)((UVEC)too_large & 1u) == 0) continue;
        for (size_t j = i; j < i + LANES; j++) { /* rare */
            uint32_t bits = tagc_float_bits(values[j]) & 0x7fffffffu;
            misfits[n_found] = indices[j];
            n_found += tagc_residual_exponent(TAGC_FORMAT_INT8, bits) > exponents[indices[j] / 128];
        }
    }
    *n_misfits = n_found;
    return i;
}

INLINE void NAME(widen_codes)(int bits, const uint8_t *packed, float step, float *out) {
    const int top = 1 << (bits - 1);
    UVEC codes[PARTS];
    NAME(unpack)(packed, bits, codes);
    for (int p = 0; p < PARTS; p++) {
        IVEC integers = ((IVEC)codes[p] ^ top) - top;
        NAME(store)(out + p * WIDTH, __builtin_convertvector(integers, VEC) * step);
    }
}

INLINE size_t NAME(read_integers)(int bits, int shift, const uint8_t *exponents, const uint8_t *codes,
                                  size_t first, size_t n, const char *ahead, float *out) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        float step = tagc_bits_float(0x80000000u | (uint32_t)exponents[(first + i) >> shift] << 23);
        NAME(widen_codes)(bits, codes + (first + i) * (size_t)bits / 8, step, out + i);
        __builtin_prefetch(ahead + 4 * i);
    }
    return i;
}

KERNEL size_t NAME(read_residual)(int format, const uint8_t *exponents, const uint8_t *codes, size_t first,
                                  size_t n, const void *ahead, float *out) {
    if (first % LANES) return 0;
    if (format == TAGC_FORMAT_INT8) return NAME(read_integers)(8, 7, exponents, codes, first, n, ahead, out);
    return NAME(read_integers)(4, 5, exponents, codes, first, n, ahead, out);
}
