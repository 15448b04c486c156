/* acc = gradient + residual, and the new residual, each as it is stored (codec/residual.h). The operations are those of
 * codec/residual.c, so that the bits are the same.
 *
 * No residual is in bf16 any more (check_row of batch.cu). Its branches stay here and in select.cuh, since without them ptxas of CUDA 13 spills
 * registers of emit_rows, encode_blocks and stream_rows on some devices.
 *
 * A warp takes TAGC_RESIDUAL_BLOCK values at a time, each lane four side by side (a quad). That is one block of int8 or four of int4, and
 * the four random bytes of a quad are one hash. */
#ifndef TAGC_GPU_CUDA_RESIDUAL_CUH
#define TAGC_GPU_CUDA_RESIDUAL_CUH

#include "gpu/cuda/rows.cuh"

namespace tagc_cuda {

constexpr unsigned QUAD = 4, LANES_OF_INT4 = 32 / QUAD; /* lanes that share an exponent of int4 */
static_assert(LANES * QUAD == TAGC_RESIDUAL_BLOCK, "a warp takes a block");
constexpr uint32_t ZERO_HALF = 0x8000u, LARGEST_HALF = 0x7f7fu;

/* Integers, with an exponent for each block. */
__host__ __device__ __forceinline__ int has_exponents(int residual_format) {
    return residual_format >= TAGC_FORMAT_INT8;
}

__device__ __forceinline__ size_t block_of(const acc_arrays *a, size_t i) {
    return i >> (a->residual_format == TAGC_FORMAT_INT8 ? 7 : 5);
}

__device__ __forceinline__ const uint8_t *codes_in(const acc_arrays *a) {
    return static_cast<const uint8_t *>(a->residual_in) + a->n_exponent_bytes;
}

__device__ __forceinline__ uint8_t *codes_out(const acc_arrays *a) {
    return static_cast<uint8_t *>(a->residual_out) + a->n_exponent_bytes;
}

__device__ __forceinline__ float step_of(uint32_t exponent) {
    return float_of(SIGN | exponent << 23);
}

/* The value of a code of four bits. */
__device__ __forceinline__ float signed_of(uint32_t code) {
    return (float)((int)((code & 15u) ^ 8u) - 8);
}

/* ---- reading ---- */

__device__ __forceinline__ float gradient_at(const acc_arrays *a, size_t i) {
    if (a->gradient_format == TAGC_FORMAT_BF16)
        return float_of((uint32_t) static_cast<const uint16_t *>(a->gradient)[i] << 16);
    return static_cast<const float *>(a->gradient)[i];
}

__device__ __forceinline__ float residual_at(const acc_arrays *a, size_t i) {
    if (a->residual_format == TAGC_FORMAT_FP32) return static_cast<const float *>(a->residual_in)[i];
    if (a->residual_format == TAGC_FORMAT_BF16)
        return float_of((uint32_t) static_cast<const uint16_t *>(a->residual_in)[i] << 16);
    const float step = step_of(static_cast<const uint8_t *>(a->residual_in)[block_of(a, i)]);
    if (a->residual_format == TAGC_FORMAT_INT8) return (float)(int8_t)codes_in(a)[i] * step;
    return signed_of((uint32_t)codes_in(a)[i / 2] >> i % 2 * 4) * step;
}

__device__ __forceinline__ float acc_at(const acc_arrays *a, size_t i) {
    const float gradient = gradient_at(a, i);
    return a->residual_in ? gradient + residual_at(a, i) : gradient;
}

/* Whether quads can be read and written at once. */
__device__ __forceinline__ int is_aligned(const acc_arrays *a) {
    const uintptr_t residual = (uintptr_t)a->residual_in | (uintptr_t)a->residual_out,
                    wide = QUAD * sizeof(float) - 1, half = QUAD * sizeof(uint16_t) - 1;
    const uintptr_t of_gradient = a->gradient_format == TAGC_FORMAT_FP32 ? wide : half;
    const uintptr_t of_residual = a->residual_format == TAGC_FORMAT_FP32   ? wide
                                  : a->residual_format == TAGC_FORMAT_BF16 ? half
                                                                           : 0;
    return (((uintptr_t)a->gradient & of_gradient) | (residual & of_residual)) == 0;
}

/* A quad as it lies in memory; zeros beyond the end of the row. */
struct raw_quad {
    uint32_t words[QUAD];
};

__device__ __forceinline__ raw_quad load_floats(const float *from, size_t at, size_t n, int is_aligned) {
    raw_quad quad;
    if (is_aligned && at + QUAD <= n) {
        const float4 all = *reinterpret_cast<const float4 *>(from + at);
        quad.words[0] = bits_of(all.x), quad.words[1] = bits_of(all.y);
        quad.words[2] = bits_of(all.z), quad.words[3] = bits_of(all.w);
        return quad;
    }
    TAGC_UNROLL
    for (unsigned j = 0; j < QUAD; j++) quad.words[j] = at + j < n ? bits_of(from[at + j]) : 0;
    return quad;
}

__device__ __forceinline__ raw_quad load_halves(const uint16_t *from, size_t at, size_t n, int is_aligned) {
    unsigned long long all = 0;
    if (is_aligned && at + QUAD <= n)
        all = *reinterpret_cast<const unsigned long long *>(from + at);
    else
        TAGC_UNROLL
    for (unsigned j = 0; j < QUAD; j++)
        if (at + j < n) all |= (unsigned long long)from[at + j] << j * 16;
    raw_quad quad = {{(uint32_t)all, (uint32_t)(all >> 32)}};
    return quad;
}

__device__ __forceinline__ raw_quad load_gradient(const acc_arrays *a, size_t at, int is_aligned) {
    if (a->gradient_format == TAGC_FORMAT_BF16)
        return load_halves(static_cast<const uint16_t *>(a->gradient), at, a->n, is_aligned);
    return load_floats(static_cast<const float *>(a->gradient), at, a->n, is_aligned);
}

/* Of integers: their codes, and their exponent. */
__device__ __forceinline__ raw_quad load_residual(const acc_arrays *a, size_t at, int is_aligned) {
    if (a->residual_format == TAGC_FORMAT_FP32)
        return load_floats(static_cast<const float *>(a->residual_in), at, a->n, is_aligned);
    if (a->residual_format == TAGC_FORMAT_BF16)
        return load_halves(static_cast<const uint16_t *>(a->residual_in), at, a->n, is_aligned);
    raw_quad quad = {};
    if (at >= a->n) return quad; /* zeros follow the last code, up to a whole quad */
    quad.words[0] = a->residual_format == TAGC_FORMAT_INT8
                        ? *reinterpret_cast<const uint32_t *>(codes_in(a) + at)
                        : *reinterpret_cast<const uint16_t *>(codes_in(a) + at / 2);
    quad.words[1] = static_cast<const uint8_t *>(a->residual_in)[block_of(a, at)];
    return quad;
}

/* Value j of a quad in this format. */
__device__ __forceinline__ float value_of(int format, const raw_quad *quad, unsigned j) {
    if (format == TAGC_FORMAT_FP32) return float_of(quad->words[j]);
    if (format == TAGC_FORMAT_BF16) return float_of(quad->words[j / 2] >> j % 2 * 16 << 16);
    const float step = step_of(quad->words[1]);
    if (format == TAGC_FORMAT_INT8) return (float)(int8_t)(uint8_t)(quad->words[0] >> j * 8) * step;
    return signed_of(quad->words[0] >> j * 4) * step;
}

/* ---- rounding ---- */

__device__ __forceinline__ uint32_t rounded_half(float value, uint32_t threshold) {
    const uint32_t half = smaller((magnitude(value) + (threshold >> 16)) >> 16, LARGEST_HALF);
    return half == 0 ? ZERO_HALF : half | (bits_of(value) >> 16 & 0x8000u);
}

/* In as many bits as the format has. */
__device__ __forceinline__ uint32_t rounded_code(int format, float value, uint32_t exponent,
                                                 uint32_t threshold) {
    const int bits = format == TAGC_FORMAT_INT8 ? 8 : 4;
    const float most = format == TAGC_FORMAT_INT8 ? 127 * 0x1p24f : 7 * 0x1p28f;
    float scaled = magnitude(value) < INF_BITS ? value * float_of(tagc_residual_scale(bits, exponent)) : 0.0f;
    scaled = scaled > most ? most : scaled < -most ? -most : scaled;
    return tagc_residual_code(bits, scaled, threshold);
}

__device__ __forceinline__ uint32_t threshold_of(const acc_arrays *a, uint32_t i) {
    return tagc_residual_threshold(tagc_residual_random(a->seed, i / 4), i % 4);
}

/* ---- writing ---- */

__device__ __forceinline__ void write_floats(float *to, size_t at, size_t n, int is_aligned,
                                             const float *from) {
    if (is_aligned && at + QUAD <= n) {
        float4 all;
        all.x = from[0], all.y = from[1], all.z = from[2], all.w = from[3];
        *reinterpret_cast<float4 *>(to + at) = all;
        return;
    }
    TAGC_UNROLL
    for (unsigned j = 0; j < QUAD; j++)
        if (at + j < n) to[at + j] = from[j];
}

__device__ __forceinline__ void write_halves(uint16_t *to, size_t at, size_t n, int is_aligned,
                                             const float *from, uint32_t random) {
    unsigned long long all = 0;
    TAGC_UNROLL
    for (unsigned j = 0; j < QUAD; j++)
        all |= (unsigned long long)rounded_half(from[j], tagc_residual_threshold(random, j)) << j * 16;
    if (is_aligned && at + QUAD <= n)
        *reinterpret_cast<unsigned long long *>(to + at) = all;
    else
        TAGC_UNROLL
    for (unsigned j = 0; j < QUAD; j++)
        if (at + j < n) to[at + j] = (uint16_t)(all >> j * 16);
}

/* Integers, and the zeros that follow the last code and the last exponent. */
__device__ __forceinline__ void write_codes(const acc_arrays *a, size_t at, const float *from,
                                            uint32_t random) {
    const int format = a->residual_format, is_int8 = format == TAGC_FORMAT_INT8;
    const unsigned n_lanes = is_int8 ? LANES : LANES_OF_INT4;
    uint8_t *exponents = static_cast<uint8_t *>(a->residual_out), *codes = codes_out(a);
    uint32_t largest = 0, word = 0;
    TAGC_UNROLL
    for (unsigned j = 0; j < QUAD; j++) largest = larger(largest, magnitude(from[j]));
    for (unsigned by = n_lanes / 2; by > 0; by /= 2)
        largest = larger(largest, __shfl_xor_sync(ALL, largest, (int)by));
    const uint32_t exponent = tagc_residual_exponent(format, smaller(largest, INF_BITS - 1));
    TAGC_UNROLL
    for (unsigned j = 0; j < QUAD; j++)
        word |= rounded_code(format, from[j], exponent, tagc_residual_threshold(random, j))
                << j * (is_int8 ? 8 : 4);
    if (at < a->n_padded && is_int8) *reinterpret_cast<uint32_t *>(codes + at) = word;
    if (at < a->n_padded && !is_int8) *reinterpret_cast<uint16_t *>(codes + at / 2) = (uint16_t)word;
    if (at < a->n && lane_of() % n_lanes == 0) exponents[block_of(a, at)] = (uint8_t)exponent;
    const size_t begin = at - lane_of() * QUAD;
    if (begin + TAGC_RESIDUAL_BLOCK < a->n || begin >= a->n) return;
    for (size_t e = block_of(a, (size_t)a->n - 1) + 1 + lane_of(); e < a->n_exponent_bytes; e += LANES)
        exponents[e] = 0;
}

/* Writes the values of a block, each lane's quad `from` at `at`; values beyond the end of the row are zeros. fp32 is stored as it is. A
 * warp. */
__device__ __forceinline__ void write_residual(const acc_arrays *a, size_t at, int is_aligned,
                                               const float *from) {
    if (a->residual_format == TAGC_FORMAT_FP32) {
        write_floats(static_cast<float *>(a->residual_out), at, a->n, is_aligned, from);
        return;
    }
    const uint32_t random = tagc_residual_random(a->seed, (uint32_t)(at / QUAD));
    if (a->residual_format == TAGC_FORMAT_BF16)
        write_halves(static_cast<uint16_t *>(a->residual_out), at, a->n, is_aligned, from, random);
    else
        write_codes(a, at, from, random);
}

/* Writes one value in fp32 or bf16. */
__device__ __forceinline__ void put_plain(const acc_arrays *a, uint32_t i, float value) {
    if (a->residual_format == TAGC_FORMAT_FP32)
        static_cast<float *>(a->residual_out)[i] = value;
    else
        static_cast<uint16_t *>(a->residual_out)[i] = (uint16_t)rounded_half(value, threshold_of(a, i));
}

/* Writes one value as an integer where a zero was written. Returns 0, and writes nothing, if the exponent of its block is too small. */
__device__ __forceinline__ int put_code(const acc_arrays *a, uint32_t i, float value) {
    const int format = a->residual_format;
    const uint32_t exponent = static_cast<const uint8_t *>(a->residual_out)[block_of(a, i)];
    if (tagc_residual_exponent(format, magnitude(value)) > exponent) return 0;
    const uint32_t code = rounded_code(format, value, exponent, threshold_of(a, i));
    if (format == TAGC_FORMAT_INT8)
        codes_out(a)[i] = (uint8_t)code;
    else /* another thread may write the other half of the byte */
        atomicOr(reinterpret_cast<uint32_t *>(codes_out(a)) + i / 8, code << i % 8 * 4);
    return 1;
}

} // namespace tagc_cuda

#endif
