/* What a stage puts into streams, and pinned memory that grows with it. stager.c explains the order. */
#include "core/memory.h"
#include "core/status.h"
#include "gpu/stager_private.h"

#include <string.h>

/* ---- enqueueing ---- */

/* The next ticket's record. Call with the launch lock. Waits while another exchange still uses it. */
static ticket *issue(tagc_stage *stage) {
    tagc_stager *stager = stage->stager;
    pthread_mutex_lock(&stager->lock);
    uint64_t number = stager->n_enqueued + 1;
    ticket *one = ticket_of(stager, number);
    while (one->number && !(one->finished && (one->left || !one->is_awaited || stager->broken != TAGC_OK)) &&
           !stager->is_closed)
        pthread_cond_wait(&stager->changed, &stager->lock);
    *one = (ticket){.stager = stager,
                    .number = number,
                    .tag = stage->tag,
                    .n_bytes_out = stage->n_bytes_out,
                    .slot = (int)(number % (uint64_t)stager->n_slots)};
    if (stager->is_closed) tagc_stager_fail_ticket(one, TAGC_ERR_STATE, "the stager is closed");
    if (stager->broken != TAGC_OK) tagc_stager_fail_ticket(one, stager->broken, stager->why);
    stager->n_enqueued = number;
    pthread_mutex_unlock(&stager->lock);
    return one;
}

/* When this fails, no stream has any work yet, so the stager stays usable. */
static tagc_status check_arrays(const tagc_stage *stage, const void *input, const void *output,
                                void *stream) {
    const tagc_device *device = stage->stager->device;
    const tagc_runtime *runtime = &device->runtime;
    int is_capturing = 0;
    TAGC_TRY(tagc_device_check(device, runtime->StreamIsCapturing(stream, &is_capturing),
                               "asking for the stream's state"));
    if (is_capturing)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "the stream is being captured into a graph (cudaStreamIsCapturing says so), and a "
                         "graph cannot exchange anything "
                         "when it is replayed: capture without this exchange, or run it as it is");
    TAGC_TRY(tagc_device_check_place(device, input, "input"));
    return tagc_device_check_place(device, output, "output");
}

/* In a stream of the stager's. A stage without copies does nothing. */
static tagc_status put_copy(const tagc_stage *stage, void *to, const void *from, size_t n_bytes,
                            tagc_copy kind, void *stream) {
    const tagc_device *device = stage->stager->device;
    const tagc_runtime *runtime = &device->runtime;
    if (n_bytes == 0) return TAGC_OK;
    return tagc_device_check(device, runtime->MemcpyAsync(to, from, n_bytes, kind, stream),
                             kind == TAGC_COPY_TO_HOST ? "copying to the host" : "copying back");
}

/* The sequence drawn at the top of stager.c. */
static tagc_status put_into_streams(tagc_stage *stage, ticket *one, const void *input, void *output,
                                    void *stream, int waits) {
    tagc_stager *stager = stage->stager;
    const tagc_device *device = stager->device;
    const tagc_runtime *runtime = &device->runtime;
    slot *own = &stager->slots[one->slot];
    const char *out = "copying to the host", *back = "copying back";
    TAGC_TRY(tagc_device_check(device, runtime->EventRecord(own->came, stream), out));
    TAGC_TRY(tagc_device_check(device, runtime->StreamWaitEvent(stager->out, own->came, 0), out));
    TAGC_TRY(tagc_device_check(device, runtime->StreamWaitEvent(stager->out, own->back, 0), out));
    TAGC_TRY(put_copy(stage, own->in, input, stage->n_bytes_in, TAGC_COPY_TO_HOST, stager->out));
    TAGC_TRY(
        tagc_device_check(device, runtime->LaunchHostFunc(stager->out, tagc_stager_input_came, one), out));
    TAGC_TRY(tagc_device_check(device, runtime->EventRecord(own->copied_out, stager->out), out));

    TAGC_TRY(tagc_device_check(device, runtime->StreamWaitEvent(stager->back, own->copied_out, 0), back));
    TAGC_TRY(tagc_device_check(
        device, runtime->LaunchHostFunc(stager->back, tagc_stager_wait_for_result, one), back));
    pthread_mutex_lock(&stager->lock);
    one->is_awaited = 1;
    pthread_mutex_unlock(&stager->lock);
    TAGC_TRY(put_copy(stage, output, own->out, stage->n_bytes_out, TAGC_COPY_TO_DEVICE, stager->back));
    TAGC_TRY(tagc_device_check(device, runtime->EventRecord(own->back, stager->back), back));
    own->last = one->number;
    if (!waits) return TAGC_OK;
    return tagc_device_check(device, runtime->StreamWaitEvent(stream, own->back, 0),
                             "waiting for the result");
}

static void settle(ticket *one, tagc_status status, int is_the_device) {
    tagc_stager *stager = one->stager;
    pthread_mutex_lock(&stager->lock);
    if (status != TAGC_OK) tagc_stager_fail_ticket(one, status, tagc_last_error());
    if (status != TAGC_OK && is_the_device) tagc_stager_break_down(stager, status, one->text);
    if (one->status != TAGC_OK) one->input_came = 1;
    one->enqueued = 1;
    pthread_cond_broadcast(&stager->changed);
    pthread_mutex_unlock(&stager->lock);
}

tagc_status tagc_stage_enqueue(tagc_stage *stage, const void *input, void *output, void *stream, int waits,
                               uint64_t *number) {
    if (!stage || !input || !output || !number)
        return tagc_fail(TAGC_ERR_ARGUMENT, "stage, input, output or ticket is NULL");
    tagc_stager *stager = stage->stager;
    pthread_mutex_lock(&stager->launch);
    ticket *one = issue(stage);
    one->input = input;
    one->output = output;
    *number = one->number;
    tagc_status status = one->status;
    int before = 0, is_the_device = 0;
    if (status == TAGC_OK) {
        status = tagc_device_enter(stager->device, &before);
        is_the_device = status != TAGC_OK;
        if (status == TAGC_OK) {
            status = check_arrays(stage, input, output, stream);
            is_the_device = status == TAGC_ERR_DEVICE;
            if (status == TAGC_OK) {
                status = put_into_streams(stage, one, input, output, stream, waits);
                is_the_device = status != TAGC_OK;
            }
            tagc_device_leave(stager->device, before);
        }
    } else {
        tagc_fail(status, "%s", one->text);
    }
    settle(one, status, is_the_device);
    pthread_mutex_unlock(&stager->launch);
    return status;
}

/* ---- stages ---- */

/* Replaces *memory by pinned memory of n_bytes. */
static tagc_status replace(tagc_stager *stager, void **memory, size_t n_bytes) {
    const tagc_runtime *runtime = runtime_of(stager);
    void *larger = NULL;
    TAGC_TRY(tagc_device_check(stager->device, runtime->HostAlloc(&larger, n_bytes, TAGC_PINNED_PORTABLE),
                               "allocating pinned memory"));
    void *old = *memory;
    *memory = larger;
    return old ? tagc_device_check(stager->device, runtime->FreeHost(old), "freeing pinned memory") : TAGC_OK;
}

static tagc_status grow(tagc_stager *stager, size_t n_bytes_in, size_t n_bytes_out) {
    const tagc_runtime *runtime = runtime_of(stager);
    TAGC_TRY(
        tagc_device_check(stager->device, runtime->StreamSynchronize(stager->out), "waiting for copies"));
    TAGC_TRY(
        tagc_device_check(stager->device, runtime->StreamSynchronize(stager->back), "waiting for copies"));
    for (int i = 0; i < stager->n_slots; i++) {
        if (n_bytes_in > stager->n_bytes_in) TAGC_TRY(replace(stager, &stager->slots[i].in, n_bytes_in));
        if (n_bytes_out > stager->n_bytes_out) TAGC_TRY(replace(stager, &stager->slots[i].out, n_bytes_out));
    }
    if (n_bytes_in > stager->n_bytes_in) stager->n_bytes_in = n_bytes_in;
    if (n_bytes_out > stager->n_bytes_out) stager->n_bytes_out = n_bytes_out;
    return TAGC_OK;
}

/* Waits until nothing is in progress and no failed exchange uses pinned memory. */
static tagc_status wait_for_all(tagc_stager *stager) {
    pthread_mutex_lock(&stager->lock);
    while (stager->n_finished < stager->n_enqueued && !stager->is_closed)
        pthread_cond_wait(&stager->changed, &stager->lock);
    tagc_status status = stager->broken;
    if (status != TAGC_OK) tagc_fail(status, "%s", stager->why);
    if (stager->is_closed) status = tagc_fail(TAGC_ERR_STATE, "the stager is closed");
    pthread_mutex_unlock(&stager->lock);
    return status;
}

tagc_status tagc_stage_create(tagc_stager *stager, uint64_t tag, size_t n_bytes_in, size_t n_bytes_out,
                              tagc_stage **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!stager) return tagc_fail(TAGC_ERR_ARGUMENT, "stager is NULL");
    if (!n_bytes_in != !n_bytes_out)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "n_bytes_in is %zu and n_bytes_out %zu, must be at least 1, or both 0", n_bytes_in,
                         n_bytes_out);
    tagc_status status = TAGC_OK;
    pthread_mutex_lock(&stager->launch);
    if (n_bytes_in > stager->n_bytes_in || n_bytes_out > stager->n_bytes_out) {
        int before = 0;
        status = wait_for_all(stager);
        if (status == TAGC_OK) status = tagc_device_enter(stager->device, &before);
        if (status == TAGC_OK) {
            status = grow(stager, n_bytes_in, n_bytes_out);
            tagc_device_leave(stager->device, before);
        }
    }
    tagc_stage *stage = NULL;
    if (status == TAGC_OK) status = tagc_memory_create(sizeof *stage, "a stage", (void **)&stage);
    pthread_mutex_unlock(&stager->launch);
    if (status != TAGC_OK) return status;
    *stage = (tagc_stage){.stager = stager, .tag = tag, .n_bytes_in = n_bytes_in, .n_bytes_out = n_bytes_out};
    *out = stage;
    return TAGC_OK;
}

void tagc_stage_destroy(tagc_stage *stage) {
    tagc_memory_destroy(stage);
}
