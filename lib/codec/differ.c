/* Compares 64 elements at a time, see differ.h. */
#include "codec/differ.h"
#include "codec/bitmap.h"
#include "core/cpu.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include "codec/neon_masks.h"
#endif

/* Most words of weights are equal after a step, so that they are compared as a whole first. */
static inline __attribute__((always_inline)) uint64_t scalar_word(size_t width, const uint8_t *a,
                                                                  const uint8_t *b) {
    uint64_t any = 0, word = 0;
    for (size_t i = 0; i < 64 * width; i += 8) any |= tagc_load_word(a + i) ^ tagc_load_word(b + i);
    if (!any) return 0;
    for (size_t i = 0; i < 64; i++) word |= (uint64_t)(memcmp(a + i * width, b + i * width, width) != 0) << i;
    return word;
}

static void scalar_differ(size_t width, const uint8_t *a, const uint8_t *b, size_t n_words, uint8_t *bits) {
    for (size_t w = 0; w < n_words; w++, a += 64 * width, b += 64 * width) {
        tagc_store_word(bits + 8 * w, TAGC_BY_WIDTH(width, scalar_word, a, b));
    }
}

static const tagc_differ_kernels scalar_kernels = {"scalar", scalar_differ};

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f,avx512bw")))

AVX2 static inline __m256i avx2_same8(const uint8_t *a, const uint8_t *b) {
    return _mm256_cmpeq_epi8(_mm256_loadu_si256((const void *)a), _mm256_loadu_si256((const void *)b));
}

AVX2 static inline __m256i avx2_same16(const uint8_t *a, const uint8_t *b) {
    return _mm256_cmpeq_epi16(_mm256_loadu_si256((const void *)a), _mm256_loadu_si256((const void *)b));
}

/* Of 16 elements of 4 bytes as 16 of 2, quarters out of order as packs leaves them. */
AVX2 static inline __m256i avx2_same32(const uint8_t *a, const uint8_t *b) {
    __m256i low =
        _mm256_cmpeq_epi32(_mm256_loadu_si256((const void *)a), _mm256_loadu_si256((const void *)b));
    __m256i high = _mm256_cmpeq_epi32(_mm256_loadu_si256((const void *)(a + 32)),
                                      _mm256_loadu_si256((const void *)(b + 32)));
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
}

/* Bit i: element i of 32 is the same. */
AVX2 static inline uint32_t avx2_half(size_t width, const uint8_t *a, const uint8_t *b) {
    if (width == 1) return (uint32_t)_mm256_movemask_epi8(avx2_same8(a, b));
    __m256i low = width == 2 ? avx2_same16(a, b) : avx2_same32(a, b);
    __m256i high = width == 2 ? avx2_same16(a + 32, b + 32) : avx2_same32(a + 64, b + 64);
    __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
    return (uint32_t)_mm256_movemask_epi8(bytes);
}

AVX2 static void avx2_differ(size_t width, const uint8_t *a, const uint8_t *b, size_t n_words,
                             uint8_t *bits) {
    for (size_t w = 0; w < n_words; w++, a += 64 * width, b += 64 * width) {
        uint32_t low = avx2_half(width, a, b), high = avx2_half(width, a + 32 * width, b + 32 * width);
        tagc_store_word(bits + 8 * w, ~(low | (uint64_t)high << 32));
    }
}

AVX512 static inline uint64_t avx512_word(size_t width, const uint8_t *a, const uint8_t *b) {
    uint64_t word = 0;
    for (size_t i = 0; i < width; i++, a += 64, b += 64) {
        __m512i left = _mm512_loadu_si512(a), right = _mm512_loadu_si512(b);
        if (width == 1)
            word = _mm512_cmpneq_epi8_mask(left, right);
        else if (width == 2)
            word |= (uint64_t)_mm512_cmpneq_epi16_mask(left, right) << 32 * i;
        else
            word |= (uint64_t)_mm512_cmpneq_epi32_mask(left, right) << 16 * i;
    }
    return word;
}

AVX512 static void avx512_differ(size_t width, const uint8_t *a, const uint8_t *b, size_t n_words,
                                 uint8_t *bits) {
    for (size_t w = 0; w < n_words; w++, a += 64 * width, b += 64 * width)
        tagc_store_word(bits + 8 * w, avx512_word(width, a, b));
}

static const tagc_differ_kernels avx2_kernels = {"avx2", avx2_differ};
static const tagc_differ_kernels avx512_kernels = {"avx512", avx512_differ};

#elif defined(__aarch64__)
/* Bytes that are all ones where 16 elements differ. */
NEON uint8x16_t neon_differ16(size_t width, const uint8_t *a, const uint8_t *b) {
    if (width == 1) return vmvnq_u8(vceqq_u8(vld1q_u8(a), vld1q_u8(b)));
    uint32x4_t same[4];
    for (size_t i = 0; i < width; i++) {
        uint8x16_t left = vld1q_u8(a + 16 * i), right = vld1q_u8(b + 16 * i);
        same[i] =
            width == 2
                ? vreinterpretq_u32_u16(vceqq_u16(vreinterpretq_u16_u8(left), vreinterpretq_u16_u8(right)))
                : vceqq_u32(vreinterpretq_u32_u8(left), vreinterpretq_u32_u8(right));
    }
    return vmvnq_u8(width == 2 ? neon_narrow16(vreinterpretq_u16_u32(same[0]), vreinterpretq_u16_u32(same[1]))
                               : neon_narrow32(same));
}

NEON void neon_differ_as(size_t width, const uint8_t *a, const uint8_t *b, size_t n_words, uint8_t *bits) {
    for (size_t w = 0; w < n_words; w++, a += 64 * width, b += 64 * width) {
        uint8x16_t bytes[4];
        for (size_t i = 0; i < 4; i++)
            bytes[i] = neon_differ16(width, a + 16 * width * i, b + 16 * width * i);
        tagc_store_word(bits + 8 * w, neon_word_of(bytes));
    }
}

static void neon_differ(size_t width, const uint8_t *a, const uint8_t *b, size_t n_words, uint8_t *bits) {
    TAGC_BY_WIDTH(width, neon_differ_as, a, b, n_words, bits);
}

static const tagc_differ_kernels neon_kernels = {"neon", neon_differ};
#endif

const tagc_differ_kernels *const *tagc_differ_kernels_all(void) {
    static const tagc_differ_kernels *const all[] = {
#if defined(__x86_64__)
        &avx512_kernels,
        &avx2_kernels,
#elif defined(__aarch64__)
        &neon_kernels,
#endif
        &scalar_kernels,
        NULL
    };
    size_t n_lacking = 0;
#if defined(__x86_64__)
    n_lacking = tagc_cpu_has(TAGC_CPU_AVX512) ? 0 : tagc_cpu_has(TAGC_CPU_AVX2) ? 1 : 2;
#elif defined(__aarch64__)
    n_lacking = tagc_cpu_has(TAGC_CPU_NEON) ? 0 : 1;
#endif
    return all + n_lacking;
}

void tagc_differ(const tagc_differ_kernels *kernels, size_t width, const uint8_t *a, const uint8_t *b,
                 size_t n, uint8_t *bits) {
    size_t n_words = n / 64, n_whole = n_words * 64 * width, n_left = n % 64 * width;
    uint8_t last_a[64 * 4] = {0}, last_b[64 * 4] = {0};
    kernels->differ(width, a, b, n_words, bits);
    if (n_left == 0) return;
    memcpy(last_a, a + n_whole, n_left);
    memcpy(last_b, b + n_whole, n_left);
    kernels->differ(width, last_a, last_b, 1, bits + 8 * n_words);
}
