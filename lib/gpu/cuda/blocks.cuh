/* Code blocks: all values in order. A block of threads takes a run of 4096 elements, a whole number of blocks of values and of
 * the residual. It encodes them, or adds those of all bodies of a row. */
#ifndef TAGC_GPU_CUDA_BLOCKS_CUH
#define TAGC_GPU_CUDA_BLOCKS_CUH

#include "gpu/cuda/bodies.cuh"

namespace tagc_cuda {

/* Where element i of a run lies in shared memory: two blocks of 128 values, which a warp takes side by side, in other banks. */
__device__ __forceinline__ constexpr unsigned slot(unsigned i) {
    return i + i / 128 * HALF;
}

struct run_shared {
    alignas(16) float acc[slot(RUN)]; /* then what is lost of it */
    unsigned is_last;
};

__device__ __forceinline__ void finish_row(const blocks_row *row) {
    tagc_batch_result result = {};
    result.encoded.nonfinite = *row->nonfinite;
    if (!result.encoded.nonfinite) {
        result.encoded.n_sent = row->n;
        result.encoded.n_bytes = row->n_bytes;
    }
    *row->result = result;
}

/* Values with scales. The half warps take blocks in turn; all lanes of a warp make the same number of turns. */
__device__ __forceinline__ void encode_run(const blocks_row *row, run_shared *s, size_t first, uint32_t n) {
    const value_format *f = &row->format;
    const uint32_t block = (uint32_t)f->block, n_blocks = (n + block - 1) / block;
    uint8_t *packed = row->body + scales_bytes(f, row->n);
    for (uint32_t pair = warp_of(); pair * 2 < n_blocks; pair += WARPS) {
        const uint32_t lower = pair * 2 * block, index = pair * 2 + lane_of() / HALF, begin = index * block;
        const uint32_t n_here = begin < n ? smaller(n - begin, block) : 0;
        const uint32_t n_rounds = (smaller(n - lower, block) + HALF - 1) / HALF;
        auto get = [&](unsigned i) { return s->acc[slot(begin + i)]; };
        value_block<decltype(get)> here = {n_here, n_rounds, get};
        const size_t at = first + begin;
        encode_block(f, &here, at, row->body + 2 * (at >> f->shift),
                     packed + at * (size_t)bits_per_value(f->values) / 8,
                     [&](unsigned i, float, float error) { s->acc[slot(begin + i)] = error; });
    }
}

__device__ __forceinline__ void encode_plain(const blocks_row *row, run_shared *s, size_t first, uint32_t n) {
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        const float x = s->acc[slot(i)];
        if (row->format.values == TAGC_FORMAT_FP32) {
            store32(row->body + 4 * (first + i), bits_of(x));
            s->acc[slot(i)] = -0.0f;
        } else {
            const float decoded = float_of(half_of(x) << 16);
            store16(row->body + 2 * (first + i), half_of(x));
            s->acc[slot(i)] = lost(x, decoded);
        }
    }
}

/* Writes what is lost of a run to the residual, whose blocks it has whole. */
__device__ __forceinline__ void write_losses(const blocks_row *row, const run_shared *s, size_t first,
                                             uint32_t n) {
    const acc_arrays a = row->acc;
    const int aligned = is_aligned(&a);
    for (uint32_t at = warp_of() * TAGC_RESIDUAL_BLOCK; at < n; at += WARPS * TAGC_RESIDUAL_BLOCK) {
        const float4 quad = reinterpret_cast<const float4 *>(s->acc + slot(at))[lane_of()];
        const float values[QUAD] = {quad.x, quad.y, quad.z, quad.w};
        write_residual(&a, first + at + lane_of() * QUAD, aligned, values);
    }
}

/* A thread per row. */
static __global__ void __launch_bounds__(THREADS) clear_blocks(const blocks_row *rows, unsigned n_rows) {
    const unsigned i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= n_rows) return;
    *rows[i].ticket = 0;
    *rows[i].nonfinite = 0;
}

/* A block per run. The bounds allow 64 registers: with fewer, as it likes for some devices, ptxas spills. */
static __global__ void __launch_bounds__(THREADS, 4) encode_blocks(work_of<blocks_row> work) {
    TAGC_SHARED(run_shared, shared);
    run_shared *s = &shared;
    const blocks_row *row = row_at<&blocks_row::first_run>(&work, blockIdx.x);
    const size_t first = (size_t)(blockIdx.x - row->first_run) * RUN;
    const uint32_t n = first < row->n ? (uint32_t)smaller<size_t>(row->n - first, RUN) : 0;
    const uint32_t n_whole = (n + TAGC_RESIDUAL_BLOCK - 1) / TAGC_RESIDUAL_BLOCK * TAGC_RESIDUAL_BLOCK;
    const acc_arrays a = row->acc;
    int nonfinite = 0;
    for (uint32_t i = threadIdx.x; i < n_whole; i += THREADS) {
        const float x = i < n ? acc_at(&a, first + i) : 0.0f;
        s->acc[slot(i)] = x;
        nonfinite |= magnitude(x) >= INF_BITS;
    }
    __syncthreads();
    if (has_scales(row->format.values))
        encode_run(row, s, first, n);
    else
        encode_plain(row, s, first, n);
    __syncthreads();
    if (a.residual_out) write_losses(row, s, first, n);
    if (nonfinite) atomicOr(row->nonfinite, 1);
    if (is_last_block(row->ticket, row->n_runs, &s->is_last) && threadIdx.x == 0) finish_row(row);
}

/* ---- add ---- */

/* A block per run. */
static __global__ void __launch_bounds__(THREADS) add_blocks(work_of<sums_row> work, const body_row *bodies) {
    const sums_row *row = row_at<&sums_row::first_chunk>(&work, blockIdx.x);
    const size_t first = (size_t)(blockIdx.x - row->first_chunk) * RUN;
    if (row->is_sparse || first >= row->n) return;
    const uint32_t n = (uint32_t)smaller<size_t>(row->n - first, RUN), n_bodies = bodies_of(row);
    int nonfinite = 0;
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        float sum = row->adds ? row->sums[first + i] : 0.0f;
        nonfinite |= magnitude(sum) >= INF_BITS;
        for (uint32_t b = 0; b < n_bodies; b++) {
            const body_row *body = &bodies[row->first_body + b];
            add_to(&sum, row->scale,
                   body->is_plain ? plain_at(row, body, first + i)
                                  : value_at(&row->format, body->bytes, first + i, row->n),
                   &nonfinite);
        }
        row->sums[first + i] = sum;
    }
    if (nonfinite) atomicOr(&row->result->nonfinite, 1);
}

} // namespace tagc_cuda

#endif
