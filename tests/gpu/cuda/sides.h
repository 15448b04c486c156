/* One rank of a test whose arrays are in host memory, or on a device of the fake runtime with kernels of the harness. */
#ifndef TAGC_TESTS_CUDA_SIDES_H
#define TAGC_TESTS_CUDA_SIDES_H

#include "../../exchange/ranks.h"
#include "../fake_runtime.h"
#include "gpu/kernels.h"
#include "harness_maker.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct side {
    int n_waits, dropped;
    tagc_device *device;
    tagc_kernels *kernels; /* NULL: on the processor */
    float *gradient, *output;
    tagc_reducer *reducer;
    tagc_gatherer *gatherer;
} side;

/* The sides with a device, so that a wait for a stream finds its side. */
enum { MAX_SIDES = 64 };
static side *open_sides[MAX_SIDES];
static pthread_mutex_t open_sides_lock = PTHREAD_MUTEX_INITIALIZER;
static int (*real_wait)(void *stream);

static inline void swap_side(side *from, side *to) {
    pthread_mutex_lock(&open_sides_lock);
    int i = 0;
    while (i < MAX_SIDES && open_sides[i] != from) i++;
    if (i == MAX_SIDES) abort();
    open_sides[i] = to;
    pthread_mutex_unlock(&open_sides_lock);
}

/* Leaves out the wait that its side has dropped. */
static inline int wait_or_not(void *stream) {
    side *own = NULL;
    pthread_mutex_lock(&open_sides_lock);
    for (int i = 0; i < MAX_SIDES && !own; i++)
        if (open_sides[i] && open_sides[i]->kernels->stream == stream) own = open_sides[i];
    int (*wait)(void *) = real_wait;
    pthread_mutex_unlock(&open_sides_lock);
    return own && own->n_waits++ == own->dropped ? 0 : wait(stream);
}

static inline int open_device(rank_run *run, side *own, int rank) {
    tagc_runtime runtime;
    char where[TAGC_WHERE_TEXT_BYTES];
    if (!CHECK(run, tagc_runtime_bind(FAKE_CUDART, &runtime, where) == TAGC_OK)) return 0;
    pthread_mutex_lock(&open_sides_lock);
    real_wait = runtime.StreamSynchronize; /* the same for all */
    pthread_mutex_unlock(&open_sides_lock);
    runtime.StreamSynchronize = wait_or_not;
    own->dropped = -1;
    if (!CHECK(run, tagc_device_create(&runtime, where, rank % FAKE_MAX_DEVICES, &own->device) == TAGC_OK) ||
        !CHECK(run, tagc_kernels_create(own->device, harness_maker(), &own->kernels) == TAGC_OK))
        return 0;
    swap_side(NULL, own);
    return 1;
}

static inline float *take(side *own, size_t n) {
    void *memory = NULL;
    if (own->kernels)
        own->kernels->arrays.heap.create(own->kernels, n * sizeof(float), "test", &memory);
    else
        memory = malloc(n * sizeof(float));
    return memory;
}

static inline void give(side *own, float *memory, size_t n) {
    if (own->kernels)
        own->kernels->arrays.heap.destroy(own->kernels, memory, n * sizeof(float));
    else
        free(memory);
}

static inline int write_to(side *own, float *to, const float *from, size_t n) {
    if (own->kernels) return tagc_kernels_write(own->kernels, to, from, n * sizeof *to) == TAGC_OK;
    memcpy(to, from, n * sizeof *to);
    return 1;
}

static inline int read_from(side *own, float *to, const float *from, size_t n) {
    if (own->kernels) return tagc_kernels_read(own->kernels, to, from, n * sizeof *to) == TAGC_OK;
    memcpy(to, from, n * sizeof *to);
    return 1;
}

static inline void close_side(rank_run *run, side *own) {
    if (!own->kernels) return;
    CHECK(run, tagc_kernels_bytes(own->kernels) == own->kernels->work_bytes);
    swap_side(own, NULL);
    tagc_kernels_close(own->kernels);
    tagc_device_close(own->device);
}

static inline void check_fake(void) {
    for (int i = 0; i < fake_n_mistakes(); i++) print_error("mistake: %s\n", fake_mistake(i));
    assert_int_equal(fake_n_mistakes(), 0);
    assert_int_equal(fake_n_live(), 0);
    assert_int_equal(fake_n_device_blocks(), 0);
}

#endif
