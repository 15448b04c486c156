/* The table of the CUDA runtime. It is bound by name to the library that the process has loaded (usually PyTorch's), so that
 * one build of libtagc runs on machines with and without CUDA. Types and numbers below are the runtime's binary
 * interface, the same in all versions since 11.2. */
#include "core/memory.h"
#include "core/status.h"
#include "device/runtime.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

enum {
    OLDEST_VERSION = 11020,
    NOT_READY = 600,         /* cudaErrorNotReady */
    NON_BLOCKING = 1,        /* cudaStreamNonBlocking */
    WITHOUT_TIMING = 2,      /* cudaEventDisableTiming */
    PORTABLE = 1,            /* cudaHostAllocPortable */
    TO_DEVICE = 1,           /* cudaMemcpyHostToDevice */
    TO_HOST = 2,             /* cudaMemcpyDeviceToHost */
    DEVICE_MEMORY = 2,       /* cudaMemoryTypeDevice */
    MANAGED_MEMORY = 3,      /* cudaMemoryTypeManaged */
    ATTRIBUTES_BYTES = 1024, /* more than cudaPointerAttributes of any version */
};

/* The beginning of cudaPointerAttributes. */
typedef struct attributes {
    int type, device;
    void *device_pointer, *host_pointer;
} attributes;

typedef struct cuda {
    void *library;
    int (*RuntimeGetVersion)(int *version);
    int (*GetDeviceCount)(int *n);
    int (*GetDevice)(int *ordinal);
    int (*SetDevice)(int ordinal);
    int (*StreamCreateWithFlags)(void **stream, unsigned flags);
    int (*StreamDestroy)(void *stream);
    int (*StreamQuery)(void *stream);
    int (*StreamSynchronize)(void *stream);
    int (*StreamWaitEvent)(void *stream, void *event, unsigned flags);
    int (*StreamIsCapturing)(void *stream, int *status);
    int (*EventCreateWithFlags)(void **event, unsigned flags);
    int (*EventDestroy)(void *event);
    int (*EventRecord)(void *event, void *stream);
    int (*EventQuery)(void *event);
    int (*EventSynchronize)(void *event);
    int (*MemcpyAsync)(void *to, const void *from, size_t n_bytes, int kind, void *stream);
    int (*LaunchHostFunc)(void *stream, void (*function)(void *), void *arg);
    int (*HostAlloc)(void **memory, size_t n_bytes, unsigned flags);
    int (*FreeHost)(void *memory);
    int (*MallocAsync)(void **memory, size_t n_bytes, void *stream);
    int (*FreeAsync)(void *memory, void *stream);
    int (*MemsetAsync)(void *memory, int byte, size_t n_bytes, void *stream);
    int (*PointerGetAttributes)(void *attributes, const void *pointer);
    const char *(*GetErrorString)(int code);
    int (*GetLastError)(void);
} cuda;

/* The members above as names, in the order of the struct. */
static const char *const names[] = {
    "RuntimeGetVersion",
    "GetDeviceCount",
    "GetDevice",
    "SetDevice",
    "StreamCreateWithFlags",
    "StreamDestroy",
    "StreamQuery",
    "StreamSynchronize",
    "StreamWaitEvent",
    "StreamIsCapturing",
    "EventCreateWithFlags",
    "EventDestroy",
    "EventRecord",
    "EventQuery",
    "EventSynchronize",
    "MemcpyAsync",
    "LaunchHostFunc",
    "HostAlloc",
    "FreeHost",
    "MallocAsync",
    "FreeAsync",
    "MemsetAsync",
    "PointerGetAttributes",
    "GetErrorString",
    "GetLastError",
};
enum { N_NAMES = sizeof names / sizeof *names };
_Static_assert(sizeof(cuda) == sizeof(void *) * (1 + N_NAMES), "a name for each member");

/* ---- the table ---- */

static int device_count(void *context, int *n) {
    return ((cuda *)context)->GetDeviceCount(n);
}

static int device_get(void *context, int *ordinal) {
    return ((cuda *)context)->GetDevice(ordinal);
}

static int device_set(void *context, int ordinal) {
    return ((cuda *)context)->SetDevice(ordinal);
}

static int stream_create(void *context, void **stream) {
    return ((cuda *)context)->StreamCreateWithFlags(stream, NON_BLOCKING);
}

static int stream_destroy(void *context, void *stream) {
    return ((cuda *)context)->StreamDestroy(stream);
}

/* "Not ready" is an answer, but the runtime stores it as an error. */
static int answered(cuda *runtime, int code, int *done) {
    *done = code == 0;
    if (code != NOT_READY) return code;
    runtime->GetLastError();
    return 0;
}

static int stream_query(void *context, void *stream, int *done) {
    return answered(context, ((cuda *)context)->StreamQuery(stream), done);
}

static int stream_synchronize(void *context, void *stream) {
    return ((cuda *)context)->StreamSynchronize(stream);
}

static int stream_wait_event(void *context, void *stream, void *event) {
    return ((cuda *)context)->StreamWaitEvent(stream, event, 0);
}

static int stream_is_capturing(void *context, void *stream, int *is) {
    int status = 0;
    int code = ((cuda *)context)->StreamIsCapturing(stream, &status);
    *is = status != 0;
    return code;
}

static int event_create(void *context, void **event) {
    return ((cuda *)context)->EventCreateWithFlags(event, WITHOUT_TIMING);
}

static int event_destroy(void *context, void *event) {
    return ((cuda *)context)->EventDestroy(event);
}

static int event_record(void *context, void *event, void *stream) {
    return ((cuda *)context)->EventRecord(event, stream);
}

static int event_query(void *context, void *event, int *done) {
    return answered(context, ((cuda *)context)->EventQuery(event), done);
}

static int event_synchronize(void *context, void *event) {
    return ((cuda *)context)->EventSynchronize(event);
}

static int copy(void *context, void *to, const void *from, size_t n_bytes, tagc_copy kind, void *stream) {
    return ((cuda *)context)
        ->MemcpyAsync(to, from, n_bytes, kind == TAGC_COPY_TO_HOST ? TO_HOST : TO_DEVICE, stream);
}

static int host_function(void *context, void *stream, void (*function)(void *), void *arg) {
    return ((cuda *)context)->LaunchHostFunc(stream, function, arg);
}

static int pinned_alloc(void *context, void **memory, size_t n_bytes) {
    return ((cuda *)context)->HostAlloc(memory, n_bytes, PORTABLE);
}

static int pinned_free(void *context, void *memory) {
    return ((cuda *)context)->FreeHost(memory);
}

static int device_alloc(void *context, void **memory, size_t n_bytes, void *stream) {
    return ((cuda *)context)->MallocAsync(memory, n_bytes, stream);
}

static int device_free(void *context, void *memory, void *stream) {
    return ((cuda *)context)->FreeAsync(memory, stream);
}

static int device_fill(void *context, void *memory, int byte, size_t n_bytes, void *stream) {
    return ((cuda *)context)->MemsetAsync(memory, byte, n_bytes, stream);
}

static int pointer_place(void *context, const void *pointer, tagc_place *place) {
    union {
        attributes first;
        char all[ATTRIBUTES_BYTES];
    } found;
    memset(&found, 0, sizeof found);
    int code = ((cuda *)context)->PointerGetAttributes(&found, pointer);
    place->is_device = found.first.type == DEVICE_MEMORY || found.first.type == MANAGED_MEMORY;
    place->ordinal = found.first.device;
    return code;
}

static const char *error_text(void *context, int code) {
    return ((cuda *)context)->GetErrorString(code);
}

static void forget_error(void *context) {
    ((cuda *)context)->GetLastError();
}

static void unload(void *context) {
    cuda *runtime = context;
    dlclose(runtime->library);
    tagc_memory_destroy(runtime);
}

static const tagc_runtime table = {
    .abi = TAGC_RUNTIME_ABI,
    .maker = "cuda",
    .device_count = device_count,
    .device_get = device_get,
    .device_set = device_set,
    .stream_create = stream_create,
    .stream_destroy = stream_destroy,
    .stream_query = stream_query,
    .stream_synchronize = stream_synchronize,
    .stream_wait_event = stream_wait_event,
    .stream_is_capturing = stream_is_capturing,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .event_query = event_query,
    .event_synchronize = event_synchronize,
    .copy = copy,
    .host_function = host_function,
    .pinned_alloc = pinned_alloc,
    .pinned_free = pinned_free,
    .device_alloc = device_alloc,
    .device_free = device_free,
    .device_fill = device_fill,
    .pointer_place = pointer_place,
    .error_text = error_text,
    .forget_error = forget_error,
    .unload = unload,
};

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

static tagc_status bind(cuda *runtime, const char *name) {
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
    return TAGC_OK;
}

tagc_status tagc_cuda_bind(const char *library, tagc_runtime *out) {
    *out = table;
    const char *name = NULL;
    void *opened = open_library(library, &name);
    if (!opened)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "there is no CUDA runtime: %s (a CUDA build of PyTorch brings libcudart)",
                         dlerror());
    cuda *runtime;
    tagc_status status = tagc_memory_create(sizeof *runtime, "the CUDA runtime's table", (void **)&runtime);
    if (status != TAGC_OK) {
        dlclose(opened);
        return status;
    }
    runtime->library = opened;
    out->context = runtime;
    status = bind(runtime, name);
    if (status != TAGC_OK) {
        unload(runtime);
        return status;
    }
    int version = 0;
    runtime->RuntimeGetVersion(&version);
    snprintf(out->where, sizeof out->where, "cuda runtime %d.%d, %s", version / 1000, version % 1000 / 10,
             name);
    return TAGC_OK;
}
