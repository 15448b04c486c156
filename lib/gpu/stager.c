/* Exchanges of device arrays through pinned memory, in the order in which they were enqueued.
 *
 * The stager has two streams. Exchange k puts this into them and into the caller's (slot = k mod n_slots):
 *
 *   caller   ... k's input | record came[slot]                                  wait back[slot] | what uses k's output
 *   out      wait came[slot], back[slot] | copy input -> slot.in | input_came(k) | record out[slot]
 *   back     wait out[slot] | wait_for_result(k) | copy slot.out -> output | record back[slot]
 *
 * input_came and wait_for_result are host functions in C. They make no call of the runtime, and take no lock that is held
 * over one. input_came lets tagc_stager_next return. wait_for_result sleeps until tagc_stager_finish. A thread of the caller's
 * exchanges between these two. It may need Python's lock; the host functions never do.
 *
 * Why there is no deadlock. A runtime may call the host functions of all streams from one thread, in any order that the
 * streams allow, and while wait_for_result(k) sleeps it calls no other. Let all ranks have enqueued the same exchanges in
 * the same order. Suppose that no rank makes progress, and let k be the first unfinished exchange.
 *   - If a rank sleeps in wait_for_result(j), exchange j is unfinished, so j >= k. Stream `back` has waited for out[j], and
 *     stream `out` is in order, so input_came(k) has run there.
 *   - If a rank does not sleep, its runtime thread is free. input_came(k) only waits for the caller's work and for results up
 *     to k - n_slots, which are finished.
 * So every rank has its input of k, and its thread exchanges k: a contradiction.
 *
 * Both orders are needed. Without the wait for out[slot], wait_for_result(k) could be called before input_came(k) and wait
 * forever; the tests plant that. If each unit had streams of its own, without an order between them, rank 0 could sleep in
 * the result of unit 1 and rank 1 in that of unit 2. Several stagers are safe if all ranks enqueue their exchanges in one
 * order. A process must not have other host functions that wait for other ranks.
 *
 * A stage without copies leaves out both copies. Its exchange finishes its work on the device's arrays before _finish.
 *
 * Why slots may be shared. Before slot.in is written again, stream `out` waits for back[slot], which is recorded after the last
 * use of slot.in and slot.out: the exchange reads one and writes the other before its _finish, and wait_for_result precedes the
 * copy back. A slot's second ticket is handed out only after input_came, so after that wait.
 *
 * Failures. The first failure of the runtime breaks the stager. tagc_stage_enqueue sees it, or tagc_stager_next, which asks
 * now and then because a failed device calls no host functions. From then on every ticket is handed out at once with that
 * failure, so that this rank can tell its peers in their agreed order. A ticket is handed out only after all of it was
 * enqueued, so a failure in between is known before the exchange begins. */
#include "core/memory.h"
#include "core/status.h"
#include "gpu/stager_private.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* ---- host functions ---- */

void tagc_stager_input_came(void *arg) {
    ticket *one = arg;
    tagc_stager *stager = one->stager;
    pthread_mutex_lock(&stager->lock);
    one->input_came = 1;
    pthread_cond_broadcast(&stager->changed);
    pthread_mutex_unlock(&stager->lock);
}

void tagc_stager_wait_for_result(void *arg) {
    ticket *one = arg;
    tagc_stager *stager = one->stager;
    pthread_mutex_lock(&stager->lock);
    while (!one->finished && !stager->is_closed) {
        one->is_slept_for = 1;
        pthread_cond_wait(&stager->changed, &stager->lock);
    }
    one->left = 1;
    pthread_cond_broadcast(&stager->changed);
    pthread_mutex_unlock(&stager->lock);
}

/* ---- failures; all with the lock ---- */

void tagc_stager_fail_ticket(ticket *one, tagc_status status, const char *text) {
    if (one->status != TAGC_OK) return;
    one->status = status;
    snprintf(one->text, sizeof one->text, "%s", text);
}

/* The runtime failed and can no longer be used. */
void tagc_stager_break_down(tagc_stager *stager, tagc_status status, const char *text) {
    if (stager->broken == TAGC_OK) {
        stager->broken = status;
        snprintf(stager->why, sizeof stager->why, "%s", text);
    }
    for (uint64_t n = stager->n_taken + 1; n <= stager->n_enqueued; n++) {
        ticket *one = ticket_of(stager, n);
        if (one->input_came) continue;
        tagc_stager_fail_ticket(one, stager->broken, stager->why);
        one->input_came = 1;
    }
    pthread_cond_broadcast(&stager->changed);
}

/* ---- the thread that exchanges ---- */

/* A failed device calls no host functions, so ask it. Call without the lock. */
static void look_at_device(tagc_stager *stager) {
    const tagc_runtime *runtime = runtime_of(stager);
    int before = 0, done = 0;
    tagc_status status = tagc_device_enter(stager->device, &before);
    if (status == TAGC_OK) {
        status = tagc_device_check(stager->device,
                                   tagc_runtime_answer(runtime, runtime->StreamQuery(stager->out), &done),
                                   "a copy to the host");
        tagc_device_leave(stager->device, before);
    }
    if (status == TAGC_OK) return;
    pthread_mutex_lock(&stager->lock);
    tagc_stager_break_down(stager, status, tagc_last_error());
    pthread_mutex_unlock(&stager->lock);
}

/* Call with the lock. Returns 0 if the wait took long. */
static int wait_a_while(tagc_stager *stager) {
    struct timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_nsec += LOOK_MS * 1000000L;
    end.tv_sec += end.tv_nsec / 1000000000L;
    end.tv_nsec %= 1000000000L;
    return pthread_cond_timedwait(&stager->changed, &stager->lock, &end) != ETIMEDOUT;
}

tagc_status tagc_stager_next(tagc_stager *stager, uint64_t *number, uint64_t *tag, const void **input,
                             void **output) {
    if (!stager || !number || !tag || !input || !output)
        return tagc_fail(TAGC_ERR_ARGUMENT, "stager, ticket, tag, input or output is NULL");
    *number = 0;
    pthread_mutex_lock(&stager->lock);
    for (;;) {
        ticket *one = ticket_of(stager, stager->n_taken + 1);
        int is_there = stager->n_enqueued > stager->n_taken;
        if (stager->is_closed || (is_there && one->enqueued && one->input_came)) break;
        if (wait_a_while(stager) || !is_there || !one->enqueued) continue;
        pthread_mutex_unlock(&stager->lock);
        look_at_device(stager);
        pthread_mutex_lock(&stager->lock);
    }
    tagc_status status = TAGC_OK;
    if (!stager->is_closed) {
        ticket *one = ticket_of(stager, ++stager->n_taken);
        *number = one->number;
        *tag = one->tag;
        const slot *at = &stager->slots[one->slot];
        *input = one->status != TAGC_OK ? NULL : one->n_bytes_out ? at->in : one->input;
        *output = one->status != TAGC_OK ? NULL : one->n_bytes_out ? at->out : one->output;
        if (one->status != TAGC_OK) status = tagc_fail(one->status, "%s", one->text);
    }
    pthread_mutex_unlock(&stager->lock);
    return status;
}

tagc_status tagc_stager_finish(tagc_stager *stager, uint64_t number, tagc_status status, const char *text) {
    if (!stager) return tagc_fail(TAGC_ERR_ARGUMENT, "stager is NULL");
    pthread_mutex_lock(&stager->lock);
    if (number != stager->n_finished + 1 || number > stager->n_taken) {
        unsigned long long next = stager->n_finished + 1, taken = stager->n_taken;
        pthread_mutex_unlock(&stager->lock);
        return tagc_fail(TAGC_ERR_STATE, "ticket is %llu, must be %llu, and taken: %llu are",
                         (unsigned long long)number, next, taken);
    }
    ticket *one = ticket_of(stager, number);
    if (status != TAGC_OK && one->status == TAGC_OK &&
        one->n_bytes_out) /* else the slot is not this ticket's */
        memset(stager->slots[one->slot].out, 0xff, one->n_bytes_out);
    if (status != TAGC_OK) tagc_stager_fail_ticket(one, status, text ? text : "");
    if (one->status != TAGC_OK && stager->first_failure == TAGC_OK) {
        stager->first_failure = one->status;
        memcpy(stager->first_text, one->text, sizeof one->text);
    }
    one->finished = 1;
    stager->n_finished = number;
    pthread_cond_broadcast(&stager->changed);
    pthread_mutex_unlock(&stager->lock);
    return TAGC_OK;
}

/* ---- callers that wait for it ---- */

tagc_status tagc_stager_wait(tagc_stager *stager, uint64_t number) {
    if (!stager) return tagc_fail(TAGC_ERR_ARGUMENT, "stager is NULL");
    pthread_mutex_lock(&stager->lock);
    if (number > stager->n_enqueued) number = stager->n_enqueued;
    while (stager->n_finished < number && !stager->is_closed)
        pthread_cond_wait(&stager->changed, &stager->lock);
    tagc_status status = stager->first_failure;
    if (status != TAGC_OK) tagc_fail(status, "%s", stager->first_text);
    if (status == TAGC_OK && stager->n_finished < number)
        status = tagc_fail(TAGC_ERR_STATE, "the stager was closed while exchanges were under way");
    stager->first_failure = TAGC_OK;
    pthread_mutex_unlock(&stager->lock);
    return status;
}

uint64_t tagc_stager_retired(tagc_stager *stager) {
    if (!stager) return 0;
    const tagc_runtime *runtime = runtime_of(stager);
    pthread_mutex_lock(&stager->launch);
    for (int i = 0; i < stager->n_slots;
         i++) { /* results come back in order, so one result implies all before it */
        slot *one = &stager->slots[i];
        int done = 0;
        if (one->last <= stager->retired) continue;
        int code = tagc_runtime_answer(runtime, runtime->EventQuery(one->back), &done);
        if (code) runtime->GetLastError();
        if (code || done) stager->retired = one->last; /* a failed device does nothing any more */
    }
    uint64_t retired = stager->retired;
    pthread_mutex_unlock(&stager->launch);
    return retired;
}

void *tagc_stager_stream(const tagc_stager *stager) {
    return stager->back;
}

/* ---- making ---- */

static tagc_status make(tagc_stager *stager) {
    const tagc_device *device = stager->device;
    const tagc_runtime *runtime = &device->runtime;
    TAGC_TRY(tagc_device_check(device, runtime->StreamCreateWithFlags(&stager->out, TAGC_STREAM_NON_BLOCKING),
                               "making a stream"));
    TAGC_TRY(tagc_device_check(
        device, runtime->StreamCreateWithFlags(&stager->back, TAGC_STREAM_NON_BLOCKING), "making a stream"));
    for (int i = 0; i < stager->n_slots; i++) {
        slot *one = &stager->slots[i];
        void **events[] = {&one->came, &one->copied_out, &one->back};
        for (int e = 0; e < 3; e++)
            TAGC_TRY(tagc_device_check(device,
                                       runtime->EventCreateWithFlags(events[e], TAGC_EVENT_WITHOUT_TIMING),
                                       "making an event"));
    }
    return TAGC_OK;
}

tagc_status tagc_stager_create(tagc_device *device, int n_slots, tagc_stager **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!device) return tagc_fail(TAGC_ERR_ARGUMENT, "device is NULL");
    if (n_slots < 1 || n_slots > MAX_SLOTS)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_slots is %d, must be in [1, %d]", n_slots, MAX_SLOTS);
    tagc_stager *stager;
    TAGC_TRY(tagc_memory_create(sizeof *stager, "a stager", (void **)&stager));
    stager->device = device;
    stager->n_slots = n_slots;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&stager->launch, NULL);
    pthread_mutex_init(&stager->lock, NULL);
    pthread_cond_init(&stager->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    int before = 0;
    tagc_status status = tagc_device_enter(device, &before);
    if (status == TAGC_OK) {
        status = make(stager);
        tagc_device_leave(device, before);
    }
    if (status != TAGC_OK) {
        char text[TAGC_ERROR_TEXT_BYTES];
        snprintf(text, sizeof text, "%s", tagc_last_error());
        tagc_stager_destroy(stager);
        return tagc_fail(status, "%s", text);
    }
    *out = stager;
    return TAGC_OK;
}

void tagc_stager_close(tagc_stager *stager) {
    if (!stager) return;
    pthread_mutex_lock(&stager->lock);
    stager->is_closed = 1;
    pthread_cond_broadcast(&stager->changed);
    pthread_mutex_unlock(&stager->lock);
}

void tagc_stager_destroy(tagc_stager *stager) {
    if (!stager) return;
    const tagc_runtime *runtime = runtime_of(stager);
    tagc_stager_close(stager);
    int before = 0;
    if (tagc_device_enter(stager->device, &before) == TAGC_OK) {
        void *streams[] = {stager->out, stager->back};
        for (int i = 0; i < 2; i++)
            if (streams[i]) runtime->StreamSynchronize(streams[i]); /* its functions know this memory */
        for (int i = 0; i < stager->n_slots; i++) {
            slot *one = &stager->slots[i];
            void *events[] = {one->came, one->copied_out, one->back};
            for (int e = 0; e < 3; e++)
                if (events[e]) runtime->EventDestroy(events[e]);
            if (one->in) runtime->FreeHost(one->in);
            if (one->out) runtime->FreeHost(one->out);
        }
        for (int i = 0; i < 2; i++)
            if (streams[i]) runtime->StreamDestroy(streams[i]);
        runtime->GetLastError();
        tagc_device_leave(stager->device, before);
    }
    pthread_cond_destroy(&stager->changed);
    pthread_mutex_destroy(&stager->lock);
    pthread_mutex_destroy(&stager->launch);
    tagc_memory_destroy(stager);
}
