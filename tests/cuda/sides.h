/* One rank of a test whose arrays are in host memory, or on a device of the fake runtime with kernels of the harness. */
#ifndef TAGC_TESTS_CUDA_SIDES_H
#define TAGC_TESTS_CUDA_SIDES_H

#include "../device/fake_runtime.h"
#include "../exchange/ranks.h"
#include "device/kernels.h"
#include "harness_maker.h"

typedef struct side {
    tagc_runtime real;
    int n_waits, dropped;
    tagc_device *device;
    tagc_kernels *kernels; /* NULL: on the processor */
    float *gradient, *output;
    tagc_reducer *reducer;
    tagc_gatherer *gatherer;
} side;

#define PASS(call, ...) return ((side *)context)->real.call(((side *)context)->real.context, __VA_ARGS__)
static inline int pass_count(void *context, int *n) {
    PASS(device_count, n);
}
static inline int pass_get(void *context, int *n) {
    PASS(device_get, n);
}
static inline int pass_set(void *context, int n) {
    PASS(device_set, n);
}
static inline int pass_stream(void *context, void **s) {
    PASS(stream_create, s);
}
static inline int pass_destroy(void *context, void *s) {
    PASS(stream_destroy, s);
}
static inline int pass_copy(void *context, void *to, const void *from, size_t n, tagc_copy kind, void *s) {
    PASS(copy, to, from, n, kind, s);
}
static inline int pass_pinned(void *context, void **m, size_t n) {
    PASS(pinned_alloc, m, n);
}
static inline int pass_pinned_free(void *context, void *m) {
    PASS(pinned_free, m);
}
static inline int pass_alloc(void *context, void **m, size_t n, void *s) {
    PASS(device_alloc, m, n, s);
}
static inline int pass_free(void *context, void *m, void *s) {
    PASS(device_free, m, s);
}
static inline int pass_fill(void *context, void *m, int byte, size_t n, void *s) {
    PASS(device_fill, m, byte, n, s);
}
static inline int pass_place(void *context, const void *p, tagc_place *place) {
    PASS(pointer_place, p, place);
}
static inline const char *pass_text(void *context, int code) {
    PASS(error_text, code);
}
static inline int wait_or_not(void *context, void *s) {
    side *own = context;
    return own->n_waits++ == own->dropped ? 0 : own->real.stream_synchronize(own->real.context, s);
}
static inline void pass_forget(void *context) {
    ((side *)context)->real.forget_error(((side *)context)->real.context);
}
static inline void pass_unload(void *context) {
    ((side *)context)->real.unload(((side *)context)->real.context);
}
#undef PASS

static inline int open_device(rank_run *run, side *own, int rank) {
    if (!CHECK(run, tagc_cuda_bind(FAKE_CUDART, &own->real) == TAGC_OK)) return 0;
    tagc_runtime table = own->real;
    table.context = own;
    table.device_count = pass_count, table.device_get = pass_get, table.device_set = pass_set;
    table.stream_create = pass_stream, table.stream_destroy = pass_destroy;
    table.stream_synchronize = wait_or_not;
    table.copy = pass_copy, table.pinned_alloc = pass_pinned, table.pinned_free = pass_pinned_free;
    table.device_alloc = pass_alloc, table.device_free = pass_free, table.device_fill = pass_fill;
    table.pointer_place = pass_place, table.error_text = pass_text;
    table.forget_error = pass_forget, table.unload = pass_unload;
    own->dropped = -1;
    return CHECK(run, tagc_device_create(&table, rank % FAKE_MAX_DEVICES, &own->device) == TAGC_OK) &&
           CHECK(run, tagc_kernels_create(own->device, harness_maker(), &own->kernels) == TAGC_OK);
}

static inline float *take(side *own, size_t n) {
    void *memory = NULL;
    if (own->kernels)
        own->kernels->heap.create(own->kernels, n * sizeof(float), "test", &memory);
    else
        memory = malloc(n * sizeof(float));
    return memory;
}

static inline void give(side *own, float *memory, size_t n) {
    if (own->kernels)
        own->kernels->heap.destroy(own->kernels, memory, n * sizeof(float));
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
