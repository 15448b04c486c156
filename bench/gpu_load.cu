/* libtagc-load.so: see gpu_load.h. */
#include "cuda_load.cuh"
#include "gpu_load.h"

template <int which> static __global__ void nothing() {
}

#define API extern "C" __attribute__((visibility("default")))

API int tagc_load_spin(void *stream, unsigned n_blocks, uint64_t flag_there, uint32_t value,
                       uint64_t most_ns) {
    spin<<<n_blocks, 256, 0, static_cast<cudaStream_t>(stream)>>>(
        reinterpret_cast<const volatile uint32_t *>(flag_there), value, most_ns);
    return cudaGetLastError();
}

template <int which> static int launch(cudaStream_t stream) {
    nothing<which><<<1, 32, 0, stream>>>();
    return cudaGetLastError();
}

API int tagc_load_nothing(void *stream, int which) {
    static int (*const all[])(cudaStream_t) = {launch<0>, launch<1>, launch<2>, launch<3>};
    static_assert(sizeof all / sizeof *all == TAGC_LOAD_FIRSTS, "one each");
    if (which < 0 || which >= TAGC_LOAD_FIRSTS) return cudaErrorInvalidValue;
    return all[which](static_cast<cudaStream_t>(stream));
}
