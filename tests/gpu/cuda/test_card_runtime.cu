/* The part of a CUDA runtime that the tests and benches of kernels have (bench/card_runtime.cpp), on a driver of no device: each call comes to the
 * driver's function of that name, with its arguments in their places. test_cuda_driver has launches of libtagc-cuda.so. */
#include "fake_modules.h"

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s; the driver was called last: %s\n", __FILE__, __LINE__, #condition,   \
                    state->called);                                                                          \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

static fake_modules *state;

static __global__ void add_one(int *to, unsigned by) {
    *to += (int)by;
}

static int was(const char *call) {
    return strcmp(state->called, call) == 0;
}

static void test_memory() {
    char text[] = "0123456789", back[sizeof text] = "";
    void *there, *managed;
    CHECK(cudaMalloc(&there, sizeof text) == cudaSuccess && there && was("cuMemAlloc_v2 11"));
    CHECK(cudaMallocManaged(&managed, 7) == cudaSuccess && managed && was("cuMemAllocManaged 7 1"));
    CHECK(cudaMemcpy(there, text, sizeof text, cudaMemcpyHostToDevice) == cudaSuccess && was("cuMemcpy 11"));
    CHECK(cudaMemset(there, 'x', 3) == cudaSuccess && was("cuCtxSynchronize"));
    CHECK(cudaMemcpyAsync(back, there, sizeof back, cudaMemcpyDeviceToHost, nullptr) == cudaSuccess);
    CHECK(was("cuMemcpyAsync 11") && strcmp(back, "xxx3456789") == 0);
    CHECK(cudaFree(there) == cudaSuccess && was("cuMemFree_v2") && cudaFree(managed) == cudaSuccess);
    state->called[0] = 0;
    CHECK(cudaFree(nullptr) == cudaSuccess && was(""));
}

static void test_streams() {
    cudaStream_t stream, other;
    cudaEvent_t begin, end;
    int least, greatest;
    float ms;
    CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest) == cudaSuccess && least == 0 && greatest == -5);
    CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest) == cudaSuccess);
    CHECK(stream && was("cuStreamCreateWithPriority 1 -5"));
    CHECK(cudaStreamCreate(&other) == cudaSuccess && was("cuStreamCreateWithPriority 0 0"));
    CHECK(cudaEventCreateWithFlags(&begin, cudaEventDisableTiming) == cudaSuccess && was("cuEventCreate 2"));
    CHECK(cudaEventCreate(&end) == cudaSuccess && was("cuEventCreate 0"));
    CHECK(cudaEventRecord(begin, stream) == cudaSuccess && was("cuEventRecord"));
    CHECK(cudaEventRecord(end, stream) == cudaSuccess && cudaEventSynchronize(end) == cudaSuccess);
    CHECK(was("cuEventSynchronize") && cudaEventQuery(end) == cudaSuccess && was("cuEventQuery"));
    CHECK(cudaEventElapsedTime(&ms, begin, end) == cudaSuccess && ms == 1); /* a record after the other */
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess && was("cuStreamSynchronize"));
    CHECK(cudaStreamDestroy(stream) == cudaSuccess && was("cuStreamDestroy_v2"));
    CHECK(cudaStreamDestroy(other) == cudaSuccess);
}

static void test_kernels() {
    static int number;
    cudaFuncAttributes attributes;
    int n_blocks = 0;
    CHECK(cudaFuncGetAttributes(&attributes, add_one) == cudaSuccess && attributes.ptxVersion == 5);
    CHECK(attributes.localSizeBytes == 3);
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n_blocks, add_one, 64, 128) == cudaSuccess);
    CHECK(n_blocks == 4 && was("cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags 64 128 0"));
    state->n_launches = 0;
    add_one<<<3, 32>>>(&number, 1);
    CHECK(cudaGetLastError() == cudaSuccess && state->n_launches == 1 && state->launches[0].grid == 3);
    CHECK(strstr(state->launches[0].name, "add_one") && state->launches[0].block == 32);
}

int main() {
    cudaDeviceProp about;
    int n, value;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    fake_modules *(*own)(void) = nullptr;
    if (driver) *(void **)&own = dlsym(driver, "fake_modules_state");
    if (!own) {
        fprintf(stderr, "the fake driver is not the process's libcuda.so.1\n");
        return 1;
    }
    state = own();
    state->major[0] = ARCHITECTURE / 10, state->minor[0] = ARCHITECTURE % 10;
    CHECK(cudaGetDeviceCount(&n) == cudaSuccess && n == FAKE_DEVICES && was("cuDeviceGetCount"));
    CHECK(state->has_context); /* and it is this thread's */
    CHECK(cudaGetDeviceProperties(&about, 0) == cudaSuccess && strcmp(about.name, "no device 0") == 0);
    CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess);
    CHECK(value == ARCHITECTURE / 10 && cudaSetDevice(1) == cudaErrorInvalidDevice);
    CHECK(cudaDriverGetVersion(&n) == cudaSuccess && n == 12080);
    test_memory();
    test_streams();
    test_kernels();
    printf("passed\n");
    return 0;
}
