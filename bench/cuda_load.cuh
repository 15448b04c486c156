/* Kernels that occupy a device while something else is measured there: in place of NCCL's, which spin, and of a model's products. */
#ifndef BENCH_CUDA_LOAD_CUH
#define BENCH_CUDA_LOAD_CUH

#include <cuda_runtime.h>
#include <stdint.h>

static __device__ __forceinline__ uint64_t device_ns() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

/* Until the flag, if there is one, is at least `value`, or the time is over. */
static __global__ void spin(const volatile uint32_t *flag, uint32_t value, uint64_t most_ns) {
    const uint64_t begin = device_ns();
    while (device_ns() - begin < most_ns && !(flag && (int32_t)(*flag - value) >= 0)) {
    }
}

/* c = a b, in squares of n: every multiprocessor computes, and reads and writes the device's memory. (n / 16, n / 16) blocks of (16, 16). */
static __global__ void multiply(const float *a, const float *b, float *c, unsigned n) {
    __shared__ float left[16][16], right[16][17];
    const unsigned row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
    float sum = 0;
    for (unsigned at = 0; at < n; at += 16) {
        left[threadIdx.y][threadIdx.x] = a[(size_t)row * n + at + threadIdx.x];
        right[threadIdx.y][threadIdx.x] = b[(size_t)(at + threadIdx.y) * n + column];
        __syncthreads();
        for (unsigned i = 0; i < 16; i++) sum += left[threadIdx.y][i] * right[i][threadIdx.x];
        __syncthreads();
    }
    c[(size_t)row * n + column] = sum;
}

#endif
