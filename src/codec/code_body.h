/* The loops of code_kernels.h in vectors of 16, which the compiler splits as far as the instruction set asks. Included
 * once per set with TARGET (a function attribute), NAME(x) (the suffix) and BMI2 (1: pext and pdep are there) defined;
 * hence no include guard. Every operation is one IEEE operation in a fixed order, so that all sets give the same bits. */

typedef float NAME(vec) __attribute__((vector_size(64)));
typedef uint32_t NAME(uvec) __attribute__((vector_size(64)));
typedef int32_t NAME(ivec) __attribute__((vector_size(64)));
typedef uint16_t NAME(half) __attribute__((vector_size(32)));
typedef uint8_t NAME(bytes) __attribute__((vector_size(16)));
#define VEC NAME(vec)
#define UVEC NAME(uvec)
#define IVEC NAME(ivec)
#define INLINE TARGET static inline __attribute__((always_inline))
#define KERNEL TARGET static
#define LANES TAGC_CODE_LANES

/* ---- vectors ---- */

INLINE VEC NAME(load)(const float *p) {
    VEC v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* The first n < LANES, then zeros. */
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

INLINE float NAME(sum)(VEC v) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}

INLINE UVEC NAME(max)(UVEC a, UVEC b) {
    IVEC larger = (IVEC)a > (IVEC)b; /* both below 2^31 */
    return (UVEC)((larger & (IVEC)a) | (~larger & (IVEC)b));
}

INLINE uint32_t NAME(top)(UVEC v) {
    uint32_t top = 0;
    for (int i = 0; i < LANES; i++)
        if (v[i] > top) top = v[i];
    return top;
}

/* ---- packing: 8 bytes that hold `bits` each, to bits * 8 bits and back ---- */

INLINE uint64_t NAME(squeeze)(uint64_t x, int bits) {
#if BMI2
    return _pext_u64(x, 0x0101010101010101u * ((1u << bits) - 1));
#else
    if (bits == 4) {
        x = (x | x >> 4) & 0x00ff00ff00ff00ffu;
        x = (x | x >> 8) & 0x0000ffff0000ffffu;
        return (x | x >> 16) & 0xffffffffu;
    }
    if (bits == 2) {
        x = (x | x >> 6) & 0x000f000f000f000fu;
        x = (x | x >> 12) & 0x000000ff000000ffu;
        return (x | x >> 24) & 0xffffu;
    }
    x = (x | x >> 7) & 0x0003000300030003u;
    x = (x | x >> 14) & 0x0000000f0000000fu;
    return (x | x >> 28) & 0xffu;
#endif
}

INLINE uint64_t NAME(spread)(uint64_t x, int bits) {
#if BMI2
    return _pdep_u64(x, 0x0101010101010101u * ((1u << bits) - 1));
#else
    if (bits == 4) {
        x = (x | x << 16) & 0x0000ffff0000ffffu;
        x = (x | x << 8) & 0x00ff00ff00ff00ffu;
        return (x | x << 4) & 0x0f0f0f0f0f0f0f0fu;
    }
    if (bits == 2) {
        x = (x | x << 24) & 0x000000ff000000ffu;
        x = (x | x << 12) & 0x000f000f000f000fu;
        return (x | x << 6) & 0x0303030303030303u;
    }
    x = (x | x << 28) & 0x0000000f0000000fu;
    x = (x | x << 14) & 0x0003000300030003u;
    return (x | x << 7) & 0x0101010101010101u;
#endif
}

/* Codes of 16 lanes, none wider than `bits`, to 2 * bits bytes. */
INLINE void NAME(pack)(UVEC codes, int bits, uint8_t *out) {
    NAME(bytes) narrow = __builtin_convertvector(codes, NAME(bytes));
    uint64_t words[2];
    memcpy(words, &narrow, sizeof words);
    if (bits < 8) {
        words[0] = NAME(squeeze)(words[0], bits);
        words[1] = NAME(squeeze)(words[1], bits);
    }
    memcpy(out, &words[0], (size_t)bits);
    memcpy(out + bits, &words[1], (size_t)bits);
}

INLINE UVEC NAME(unpack)(const uint8_t *in, int bits) {
    uint64_t words[2] = {0, 0};
    NAME(bytes) narrow;
    memcpy(&words[0], in, (size_t)bits);
    memcpy(&words[1], in + bits, (size_t)bits);
    if (bits < 8) {
        words[0] = NAME(spread)(words[0], bits);
        words[1] = NAME(spread)(words[1], bits);
    }
    memcpy(&narrow, words, sizeof narrow);
    return __builtin_convertvector(narrow, UVEC);
}

/* ---- blocks of values ---- */

KERNEL uint32_t NAME(accumulate)(const float *gradient, const float *residual, float *acc, size_t n) {
    UVEC top = {0};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
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
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        top = NAME(max)(top, (UVEC)NAME(magnitude)(NAME(load)(x + i)));
        other = NAME(max)(other, (UVEC)NAME(magnitude)(NAME(load)(x + i + LANES)));
    }
    top = NAME(max)(top, other);
    for (; i + LANES <= n; i += LANES) top = NAME(max)(top, (UVEC)NAME(magnitude)(NAME(load)(x + i)));
    if (i < n) top = NAME(max)(top, (UVEC)NAME(magnitude)(NAME(load_part)(x + i, n - i)));
    return NAME(top)(top);
}

/* Shrunk on the way, so that no sum overflows. */
KERNEL float NAME(mean)(const float *x, size_t n) {
    VEC sum = {0};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) sum += NAME(magnitude)(NAME(load)(x + i)) * 0x1p-12f;
    if (i < n) sum += NAME(magnitude)(NAME(load_part)(x + i, n - i)) * 0x1p-12f;
    return NAME(sum)(sum) * (4096.0f / (float)n);
}

INLINE IVEC NAME(is_large)(VEC x, float level, float scale) {
    return NAME(magnitude)(x) > (VEC){0} + scale * ((1 + level) / 2);
}

KERNEL float NAME(refit)(const float *x, size_t n, float level, float scale) {
    const VEC one = (VEC){0} + 1.0f, large = (VEC){0} + level;
    VEC sum = {0}, squares = {0};
    for (size_t i = 0; i < n; i += LANES) {
        VEC v = n - i < LANES ? NAME(load_part)(x + i, n - i) : NAME(load)(x + i);
        VEC multiple = NAME(choose)(NAME(is_large)(v, level, scale), large, one);
        sum += NAME(magnitude)(v) * 0x1p-12f * multiple;
        squares += multiple * multiple;
    }
    float unused = (float)((LANES - n % LANES) % LANES); /* the zeros past the end were small ones */
    return NAME(sum)(sum) / (NAME(sum)(squares) - unused) * 4096.0f;
}

/* -most to most; NaN becomes -most. */
INLINE VEC NAME(clamp)(VEC x, float most) {
    const VEC high = (VEC){0} + most, low = (VEC){0} - most;
    x = NAME(choose)(x > low, x, low);
    return NAME(choose)(x < high, x, high);
}

/* One vector: codes and what they decode to. `values` is a constant where this is called. */
INLINE UVEC NAME(round_vector)(int values, float level, float scale, float inverse, VEC x, VEC *decoded) {
    UVEC sign = (UVEC)x & 0x80000000u;
    if (values == TAGC_VALUES_INT8 || values == TAGC_VALUES_INT4) {
        const float magic =
            12582912.0f; /* 1.5 * 2^23: adding it rounds, and leaves an integer in the low bits */
        VEC shifted = NAME(clamp)(x * inverse, values == TAGC_VALUES_INT8 ? 127 : 7) + magic;
        *decoded = (shifted - magic) * scale;
        return (UVEC)shifted & (values == TAGC_VALUES_INT8 ? 255u : 15u);
    }
    if (values == TAGC_VALUES_INT2) {
        IVEC large = NAME(is_large)(x, level, scale);
        VEC size = NAME(choose)(large, (VEC){0} + scale * level, (VEC){0} + scale);
        *decoded = (VEC)((UVEC)size | sign);
        return sign >> 30 | ((UVEC)large & 1u);
    }
    *decoded = (VEC)((UVEC)((VEC){0} + scale) | sign);
    return sign >> 31;
}

/* What is lost, zeros as -0.0f. */
INLINE VEC NAME(lost)(VEC wanted, VEC decoded) {
    VEC error = wanted - decoded;
    return (VEC)((UVEC)error | ((UVEC)(error == (VEC){0}) & 0x80000000u));
}

INLINE void NAME(round_as)(int values, int bits, float level, float scale, const float *x, size_t n,
                           float *decoded, float *errors, uint8_t *packed) {
    float inverse = scale > 0 ? 1 / scale : 0;
    VEC out;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        VEC v = NAME(load)(x + i);
        NAME(pack)
        (NAME(round_vector)(values, level, scale, inverse, v, &out), bits, packed + i * (size_t)bits / 8);
        if (errors) NAME(store)(errors + i, NAME(lost)(v, out));
        if (decoded) NAME(store)(decoded + i, out);
    }
    if (i == n) return;
    uint8_t last[LANES];
    VEC v = NAME(load_part)(x + i, n - i);
    NAME(pack)(NAME(round_vector)(values, level, scale, inverse, v, &out), bits, last);
    VEC error = NAME(lost)(v, out);
    memcpy(packed + i * (size_t)bits / 8, last, ((n - i) * (size_t)bits + 7) / 8);
    if (errors) memcpy(errors + i, &error, (n - i) * sizeof *errors);
    if (decoded) memcpy(decoded + i, &out, (n - i) * sizeof *decoded);
}

KERNEL void NAME(round)(int values, float level, float scale, const float *x, size_t n, float *decoded,
                        float *errors, uint8_t *packed) {
    if (values == TAGC_VALUES_INT8)
        NAME(round_as)(TAGC_VALUES_INT8, 8, level, scale, x, n, decoded, errors, packed);
    else if (values == TAGC_VALUES_INT4)
        NAME(round_as)(TAGC_VALUES_INT4, 4, level, scale, x, n, decoded, errors, packed);
    else if (values == TAGC_VALUES_INT2)
        NAME(round_as)(TAGC_VALUES_INT2, 2, level, scale, x, n, decoded, errors, packed);
    else
        NAME(round_as)(TAGC_VALUES_SIGN, 1, level, scale, x, n, decoded, errors, packed);
}

KERNEL void NAME(narrow)(const float *x, size_t n, float *decoded, float *errors, uint8_t *halves) {
    for (size_t i = 0; i < n; i += LANES) {
        size_t n_here = n - i < LANES ? n - i : LANES;
        VEC v = n_here < LANES ? NAME(load_part)(x + i, n_here) : NAME(load)(x + i);
        UVEC bits = (UVEC)v, half = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
        half += (UVEC)((half & 0x7fffu) == 0x7f80u); /* not up to Inf */
        VEC out = (VEC)(half << 16), error = NAME(lost)(v, out);
        NAME(half) narrow = __builtin_convertvector(half, NAME(half));
        memcpy(halves + 2 * i, &narrow, 2 * n_here);
        if (errors) memcpy(errors + i, &error, n_here * sizeof *errors);
        if (decoded) memcpy(decoded + i, &out, n_here * sizeof *decoded);
    }
}

INLINE VEC NAME(widen_vector)(int values, int bits, float level, float scale, const uint8_t *in) {
    UVEC codes = NAME(unpack)(in, bits);
    if (values == TAGC_VALUES_INT8 || values == TAGC_VALUES_INT4) {
        int top = values == TAGC_VALUES_INT8 ? 128 : 8;
        IVEC integers = ((IVEC)codes ^ top) - top;
        return __builtin_convertvector(integers, VEC) * scale;
    }
    if (values == TAGC_VALUES_SIGN) return (VEC)((UVEC)((VEC){0} + scale) | codes << 31);
    VEC size = NAME(choose)((IVEC)(codes & 1u) != 0, (VEC){0} + scale * level, (VEC){0} + scale);
    return (VEC)((UVEC)size | (codes & 2u) << 30);
}

INLINE void NAME(widen_as)(int values, int bits, float level, const uint8_t *scales, int block,
                           const uint8_t *packed, size_t first, size_t n, float *out) {
    int shift = __builtin_ctz((unsigned)block);
    size_t i = first, end = first + n;
    for (; i + LANES <= end; i += LANES) {
        float scale = tagc_bits_float(tagc_load16(scales + 2 * (i >> shift)) << 16);
        NAME(store)
        (out + (i - first), NAME(widen_vector)(values, bits, level, scale, packed + i * (size_t)bits / 8));
    }
    if (i == end) return;
    uint8_t last[LANES] = {0};
    float scale = tagc_bits_float(tagc_load16(scales + 2 * (i >> shift)) << 16);
    memcpy(last, packed + i * (size_t)bits / 8, ((end - i) * (size_t)bits + 7) / 8);
    VEC v = NAME(widen_vector)(values, bits, level, scale, last);
    memcpy(out + (i - first), &v, (end - i) * sizeof *out);
}

KERNEL void NAME(widen)(int values, float level, const uint8_t *scales, int block, const uint8_t *packed,
                        size_t first, size_t n, float *out) {
    if (values == TAGC_VALUES_INT8)
        NAME(widen_as)(TAGC_VALUES_INT8, 8, level, scales, block, packed, first, n, out);
    else if (values == TAGC_VALUES_INT4)
        NAME(widen_as)(TAGC_VALUES_INT4, 4, level, scales, block, packed, first, n, out);
    else if (values == TAGC_VALUES_INT2)
        NAME(widen_as)(TAGC_VALUES_INT2, 2, level, scales, block, packed, first, n, out);
    else
        NAME(widen_as)(TAGC_VALUES_SIGN, 1, level, scales, block, packed, first, n, out);
}

KERNEL void NAME(subtract)(const float *wanted, const float *decoded, float *errors, size_t n) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        NAME(store)(errors + i, NAME(lost)(NAME(load)(wanted + i), NAME(load)(decoded + i)));
    if (i == n) return;
    VEC error = NAME(lost)(NAME(load_part)(wanted + i, n - i), NAME(load_part)(decoded + i, n - i));
    memcpy(errors + i, &error, (n - i) * sizeof *errors);
}

KERNEL void NAME(add)(float *sums, const float *x, float scale, size_t n) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        NAME(store)(sums + i, NAME(load)(sums + i) + NAME(load)(x + i) * scale);
    for (; i < n; i++) sums[i] += x[i] * scale;
}

/* ---- the transform: sums and differences of elements 1, 2, 4, ... apart, then one factor ---- */

#define PARTNERS(v, half)                                                                                    \
    __builtin_shufflevector(v, v, 0 ^ half, 1 ^ half, 2 ^ half, 3 ^ half, 4 ^ half, 5 ^ half, 6 ^ half,      \
                            7 ^ half, 8 ^ half, 9 ^ half, 10 ^ half, 11 ^ half, 12 ^ half, 13 ^ half,        \
                            14 ^ half, 15 ^ half)

/* Where the lane's bit is set the own value is subtracted, else added. */
INLINE VEC NAME(transform_lanes)(VEC v) {
    const UVEC lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    v = PARTNERS(v, 1) + (VEC)((UVEC)v ^ (lanes & 1u) << 31);
    v = PARTNERS(v, 2) + (VEC)((UVEC)v ^ (lanes & 2u) << 30);
    v = PARTNERS(v, 4) + (VEC)((UVEC)v ^ (lanes & 4u) << 29);
    return PARTNERS(v, 8) + (VEC)((UVEC)v ^ (lanes & 8u) << 28);
}

KERNEL void NAME(transform)(float *x, size_t n) {
    float norm = 1.0f / sqrtf((float)n);
    for (size_t i = 0; i < n; i += LANES) {
        VEC v = NAME(transform_lanes)(NAME(load)(x + i));
        NAME(store)(x + i, n == LANES ? v * norm : v);
    }
    for (size_t half = LANES; half < n; half *= 2) {
        float factor = 2 * half == n ? norm : 1; /* a factor of 1 changes no bits */
        for (size_t i = 0; i < n; i += 2 * half)
            for (size_t j = i; j < i + half; j += LANES) {
                VEC a = NAME(load)(x + j), b = NAME(load)(x + j + half);
                NAME(store)(x + j, (a + b) * factor);
                NAME(store)(x + j + half, (a - b) * factor);
            }
    }
}

/* ---- gaps ---- */

/* gap / escape rounded down, exact for both below 2^15: the half keeps clear of what rounding can do. */
INLINE IVEC NAME(escapes)(IVEC gap, float inverse) {
    return __builtin_convertvector((__builtin_convertvector(gap, VEC) + 0.5f) * inverse, IVEC);
}

INLINE IVEC NAME(gaps)(const uint32_t *indices) { /* of 16; the one before them is there */
    IVEC here, before;
    memcpy(&here, indices, sizeof here);
    memcpy(&before, indices - 1, sizeof before);
    return here - before - 1;
}

INLINE uint32_t NAME(escapes_of)(uint32_t gap, float inverse) {
    return (uint32_t)(((float)(int32_t)gap + 0.5f) * inverse);
}

KERNEL size_t NAME(count_codes)(const uint32_t *indices, size_t n, uint32_t next, int bits) {
    float inverse = 1.0f / (float)((1 << bits) - 1);
    IVEC sums = {0};
    if (n == 0) return 0;
    size_t n_codes = n + NAME(escapes_of)(indices[0] - next, inverse), i = 1;
    for (; i + LANES <= n; i += LANES) sums += NAME(escapes)(NAME(gaps)(indices + i), inverse);
    for (; i < n; i++) n_codes += NAME(escapes_of)(indices[i] - indices[i - 1] - 1, inverse);
    for (int lane = 0; lane < LANES; lane++) n_codes += (uint32_t)sums[lane];
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

#if BMI2
/* Packs codes (n_codes, then zeros up to a multiple of 8). */
INLINE void NAME(write_bytes)(const uint8_t *codes, size_t n_codes, int bits, uint8_t *bytes) {
    const uint8_t *end = bytes + (n_codes * (size_t)bits + 7) / 8;
    for (size_t i = 0; i < n_codes; i += 8, bytes += bits) {
        uint64_t word;
        memcpy(&word, codes + i, sizeof word);
        word = NAME(squeeze)(word, bits);
        if (end - bytes >= 8)
            memcpy(bytes, &word, sizeof word);
        else
            memcpy(bytes, &word, (size_t)(end - bytes < bits ? end - bytes : bits));
    }
}

/* Codes of at most 8 bits as bytes first, escapes being what is there already: no branch for a gap. */
KERNEL void NAME(write_codes)(const uint32_t *indices, size_t n, uint32_t next, int bits, size_t n_codes,
                              uint8_t *bytes) {
    uint8_t codes[TAGC_CODE_MAX_CODES + LANES];
    const int escape = (1 << bits) - 1;
    const float inverse = 1.0f / (float)escape;
    if (bits > 8 || n == 0) {
        NAME(write_any)(indices, n, next, bits, n_codes, bytes);
        return;
    }
    memset(codes, 255, n_codes);
    memset(codes + n_codes, 0, LANES);
    uint32_t gap = indices[0] - next;
    size_t at = NAME(escapes_of)(gap, inverse), i = 1;
    codes[at] = (uint8_t)(gap - at * (uint32_t)escape);
    at++;
    for (; i + LANES <= n; i += LANES) {
        IVEC wide = NAME(gaps)(indices + i), escapes = NAME(escapes)(wide, inverse);
        IVEC rest = wide - escapes * escape;
        int32_t skip[LANES], code[LANES];
        memcpy(skip, &escapes, sizeof skip);
        memcpy(code, &rest, sizeof code);
        for (int lane = 0; lane < LANES; lane++) {
            at += (uint32_t)skip[lane];
            codes[at++] = (uint8_t)code[lane];
        }
    }
    for (; i < n; i++) {
        gap = indices[i] - indices[i - 1] - 1;
        uint32_t skip = NAME(escapes_of)(gap, inverse);
        at += skip;
        codes[at++] = (uint8_t)(gap - skip * (uint32_t)escape);
    }
    NAME(write_bytes)(codes, n_codes, bits, bytes);
}
#endif

/* Code i, of which all 8 bytes from its first may be read. */
INLINE uint32_t NAME(code_at)(const uint8_t *bytes, size_t bit, uint32_t escape) {
    uint64_t word;
    memcpy(&word, bytes + bit / 8, sizeof word);
    return (uint32_t)(word >> bit % 8) & escape;
}

/* How many codes can be read with 8 bytes each. */
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
        positions[n] = at; /* always written, counted when it is an item: no branch to miss */
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
