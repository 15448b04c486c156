/* One rank with a device of the fake runtime: units whose gradients a kernel writes, a stager, and a thread
 * that exchanges.
 *
 * A caller's stream gets, for each step and unit: write the gradient | staged exchange | note the result. A
 * pipelined caller writes all gradients of a step without waiting. `saboteur` stands between the stager and
 * the runtime, and leaves out or misdirects one call of each exchange. */
#ifndef TAGC_TESTS_DEVICE_RIG_H
#define TAGC_TESTS_DEVICE_RIG_H

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "device/stager.h"
#include "fake_runtime.h"

enum { RIG_UNITS = 5, RIG_STEPS = 4, RIG_MAX_ELEMS = 4096 };

typedef enum sabotage {
    SABOTAGE_NONE,
    DROP_WAIT,        /* the n-th tagc_runtime.stream_wait_event of an exchange does nothing */
    RECORD_ELSEWHERE, /* the n-th event of an exchange is recorded on the other stream */
    READ_DEVICE,      /* the exchange reads the gradient where it lies */
} sabotage;

typedef struct saboteur {
    tagc_runtime real;
    sabotage kind;
    int n;                  /* which call of an exchange */
    int n_waits, n_records; /* of this exchange so far */
    void *streams[2];       /* of the stager: out, back */
    int n_streams;
} saboteur;

/* What a kernel is about. */
typedef struct rig_kernel {
    struct device_rig *rig;
    int step, unit;
} rig_kernel;

typedef struct device_rig {
    saboteur saboteur;
    tagc_device *device;
    tagc_stager *stager;
    tagc_stage *stages[RIG_UNITS];
    rig_kernel kernels[RIG_STEPS][RIG_UNITS];
    void *caller; /* stream */
    uint64_t seed, last;
    int rank, n_elems[RIG_UNITS];
    float *gradients[RIG_UNITS], *outputs[RIG_UNITS]; /* device memory */
    float *results[RIG_STEPS][RIG_UNITS];             /* what the caller's kernel saw in outputs */
    /* The exchange of a unit; the default doubles. */
    tagc_status (*exchange)(struct device_rig *rig, int unit, const float *input, float *output);
    void *context;
    pthread_t thread;
    int is_stuck; /* nothing could ever go on */
    int is_late;
    int is_pipelined; /* the caller's stream does not wait: results are noted where they come back, as DDP's are */
    void *step_over; /* event */
} device_rig;

/* ---- the saboteur ---- */

static inline int rig_capturing(void *context, void *stream, int *is) {
    saboteur *between = context; /* the first call of an exchange */
    between->n_waits = between->n_records = 0;
    return between->real.stream_is_capturing(between->real.context, stream, is);
}

static inline int rig_stream(void *context, void **stream) {
    saboteur *between = context;
    int code = between->real.stream_create(between->real.context, stream);
    if (between->n_streams < 2) between->streams[between->n_streams++] = *stream;
    return code;
}

static inline int rig_wait(void *context, void *stream, void *event) {
    saboteur *between = context;
    if (between->kind == DROP_WAIT && between->n_waits++ == between->n) return 0;
    return between->real.stream_wait_event(between->real.context, stream, event);
}

static inline int rig_record(void *context, void *event, void *stream) {
    saboteur *between = context;
    if (between->kind == RECORD_ELSEWHERE && between->n_records++ == between->n)
        stream = between->streams[stream == between->streams[0]];
    return between->real.event_record(between->real.context, event, stream);
}

#define PASS_ON(call, ...)                                                                                   \
    return ((saboteur *)context)->real.call(((saboteur *)context)->real.context, __VA_ARGS__)
static inline int rig_count(void *context, int *n) {
    PASS_ON(device_count, n);
}
static inline int rig_get(void *context, int *n) {
    PASS_ON(device_get, n);
}
static inline int rig_set(void *context, int n) {
    PASS_ON(device_set, n);
}
static inline int rig_stream_destroy(void *context, void *stream) {
    PASS_ON(stream_destroy, stream);
}
static inline int rig_stream_query(void *context, void *stream, int *done) {
    PASS_ON(stream_query, stream, done);
}
static inline int rig_stream_sync(void *context, void *stream) {
    PASS_ON(stream_synchronize, stream);
}
static inline int rig_event(void *context, void **event) {
    PASS_ON(event_create, event);
}
static inline int rig_event_destroy(void *context, void *event) {
    PASS_ON(event_destroy, event);
}
static inline int rig_event_query(void *context, void *event, int *done) {
    PASS_ON(event_query, event, done);
}
static inline int rig_event_sync(void *context, void *event) {
    PASS_ON(event_synchronize, event);
}
static inline int rig_copy(void *context, void *to, const void *from, size_t n, tagc_copy kind,
                           void *stream) {
    PASS_ON(copy, to, from, n, kind, stream);
}
static inline int rig_function(void *context, void *stream, void (*function)(void *), void *arg) {
    PASS_ON(host_function, stream, function, arg);
}
static inline int rig_pinned(void *context, void **memory, size_t n) {
    PASS_ON(pinned_alloc, memory, n);
}
static inline int rig_pinned_free(void *context, void *memory) {
    PASS_ON(pinned_free, memory);
}
static inline int rig_alloc(void *context, void **memory, size_t n, void *stream) {
    PASS_ON(device_alloc, memory, n, stream);
}
static inline int rig_free(void *context, void *memory, void *stream) {
    PASS_ON(device_free, memory, stream);
}
static inline int rig_fill(void *context, void *memory, int byte, size_t n, void *stream) {
    PASS_ON(device_fill, memory, byte, n, stream);
}
static inline int rig_place(void *context, const void *pointer, tagc_place *place) {
    PASS_ON(pointer_place, pointer, place);
}
static inline const char *rig_text(void *context, int code) {
    PASS_ON(error_text, code);
}
static inline void rig_forget(void *context) {
    ((saboteur *)context)->real.forget_error(((saboteur *)context)->real.context);
}
static inline void rig_unload(void *context) {
    ((saboteur *)context)->real.unload(((saboteur *)context)->real.context);
}
#undef PASS_ON

/* ---- kernels and arrays ---- */

static inline float rig_value(const device_rig *rig, int step, int unit, int i) {
    uint64_t x =
        rig->seed * 1000003 + (uint64_t)(((step * RIG_UNITS + unit) * RIG_MAX_ELEMS + i) * 64 + rig->rank);
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (float)((double)(x >> 40) / 16777216.0 - 0.5);
}

static inline void rig_write_gradient(void *arg) {
    rig_kernel *one = arg;
    float *to = fake_view(one->rig->gradients[one->unit]);
    for (int i = 0; i < one->rig->n_elems[one->unit]; i++)
        to[i] = rig_value(one->rig, one->step, one->unit, i);
}

static inline void rig_note_result(void *arg) {
    rig_kernel *one = arg;
    size_t n_bytes = (size_t)one->rig->n_elems[one->unit] * sizeof(float);
    float *from = fake_view(one->rig->outputs[one->unit]);
    memcpy(one->rig->results[one->step][one->unit], from, n_bytes);
    memset(from, 0x11, n_bytes);
    memset(fake_view(one->rig->gradients[one->unit]), 0x22, n_bytes);
}

static inline int rig_launch(device_rig *rig, void *stream, void (*kernel)(void *), int step, int unit) {
    return fake_launch(stream, kernel, &rig->kernels[step][unit]);
}

/* ---- the thread that exchanges ---- */

static inline tagc_status rig_double(device_rig *rig, int unit, const float *input, float *output) {
    for (int i = 0; i < rig->n_elems[unit]; i++) output[i] = 2 * input[i];
    return TAGC_OK;
}

static inline int rig_n_sleeping(void *context) {
    return tagc_stager_n_waiting(context);
}

/* Everything else comes first, as far as the streams let it. */
static inline void rig_be_late(device_rig *rig) {
    if (rig->is_late) fake_settle(rig_n_sleeping, rig->stager);
}

static inline void *rig_exchange_main(void *arg) {
    device_rig *rig = arg;
    uint64_t ticket, tag;
    const void *input;
    void *output;
    tagc_runtime *real = &rig->saboteur.real;
    real->device_set(real->context, rig->device->ordinal);
    for (;;) {
        rig_be_late(rig);
        if (rig->is_late && !tagc_stager_n_ready(rig->stager)) {
            rig->is_stuck = 1;
            tagc_stager_close(rig->stager);
            return NULL;
        }
        tagc_status status = tagc_stager_next(rig->stager, &ticket, &tag, &input, &output);
        if (!ticket) return NULL;
        if (status == TAGC_OK) {
            rig_be_late(rig);
            const float *read = rig->saboteur.kind == READ_DEVICE ? rig->gradients[tag] : input;
            status = rig->exchange(rig, (int)tag, read, output);
            rig_be_late(rig);
        }
        tagc_stager_finish(rig->stager, ticket, status, tagc_last_error());
        if (rig->is_late && ticket == rig->last) return NULL;
    }
}

/* ---- life ---- */

static inline tagc_status rig_make(device_rig *rig, int rank, int ordinal, uint64_t seed, int n_slots) {
    rig->rank = rank;
    rig->seed = seed;
    for (int s = 0; s < RIG_STEPS; s++)
        for (int u = 0; u < RIG_UNITS; u++) rig->kernels[s][u] = (rig_kernel){rig, s, u};
    if (!rig->exchange) rig->exchange = rig_double;
    saboteur *between = &rig->saboteur;
    tagc_status status = tagc_cuda_bind(FAKE_CUDART, &between->real);
    if (status != TAGC_OK) return status;
    tagc_runtime table = between->real;
    table.context = between;
    table.stream_is_capturing = rig_capturing;
    table.stream_create = rig_stream;
    table.stream_wait_event = rig_wait;
    table.event_record = rig_record;
    table.device_count = rig_count;
    table.device_get = rig_get;
    table.device_set = rig_set;
    table.stream_destroy = rig_stream_destroy;
    table.stream_query = rig_stream_query;
    table.stream_synchronize = rig_stream_sync;
    table.event_create = rig_event;
    table.event_destroy = rig_event_destroy;
    table.event_query = rig_event_query;
    table.event_synchronize = rig_event_sync;
    table.copy = rig_copy;
    table.host_function = rig_function;
    table.pinned_alloc = rig_pinned;
    table.pinned_free = rig_pinned_free;
    table.device_alloc = rig_alloc;
    table.device_free = rig_free;
    table.device_fill = rig_fill;
    table.pointer_place = rig_place;
    table.error_text = rig_text;
    table.forget_error = rig_forget;
    table.unload = rig_unload;
    status = tagc_device_create(&table, ordinal, &rig->device);
    if (status != TAGC_OK) {
        between->real.unload(between->real.context);
        return status;
    }
    between->real.device_set(between->real.context, ordinal);
    if ((status = tagc_stager_create(rig->device, n_slots, &rig->stager)) != TAGC_OK) return status;
    for (int u = RIG_UNITS - 1; u >= 0; u--) { /* the largest first: no growing with work under way */
        rig->n_elems[u] = 64 << u;
        size_t n_bytes = (size_t)rig->n_elems[u] * sizeof(float);
        rig->gradients[u] = fake_alloc(n_bytes);
        rig->outputs[u] = fake_alloc(n_bytes);
        for (int s = 0; s < RIG_STEPS; s++) rig->results[s][u] = calloc(1, n_bytes);
        status = tagc_stage_create(rig->stager, (uint64_t)u, n_bytes, n_bytes, &rig->stages[u]);
        if (status != TAGC_OK) return status;
    }
    if (between->real.event_create(between->real.context, &rig->step_over)) return TAGC_ERR_DEVICE;
    return fake_stream(&rig->caller) ? TAGC_ERR_DEVICE : TAGC_OK;
}

/* Enqueues one exchange with the kernels around it. */
static inline tagc_status rig_enqueue(device_rig *rig, int step, int unit) {
    const tagc_runtime *real = &rig->saboteur.real;
    void *back = tagc_stager_stream(rig->stager);
    if (rig->is_pipelined && unit == 0) { /* gradients of the last step are noted, and can be written again */
        real->event_record(real->context, rig->step_over, back);
        real->stream_wait_event(real->context, rig->caller, rig->step_over);
    }
    rig_launch(rig, rig->caller, rig_write_gradient, step, unit);
    tagc_status status = tagc_stage_enqueue(rig->stages[unit], rig->gradients[unit], rig->outputs[unit],
                                            rig->caller, !rig->is_pipelined, &rig->last);
    rig_launch(rig, rig->is_pipelined ? back : rig->caller, rig_note_result, step, unit);
    return status;
}

static inline void rig_start(device_rig *rig) {
    if (pthread_create(&rig->thread, NULL, rig_exchange_main, rig)) abort();
}

static inline int rig_synchronize(device_rig *rig) {
    tagc_runtime *real = &rig->saboteur.real;
    int code = real->stream_synchronize(real->context, rig->caller);
    return code ? code : real->stream_synchronize(real->context, tagc_stager_stream(rig->stager));
}

static inline void rig_join(device_rig *rig) {
    tagc_stager_close(rig->stager);
    pthread_join(rig->thread, NULL);
}

static inline void rig_end(device_rig *rig) {
    tagc_runtime *real = &rig->saboteur.real;
    for (int u = 0; u < RIG_UNITS; u++) tagc_stage_destroy(rig->stages[u]);
    tagc_stager_destroy(rig->stager);
    real->stream_synchronize(real->context, rig->caller); /* its kernels know the arrays */
    for (int u = 0; u < RIG_UNITS; u++) {
        for (int s = 0; s < RIG_STEPS; s++) free(rig->results[s][u]);
        if (rig->gradients[u]) fake_free(rig->gradients[u]);
        if (rig->outputs[u]) fake_free(rig->outputs[u]);
    }
    real->event_destroy(real->context, rig->step_over);
    tagc_device_close(rig->device);
}

#endif
