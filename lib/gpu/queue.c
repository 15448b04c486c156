/* Exchanges of device arrays through pinned memory, in the order in which they were enqueued.
 *
 * The queue has two streams and two flags, numbers of 32 bits in pinned memory that the device writes and reads, too.
 * Exchange k puts this into the streams and into the caller's (buffer = k mod n_buffers):
 *
 *   caller   ... k's input | record came[buffer]                                  wait back[buffer] | what uses k's output
 *   out      wait came[buffer], back[buffer] | copy input -> buffer.in | write k to flag `in` | record out[buffer]
 *   back     wait out[buffer] | wait until flag `out` is at least k | copy buffer.out -> output | record back[buffer]
 *
 * tagc_queue_next returns when it sees k in flag `in`; tagc_queue_finish writes k to flag `out`. A thread of the caller's
 * exchanges between these two. The thread that enqueues makes all calls of the runtime, in the order of the program. The
 * thread that exchanges makes none, and allocates nothing of a device.
 *
 * Why there is no deadlock. Let all ranks enqueue the same exchanges in the same order. Suppose that no rank makes progress,
 * and let k be the first unfinished exchange.
 *   - Where the enqueuing thread has enqueued k: the work before k's write to `in` waits only for work that was enqueued
 *     earlier, and for results up to k - 1, which are finished. That is so even if the driver puts all streams into one
 *     hardware queue, in the order of the calls, where work also waits for whatever was enqueued before it. So flag `in`
 *     comes to k, whatever the enqueuing thread does meanwhile. It may be in a call of the driver that waits for the device
 *     and holds the driver's locks, such as cudaFree, cudaHostAlloc or the first launch of a kernel, and it may hold the
 *     interpreter's lock.
 *   - Where it has not yet enqueued k, it waits for the device in such a call, or for the record of an old ticket. The device
 *     has only work up to k - 1, whose results are finished, so the call returns, and the thread goes on.
 *   - The thread that exchanges waits for flag `in`, for its peers, and for queue->lock, which nobody holds over a call of
 *     the runtime. So every rank exchanges k: a contradiction.
 * The last point needs that what exchanges takes no lock that the enqueuing thread may hold while it waits for the device.
 * The interpreter's lock is such a lock: torch may allocate, and so free, while it holds it. tagc_queue_next therefore runs
 * the exchanges of a tagc_model's *units* itself (model.c, lib/unit), in C. For what a caller exchanges in Python, and for messages that Python sends,
 * the proof does not hold; lib/gpu/README.md lists these.
 *
 * Both orders are needed. Without the wait for out[buffer], stream `back` could wait in a hardware queue in front of the copy
 * of the same exchange; CUDA also asks that an order by flags be visible as one by events. If each unit had streams of its
 * own, without an order between them, rank 0 could wait for the result of unit 1 and rank 1 for that of unit 2. Several queues
 * are safe if all ranks enqueue their exchanges in one order.
 *
 * Why buffers may be shared. Before buffer.in is written again, stream `out` waits for back[buffer], which is recorded after the last
 * use of buffer.in and buffer.out: the exchange reads one and writes the other before its _finish, and the wait for flag `out`
 * precedes the copy back. A buffer's second ticket is handed out only after its flag `in`, so after that wait.
 *
 * Why nothing is held. If the caller's stream waits for the result, it also waits for both copies. So whoever frees or reuses the
 * input and the output in the order of that stream, as torch does, does it late enough.
 *
 * Units with kernels (ahead_unit.c) copy no arrays. Exchange k, whose parts have the numbers a to b of sums, has a third stream:
 *
 *   out    wait came[buffer], back[buffer] | encode | bodies -> room | write k to `in` | record out[buffer]
 *   add    wait out[buffer] | for each part n of a..b: wait until `add` is at least n | room -> bodies | add | results -> room | write n
 *          to `added` | record added[buffer]
 *   back   wait added[buffer] | wait until `out` is at least k | room -> bodies, verdict | decode, settle, unpack | record back[buffer]
 *
 * The thread sees k in `in`; for each part it sends and receives, writes n to `add`, sees n in `added`, and goes on; at last it writes k to
 * `out`. The proof above holds with one more step. Where a rank has enqueued k, nothing before the write of n to `added` waits for
 * more than results up to k - 1, flags that the thread has written, and work of k that was enqueued before. Kernels are loaded before the first
 * exchange, so a launch waits for the device only if its queue is full; it then has to hold one exchange: LAUNCH_PLACES in ahead_unit.c.
 * A buffer's rooms are shared as its arrays are: `out` waits for back[buffer], which is recorded behind all that uses them.
 *
 * Where a call may wait until its work has run (probe.c), no call is made behind a flag: tagc_job_put goes step by step, and the caller waits
 * for the exchange between the two copies. Kernels are refused there.
 *
 * An exchange that could not be put into streams (tagc_job_put_failed) has a ticket without a flag. The thread waits for nothing of the device then: its
 * reducers take part without arrays (tagc_ahead_refuse), and those of other ranks, whose streams have the exchange, end with a failure.
 *
 * Failures. A failed exchange fills buffer.out with NaN before it writes flag `out`, so the copy back brings NaN. The first failure of
 * the runtime breaks the queue. tagc_job_enqueue sees it, or a wait for exchanges, which asks the device now and then, because a
 * failed device writes no flags. From then on every ticket is handed out at once with that failure, so that this rank can tell
 * its peers in their agreed order. A ticket is handed out only after all of it was enqueued, so a failure in between is known
 * before the exchange begins. The orders of a unit with kernels (tagc_orders) are negative until its exchange has succeeded. */
#include "core/memory.h"
#include "core/status.h"
#include "gpu/queue_private.h"
#include "gpu/slabs.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* ---- failures; all with the lock ---- */

void tagc_queue_fail_ticket(ticket *one, tagc_status status, const char *text) {
    if (one->status != TAGC_OK) return;
    one->status = status;
    snprintf(one->text, sizeof one->text, "%s", text);
}

/* The runtime failed and can no longer be used. */
void tagc_queue_break_down(tagc_queue *queue, tagc_status status, const char *text, uint64_t last) {
    if (queue->broken == TAGC_OK) {
        queue->broken = status;
        snprintf(queue->why, sizeof queue->why, "%s", text);
    }
    queue->is_dead |= last == NO_TICKET;
    for (uint64_t n = (last > queue->n_taken ? last : queue->n_taken) + 1; n <= queue->n_enqueued; n++) {
        ticket *one = ticket_of(queue, n);
        if (one->input_came) continue;
        tagc_queue_fail_ticket(one, queue->broken, queue->why);
        one->input_came = 1;
    }
    pthread_cond_broadcast(&queue->changed);
}

/* Lets stream `back` copy the results of all exchanges up to this one. Call with the lock. */
static void let_go_on(tagc_queue *queue, uint64_t number) {
    atomic_store_explicit(&queue->flags->out, (uint32_t)number, memory_order_release);
}

/* ---- the thread that exchanges ---- */

void tagc_queue_pause(unsigned n_looks) {
    enum { N_YIELDS = 32, LONGEST_US = 200 };
    if (n_looks < N_YIELDS) {
        sched_yield();
        return;
    }
    unsigned us = n_looks - N_YIELDS < LONGEST_US / 10 ? 10 * (n_looks - N_YIELDS + 1) : LONGEST_US;
    nanosleep(&(struct timespec){0, (long)us * 1000}, NULL);
}

/* Waits for the input of the next ticket. Call with the lock. Returns NULL if the queue is closed. */
static ticket *take(tagc_queue *queue) {
    for (unsigned n_looks = 0; !queue->is_closed;) {
        ticket *one = ticket_of(queue, queue->n_taken + 1);
        if (queue->n_enqueued == queue->n_taken || !one->enqueued) {
            pthread_cond_wait(&queue->changed, &queue->lock);
            n_looks = 0;
        } else if (has_come(queue, one)) {
            queue->n_taken++;
            return one;
        } else {
            pthread_mutex_unlock(&queue->lock);
            tagc_queue_pause(n_looks++); /* the device does not wake this thread */
            pthread_mutex_lock(&queue->lock);
        }
    }
    return NULL;
}

tagc_status tagc_queue_next(tagc_queue *queue, uint64_t *number, uint64_t *tag, const void **input,
                            void **output) {
    if (!queue || !number || !tag || !input || !output)
        return tagc_fail(TAGC_ERR_ARGUMENT, "queue, ticket, tag, input or output is NULL");
    *number = 0;
    tagc_status status = TAGC_OK;
    pthread_mutex_lock(&queue->lock);
    const ticket *one;
    while ((one = take(queue)) && one->unit) {
        pthread_mutex_unlock(&queue->lock);
        tagc_status ended = tagc_model_run(one);
        tagc_queue_finish(queue, one->number, ended, tagc_last_error());
        pthread_mutex_lock(&queue->lock);
    }
    if (one) {
        *number = one->number;
        *tag = one->tag;
        const buffer *at = &queue->buffers[one->buffer];
        *input = one->status != TAGC_OK ? NULL : at->in;
        *output = one->status != TAGC_OK ? NULL : at->out;
        if (one->status != TAGC_OK) status = tagc_fail(one->status, "%s", one->text);
    }
    pthread_mutex_unlock(&queue->lock);
    return status;
}

tagc_status tagc_queue_run(tagc_queue *queue) {
    uint64_t number, tag;
    const void *input;
    void *output;
    return tagc_queue_next(queue, &number, &tag, &input,
                           &output); /* models' alone: the queue is closed now */
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
    if (status != TAGC_OK && one->status == TAGC_OK) /* else the buffer is not this ticket's */
        memset(queue->buffers[one->buffer].out, 0xff, one->n_bytes_out);
    if (status != TAGC_OK) tagc_queue_fail_ticket(one, status, text ? text : "");
    if (one->status != TAGC_OK && queue->first_failure == TAGC_OK) { /* as the ranks have told each other */
        queue->first_failure = status != TAGC_OK ? status : one->status;
        snprintf(queue->first_text, sizeof queue->first_text, "%s",
                 status != TAGC_OK && text ? text : one->text);
    }
    one->finished = 1;
    queue->n_finished = number;
    if (!queue->is_closed) let_go_on(queue, number); /* _close has let all go on */
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->lock);
    return TAGC_OK;
}

/* ---- exchanges with kernels ---- */

void tagc_queue_allow(tagc_queue *queue, int *stop) {
    pthread_mutex_lock(&queue->lock);
    if (!queue->is_closed) *stop = 0;
    pthread_mutex_unlock(&queue->lock);
}

void tagc_queue_settle(tagc_queue *queue, tagc_orders *orders) {
    pthread_mutex_lock(&queue->lock);
    if (!queue->is_closed) {
        orders->stop[1] = 0;
        orders->is_void = 0;
    }
    pthread_mutex_unlock(&queue->lock);
}

void tagc_queue_add(tagc_queue *queue, uint64_t number) {
    pthread_mutex_lock(&queue->lock);
    if (!queue->is_closed) atomic_store_explicit(&queue->flags->add, (uint32_t)number, memory_order_release);
    pthread_mutex_unlock(&queue->lock);
}

tagc_status tagc_queue_wait_for_sums(tagc_queue *queue, uint64_t number) {
    tagc_status status = TAGC_OK;
    for (unsigned n_looks = 0; status == TAGC_OK; n_looks++) {
        uint32_t added = atomic_load_explicit(&queue->flags->added, memory_order_acquire);
        if ((int32_t)(added - (uint32_t)number) >= 0) break;
        pthread_mutex_lock(&queue->lock);
        if (queue->is_dead) status = tagc_fail(queue->broken, "%s", queue->why);
        if (queue->is_closed) status = tagc_fail(TAGC_ERR_STATE, "the queue is closed");
        pthread_mutex_unlock(&queue->lock);
        if (status == TAGC_OK) tagc_queue_pause(n_looks);
    }
    return status;
}

/* ---- callers that wait for it ---- */

/* A failed device writes no flags, so ask it. Call without the lock. */
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
    tagc_queue_break_down(queue, status, tagc_last_error(), NO_TICKET);
    pthread_mutex_unlock(&queue->lock);
}

static struct timespec in_ms(int64_t ms) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    int64_t ns = at.tv_nsec + ms % 1000 * 1000000;
    return (struct timespec){at.tv_sec + (time_t)(ms / 1000 + ns / 1000000000), (long)(ns % 1000000000)};
}

static int is_before(struct timespec a, struct timespec b) {
    return a.tv_sec != b.tv_sec ? a.tv_sec < b.tv_sec : a.tv_nsec < b.tv_nsec;
}

void tagc_queue_sleep(tagc_queue *queue, const struct timespec *end) {
    struct timespec look = in_ms(LOOK_MS);
    if (end && is_before(*end, look)) look = *end;
    if (pthread_cond_timedwait(&queue->changed, &queue->lock, &look) != ETIMEDOUT) return;
    pthread_mutex_unlock(&queue->lock);
    look_at_device(queue);
    pthread_mutex_lock(&queue->lock);
}

tagc_status tagc_queue_wait(tagc_queue *queue, uint64_t number, uint32_t timeout_ms, int *is_over) {
    if (!queue || !is_over) return tagc_fail(TAGC_ERR_ARGUMENT, "queue or is_over is NULL");
    struct timespec end = in_ms(timeout_ms);
    tagc_status status = TAGC_OK;
    pthread_mutex_lock(&queue->lock);
    if (number > queue->n_enqueued) number = queue->n_enqueued;
    while (queue->n_finished < number && !queue->is_closed) {
        if (timeout_ms && !is_before(in_ms(0), end)) break;
        tagc_queue_sleep(queue, timeout_ms ? &end : NULL);
    }
    *is_over = queue->n_finished >= number || queue->is_closed;
    if (*is_over) {
        status = queue->first_failure;
        if (status != TAGC_OK) tagc_fail(status, "%s", queue->first_text);
        if (status == TAGC_OK && queue->n_finished < number)
            status = tagc_fail(TAGC_ERR_STATE, "the queue was closed while exchanges were under way");
    }
    pthread_mutex_unlock(&queue->lock);
    return status;
}

int tagc_queue_has_finished(tagc_queue *queue, uint64_t number) {
    pthread_mutex_lock(&queue->lock);
    int has_finished = queue->n_finished >= number || (queue->is_closed && queue->n_taken < number);
    pthread_mutex_unlock(&queue->lock);
    return has_finished;
}

/* What a closed queue has handed out already goes on. */
void tagc_queue_wait_for_ticket(tagc_queue *queue, uint64_t number) {
    pthread_mutex_lock(&queue->lock);
    while (queue->n_finished < number && !(queue->is_closed && queue->n_taken < number))
        tagc_queue_sleep(queue, NULL);
    pthread_mutex_unlock(&queue->lock);
}

void tagc_queue_forgive(tagc_queue *queue) {
    if (!queue) return;
    pthread_mutex_lock(&queue->lock);
    queue->first_failure = TAGC_OK;
    pthread_mutex_unlock(&queue->lock);
}

void *tagc_queue_stream(const tagc_queue *queue) {
    return queue->back;
}

/* ---- making ---- */

/* The flags, and a proof that the device can write one and wait for the other. */
static tagc_status make_flags(tagc_queue *queue) {
    enum { NOT_SUPPORTED = 801, NEVER = 0x7fff };
    const tagc_device *device = queue->device;
    const tagc_runtime *runtime = &device->runtime;
    void *here = NULL, *there = NULL;
    TAGC_TRY(tagc_device_check(
        device, runtime->HostAlloc(&here, sizeof *queue->flags, TAGC_PINNED_PORTABLE | TAGC_PINNED_MAPPED),
        "allocating pinned memory"));
    queue->flags = here;
    TAGC_TRY(
        tagc_device_check(device, runtime->HostGetDevicePointer(&there, here, 0), "mapping pinned memory"));
    queue->in_there = (uint64_t)(uintptr_t)there + offsetof(queue_flags, in);
    queue->out_there = (uint64_t)(uintptr_t)there + offsetof(queue_flags, out);
    queue->add_there = (uint64_t)(uintptr_t)there + offsetof(queue_flags, add);
    queue->added_there = (uint64_t)(uintptr_t)there + offsetof(queue_flags, added);
    atomic_init(&queue->flags->in, NEVER);
    atomic_init(&queue->flags->out, 0);
    atomic_init(&queue->flags->add, 0);
    atomic_init(&queue->flags->added, 0);
    int code = runtime->StreamWriteValue32(queue->out, queue->in_there, 0, 0);
    if (!code) code = runtime->StreamWaitValue32(queue->out, queue->out_there, 0, TAGC_WAIT_AT_LEAST);
    if (code == NOT_SUPPORTED)
        return tagc_fail(
            TAGC_ERR_UNSUPPORTED,
            "cuda: device %d, or its driver, has no stream memory operations (cuStreamWaitValue32: %s), "
            "with which a stream waits for an exchange",
            device->ordinal, runtime->GetErrorString(code));
    TAGC_TRY(tagc_device_check(device, code, "asking for a flag"));
    TAGC_TRY(tagc_device_check(device, runtime->StreamSynchronize(queue->out), "waiting for a flag"));
    if (atomic_load(&queue->flags->in) != 0)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "cuda: device %d did not write a flag to pinned memory (cuStreamWriteValue32)",
                         device->ordinal);
    return TAGC_OK;
}

/* Of a queue without kernels, whose makers have tried it. Where the device gives no memory, copies are not tried. */
static tagc_status try_calls(tagc_queue *queue) {
    tagc_device *device = queue->device;
    const tagc_runtime *runtime = &device->runtime;
    tagc_probe_work work = {0};
    if (queue->kernels || device->calls_wait) return TAGC_OK;
    if (runtime->MallocAsync(&work.there, TAGC_ALIGNMENT, queue->out)) {
        runtime->GetLastError();
        return TAGC_OK;
    }
    tagc_status status = tagc_device_probe(device, queue->out, &work, &device->calls_wait);
    int code = runtime->FreeAsync(work.there, queue->out);
    return status == TAGC_OK ? tagc_device_check(device, code, "freeing memory of the device") : status;
}

static tagc_status make(tagc_queue *queue) {
    const tagc_device *device = queue->device;
    const tagc_runtime *runtime = &device->runtime;
    TAGC_TRY(tagc_device_make_stream(device, &queue->out));
    /* With kernels there are two more streams, of which the kernels have the last. */
    TAGC_TRY(tagc_device_make_stream(device, queue->kernels ? &queue->add : &queue->back));
    if (queue->kernels) queue->back = queue->kernels->stream;
    for (int i = 0; i < queue->n_buffers; i++) {
        buffer *one = &queue->buffers[i];
        void **events[] = {&one->came, &one->copied_out, &one->added, &one->back};
        for (int e = 0; e < 4; e++)
            TAGC_TRY(tagc_device_check(device,
                                       runtime->EventCreateWithFlags(events[e], TAGC_EVENT_WITHOUT_TIMING),
                                       "making an event"));
    }
    TAGC_TRY(make_flags(queue));
    return try_calls(queue);
}

tagc_status tagc_queue_create(tagc_device *device, tagc_kernels *kernels, int n_buffers, tagc_queue **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!device) return tagc_fail(TAGC_ERR_ARGUMENT, "device is NULL");
    if (kernels && kernels->device != device)
        return tagc_fail(TAGC_ERR_ARGUMENT, "kernels are of another device");
    if (n_buffers < 1 || n_buffers > MAX_BUFFERS)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_buffers is %d, must be in [1, %d]", n_buffers, MAX_BUFFERS);
    tagc_queue *queue;
    TAGC_TRY(tagc_memory_create(sizeof *queue, "a queue", (void **)&queue));
    queue->device = device;
    queue->kernels = kernels;
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
    tagc_rooms_stop(queue);
    if (queue->flags) {
        atomic_store_explicit(&queue->flags->add, (uint32_t)queue->n_adds, memory_order_release);
        let_go_on(queue, queue->n_enqueued);
    }
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->lock);
}

void tagc_queue_destroy(tagc_queue *queue) {
    if (!queue) return;
    const tagc_runtime *runtime = runtime_of(queue);
    tagc_queue_close(queue);
    int before = 0;
    if (tagc_device_enter(queue->device, &before) == TAGC_OK) {
        void *streams[] = {queue->out, queue->add, queue->back};
        for (int i = 0; i < 3; i++)
            if (streams[i]) runtime->StreamSynchronize(streams[i]); /* they use this memory */
        if (queue->kernels) tagc_rooms_destroy(queue);
        if (queue->kernels) tagc_slabs_trim(queue);
        for (int i = 0; i < queue->n_buffers; i++) {
            buffer *one = &queue->buffers[i];
            void *events[] = {one->came, one->copied_out, one->added, one->back};
            for (int e = 0; e < 4; e++)
                if (events[e]) runtime->EventDestroy(events[e]);
            if (one->in) runtime->FreeHost(one->in);
            if (one->out) runtime->FreeHost(one->out);
        }
        if (queue->flags) runtime->FreeHost(queue->flags);
        for (int i = 0; i < (queue->kernels ? 2 : 3); i++) /* the last is then the kernels' */
            if (streams[i]) runtime->StreamDestroy(streams[i]);
        runtime->GetLastError();
        tagc_device_leave(queue->device, before);
    }
    pthread_cond_destroy(&queue->changed);
    pthread_mutex_destroy(&queue->lock);
    pthread_mutex_destroy(&queue->launch);
    tagc_memory_destroy(queue);
}
