/* The loops of code_body.h with AVX2 and BMI2. */
#include "codec/code_kernels.h"
#include "tagc/tagc.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

typedef float avx2_vec __attribute__((vector_size(32)));
typedef uint32_t avx2_uvec __attribute__((vector_size(32)));
typedef int32_t avx2_ivec __attribute__((vector_size(32)));
#define VEC avx2_vec
#define UVEC avx2_uvec
#define IVEC avx2_ivec
#define TARGET __attribute__((target("avx2,bmi2,popcnt")))
#define WIDTH 8
#define NAME(x) avx2_##x
#define PARTNERS(v, h)                                                                                       \
    __builtin_shufflevector(v, v, 0 ^ (h), 1 ^ (h), 2 ^ (h), 3 ^ (h), 4 ^ (h), 5 ^ (h), 6 ^ (h), 7 ^ (h))
#define ALWAYS TARGET static inline __attribute__((always_inline))

ALWAYS UVEC avx2_max(UVEC a, UVEC b) {
    return (UVEC)_mm256_max_epu32((__m256i)a, (__m256i)b);
}

ALWAYS VEC avx2_clamp(VEC x, float most) {
    __m256 above = _mm256_max_ps((__m256)x, _mm256_set1_ps(-most)); /* the second one where x is NaN */
    return (VEC)_mm256_min_ps(above, _mm256_set1_ps(most));
}

ALWAYS void avx2_pack(const UVEC *codes, int bits, uint8_t *out) {
    __m256i halves = _mm256_packus_epi32((__m256i)codes[0], (__m256i)codes[1]);
    halves = _mm256_permute4x64_epi64(halves, 0xd8);
    __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    const uint64_t eight = 0x0101010101010101u * ((1u << bits) - 1);
    uint64_t low = _pext_u64((uint64_t)_mm_cvtsi128_si64(bytes), eight);
    uint64_t high = _pext_u64((uint64_t)_mm_extract_epi64(bytes, 1), eight);
    memcpy(out, &low, (size_t)bits);
    memcpy(out + bits, &high, (size_t)bits);
}

ALWAYS void avx2_unpack(const uint8_t *in, int bits, UVEC *codes) {
    const uint64_t eight = 0x0101010101010101u * ((1u << bits) - 1);
    uint64_t low = 0, high = 0;
    memcpy(&low, in, (size_t)bits);
    memcpy(&high, in + bits, (size_t)bits);
    codes[0] = (UVEC)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)_pdep_u64(low, eight)));
    codes[1] = (UVEC)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)_pdep_u64(high, eight)));
}

ALWAYS void avx2_halves(UVEC half, uint8_t *out) {
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)half, (__m256i)half), 0xd8);
    _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(packed));
}

#include "codec/code_body.h"

/* The codes of WIDTH indices one by one, with escapes skipped. */
ALWAYS size_t avx2_fill(const uint32_t *indices, int escape, float inverse, uint8_t *codes, size_t at) {
    IVEC wide = avx2_gaps(indices), escapes = avx2_escapes(wide, inverse), rest = wide - escapes * escape;
    int32_t skip[WIDTH], code[WIDTH];
    memcpy(skip, &escapes, sizeof skip);
    memcpy(code, &rest, sizeof code);
    for (int lane = 0; lane < WIDTH; lane++) {
        at += (uint32_t)skip[lane];
        codes[at++] = (uint8_t)code[lane];
    }
    return at;
}

#include "codec/code_bmi2.h"

TARGET static size_t avx2_read_codes(const uint8_t *bytes, size_t n_codes, int bits, uint32_t *positions) {
    return avx2_read_from(bytes, 0, n_codes, bits, 0, positions);
}

TARGET static size_t avx2_check_codes(const uint8_t *bytes, size_t n_codes, int bits, size_t *end) {
    *end = 0;
    return avx2_check_from(bytes, 0, n_codes, bits, end);
}

TARGET static void avx2_copy_around(float *to, const float *from, size_t n) {
    for (; n > 0 && ((uintptr_t)to & 31); n--) *to++ = *from++;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
    for (; i < n; i++) to[i] = from[i];
    _mm_sfence();
}

const tagc_code_kernels tagc_code_avx2 = {
    .name = "avx2",
    .count_codes = avx2_count_codes,
    .write_codes = avx2_write_codes,
    .read_codes = avx2_read_codes,
    .check_codes = avx2_check_codes,
    .accumulate = avx2_accumulate,
    .largest = avx2_largest,
    .mean = avx2_mean,
    .refit = avx2_refit,
    .round = avx2_round,
    .narrow = avx2_narrow,
    .widen_halves = avx2_widen_halves,
    .widen = avx2_widen,
    .subtract = avx2_subtract,
    .transform = avx2_transform,
    .add = avx2_add,
    .copy_around = avx2_copy_around,
};
#endif
