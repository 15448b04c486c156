/* Selection, 8 elements at a time, for processors without AVX-512. A permutation from a table compresses them, and the
 * scalar loops process the ends of arrays. */
#include "codec/residual.h"
#include "codec/select_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("avx2,fma,popcnt")))
#define INLINE TARGET static inline __attribute__((always_inline))
#define LANES 8
#define ROOM 1024        /* elements of a residual on their way around the cache */
#define AHEAD_BYTES 2048 /* of the gradient, on their way */
#define LOST_ROOM 72     /* elements put back at a time */

/* For each mask the numbers of its set bits, lowest first. */
#define BELOW(m, i) __builtin_popcount((m) & ((1u << (i)) - 1))
#define AT(m, i, place) (((m) >> (i)&1) && BELOW(m, i) == (place) ? (i) : 0u)
#define PLACE(m, p)                                                                                          \
    AT(m, 1, p) | AT(m, 2, p) | AT(m, 3, p) | AT(m, 4, p) | AT(m, 5, p) | AT(m, 6, p) | AT(m, 7, p)
#define ORDER(m)                                                                                             \
    { PLACE(m, 0), PLACE(m, 1), PLACE(m, 2), PLACE(m, 3), PLACE(m, 4), PLACE(m, 5), PLACE(m, 6), PLACE(m, 7) }
#define ORDERS_4(m) ORDER(m), ORDER(m + 1), ORDER(m + 2), ORDER(m + 3)
#define ORDERS_16(m) ORDERS_4(m), ORDERS_4(m + 4), ORDERS_4(m + 8), ORDERS_4(m + 12)
#define ORDERS_64(m) ORDERS_16(m), ORDERS_16(m + 16), ORDERS_16(m + 32), ORDERS_16(m + 48)
static const uint32_t orders[256][LANES]
    __attribute__((aligned(32))) = {ORDERS_64(0u), ORDERS_64(64u), ORDERS_64(128u), ORDERS_64(192u)};

/* The permutation that moves the lanes of mask to the front. */
INLINE __m256i compress_order(uint32_t mask) {
    return _mm256_load_si256((const __m256i *)(const void *)orders[mask]);
}

INLINE __m256i abs_bits(__m256 x) {
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
}

INLINE uint32_t lanes_of(__m256i signs) {
    return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(signs));
}

INLINE uint32_t reduce_max(__m256i v) {
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(m);
}

typedef struct stream_state {
    __m256i below, max, index; /* t_lo - 1, the largest |acc|, the next 8 indices */
    uint32_t *indices;
    float *values;
} stream_state;

/* Processes 8 elements and returns their new residual. Magnitudes and t_lo - 1 are below 2^31, so the sign of a difference
 * compares them: below - bits is negative for a candidate, bits - 1 is negative for a zero. */
INLINE __m256 stream_vector(stream_state *s, const float *gradient, const float *residual, int leave) {
    __m256 acc = _mm256_add_ps(_mm256_loadu_ps(gradient), _mm256_loadu_ps(residual));
    __m256i bits = abs_bits(acc), chosen = _mm256_sub_epi32(s->below, bits);
    __m256i clear = _mm256_sub_epi32(bits, _mm256_set1_epi32(1));
    if (!leave) clear = _mm256_or_si256(clear, chosen);
    uint32_t mask = lanes_of(chosen);
    __m256i order = compress_order(mask);
    s->max = _mm256_max_epu32(s->max, bits);
    _mm256_storeu_si256((__m256i *)(void *)s->indices, _mm256_permutevar8x32_epi32(s->index, order));
    _mm256_storeu_ps(s->values, _mm256_permutevar8x32_ps(acc, order));
    int n_chosen = _mm_popcnt_u32(mask);
    s->indices += n_chosen;
    s->values += n_chosen;
    s->index = _mm256_add_epi32(s->index, _mm256_set1_epi32(LANES));
    return _mm256_blendv_ps(acc, _mm256_set1_ps(TAGC_ZERO_RESIDUAL), _mm256_castsi256_ps(clear));
}

/* Whole vectors of (n), residual_out aligned for bypass; returns how many elements were processed. */
INLINE size_t stream_whole(stream_state *s, const float *gradient, const float *residual_in,
                           float *residual_out, size_t n, int leave, int bypass) {
    size_t i = 0;
    n = n / LANES * LANES;
    if (!bypass) {
        for (; i < n; i += LANES)
            _mm256_storeu_ps(residual_out + i, stream_vector(s, gradient + i, residual_in + i, leave));
        return n;
    }
    /* through a buffer in the cache: between other stores, streaming ones take half as long again */
    float room[ROOM] __attribute__((aligned(64)));
    for (size_t n_here; i < n; i += n_here) {
        n_here = n - i < ROOM ? n - i : ROOM;
        for (size_t j = 0; j < n_here; j += LANES)
            _mm256_store_ps(room + j, stream_vector(s, gradient + i + j, residual_in + i + j, leave));
        for (size_t j = 0; j < n_here; j += LANES)
            _mm256_stream_ps(residual_out + i + j, _mm256_load_ps(room + j));
    }
    return n;
}

TARGET static size_t avx2_stream(const float *gradient, const float *residual_in, float *residual_out,
                                 size_t n, uint32_t first, uint32_t t_lo, uint32_t t_clear, int bypass,
                                 uint32_t *indices, float *values, uint32_t *max_bits) {
    size_t head = bypass ? (32 - ((uintptr_t)residual_out & 31)) % 32 / sizeof(float) : 0;
    if (head > n) head = n;
    size_t n_head = tagc_select_scalar.stream(gradient, residual_in, residual_out, head, first, t_lo, t_clear,
                                              0, indices, values, max_bits);
    stream_state s = {.below = _mm256_set1_epi32((int)(t_lo - 1)),
                      .max = _mm256_setzero_si256(),
                      .index = _mm256_add_epi32(_mm256_set1_epi32((int)(first + (uint32_t)head)),
                                                _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
                      .indices = indices + n_head,
                      .values = values + n_head};
    const float *g = gradient + head, *in = residual_in + head;
    float *out = residual_out + head;
    size_t n_whole, leave = t_clear != t_lo;
    if (bypass)
        n_whole = leave ? stream_whole(&s, g, in, out, n - head, 1, 1)
                        : stream_whole(&s, g, in, out, n - head, 0, 1);
    else
        n_whole = leave ? stream_whole(&s, g, in, out, n - head, 1, 0)
                        : stream_whole(&s, g, in, out, n - head, 0, 0);
    if (reduce_max(s.max) > *max_bits) *max_bits = reduce_max(s.max);
    size_t i = head + n_whole, n_candidates = (size_t)(s.indices - indices);
    return n_candidates + tagc_select_scalar.stream(gradient + i, residual_in + i, residual_out + i, n - i,
                                                    first + (uint32_t)i, t_lo, t_clear, 0,
                                                    indices + n_candidates, values + n_candidates, max_bits);
}

/* ---- an int8 residual ---- */

typedef struct block_state {
    __m256i below, index; /* t_lo - 1, the first of the next 8 indices */
    uint32_t *indices;
    float *values;
} block_state;

INLINE __m256 sum_vector(const void *gradient, size_t at, int is_bf16, const uint8_t *codes, __m256 step) {
    __m256i code = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(codes + at)));
    __m256 g;
    if (is_bf16) {
        __m128i half = _mm_loadu_si128((const __m128i *)(const void *)((const uint16_t *)gradient + at));
        g = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    } else {
        g = _mm256_loadu_ps((const float *)gradient + at);
    }
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(code), step, g);
}

/* Collects the candidates of 8 elements; returns the others, zeros in place of candidates. */
INLINE __m256 take_candidates(block_state *s, __m256 acc, __m256i *top) {
    __m256i bits = abs_bits(acc), chosen = _mm256_cmpgt_epi32(bits, s->below);
    uint32_t mask = lanes_of(chosen);
    __m256i order = compress_order(mask);
    *top = _mm256_max_epu32(*top, _mm256_andnot_si256(chosen, bits));
    _mm256_storeu_si256((__m256i *)(void *)s->indices, _mm256_add_epi32(order, s->index));
    s->index = _mm256_add_epi32(s->index, _mm256_set1_epi32(LANES));
    _mm256_storeu_ps(s->values, _mm256_permutevar8x32_ps(acc, order));
    int n_chosen = _mm_popcnt_u32(mask);
    s->indices += n_chosen;
    s->values += n_chosen;
    return _mm256_andnot_ps(_mm256_castsi256_ps(chosen), acc);
}

/* Random bytes of 32 elements. */
INLINE __m256i random_bytes(__m256i x) {
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32(0x21f0aaad));
    x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 15));
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32(0x735a2d97));
    return _mm256_xor_si256(x, _mm256_srli_epi32(x, 15));
}

/* Codes of 8 elements, not yet bytes. places: for each of them, the bytes of `random` that are its threshold / 256. */
INLINE __m256i round_vector(const float *acc, __m256 scale, __m256i random, __m256i places) {
    __m256i fixed = _mm256_cvttps_epi32(_mm256_mul_ps(_mm256_load_ps(acc), scale));
    return _mm256_srai_epi32(_mm256_add_epi32(fixed, _mm256_shuffle_epi8(random, places)), 24);
}

/* The random bytes of the block at `at`. */
INLINE void write_random(uint32_t seed, size_t at, uint8_t *random) {
    __m256i group = _mm256_add_epi32(_mm256_set1_epi32((int)(seed + (uint32_t)(at / 4))),
                                     _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    for (int i = 0; i < TAGC_RESIDUAL_BLOCK; i += 4 * LANES) {
        _mm256_store_si256((__m256i *)(void *)(random + i), random_bytes(group));
        group = _mm256_add_epi32(group, _mm256_set1_epi32(LANES));
    }
}

/* 16 bytes, in both halves: from memory that takes no shuffle. */
INLINE __m256i twice(const uint8_t *bytes) {
    return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)(const void *)bytes));
}

/* Writes the codes of a whole block. */
INLINE void write_codes(const float *acc, __m256 scale, const uint8_t *random, uint8_t *codes) {
    /* byte j of four to byte 2 of a lane, and the two that threshold / 256 has below it; a negative place is a zero. Bytes 0 to 7 of
     * 16, then 8 to 15. */
    const __m256i first =
        _mm256_setr_epi32((int)0xff000302, (int)0xff010003, (int)0xff020100, (int)0xff030201, (int)0xff040706,
                          (int)0xff050407, (int)0xff060504, (int)0xff070605);
    const __m256i second = _mm256_add_epi32(first, _mm256_set1_epi32(0x00080808));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int i = 0; i < TAGC_RESIDUAL_BLOCK; i += 32) {
        __m256i low = twice(random + i), high = twice(random + i + 16);
        __m256i a = _mm256_packs_epi32(round_vector(acc + i, scale, low, first),
                                       round_vector(acc + i + 8, scale, low, second));
        __m256i b = _mm256_packs_epi32(round_vector(acc + i + 16, scale, high, first),
                                       round_vector(acc + i + 24, scale, high, second));
        __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order);
        _mm256_storeu_si256((__m256i *)(void *)(codes + i), bytes);
    }
}

INLINE uint32_t largest_of(const float *values, size_t n) {
    __m256i top = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) top = _mm256_max_epu32(top, abs_bits(_mm256_loadu_ps(values + i)));
    uint32_t largest = reduce_max(top);
    for (; i < n; i++) largest = tagc_abs_bits(values[i]) > largest ? tagc_abs_bits(values[i]) : largest;
    return largest;
}

/* A block under way: its sums, with zeros in place of candidates, their largest magnitude, and its random bytes. */
typedef struct block {
    float acc[TAGC_RESIDUAL_BLOCK] __attribute__((aligned(32)));
    uint8_t random[TAGC_RESIDUAL_BLOCK] __attribute__((aligned(32)));
    uint32_t largest;
} block;

INLINE void take_block(block_state *s, const void *gradient, int is_bf16, const uint8_t *exponents,
                       const uint8_t *codes, size_t at, uint32_t seed, block *to) {
    __m256 step = _mm256_castsi256_ps(
        _mm256_set1_epi32((int)(0x80000000u | (uint32_t)exponents[at / TAGC_RESIDUAL_BLOCK] << 23)));
    __m256i top = _mm256_setzero_si256();
    write_random(seed, at, to->random);
    for (size_t i = 0; i < TAGC_RESIDUAL_BLOCK; i += 2 * LANES) {
        _mm_prefetch((const char *)gradient + (at + i) * (is_bf16 ? 2 : 4) + AHEAD_BYTES, _MM_HINT_T0);
        __m256 low = sum_vector(gradient, at + i, is_bf16, codes, step);
        __m256 high = sum_vector(gradient, at + i + LANES, is_bf16, codes, step);
        _mm256_store_ps(to->acc + i, take_candidates(s, low, &top));
        _mm256_store_ps(to->acc + i + LANES, take_candidates(s, high, &top));
    }
    to->largest = reduce_max(top);
}

INLINE void write_block(const block *from, size_t at, uint32_t seed, uint8_t *exponents, uint8_t *codes) {
    exponents += at / TAGC_RESIDUAL_BLOCK;
    if (from->largest >= TAGC_RESIDUAL_PLAIN) {
        tagc_residual_write_int8(from->acc, at, seed, exponents, codes);
        return;
    }
    uint32_t exponent = tagc_residual_exponent(TAGC_FORMAT_INT8, from->largest);
    *exponents = (uint8_t)exponent;
    __m256i scale = _mm256_set1_epi32((int)tagc_residual_scale(8, exponent));
    write_codes(from->acc, _mm256_castsi256_ps(scale), from->random, codes + at);
}

INLINE size_t stream_int8(const void *gradient, int is_bf16, const uint8_t *exponents_in,
                          const uint8_t *codes_in, uint8_t *exponents_out, uint8_t *codes_out, size_t n,
                          uint32_t first, uint32_t t_lo, uint32_t seed, uint32_t *indices, float *values,
                          uint32_t *max_bits) {
    /* signed: nothing is above if t_lo is NONE */
    block_state s = {_mm256_set1_epi32((int)(t_lo - 1)), _mm256_set1_epi32((int)first), indices, values};
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
    uint32_t largest = largest_of(values, n_candidates);
    *max_bits = largest > max ? largest : max;
    return n_candidates;
}

TARGET static size_t avx2_stream_int8(const void *gradient, int is_bf16, const uint8_t *exponents_in,
                                      const uint8_t *codes_in, uint8_t *exponents_out, uint8_t *codes_out,
                                      size_t n, uint32_t first, uint32_t t_lo, uint32_t seed,
                                      uint32_t *indices, float *values, uint32_t *max_bits) {
    return is_bf16 ? stream_int8(gradient, 1, exponents_in, codes_in, exponents_out, codes_out, n, first,
                                 t_lo, seed, indices, values, max_bits)
                   : stream_int8(gradient, 0, exponents_in, codes_in, exponents_out, codes_out, n, first,
                                 t_lo, seed, indices, values, max_bits);
}

static void avx2_fence(void) {
    _mm_sfence();
}

TARGET static size_t avx2_band(const float *values, size_t n, uint32_t t_hi, float *band) {
    const __m256i limit = _mm256_set1_epi32((int)t_hi);
    size_t n_band = 0, i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m256 v = _mm256_loadu_ps(values + i);
        uint32_t inside = lanes_of(_mm256_cmpgt_epi32(limit, abs_bits(v)));
        _mm256_storeu_ps(band + n_band, _mm256_permutevar8x32_ps(v, compress_order(inside)));
        n_band += (size_t)_mm_popcnt_u32(inside);
    }
    return n_band + tagc_select_scalar.band(values + i, n - i, t_hi, band + n_band);
}

TARGET static size_t avx2_count(const float *values, size_t n, uint32_t threshold, size_t *n_ties) {
    const __m256i limit = _mm256_set1_epi32((int)threshold);
    size_t n_above = 0, n_equal = 0, i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m256i bits = abs_bits(_mm256_loadu_ps(values + i));
        n_above += (size_t)_mm_popcnt_u32(lanes_of(_mm256_cmpgt_epi32(bits, limit)));
        n_equal += (size_t)_mm_popcnt_u32(lanes_of(_mm256_cmpeq_epi32(bits, limit)));
    }
    n_above += tagc_select_scalar.count(values + i, n - i, threshold, n_ties);
    *n_ties += n_equal;
    return n_above;
}

/* Unselected candidates are lines apart: a plain store would fetch a whole line from memory for each. */
INLINE void put_back(const uint32_t *indices, const float *values, size_t n, float *residual, int bypass) {
    for (size_t i = 0; i < n; i++) {
        int bits;
        memcpy(&bits, &values[i], sizeof bits);
        if (bypass)
            _mm_stream_si32((int *)(void *)(residual + indices[i]), bits);
        else
            residual[indices[i]] = values[i];
    }
}

TARGET static void avx2_keep(uint32_t *indices, float *values, size_t n, uint32_t threshold, size_t n_ties,
                             float *residual, int bypass, uint32_t *sent_indices, float *sent_values,
                             size_t n_sent) {
    const __m256i limit = _mm256_set1_epi32((int)threshold);
    /* unselected candidates are collected first, because a branch for each would be mispredicted */
    uint32_t lost_room[LOST_ROOM], *lost_indices = residual ? lost_room : indices;
    float lost_values_room[LOST_ROOM], *lost_values = residual ? lost_values_room : values;
    size_t j = 0, i = 0, n_lost = 0;
    for (; i + LANES <= n && j + LANES <= n_sent; i += LANES) {
        _mm_prefetch((const char *)(indices + i) + 2048,
                     _MM_HINT_T0); /* mostly the next block's candidates */
        _mm_prefetch((const char *)(values + i) + 2048, _MM_HINT_T0);
        __m256i index = _mm256_loadu_si256((const __m256i *)(const void *)(indices + i));
        __m256 v = _mm256_loadu_ps(values + i);
        __m256i bits = abs_bits(v);
        uint32_t sent = lanes_of(_mm256_cmpgt_epi32(bits, limit));
        uint32_t ties = lanes_of(_mm256_cmpeq_epi32(bits, limit));
        for (; ties && n_ties; ties &= ties - 1, n_ties--) sent |= ties & -ties;
        __m256i order = compress_order(sent), lost_order = compress_order(~sent & 0xff);
        _mm256_storeu_si256((__m256i *)(void *)(sent_indices + j), _mm256_permutevar8x32_epi32(index, order));
        _mm256_storeu_ps(sent_values + j, _mm256_permutevar8x32_ps(v, order));
        j += (size_t)_mm_popcnt_u32(sent);
        _mm256_storeu_si256((__m256i *)(void *)(lost_indices + n_lost),
                            _mm256_permutevar8x32_epi32(index, lost_order));
        _mm256_storeu_ps(lost_values + n_lost, _mm256_permutevar8x32_ps(v, lost_order));
        n_lost += LANES - (size_t)_mm_popcnt_u32(sent);
        if (!residual || n_lost + LANES <= LOST_ROOM) continue;
        put_back(lost_indices, lost_values, n_lost, residual, bypass);
        n_lost = 0;
    }
    if (residual)
        put_back(lost_indices, lost_values, n_lost, residual, bypass);
    else
        tagc_select_close_up(indices, values, n_lost, i, n);
    size_t from = residual ? i : n_lost;
    tagc_select_scalar.keep(indices + from, values + from, n - i, threshold, n_ties, residual, bypass,
                            sent_indices + j, sent_values + j, n_sent - j);
}

const tagc_select_kernels tagc_select_avx2 = {
    .name = "avx2",
    .stream = avx2_stream,
    .stream_int8 = avx2_stream_int8,
    .fence = avx2_fence,
    .band = avx2_band,
    .count = avx2_count,
    .keep = avx2_keep,
};
#endif
