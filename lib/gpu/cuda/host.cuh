/* The host's side of batches: tables at equal offsets in the image here and on the device, and errors. */
#ifndef TAGC_GPU_CUDA_HOST_CUH
#define TAGC_GPU_CUDA_HOST_CUH

#include "gpu/cuda/rows.cuh"
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

/* n_blocks: of a grid in which every row has some. */
template <typename T> work_of<T> work_of_table(const table<T> &t, size_t n_blocks) {
    return {t.device, (unsigned)t.n, n_blocks ? (float)t.n / (float)n_blocks : 0};
}

#ifdef TAGC_CUDA_HARNESS
inline tagc_status check_launches(void) {
    return TAGC_OK;
}
template <typename Kernel> tagc_status load_kernel(Kernel *) {
    return TAGC_OK;
}
#else
inline tagc_status check_cuda(cudaError_t code, const char *what) {
    if (code == cudaSuccess) return TAGC_OK;
    (void)cudaGetLastError(); /* it is told now, not again by the next launch */
    return tagc_fail(TAGC_ERR_DEVICE, "CUDA: %s: %s", what, cudaGetErrorString(code));
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

/* ---- tables on their way to the device ----
 *
 * They travel as arguments of launches, which the runtime takes at once. A copy would have to wait for the device, or the host to leave its
 * side alone until the stream comes to it. */

constexpr size_t PARCEL_WORDS = 1000; /* arguments may take 4096 bytes */

struct parcel {
    uint32_t words[PARCEL_WORDS];
};

/* One block. */
static __global__ void __launch_bounds__(THREADS)
    unpack_parcel(const __grid_constant__ parcel from, uint32_t *to, unsigned n) {
    for (unsigned i = threadIdx.x; i < n; i += THREADS) to[i] = from.words[i];
}

/* Of tables, which are whole words. */
inline tagc_status send_tables(void *there, const char *image, size_t n_bytes, cudaStream_t stream) {
    for (size_t at = 0, n; at < n_bytes; at += n) {
        parcel words;
        n = smaller(n_bytes - at, sizeof words);
        uint32_t *to = reinterpret_cast<uint32_t *>(static_cast<char *>(there) + at);
        const unsigned n_words = (unsigned)(n / sizeof(uint32_t));
        memcpy(words.words, image + at, n);
        TAGC_LAUNCH(unpack_parcel, no_shared, 1, stream, words, to, n_words);
    }
    return check_launches();
}

/* Deltas: delta.cu. */
extern const tagc_delta_maker cuda_deltas;
tagc_status cuda_delta_prepare(void);

/* Runs of elements: runs.cu. */
extern const tagc_runs_maker cuda_runs;
tagc_status cuda_runs_prepare(void);

/* Messages of arrays: messages.cu. */
extern const tagc_messages_maker cuda_messages;
tagc_status cuda_messages_prepare(void);

} // namespace tagc_cuda

#endif
