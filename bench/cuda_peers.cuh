/* What others do where our codec selects and encodes, in sweeps: CUB's radix sort and top-k of the magnitudes of 162 M values, and
 * LHC (lhc.cuh), which is given values that are sparse already. */
#ifndef BENCH_CUDA_PEERS_CUH
#define BENCH_CUDA_PEERS_CUH

#include "cuda_measure.cuh"
#include "lhc.cuh"

#include <cub/device/device_radix_sort.cuh>
#if __has_include(<cub/device/device_topk.cuh>)
#include <cub/device/device_topk.cuh>
#include <cuda/iterator>
#include <cuda/stream_ref>
#define BENCH_HAS_TOPK 1
#else
#define BENCH_HAS_TOPK 0
#endif

static __global__ void magnitudes(const float *x, uint32_t *to, size_t n) {
    const size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        to[i] = __float_as_uint(x[i]) & 0x7fffffffu;
}

/* Zeroes all but one in so many, at random places that depend on the index alone. */
static __global__ void thin_out(float *x, size_t n, double sparsity) {
    const size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        uint64_t z = (i + 7) * 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        if ((double)(z >> 11) < sparsity * 9007199254740992.0) x[i] = 0;
    }
}

static double sort_seconds(cudaStream_t stream, const uint32_t *from, uint32_t *to, size_t n) {
    size_t n_bytes = 0;
    check(cub::DeviceRadixSort::SortKeysDescending(nullptr, n_bytes, from, to, n, 0, 32, stream),
          "CUB's sort");
    char *work = device_array<char>(n_bytes);
    double s = seconds_of(stream, [&] {
        check(cub::DeviceRadixSort::SortKeysDescending(work, n_bytes, from, to, n, 0, 32, stream),
              "CUB's sort");
    });
    check(cudaFree(work), "memory");
    return s;
}

#if BENCH_HAS_TOPK
/* The k largest and their positions, in no order. */
static double topk_seconds(cudaStream_t stream, const uint32_t *from, size_t n, size_t k) {
    auto env = cuda::std::execution::env{
        cuda::stream_ref{stream}, cuda::execution::require(cuda::execution::determinism::not_guaranteed,
                                                           cuda::execution::output_ordering::unsorted)};
    uint32_t *keys = device_array<uint32_t>(k), *positions = device_array<uint32_t>(k);
    char *work = nullptr;
    size_t n_bytes = 0;
    auto go = [&] {
        check(cub::DeviceTopK::MaxPairs(work, n_bytes, from, keys, cuda::counting_iterator<uint32_t>(0),
                                        positions, (uint32_t)n, (uint32_t)k, env),
              "CUB's top-k");
    };
    go(); /* says how much memory it needs */
    work = device_array<char>(n_bytes);
    double s = seconds_of(stream, go);
    check(cudaFree(work), "memory");
    check(cudaFree(keys), "memory");
    check(cudaFree(positions), "memory");
    return s;
}
#endif

struct lhc_times {
    double encode, decode;
    uint32_t n_rounds, n_kept, n_estimated;
};

static __global__ void count_nonzero(const float *x, size_t n, uint32_t *count) {
    const size_t step = (size_t)gridDim.x * blockDim.x;
    uint32_t mine = 0;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) mine += x[i] != 0;
    atomicAdd(count, mine);
}

/* Of one rank: encode is the index and the sketch, decode peeling and estimation. sparse (n) is kept; x (n): room. */
static lhc_times lhc_seconds(cudaStream_t stream, const float *sparse, float *x, size_t n, unsigned ratio) {
    using namespace lhc;
    const uint32_t n_rows = (uint32_t)(n / COLUMNS), n_sketch_rows = (n_rows + ratio - 1) / ratio;
    const size_t n_cells = (size_t)n_sketch_rows * COLUMNS, n_words = counter_words(n_sketch_rows);
    uint8_t *index = device_array<uint8_t>(index_bytes(n));
    float *sketch = device_array<float>(n_cells);
    uint32_t *counters = device_array<uint32_t>(n_words), *count = device_array<uint32_t>(1), found;
    lhc_times t = {};
    auto restore = [&] {
        check(cudaMemcpyAsync(x, sparse, n * sizeof(float), cudaMemcpyDeviceToDevice, stream), "copy");
    };
    auto encode = [&] {
        check(cudaMemsetAsync(sketch, 0, n_cells * sizeof(float), stream), "sketch");
        check(cudaMemsetAsync(counters, 0, n_words * sizeof(uint32_t), stream), "counters");
        make_index<<<(unsigned)((n / 2 + THREADS - 1) / THREADS), THREADS, 0, stream>>>(x, index, n / 2);
        mark<<<(unsigned)((n + THREADS - 1) / THREADS), THREADS, 0, stream>>>(x, index, n);
        add_rows<<<n_rows, THREADS, 0, stream>>>(x, sketch, counters, n_sketch_rows);
    };
    auto decode = [&] {
        t.n_rounds = 0;
        do {
            check(cudaMemsetAsync(count, 0, sizeof *count, stream), "count");
            peel<<<n_rows, THREADS, 0, stream>>>(x, sketch, counters, n_sketch_rows, count);
            check(cudaMemcpyAsync(&found, count, sizeof found, cudaMemcpyDeviceToHost, stream), "count");
            check(cudaStreamSynchronize(stream), "a round of peeling");
            t.n_rounds++;
        } while (found > 0);
        estimate<<<n_rows, THREADS, 0, stream>>>(x, sketch, n_sketch_rows, count);
    };
    t.encode = seconds_of(stream, encode, restore);
    t.decode = seconds_of(stream, decode, [&] { restore(), encode(); });
    check(cudaMemcpy(&t.n_estimated, count, sizeof found, cudaMemcpyDeviceToHost), "count");
    check(cudaMemset(count, 0, sizeof *count), "count");
    count_nonzero<<<1024, 256, 0, stream>>>(sparse, n, count);
    check(cudaMemcpyAsync(&t.n_kept, count, sizeof found, cudaMemcpyDeviceToHost, stream), "count");
    check(cudaStreamSynchronize(stream), "count");
    check(cudaFree(index), "memory");
    check(cudaFree(sketch), "memory");
    check(cudaFree(counters), "memory");
    check(cudaFree(count), "memory");
    return t;
}

/* Prints rows of the bench's table, and members of its JSON. x is kept; y and z (n each): room. n: a multiple of 1024. */
static void measure_peers(cudaStream_t stream, const float *x, float *y, float *z, size_t n, double sweep,
                          FILE *json) {
    uint32_t *keys = reinterpret_cast<uint32_t *>(y);
    magnitudes<<<1024, 256, 0, stream>>>(x, keys, n);
    const double sorted = sort_seconds(stream, keys, reinterpret_cast<uint32_t *>(z), n);
    printf("%-28s %9.2f\n", "CUB radix sort", sorted / sweep);
    if (json) fprintf(json, ", \"cub_sort\": %.4g", sorted / sweep);
    for (double sparsity : {0.95, 0.99}) {
        const int percent = (int)(sparsity * 100 + 0.5);
#if BENCH_HAS_TOPK
        const double s = topk_seconds(stream, keys, n, (size_t)((1 - sparsity) * (double)n)) / sweep;
        printf("CUB top-k, %d %% zeros        %9.2f\n", percent, s);
        if (json) fprintf(json, ", \"cub_topk_%d\": %.4g", percent, s);
#else
        printf("CUB top-k, %d %% zeros        not in this CUDA: cub::DeviceTopK came with 13.1\n", percent);
        if (json) fprintf(json, ", \"cub_topk_%d\": null", percent);
#endif
    }
    for (double sparsity : {0.95, 0.99}) {
        const int percent = (int)(sparsity * 100 + 0.5);
        check(cudaMemcpyAsync(y, x, n * sizeof(float), cudaMemcpyDeviceToDevice, stream), "copy");
        thin_out<<<1024, 256, 0, stream>>>(y, n, sparsity);
        const lhc_times t = lhc_seconds(stream, y, z, n, 10);
        const double share = t.n_kept ? (double)t.n_estimated / t.n_kept : 0;
        printf("LHC at 10x, %d %% zeros       %9.2f %9.2f %9.2f  nothing selected, %u rounds, %.2f %% "
               "estimated\n",
               percent, t.encode / sweep, t.decode / sweep, (t.encode + t.decode) / sweep, t.n_rounds,
               share * 100);
        if (json)
            fprintf(json,
                    ", \"lhc_10x_%d\": {\"encode\": %.4g, \"decode\": %.4g, \"n_rounds\": %u, \"estimated\": "
                    "%.4g}",
                    percent, t.encode / sweep, t.decode / sweep, t.n_rounds, share);
    }
    check(cudaGetLastError(), "peers");
}

#endif
