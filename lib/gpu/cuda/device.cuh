/* The base of all kernels. nvcc compiles them for a device. Tests compile the same sources as C++ with
 * tests/gpu/cuda/harness.h, which executes them.
 *
 * Rules for both: TAGC_LAUNCH launches kernels. A kernel has one struct of shared memory, at most 48 KiB, declared with
 * TAGC_SHARED. A thread's frame is small: for more than 1 KiB a launch waits until the device is idle (scripts/cuda_architectures.sh
 * counts both). Blocks learn only from take_ticket that others are done. Build with -fmad=false: every operation is then one
 * IEEE operation, as on the processor. */
#ifndef TAGC_GPU_CUDA_DEVICE_CUH
#define TAGC_GPU_CUDA_DEVICE_CUH

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef TAGC_CUDA_THREADS
#define TAGC_CUDA_THREADS 256 /* per block; tests use fewer, too */
#endif

#ifdef TAGC_CUDA_HARNESS
#include "harness.h"
#define TAGC_UNROLL
#define TAGC_SHARED(type, name) type &name = *static_cast<type *>(harness::shared(sizeof(type)))
#define TAGC_LAUNCH(kernel, shared_type, n_blocks, stream, ...)                                              \
    do {                                                                                                     \
        (void)(stream);                                                                                      \
        if ((n_blocks) > 0)                                                                                  \
            HARNESS_LAUNCH(kernel, (unsigned)(n_blocks), TAGC_CUDA_THREADS, sizeof(shared_type),             \
                           __VA_ARGS__);                                                                     \
    } while (0)
#else
#include <cuda_runtime.h>
#define TAGC_UNROLL _Pragma("unroll")
#define TAGC_SHARED(type, name) __shared__ type name
#define TAGC_LAUNCH(kernel, shared_type, n_blocks, stream, ...)                                              \
    do {                                                                                                     \
        if ((n_blocks) > 0) kernel<<<(unsigned)(n_blocks), TAGC_CUDA_THREADS, 0, stream>>>(__VA_ARGS__);     \
    } while (0)
#endif

namespace tagc_cuda {

constexpr unsigned THREADS = TAGC_CUDA_THREADS, LANES = 32, WARPS = THREADS / LANES, ALL = 0xffffffffu;
constexpr uint32_t INF_BITS = 0x7f800000u, SIGN = 0x80000000u;
static_assert(THREADS % LANES == 0 && THREADS >= 64 && THREADS <= 1024, "whole warps");

struct no_shared {};

__device__ __forceinline__ unsigned lane_of() {
    return threadIdx.x % LANES;
}
__device__ __forceinline__ unsigned warp_of() {
    return threadIdx.x / LANES;
}

/* Takes the next number of a counter. All that a thread wrote before it took its ticket, and all that its block wrote before
 * a preceding barrier, is visible to takers of later tickets. */
__device__ __forceinline__ unsigned take_ticket(unsigned *counter) {
#ifdef TAGC_CUDA_HARNESS
    return harness_add_ordered(counter, 1);
#else
    __threadfence();
    unsigned ticket = atomicAdd(counter, 1u);
    __threadfence();
    return ticket;
#endif
}

/* Returns 1 in all threads of the last of n blocks to call it, else 0. flag: in shared memory. */
__device__ __forceinline__ int is_last_block(unsigned *counter, unsigned n, unsigned *flag) {
    __syncthreads();
    if (threadIdx.x == 0) *flag = take_ticket(counter) == n - 1;
    __syncthreads();
    return *flag != 0;
}

/* ---- numbers ---- */

template <typename T> __host__ __device__ __forceinline__ T smaller(T a, T b) {
    return a < b ? a : b;
}
template <typename T> __host__ __device__ __forceinline__ T larger(T a, T b) {
    return a > b ? a : b;
}
__device__ __forceinline__ uint32_t bits_of(float x) {
    return __float_as_uint(x);
}
__device__ __forceinline__ float float_of(uint32_t bits) {
    return __uint_as_float(bits);
}
__device__ __forceinline__ uint32_t magnitude(float x) {
    return bits_of(x) & ~SIGN;
}

/* ---- bytes: little-endian, at any address ---- */

__device__ __forceinline__ uint32_t load16(const uint8_t *bytes) {
    return bytes[0] | (uint32_t)bytes[1] << 8;
}
__device__ __forceinline__ uint32_t load32(const uint8_t *bytes) {
    return load16(bytes) | load16(bytes + 2) << 16;
}
__device__ __forceinline__ void store16(uint8_t *bytes, uint32_t value) {
    bytes[0] = (uint8_t)value;
    bytes[1] = (uint8_t)(value >> 8);
}
__device__ __forceinline__ void store32(uint8_t *bytes, uint32_t value) {
    store16(bytes, value);
    store16(bytes + 2, value >> 16);
}

/* ---- warps and blocks: called by all of their threads ---- */

template <typename T> __device__ __forceinline__ T warp_sum(T value) {
    for (int by = LANES / 2; by > 0; by /= 2) value += __shfl_xor_sync(ALL, value, by);
    return value;
}

/* The sum over the lanes before this one. */
template <typename T> __device__ __forceinline__ T warp_before(T value, T *total) {
    T sum = value;
    for (unsigned by = 1; by < LANES; by *= 2) {
        T other = __shfl_up_sync(ALL, sum, by);
        if (lane_of() >= by) sum += other;
    }
    *total = __shfl_sync(ALL, sum, LANES - 1);
    return sum - value;
}

template <typename T> struct scan_shared { T of_warp[WARPS]; };

/* The sum over the threads before this one; it wraps as T does. */
template <typename T> __device__ __forceinline__ T block_before(scan_shared<T> *s, T value, T *total) {
    T of_warp, before = warp_before(value, &of_warp), sum = 0;
    if (lane_of() == 0) s->of_warp[warp_of()] = of_warp;
    __syncthreads();
    for (unsigned w = 0; w < WARPS; w++) {
        if (w == warp_of()) before += sum;
        sum += s->of_warp[w];
    }
    __syncthreads();
    *total = sum;
    return before;
}

template <typename T> __device__ __forceinline__ T block_sum(scan_shared<T> *s, T value) {
    T sum = 0;
    value = warp_sum(value);
    if (lane_of() == 0) s->of_warp[warp_of()] = value;
    __syncthreads();
    for (unsigned w = 0; w < WARPS; w++) sum += s->of_warp[w];
    __syncthreads();
    return sum;
}

/* The largest value of the threads before this one, 0 if there is none. */
__device__ __forceinline__ uint32_t block_largest_before(scan_shared<uint32_t> *s, uint32_t value) {
    uint32_t sum = value;
    for (unsigned by = 1; by < LANES; by *= 2) {
        uint32_t other = __shfl_up_sync(ALL, sum, by);
        if (lane_of() >= by) sum = larger(sum, other);
    }
    uint32_t before = __shfl_up_sync(ALL, sum, 1u);
    if (lane_of() == 0) before = 0;
    if (lane_of() == LANES - 1) s->of_warp[warp_of()] = sum;
    __syncthreads();
    for (unsigned w = 0; w < warp_of(); w++) before = larger(before, s->of_warp[w]);
    __syncthreads();
    return before;
}

} // namespace tagc_cuda

#endif
