/* Formats of values (codec/values.h). The operations are in the order of codec/code_body.h, so that the bytes are the same.
 * 16 lanes work on a block of values: lane i holds elements i, i + 16 and so on, as the 16 partial sums of the processor do. */
#ifndef TAGC_GPU_CUDA_VALUES_CUH
#define TAGC_GPU_CUDA_VALUES_CUH

#include "gpu/cuda/rows.cuh"
extern "C" {
#include "codec/bf16.h"
}

namespace tagc_cuda {

constexpr unsigned HALF = 16; /* lanes: half a warp */
constexpr float MIN_NORMAL = 1.17549435e-38f;
constexpr unsigned RUN = 4096; /* elements that a block of threads takes: whole blocks of values */

__host__ __device__ __forceinline__ int bits_per_value(int values) {
    return 32 >> values; /* fp32, bf16, int8, int4, int2 */
}

__host__ __device__ __forceinline__ int has_scales(int values) {
    return values >= TAGC_FORMAT_INT8;
}

__host__ __device__ __forceinline__ size_t scales_bytes(const value_format *f, size_t n) {
    return has_scales(f->values) ? 2 * ((n + (size_t)f->block - 1) >> f->shift) : 0;
}

__host__ __device__ __forceinline__ size_t values_bytes(const value_format *f, size_t n) {
    return scales_bytes(f, n) + (n * (size_t)bits_per_value(f->values) + 7) / 8;
}

__device__ __forceinline__ float level_of(const value_format *f) {
    return f->sparse ? 2.0f : 4.0f;
}

/* ---- scales ---- */

/* The sum over the 16 lanes in the processor's order: halves are added, then quarters. */
__device__ __forceinline__ float half_sum(float value) {
    for (int by = HALF / 2; by > 0; by /= 2) value += __shfl_xor_sync(ALL, value, by);
    return value;
}

__device__ __forceinline__ uint32_t half_largest(uint32_t value) {
    for (int by = HALF / 2; by > 0; by /= 2) value = larger(value, __shfl_xor_sync(ALL, value, by));
    return value;
}

__device__ __forceinline__ float multiple_of(float x, float level, float scale) {
    return float_of(magnitude(x)) > scale * ((1 + level) / 2) ? level : 1.0f;
}

/* A block of values as one of its lanes sees it. Both halves of a warp make the same number of turns. get(i): element i,
 * called for i < n. */
template <typename getter> struct value_block {
    unsigned n, n_rounds;
    getter get;

    __device__ __forceinline__ float at(unsigned round) const {
        unsigned i = round * HALF + threadIdx.x % HALF;
        return i < n ? get(i) : 0.0f;
    }
};

template <typename getter>
__device__ __forceinline__ float wanted_scale(const value_format *f, const value_block<getter> *block) {
    if (f->values == TAGC_FORMAT_INT8 || f->values == TAGC_FORMAT_INT4) {
        uint32_t most = 0;
        for (unsigned r = 0; r < block->n_rounds; r++) most = larger(most, magnitude(block->at(r)));
        return float_of(half_largest(most)) / (f->values == TAGC_FORMAT_INT8 ? 127.0f : 7.0f);
    }
    const float n = (float)block->n, level = level_of(f);
    float sum = 0;
    for (unsigned r = 0; r < block->n_rounds; r++) sum += float_of(magnitude(block->at(r))) * 0x1p-12f;
    const float mean = half_sum(sum) * (4096.0f / n);
    float scale = mean * (f->sparse ? 0.9f : 0.5f);
    for (int refit = 0; !f->sparse && refit < 2; refit++) {
        float sums = 0, squares = 0;
        for (unsigned r = 0; r < block->n_rounds; r++) {
            if (r * HALF >= block->n)
                break; /* lanes without an element add zero; turns without any element are left out */
            float x = block->at(r), multiple = multiple_of(x, level, scale);
            sums += float_of(magnitude(x)) * 0x1p-12f * multiple;
            squares += multiple * multiple;
        }
        float unused = (float)((HALF - block->n % HALF) % HALF);
        sums = half_sum(sums);
        squares = half_sum(squares);
        scale = sums / (squares - unused) * 4096.0f;
    }
    return scale;
}

/* The scale as bf16, as codec/values.c chooses it; 0 if 1 / scale would overflow. */
template <typename getter>
__device__ __forceinline__ uint32_t scale_of(const value_format *f, const value_block<getter> *block) {
    int is_finite = 1;
    if (f->marks_nonfinite) {
        uint32_t most = 0;
        for (unsigned r = 0; r < block->n_rounds; r++) most = larger(most, magnitude(block->at(r)));
        is_finite = half_largest(most) < INF_BITS;
    }
    const float wanted = wanted_scale(f, block); /* all lanes take part in its shuffles */
    if (!is_finite) return TAGC_BF16_NAN;
    if (wanted < MIN_NORMAL) return 0;
    const uint32_t bits = bits_of(wanted);
    return smaller(f->is_stochastic ? (bits + 0xffffu) >> 16 : TAGC_BF16_NEAREST(bits), f->largest_scale);
}

/* ---- single values ---- */

__device__ __forceinline__ float zero_as_negative(float x) {
    return x == 0 ? -0.0f : x;
}

/* The loss; zero is returned as -0.0f. */
__device__ __forceinline__ float lost(float wanted, float decoded) {
    return float_of(bits_of(decoded - wanted) ^ SIGN);
}

/* x is at position `at`. Where rounding is stochastic, nobody reads `decoded`. */
__device__ __forceinline__ uint32_t round_value(const value_format *f, float scale, float inverse, float x,
                                                uint32_t at, float *decoded) {
    if (f->values == TAGC_FORMAT_INT8 || f->values == TAGC_FORMAT_INT4) {
        const float magic = 12582912.0f, most = f->values == TAGC_FORMAT_INT8 ? 127.0f : 7.0f;
        float clamped = x * inverse;
        clamped = clamped > -most ? clamped : -most;
        clamped = clamped < most ? clamped : most;
        if (f->is_stochastic) {
            const int bits = bits_per_value(f->values);
            const uint32_t threshold = tagc_residual_threshold(tagc_residual_random(f->seed, at / 4), at % 4);
            const float one = f->values == TAGC_FORMAT_INT8 ? 0x1p24f : 0x1p28f;
            return tagc_residual_code(bits, clamped * one, threshold);
        }
        float shifted = clamped + magic;
        *decoded = (shifted - magic) * scale;
        return bits_of(shifted) & (f->values == TAGC_FORMAT_INT8 ? 255u : 15u);
    }
    const uint32_t sign = bits_of(x) & SIGN;
    const float level = level_of(f);
    const int is_large = float_of(magnitude(x)) > scale * ((1 + level) / 2);
    *decoded = float_of(bits_of(is_large ? scale * level : scale) | sign);
    return sign >> 30 | (uint32_t)is_large;
}

__device__ __forceinline__ uint32_t half_of(float x) {
    uint32_t half = TAGC_BF16_NEAREST(magnitude(x));
    half -= (half + 0x80u) >> 15; /* do not round up to Inf */
    return half | (bits_of(x) & SIGN) >> 16;
}

/* Packs the codes of 16 lanes, of elements [first, first + 16), into whole bytes; elements from n on do not exist. */
__device__ __forceinline__ void store_codes(int bits, uint32_t code, unsigned first, unsigned n,
                                            uint8_t *packed) {
    const unsigned each = 8u / (unsigned)bits, own = threadIdx.x % HALF; /* values per byte */
    uint32_t byte = first + own < n ? code << own % each * (unsigned)bits : 0;
    for (unsigned by = 1; by < each; by *= 2) byte |= __shfl_xor_sync(ALL, byte, (int)by);
    if (own % each == 0 && first + own < n) packed[(size_t)(first + own) / each] = (uint8_t)byte;
}

/* Value i of n in `bytes`, which are sound. */
__device__ __forceinline__ float value_at(const value_format *f, const uint8_t *bytes, size_t i, size_t n) {
    const unsigned bits = (unsigned)bits_per_value(f->values);
    if (f->values == TAGC_FORMAT_FP32) return float_of(load32(bytes + 4 * i));
    if (f->values == TAGC_FORMAT_BF16) return float_of(load16(bytes + 2 * i) << 16);
    const float scale = float_of(load16(bytes + 2 * (i >> f->shift)) << 16);
    const size_t bit = i * bits;
    const uint32_t code = bytes[scales_bytes(f, n) + bit / 8] >> bit % 8 & ((1u << bits) - 1);
    if (f->values != TAGC_FORMAT_INT2) {
        const int top = 1 << (bits - 1);
        return (float)(((int)code ^ top) - top) * scale;
    }
    return float_of(bits_of(code & 1u ? scale * level_of(f) : scale) | (code & 2u) << 30);
}

/* ---- a block of values ---- */

/* Encodes the values of a block, whose first is value `first` of all, and calls put(i, decoded, error) for each. scale_bytes and
 * packed: the block's bytes in the body. */
template <typename getter, typename putter>
__device__ __forceinline__ void encode_block(const value_format *f, const value_block<getter> *block,
                                             size_t first, uint8_t *scale_bytes, uint8_t *packed,
                                             putter put) {
    const uint32_t scale_bits = scale_of(f, block);
    const int is_sent = scale_bits && scale_bits != TAGC_BF16_NAN;
    const float scale = float_of(TAGC_BF16_WIDE(scale_bits)), inverse = is_sent ? 1 / scale : 0;
    if (threadIdx.x % HALF == 0 && block->n) store16(scale_bytes, scale_bits);
    for (unsigned r = 0; r < block->n_rounds; r++) {
        const unsigned i = r * HALF + threadIdx.x % HALF;
        float x = block->at(r), decoded = 0, error;
        uint32_t code = 0;
        if (is_sent) {
            code = round_value(f, scale, inverse, x, (uint32_t)first + i, &decoded);
            error = lost(x, decoded);
        } else {
            error = zero_as_negative(x);
        }
        store_codes(bits_per_value(f->values), code, r * HALF, block->n, packed);
        if (i < block->n) put(i, decoded, error);
    }
}

} // namespace tagc_cuda

#endif
