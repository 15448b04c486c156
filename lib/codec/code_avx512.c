/* The loops of code_body.h with AVX-512, and gaps 16 codes at a time. */
#include "codec/code_kernels.h"
#include "tagc/tagc.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,bmi2,lzcnt,popcnt")))
#define WIDTH 16
#define NAME(x) avx512_##x
#include "codec/code_vectors.h"

INLINE UVEC avx512_max(UVEC a, UVEC b) {
    return (UVEC)_mm512_max_epu32((__m512i)a, (__m512i)b);
}

INLINE VEC avx512_clamp(VEC x, float most) {
    __m512 above = _mm512_max_ps((__m512)x, _mm512_set1_ps(-most)); /* the second one where x is NaN */
    return (VEC)_mm512_min_ps(above, _mm512_set1_ps(most));
}

INLINE void avx512_pack(const UVEC *codes, int bits, uint8_t *out) {
    __m128i bytes = _mm512_cvtepi32_epi8((__m512i)codes[0]);
    if (bits == 8) {
        _mm_storeu_si128((__m128i *)out, bytes);
        return;
    }
    const uint64_t eight = 0x0101010101010101u * ((1u << bits) - 1);
    uint64_t low = _pext_u64((uint64_t)_mm_cvtsi128_si64(bytes), eight);
    uint64_t high = _pext_u64((uint64_t)_mm_extract_epi64(bytes, 1), eight);
    uint64_t word = low | high << 8 * bits;
    memcpy(out, &word, 2 * (size_t)bits);
}

INLINE void avx512_unpack(const uint8_t *in, int bits, UVEC *codes) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    if (bits == 8) {
        codes[0] = (UVEC)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)in));
        return;
    }
    int low = 0, high = 0;
    __m512i words;
    if (bits == 4) {
        memcpy(&low, in, sizeof low);
        memcpy(&high, in + 4, sizeof high);
        words = _mm512_inserti64x4(_mm512_set1_epi32(low), _mm256_set1_epi32(high), 1);
    } else {
        memcpy(&low, in, 2 * (size_t)bits);
        words = _mm512_set1_epi32(low);
    }
    __m512i shifts = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(bits)); /* modulo 32 */
    shifts = _mm512_and_si512(shifts, _mm512_set1_epi32(31));
    codes[0] = (UVEC)_mm512_and_si512(_mm512_srlv_epi32(words, shifts), _mm512_set1_epi32((1 << bits) - 1));
}

INLINE void avx512_spread(const uint8_t *random, UVEC *thresholds) {
    const __m512i words = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m512i turns = _mm512_broadcast_i32x4(_mm_setr_epi32(8, 16, 24, 0));
    __m512i all = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)random));
    thresholds[0] = (UVEC)_mm512_rorv_epi32(_mm512_permutexvar_epi32(words, all), turns);
}

INLINE void avx512_halves(UVEC half, uint8_t *out) {
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi32_epi16((__m512i)half));
}

#include "codec/code_body.h"

TARGET static inline __m512i prefix_sums(__m512i v) {
    const __m512i zero = _mm512_setzero_si512();
    v = _mm512_add_epi32(v, _mm512_alignr_epi32(v, zero, 15));
    v = _mm512_add_epi32(v, _mm512_alignr_epi32(v, zero, 14));
    v = _mm512_add_epi32(v, _mm512_alignr_epi32(v, zero, 12));
    return _mm512_add_epi32(v, _mm512_alignr_epi32(v, zero, 8));
}

/* If the codes take at most 64 bytes, writes them at once: moves each code to its place behind the escapes. */
INLINE size_t avx512_fill(const uint32_t *indices, int escape, float inverse, uint8_t *codes, size_t at) {
    const __m512i one = _mm512_set1_epi32(1), bit = _mm512_set1_epi64(1);
    IVEC wide = avx512_gaps(indices), escapes = avx512_escapes(wide, inverse), rest = wide - escapes * escape;
    if (_mm512_cmpgt_epi32_mask((__m512i)escapes, _mm512_set1_epi32(3))) /* 16 * 4 = 64 */
        return avx512_fill_singly(indices, escape, inverse, codes, at);
    __m512i ends = prefix_sums(_mm512_add_epi32((__m512i)escapes, one)), places = _mm512_sub_epi32(ends, one);
    __m512i low = _mm512_sllv_epi64(bit, _mm512_cvtepu32_epi64(_mm512_castsi512_si256(places)));
    __m512i high = _mm512_sllv_epi64(bit, _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(places, 1)));
    __mmask64 is_item = (__mmask64)_mm512_reduce_or_epi64(_mm512_or_si512(low, high));
    __m512i bytes = _mm512_castsi128_si512(_mm512_cvtepi32_epi8((__m512i)rest));
    _mm512_storeu_si512(codes + at, _mm512_mask_expand_epi8(_mm512_set1_epi8(-1), is_item, bytes));
    return at + 64 - (size_t)_lzcnt_u64(is_item);
}

#define FILL avx512_fill
#include "codec/code_bmi2.h"

/* How 16 codes are packed in 2 * bits bytes: lane j begins at bit j * bits and fits into two 16-bit words. */
typedef struct unpacking {
    __m512i words, shifts, escape;
    __mmask32 inside; /* the bytes */
} unpacking;

TARGET static inline unpacking unpacking_of(int bits) {
    const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i begin = _mm512_mullo_epi32(iota, _mm512_set1_epi32(bits));
    __m512i low = _mm512_srli_epi32(begin, 4), high = _mm512_add_epi32(low, _mm512_set1_epi32(1));
    return (unpacking){.words = _mm512_or_si512(low, _mm512_slli_epi32(high, 16)),
                       .shifts = _mm512_and_si512(begin, _mm512_set1_epi32(15)),
                       .escape = _mm512_set1_epi32((1 << bits) - 1),
                       .inside = (__mmask32)((1ull << 2 * bits) - 1)};
}

TARGET static inline __m512i unpack_codes(const unpacking *u, const uint8_t *bytes) {
    __m512i packed = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(u->inside, bytes));
    __m512i words = _mm512_permutexvar_epi16(u->words, packed);
    return _mm512_and_si512(_mm512_srlv_epi32(words, u->shifts), u->escape);
}

TARGET static size_t avx512_read_codes(const uint8_t *bytes, size_t n_codes, int bits, uint32_t *positions) {
    const unpacking u = unpacking_of(bits);
    const __m512i last = _mm512_set1_epi32(15), one = _mm512_set1_epi32(1);
    __m512i at = _mm512_set1_epi32(-1); /* of the last item or skip, so that an item's position is its sum */
    size_t n = 0, i = 0;
    for (; i + 16 <= n_codes; i += 16) {
        __m512i codes = unpack_codes(&u, bytes + i / 8 * (size_t)bits);
        __mmask16 is_item = _mm512_cmpneq_epi32_mask(codes, u.escape);
        __m512i sums = prefix_sums(_mm512_mask_add_epi32(codes, is_item, codes, one));
        _mm512_storeu_si512(positions + n, _mm512_maskz_compress_epi32(is_item, _mm512_add_epi32(at, sums)));
        at = _mm512_add_epi32(at, _mm512_permutexvar_epi32(last, sums));
        n += (size_t)_mm_popcnt_u32(is_item);
    }
    uint32_t next = (uint32_t)_mm_cvtsi128_si32(_mm512_castsi512_si128(at)) + 1;
    return n + avx512_read_from(bytes, i, n_codes, bits, next, positions + n);
}

TARGET static size_t avx512_check_codes(const uint8_t *bytes, size_t n_codes, int bits, size_t *end) {
    const unpacking u = unpacking_of(bits);
    __m512i sums = _mm512_setzero_si512(); /* a chunk has at most 2^16 codes below 2^15 */
    size_t n = 0, i = 0;
    for (; i + 16 <= n_codes; i += 16) {
        __m512i codes = unpack_codes(&u, bytes + i / 8 * (size_t)bits);
        n += (size_t)_mm_popcnt_u32(_mm512_cmpneq_epi32_mask(codes, u.escape));
        sums = _mm512_add_epi32(sums, codes);
    }
    *end = n + (uint32_t)_mm512_reduce_add_epi32(sums);
    return n + avx512_check_from(bytes, i, n_codes, bits, end);
}

#define HAS_READERS
#define WRITE_CODES avx512_write_codes
#define STREAM(p, v) _mm512_stream_ps(p, (__m512)(v))
#define TABLE tagc_code_avx512
#define LEVEL "avx512"
#include "codec/code_table.h"
#endif
