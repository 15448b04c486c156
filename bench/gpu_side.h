/* One rank's unit with kernels, its queue and the thread that exchanges: for benches of ranks that are threads and share a device. */
#ifndef TAGC_BENCH_GPU_SIDE_H
#define TAGC_BENCH_GPU_SIDE_H

#include "exchange/reducer.h"
#include "gpu/kernels.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Noreturn static inline void fail(const char *what) {
    fprintf(stderr, "bench: %s: %s\n", what, tagc_last_error());
    exit(1);
}

static inline void expect(tagc_status status, const char *what) {
    if (status != TAGC_OK) fail(what);
}

typedef struct gpu_side {
    tagc_device *device;
    tagc_kernels *kernels;
    tagc_queue *queue;
    pthread_t thread; /* that exchanges what is in the queue */
    void *stream;     /* the caller's */
} gpu_side;

typedef struct gpu_unit {
    tagc_store *store;
    tagc_reducer *reducer;
    tagc_unit *unit;
    uint64_t n_elems, n_output;
} gpu_unit;

static inline void *gpu_side_main(void *queue) {
    uint64_t number, tag;
    const void *input;
    void *output;
    tagc_queue_next(queue, &number, &tag, &input,
                    &output); /* returns when the queue is closed: there are only units */
    return NULL;
}

static inline void gpu_side_open(gpu_side *s, const char *library) {
    expect(tagc_device_open("cuda", library, 0, &s->device), "device");
    expect(tagc_kernels_open(s->device, &s->kernels), "kernels");
    expect(tagc_queue_create_on(s->kernels, 2, &s->queue), "queue");
    expect(tagc_device_check(
               s->device,
               s->device->runtime.StreamCreateWithPriority(&s->stream, TAGC_STREAM_NON_BLOCKING, 0),
               "making a stream"),
           "stream");
    if (pthread_create(&s->thread, NULL, gpu_side_main, s->queue)) fail("threads");
}

/* Collective. */
static inline void gpu_unit_open(const gpu_side *s, tagc_comm *comm, const tagc_reducer_options *options,
                                 gpu_unit *u) {
    u->n_elems = options->n_elems;
    u->n_output =
        options->output == TAGC_OUTPUT_UNIT ? u->n_elems : u->n_elems / (uint64_t)tagc_comm_world_size(comm);
    tagc_run whole = {0, 0, u->n_elems}, sums = {0, 0, u->n_output};
    expect(tagc_store_create(s->queue, &u->store), "store");
    expect(tagc_reducer_create_in(u->store, comm, options, &u->reducer), "reducer with kernels");
    tagc_unit_part part = {u->reducer, u->n_elems, u->n_output, &whole, 1, &sums, 1};
    tagc_unit_options of = {.struct_bytes = sizeof of,
                            .what = "gradients",
                            .factor = 1,
                            .n_parts = 1,
                            .parts = &part,
                            .n_input = u->n_elems,
                            .n_output = u->n_output,
                            .n_comms = 1,
                            .comms = {comm}};
    expect(tagc_unit_create(s->queue, &of, &u->unit), "unit");
}

static inline void gpu_unit_close(gpu_unit *u) {
    tagc_unit_destroy(u->unit);
    tagc_reducer_destroy(u->reducer);
    tagc_store_destroy(u->store);
}

/* Ends the thread; units are closed after this. */
static inline void gpu_side_stop(gpu_side *s) {
    tagc_queue_close(s->queue);
    pthread_join(s->thread, NULL);
}

/* After its units. */
static inline void gpu_side_close(gpu_side *s) {
    tagc_queue_destroy(s->queue);
    s->device->runtime.StreamDestroy(s->stream);
    tagc_kernels_close(s->kernels);
    tagc_device_close(s->device);
}

static inline void *gpu_array(const gpu_side *s, size_t n_bytes) {
    const tagc_heap *heap = &s->kernels->arrays.heap;
    void *memory;
    expect(heap->create(heap->context, n_bytes, "an array", &memory), "memory of the device");
    return memory;
}

static inline void gpu_array_free(const gpu_side *s, void *memory, size_t n_bytes) {
    const tagc_heap *heap = &s->kernels->arrays.heap;
    heap->destroy(heap->context, memory, n_bytes);
}

/* Whether there are a device and kernels, so that one line names everything that is missing. */
static inline int gpu_is_here(const char *program, const char *library) {
    tagc_device *device = NULL;
    tagc_kernels *kernels = NULL;
    tagc_status status = tagc_device_open("cuda", library, 0, &device);
    if (status == TAGC_OK) status = tagc_kernels_open(device, &kernels);
    if (status != TAGC_OK) printf("%s: skipped: %s\n", program, tagc_last_error());
    tagc_kernels_close(kernels);
    tagc_device_close(device);
    return status == TAGC_OK;
}

#endif
