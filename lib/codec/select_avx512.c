/* Selection, 16 elements at a time. Candidates are compressed in the register and stored whole; the next store overwrites
 * the surplus. Compressing straight into memory is slow microcode on some processors. */
#include "codec/residual.h"
#include "codec/select_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("avx512f,avx512bw,popcnt")))
#define INLINE TARGET static inline __attribute__((always_inline))
#define LANES 16
#define ROOM 1024        /* elements of a residual on their way around the cache */
#define AHEAD_BYTES 2048 /* of the gradient, on their way */
#define LOST_ROOM 80     /* elements put back at a time */
#define ALL ((__mmask16)0xffff)

static inline __mmask16 first_lanes(size_t n) {
    return (__mmask16)((1u << n) - 1);
}

TARGET static inline __m512i abs_bits(__m512 x) {
    return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
}

typedef struct stream_state {
    __m512i t_lo, t_clear_less_1, max;
    uint32_t *indices;
    float *values;
} stream_state;

/* Lanes outside `lanes` hold -0.0: neither candidates nor a maximum. Returns the new residual. */
TARGET static inline __m512 stream_vector(stream_state *s, __m512 acc, __m512i index) {
    __m512i bits = abs_bits(acc);
    s->max = _mm512_max_epu32(s->max, bits);
    __mmask16 chosen = _mm512_cmpge_epu32_mask(bits, s->t_lo);
    /* 0 - 1 wraps to the top, so that one comparison finds the large and the zeros */
    __mmask16 clear =
        _mm512_cmpge_epu32_mask(_mm512_sub_epi32(bits, _mm512_set1_epi32(1)), s->t_clear_less_1);
    _mm512_storeu_si512(s->indices, _mm512_maskz_compress_epi32(chosen, index));
    _mm512_storeu_ps(s->values, _mm512_maskz_compress_ps(chosen, acc));
    int n_chosen = _mm_popcnt_u32(chosen);
    s->indices += n_chosen;
    s->values += n_chosen;
    return _mm512_mask_mov_ps(acc, clear, _mm512_set1_ps(TAGC_ZERO_RESIDUAL));
}

TARGET static inline void stream_part(stream_state *s, const float *gradient, const float *residual_in,
                                      float *residual_out, size_t n, __m512i index) {
    __mmask16 lanes = first_lanes(n);
    __m512 g = _mm512_mask_loadu_ps(_mm512_set1_ps(-0.0f), lanes, gradient);
    __m512 r = _mm512_mask_loadu_ps(_mm512_set1_ps(-0.0f), lanes, residual_in);
    _mm512_mask_storeu_ps(residual_out, lanes, stream_vector(s, _mm512_add_ps(g, r), index));
}

TARGET static size_t avx512_stream(const float *gradient, const float *residual_in, float *residual_out,
                                   size_t n, uint32_t first, uint32_t t_lo, uint32_t t_clear, int bypass,
                                   uint32_t *indices, float *values, uint32_t *max_bits) {
    stream_state s = {_mm512_set1_epi32((int)t_lo), _mm512_set1_epi32((int)(t_clear - 1)),
                      _mm512_setzero_si512(), indices, values};
    const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i step = _mm512_set1_epi32(LANES);
    __m512i index = _mm512_add_epi32(_mm512_set1_epi32((int)first), iota);
    size_t i = 0;
    if (bypass) { /* needs whole aligned lines */
        size_t head = (64 - ((uintptr_t)residual_out & 63)) % 64 / sizeof(float);
        if (head > n) head = n;
        stream_part(&s, gradient, residual_in, residual_out, head, index);
        index = _mm512_add_epi32(index, _mm512_set1_epi32((int)head));
        /* through a buffer in the cache: between other stores, streaming ones take half as long again */
        float room[ROOM] __attribute__((aligned(64)));
        for (i = head; i + LANES <= n;) {
            size_t n_here = n - i < ROOM ? (n - i) / LANES * LANES : ROOM;
            for (size_t j = 0; j < n_here; j += LANES, index = _mm512_add_epi32(index, step)) {
                __m512 acc =
                    _mm512_add_ps(_mm512_loadu_ps(gradient + i + j), _mm512_loadu_ps(residual_in + i + j));
                _mm512_store_ps(room + j, stream_vector(&s, acc, index));
            }
            for (size_t j = 0; j < n_here; j += LANES)
                _mm512_stream_ps(residual_out + i + j, _mm512_load_ps(room + j));
            i += n_here;
        }
    } else {
        for (; i + LANES <= n; i += LANES, index = _mm512_add_epi32(index, step)) {
            __m512 acc = _mm512_add_ps(_mm512_loadu_ps(gradient + i), _mm512_loadu_ps(residual_in + i));
            _mm512_storeu_ps(residual_out + i, stream_vector(&s, acc, index));
        }
    }
    stream_part(&s, gradient + i, residual_in + i, residual_out + i, n - i, index);
    uint32_t max = _mm512_reduce_max_epu32(s.max);
    if (max > *max_bits) *max_bits = max;
    return (size_t)(s.indices - indices);
}

/* ---- an int8 residual ---- */

typedef struct block_state {
    __m512i t_lo, iota;
    uint32_t *indices;
    float *values;
} block_state;

/* acc of 16 elements. The product is exact, so that one rounding is all that a multiplication and an addition would make, too. */
TARGET static inline __m512 sum_vector(const void *gradient, size_t at, int is_bf16, const uint8_t *codes,
                                       __m512 step) {
    __m512 code = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(codes + at))));
    __m512 g;
    if (is_bf16)
        g = _mm512_castsi512_ps(_mm512_slli_epi32(
            _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)((const uint16_t *)gradient + at))),
            16));
    else
        g = _mm512_loadu_ps((const float *)gradient + at);
    return _mm512_fmadd_ps(code, step, g);
}

/* Collects the candidates of 16 elements; returns the others, zeros in place of candidates. */
TARGET static inline __m512 take_candidates(block_state *s, __m512 acc, uint32_t at, __m512i *top) {
    __m512i bits = abs_bits(acc);
    __mmask16 rest = _mm512_cmplt_epu32_mask(bits, s->t_lo), chosen = (__mmask16)~rest;
    __m512i index = _mm512_add_epi32(_mm512_set1_epi32((int)at), s->iota);
    *top = _mm512_mask_max_epu32(*top, rest, *top, bits);
    _mm512_storeu_si512(s->indices, _mm512_maskz_compress_epi32(chosen, index));
    _mm512_storeu_ps(s->values, _mm512_maskz_compress_ps(chosen, acc));
    int n_chosen = _mm_popcnt_u32(chosen);
    s->indices += n_chosen;
    s->values += n_chosen;
    return _mm512_maskz_mov_ps(rest, acc);
}

/* Random bytes of 64 elements. */
TARGET static inline __m512i random_bytes(__m512i x) {
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x21f0aaad));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x735a2d97));
    return _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
}

/* Codes of 16 elements, not yet bytes. places: for each of them, the bytes of `random` that are its threshold / 256. */
TARGET static inline __m512i round_vector(__m512 acc, __m512 scale, const uint8_t *random, __m512i places) {
    __m512i bytes = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)random));
    __m512i fixed = _mm512_cvttps_epi32(_mm512_mul_ps(acc, scale));
    return _mm512_srai_epi32(_mm512_add_epi32(fixed, _mm512_shuffle_epi8(bytes, places)), 24);
}

/* The random bytes of the block at `at`. */
TARGET static inline void write_random(uint32_t seed, size_t at, __m512i iota, uint8_t *random) {
    __m512i group = _mm512_add_epi32(_mm512_set1_epi32((int)(seed + (uint32_t)(at / 4))), iota);
    _mm512_store_si512(random, random_bytes(group));
    _mm512_store_si512(random + 64, random_bytes(_mm512_add_epi32(group, _mm512_set1_epi32(16))));
}

/* Writes the codes of a whole block. */
TARGET static inline void write_codes(const __m512 *acc, __m512 scale, const uint8_t *random,
                                      uint8_t *codes) {
    /* byte j of four to byte 2 of a lane, and the two that threshold / 256 has below it; a negative place is a zero */
    const __m512i places = _mm512_setr_epi32(
        (int)0xff000302, (int)0xff010003, (int)0xff020100, (int)0xff030201, (int)0xff040706, (int)0xff050407,
        (int)0xff060504, (int)0xff070605, (int)0xff080b0a, (int)0xff09080b, (int)0xff0a0908, (int)0xff0b0a09,
        (int)0xff0c0f0e, (int)0xff0d0c0f, (int)0xff0e0d0c, (int)0xff0f0e0d);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int half = 0; half < 2; half++, acc += 4, codes += 64, random += 64) {
        __m512i low = _mm512_packs_epi32(round_vector(acc[0], scale, random, places),
                                         round_vector(acc[1], scale, random + 16, places));
        __m512i high = _mm512_packs_epi32(round_vector(acc[2], scale, random + 32, places),
                                          round_vector(acc[3], scale, random + 48, places));
        _mm512_storeu_si512(codes, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high)));
    }
}

/* A block under way: its sums, with zeros in place of candidates, their largest magnitude, and its random bytes. */
typedef struct block {
    __m512 acc[TAGC_RESIDUAL_BLOCK / LANES];
    uint8_t random[TAGC_RESIDUAL_BLOCK] __attribute__((aligned(64)));
    uint32_t largest;
} block;

INLINE void take_block(block_state *s, const void *gradient, int is_bf16, const uint8_t *exponents,
                       const uint8_t *codes, size_t at, uint32_t seed, block *to) {
    __m512 step = _mm512_castsi512_ps(
        _mm512_set1_epi32((int)(0x80000000u | (uint32_t)exponents[at / TAGC_RESIDUAL_BLOCK] << 23)));
    __m512i top = _mm512_setzero_si512();
    write_random(seed, at, s->iota, to->random);
    for (size_t v = 0; v < TAGC_RESIDUAL_BLOCK / LANES; v++) {
        const size_t i = at + v * LANES;
        _mm_prefetch((const char *)gradient + i * (is_bf16 ? 2 : 4) + AHEAD_BYTES, _MM_HINT_T0);
        to->acc[v] = take_candidates(s, sum_vector(gradient, i, is_bf16, codes, step), (uint32_t)i, &top);
    }
    to->largest = _mm512_reduce_max_epu32(top);
}

INLINE void write_block(const block *from, size_t at, uint32_t seed, uint8_t *exponents, uint8_t *codes) {
    exponents += at / TAGC_RESIDUAL_BLOCK;
    if (from->largest >= TAGC_RESIDUAL_PLAIN) {
        float room[TAGC_RESIDUAL_BLOCK];
        memcpy(room, from->acc, sizeof room);
        tagc_residual_write_int8(room, at, seed, exponents, codes);
        return;
    }
    uint32_t exponent = tagc_residual_exponent(TAGC_FORMAT_INT8, from->largest);
    *exponents = (uint8_t)exponent;
    __m512i scale = _mm512_set1_epi32((int)tagc_residual_scale(8, exponent));
    write_codes(from->acc, _mm512_castsi512_ps(scale), from->random, codes + at);
}

INLINE size_t stream_int8(const void *gradient, int is_bf16, const uint8_t *exponents_in,
                          const uint8_t *codes_in, uint8_t *exponents_out, uint8_t *codes_out, size_t n,
                          uint32_t first, uint32_t t_lo, uint32_t seed, uint32_t *indices, float *values,
                          uint32_t *max_bits) {
    const __m512i iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    block_state s = {_mm512_set1_epi32((int)t_lo), iota, indices, values};
    /* A block is written after the next one's sums: else it would wait for its largest magnitude and its random bytes. */
    block room[2];
    uint32_t max = *max_bits;
    const size_t end = first + n;
    if (n > 0) take_block(&s, gradient, is_bf16, exponents_in, codes_in, first, seed, &room[0]);
    for (size_t at = first, odd = 0; at < end; at += TAGC_RESIDUAL_BLOCK, odd = !odd) {
        const size_t next = at + TAGC_RESIDUAL_BLOCK;
        if (next < end) take_block(&s, gradient, is_bf16, exponents_in, codes_in, next, seed, &room[!odd]);
        if (room[odd].largest > max) max = room[odd].largest;
        write_block(&room[odd], at, seed, exponents_out, codes_out);
    }
    size_t n_candidates = (size_t)(s.indices - indices);
    __m512i top = _mm512_setzero_si512();
    for (size_t i = 0; i < n_candidates; i += LANES) {
        __mmask16 lanes = n_candidates - i < LANES ? first_lanes(n_candidates - i) : ALL;
        top = _mm512_max_epu32(top, abs_bits(_mm512_maskz_loadu_ps(lanes, values + i)));
    }
    uint32_t largest = _mm512_reduce_max_epu32(top);
    *max_bits = largest > max ? largest : max;
    return n_candidates;
}

TARGET static size_t avx512_stream_int8(const void *gradient, int is_bf16, const uint8_t *exponents_in,
                                        const uint8_t *codes_in, uint8_t *exponents_out, uint8_t *codes_out,
                                        size_t n, uint32_t first, uint32_t t_lo, uint32_t seed,
                                        uint32_t *indices, float *values, uint32_t *max_bits) {
    return is_bf16 ? stream_int8(gradient, 1, exponents_in, codes_in, exponents_out, codes_out, n, first,
                                 t_lo, seed, indices, values, max_bits)
                   : stream_int8(gradient, 0, exponents_in, codes_in, exponents_out, codes_out, n, first,
                                 t_lo, seed, indices, values, max_bits);
}

static void avx512_fence(void) {
    _mm_sfence();
}

TARGET static size_t avx512_band(const float *values, size_t n, uint32_t t_hi, float *band) {
    const __m512i limit = _mm512_set1_epi32((int)t_hi);
    size_t n_band = 0;
    for (size_t i = 0; i < n; i += LANES) {
        __mmask16 lanes = n - i < LANES ? first_lanes(n - i) : ALL;
        __m512 v = _mm512_maskz_loadu_ps(lanes, values + i);
        __mmask16 inside = _mm512_mask_cmplt_epu32_mask(lanes, abs_bits(v), limit);
        _mm512_storeu_ps(band + n_band, _mm512_maskz_compress_ps(inside, v));
        n_band += (size_t)_mm_popcnt_u32(inside);
    }
    return n_band;
}

TARGET static size_t avx512_count(const float *values, size_t n, uint32_t threshold, size_t *n_ties) {
    const __m512i limit = _mm512_set1_epi32((int)threshold);
    size_t n_above = 0, n_equal = 0;
    for (size_t i = 0; i < n; i += LANES) {
        __mmask16 lanes = n - i < LANES ? first_lanes(n - i) : ALL;
        __m512i bits = abs_bits(_mm512_maskz_loadu_ps(lanes, values + i));
        n_above += (size_t)_mm_popcnt_u32(_mm512_mask_cmpgt_epu32_mask(lanes, bits, limit));
        n_equal += (size_t)_mm_popcnt_u32(_mm512_mask_cmpeq_epu32_mask(lanes, bits, limit));
    }
    *n_ties = n_equal;
    return n_above;
}

/* The lowest n set bits of mask. */
static inline __mmask16 lowest_set(__mmask16 mask, size_t n) {
    uint32_t rest = mask;
    while (n-- > 0 && rest) rest &= rest - 1;
    return (__mmask16)(mask & ~rest);
}

/* Unselected candidates are lines apart: a plain store would fetch a whole line from memory for each. */
TARGET static inline void put_back(const uint32_t *indices, const float *values, size_t n, float *residual,
                                   int bypass) {
    if (!bypass) {
        for (size_t i = 0; i < n; i++) residual[indices[i]] = values[i];
        return;
    }
    for (size_t i = 0; i < n; i++) {
        int bits;
        memcpy(&bits, &values[i], sizeof bits);
        _mm_stream_si32((int *)(residual + indices[i]), bits);
    }
}

TARGET static void avx512_keep(uint32_t *indices, float *values, size_t n, uint32_t threshold, size_t n_ties,
                               float *residual, int bypass, uint32_t *sent_indices, float *sent_values,
                               size_t n_sent) {
    const __m512i limit = _mm512_set1_epi32((int)threshold);
    /* unselected candidates are collected first, because a branch for each would be mispredicted */
    uint32_t lost_room[LOST_ROOM], *lost_indices = residual ? lost_room : indices;
    float lost_values_room[LOST_ROOM], *lost_values = residual ? lost_values_room : values;
    size_t j = 0, n_lost = 0;
    for (size_t i = 0; i < n; i += LANES) {
        __mmask16 lanes = n - i < LANES ? first_lanes(n - i) : ALL;
        _mm_prefetch((const char *)(indices + i) + 2048,
                     _MM_HINT_T0); /* mostly the next block's candidates */
        _mm_prefetch((const char *)(values + i) + 2048, _MM_HINT_T0);
        __m512i index = _mm512_maskz_loadu_epi32(lanes, indices + i);
        __m512 v = _mm512_maskz_loadu_ps(lanes, values + i);
        __m512i bits = abs_bits(v);
        __mmask16 sent = _mm512_mask_cmpgt_epu32_mask(lanes, bits, limit);
        __mmask16 ties = _mm512_mask_cmpeq_epu32_mask(lanes, bits, limit);
        if (ties) {
            ties = lowest_set(ties, n_ties);
            n_ties -= (size_t)_mm_popcnt_u32(ties);
            sent |= ties;
        }
        __mmask16 lost = (__mmask16)(lanes & ~sent);
        size_t n_lost_here = (size_t)_mm_popcnt_u32(lost);
        if (residual || n_lost + LANES <= n) {
            _mm512_storeu_si512(lost_indices + n_lost, _mm512_maskz_compress_epi32(lost, index));
            _mm512_storeu_ps(lost_values + n_lost, _mm512_maskz_compress_ps(lost, v));
        } else { /* not over what follows the list */
            _mm512_mask_compressstoreu_epi32(lost_indices + n_lost, lost, index);
            _mm512_mask_compressstoreu_ps(lost_values + n_lost, lost, v);
        }
        n_lost += n_lost_here;
        if (residual && n_lost > LOST_ROOM - LANES) {
            put_back(lost_indices, lost_values, n_lost, residual, bypass);
            n_lost = 0;
        }
        size_t n_here = (size_t)_mm_popcnt_u32(sent);
        index = _mm512_maskz_compress_epi32(sent, index);
        v = _mm512_maskz_compress_ps(sent, v);
        if (j + LANES <= n_sent) {
            _mm512_storeu_si512(sent_indices + j, index);
            _mm512_storeu_ps(sent_values + j, v);
        } else {
            _mm512_mask_storeu_epi32(sent_indices + j, first_lanes(n_here), index);
            _mm512_mask_storeu_ps(sent_values + j, first_lanes(n_here), v);
        }
        j += n_here;
    }
    if (residual) put_back(lost_indices, lost_values, n_lost, residual, bypass);
}

const tagc_select_kernels tagc_select_avx512 = {
    .name = "avx512",
    .stream = avx512_stream,
    .stream_int8 = avx512_stream_int8,
    .fence = avx512_fence,
    .band = avx512_band,
    .count = avx512_count,
    .keep = avx512_keep,
};
#endif
