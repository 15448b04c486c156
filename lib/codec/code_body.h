/* The loops of code_kernels.h in vectors of WIDTH lanes. Included once per instruction set, hence no include guard. The
 * includer defines:
 *
 *   TARGET, NAME(x), WIDTH            function attribute, prefix, lanes: a divisor of TAGC_CODE_LANES
 *
 * includes code_vectors.h, which has VEC, UVEC and IVEC, and defines:
 *
 *   NAME(max), NAME(clamp)            of UVEC below 2^31; of VEC to [-most, most], NaN to -most
 *   NAME(pack), NAME(unpack)          WIDTH codes of 8, 4 or 2 bits to and from whole bytes
 *   NAME(spread)                      LANES random bytes to the thresholds of as many values (residual.h)
 *   NAME(halves)                      the lower 16 bits of each lane to 2 * WIDTH bytes
 *
 * Every operation is one IEEE operation in a fixed order, and sums are LANES partial sums, so all levels give the same
 * bits. */

#define LANES TAGC_CODE_LANES
#define PARTS (LANES / WIDTH)

/* ---- vectors ---- */

INLINE VEC NAME(load)(const float *p) {
    VEC v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* The first n < WIDTH, then zeros. */
INLINE VEC NAME(load_part)(const float *p, size_t n) {
    VEC v = {0};
    memcpy(&v, p, n * sizeof *p);
    return v;
}

INLINE void NAME(store)(float *p, VEC v) {
    memcpy(p, &v, sizeof v);
}

INLINE VEC NAME(choose)(IVEC mask, VEC yes, VEC no) {
    return (VEC)((mask & (IVEC)yes) | (~mask & (IVEC)no));
}

INLINE VEC NAME(magnitude)(VEC v) {
    return (VEC)((UVEC)v & 0x7fffffffu);
}

INLINE float NAME(sum)(const VEC *parts) { /* (PARTS) */
    float lanes[LANES];
    memcpy(lanes, parts, sizeof lanes);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

INLINE uint32_t NAME(top)(UVEC v) {
#if WIDTH >= 16
    v = NAME(max)(v, PARTNERS(v, 8));
#endif
#if WIDTH >= 8
    v = NAME(max)(v, PARTNERS(v, 4));
#endif
    v = NAME(max)(v, PARTNERS(v, 2));
    return NAME(max)(v, PARTNERS(v, 1))[0];
}

/* ---- blocks of values ---- */

KERNEL uint32_t NAME(accumulate)(const float *gradient, const float *residual, float *acc, size_t n) {
    UVEC top = {0};
    size_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        VEC sum = NAME(load)(gradient + i) + NAME(load)(residual + i);
        NAME(store)(acc + i, sum);
        top = NAME(max)(top, (UVEC)NAME(magnitude)(sum));
    }
    uint32_t largest = NAME(top)(top);
    for (; i < n; i++) {
        acc[i] = gradient[i] + residual[i];
        uint32_t bits = tagc_float_bits(acc[i]) & 0x7fffffffu;
        if (bits > largest) largest = bits;
    }
    return largest;
}

KERNEL uint32_t NAME(largest)(const float *x, size_t n) {
    UVEC top = {0}, other = {0};
    size_t i = 0;
    for (; i + 2 * WIDTH <= n; i += 2 * WIDTH) {
        top = NAME(max)(top, (UVEC)NAME(magnitude)(NAME(load)(x + i)));
        other = NAME(max)(other, (UVEC)NAME(magnitude)(NAME(load)(x + i + WIDTH)));
    }
    top = NAME(max)(top, other);
    for (; i + WIDTH <= n; i += WIDTH) top = NAME(max)(top, (UVEC)NAME(magnitude)(NAME(load)(x + i)));
    if (i < n) top = NAME(max)(top, (UVEC)NAME(magnitude)(NAME(load_part)(x + i, n - i)));
    return NAME(top)(top);
}

/* Vector `part` of the LANES values at x + i, zeros past n. */
INLINE VEC NAME(load_of)(const float *x, size_t i, int part, size_t n) {
    size_t at = i + (size_t)part * WIDTH;
    if (at + WIDTH <= n) return NAME(load)(x + at);
    return at < n ? NAME(load_part)(x + at, n - at) : (VEC){0};
}

/* Scales values down first, so that no sum overflows. */
KERNEL float NAME(mean)(const float *x, size_t n) {
    VEC sums[PARTS] = {{0}};
    for (size_t i = 0; i < n; i += LANES)
        for (int p = 0; p < PARTS; p++) sums[p] += NAME(magnitude)(NAME(load_of)(x, i, p, n)) * 0x1p-12f;
    return NAME(sum)(sums) * (4096.0f / (float)n);
}

INLINE IVEC NAME(is_large)(VEC x, float level, float scale) {
    return NAME(magnitude)(x) > (VEC){0} + scale * ((1 + level) / 2);
}

KERNEL float NAME(refit)(const float *x, size_t n, float level, float scale) {
    const VEC one = (VEC){0} + 1.0f, large = (VEC){0} + level;
    VEC sums[PARTS] = {{0}}, squares[PARTS] = {{0}};
    for (size_t i = 0; i < n; i += LANES)
        for (int p = 0; p < PARTS; p++) {
            VEC v = NAME(load_of)(x, i, p, n);
            VEC multiple = NAME(choose)(NAME(is_large)(v, level, scale), large, one);
            sums[p] += NAME(magnitude)(v) * 0x1p-12f * multiple;
            squares[p] += multiple * multiple;
        }
    float unused = (float)((LANES - n % LANES) % LANES); /* the zeros past the end were small ones */
    return NAME(sum)(sums) / (NAME(sum)(squares) - unused) * 4096.0f;
}

/* One vector: its codes and their decoded values. `values` is a constant at each call. */
INLINE UVEC NAME(round_vector)(int values, float level, float scale, float inverse, VEC x, VEC *decoded) {
    if (values == TAGC_FORMAT_INT8 || values == TAGC_FORMAT_INT4) {
        const float magic =
            12582912.0f; /* 1.5 * 2^23: adding it rounds, and leaves an integer in the low bits */
        VEC shifted = NAME(clamp)(x * inverse, values == TAGC_FORMAT_INT8 ? 127 : 7) + magic;
        *decoded = (shifted - magic) * scale;
        return (UVEC)shifted & (values == TAGC_FORMAT_INT8 ? 255u : 15u);
    }
    UVEC sign = (UVEC)x & 0x80000000u;
    IVEC large = NAME(is_large)(x, level, scale);
    VEC size = NAME(choose)(large, (VEC){0} + scale * level, (VEC){0} + scale);
    *decoded = (VEC)((UVEC)size | sign);
    return sign >> 30 | ((UVEC)large & 1u);
}

/* The loss, with zeros as -0.0f. decoded - wanted is +0.0f if they are equal, unless decoded is -0.0f. */
INLINE VEC NAME(lost)(VEC wanted, VEC decoded) {
    return (VEC)((UVEC)(decoded - wanted) ^ 0x80000000u);
}

INLINE void NAME(round_as)(int values, int bits, float level, float scale, const float *x, size_t n,
                           float *decoded, float *errors, uint8_t *packed) {
    float inverse = scale > 0 ? 1 / scale : 0;
    VEC out;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        UVEC codes[PARTS];
        for (int p = 0; p < PARTS; p++) {
            VEC v = NAME(load)(x + i + p * WIDTH);
            codes[p] = NAME(round_vector)(values, level, scale, inverse, v, &out);
            if (errors) NAME(store)(errors + i + p * WIDTH, NAME(lost)(v, out));
            if (decoded) NAME(store)(decoded + i + p * WIDTH, out);
        }
        NAME(pack)(codes, bits, packed + i * (size_t)bits / 8);
    }
    if (i == n) return;
    uint8_t last[LANES];
    UVEC codes[PARTS];
    VEC outs[PARTS], lost[PARTS];
    for (int p = 0; p < PARTS; p++) {
        VEC v = NAME(load_of)(x, i, p, n);
        codes[p] = NAME(round_vector)(values, level, scale, inverse, v, &outs[p]);
        lost[p] = NAME(lost)(v, outs[p]);
    }
    NAME(pack)(codes, bits, last);
    memcpy(packed + i * (size_t)bits / 8, last, ((n - i) * (size_t)bits + 7) / 8);
    if (errors) memcpy(errors + i, lost, (n - i) * sizeof *errors);
    if (decoded) memcpy(decoded + i, outs, (n - i) * sizeof *decoded);
}

KERNEL void NAME(round)(int values, float level, float scale, const float *x, size_t n, float *decoded,
                        float *errors, uint8_t *packed) {
    if (values == TAGC_FORMAT_INT8)
        NAME(round_as)(TAGC_FORMAT_INT8, 8, level, scale, x, n, decoded, errors, packed);
    else if (values == TAGC_FORMAT_INT4)
        NAME(round_as)(TAGC_FORMAT_INT4, 4, level, scale, x, n, decoded, errors, packed);
    else
        NAME(round_as)(TAGC_FORMAT_INT2, 2, level, scale, x, n, decoded, errors, packed);
}

INLINE UVEC NAME(half_of)(VEC v) {
    UVEC bits = (UVEC)NAME(magnitude)(v), half = TAGC_BF16_NEAREST(bits);
    half -= (half + 0x80u) >> 15; /* not up to Inf */
    return half | ((UVEC)v & 0x80000000u) >> 16;
}

KERNEL void NAME(narrow)(const float *x, size_t n, float *decoded, float *errors, uint8_t *halves) {
    size_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        VEC v = NAME(load)(x + i);
        UVEC half = NAME(half_of)(v);
        NAME(halves)(half, halves + 2 * i);
        if (errors) NAME(store)(errors + i, NAME(lost)(v, (VEC)(half << 16)));
        if (decoded) NAME(store)(decoded + i, (VEC)(half << 16));
    }
    if (i == n) return;
    VEC v = NAME(load_part)(x + i, n - i);
    UVEC half = NAME(half_of)(v);
    VEC out = (VEC)(half << 16), error = NAME(lost)(v, out);
    uint8_t last[2 * WIDTH];
    NAME(halves)(half, last);
    memcpy(halves + 2 * i, last, 2 * (n - i));
    if (errors) memcpy(errors + i, &error, (n - i) * sizeof *errors);
    if (decoded) memcpy(decoded + i, &out, (n - i) * sizeof *decoded);
}

KERNEL void NAME(widen_halves)(const uint8_t *halves, size_t n, float *out) {
    for (size_t i = 0; i < n; i++) {
        uint16_t half; /* plain enough for the compiler's own vectors */
        memcpy(&half, halves + 2 * i, sizeof half);
        out[i] = tagc_bits_float(TAGC_BF16_WIDE(half));
    }
}

INLINE VEC NAME(widen_vector)(int values, float level, float scale, UVEC codes) {
    if (values == TAGC_FORMAT_INT8 || values == TAGC_FORMAT_INT4) {
        int top = values == TAGC_FORMAT_INT8 ? 128 : 8;
        IVEC integers = ((IVEC)codes ^ top) - top;
        return __builtin_convertvector(integers, VEC) * scale;
    }
    IVEC large = -(IVEC)(codes & 1u);
    VEC size = NAME(choose)(large, (VEC){0} + scale * level, (VEC){0} + scale);
    return (VEC)((UVEC)size | (codes & 2u) << 30);
}

INLINE void NAME(widen_as)(int values, int bits, float level, const uint8_t *scales, int block,
                           const uint8_t *packed, size_t first, size_t n, float *out) {
    int shift = __builtin_ctz((unsigned)block);
    size_t i = first, end = first + n;
    UVEC codes[PARTS];
    for (; i + LANES <= end; i += LANES) {
        float scale = tagc_bits_float(TAGC_BF16_WIDE(tagc_load16(scales + 2 * (i >> shift))));
        NAME(unpack)(packed + i * (size_t)bits / 8, bits, codes);
        for (int p = 0; p < PARTS; p++)
            NAME(store)(out + (i - first) + p * WIDTH, NAME(widen_vector)(values, level, scale, codes[p]));
    }
    if (i == end) return;
    uint8_t last[LANES] = {0};
    VEC outs[PARTS];
    float scale = tagc_bits_float(TAGC_BF16_WIDE(tagc_load16(scales + 2 * (i >> shift))));
    memcpy(last, packed + i * (size_t)bits / 8, ((end - i) * (size_t)bits + 7) / 8);
    NAME(unpack)(last, bits, codes);
    for (int p = 0; p < PARTS; p++) outs[p] = NAME(widen_vector)(values, level, scale, codes[p]);
    memcpy(out + (i - first), outs, (end - i) * sizeof *out);
}

KERNEL void NAME(widen)(int values, float level, const uint8_t *scales, int block, const uint8_t *packed,
                        size_t first, size_t n, float *out) {
    if (values == TAGC_FORMAT_INT8)
        NAME(widen_as)(TAGC_FORMAT_INT8, 8, level, scales, block, packed, first, n, out);
    else if (values == TAGC_FORMAT_INT4)
        NAME(widen_as)(TAGC_FORMAT_INT4, 4, level, scales, block, packed, first, n, out);
    else
        NAME(widen_as)(TAGC_FORMAT_INT2, 2, level, scales, block, packed, first, n, out);
}

KERNEL void NAME(add)(float *sums, const float *x, float scale, size_t n) {
    size_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH)
        NAME(store)(sums + i, NAME(load)(sums + i) + NAME(load)(x + i) * scale);
    for (; i < n; i++) sums[i] += x[i] * scale;
}

/* ---- gaps ---- */

/* gap / escape rounded down, exact for both below 2^15: the added half outweighs any rounding error. */
INLINE IVEC NAME(escapes)(IVEC gap, float inverse) {
    return __builtin_convertvector((__builtin_convertvector(gap, VEC) + 0.5f) * inverse, IVEC);
}

INLINE IVEC NAME(gaps)(const uint32_t *indices) { /* the one before them is there */
    IVEC here, before;
    memcpy(&here, indices, sizeof here);
    memcpy(&before, indices - 1, sizeof before);
    return here - before - 1;
}

INLINE uint32_t NAME(escapes_of)(uint32_t gap, float inverse) {
    return (uint32_t)(((float)(int32_t)gap + 0.5f) * inverse);
}

/* Writes the codes of WIDTH indices one by one as bytes from codes[at] on, with escapes skipped. Returns where the next ones
 * begin. */
INLINE size_t NAME(fill_singly)(const uint32_t *indices, int escape, float inverse, uint8_t *codes,
                                size_t at) {
    IVEC wide = NAME(gaps)(indices), escapes = NAME(escapes)(wide, inverse), rest = wide - escapes * escape;
    int32_t skip[WIDTH], code[WIDTH];
    memcpy(skip, &escapes, sizeof skip);
    memcpy(code, &rest, sizeof code);
    for (int lane = 0; lane < WIDTH; lane++) {
        at += (uint32_t)skip[lane];
        codes[at++] = (uint8_t)code[lane];
    }
    return at;
}

KERNEL size_t NAME(count_codes)(const uint32_t *indices, size_t n, uint32_t next, int bits) {
    float inverse = 1.0f / (float)((1 << bits) - 1);
    IVEC sums = {0};
    if (n == 0) return 0;
    size_t n_codes = n + NAME(escapes_of)(indices[0] - next, inverse), i = 1;
    for (; i + WIDTH <= n; i += WIDTH) sums += NAME(escapes)(NAME(gaps)(indices + i), inverse);
    for (; i < n; i++) n_codes += NAME(escapes_of)(indices[i] - indices[i - 1] - 1, inverse);
    for (int lane = 0; lane < WIDTH; lane++) n_codes += (uint32_t)sums[lane];
    return n_codes;
}

KERNEL void NAME(write_any)(const uint32_t *indices, size_t n, uint32_t next, int bits, size_t n_codes,
                            uint8_t *bytes) {
    const uint32_t escape = (1u << bits) - 1;
    const uint8_t *end = bytes + (n_codes * (size_t)bits + 7) / 8;
    float inverse = 1.0f / (float)escape;
    uint64_t acc = 0;
    unsigned n_bits = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t gap = indices[i] - next, n_escapes = NAME(escapes_of)(gap, inverse);
        next = indices[i] + 1;
        for (uint32_t e = n_escapes + 1; e > 0; e--) {
            acc |= (uint64_t)(e > 1 ? escape : gap - n_escapes * escape) << n_bits;
            n_bits += (unsigned)bits;
            if (n_bits < 32) continue;
            uint32_t word = (uint32_t)acc;
            memcpy(bytes, &word, sizeof word);
            bytes += sizeof word;
            acc >>= 32;
            n_bits -= 32;
        }
    }
    for (; bytes < end; acc >>= 8) *bytes++ = (uint8_t)acc;
}

/* Code i. All 8 bytes from its first one must be readable. */
INLINE uint32_t NAME(code_at)(const uint8_t *bytes, size_t bit, uint32_t escape) {
    uint64_t word;
    memcpy(&word, bytes + bit / 8, sizeof word);
    return (uint32_t)(word >> bit % 8) & escape;
}

/* How many codes can be read by 8-byte loads. */
INLINE size_t NAME(codes_inside)(size_t n_codes, int bits) {
    size_t n_bytes = (n_codes * (size_t)bits + 7) / 8;
    if (n_bytes < 8) return 0;
    size_t n = ((n_bytes - 8) * 8 + 8) / (size_t)bits; /* those that begin in the first n_bytes - 7 */
    return n < n_codes ? n : n_codes;
}

INLINE uint32_t NAME(late_code_at)(const uint8_t *bytes, size_t bit, int bits) {
    uint32_t word = 0;
    for (size_t b = bit / 8; b <= (bit + (size_t)bits - 1) / 8; b++)
        word |= (uint32_t)bytes[b] << 8 * (b - bit / 8);
    return word >> bit % 8 & ((1u << bits) - 1);
}

INLINE size_t NAME(read_from)(const uint8_t *bytes, size_t first, size_t n_codes, int bits, uint32_t at,
                              uint32_t *positions) {
    const uint32_t escape = (1u << bits) - 1;
    size_t n = 0, i = first, n_inside = NAME(codes_inside)(n_codes, bits);
    for (; i < n_codes; i++) {
        size_t bit = i * (size_t)bits;
        uint32_t code =
            i < n_inside ? NAME(code_at)(bytes, bit, escape) : NAME(late_code_at)(bytes, bit, bits);
        uint32_t is_item = code != escape;
        at += code;
        positions[n] = at; /* always written, counted only if it is an item, to avoid a branch */
        n += is_item;
        at += is_item;
    }
    return n;
}

INLINE size_t NAME(check_from)(const uint8_t *bytes, size_t first, size_t n_codes, int bits, size_t *end) {
    const uint32_t escape = (1u << bits) - 1;
    size_t n = 0, n_inside = NAME(codes_inside)(n_codes, bits);
    for (size_t i = first; i < n_codes; i++) {
        size_t bit = i * (size_t)bits;
        uint32_t code =
            i < n_inside ? NAME(code_at)(bytes, bit, escape) : NAME(late_code_at)(bytes, bit, bits);
        n += code != escape;
        *end += code + (code != escape);
    }
    return n;
}
