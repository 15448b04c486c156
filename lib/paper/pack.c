/* Packs and unpacks values in the order of the union, in one pass over memory each. */
#include "paper/pack.h"
#include "codec/select.h"
#include "core/cpu.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

static float pack_one(float *residual, uint32_t position) {
    if (!residual) return -0.0f;
    float value = residual[position];
    residual[position] = TAGC_ZERO_RESIDUAL;
    return value;
}

void tagc_pack_reference(const uint32_t *union_indices, size_t n_union, const uint32_t *indices,
                         const float *values, size_t n_sent, float *residual, float *packed) {
    for (size_t j = 0, k = 0; j < n_union; j++)
        packed[j] =
            k < n_sent && indices[k] == union_indices[j] ? values[k++] : pack_one(residual, union_indices[j]);
}

#if defined(__x86_64__)
/* Finds which of 16 union positions are among the next 16 selected ones: compares all pairs by rotating one side, then
 * expands the values into the matching lanes. A merge would mispredict at every other item. */
__attribute__((target("avx512f,popcnt"))) static void pack_avx512(const uint32_t *union_indices,
                                                                  size_t n_union, const uint32_t *indices,
                                                                  const float *values, size_t n_sent,
                                                                  float *residual, float *packed) {
    const __m512 zero = _mm512_set1_ps(-0.0f);
    size_t j = 0, k = 0;
    for (; j + 16 <= n_union && k + 16 <= n_sent; j += 16) {
        __m512i all = _mm512_loadu_si512(union_indices + j), some = _mm512_loadu_si512(indices + k);
        __mmask16 sent = 0;
        for (int turn = 0; turn < 16; turn++) {
            sent |= _mm512_cmpeq_epi32_mask(all, some);
            some = _mm512_alignr_epi32(some, some, 1);
        }
        __m512 other = zero;
        if (residual) {
            other = _mm512_i32gather_ps(all, residual, 4);
            _mm512_mask_i32scatter_ps(residual, (__mmask16)~sent, all, zero, 4);
        }
        _mm512_storeu_ps(packed + j, _mm512_mask_expand_ps(other, sent, _mm512_loadu_ps(values + k)));
        k += (size_t)_mm_popcnt_u32(sent);
    }
    tagc_pack_reference(union_indices + j, n_union - j, indices + k, values + k, n_sent - k, residual,
                        packed + j);
}
#endif

void tagc_pack(const uint32_t *union_indices, size_t n_union, const uint32_t *indices, const float *values,
               size_t n_sent, float *residual, float *packed) {
#if defined(__x86_64__)
    /* Gathers take signed positions. */
    if (tagc_cpu_has(TAGC_CPU_AVX512) && n_union && union_indices[n_union - 1] <= INT32_MAX) {
        pack_avx512(union_indices, n_union, indices, values, n_sent, residual, packed);
        return;
    }
#endif
    tagc_pack_reference(union_indices, n_union, indices, values, n_sent, residual, packed);
}

void tagc_unpack(const uint32_t *union_indices, size_t n_union, const float *packed, float scale, float *out,
                 size_t n) {
    enum { BLOCK = 4096 }; /* 16 KiB of output: zeroed and filled while in the first-level cache */
    size_t j = 0;
    for (size_t begin = 0; begin < n; begin += BLOCK) {
        size_t end = n - begin < BLOCK ? n : begin + BLOCK;
        memset(out + begin, 0, (end - begin) * sizeof(float));
        for (; j < n_union && union_indices[j] < end; j++)
            out[union_indices[j]] = scale == 1 ? packed[j] : packed[j] * scale;
    }
}
