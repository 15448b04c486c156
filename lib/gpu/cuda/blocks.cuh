/* Code blocks: all values in order. A block of threads takes a run of 4096 elements, a whole number of blocks of values. It
 * encodes them, or adds those of all bodies of a row. */
#ifndef TAGC_GPU_CUDA_BLOCKS_CUH
#define TAGC_GPU_CUDA_BLOCKS_CUH

#include "gpu/cuda/bodies.cuh"

namespace tagc_cuda {

constexpr unsigned RUN = 4096;
constexpr uint32_t TRANSFORM_LIMIT =
    0x71800000u; /* 2^100: a transformed block with larger values is sent as zeros */

/* Hadamard, orthonormal, of each whole block in x (n): sums and differences of elements 1, 2, 4, ... apart. One block. */
__device__ __forceinline__ void transform_run(float *x, uint32_t n, uint32_t block) {
    const uint32_t n_pairs = n / block * block / 2;
    const float norm = 1.0f / sqrtf((float)block);
    for (uint32_t half = 1; half < block; half *= 2) {
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < n_pairs; i += THREADS) {
            const uint32_t at = i / half * half * 2 + i % half;
            float a = x[at], b = x[at + half], sum = a + b, difference = a - b;
            if (2 * half == block) sum *= norm, difference *= norm;
            x[at] = sum;
            x[at + half] = difference;
        }
    }
    __syncthreads();
}

struct run_shared {
    float acc[RUN];
    float rotated[RUN];
    uint8_t is_too_large[RUN / 16]; /* blocks of values */
    unsigned is_last;
};

__device__ __forceinline__ void finish_row(const blocks_row *row) {
    tagc_batch_result result = {};
    result.encoded.nonfinite = *row->nonfinite;
    if (!result.encoded.nonfinite) {
        result.encoded.n_kept = row->n;
        result.encoded.n_bytes = row->n_bytes;
    }
    *row->result = result;
}

/* Element i of the row's run at `first` is done. */
__device__ __forceinline__ void settle_run(const blocks_row *row, size_t at, float decoded, float error,
                                           int *nonfinite) {
    if (!row->sums) {
        if (row->residual_out) row->residual_out[at] = error;
        return;
    }
    row->sums[at] = 0.0f + decoded;
    if (!row->error) return;
    float sum = row->error[at] + row->unscale * error;
    row->error[at] = sum;
    *nonfinite |= magnitude(sum) >= INF_BITS;
}

/* Values with scales. The half warps take blocks in turn; all lanes of a warp make the same number of turns. */
__device__ __forceinline__ void encode_run(const blocks_row *row, run_shared *s, size_t first, uint32_t n,
                                           int *nonfinite) {
    const value_format *f = &row->format;
    const uint32_t block = (uint32_t)f->block, n_blocks = (n + block - 1) / block;
    uint8_t *packed = row->body + scales_bytes(f, row->n);
    for (uint32_t pair = warp_of(); pair * 2 < n_blocks; pair += WARPS) {
        const uint32_t lower = pair * 2 * block, index = pair * 2 + lane_of() / HALF, begin = index * block;
        const uint32_t n_here = begin < n ? smaller(n - begin, block) : 0;
        const uint32_t n_rounds = (smaller(n - lower, block) + HALF - 1) / HALF;
        const int is_rotated = f->rotate && n_here == block;
        uint32_t most = 0;
        if (f->rotate)
            for (unsigned r = 0; r < n_rounds; r++) {
                const unsigned i = r * HALF + threadIdx.x % HALF;
                if (i < n_here) most = larger(most, magnitude(s->acc[begin + i]));
            }
        const int is_too_large = f->rotate && half_largest(most) >= TRANSFORM_LIMIT;
        if (lane_of() % HALF == 0 && n_here) s->is_too_large[index] = (uint8_t)is_too_large;
        const float *from = is_rotated ? s->rotated : s->acc;
        /* a block that is too large gets a scale of zero, as a block of zeros does */
        auto get = [&](unsigned i) { return is_too_large ? 0.0f : from[begin + i]; };
        value_block<decltype(get)> here = {n_here, n_rounds, get};
        const size_t at = first + begin;
        encode_block(f, &here, row->body + 2 * (at >> f->shift),
                     packed + at * (size_t)bits_per_value(f->values) / 8,
                     [&](unsigned i, float decoded, float error) {
                         if (is_too_large)
                             settle_run(row, at + i, 0, zero_as_negative(s->acc[begin + i]), nonfinite);
                         else if (is_rotated)
                             s->rotated[begin + i] = decoded; /* settle_rotated transforms it back */
                         else
                             settle_run(row, at + i, decoded, error, nonfinite);
                     });
    }
}

/* Transforms decoded values back, and settles them: the loss is known only then. */
__device__ __forceinline__ void settle_rotated(const blocks_row *row, run_shared *s, size_t first, uint32_t n,
                                               int *nonfinite) {
    const uint32_t block = (uint32_t)row->format.block, n_whole = n / block * block;
    transform_run(s->rotated, n, block);
    for (uint32_t i = threadIdx.x; i < n_whole; i += THREADS) {
        if (s->is_too_large[i >> row->format.shift]) continue;
        const float decoded = s->rotated[i];
        settle_run(row, first + i, decoded, zero_as_negative(s->acc[i] - decoded), nonfinite);
    }
}

__device__ __forceinline__ void encode_plain(const blocks_row *row, const run_shared *s, size_t first,
                                             uint32_t n, int *nonfinite) {
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        const float x = s->acc[i];
        if (row->format.values == TAGC_FORMAT_FP32) {
            store32(row->body + 4 * (first + i), bits_of(x));
            settle_run(row, first + i, x, -0.0f, nonfinite);
        } else {
            const float decoded = float_of(half_of(x) << 16);
            store16(row->body + 2 * (first + i), half_of(x));
            settle_run(row, first + i, decoded, lost(x, decoded), nonfinite);
        }
    }
}

/* A thread per row. */
static __global__ void __launch_bounds__(THREADS) clear_blocks(const blocks_row *rows, unsigned n_rows) {
    const unsigned i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= n_rows) return;
    *rows[i].ticket = 0;
    *rows[i].nonfinite = 0;
}

/* A block per run. */
static __global__ void __launch_bounds__(THREADS) encode_blocks(work_of<blocks_row> work) {
    TAGC_SHARED(run_shared, shared);
    run_shared *s = &shared;
    const blocks_row *row = &work.rows[work.row_of_block[blockIdx.x]];
    const size_t first = (size_t)(blockIdx.x - row->first_run) * RUN;
    const uint32_t n = first < row->n ? (uint32_t)smaller<size_t>(row->n - first, RUN) : 0;
    const float *from = row->sums ? row->sums : row->gradient;
    int nonfinite = 0;
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        float x = from[first + i];
        if (!row->sums && row->residual_in) x = x + row->residual_in[first + i];
        s->acc[i] = s->rotated[i] = x;
        nonfinite |= magnitude(x) >= INF_BITS;
    }
    __syncthreads();
    if (!has_scales(row->format.values)) {
        encode_plain(row, s, first, n, &nonfinite);
    } else {
        if (row->format.rotate) transform_run(s->rotated, n, (uint32_t)row->format.block);
        encode_run(row, s, first, n, &nonfinite);
        if (row->format.rotate) settle_rotated(row, s, first, n, &nonfinite);
    }
    if (nonfinite) atomicOr(row->nonfinite, 1);
    if (is_last_block(row->ticket, row->n_runs, &s->is_last) && threadIdx.x == 0) finish_row(row);
}

/* ---- add ---- */

struct add_run_shared {
    float values[RUN];
};

__device__ __forceinline__ void add_rotated(const sums_row *row, const body_row *bodies, float *values,
                                            size_t first, uint32_t n, int *nonfinite) {
    for (uint32_t b = 0; b < row->n_bodies; b++) {
        const uint8_t *bytes = bodies[row->first_body + b].bytes;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < n; i += THREADS)
            values[i] = value_at(&row->format, bytes, first + i, row->n);
        transform_run(values, n, (uint32_t)row->format.block);
        for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
            float sum = b || row->add ? row->sums[first + i] : 0.0f;
            add_to(&sum, row->scale, values[i], nonfinite);
            row->sums[first + i] = sum;
        }
    }
}

/* A block per run. */
static __global__ void __launch_bounds__(THREADS) add_blocks(work_of<sums_row> work, const body_row *bodies) {
    TAGC_SHARED(add_run_shared, shared);
    const sums_row *row = &work.rows[work.row_of_block[blockIdx.x]];
    const size_t first = (size_t)(blockIdx.x - row->first_chunk) * RUN;
    if (row->is_sparse || first >= row->n) return;
    const uint32_t n = (uint32_t)smaller<size_t>(row->n - first, RUN), n_bodies = bodies_of(row);
    int nonfinite = 0;
    if (row->format.rotate && n_bodies) {
        add_rotated(row, bodies, shared.values, first, n, &nonfinite);
    } else {
        for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
            float sum = row->add ? row->sums[first + i] : 0.0f;
            nonfinite |= magnitude(sum) >= INF_BITS;
            for (uint32_t b = 0; b < n_bodies; b++)
                add_to(&sum, row->scale,
                       value_at(&row->format, bodies[row->first_body + b].bytes, first + i, row->n),
                       &nonfinite);
            row->sums[first + i] = sum;
        }
    }
    if (nonfinite) atomicOr(&row->result->nonfinite, 1);
}

} // namespace tagc_cuda

#endif
