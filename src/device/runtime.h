/* The functions of a device's runtime that tagc calls, as a table. cuda.c fills it for the CUDA runtime.
 *
 * Every member is required. A call returns 0 or the runtime's own code, which error_text describes. Streams and events are the
 * runtime's handles; stream NULL is its default stream. */
#ifndef TAGC_DEVICE_RUNTIME_H
#define TAGC_DEVICE_RUNTIME_H

#include "tagc/device.h"

#define TAGC_RUNTIME_ABI 2u

enum { TAGC_MAKER_TEXT_BYTES = 160 };

typedef enum tagc_copy {
    TAGC_COPY_TO_HOST = 0,
    TAGC_COPY_TO_DEVICE = 1,
} tagc_copy;

/* Where an address points. */
typedef struct tagc_place {
    int is_device; /* 1: memory of a device, or managed */
    int ordinal;   /* of that device */
} tagc_place;

typedef struct tagc_runtime {
    uint32_t abi; /* TAGC_RUNTIME_ABI */
    const char *maker;
    char where[TAGC_MAKER_TEXT_BYTES]; /* which library, and its version, for people */
    void *context;                     /* first argument of every call */

    /* Devices. Each thread has its current one. */
    int (*device_count)(void *context, int *n);
    int (*device_get)(void *context, int *ordinal);
    int (*device_set)(void *context, int ordinal);

    /* A stream runs its work in order. A new one does not wait for the default stream. */
    int (*stream_create)(void *context, void **stream);
    int (*stream_destroy)(void *context, void *stream);
    int (*stream_query)(void *context, void *stream, int *done);
    int (*stream_synchronize)(void *context, void *stream);
    int (*stream_wait_event)(void *context, void *stream,
                             void *event);                            /* one never recorded is over already */
    int (*stream_is_capturing)(void *context, void *stream, int *is); /* its work goes into a graph */

    int (*event_create)(void *context, void **event);
    int (*event_destroy)(void *context, void *event);
    int (*event_record)(void *context, void *event, void *stream);
    int (*event_query)(void *context, void *event, int *done);
    int (*event_synchronize)(void *context, void *event);

    int (*copy)(void *context, void *to, const void *from, size_t n_bytes, tagc_copy kind, void *stream);
    /* The runtime may call the functions of all streams from one thread. They must not call the runtime. After a failure of
     * the device they are not called. */
    int (*host_function)(void *context, void *stream, void (*function)(void *arg), void *arg);

    /* Pinned memory: copies from and to it run while the host continues. */
    int (*pinned_alloc)(void *context, void **memory, size_t n_bytes);
    int (*pinned_free)(void *context, void *memory);

    /* Memory of the current device, allocated and freed in the order of the stream. Neither call waits for the device: it would
     * wait forever if a host function waits for the caller. */
    int (*device_alloc)(void *context, void **memory, size_t n_bytes, void *stream);
    int (*device_free)(void *context, void *memory, void *stream);
    int (*device_fill)(void *context, void *memory, int byte, size_t n_bytes, void *stream);

    int (*pointer_place)(void *context, const void *pointer, tagc_place *place);

    const char *(*error_text)(void *context, int code);
    void (*forget_error)(void *context); /* so that no other library takes this failure for its own */
    void (*unload)(void *context);
} tagc_runtime;

/* Binds *out to the CUDA runtime; library: as in tagc_device_open. TAGC_ERR_UNSUPPORTED if it is missing, too old or lacks a
 * call. */
tagc_status tagc_cuda_bind(const char *library, tagc_runtime *out);

struct tagc_device {
    tagc_runtime runtime;
    int ordinal;
};

/* tagc_device_open for any table, which is copied. On success *out owns its context. */
tagc_status tagc_device_create(const tagc_runtime *runtime, int ordinal, tagc_device **out);

/* TAGC_ERR_ARGUMENT, naming `what`, unless the pointer is in this device's memory. */
tagc_status tagc_device_check_place(const tagc_device *device, const void *pointer, const char *what);

/* TAGC_OK for 0, else TAGC_ERR_DEVICE with the runtime's text. It also clears the runtime's stored error. */
tagc_status tagc_device_check(const tagc_device *device, int code, const char *what);

/* Makes `device` the current one of this thread; *before receives the previous one. */
tagc_status tagc_device_enter(const tagc_device *device, int *before);
void tagc_device_leave(const tagc_device *device, int before);

#endif
