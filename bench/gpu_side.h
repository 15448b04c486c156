/* One rank's models with kernels, its queue and the thread that exchanges: for benches of ranks that are threads and share a device. */
#ifndef TAGC_BENCH_GPU_SIDE_H
#define TAGC_BENCH_GPU_SIDE_H

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

/* One tensor, of which 2 bits of the largest 5 % of its values are sent. */
typedef struct gpu_unit {
    tagc_model *model;
    uint64_t n_elems, first, n_output; /* of the sums: elements [first, first + n_output) */
} gpu_unit;

static inline void *gpu_side_main(void *queue) {
    tagc_queue_run(queue);
    return NULL;
}

static inline void gpu_side_open(gpu_side *s, const char *library) {
    expect(tagc_device_open("cuda", library, 0, &s->device), "device");
    expect(tagc_kernels_open(s->device, &s->kernels), "kernels");
    expect(tagc_queue_create(s->device, s->kernels, 2, &s->queue), "queue");
    expect(tagc_device_check(
               s->device,
               s->device->runtime.StreamCreateWithPriority(&s->stream, TAGC_STREAM_NON_BLOCKING, 0),
               "making a stream"),
           "stream");
    if (pthread_create(&s->thread, NULL, gpu_side_main, s->queue)) fail("threads");
}

/* Collective. queue: NULL: arrays are the host's. */
static inline void gpu_unit_open(tagc_queue *queue, tagc_comm *comm, uint64_t n_elems, int output,
                                 int n_threads, gpu_unit *u) {
    const tagc_tensor tensor = {"values", &n_elems, 1, 0, TAGC_CLASS_COMPRESSED};
    tagc_schedule_options schedule;
    tagc_model_options options;
    tagc_schedule_options_init(&schedule);
    schedule.gentle = 0;
    tagc_model_options_init(&options);
    options.schedule.options = &schedule;
    options.layout.output = output;
    options.n_threads = n_threads;
    expect(queue ? tagc_model_create_on(queue, NULL, comm, &tensor, 1, &options, &u->model)
                 : tagc_model_create(NULL, comm, &tensor, 1, &options, &u->model),
           "model");
    u->n_elems = n_elems;
    expect(tagc_model_owned(u->model, tagc_comm_rank(comm), 0, &u->first, &u->n_output), "model");
}

/* The sums go to `output` (n_output,), on a device where there is a stream. */
static inline void gpu_unit_begin(const gpu_unit *u, void *input, void *output, void *stream, int waits) {
    const tagc_piece given = {0, 0, u->n_elems, input}, wanted = {0, u->first, u->n_output, output};
    expect(stream ? tagc_model_begin_on(u->model, 0, &given, 1, &wanted, 1, stream, waits)
                  : tagc_model_begin(u->model, 0, &given, 1, &wanted, 1),
           "an exchange");
}

/* Ends the thread; models are destroyed after this. */
static inline void gpu_side_stop(gpu_side *s) {
    tagc_queue_close(s->queue);
    pthread_join(s->thread, NULL);
}

/* After its models. */
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
