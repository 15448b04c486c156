/* What nvcc's host code asks of a CUDA runtime, by the driver's public functions: so libtagc-cuda.so contains no runtime, which would need a
 * driver as new as itself, and runs beside the one that PyTorch brings, of whatever version.
 *
 * Each source registers its fat binary (the same kernels for several devices) and its kernels, when the library is loaded. A kernel's first
 * use on a device loads the code that fits it; _prepare of the maker does that for all. */
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define TAGC_HERE extern "C" __attribute__((visibility("hidden")))

namespace {

enum { MAX_SOURCES = 8, MAX_KERNELS = 256, MAX_DEVICES = 64 };
enum {
    COMPUTE_MAJOR = 75,
    COMPUTE_MINOR = 76,
    LOCAL_BYTES = 3,
    PTX_VERSION = 5
}; /* CU_DEVICE_ATTRIBUTE_*, CU_FUNC_ATTRIBUTE_* */
enum { KIND_PTX = 1, KIND_BINARY = 2 };

/* ---- the driver ---- */

struct driver {
    int (*CtxGetDevice)(int *device);
    int (*DeviceGetAttribute)(int *value, int attribute, int device);
    int (*ModuleLoadData)(void **module, const void *image);
    int (*ModuleGetFunction)(void **function, void *module, const char *name);
    int (*FuncGetAttribute)(int *value, int attribute, void *function);
    int (*LaunchKernel)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream,
                        void **arguments, void **extra);
    int (*GetErrorString)(int code, const char **text);
};

const char *const names[] = {"cuCtxGetDevice",      "cuDeviceGetAttribute", "cuModuleLoadData",
                             "cuModuleGetFunction", "cuFuncGetAttribute",   "cuLaunchKernel",
                             "cuGetErrorString"};
static_assert(sizeof(driver) == sizeof names, "a name for each member");

/* NULL: there is none, or it lacks a function. */
const driver *find_driver() {
    static const driver *const found = []() -> const driver * {
        static driver all;
        void *members[sizeof names / sizeof *names];
        void *library = dlopen("libcuda.so.1", RTLD_NOW); /* the runtime has loaded it */
        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
            members[i] = library ? dlsym(library, names[i]) : nullptr;
            if (!members[i]) return nullptr;
        }
        memcpy(&all, members, sizeof all);
        return &all;
    }();
    return found;
}

/* ---- fat binaries ---- */

struct fat_wrapper {
    int magic, version;
    const unsigned char *data;
    void *unused;
};
struct fat_header {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t n_bytes; /* of all code */
};
struct code_header {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t n_bytes; /* of what follows the header */
    uint32_t compressed_bytes, address_bytes;
    uint16_t minor, major; /* of the format */
    uint32_t architecture;
};

/* Binaries run on devices of their generation that are not older. PTX, which is for the oldest, is compiled by the driver. */
const unsigned char *code_for(const unsigned char *fat, int major, int minor) {
    fat_header header;
    memcpy(&header, fat, sizeof header);
    const unsigned char *at = fat + header.header_bytes, *end = at + header.n_bytes, *best = nullptr;
    int best_minor = -1;
    while (at < end) {
        code_header one;
        memcpy(&one, at, sizeof one);
        const int its_major = (int)one.architecture / 10, its_minor = (int)one.architecture % 10;
        if (one.kind == KIND_BINARY && its_major == major && its_minor <= minor && its_minor > best_minor) {
            best = at + one.header_bytes;
            best_minor = its_minor;
        }
        if (one.kind == KIND_PTX && !best) best = at + one.header_bytes;
        at += one.header_bytes + one.n_bytes;
    }
    return best;
}

/* ---- what is registered ---- */

struct source {
    const unsigned char *fat;
    void *modules[MAX_DEVICES];
};
struct kernel {
    const void *stub; /* what the host calls it by */
    const char *name;
    source *from;
    void *functions[MAX_DEVICES];
};

source sources[MAX_SOURCES];
kernel kernels[MAX_KERNELS];
unsigned n_sources, n_kernels;
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* for modules and functions */
thread_local int last_error;

struct configuration {
    dim3 grid, block;
    size_t shared_bytes;
    void *stream;
};
thread_local configuration configured;

int load_module(const driver *d, source *from, int device) {
    int major = 0, minor = 0;
    int code = d->DeviceGetAttribute(&major, COMPUTE_MAJOR, device);
    if (!code) code = d->DeviceGetAttribute(&minor, COMPUTE_MINOR, device);
    if (code) return code;
    const unsigned char *image = code_for(from->fat, major, minor);
    return image ? d->ModuleLoadData(&from->modules[device], image) : (int)cudaErrorNoKernelImageForDevice;
}

/* On the current device. */
int find_function(const void *stub, void **out) {
    const driver *d = find_driver();
    int device = 0, code = 0;
    unsigned i = 0;
    if (!d) return cudaErrorInsufficientDriver;
    while (i < n_kernels && kernels[i].stub != stub) i++;
    if (i == n_kernels) return cudaErrorInvalidDeviceFunction;
    if ((code = d->CtxGetDevice(&device))) return code;
    if (device < 0 || device >= MAX_DEVICES) return cudaErrorInvalidDevice;
    pthread_mutex_lock(&lock);
    source *from = kernels[i].from;
    void **function = &kernels[i].functions[device];
    if (!*function && !from->modules[device]) code = load_module(d, from, device);
    if (!*function && !code) code = d->ModuleGetFunction(function, from->modules[device], kernels[i].name);
    *out = *function;
    pthread_mutex_unlock(&lock);
    return code;
}

cudaError_t noted(int code) {
    if (code) last_error = code;
    return (cudaError_t)code;
}

} // namespace

/* ---- called when the library is loaded, in one thread ---- */

TAGC_HERE void **__cudaRegisterFatBinary(void *wrapper) {
    if (n_sources == MAX_SOURCES) abort();
    source *one = &sources[n_sources++];
    one->fat = static_cast<const fat_wrapper *>(wrapper)->data;
    return reinterpret_cast<void **>(one);
}

TAGC_HERE void __cudaRegisterFatBinaryEnd(void **) {
}

TAGC_HERE void __cudaUnregisterFatBinary(void **) {
}

TAGC_HERE void __cudaRegisterFunction(void **from, const char *stub, char *, const char *name, int, void *,
                                      void *, void *, void *, int *) {
    if (n_kernels == MAX_KERNELS) abort();
    kernel *one = &kernels[n_kernels++];
    one->stub = stub;
    one->name = name;
    one->from = reinterpret_cast<source *>(from);
}

/* ---- launches ---- */

TAGC_HERE unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void *stream) {
    configured = {grid, block, shared_bytes, stream};
    return 0;
}

TAGC_HERE cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes,
                                                 void *stream) {
    *grid = configured.grid;
    *block = configured.block;
    *shared_bytes = configured.shared_bytes;
    *static_cast<void **>(stream) = configured.stream;
    return cudaSuccess;
}

TAGC_HERE cudaError_t cudaLaunchKernel(const void *stub, dim3 grid, dim3 block, void **arguments,
                                       size_t shared_bytes, cudaStream_t stream) {
    void *function = nullptr;
    int code = find_function(stub, &function);
    if (!code)
        code = find_driver()->LaunchKernel(function, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                                           (unsigned)shared_bytes, stream, arguments, nullptr);
    return noted(code);
}

/* Since CUDA 13, launches are by a handle. */
TAGC_HERE cudaError_t __cudaGetKernel(cudaKernel_t *handle, const void *stub) {
    *handle = reinterpret_cast<cudaKernel_t>(const_cast<void *>(stub));
    return cudaSuccess;
}

TAGC_HERE cudaError_t __cudaLaunchKernel(cudaKernel_t handle, dim3 grid, dim3 block, void **arguments,
                                         size_t shared_bytes, cudaStream_t stream) {
    return cudaLaunchKernel(handle, grid, block, arguments, shared_bytes, stream);
}

/* Asking for one attribute has the driver load the kernel. Those that nobody here reads stay zero. */
TAGC_HERE cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *stub) {
    void *function = nullptr;
    int n_bytes = 0, code = find_function(stub, &function);
    memset(attributes, 0, sizeof *attributes);
    if (!code) code = find_driver()->FuncGetAttribute(&n_bytes, LOCAL_BYTES, function);
    if (!code) code = find_driver()->FuncGetAttribute(&attributes->ptxVersion, PTX_VERSION, function);
    attributes->localSizeBytes = (size_t)n_bytes;
    return noted(code);
}

/* For the benches' part of a runtime (bench/card_runtime.cpp). */
TAGC_HERE cudaError_t tagc_driver_function(const void *stub, void **function) {
    return noted(find_function(stub, function));
}

TAGC_HERE cudaError_t cudaGetLastError(void) {
    const int code = last_error;
    last_error = 0;
    return (cudaError_t)code;
}

TAGC_HERE const char *cudaGetErrorString(cudaError_t code) {
    const char *text = nullptr;
    if (!find_driver()) return "there is no CUDA driver (libcuda.so.1), or it is too old";
    find_driver()->GetErrorString((int)code, &text);
    return text ? text : "an error that the CUDA driver does not know";
}
