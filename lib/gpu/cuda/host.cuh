/* The host's side of batches: tables at equal offsets in the image here and on the device, copies, errors. */
#ifndef TAGC_GPU_CUDA_HOST_CUH
#define TAGC_GPU_CUDA_HOST_CUH

#include "gpu/cuda/device.cuh"
extern "C" {
#include "core/memory.h"
#include "core/status.h"
#include "gpu/maker.h"
}

namespace tagc_cuda {

/* An array that the host fills and kernels read: its address here and on the device. */
template <typename T> struct table {
    T *host;
    T *device;
    size_t n;
};

/* Takes the next n elements of the image, whose copy starts where the arena does. image: NULL while measuring. */
template <typename T> void take_table(char *image, tagc_arena *arena, table<T> *t, size_t n) {
    size_t at = arena->n_bytes;
    t->device = static_cast<T *>(tagc_arena_take(arena, n, sizeof(T)));
    t->n = n;
    t->host = image ? reinterpret_cast<T *>(image + at) : nullptr;
}

inline uint32_t parts_of(size_t n, size_t part) { /* at least one block, also for a row without elements */
    return n ? (uint32_t)((n + part - 1) / part) : 1;
}

#ifdef TAGC_CUDA_HARNESS
inline tagc_status copy_to_device(void *to, const void *from, size_t n_bytes, cudaStream_t) {
    memcpy(to, from, n_bytes);
    return TAGC_OK;
}
inline tagc_status check_launches(void) {
    return TAGC_OK;
}
template <typename Kernel> tagc_status load_kernel(Kernel *) {
    return TAGC_OK;
}
#else
inline tagc_status check_cuda(cudaError_t code, const char *what) {
    if (code != cudaSuccess)
        return tagc_fail(TAGC_ERR_DEVICE, "CUDA: %s: %s", what, cudaGetErrorString(code));
    return TAGC_OK;
}
inline tagc_status copy_to_device(void *to, const void *from, size_t n_bytes, cudaStream_t stream) {
    return check_cuda(cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyHostToDevice, stream),
                      "a copy of a batch's tables to the device");
}
inline tagc_status check_launches(void) {
    return check_cuda(cudaGetLastError(), "launches of a batch");
}
/* Asking for a kernel's attributes loads it. */
template <typename Kernel> tagc_status load_kernel(Kernel *kernel) {
    cudaFuncAttributes attributes;
    return check_cuda(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
}
#endif

/* Deltas: delta.cu. */
extern const tagc_delta_maker cuda_deltas;
tagc_status cuda_delta_prepare(void);

/* Frames: frames.cu. */
extern const tagc_frames_maker cuda_frames;
tagc_status cuda_frames_prepare(void);

} // namespace tagc_cuda

#endif
