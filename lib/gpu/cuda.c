/* Binds the functions of the CUDA runtime by name to the library that the process has loaded (usually PyTorch's), so that one
 * build of libtagc runs on machines with and without CUDA. */
#include "core/status.h"
#include "gpu/runtime.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

enum {
    OLDEST_VERSION = 11070,  /* the first whose stream memory operations need no option of the driver's */
    NOT_READY = 600,         /* cudaErrorNotReady */
    DEVICE_MEMORY = 2,       /* cudaMemoryTypeDevice */
    MANAGED_MEMORY = 3,      /* cudaMemoryTypeManaged */
    ATTRIBUTES_BYTES = 1024, /* more than cudaPointerAttributes of any version */
};

/* The beginning of cudaPointerAttributes. */
typedef struct attributes {
    int type, device;
    void *device_pointer, *host_pointer;
} attributes;

/* The members of tagc_runtime, in order; the driver's follow. */
static const char *const names[] = {
    "RuntimeGetVersion",
    "GetDeviceCount",
    "GetDevice",
    "SetDevice",
    "StreamCreateWithPriority",
    "DeviceGetStreamPriorityRange",
    "StreamDestroy",
    "StreamQuery",
    "StreamSynchronize",
    "StreamWaitEvent",
    "StreamIsCapturing",
    "EventCreateWithFlags",
    "EventDestroy",
    "EventRecord",
    "MemcpyAsync",
    "HostAlloc",
    "HostGetDevicePointer",
    "FreeHost",
    "MallocAsync",
    "FreeAsync",
    "MemsetAsync",
    "PointerGetAttributes",
    "GetErrorString",
    "GetLastError",
};
/* symbol: what libcuda calls it. Since 11.7 the second versions are what cuda.h means by the names; the first need an option of the driver's. */
static const struct {
    const char *name, *symbol;
} driver_names[] = {{"cuStreamWriteValue32", "cuStreamWriteValue32_v2"},
                    {"cuStreamWaitValue32", "cuStreamWaitValue32_v2"},
                    {"cuDevicePrimaryCtxGetState", "cuDevicePrimaryCtxGetState"},
                    {"cuCtxGetCurrent", "cuCtxGetCurrent"},
                    {"cuCtxSetCurrent", "cuCtxSetCurrent"},
                    {"cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain"},
                    {"cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease_v2"}};
enum { N_NAMES = sizeof names / sizeof *names, N_DRIVER_NAMES = sizeof driver_names / sizeof *driver_names };
_Static_assert(sizeof(tagc_runtime) == sizeof(void *) * (1 + N_NAMES + N_DRIVER_NAMES + 1),
               "a name for each member");

/* ---- answers ---- */

int tagc_runtime_answer(const tagc_runtime *runtime, int code, int *done) {
    *done = code == 0;
    if (code != NOT_READY) return code;
    runtime->GetLastError();
    return 0;
}

int tagc_runtime_place(const tagc_runtime *runtime, const void *pointer, tagc_place *place) {
    union {
        attributes first;
        char all[ATTRIBUTES_BYTES];
    } found;
    memset(&found, 0, sizeof found);
    int code = runtime->PointerGetAttributes(&found, pointer);
    place->is_device = found.first.type == DEVICE_MEMORY || found.first.type == MANAGED_MEMORY;
    place->ordinal = found.first.device;
    return code;
}

/* ---- binding ---- */

/* Prefers a loaded runtime: a second one beside PyTorch's would not know its streams. */
static void *open_library(const char *library, const char **name) {
    static const char *const usual[] = {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0",
                                        "libcudart.so"};
    enum { N_USUAL = sizeof usual / sizeof *usual };
    const int modes[] = {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW};
    for (int m = 0; m < 2; m++)
        for (int i = 0; i < (library ? 1 : N_USUAL); i++) {
            *name = library ? library : usual[i];
            void *opened = dlopen(*name, modes[m]);
            if (opened) return opened;
        }
    return NULL;
}

static tagc_status bind(tagc_runtime *runtime, const char *name, char where[TAGC_WHERE_TEXT_BYTES]) {
    char *member = (char *)runtime + sizeof runtime->library;
    for (int i = 0; i < N_NAMES; i++) {
        char symbol[64];
        snprintf(symbol, sizeof symbol, "cuda%s", names[i]);
        void *found = dlsym(runtime->library, symbol);
        if (!found)
            return tagc_fail(TAGC_ERR_UNSUPPORTED,
                             "%s has no %s: must be a CUDA runtime of version %d.%d or newer", name, symbol,
                             OLDEST_VERSION / 1000, OLDEST_VERSION % 1000 / 10);
        memcpy(member + (size_t)i * sizeof found, &found, sizeof found);
    }
    int version = 0, code = runtime->RuntimeGetVersion(&version);
    if (code)
        return tagc_fail(TAGC_ERR_DEVICE, "%s does not report its version: %s (%d)", name,
                         runtime->GetErrorString(code), code);
    if (version < OLDEST_VERSION)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "%s is CUDA runtime %d.%d, must be %d.%d or newer", name,
                         version / 1000, version % 1000 / 10, OLDEST_VERSION / 1000,
                         OLDEST_VERSION % 1000 / 10);
    void *found = dlsym(runtime->library, "cudaGetDriverEntryPointByVersion");
    memcpy(&runtime->GetDriverEntryPointByVersion, &found, sizeof found);
    snprintf(where, TAGC_WHERE_TEXT_BYTES, "cuda runtime %d.%d, %s", version / 1000, version % 1000 / 10,
             name);
    return TAGC_OK;
}

tagc_status tagc_runtime_bind(const char *library, tagc_runtime *out, char where[TAGC_WHERE_TEXT_BYTES]) {
    const char *name = NULL;
    *out = (tagc_runtime){.library = open_library(library, &name)};
    if (!out->library)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "there is no CUDA runtime: %s (a CUDA build of PyTorch brings libcudart)",
                         dlerror());
    tagc_status status = bind(out, name, where);
    if (status != TAGC_OK) tagc_runtime_unbind(out);
    return status;
}

/* A function as it was in the oldest version. A runtime older than 12.5 cannot be asked for a version: it, and cudaGetDriverEntryPoint of
 * every runtime, takes its own, which a driver of the same major version need not know yet. */
static void *find_in_driver(const tagc_runtime *runtime, int i) {
    void *found = NULL;
    int answer = 0;
    if (runtime->GetDriverEntryPointByVersion) {
        int code =
            runtime->GetDriverEntryPointByVersion(driver_names[i].name, &found, OLDEST_VERSION, 0, &answer);
        if (code) runtime->GetLastError();
        return code ? NULL : found;
    }
    void *driver =
        dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD); /* the runtime has loaded it, and keeps it */
    if (!driver) return NULL;
    found = dlsym(driver, driver_names[i].symbol);
    dlclose(driver);
    return found;
}

tagc_status tagc_runtime_bind_driver(tagc_runtime *runtime) {
    char *member = (char *)&runtime->StreamWriteValue32;
    for (int i = 0; i < N_DRIVER_NAMES; i++) {
        void *found = find_in_driver(runtime, i);
        if (!found)
            return tagc_fail(TAGC_ERR_UNSUPPORTED,
                             "the CUDA driver has no %s: must be a driver for CUDA %d.%d or newer",
                             driver_names[i].name, OLDEST_VERSION / 1000, OLDEST_VERSION % 1000 / 10);
        memcpy(member + (size_t)i * sizeof found, &found, sizeof found);
    }
    return TAGC_OK;
}

void tagc_runtime_unbind(tagc_runtime *runtime) {
    dlclose(runtime->library);
}
