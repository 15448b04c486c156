/* What the tests and benches of kernels call of a CUDA runtime, on device 0, by the driver's public functions: beside lib/gpu/cuda/driver.cpp,
 * which launches. nvcc's own runtime needs a driver as new as nvcc; so these programs run wherever libtagc-cuda.so does. Errors are the
 * driver's, which have the runtime's numbers. A name that is missing here does not link. */
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define HERE extern "C" __attribute__((visibility("hidden")))

HERE cudaError_t tagc_driver_function(const void *stub, void **function); /* driver.cpp */

namespace {

struct driver {
    int (*Init)(unsigned);
    int (*DriverGetVersion)(int *);
    int (*DeviceGetCount)(int *);
    int (*DeviceGetName)(char *, int, int);
    int (*DeviceGetAttribute)(int *, int, int);
    int (*DevicePrimaryCtxRetain)(void **, int);
    int (*CtxSetCurrent)(void *);
    int (*CtxGetStreamPriorityRange)(int *, int *);
    int (*CtxSynchronize)(void);
    int (*MemAlloc)(uint64_t *, size_t);
    int (*MemAllocManaged)(uint64_t *, size_t, unsigned);
    int (*MemFree)(uint64_t);
    int (*Memcpy)(uint64_t, uint64_t, size_t);
    int (*MemcpyAsync)(uint64_t, uint64_t, size_t, void *);
    int (*MemsetD8Async)(uint64_t, unsigned char, size_t, void *);
    int (*StreamCreateWithPriority)(void **, unsigned, int);
    int (*StreamDestroy)(void *);
    int (*StreamSynchronize)(void *);
    int (*EventCreate)(void **, unsigned);
    int (*EventRecord)(void *, void *);
    int (*EventQuery)(void *);
    int (*EventSynchronize)(void *);
    int (*EventElapsedTime)(float *, void *, void *);
    int (*OccupancyMaxActiveBlocksPerMultiprocessorWithFlags)(int *, void *, int, size_t, unsigned);
};
const char *const names[] = {"cuInit",
                             "cuDriverGetVersion",
                             "cuDeviceGetCount",
                             "cuDeviceGetName",
                             "cuDeviceGetAttribute",
                             "cuDevicePrimaryCtxRetain",
                             "cuCtxSetCurrent",
                             "cuCtxGetStreamPriorityRange",
                             "cuCtxSynchronize",
                             "cuMemAlloc_v2",
                             "cuMemAllocManaged",
                             "cuMemFree_v2",
                             "cuMemcpy",
                             "cuMemcpyAsync",
                             "cuMemsetD8Async",
                             "cuStreamCreateWithPriority",
                             "cuStreamDestroy_v2",
                             "cuStreamSynchronize",
                             "cuEventCreate",
                             "cuEventRecord",
                             "cuEventQuery",
                             "cuEventSynchronize",
                             "cuEventElapsedTime",
                             "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags"};
static_assert(sizeof(driver) == sizeof names, "a name for each member");

driver the_driver;
int taken; /* what taking device 0 returned */

int take_device() {
    void *members[sizeof names / sizeof *names], *library = dlopen("libcuda.so.1", RTLD_NOW), *context;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!library || !(members[i] = dlsym(library, names[i]))) return cudaErrorInsufficientDriver;
    memcpy(&the_driver, members, sizeof the_driver);
    int code = the_driver.Init(0);
    if (!code) code = the_driver.DevicePrimaryCtxRetain(&context, 0);
    return code ? code : the_driver.CtxSetCurrent(context); /* these programs have one thread */
}

/* Every call does this first. */
const driver *here(int *code) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, [] { taken = take_device(); });
    *code = taken;
    return &the_driver;
}

template <typename... given, typename... arguments>
cudaError_t call(int (*driver::*function)(given...), arguments... with) {
    int code;
    const driver *d = here(&code);
    return (cudaError_t)(code ? code : (d->*function)((given)with...));
}

} // namespace

/* ---- devices ---- */

HERE cudaError_t cudaGetDeviceCount(int *n) {
    *n = 0;
    return call(&driver::DeviceGetCount, n);
}
HERE cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}
HERE cudaError_t cudaSetDevice(int device) {
    return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}
HERE cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    return call(&driver::DeviceGetName, properties->name, (int)sizeof properties->name, device);
}
HERE cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    return call(&driver::DeviceGetAttribute, value, (int)attribute, device);
}
HERE cudaError_t cudaDriverGetVersion(int *version) {
    return call(&driver::DriverGetVersion, version);
}
HERE cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
HERE cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    return call(&driver::CtxGetStreamPriorityRange, least, greatest);
}
HERE cudaError_t cudaDeviceSynchronize(void) {
    return call(&driver::CtxSynchronize);
}

/* ---- memory ---- */

HERE cudaError_t cudaMalloc(void **memory, size_t n_bytes) {
    return call(&driver::MemAlloc, reinterpret_cast<uint64_t *>(memory), n_bytes);
}
HERE cudaError_t cudaMallocManaged(void **memory, size_t n_bytes, unsigned flags) {
    return call(&driver::MemAllocManaged, reinterpret_cast<uint64_t *>(memory), n_bytes, flags);
}
HERE cudaError_t cudaFree(void *memory) {
    return memory ? call(&driver::MemFree, (uint64_t)memory) : cudaSuccess;
}
/* The driver finds out which is whose. */
HERE cudaError_t cudaMemcpy(void *to, const void *from, size_t n_bytes, cudaMemcpyKind) {
    return call(&driver::Memcpy, (uint64_t)to, (uint64_t)from, n_bytes);
}
HERE cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n_bytes, cudaMemcpyKind,
                                 cudaStream_t stream) {
    return call(&driver::MemcpyAsync, (uint64_t)to, (uint64_t)from, n_bytes, stream);
}
HERE cudaError_t cudaMemsetAsync(void *memory, int byte, size_t n_bytes, cudaStream_t stream) {
    return call(&driver::MemsetD8Async, (uint64_t)memory, (unsigned char)byte, n_bytes, stream);
}
HERE cudaError_t cudaMemset(void *memory, int byte, size_t n_bytes) {
    const cudaError_t code = cudaMemsetAsync(memory, byte, n_bytes, nullptr);
    return code ? code : cudaDeviceSynchronize();
}

/* ---- streams and events ---- */

HERE cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return call(&driver::StreamCreateWithPriority, reinterpret_cast<void **>(stream), flags, priority);
}
HERE cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
HERE cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    return cudaStreamCreateWithPriority(stream, 0, 0);
}
HERE cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    return call(&driver::StreamDestroy, stream);
}
HERE cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return call(&driver::StreamSynchronize, stream);
}
HERE cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    return call(&driver::EventCreate, reinterpret_cast<void **>(event), flags);
}
HERE cudaError_t cudaEventCreate(cudaEvent_t *event) {
    return cudaEventCreateWithFlags(event, 0);
}
HERE cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return call(&driver::EventRecord, event, stream);
}
HERE cudaError_t cudaEventQuery(cudaEvent_t event) {
    return call(&driver::EventQuery, event);
}
HERE cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return call(&driver::EventSynchronize, event);
}
HERE cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end) {
    return call(&driver::EventElapsedTime, ms, begin, end);
}

/* ---- kernels ---- */

HERE cudaError_t cudaPeekAtLastError(void) {
    return cudaSuccess; /* launches return theirs */
}
HERE cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n_blocks, const void *stub,
                                                                        int n_threads, size_t shared_bytes,
                                                                        unsigned flags) {
    void *function;
    const cudaError_t code = tagc_driver_function(stub, &function);
    return code ? code
                : call(&driver::OccupancyMaxActiveBlocksPerMultiprocessorWithFlags, n_blocks, function,
                       n_threads, shared_bytes, flags);
}
/* Of CUB's headers, which no host code reads. */
HERE void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {
}
