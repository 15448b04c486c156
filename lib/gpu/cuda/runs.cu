/* Runs of elements (gpu/maker.h): a gradient is packed by class, and sums are unpacked, in one launch for any number of runs.
 *
 *   copy    an element per thread and turn; a block finds its first run by halving, and goes on from there
 *   settle  undoes a step if it does not count; else returns at once
 *   spoil   fills a result with NaN where its exchange failed; else returns at once
 *   squares sums up the squares of a residual and of a gradient; always in the same order */
#include "gpu/cuda/host.cuh"
#include "gpu/cuda/residual.cuh"
extern "C" {
#include "codec/elements.h"
}

using namespace tagc_cuda;

namespace {

constexpr unsigned COPIED_EACH = 4096;   /* elements per block */
constexpr unsigned MOST_SPOILERS = 1024; /* blocks */
constexpr unsigned MOST_SETTLERS = 2048,
                   SETTLED_EACH = 8192; /* blocks at most; elements per block if there are few */

/* The last run that begins at or before element e of the list. */
__device__ __forceinline__ uint32_t run_of(const tagc_listed_run *runs, uint32_t n_runs, uint64_t e) {
    uint32_t low = 0, high = n_runs; /* low begins before e, high does not */
    while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        if (runs[middle].at <= e)
            low = middle;
        else
            high = middle;
    }
    return low;
}

__global__ void __launch_bounds__(THREADS)
    copy_runs(const tagc_listed_run *runs, uint32_t n_runs, uint64_t n, const void *from, int from_element,
              void *to, int to_element, float factor) {
    const uint64_t begin = (uint64_t)blockIdx.x * COPIED_EACH + threadIdx.x,
                   end = smaller<uint64_t>((uint64_t)(blockIdx.x + 1) * COPIED_EACH, n);
    if (begin >= end) return;
    uint32_t r = run_of(runs, n_runs, begin);
    for (uint64_t e = begin; e < end; e += THREADS) {
        while (r + 1 < n_runs && runs[r + 1].at <= e) r++;
        const uint64_t i = e - runs[r].at;
        const float value = tagc_element_read(from, from_element, runs[r].from + i);
        tagc_element_write(value * factor, to, to_element, runs[r].to + i);
    }
}

__global__ void __launch_bounds__(THREADS)
    settle_step(const int *is_void, const uint16_t *before, uint16_t *residual, size_t n_residual,
                float *output, size_t n_output) {
    if (!*is_void) return;
    const size_t first = (size_t)blockIdx.x * THREADS + threadIdx.x, every = (size_t)gridDim.x * THREADS;
    for (size_t i = first; i < n_residual; i += every) residual[i] = before[i];
    for (size_t i = first; i < n_output; i += every) output[i] = float_of(0x7fc00000u);
}

__global__ void __launch_bounds__(THREADS) spoil_array(const int *is_void, uint16_t *array, size_t n) {
    if (!*is_void) return;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += (size_t)gridDim.x * THREADS)
        array[i] = 0xffff;
}

static_assert((THREADS & (THREADS - 1)) == 0, "a block's sum is a tree");

struct squares_shared {
    double sums[THREADS];
};

/* The sum of all threads' values, in thread 0. */
__device__ __forceinline__ double sum_of_block(squares_shared *shared, double value) {
    __syncthreads();
    shared->sums[threadIdx.x] = value;
    for (unsigned by = THREADS / 2; by > 0; by /= 2) {
        __syncthreads();
        if (threadIdx.x < by) shared->sums[threadIdx.x] += shared->sums[threadIdx.x + by];
    }
    return shared->sums[threadIdx.x];
}

__global__ void __launch_bounds__(THREADS)
    sum_squares(const __grid_constant__ tagc_squared of, uint32_t n_exponent_bytes, double *squares) {
    TAGC_SHARED(squares_shared, shared);
    const size_t begin = (size_t)blockIdx.x * THREADS + threadIdx.x, by = (size_t)gridDim.x * THREADS;
    double residual = 0, gradient = 0;
    acc_arrays acc = {};
    acc.residual_format = of.format;
    acc.n_exponent_bytes = n_exponent_bytes;
    for (uint32_t row = 0; row < (of.residual ? of.n_rows : 0); row++) {
        acc.residual_in = static_cast<const char *>(of.residual) + row * of.row_bytes;
        for (size_t i = begin; i < of.n; i += by) {
            const double value = residual_at(&acc, i);
            residual += value * value;
        }
    }
    for (size_t i = begin; i < (of.gradient ? of.n_gradient : 0); i += by) {
        const double value = tagc_element_read(of.gradient, of.gradient_element, i);
        gradient += value * value;
    }
    residual = sum_of_block(&shared, residual);
    gradient = sum_of_block(&shared, gradient);
    if (threadIdx.x != 0) return;
    squares[blockIdx.x] = residual;
    squares[TAGC_N_SQUARES + blockIdx.x] = gradient;
}

tagc_status copy(const tagc_listed_run *runs, uint32_t n_runs, uint64_t n, const void *from, int from_element,
                 void *to, int to_element, float factor, void *stream) {
    cudaStream_t in = static_cast<cudaStream_t>(stream);
    if (n == 0) return TAGC_OK;
    TAGC_LAUNCH(copy_runs, no_shared, parts_of((size_t)n, COPIED_EACH), in, runs, n_runs, n, from,
                from_element, to, to_element, factor);
    return check_launches();
}

/* Every format of a residual has a whole number of halves. */
tagc_status settle(const int *is_void, const void *before, void *residual, size_t residual_bytes,
                   float *output, size_t n_output, void *stream) {
    cudaStream_t in = static_cast<cudaStream_t>(stream);
    const size_t n_residual = residual_bytes / sizeof(uint16_t);
    const unsigned n_blocks = smaller(parts_of(larger(n_residual, n_output), SETTLED_EACH), MOST_SETTLERS);
    TAGC_LAUNCH(settle_step, no_shared, n_blocks, in, is_void, static_cast<const uint16_t *>(before),
                static_cast<uint16_t *>(residual), n_residual, output, n_output);
    return check_launches();
}

tagc_status spoil(const int *is_void, void *array, size_t n_bytes, void *stream) {
    cudaStream_t in = static_cast<cudaStream_t>(stream);
    const size_t n = n_bytes / sizeof(uint16_t);
    TAGC_LAUNCH(spoil_array, no_shared, smaller(parts_of(n, COPIED_EACH), MOST_SPOILERS), in, is_void,
                static_cast<uint16_t *>(array), n);
    return check_launches();
}

tagc_status squares(const tagc_squared *of, double *squares, void *stream) {
    cudaStream_t in = static_cast<cudaStream_t>(stream);
    const uint32_t n_exponent_bytes = (uint32_t)tagc_residual_exponent_bytes(of->format, of->n);
    TAGC_LAUNCH(sum_squares, squares_shared, TAGC_N_SQUARES, in, *of, n_exponent_bytes, squares);
    return check_launches();
}

} // namespace

const tagc_runs_maker tagc_cuda::cuda_runs = {copy, settle, spoil, squares};

tagc_status tagc_cuda::cuda_runs_prepare(void) {
    TAGC_TRY(load_kernel(copy_runs));
    TAGC_TRY(load_kernel(sum_squares));
    TAGC_TRY(load_kernel(settle_step));
    return load_kernel(spoil_array);
}
