/* Kernels of a device, for reducers: batches of the codec (codec/batch.h), the memory that they use, and small copies between it
 * and the host.
 *
 * A tagc_kernels has one stream. So its reducers can share the memory of batches and the pinned memory: the
 * reducer that has entered has both until it leaves.
 *
 * No call here waits for other streams. A stream of the caller's may sleep in a host function until an exchange is over
 * (queue.c), and the call may be part of that exchange. So device memory is allocated and freed in the order of the stream,
 * pinned memory is freed only at the end, and all kernels are loaded at the start: a runtime may load a kernel at its first
 * launch, and then waits for the device. */
#ifndef TAGC_GPU_KERNELS_H
#define TAGC_GPU_KERNELS_H

#include "core/memory.h"
#include "exchange/runner.h"
#include "gpu/maker.h"
#include "gpu/runtime.h"

#include <pthread.h>

struct tagc_kernels {
    tagc_kernels *self; /* the first member: see tagc_kernels_in */
    tagc_device *device;
    const tagc_maker *maker;
    void *stream;
    tagc_arrays arrays;    /* in memory of the device; each of its functions enters */
    uint64_t n_live_bytes; /* of the device, with `lock` */

    pthread_mutex_t lock; /* from _enter to _leave */
    int before;           /* device of the thread that has entered */
    void *work;           /* (work_bytes) on the device */
    size_t work_bytes;
    uint64_t n_moves; /* counts the allocations of `work`; batches made before the last one are void */
    char *pinned;     /* (pinned_bytes) */
    size_t pinned_bytes;
    void *outgrown; /* a list of pinned blocks */
    uint64_t n_outgrown_bytes;
};

/* Of the context of a heap, kernels or a store, whose first member they are. */
static inline tagc_kernels *tagc_kernels_in(void *context) {
    return context ? *(tagc_kernels **)context : NULL;
}

/* tagc_kernels_open for any device and maker. */
tagc_status tagc_kernels_create(tagc_device *device, const tagc_maker *maker, tagc_kernels **out);

/* One thread at a time. On failure it has not entered. */
tagc_status tagc_kernels_enter(tagc_kernels *kernels);
void tagc_kernels_leave(tagc_kernels *kernels);

/* ---- having entered ---- */

/* Makes `work` and `pinned` at least this large; their contents are lost. */
tagc_status tagc_kernels_reserve(tagc_kernels *kernels, size_t work_bytes, size_t pinned_bytes);
/* Copies in the stream; `pinned` is the host's side, if there is one. */
tagc_status tagc_kernels_copy(tagc_kernels *kernels, void *to, const void *from, size_t n_bytes,
                              tagc_copy kind);
/* Until the stream is through. */
tagc_status tagc_kernels_wait(tagc_kernels *kernels);
/* The maker's failure as this library's. */
tagc_status tagc_kernels_check(const tagc_kernels *kernels, tagc_status status);

/* ---- to call without having entered: these wait until they are done ---- */

tagc_status tagc_kernels_read(tagc_kernels *kernels, void *to, const void *from, size_t n_bytes);
tagc_status tagc_kernels_write(tagc_kernels *kernels, void *to, const void *from, size_t n_bytes);

#endif
