/* The functions of the CUDA runtime and of its driver that tagc calls. cuda.c binds them by name to the library that the process has
 * loaded. Tests bind them to a library of their own, and replace some.
 *
 * A call returns 0 or CUDA's own code, which GetErrorString describes: runtime and driver number their errors alike. Streams and events are the runtime's handles; stream
 * NULL is its default stream. Each thread has its current device. */
#ifndef TAGC_GPU_RUNTIME_H
#define TAGC_GPU_RUNTIME_H

#include "tagc/device.h"

/* Numbers of the binary interfaces of runtime and driver, the same in all versions since 11.7. */
enum {
    TAGC_STREAM_NON_BLOCKING = 1,  /* cudaStreamNonBlocking: does not wait for the default stream */
    TAGC_EVENT_WITHOUT_TIMING = 2, /* cudaEventDisableTiming */
    TAGC_PINNED_PORTABLE = 1,      /* cudaHostAllocPortable */
    TAGC_PINNED_MAPPED = 2,        /* cudaHostAllocMapped */
    TAGC_WAIT_AT_LEAST = 0,        /* CU_STREAM_WAIT_VALUE_GEQ: (int32_t)(*flag - value) >= 0 */
};

typedef enum tagc_copy {
    TAGC_COPY_TO_DEVICE = 1, /* cudaMemcpyHostToDevice */
    TAGC_COPY_TO_HOST = 2,   /* cudaMemcpyDeviceToHost */
    TAGC_COPY_THERE = 3,     /* cudaMemcpyDeviceToDevice */
} tagc_copy;

/* Each member is the function of that name with "cuda" before it, and of the driver with "cu". All but the last are required. */
typedef struct tagc_runtime {
    void *library; /* of dlopen */
    int (*RuntimeGetVersion)(int *version);
    int (*GetDeviceCount)(int *n);
    int (*GetDevice)(int *ordinal);
    int (*SetDevice)(int ordinal);

    /* A stream runs its work in order. */
    int (*StreamCreateWithPriority)(void **stream, unsigned flags, int priority);
    int (*DeviceGetStreamPriorityRange)(
        int *least, int *greatest); /* of the current device; the greatest is the smallest number */
    int (*StreamDestroy)(void *stream);
    int (*StreamQuery)(void *stream); /* see tagc_runtime_answer */
    int (*StreamSynchronize)(void *stream);
    /* One never recorded is over already. */
    int (*StreamWaitEvent)(void *stream, void *event, unsigned flags);
    int (*StreamIsCapturing)(void *stream, int *status); /* not 0: its work goes into a graph */

    int (*EventCreateWithFlags)(void **event, unsigned flags);
    int (*EventDestroy)(void *event);
    int (*EventRecord)(void *event, void *stream);

    int (*MemcpyAsync)(void *to, const void *from, size_t n_bytes, int kind, void *stream); /* tagc_copy */

    /* Pinned memory: copies from and to it run while the host continues. The device itself reads and writes mapped memory, at the
     * address that HostGetDevicePointer gives. */
    int (*HostAlloc)(void **memory, size_t n_bytes, unsigned flags);
    int (*HostGetDevicePointer)(void **address, void *memory, unsigned flags);
    int (*FreeHost)(void *memory);

    /* Memory of the current device, allocated and freed in the order of the stream. Neither call waits for the device: it would
     * wait forever if a stream waits for a flag that the caller has to write. */
    int (*MallocAsync)(void **memory, size_t n_bytes, void *stream);
    int (*FreeAsync)(void *memory, void *stream);
    int (*MemsetAsync)(void *memory, int byte, size_t n_bytes, void *stream);

    int (*PointerGetAttributes)(void *attributes, const void *pointer); /* see tagc_runtime_place */

    const char *(*GetErrorString)(int code);
    int (*GetLastError)(void); /* forgets it, so that no other library takes this failure for its own */

    /* ---- of the driver; tagc_device_create binds them ---- */

    /* A stream writes a number to an address of the device, when the host can see all that is before it in the stream; or it waits
     * until the number there is what it should be. */
    int (*StreamWriteValue32)(void *stream, uint64_t address, uint32_t value, unsigned flags);
    int (*StreamWaitValue32)(void *stream, uint64_t address, uint32_t value, unsigned flags);
    /* *is_active: whether the process has a context on that device, which SetDevice would make. */
    int (*DevicePrimaryCtxGetState)(int ordinal, unsigned *flags, int *is_active);
    /* The context that is current in this thread, NULL: none; and that of a device, which exists until it is released. */
    int (*CtxGetCurrent)(void **context);
    int (*CtxSetCurrent)(void *context);
    int (*DevicePrimaryCtxRetain)(void **context, int ordinal);
    int (*DevicePrimaryCtxRelease)(int ordinal);

    /* Of the runtime: finds a function of the driver, as it was in that version; NULL if it has none of that name. `answer` says why. */
    int (*GetDriverEntryPointByVersion)(const char *name, void **function, unsigned version,
                                        unsigned long long flags, int *answer);
} tagc_runtime;

/* Binds *out to the CUDA runtime; library: as in tagc_device_open. TAGC_ERR_UNSUPPORTED if it is missing, too old or lacks a
 * call. _unbind closes it. where: which library, and its version, for people. */
enum { TAGC_WHERE_TEXT_BYTES = 160 };
tagc_status tagc_runtime_bind(const char *library, tagc_runtime *out, char where[TAGC_WHERE_TEXT_BYTES]);
void tagc_runtime_unbind(tagc_runtime *runtime);
/* Binds the functions of the driver. TAGC_ERR_UNSUPPORTED, naming the function, if the machine's driver lacks one. */
tagc_status tagc_runtime_bind_driver(tagc_runtime *runtime);

/* Of a query: *done, and 0 also for "not ready", which the runtime stores as an error. */
int tagc_runtime_answer(const tagc_runtime *runtime, int code, int *done);

/* Where an address points. */
typedef struct tagc_place {
    int is_device; /* 1: memory of a device, or managed */
    int ordinal;   /* of that device */
} tagc_place;
int tagc_runtime_place(const tagc_runtime *runtime, const void *pointer, tagc_place *place);

struct tagc_device {
    tagc_runtime runtime;
    char where[TAGC_WHERE_TEXT_BYTES];
    int ordinal;
    void *context;   /* the device's, retained */
    int calls_wait;  /* 1: a call that puts work into a stream may wait until it has run */
    int patience_ms; /* of the probe that finds this out */
};

/* 1: the environment says that launches are to wait (CUDA_LAUNCH_BLOCKING). */
int tagc_is_told_to_wait(void);

/* *waits: whether some call of an exchange waits until its work has run. there: 64 bytes of the device's memory, which become 0. launch: of
 * a kernel, in that stream; NULL: none. The stream is through when it returns. Call after entering. */
typedef struct tagc_probe_work {
    void *there;
    tagc_status (*launch)(void *context, void *stream);
    void *context;
} tagc_probe_work;
tagc_status tagc_device_probe(const tagc_device *device, void *stream, const tagc_probe_work *work,
                              int *waits);

/* tagc_device_open for a bound runtime, which is copied. On success *out owns its library. */
tagc_status tagc_device_create(const tagc_runtime *runtime, const char *where, int ordinal,
                               tagc_device **out);

/* Makes a stream of the greatest priority: a part's launches depend on each other, and each of them could otherwise wait behind one of the
 * model's large kernels. Call after entering. */
tagc_status tagc_device_make_stream(const tagc_device *device, void **stream);

/* TAGC_ERR_ARGUMENT, naming `what`, unless the pointer is in this device's memory. */
tagc_status tagc_device_check_place(const tagc_device *device, const void *pointer, const char *what);

/* TAGC_OK for 0, else TAGC_ERR_DEVICE with the runtime's text. It also clears the runtime's stored error. */
tagc_status tagc_device_check(const tagc_device *device, int code, const char *what);

/* Makes `device` the current one of this thread; *before receives the previous one. _leave makes that the current one again, but
 * only if the process has a context there: a thread begins on device 0, and choosing it would make one.
 *
 * The device's context is current then, too. The runtime makes it so at the first call that needs it, or in SetDevice since version 12; but
 * flags and launches of kernels go to the driver, which makes nothing, and may be a thread's first calls. */
tagc_status tagc_device_enter(const tagc_device *device, int *before);
void tagc_device_leave(const tagc_device *device, int before);

#endif
