/* The loops of code_body.h with AVX2 and BMI2. */
#include "codec/code_kernels.h"
#include "tagc/tagc.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

#define TARGET __attribute__((target("avx2,bmi2,popcnt")))
#define WIDTH 8
#define NAME(x) avx2_##x
#include "codec/code_vectors.h"

INLINE UVEC avx2_max(UVEC a, UVEC b) {
    return (UVEC)_mm256_max_epu32((__m256i)a, (__m256i)b);
}

INLINE VEC avx2_clamp(VEC x, float most) {
    __m256 above = _mm256_max_ps((__m256)x, _mm256_set1_ps(-most)); /* the second one where x is NaN */
    return (VEC)_mm256_min_ps(above, _mm256_set1_ps(most));
}

INLINE void avx2_pack(const UVEC *codes, int bits, uint8_t *out) {
    __m256i halves = _mm256_packus_epi32((__m256i)codes[0], (__m256i)codes[1]);
    halves = _mm256_permute4x64_epi64(halves, 0xd8);
    __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    if (bits == 8) {
        _mm_storeu_si128((__m128i *)(void *)out, bytes);
        return;
    }
    const uint64_t eight = 0x0101010101010101u * ((1u << bits) - 1);
    uint64_t low = _pext_u64((uint64_t)_mm_cvtsi128_si64(bytes), eight);
    uint64_t high = _pext_u64((uint64_t)_mm_extract_epi64(bytes, 1), eight);
    memcpy(out, &low, (size_t)bits);
    memcpy(out + bits, &high, (size_t)bits);
}

INLINE void avx2_unpack(const uint8_t *in, int bits, UVEC *codes) {
    if (bits == 8) {
        codes[0] = (UVEC)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)in));
        codes[1] = (UVEC)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(in + 8)));
        return;
    }
    const uint64_t eight = 0x0101010101010101u * ((1u << bits) - 1);
    uint64_t low = 0, high = 0;
    memcpy(&low, in, (size_t)bits);
    memcpy(&high, in + bits, (size_t)bits);
    codes[0] = (UVEC)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)_pdep_u64(low, eight)));
    codes[1] = (UVEC)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)_pdep_u64(high, eight)));
}

INLINE void avx2_spread(const uint8_t *random, UVEC *thresholds) {
    /* byte j of four comes to the top of lane j, and the three others below it */
    const __m256i first = _mm256_setr_epi8(1, 2, 3, 0, 2, 3, 0, 1, 3, 0, 1, 2, 0, 1, 2, 3, 5, 6, 7, 4, 6, 7,
                                           4, 5, 7, 4, 5, 6, 4, 5, 6, 7);
    __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)random));
    thresholds[0] = (UVEC)_mm256_shuffle_epi8(bytes, first);
    thresholds[1] = (UVEC)_mm256_shuffle_epi8(bytes, _mm256_add_epi8(first, _mm256_set1_epi8(8)));
}

INLINE void avx2_halves(UVEC half, uint8_t *out) {
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)half, (__m256i)half), 0xd8);
    _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(packed));
}

#include "codec/code_body.h"

#define FILL avx2_fill_singly
#include "codec/code_bmi2.h"

#define WRITE_CODES avx2_write_codes
#define STREAM(p, v) _mm256_stream_ps(p, (__m256)(v))
#define TABLE tagc_code_avx2
#define LEVEL "avx2"
#include "codec/code_table.h"
#endif
