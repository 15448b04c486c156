/* Low-bit blocks of deltas (codec/delta.h): a warp per block of 256. The elements in a byte are a half or a quarter of a
 * block apart, so each lane packs its own 8 elements. The operations on an element are those of codec/delta_body.h. */
#ifndef TAGC_GPU_CUDA_DELTA_CUH
#define TAGC_GPU_CUDA_DELTA_CUH

#include "gpu/cuda/rows.cuh"
extern "C" {
#include "codec/bf16.h"
#include "codec/delta.h"
}

namespace tagc_cuda {

constexpr unsigned DELTA_EACH = TAGC_DELTA_BLOCK / LANES; /* elements of a lane: i is lane + 32 * i */
constexpr uint32_t SCALE_NAN = 0x7fc0u, MIN_NORMAL_BITS = 0x00800000u;

struct delta_row {
    tagc_delta_row arrays;
    uint32_t n_blocks, first_block; /* of threads: WARPS blocks of values each */
    int *result;
};

__device__ __forceinline__ uint32_t delta_blocks(const delta_row *row) {
    return (uint32_t)((row->arrays.n + TAGC_DELTA_BLOCK - 1) / TAGC_DELTA_BLOCK);
}

__device__ __forceinline__ int warp_largest(int value) {
    for (int by = LANES / 2; by > 0; by /= 2) value = larger(value, __shfl_xor_sync(ALL, value, by));
    return value;
}

__device__ __forceinline__ float largest_share(int bits) {
    return bits == 8 ? 1.0f / 128 : bits == 4 ? 1.0f / 8.5f : 0.375f;
}

/* up, down: the bits of the largest positive difference and of the largest magnitude among the others. */
__device__ __forceinline__ uint32_t delta_scale(int bits, int up, int down) {
    const int most = larger(up, down);
    if (most >= (int)INF_BITS) return SCALE_NAN;
    const uint32_t rounded = bits_of(float_of((uint32_t)most) * largest_share(bits));
    if (rounded < MIN_NORMAL_BITS) return 0;
    return (TAGC_BF16_NEAREST(rounded) & 0xffffu) | (up > down ? 0x8000u : 0);
}

__device__ __forceinline__ uint32_t delta_code(float difference, float inverse, int n_half) {
    int code = (int)bits_of(difference * inverse + 12582912.0f) - (0x4b400000 - n_half);
    code = smaller(code, 2 * n_half - 1);
    return (uint32_t)larger(code, 0);
}

__device__ __forceinline__ void delta_encode_block(const delta_row *row, uint32_t block) {
    const tagc_delta_row *a = &row->arrays;
    const int bits = a->bits;
    const size_t at = (size_t)block * TAGC_DELTA_BLOCK + lane_of();
    float difference[DELTA_EACH];
    int up = 0, down = 0;
    TAGC_UNROLL
    for (unsigned i = 0; i < DELTA_EACH; i++) {
        const size_t j = at + i * LANES;
        float x = j < a->n ? a->values[j] : 0.0f;
        if (a->base && j < a->n) x = x - float_of(TAGC_BF16_WIDE(a->base[j]));
        difference[i] = x;
        up = larger(up, (int)bits_of(x));
        down = larger(down, (int)(bits_of(x) ^ SIGN));
    }
    up = warp_largest(up);
    down = warp_largest(down);
    const uint32_t scale = delta_scale(bits, up, down);
    const float inverse = scale == 0 || scale == SCALE_NAN ? 0.0f : 1.0f / float_of(TAGC_BF16_WIDE(scale));
    uint8_t *codes =
        a->body + (size_t)delta_blocks(row) * 2 + (size_t)block * ((size_t)bits * (TAGC_DELTA_BLOCK / 8));
    const unsigned n_parts = 8u / (unsigned)bits,
                   n_bytes = DELTA_EACH / n_parts; /* elements of a byte, bytes of a lane */
    uint32_t bytes[DELTA_EACH] = {};
    TAGC_UNROLL
    for (unsigned i = 0; i < DELTA_EACH; i++) {
        const uint32_t code = delta_code(difference[i], inverse, 1 << (bits - 1));
        if (bits == 8)
            bytes[i] = code;
        else if (bits == 4)
            bytes[i % 4] |= code << i / 4 * 4;
        else
            bytes[i % 2] |= code << i / 2 * 2;
    }
    TAGC_UNROLL
    for (unsigned i = 0; i < DELTA_EACH; i++)
        if (i < n_bytes) codes[i * LANES + lane_of()] = (uint8_t)bytes[i];
    if (lane_of() != 0) return;
    a->body[2 * (size_t)block] = (uint8_t)scale;
    a->body[2 * (size_t)block + 1] = (uint8_t)(scale >> 8);
    if (scale == SCALE_NAN) atomicOr(row->result, 1);
}

/* Adds to a replica and rounds. */
__device__ __forceinline__ void delta_apply_block(const delta_row *row, uint32_t block) {
    const tagc_delta_row *a = &row->arrays;
    const int bits = a->bits;
    const uint8_t *codes =
        a->body + (size_t)delta_blocks(row) * 2 + (size_t)block * ((size_t)bits * (TAGC_DELTA_BLOCK / 8));
    const float scale = float_of(load16(a->body + 2 * (size_t)block) << 16);
    const size_t at = (size_t)block * TAGC_DELTA_BLOCK + lane_of();
    const unsigned n_bytes = DELTA_EACH * (unsigned)bits / 8;
    TAGC_UNROLL
    for (unsigned i = 0; i < DELTA_EACH; i++) {
        const uint32_t byte = codes[i % n_bytes * LANES + lane_of()];
        const int code = (int)(byte >> i / n_bytes * (unsigned)bits & ((1u << bits) - 1)) - (1 << (bits - 1));
        const float change = (float)code * scale;
        const size_t j = at + i * LANES;
        if (j >= a->n) continue;
        const float sum = float_of(TAGC_BF16_WIDE(a->out[j])) + change;
        a->out[j] = (uint16_t)TAGC_BF16_NEAREST(bits_of(sum));
    }
}

/* A thread per row. */
static __global__ void __launch_bounds__(THREADS) clear_deltas(const delta_row *rows, unsigned n_rows) {
    const unsigned i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n_rows) *rows[i].result = 0;
}

/* A warp per block of values. */
static __global__ void __launch_bounds__(THREADS) run_deltas(work_of<delta_row> work, int kind) {
    const delta_row *row = row_at<&delta_row::first_block>(&work, blockIdx.x);
    const uint32_t block = (blockIdx.x - row->first_block) * WARPS + warp_of();
    if (block >= delta_blocks(row)) return;
    if (kind == TAGC_DELTA_ENCODE)
        delta_encode_block(row, block);
    else
        delta_apply_block(row, block);
}

} // namespace tagc_cuda

#endif
