/* What a job puts into streams, and pinned memory that grows with it. queue.c explains the order. */
#include "core/memory.h"
#include "core/status.h"
#include "gpu/queue_private.h"

#include <stdio.h>
#include <string.h>

/* ---- enqueueing ---- */

/* The next ticket's record. Call with the launch lock. Waits while another exchange still uses it. */
static ticket *issue(tagc_job *job, tagc_unit *unit, uint64_t step) {
    tagc_queue *queue = job->queue;
    pthread_mutex_lock(&queue->lock);
    uint64_t number = queue->n_enqueued + 1;
    ticket *one = ticket_of(queue, number);
    while (one->number && !one->finished && !queue->is_closed) tagc_queue_sleep(queue, NULL);
    *one = (ticket){.queue = queue,
                    .number = number,
                    .tag = job->tag,
                    .unit = unit,
                    .step = step,
                    .n_bytes_out = job->n_bytes_out,
                    .first_add = queue->n_adds + 1,
                    .buffer = (int)(number % (uint64_t)queue->n_buffers)};
    queue->n_adds += tagc_unit_n_adds(unit);
    if (queue->is_closed) tagc_queue_fail_ticket(one, TAGC_ERR_STATE, "the queue is closed");
    if (queue->broken != TAGC_OK) tagc_queue_fail_ticket(one, queue->broken, queue->why);
    queue->n_enqueued = number;
    pthread_mutex_unlock(&queue->lock);
    return one;
}

static tagc_status copy_in(const tagc_job *job, const ticket *one, const buffer *own, const void *input) {
    return one->unit ? tagc_model_copy_in(one)
                     : tagc_queue_copy(job->queue, own->in, input, job->n_bytes_in, TAGC_COPY_TO_HOST,
                                       job->queue->out);
}

static tagc_status copy_out(const tagc_job *job, const ticket *one, const buffer *own, void *output) {
    return one->unit ? tagc_model_copy_out(one)
                     : tagc_queue_copy(job->queue, output, own->out, job->n_bytes_out, TAGC_COPY_TO_DEVICE,
                                       job->queue->back);
}

/* When this fails, no stream has any work yet, so the queue stays usable. */
static tagc_status check_arrays(const tagc_job *job, const void *input, const void *output, void *stream) {
    const tagc_device *device = job->queue->device;
    const tagc_runtime *runtime = &device->runtime;
    int is_capturing = 0;
    TAGC_TRY(tagc_device_check(device, runtime->StreamIsCapturing(stream, &is_capturing),
                               "asking for the stream's state"));
    if (is_capturing)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "the stream is being captured into a graph (cudaStreamIsCapturing says so), and a "
                         "graph cannot exchange anything "
                         "when it is replayed: capture without this exchange, or run it as it is");
    if (input) TAGC_TRY(tagc_device_check_place(device, input, "input"));
    return output ? tagc_device_check_place(device, output, "output") : TAGC_OK;
}

tagc_status tagc_queue_copy(const tagc_queue *queue, void *to, const void *from, size_t n_bytes,
                            tagc_copy kind, void *stream) {
    const tagc_runtime *runtime = runtime_of(queue);
    if (n_bytes == 0) return TAGC_OK;
    return tagc_device_check(queue->device, runtime->MemcpyAsync(to, from, n_bytes, kind, stream),
                             kind == TAGC_COPY_TO_HOST ? "copying to the host" : "copying to the device");
}

/* The sequence drawn at the top of queue.c. */
static tagc_status put_into_streams(tagc_job *job, ticket *one, const void *input, void *output, void *stream,
                                    int waits) {
    tagc_queue *queue = job->queue;
    const tagc_device *device = queue->device;
    const tagc_runtime *runtime = &device->runtime;
    buffer *own = &queue->buffers[one->buffer];
    const char *out = "copying to the host", *back = "copying back";
    int has_kernels = tagc_unit_has_kernels(one->unit);
    TAGC_TRY(tagc_device_check(device, runtime->EventRecord(own->came, stream), out));
    TAGC_TRY(tagc_device_check(device, runtime->StreamWaitEvent(queue->out, own->came, 0), out));
    TAGC_TRY(tagc_device_check(device, runtime->StreamWaitEvent(queue->out, own->back, 0), out));
    one->is_in_streams = 1;
    TAGC_TRY(has_kernels ? tagc_unit_put_out(one, input, output) : copy_in(job, one, own, input));
    uint32_t number = (uint32_t)one->number;
    TAGC_TRY(
        tagc_device_check(device, runtime->StreamWriteValue32(queue->out, queue->in_there, number, 0), out));
    TAGC_TRY(tagc_device_check(device, runtime->EventRecord(own->copied_out, queue->out), out));

    void *ready = own->copied_out;
    if (has_kernels) {
        TAGC_TRY(tagc_device_check(device, runtime->StreamWaitEvent(queue->add, own->copied_out, 0), out));
        TAGC_TRY(tagc_unit_put_add(one));
        TAGC_TRY(tagc_device_check(device, runtime->EventRecord(own->added, queue->add), out));
        ready = own->added;
    }
    TAGC_TRY(tagc_device_check(device, runtime->StreamWaitEvent(queue->back, ready, 0), back));
    TAGC_TRY(tagc_device_check(
        device, runtime->StreamWaitValue32(queue->back, queue->out_there, number, TAGC_WAIT_AT_LEAST), back));
    TAGC_TRY(has_kernels ? tagc_unit_put_back(one, output) : copy_out(job, one, own, output));
    TAGC_TRY(tagc_device_check(device, runtime->EventRecord(own->back, queue->back), back));
    if (waits == TAGC_WAITS_FOR_NOTHING) return TAGC_OK;
    void *event = waits == TAGC_WAITS_FOR_INPUT ? own->copied_out : own->back;
    return tagc_device_check(device, runtime->StreamWaitEvent(stream, event, 0), "waiting for the result");
}

/* Hands the input over, and waits for the exchange. */
static tagc_status wait_for_exchange(ticket *one) {
    tagc_queue *queue = one->queue;
    pthread_mutex_lock(&queue->lock);
    one->input_came = one->enqueued = 1;
    pthread_cond_broadcast(&queue->changed);
    while (!one->finished && !queue->is_closed) tagc_queue_sleep(queue, NULL);
    tagc_status status = one->finished ? TAGC_OK : tagc_fail(TAGC_ERR_STATE, "the queue is closed");
    pthread_mutex_unlock(&queue->lock);
    return status;
}

/* Where calls may wait until their work has run: nothing is put behind a flag, and the result is there on return. */
static tagc_status put_in_steps(const tagc_job *job, ticket *one, const void *input, void *output,
                                void *stream) {
    tagc_queue *queue = job->queue;
    const tagc_device *device = queue->device;
    const tagc_runtime *runtime = &device->runtime;
    buffer *own = &queue->buffers[one->buffer];
    TAGC_TRY(tagc_device_check(device, runtime->StreamSynchronize(stream), "waiting for the input"));
    one->is_in_streams = 1;
    TAGC_TRY(copy_in(job, one, own, input));
    TAGC_TRY(tagc_device_check(device, runtime->StreamSynchronize(queue->out), "copying to the host"));
    TAGC_TRY(wait_for_exchange(one));
    TAGC_TRY(copy_out(job, one, own, output));
    return tagc_device_check(device, runtime->StreamSynchronize(queue->back), "copying back");
}

/* is_dead: earlier exchanges, which are in streams, cannot go on either. */
static void settle(ticket *one, tagc_status status, int is_the_device, int is_dead) {
    tagc_queue *queue = one->queue;
    pthread_mutex_lock(&queue->lock);
    if (status != TAGC_OK) tagc_queue_fail_ticket(one, status, tagc_last_error());
    if (status != TAGC_OK && is_the_device)
        tagc_queue_break_down(queue, status, one->text, is_dead ? NO_TICKET : one->number - 1);
    if (one->status != TAGC_OK) one->input_came = 1;
    one->enqueued = 1;
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->lock);
}

void tagc_job_put_failed(tagc_job *job, tagc_unit *unit, uint64_t step, tagc_status status,
                         uint64_t *number) {
    char text[TEXT_BYTES];
    snprintf(text, sizeof text, "%s", tagc_last_error());
    pthread_mutex_lock(&job->queue->launch);
    ticket *one = issue(job, unit, step);
    *number = one->number;
    settle(one, tagc_fail(status, "%s", text), 0, 0);
    pthread_mutex_unlock(&job->queue->launch);
}

tagc_status tagc_job_put(tagc_job *job, tagc_unit *unit, uint64_t step, const void *input, void *output,
                         void *stream, int waits, uint64_t *number) {
    if (!job || !number || ((!input || !output) && !unit))
        return tagc_fail(TAGC_ERR_ARGUMENT, "job, input, output or ticket is NULL");
    tagc_queue *queue = job->queue;
    pthread_mutex_lock(&queue->launch);
    ticket *one = issue(job, unit, step);
    *number = one->number;
    tagc_status status = one->status;
    int before = 0, is_the_device = 0, is_dead = 1;
    if (status == TAGC_OK) {
        status = tagc_device_enter(queue->device, &before);
        is_the_device = status != TAGC_OK;
        if (status == TAGC_OK) {
            status = check_arrays(job, input, output, stream);
            is_the_device = status == TAGC_ERR_DEVICE;
            if (status == TAGC_OK) {
                status = queue->device->calls_wait ? put_in_steps(job, one, input, output, stream)
                                                   : put_into_streams(job, one, input, output, stream, waits);
                is_the_device = status != TAGC_OK;
                if (is_the_device && tagc_unit_has_kernels(unit)) is_dead = !tagc_unit_withdraw(one);
            }
            tagc_device_leave(queue->device, before);
        }
    } else {
        tagc_fail(status, "%s", one->text);
    }
    settle(one, status, is_the_device, is_dead);
    pthread_mutex_unlock(&queue->launch);
    return status;
}

tagc_status tagc_job_enqueue(tagc_job *job, const void *input, size_t n_bytes_in, void *output,
                             size_t n_bytes_out, void *stream, int waits, uint64_t *number) {
    if (job && n_bytes_in != job->n_bytes_in)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_bytes_in is %zu, must be %zu: that of the job", n_bytes_in,
                         job->n_bytes_in);
    if (job && n_bytes_out != job->n_bytes_out)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_bytes_out is %zu, must be %zu: that of the job", n_bytes_out,
                         job->n_bytes_out);
    return tagc_job_put(job, NULL, 0, input, output, stream, waits, number);
}

/* ---- jobs ---- */

/* Replaces *memory by pinned memory of n_bytes. */
static tagc_status replace(tagc_queue *queue, void **memory, size_t n_bytes) {
    const tagc_runtime *runtime = runtime_of(queue);
    void *larger = NULL;
    TAGC_TRY(tagc_device_check(queue->device, runtime->HostAlloc(&larger, n_bytes, TAGC_PINNED_PORTABLE),
                               "allocating pinned memory"));
    void *old = *memory;
    *memory = larger;
    return old ? tagc_device_check(queue->device, runtime->FreeHost(old), "freeing pinned memory") : TAGC_OK;
}

static tagc_status grow(tagc_queue *queue, size_t n_bytes_in, size_t n_bytes_out) {
    const tagc_runtime *runtime = runtime_of(queue);
    TAGC_TRY(tagc_device_check(queue->device, runtime->StreamSynchronize(queue->out), "waiting for copies"));
    TAGC_TRY(tagc_device_check(queue->device, runtime->StreamSynchronize(queue->back), "waiting for copies"));
    for (int i = 0; i < queue->n_buffers; i++) {
        if (n_bytes_in > queue->n_bytes_in) TAGC_TRY(replace(queue, &queue->buffers[i].in, n_bytes_in));
        if (n_bytes_out > queue->n_bytes_out) TAGC_TRY(replace(queue, &queue->buffers[i].out, n_bytes_out));
    }
    if (n_bytes_in > queue->n_bytes_in) queue->n_bytes_in = n_bytes_in;
    if (n_bytes_out > queue->n_bytes_out) queue->n_bytes_out = n_bytes_out;
    return TAGC_OK;
}

/* Then no failed exchange uses pinned memory either. */
tagc_status tagc_queue_wait_for_all(tagc_queue *queue) {
    pthread_mutex_lock(&queue->lock);
    while (queue->n_finished < queue->n_enqueued && !queue->is_closed) tagc_queue_sleep(queue, NULL);
    tagc_status status = queue->broken;
    if (status != TAGC_OK) tagc_fail(status, "%s", queue->why);
    if (queue->is_closed) status = tagc_fail(TAGC_ERR_STATE, "the queue is closed");
    pthread_mutex_unlock(&queue->lock);
    return status;
}

tagc_status tagc_job_create(tagc_queue *queue, uint64_t tag, size_t n_bytes_in, size_t n_bytes_out,
                            tagc_job **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!queue) return tagc_fail(TAGC_ERR_ARGUMENT, "queue is NULL");
    if (n_bytes_in == 0 || n_bytes_out == 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_bytes_in is %zu and n_bytes_out %zu, must be at least 1",
                         n_bytes_in, n_bytes_out);
    tagc_status status = TAGC_OK;
    pthread_mutex_lock(&queue->launch);
    if (n_bytes_in > queue->n_bytes_in || n_bytes_out > queue->n_bytes_out) {
        int before = 0;
        status = tagc_queue_wait_for_all(queue);
        if (status == TAGC_OK) status = tagc_device_enter(queue->device, &before);
        if (status == TAGC_OK) {
            status = grow(queue, n_bytes_in, n_bytes_out);
            tagc_device_leave(queue->device, before);
        }
    }
    tagc_job *job = NULL;
    if (status == TAGC_OK) status = tagc_memory_create(sizeof *job, "a job", (void **)&job);
    pthread_mutex_unlock(&queue->launch);
    if (status != TAGC_OK) return status;
    *job = (tagc_job){.queue = queue, .tag = tag, .n_bytes_in = n_bytes_in, .n_bytes_out = n_bytes_out};
    *out = job;
    return TAGC_OK;
}

uint64_t tagc_queue_pinned_bytes(tagc_queue *queue) {
    if (!queue) return 0;
    pthread_mutex_lock(&queue->launch);
    const rooms_needs *rooms = &queue->rooms;
    size_t one =
        queue->n_bytes_in + queue->n_bytes_out + rooms->n_rooms * rooms->head_bytes + rooms->here_bytes;
    uint64_t n_bytes = (uint64_t)queue->n_buffers * one;
    pthread_mutex_unlock(&queue->launch);
    return n_bytes;
}

void tagc_job_destroy(tagc_job *job) {
    tagc_memory_destroy(job);
}
