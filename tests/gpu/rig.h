/* One rank with a device of the fake runtime: units whose gradients a kernel writes, a queue, and a thread
 * that exchanges.
 *
 * A caller's stream gets, for each step and unit: write the gradient | staged exchange | note the result. A
 * pipelined caller writes all gradients of a step without waiting. `saboteur` stands between the queue and
 * the runtime, and leaves out or misdirects one call of each exchange. */
#ifndef TAGC_TESTS_DEVICE_RIG_H
#define TAGC_TESTS_DEVICE_RIG_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../test.h"
#include "fake_runtime.h"
#include "gpu/queue_private.h"

enum { RIG_UNITS = 5, RIG_STEPS = 4, RIG_MAX_ELEMS = 4096 };

typedef enum sabotage {
    SABOTAGE_NONE,
    DROP_WAIT,        /* the n-th StreamWaitEvent of an exchange does nothing */
    RECORD_ELSEWHERE, /* the n-th event of an exchange is recorded on the other stream */
    WRITE_ELSEWHERE,  /* so is the flag of its input */
    DROP_FLAG,        /* the wait for the flag of its result does nothing */
    READ_DEVICE,      /* the exchange reads the gradient where it lies */
} sabotage;

typedef struct saboteur {
    tagc_runtime real;
    sabotage kind;
    int n;                  /* which call of an exchange */
    int n_waits, n_records; /* of this exchange so far */
    void *streams[2];       /* of the queue: out, back */
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
    tagc_queue *queue;
    tagc_job *jobs[RIG_UNITS];
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

/* ---- what it asks a queue ---- */

/* Exchanges that tagc_queue_next would give at once. */
static inline uint64_t rig_n_ready(tagc_queue *queue) {
    pthread_mutex_lock(&queue->lock);
    uint64_t n = 0;
    while (queue->n_taken + n < queue->n_enqueued) {
        const ticket *one = ticket_of(queue, queue->n_taken + n + 1);
        if (!one->enqueued || !has_come(queue, one)) break;
        n++;
    }
    pthread_mutex_unlock(&queue->lock);
    return n;
}

/* ---- the saboteur ---- */

/* Of the rig that this thread makes, or enqueues in. */
static _Thread_local saboteur *rig_between;

static inline int rig_capturing(void *stream, int *status) {
    rig_between->n_waits = rig_between->n_records = 0; /* the first call of an exchange */
    return rig_between->real.StreamIsCapturing(stream, status);
}

static inline int rig_stream(void **stream, unsigned flags, int priority) {
    saboteur *between = rig_between;
    int code = between->real.StreamCreateWithPriority(stream, flags, priority);
    if (between->n_streams < 2) between->streams[between->n_streams++] = *stream;
    return code;
}

static inline int rig_wait(void *stream, void *event, unsigned flags) {
    saboteur *between = rig_between;
    if (between->kind == DROP_WAIT && between->n_waits++ == between->n) return 0;
    return between->real.StreamWaitEvent(stream, event, flags);
}

static inline int rig_record(void *event, void *stream) {
    saboteur *between = rig_between;
    if (between->kind == RECORD_ELSEWHERE && between->n_records++ == between->n)
        stream = between->streams[stream == between->streams[0]];
    return between->real.EventRecord(event, stream);
}

static inline int rig_write_flag(void *stream, uint64_t address, uint32_t value, unsigned flags) {
    saboteur *between = rig_between;
    if (between->kind == WRITE_ELSEWHERE) stream = between->streams[1];
    return between->real.StreamWriteValue32(stream, address, value, flags);
}

static inline int rig_wait_for_flag(void *stream, uint64_t address, uint32_t value, unsigned flags) {
    saboteur *between = rig_between;
    return between->kind == DROP_FLAG ? 0 : between->real.StreamWaitValue32(stream, address, value, flags);
}

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

/* Everything else comes first, as far as the streams let it. */
static inline void rig_be_late(device_rig *rig) {
    if (rig->is_late) fake_settle(NULL, NULL);
}

static inline void *rig_exchange_main(void *arg) {
    device_rig *rig = arg;
    uint64_t number, tag;
    const void *input;
    void *output;
    tagc_runtime *real = &rig->saboteur.real;
    real->SetDevice(rig->device->ordinal); /* for rig_be_late */
    for (;;) {
        rig_be_late(rig);
        if (rig->is_late && !rig_n_ready(rig->queue)) {
            rig->is_stuck = 1;
            tagc_queue_close(rig->queue);
            return NULL;
        }
        tagc_status status = tagc_queue_next(rig->queue, &number, &tag, &input, &output);
        if (!number) return NULL;
        if (status == TAGC_OK) {
            rig_be_late(rig);
            const float *read = rig->saboteur.kind == READ_DEVICE ? rig->gradients[tag] : input;
            status = rig->exchange(rig, (int)tag, read, output);
            rig_be_late(rig);
        }
        tagc_queue_finish(rig->queue, number, status, tagc_last_error());
        if (rig->is_late && number == rig->last) return NULL;
    }
}

/* ---- life ---- */

static inline tagc_status rig_make(device_rig *rig, int rank, int ordinal, uint64_t seed, int n_buffers) {
    rig->rank = rank;
    rig->seed = seed;
    for (int s = 0; s < RIG_STEPS; s++)
        for (int u = 0; u < RIG_UNITS; u++) rig->kernels[s][u] = (rig_kernel){rig, s, u};
    if (!rig->exchange) rig->exchange = rig_double;
    saboteur *between = rig_between = &rig->saboteur;
    char where[TAGC_WHERE_TEXT_BYTES];
    tagc_status status = tagc_runtime_bind(FAKE_CUDART, &between->real, where);
    if (status != TAGC_OK) return status;
    tagc_runtime table = between->real;
    table.StreamIsCapturing = rig_capturing;
    table.StreamCreateWithPriority = rig_stream;
    table.StreamWaitEvent = rig_wait;
    table.EventRecord = rig_record;
    status = tagc_device_create(&table, where, ordinal, &rig->device);
    if (status != TAGC_OK) {
        tagc_runtime_unbind(&table);
        return status;
    }
    between->real.SetDevice(ordinal);
    if ((status = tagc_queue_create(rig->device, NULL, n_buffers, &rig->queue)) != TAGC_OK) return status;
    between->real.StreamWriteValue32 = rig->device->runtime.StreamWriteValue32;
    between->real.StreamWaitValue32 = rig->device->runtime.StreamWaitValue32;
    rig->device->runtime.StreamWriteValue32 = rig_write_flag;
    rig->device->runtime.StreamWaitValue32 = rig_wait_for_flag;
    for (int u = RIG_UNITS - 1; u >= 0; u--) { /* the largest first: no growing with work under way */
        rig->n_elems[u] = 64 << u;
        size_t n_bytes = (size_t)rig->n_elems[u] * sizeof(float);
        rig->gradients[u] = fake_alloc(n_bytes);
        rig->outputs[u] = fake_alloc(n_bytes);
        for (int s = 0; s < RIG_STEPS; s++) rig->results[s][u] = calloc(1, n_bytes);
        status = tagc_job_create(rig->queue, (uint64_t)u, n_bytes, n_bytes, &rig->jobs[u]);
        if (status != TAGC_OK) return status;
    }
    if (between->real.EventCreateWithFlags(&rig->step_over, TAGC_EVENT_WITHOUT_TIMING))
        return TAGC_ERR_DEVICE;
    return fake_stream(&rig->caller) ? TAGC_ERR_DEVICE : TAGC_OK;
}

/* tagc_job_enqueue, with the sizes of the job. */
static inline tagc_status rig_put(device_rig *rig, int unit, const void *input, void *output, int waits) {
    size_t n_bytes = (size_t)rig->n_elems[unit] * sizeof(float);
    return tagc_job_enqueue(rig->jobs[unit], input, n_bytes, output, n_bytes, rig->caller, waits, &rig->last);
}

/* Enqueues one exchange with the kernels around it. */
static inline tagc_status rig_enqueue(device_rig *rig, int step, int unit) {
    const tagc_runtime *real = &rig->saboteur.real;
    void *back = tagc_queue_stream(rig->queue);
    rig_between = &rig->saboteur;
    if (rig->is_pipelined && unit == 0) { /* gradients of the last step are noted, and can be written again */
        real->EventRecord(rig->step_over, back);
        real->StreamWaitEvent(rig->caller, rig->step_over, 0);
    }
    rig_launch(rig, rig->caller, rig_write_gradient, step, unit);
    tagc_status status = rig_put(rig, unit, rig->gradients[unit], rig->outputs[unit], !rig->is_pipelined);
    rig_launch(rig, rig->is_pipelined ? back : rig->caller, rig_note_result, step, unit);
    return status;
}

static inline void rig_start(device_rig *rig) {
    if (pthread_create(&rig->thread, NULL, rig_exchange_main, rig)) abort();
}

/* Waits for the last exchange, and returns the first failure since this was called last. */
static inline tagc_status rig_wait_for_last(device_rig *rig) {
    int is_over = 0;
    tagc_status status = tagc_queue_wait(rig->queue, rig->last, 0, &is_over);
    tagc_queue_forgive(rig->queue);
    return is_over ? status : TAGC_ERR_STATE;
}

static inline int rig_synchronize(device_rig *rig) {
    tagc_runtime *real = &rig->saboteur.real;
    int code = real->StreamSynchronize(rig->caller);
    return code ? code : real->StreamSynchronize(tagc_queue_stream(rig->queue));
}

static inline void rig_join(device_rig *rig) {
    tagc_queue_close(rig->queue);
    pthread_join(rig->thread, NULL);
}

static inline void rig_end(device_rig *rig) {
    tagc_runtime *real = &rig->saboteur.real;
    for (int u = 0; u < RIG_UNITS; u++) tagc_job_destroy(rig->jobs[u]);
    tagc_queue_destroy(rig->queue);
    real->StreamSynchronize(rig->caller); /* its kernels know the arrays */
    for (int u = 0; u < RIG_UNITS; u++) {
        for (int s = 0; s < RIG_STEPS; s++) free(rig->results[s][u]);
        if (rig->gradients[u]) fake_free(rig->gradients[u]);
        if (rig->outputs[u]) fake_free(rig->outputs[u]);
    }
    real->EventDestroy(rig->step_over);
    tagc_device_close(rig->device);
}

#endif
