/* What the bench of the kernels and its peers measure with. */
#ifndef BENCH_CUDA_MEASURE_CUH
#define BENCH_CUDA_MEASURE_CUH

#include <algorithm>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <vector>

static void check(cudaError_t code, const char *what) {
    if (code == cudaSuccess) return;
    fprintf(stderr, "bench_cuda: %s: %s\n", what, cudaGetErrorString(code));
    exit(1);
}

template <typename T> static T *device_array(size_t n) {
    void *memory;
    check(cudaMalloc(&memory, (n ? n : 1) * sizeof(T)), "memory of the device");
    return static_cast<T *>(memory);
}

/* Heavy tails: the product of two sums of uniform numbers, of which each depends on its index and the seed alone. */
static __global__ void fill(float *x, size_t n, uint64_t seed) {
    const size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        uint64_t z = (i + 1) * 0x9e3779b97f4a7c15u + seed;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        float a = (float)(z & 0xffff) + (float)(z >> 16 & 0xffff) - 65535.0f;
        float b = (float)(z >> 32 & 0xffff) + (float)(z >> 48) - 65535.0f;
        x[i] = a * b * 1e-12f;
    }
}

/* Median of the seconds of 15 runs, after three to warm up. before: what each needs first, which is not counted. */
template <typename work, typename preparation>
static double seconds_of(cudaStream_t stream, work go, preparation before) {
    cudaEvent_t begin, end;
    std::vector<double> all;
    check(cudaEventCreate(&begin), "event");
    check(cudaEventCreate(&end), "event");
    for (int run = -3; run < 15; run++) {
        float ms;
        before();
        check(cudaEventRecord(begin, stream), "event");
        go();
        check(cudaEventRecord(end, stream), "event");
        check(cudaEventSynchronize(end), "run");
        check(cudaEventElapsedTime(&ms, begin, end), "event");
        if (run >= 0) all.push_back(ms / 1e3);
    }
    std::sort(all.begin(), all.end());
    return all[all.size() / 2];
}

template <typename work> static double seconds_of(cudaStream_t stream, work go) {
    return seconds_of(stream, go, [] {});
}

#endif
