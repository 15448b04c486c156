/* Exchanges of device arrays through pinned memory, in the order in which they were enqueued.
 *
 * The queue has two streams. Exchange k puts this into them and into the caller's (buffer = k mod n_buffers):
 *
 *   caller   ... k's input | record came[buffer]                                  wait back[buffer] | what uses k's output
 *   out      wait came[buffer], back[buffer] | copy input -> buffer.in | input_came(k) | record out[buffer]
 *   back     wait out[buffer] | wait_for_result(k) | copy buffer.out -> output | record back[buffer]
 *
 * input_came and wait_for_result are host functions in C. They make no call of the runtime, and take no lock that is held
 * over one. input_came lets tagc_queue_next return. wait_for_result sleeps until tagc_queue_finish. A thread of the caller's
 * exchanges between these two. It may need Python's lock; the host functions never do.
 *
 * Why there is no deadlock. A runtime may call the host functions of all streams from one thread, in any order that the
 * streams allow, and while wait_for_result(k) sleeps it calls no other. Let all ranks have enqueued the same exchanges in
 * the same order. Suppose that no rank makes progress, and let k be the first unfinished exchange.
 *   - If a rank sleeps in wait_for_result(j), exchange j is unfinished, so j >= k. Stream `back` has waited for out[j], and
 *     stream `out` is in order, so input_came(k) has run there.
 *   - If a rank does not sleep, its runtime thread is free. input_came(k) only waits for the caller's work and for results up
 *     to k - n_buffers, which are finished.
 * So every rank has its input of k, and its thread exchanges k: a contradiction.
 *
 * Both orders are needed. Without the wait for out[buffer], wait_for_result(k) could be called before input_came(k) and wait
 * forever; the tests plant that. If each unit had streams of its own, without an order between them, rank 0 could sleep in
 * the result of unit 1 and rank 1 in that of unit 2. Several queues are safe if all ranks enqueue their exchanges in one
 * order. A process must not have other host functions that wait for other ranks.
 *
 * A job without copies leaves out both copies. Its exchange finishes its work on the device's arrays before _finish.
 *
 * Why buffers may be shared. Before buffer.in is written again, stream `out` waits for back[buffer], which is recorded after the last
 * use of buffer.in and buffer.out: the exchange reads one and writes the other before its _finish, and wait_for_result precedes the
 * copy back. A buffer's second ticket is handed out only after input_came, so after that wait.
 *
 * Failures. The first failure of the runtime breaks the queue. tagc_job_enqueue sees it, or tagc_queue_next, which asks
 * now and then because a failed device calls no host functions. From then on every ticket is handed out at once with that
 * failure, so that this rank can tell its peers in their agreed order. A ticket is handed out only after all of it was
 * enqueued, so a failure in between is known before the exchange begins. */
#include "core/memory.h"
#include "core/status.h"
#include "gpu/queue_private.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* ---- host functions ---- */

void tagc_queue_input_came(void *arg) {
    ticket *one = arg;
    tagc_queue *queue = one->queue;
    pthread_mutex_lock(&queue->lock);
    one->input_came = 1;
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->lock);
}

void tagc_queue_wait_for_result(void *arg) {
    ticket *one = arg;
    tagc_queue *queue = one->queue;
    pthread_mutex_lock(&queue->lock);
    while (!one->finished && !queue->is_closed) {
        one->is_slept_for = 1;
        pthread_cond_wait(&queue->changed, &queue->lock);
    }
    one->left = 1;
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->lock);
}

/* ---- failures; all with the lock ---- */

void tagc_queue_fail_ticket(ticket *one, tagc_status status, const char *text) {
    if (one->status != TAGC_OK) return;
    one->status = status;
    snprintf(one->text, sizeof one->text, "%s", text);
}

/* The runtime failed and can no longer be used. */
void tagc_queue_break_down(tagc_queue *queue, tagc_status status, const char *text) {
    if (queue->broken == TAGC_OK) {
        queue->broken = status;
        snprintf(queue->why, sizeof queue->why, "%s", text);
    }
    for (uint64_t n = queue->n_taken + 1; n <= queue->n_enqueued; n++) {
        ticket *one = ticket_of(queue, n);
        if (one->input_came) continue;
        tagc_queue_fail_ticket(one, queue->broken, queue->why);
        one->input_came = 1;
    }
    pthread_cond_broadcast(&queue->changed);
}

/* ---- the thread that exchanges ---- */

/* A failed device calls no host functions, so ask it. Call without the lock. */
static void look_at_device(tagc_queue *queue) {
    const tagc_runtime *runtime = runtime_of(queue);
    int before = 0, done = 0;
    tagc_status status = tagc_device_enter(queue->device, &before);
    if (status == TAGC_OK) {
        status = tagc_device_check(queue->device,
                                   tagc_runtime_answer(runtime, runtime->StreamQuery(queue->out), &done),
                                   "a copy to the host");
        tagc_device_leave(queue->device, before);
    }
    if (status == TAGC_OK) return;
    pthread_mutex_lock(&queue->lock);
    tagc_queue_break_down(queue, status, tagc_last_error());
    pthread_mutex_unlock(&queue->lock);
}

/* Call with the lock. Returns 0 if the wait took long. */
static int wait_a_while(tagc_queue *queue) {
    struct timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_nsec += LOOK_MS * 1000000L;
    end.tv_sec += end.tv_nsec / 1000000000L;
    end.tv_nsec %= 1000000000L;
    return pthread_cond_timedwait(&queue->changed, &queue->lock, &end) != ETIMEDOUT;
}

tagc_status tagc_queue_next(tagc_queue *queue, uint64_t *number, uint64_t *tag, const void **input,
                            void **output) {
    if (!queue || !number || !tag || !input || !output)
        return tagc_fail(TAGC_ERR_ARGUMENT, "queue, ticket, tag, input or output is NULL");
    *number = 0;
    pthread_mutex_lock(&queue->lock);
    for (;;) {
        ticket *one = ticket_of(queue, queue->n_taken + 1);
        int is_there = queue->n_enqueued > queue->n_taken;
        if (queue->is_closed || (is_there && one->enqueued && one->input_came)) break;
        if (wait_a_while(queue) || !is_there || !one->enqueued) continue;
        pthread_mutex_unlock(&queue->lock);
        look_at_device(queue);
        pthread_mutex_lock(&queue->lock);
    }
    tagc_status status = TAGC_OK;
    if (!queue->is_closed) {
        ticket *one = ticket_of(queue, ++queue->n_taken);
        *number = one->number;
        *tag = one->tag;
        const buffer *at = &queue->buffers[one->buffer];
        *input = one->status != TAGC_OK ? NULL : one->n_bytes_out ? at->in : one->input;
        *output = one->status != TAGC_OK ? NULL : one->n_bytes_out ? at->out : one->output;
        if (one->status != TAGC_OK) status = tagc_fail(one->status, "%s", one->text);
    }
    pthread_mutex_unlock(&queue->lock);
    return status;
}

tagc_status tagc_queue_finish(tagc_queue *queue, uint64_t number, tagc_status status, const char *text) {
    if (!queue) return tagc_fail(TAGC_ERR_ARGUMENT, "queue is NULL");
    pthread_mutex_lock(&queue->lock);
    if (number != queue->n_finished + 1 || number > queue->n_taken) {
        unsigned long long next = queue->n_finished + 1, taken = queue->n_taken;
        pthread_mutex_unlock(&queue->lock);
        return tagc_fail(TAGC_ERR_STATE, "ticket is %llu, must be %llu, and taken: %llu are",
                         (unsigned long long)number, next, taken);
    }
    ticket *one = ticket_of(queue, number);
    if (status != TAGC_OK && one->status == TAGC_OK &&
        one->n_bytes_out) /* else the buffer is not this ticket's */
        memset(queue->buffers[one->buffer].out, 0xff, one->n_bytes_out);
    if (status != TAGC_OK) tagc_queue_fail_ticket(one, status, text ? text : "");
    if (one->status != TAGC_OK && queue->first_failure == TAGC_OK) {
        queue->first_failure = one->status;
        memcpy(queue->first_text, one->text, sizeof one->text);
    }
    one->finished = 1;
    queue->n_finished = number;
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->lock);
    return TAGC_OK;
}

/* ---- callers that wait for it ---- */

tagc_status tagc_queue_wait(tagc_queue *queue, uint64_t number) {
    if (!queue) return tagc_fail(TAGC_ERR_ARGUMENT, "queue is NULL");
    pthread_mutex_lock(&queue->lock);
    if (number > queue->n_enqueued) number = queue->n_enqueued;
    while (queue->n_finished < number && !queue->is_closed) pthread_cond_wait(&queue->changed, &queue->lock);
    tagc_status status = queue->first_failure;
    if (status != TAGC_OK) tagc_fail(status, "%s", queue->first_text);
    if (status == TAGC_OK && queue->n_finished < number)
        status = tagc_fail(TAGC_ERR_STATE, "the queue was closed while exchanges were under way");
    queue->first_failure = TAGC_OK;
    pthread_mutex_unlock(&queue->lock);
    return status;
}

uint64_t tagc_queue_retired(tagc_queue *queue) {
    if (!queue) return 0;
    const tagc_runtime *runtime = runtime_of(queue);
    pthread_mutex_lock(&queue->launch);
    for (int i = 0; i < queue->n_buffers;
         i++) { /* results come back in order, so one result implies all before it */
        buffer *one = &queue->buffers[i];
        int done = 0;
        if (one->last <= queue->retired) continue;
        int code = tagc_runtime_answer(runtime, runtime->EventQuery(one->back), &done);
        if (code) runtime->GetLastError();
        if (code || done) queue->retired = one->last; /* a failed device does nothing any more */
    }
    uint64_t retired = queue->retired;
    pthread_mutex_unlock(&queue->launch);
    return retired;
}

void *tagc_queue_stream(const tagc_queue *queue) {
    return queue->back;
}

/* ---- making ---- */

static tagc_status make(tagc_queue *queue) {
    const tagc_device *device = queue->device;
    const tagc_runtime *runtime = &device->runtime;
    TAGC_TRY(tagc_device_check(device, runtime->StreamCreateWithFlags(&queue->out, TAGC_STREAM_NON_BLOCKING),
                               "making a stream"));
    TAGC_TRY(tagc_device_check(device, runtime->StreamCreateWithFlags(&queue->back, TAGC_STREAM_NON_BLOCKING),
                               "making a stream"));
    for (int i = 0; i < queue->n_buffers; i++) {
        buffer *one = &queue->buffers[i];
        void **events[] = {&one->came, &one->copied_out, &one->back};
        for (int e = 0; e < 3; e++)
            TAGC_TRY(tagc_device_check(device,
                                       runtime->EventCreateWithFlags(events[e], TAGC_EVENT_WITHOUT_TIMING),
                                       "making an event"));
    }
    return TAGC_OK;
}

tagc_status tagc_queue_create(tagc_device *device, int n_buffers, tagc_queue **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!device) return tagc_fail(TAGC_ERR_ARGUMENT, "device is NULL");
    if (n_buffers < 1 || n_buffers > MAX_BUFFERS)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_buffers is %d, must be in [1, %d]", n_buffers, MAX_BUFFERS);
    tagc_queue *queue;
    TAGC_TRY(tagc_memory_create(sizeof *queue, "a queue", (void **)&queue));
    queue->device = device;
    queue->n_buffers = n_buffers;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&queue->launch, NULL);
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    int before = 0;
    tagc_status status = tagc_device_enter(device, &before);
    if (status == TAGC_OK) {
        status = make(queue);
        tagc_device_leave(device, before);
    }
    if (status != TAGC_OK) {
        char text[TAGC_ERROR_TEXT_BYTES];
        snprintf(text, sizeof text, "%s", tagc_last_error());
        tagc_queue_destroy(queue);
        return tagc_fail(status, "%s", text);
    }
    *out = queue;
    return TAGC_OK;
}

void tagc_queue_close(tagc_queue *queue) {
    if (!queue) return;
    pthread_mutex_lock(&queue->lock);
    queue->is_closed = 1;
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->lock);
}

void tagc_queue_destroy(tagc_queue *queue) {
    if (!queue) return;
    const tagc_runtime *runtime = runtime_of(queue);
    tagc_queue_close(queue);
    int before = 0;
    if (tagc_device_enter(queue->device, &before) == TAGC_OK) {
        void *streams[] = {queue->out, queue->back};
        for (int i = 0; i < 2; i++)
            if (streams[i]) runtime->StreamSynchronize(streams[i]); /* its functions know this memory */
        for (int i = 0; i < queue->n_buffers; i++) {
            buffer *one = &queue->buffers[i];
            void *events[] = {one->came, one->copied_out, one->back};
            for (int e = 0; e < 3; e++)
                if (events[e]) runtime->EventDestroy(events[e]);
            if (one->in) runtime->FreeHost(one->in);
            if (one->out) runtime->FreeHost(one->out);
        }
        for (int i = 0; i < 2; i++)
            if (streams[i]) runtime->StreamDestroy(streams[i]);
        runtime->GetLastError();
        tagc_device_leave(queue->device, before);
    }
    pthread_cond_destroy(&queue->changed);
    pthread_mutex_destroy(&queue->lock);
    pthread_mutex_destroy(&queue->launch);
    tagc_memory_destroy(queue);
}
