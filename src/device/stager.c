/* Exchanges of device arrays through pinned memory, in the order in which they were enqueued.
 *
 * Two streams of the stager's own, and what exchange k puts into them (slot = k mod n_slots):
 *
 *   caller   ... k's input | record came[slot]                                  wait back[slot] | what uses k's output
 *   out      wait came[slot], back[slot] | copy input -> slot.in | input_came(k) | record out[slot]
 *   back     wait out[slot] | wait_for_result(k) | copy slot.out -> output | record back[slot]
 *
 * input_came and wait_for_result are host functions in C, which make no call of the runtime and take no lock that is held
 * over one. The first lets tagc_stager_next return; the second sleeps until tagc_stager_finish. The thread between these two
 * exchanges; it may need Python's lock, the host functions never do.
 *
 * Why no deadlock. A runtime may call the host functions of all streams from one thread, in any order that the
 * streams allow, and while wait_for_result(k) sleeps there it calls no other. Let all ranks have enqueued the same
 * exchanges in the same order. Suppose that no rank goes on, and let k be the first exchange that is not finished.
 * Whatever exchange's wait_for_result a rank sleeps in is one that is not finished, so number j >= k. Stream
 * `back` waited for out[j] before, and stream `out` is in order, so input_came(k) has run there. A rank that
 * sleeps in none has a free thread, and what input_came(k) waits for is the caller's work, and result k - n_slots
 * and older ones, which are finished. So every rank's input of k is there, and its thread exchanges k: somebody
 * goes on. Without the wait for out[slot] wait_for_result(k) could be called before input_came(k), and would wait
 * for ever: the tests plant that. With streams of each unit's own, and no order between them, rank 0 could sleep
 * in the result of unit 1 and rank 1 in that of unit 2. What holds for one stager holds for several whose
 * exchanges are enqueued in one order on all ranks, since the argument needs no more than one order of all
 * exchanges; but other host functions that wait for other ranks do not belong in such a process.
 *
 * A stage without copies leaves both copies out. What its exchange does with the device's arrays is over before its finish.
 *
 * Why slots may be shared. Before slot.in is written again, stream `out` waits for back[slot], recorded after the last use
 * of slot.in and slot.out: the exchange reads one and writes the other before its finish, wait_for_result before the copy
 * back. A slot's second ticket is handed out only after input_came, so after that wait.
 *
 * Failures. The first failure of the runtime breaks the stager: in tagc_stage_enqueue, or seen by tagc_stager_next, which
 * asks now and then because a device that failed calls no host functions. From then on every ticket is handed out at once
 * with that failure, so that this rank can tell its peers in their agreed order. A ticket is handed out only when
 * all of it was enqueued: a failure half-way is known before the exchange begins. */
#include "device/stager.h"
#include "core/memory.h"
#include "core/status.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { N_TICKETS = 1024, MAX_SLOTS = 16, TEXT_BYTES = 256, LOOK_MS = 50 };

/* One exchange under way. */
typedef struct ticket {
    tagc_stager *stager;
    uint64_t number; /* 0: free */
    uint64_t tag;
    const void *input;  /* of a stage without copies: arrays of the device */
    void *output;       /* likewise; else NULL */
    size_t n_bytes_out; /* 0: nothing is copied */
    int slot;
    int enqueued;   /* all of it, or as much as could be */
    int input_came; /* or never will */
    int is_awaited; /* wait_for_result was enqueued */
    int finished;
    int is_slept_for; /* wait_for_result sleeps until it is finished */
    int left;         /* and has returned */
    tagc_status status;
    char text[TEXT_BYTES];
} ticket;

typedef struct slot {
    void *in, *out;                 /* pinned */
    void *came, *copied_out, *back; /* events */
    uint64_t last;                  /* ticket that recorded `back` last; 0: none */
} slot;

struct tagc_stager {
    tagc_device *device;
    void *out, *back; /* streams */
    slot slots[MAX_SLOTS];
    int n_slots;
    size_t n_bytes_in, n_bytes_out; /* of every slot */

    pthread_mutex_t launch; /* held while work is enqueued: streams get exchanges in the order of tickets */
    uint64_t retired;       /* with `launch` */

    pthread_mutex_t lock; /* of what follows; never held over a call of the runtime */
    pthread_cond_t changed;
    ticket tickets[N_TICKETS]; /* number n at n mod N_TICKETS */
    uint64_t n_enqueued, n_taken, n_finished;
    int is_closed;
    tagc_status broken; /* by the runtime; TAGC_OK: not */
    char why[TEXT_BYTES];
    tagc_status first_failure; /* since the last wait */
    char first_text[TEXT_BYTES];
};

struct tagc_stage {
    tagc_stager *stager;
    uint64_t tag;
    size_t n_bytes_in, n_bytes_out;
};

static const tagc_runtime *runtime_of(const tagc_stager *stager) {
    return &stager->device->runtime;
}

static ticket *ticket_of(tagc_stager *stager, uint64_t number) {
    return &stager->tickets[number % N_TICKETS];
}

/* ---- host functions ---- */

static void input_came(void *arg) {
    ticket *one = arg;
    tagc_stager *stager = one->stager;
    pthread_mutex_lock(&stager->lock);
    one->input_came = 1;
    pthread_cond_broadcast(&stager->changed);
    pthread_mutex_unlock(&stager->lock);
}

static void wait_for_result(void *arg) {
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

static void fail_ticket(ticket *one, tagc_status status, const char *text) {
    if (one->status != TAGC_OK) return;
    one->status = status;
    snprintf(one->text, sizeof one->text, "%s", text);
}

/* The runtime does not do what it is asked any more. */
static void break_down(tagc_stager *stager, tagc_status status, const char *text) {
    if (stager->broken == TAGC_OK) {
        stager->broken = status;
        snprintf(stager->why, sizeof stager->why, "%s", text);
    }
    for (uint64_t n = stager->n_taken + 1; n <= stager->n_enqueued; n++) {
        ticket *one = ticket_of(stager, n);
        if (one->input_came) continue;
        fail_ticket(one, stager->broken, stager->why);
        one->input_came = 1;
    }
    pthread_cond_broadcast(&stager->changed);
}

/* ---- the thread that exchanges ---- */

/* A device that failed calls no host functions. Without the lock. */
static void look_at_device(tagc_stager *stager) {
    const tagc_runtime *runtime = runtime_of(stager);
    int before = 0, done = 0;
    tagc_status status = tagc_device_enter(stager->device, &before);
    if (status == TAGC_OK) {
        status =
            tagc_device_check(stager->device, runtime->stream_query(runtime->context, stager->out, &done),
                              "a copy to the host");
        tagc_device_leave(stager->device, before);
    }
    if (status == TAGC_OK) return;
    pthread_mutex_lock(&stager->lock);
    break_down(stager, status, tagc_last_error());
    pthread_mutex_unlock(&stager->lock);
}

/* With the lock. Returns 0 when that was long. */
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
    if (status != TAGC_OK) fail_ticket(one, status, text ? text : "");
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

/* ---- those who wait for it ---- */

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

int tagc_stager_n_waiting(tagc_stager *stager) {
    pthread_mutex_lock(&stager->lock);
    int n = 0;
    for (uint64_t i = stager->n_finished + 1; i <= stager->n_enqueued && !stager->is_closed; i++)
        n += ticket_of(stager, i)->is_slept_for;
    pthread_mutex_unlock(&stager->lock);
    return n;
}

uint64_t tagc_stager_n_ready(tagc_stager *stager) {
    pthread_mutex_lock(&stager->lock);
    uint64_t n = 0;
    while (stager->n_taken + n < stager->n_enqueued) {
        const ticket *one = ticket_of(stager, stager->n_taken + n + 1);
        if (!one->enqueued || !one->input_came) break;
        n++;
    }
    pthread_mutex_unlock(&stager->lock);
    return n;
}

uint64_t tagc_stager_retired(tagc_stager *stager) {
    if (!stager) return 0;
    const tagc_runtime *runtime = runtime_of(stager);
    pthread_mutex_lock(&stager->launch);
    for (int i = 0; i < stager->n_slots;
         i++) { /* results come back in order: one that is there says so of all before */
        slot *one = &stager->slots[i];
        int done = 0;
        if (one->last <= stager->retired) continue;
        int code = runtime->event_query(runtime->context, one->back, &done);
        if (code) runtime->forget_error(runtime->context);
        if (code || done) stager->retired = one->last; /* a device that failed does nothing any more */
    }
    uint64_t retired = stager->retired;
    pthread_mutex_unlock(&stager->launch);
    return retired;
}

void *tagc_stager_stream(const tagc_stager *stager) {
    return stager->back;
}

/* ---- enqueueing ---- */

/* The next ticket's record, with the launch lock. Waits while that is still another's. */
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
    if (stager->is_closed) fail_ticket(one, TAGC_ERR_STATE, "the stager is closed");
    if (stager->broken != TAGC_OK) fail_ticket(one, stager->broken, stager->why);
    stager->n_enqueued = number;
    pthread_mutex_unlock(&stager->lock);
    return one;
}

/* Nothing is in a stream yet when this fails: the stager lives on. */
static tagc_status check_arrays(const tagc_stage *stage, const void *input, const void *output,
                                void *stream) {
    const tagc_device *device = stage->stager->device;
    const tagc_runtime *runtime = &device->runtime;
    int is_capturing = 0;
    TAGC_TRY(tagc_device_check(device, runtime->stream_is_capturing(runtime->context, stream, &is_capturing),
                               "asking for the stream's state"));
    if (is_capturing)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "the stream is being captured into a graph (cudaStreamIsCapturing says so), and a "
                         "graph cannot exchange anything "
                         "when it is replayed: capture without this exchange, or run it as it is");
    TAGC_TRY(tagc_device_check_place(device, input, "input"));
    return tagc_device_check_place(device, output, "output");
}

/* In a stream of the stager's; a stage without copies has none. */
static tagc_status put_copy(const tagc_stage *stage, void *to, const void *from, size_t n_bytes,
                            tagc_copy kind, void *stream) {
    const tagc_device *device = stage->stager->device;
    const tagc_runtime *runtime = &device->runtime;
    if (n_bytes == 0) return TAGC_OK;
    return tagc_device_check(device, runtime->copy(runtime->context, to, from, n_bytes, kind, stream),
                             kind == TAGC_COPY_TO_HOST ? "copying to the host" : "copying back");
}

/* The sequence drawn at the top of this file. */
static tagc_status put_into_streams(tagc_stage *stage, ticket *one, const void *input, void *output,
                                    void *stream, int waits) {
    tagc_stager *stager = stage->stager;
    const tagc_device *device = stager->device;
    const tagc_runtime *runtime = &device->runtime;
    void *context = runtime->context;
    slot *own = &stager->slots[one->slot];
    const char *out = "copying to the host", *back = "copying back";
    TAGC_TRY(tagc_device_check(device, runtime->event_record(context, own->came, stream), out));
    TAGC_TRY(tagc_device_check(device, runtime->stream_wait_event(context, stager->out, own->came), out));
    TAGC_TRY(tagc_device_check(device, runtime->stream_wait_event(context, stager->out, own->back), out));
    TAGC_TRY(put_copy(stage, own->in, input, stage->n_bytes_in, TAGC_COPY_TO_HOST, stager->out));
    TAGC_TRY(tagc_device_check(device, runtime->host_function(context, stager->out, input_came, one), out));
    TAGC_TRY(tagc_device_check(device, runtime->event_record(context, own->copied_out, stager->out), out));

    TAGC_TRY(
        tagc_device_check(device, runtime->stream_wait_event(context, stager->back, own->copied_out), back));
    TAGC_TRY(
        tagc_device_check(device, runtime->host_function(context, stager->back, wait_for_result, one), back));
    pthread_mutex_lock(&stager->lock);
    one->is_awaited = 1;
    pthread_mutex_unlock(&stager->lock);
    TAGC_TRY(put_copy(stage, output, own->out, stage->n_bytes_out, TAGC_COPY_TO_DEVICE, stager->back));
    TAGC_TRY(tagc_device_check(device, runtime->event_record(context, own->back, stager->back), back));
    own->last = one->number;
    if (!waits) return TAGC_OK;
    return tagc_device_check(device, runtime->stream_wait_event(context, stream, own->back),
                             "waiting for the result");
}

static void settle(ticket *one, tagc_status status, int is_the_device) {
    tagc_stager *stager = one->stager;
    pthread_mutex_lock(&stager->lock);
    if (status != TAGC_OK) fail_ticket(one, status, tagc_last_error());
    if (status != TAGC_OK && is_the_device) break_down(stager, status, one->text);
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

/* ---- making ---- */

static tagc_status make(tagc_stager *stager) {
    const tagc_device *device = stager->device;
    const tagc_runtime *runtime = &device->runtime;
    void *context = runtime->context;
    TAGC_TRY(tagc_device_check(device, runtime->stream_create(context, &stager->out), "making a stream"));
    TAGC_TRY(tagc_device_check(device, runtime->stream_create(context, &stager->back), "making a stream"));
    for (int i = 0; i < stager->n_slots; i++) {
        slot *one = &stager->slots[i];
        void **events[] = {&one->came, &one->copied_out, &one->back};
        for (int e = 0; e < 3; e++)
            TAGC_TRY(tagc_device_check(device, runtime->event_create(context, events[e]), "making an event"));
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
    void *context = runtime->context;
    tagc_stager_close(stager);
    int before = 0;
    if (tagc_device_enter(stager->device, &before) == TAGC_OK) {
        void *streams[] = {stager->out, stager->back};
        for (int i = 0; i < 2; i++)
            if (streams[i])
                runtime->stream_synchronize(context, streams[i]); /* its functions know this memory */
        for (int i = 0; i < stager->n_slots; i++) {
            slot *one = &stager->slots[i];
            void *events[] = {one->came, one->copied_out, one->back};
            for (int e = 0; e < 3; e++)
                if (events[e]) runtime->event_destroy(context, events[e]);
            if (one->in) runtime->pinned_free(context, one->in);
            if (one->out) runtime->pinned_free(context, one->out);
        }
        for (int i = 0; i < 2; i++)
            if (streams[i]) runtime->stream_destroy(context, streams[i]);
        runtime->forget_error(context);
        tagc_device_leave(stager->device, before);
    }
    pthread_cond_destroy(&stager->changed);
    pthread_mutex_destroy(&stager->lock);
    pthread_mutex_destroy(&stager->launch);
    tagc_memory_destroy(stager);
}

/* ---- stages ---- */

/* Pinned memory of n_bytes in place of *memory. */
static tagc_status replace(tagc_stager *stager, void **memory, size_t n_bytes) {
    const tagc_runtime *runtime = runtime_of(stager);
    void *larger = NULL;
    TAGC_TRY(tagc_device_check(stager->device, runtime->pinned_alloc(runtime->context, &larger, n_bytes),
                               "allocating pinned memory"));
    void *old = *memory;
    *memory = larger;
    return old ? tagc_device_check(stager->device, runtime->pinned_free(runtime->context, old),
                                   "freeing pinned memory")
               : TAGC_OK;
}

static tagc_status grow(tagc_stager *stager, size_t n_bytes_in, size_t n_bytes_out) {
    const tagc_runtime *runtime = runtime_of(stager);
    TAGC_TRY(tagc_device_check(stager->device, runtime->stream_synchronize(runtime->context, stager->out),
                               "waiting for copies"));
    TAGC_TRY(tagc_device_check(stager->device, runtime->stream_synchronize(runtime->context, stager->back),
                               "waiting for copies"));
    for (int i = 0; i < stager->n_slots; i++) {
        if (n_bytes_in > stager->n_bytes_in) TAGC_TRY(replace(stager, &stager->slots[i].in, n_bytes_in));
        if (n_bytes_out > stager->n_bytes_out) TAGC_TRY(replace(stager, &stager->slots[i].out, n_bytes_out));
    }
    if (n_bytes_in > stager->n_bytes_in) stager->n_bytes_in = n_bytes_in;
    if (n_bytes_out > stager->n_bytes_out) stager->n_bytes_out = n_bytes_out;
    return TAGC_OK;
}

/* Nothing is under way, and nothing of a failed exchange still uses pinned memory. */
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
