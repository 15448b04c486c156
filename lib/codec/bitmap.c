/* Sets of positions as bits, word by word. */
#include "codec/bitmap.h"
#include "core/cpu.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

size_t tagc_bitmap_bytes(size_t n) {
    return n / 64 * 8 + (n % 64 ? 8 : 0);
}

void tagc_bitmap_make(uint8_t *bits, size_t n, const uint32_t *indices, size_t n_indices) {
    memset(bits, 0, tagc_bitmap_bytes(n));
    for (size_t k = 0; k < n_indices; k++) bits[indices[k] / 8] |= (uint8_t)(1u << (indices[k] % 8));
}

void tagc_bitmap_or(uint8_t *into, const uint8_t *from, size_t n) {
    size_t n_bytes = tagc_bitmap_bytes(n);
    for (size_t b = 0; b < n_bytes; b++) into[b] |= from[b];
}

size_t tagc_bitmap_count_reference(const uint8_t *bits, size_t n) {
    size_t n_bytes = tagc_bitmap_bytes(n), count = 0;
    for (size_t b = 0; b < n_bytes; b += 8) count += (size_t)__builtin_popcountll(tagc_load_word(bits + b));
    return count;
}

size_t tagc_bitmap_indices_reference(const uint8_t *bits, size_t n, uint32_t *indices) {
    size_t n_bytes = tagc_bitmap_bytes(n), count = 0;
    for (size_t b = 0; b < n_bytes; b += 8)
        for (uint64_t word = tagc_load_word(bits + b); word; word &= word - 1)
            indices[count++] = (uint32_t)(8 * b + (size_t)__builtin_ctzll(word));
    return count;
}

#if defined(__x86_64__)
__attribute__((target("popcnt"))) static size_t count_popcnt(const uint8_t *bits, size_t n_bytes) {
    size_t count = 0;
    for (size_t b = 0; b < n_bytes; b += 8) count += (size_t)_mm_popcnt_u64(tagc_load_word(bits + b));
    return count;
}

/* Compresses a word's set bits to bytes at once and widens them 16 at a time. A loop over bits would mispredict its end at
 * every sparse word. */
__attribute__((target("avx512f,avx512bw,avx512vbmi2,popcnt"))) static size_t
indices_avx512(const uint8_t *bits, size_t n_bytes, uint32_t *indices) {
    uint8_t ramp[64];
    for (int i = 0; i < 64; i++) ramp[i] = (uint8_t)i;
    const __m512i all = _mm512_loadu_si512(ramp);
    size_t count = 0;
    for (size_t b = 0; b < n_bytes; b += 8) {
        uint64_t word = tagc_load_word(bits + b);
        __m512i base = _mm512_set1_epi32((int)(uint32_t)(8 * b)),
                inside = _mm512_maskz_compress_epi8(word, all);
        int n_set = (int)_mm_popcnt_u64(word);
        while (n_set > 16) {
            __m512i wide = _mm512_cvtepu8_epi32(_mm512_castsi512_si128(inside));
            _mm512_storeu_si512(indices + count, _mm512_add_epi32(base, wide));
            inside = _mm512_alignr_epi64(inside, inside, 2);
            count += 16;
            n_set -= 16;
        }
        __m512i wide = _mm512_cvtepu8_epi32(_mm512_castsi512_si128(inside));
        _mm512_mask_storeu_epi32(indices + count, (__mmask16)((1u << n_set) - 1),
                                 _mm512_add_epi32(base, wide));
        count += (size_t)n_set;
    }
    return count;
}
#endif

size_t tagc_bitmap_count(const uint8_t *bits, size_t n) {
#if defined(__x86_64__)
    if (tagc_cpu_has(TAGC_CPU_AVX2)) return count_popcnt(bits, tagc_bitmap_bytes(n));
#endif
    return tagc_bitmap_count_reference(bits, n);
}

size_t tagc_bitmap_indices(const uint8_t *bits, size_t n, uint32_t *indices) {
#if defined(__x86_64__)
    if (tagc_cpu_has_vbmi2()) return indices_avx512(bits, tagc_bitmap_bytes(n), indices);
#endif
    return tagc_bitmap_indices_reference(bits, n, indices);
}

int tagc_bitmap_valid(const uint8_t *bits, size_t n) {
    return n % 64 == 0 || tagc_load_word(bits + n / 64 * 8) >> (n % 64) == 0;
}

void tagc_bitmap_add_bytes(uint8_t *into, const uint8_t *from, size_t n) {
    size_t n_bytes = tagc_bitmap_bytes(n);
    for (size_t b = 0; b < n_bytes; b++) into[b] = (uint8_t)(into[b] + from[b]);
    if (n % 64) { /* a carry out of the last element is no position */
        uint8_t *last = into + n_bytes - 8;
        tagc_store_word(last, tagc_load_word(last) & (((uint64_t)1 << (n % 64)) - 1));
    }
}
