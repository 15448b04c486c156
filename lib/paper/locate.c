/* The hashes of the sketch, 16 (AVX-512) or 8 (AVX2) elements at a time, or one. All give the same cells. */
#include "paper/locate.h"
#include "core/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MULTIPLIER_1 0x9e3779b1u /* odd, close to 2^32 / golden ratio */
#define MULTIPLIER_2 0xb5297a4du /* odd, as many ones as zeros, no short period */

/* 64 well mixed bits of a counter. */
static uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

void tagc_locator_init(tagc_locator *locator, const tagc_sketch *sketch) {
    locator->n_rows = (uint32_t)sketch->n_rows;
    locator->column_mask = (uint32_t)sketch->width - 1;
    locator->width_log2 = (uint32_t)__builtin_ctzll(sketch->width);
    locator->table_cells = (uint32_t)(sketch->n_rows * sketch->width);
    uint64_t state = mix64(sketch->seed + 0x9e3779b97f4a7c15u);
    for (int t = 0; t < 3; t++) {
        state = mix64(state + 0x9e3779b97f4a7c15u);
        locator->before[t] = (uint32_t)state;
        locator->between[t] = (uint32_t)(state >> 32);
    }
    locator->sign = (uint32_t)mix64(state + 0x9e3779b97f4a7c15u);
}

/* 32 bits of a row in one table: the top ones choose the row of cells, the low ones the XOR of the column.
 * The two keys make each table its own permutation of 2^32. */
static uint32_t hash_row(uint32_t row, uint32_t before, uint32_t between) {
    uint32_t y = row ^ before;
    y = (y ^ (y >> 16)) * MULTIPLIER_1;
    y = (y ^ (y >> 15)) + between;
    y *= MULTIPLIER_2;
    return y ^ (y >> 16);
}

static uint32_t hash_sign(uint32_t index, uint32_t key) {
    uint32_t y = (index ^ key) * MULTIPLIER_1;
    return (y ^ (y >> 15)) * MULTIPLIER_2;
}

static void locate_from(const tagc_locator *locator, const uint32_t *indices, size_t begin, size_t n,
                        tagc_located *out) {
    for (size_t k = begin; k < n; k++) {
        uint32_t row = indices[k] >> locator->width_log2, column = indices[k] & locator->column_mask;
        for (uint32_t t = 0; t < 3; t++) {
            uint32_t y = hash_row(row, locator->before[t], locator->between[t]);
            uint32_t to = (uint32_t)((uint64_t)y * locator->n_rows >> 32);
            out->cell[t][k] = t * locator->table_cells + (to << locator->width_log2) +
                              ((column ^ y) & locator->column_mask);
        }
        out->signs[k] = hash_sign(indices[k], locator->sign);
    }
}

void tagc_locate_reference(const tagc_locator *locator, const uint32_t *indices, size_t n,
                           tagc_located *out) {
    locate_from(locator, indices, 0, n, out);
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static void
locate_avx512(const tagc_locator *locator, const uint32_t *indices, size_t n, tagc_located *out) {
    const __m512i multiplier_1 = _mm512_set1_epi32((int)MULTIPLIER_1);
    const __m512i multiplier_2 = _mm512_set1_epi32((int)MULTIPLIER_2);
    const __m512i n_rows = _mm512_set1_epi64(locator->n_rows);
    const __m512i mask = _mm512_set1_epi32((int)locator->column_mask);
    const __m128i shift = _mm_cvtsi32_si128((int)locator->width_log2);
    for (size_t k = 0; k < n; k += 16) {
        __mmask16 live = n - k >= 16 ? 0xffff : (__mmask16)((1u << (n - k)) - 1);
        __m512i index = _mm512_maskz_loadu_epi32(live, indices + k);
        __m512i row = _mm512_srl_epi32(index, shift);
        for (int t = 0; t < 3; t++) {
            __m512i y = _mm512_xor_si512(row, _mm512_set1_epi32((int)locator->before[t]));
            y = _mm512_mullo_epi32(_mm512_xor_si512(y, _mm512_srli_epi32(y, 16)), multiplier_1);
            y = _mm512_add_epi32(_mm512_xor_si512(y, _mm512_srli_epi32(y, 15)),
                                 _mm512_set1_epi32((int)locator->between[t]));
            y = _mm512_mullo_epi32(y, multiplier_2);
            y = _mm512_xor_si512(y, _mm512_srli_epi32(y, 16));
            __m512i even = _mm512_srli_epi64(_mm512_mul_epu32(y, n_rows), 32);
            __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(y, 32), n_rows);
            __m512i to = _mm512_sll_epi32(_mm512_mask_mov_epi32(even, 0xaaaa, odd), shift);
            __m512i column = _mm512_and_si512(_mm512_xor_si512(index, y), mask);
            __m512i base = _mm512_set1_epi32((int)((uint32_t)t * locator->table_cells));
            __m512i cell = _mm512_add_epi32(_mm512_add_epi32(base, to), column);
            _mm512_mask_storeu_epi32(out->cell[t] + k, live, cell);
        }
        __m512i z = _mm512_xor_si512(index, _mm512_set1_epi32((int)locator->sign));
        z = _mm512_mullo_epi32(z, multiplier_1);
        z = _mm512_mullo_epi32(_mm512_xor_si512(z, _mm512_srli_epi32(z, 15)), multiplier_2);
        _mm512_mask_storeu_epi32(out->signs + k, live, z);
    }
}

__attribute__((target("avx2"))) static void locate_avx2(const tagc_locator *locator, const uint32_t *indices,
                                                        size_t n, tagc_located *out) {
    const __m256i multiplier_1 = _mm256_set1_epi32((int)MULTIPLIER_1);
    const __m256i multiplier_2 = _mm256_set1_epi32((int)MULTIPLIER_2);
    const __m256i n_rows = _mm256_set1_epi64x(locator->n_rows);
    const __m256i mask = _mm256_set1_epi32((int)locator->column_mask);
    const __m128i shift = _mm_cvtsi32_si128((int)locator->width_log2);
    size_t k = 0;
    for (; k + 8 <= n; k += 8) {
        __m256i index = _mm256_loadu_si256((const __m256i *)(indices + k));
        __m256i row = _mm256_srl_epi32(index, shift);
        for (int t = 0; t < 3; t++) {
            __m256i y = _mm256_xor_si256(row, _mm256_set1_epi32((int)locator->before[t]));
            y = _mm256_mullo_epi32(_mm256_xor_si256(y, _mm256_srli_epi32(y, 16)), multiplier_1);
            y = _mm256_add_epi32(_mm256_xor_si256(y, _mm256_srli_epi32(y, 15)),
                                 _mm256_set1_epi32((int)locator->between[t]));
            y = _mm256_mullo_epi32(y, multiplier_2);
            y = _mm256_xor_si256(y, _mm256_srli_epi32(y, 16));
            __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(y, n_rows), 32);
            __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(y, 32), n_rows);
            __m256i to = _mm256_sll_epi32(_mm256_blend_epi32(even, odd, 0xaa), shift);
            __m256i column = _mm256_and_si256(_mm256_xor_si256(index, y), mask);
            __m256i base = _mm256_set1_epi32((int)((uint32_t)t * locator->table_cells));
            __m256i cell = _mm256_add_epi32(_mm256_add_epi32(base, to), column);
            _mm256_storeu_si256((__m256i *)(out->cell[t] + k), cell);
        }
        __m256i z = _mm256_xor_si256(index, _mm256_set1_epi32((int)locator->sign));
        z = _mm256_mullo_epi32(z, multiplier_1);
        z = _mm256_mullo_epi32(_mm256_xor_si256(z, _mm256_srli_epi32(z, 15)), multiplier_2);
        _mm256_storeu_si256((__m256i *)(out->signs + k), z);
    }
    locate_from(locator, indices, k, n, out);
}
#endif

int tagc_locate_avx2(const tagc_locator *locator, const uint32_t *indices, size_t n, tagc_located *out) {
#if defined(__x86_64__)
    if (tagc_cpu_has(TAGC_CPU_AVX2)) {
        locate_avx2(locator, indices, n, out);
        return 1;
    }
#endif
    (void)locator, (void)indices, (void)n, (void)out;
    return 0;
}

void tagc_locate(const tagc_locator *locator, const uint32_t *indices, size_t n, tagc_located *out) {
#if defined(__x86_64__)
    if (tagc_cpu_has(TAGC_CPU_AVX512)) {
        locate_avx512(locator, indices, n, out);
        return;
    }
#endif
    if (!tagc_locate_avx2(locator, indices, n, out)) tagc_locate_reference(locator, indices, n, out);
}
