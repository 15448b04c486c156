/* See fake_runtime.h. One lock for everything; a thread per device runs its work step by step, and others call its host
 * functions. Handles and blocks are kept until the next reset, so that a use after the end is found rather than fatal. */
#include "fake_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

struct fake_state fake = {
    .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER, .n_devices = 1, .version = 13000};
_Thread_local int current_device, in_host_function, in_kernel;

/* ---- running; all with the lock ---- */

static uint64_t draw(device *on) {
    on->random ^= on->random << 13;
    on->random ^= on->random >> 7;
    on->random ^= on->random << 17;
    return on->random;
}

static void pop(stream *from) {
    op *done = from->first;
    from->first = done->next;
    if (!from->first) from->last = &from->first;
    free(done);
}

static void touch(block *pinned, int n) {
    if (!pinned) return;
    pinned->n_copies += n;
    if (!pinned->is_freed)
        mprotect(pinned->user, pinned->n_mapped, pinned->n_copies ? PROT_NONE : PROT_READ | PROT_WRITE);
}

static void start_copy(op *work) {
    work->has_started = 1;
    const void *host = work->copy_kind == TO_HOST ? work->to : work->from;
    touch(block_of(host), 1);
    if (work->copy_kind == TO_HOST) {
        char *to = seen(work->to, work->n_bytes, 1);
        if (to) memset(to, 0xa5, work->n_bytes); /* who reads now reads this */
    }
}

static void end_copy(op *work) {
    char *to = seen(work->to, work->n_bytes, work->copy_kind == TO_HOST);
    char *from = seen(work->from, work->n_bytes, work->copy_kind == TO_DEVICE);
    touch(block_of(work->copy_kind == TO_HOST ? work->to : work->from), -1);
    if (to && from) memcpy(to, from, work->n_bytes);
}

static int can_run(const device *on, const stream *one) {
    const op *work = one->first;
    if (!work || one->is_busy) return 0;
    if (work->kind == WAIT) return work->event->is_done[work->record];
    if (work->kind == HOST_FUNCTION) return !fake.one_host_thread || on->n_running == 0;
    return 1;
}

static int streams_that_can(device *on, stream **found) {
    int n = 0;
    if (can_run(on, &on->standard)) found[n++] = &on->standard;
    for (int i = 0; i < fake.n_streams; i++)
        if (fake.streams[i].device == on->number && can_run(on, &fake.streams[i]))
            found[n++] = &fake.streams[i];
    return n;
}

typedef struct call {
    device *on;
    stream *of;
    op *work;
} call;

static void *call_host_function(void *arg) {
    call *one = arg;
    in_host_function = 1;
    current_device = one->on->number;
    one->work->function(one->work->arg);
    pthread_mutex_lock(&fake.lock);
    one->of->is_busy = 0;
    pop(one->of);
    one->on->n_running--;
    pthread_cond_broadcast(&fake.changed);
    pthread_mutex_unlock(&fake.lock);
    free(one);
    return NULL;
}

/* A thread for each call; with one_host_thread there is never more than one of a device. */
static void start_host_function(device *on, stream *of) {
    call *one = malloc(sizeof *one);
    pthread_t thread;
    *one = (call){on, of, of->first};
    of->is_busy = 1;
    on->n_running++;
    if (pthread_create(&thread, NULL, call_host_function, one)) abort();
    pthread_detach(thread);
}

static void step(device *on, stream *of) {
    op *work = of->first;
    switch (work->kind) {
    case HOST_FUNCTION:
        start_host_function(on, of);
        return;
    case COPY:
        if (!work->has_started) {
            start_copy(work);
            return;
        }
        end_copy(work);
        break;
    case KERNEL:
        in_kernel = 1;
        work->function(work->arg);
        in_kernel = 0;
        break;
    case FREE:
        unmap(work->to, 0);
        break;
    case FILL: {
        char *to = seen(work->to, work->n_bytes, 0);
        if (to) memset(to, work->byte, work->n_bytes);
        break;
    }
    case RECORD:
        work->event->is_done[work->record] = 1;
        break;
    }
    pop(of);
}

static void *worker_main(void *arg) {
    device *on = arg;
    stream *found[MAX_STREAMS + 1];
    current_device = on->number;
    pthread_mutex_lock(&fake.lock);
    while (!on->stopping) {
        int n = on->broken ? 0 : streams_that_can(on, found);
        if (n == 0 || (fake.pace == FAKE_LATE && on->n_demands == 0)) {
            pthread_cond_wait(&fake.changed, &fake.lock);
            continue;
        }
        uint64_t choice = draw(on);
        if (fake.pace == FAKE_EAGER && choice >> 60 < 4) { /* now and then others get ahead */
            pthread_mutex_unlock(&fake.lock);
            nanosleep(&(struct timespec){0, (long)(choice >> 20 & 0xffff)}, NULL);
            pthread_mutex_lock(&fake.lock);
            continue;
        }
        step(on, found[choice % (uint64_t)n]);
        pthread_cond_broadcast(&fake.changed);
    }
    pthread_mutex_unlock(&fake.lock);
    return NULL;
}

static device *here(void) {
    device *on = &fake.devices[current_device];
    if (!on->has_worker) {
        on->has_worker = 1;
        if (pthread_create(&on->worker, NULL, worker_main, on)) abort();
    }
    return on;
}

/* ---- calls ---- */

static int is_live(const stream *one) {
    return one && one->is_live;
}

static stream *stream_at(void *handle) {
    if (!handle) return &here()->standard;
    stream *one = handle;
    if (one < fake.streams || one >= fake.streams + fake.n_streams || !is_live(one)) {
        mistake("a stream that does not exist");
        return NULL;
    }
    return one;
}

static event *event_at(void *handle) {
    event *one = handle;
    if (one < fake.events || one >= fake.events + fake.n_events || !one->is_live) {
        mistake("an event that does not exist");
        return NULL;
    }
    return one;
}

/* What the call must return at once, or OK; takes the lock. */
static int enter(const char *function) {
    pthread_mutex_lock(&fake.lock);
    if (in_host_function) mistake("a call of the runtime from a host function");
    for (int i = 0; i < MAX_FAILURES; i++) {
        failure *one = &fake.failures[i];
        if (!strcmp(one->function, function) && --one->n == 0) {
            one->function[0] = 0;
            return one->code;
        }
    }
    return fake.devices[current_device].broken;
}

static int leave(int code) {
    pthread_cond_broadcast(&fake.changed);
    pthread_mutex_unlock(&fake.lock);
    return code;
}

/* With the lock. */
static int push(void *handle, op work) {
    stream *to = stream_at(handle);
    if (!to) return INVALID_HANDLE;
    if (handle && handle == fake.capturing) mistake("work for a stream that is being captured");
    here();
    op *one = malloc(sizeof *one);
    *one = work;
    one->next = NULL;
    if (!to->first) to->last = &to->first;
    *to->last = one;
    to->last = &one->next;
    return OK;
}

/* Waits while work is asked for. With the lock. */
static int wait_for(device *on, int (*is_over)(void *what), void *what) {
    on->n_demands++;
    pthread_cond_broadcast(&fake.changed);
    while (!is_over(what) && !on->broken) pthread_cond_wait(&fake.changed, &fake.lock);
    on->n_demands--;
    return on->broken;
}

static int is_empty(void *what) {
    return ((stream *)what)->first == NULL;
}

static int is_recorded(void *what) {
    event *one = what;
    return one->n_records == 0 || one->is_done[one->n_records - 1];
}

FAKE_API int cudaRuntimeGetVersion(int *version) {
    *version = fake.version;
    return OK;
}

FAKE_API int cudaGetDeviceCount(int *n) {
    int code = enter("GetDeviceCount");
    *n = fake.n_devices;
    return leave(code);
}

FAKE_API int cudaGetDevice(int *ordinal) {
    *ordinal = current_device;
    return OK;
}

FAKE_API int cudaSetDevice(int ordinal) {
    if (ordinal < 0 || ordinal >= fake.n_devices) return INVALID_VALUE;
    current_device = ordinal;
    return OK;
}

FAKE_API int cudaStreamCreateWithFlags(void **out, unsigned flags) {
    int code = enter("StreamCreateWithFlags");
    if (!code && (flags != 1 || fake.n_streams == MAX_STREAMS)) code = INVALID_VALUE;
    if (code) return leave(code);
    stream *one = &fake.streams[fake.n_streams++];
    *one = (stream){.is_live = 1, .device = current_device};
    one->last = &one->first;
    here();
    *out = one;
    return leave(OK);
}

int fake_stream(void **out) {
    return cudaStreamCreateWithFlags(out, 1);
}

FAKE_API int cudaStreamDestroy(void *handle) {
    int code = enter("StreamDestroy");
    stream *one = stream_at(handle);
    if (one) one->is_live = 0;
    return leave(code);
}

FAKE_API int cudaStreamQuery(void *handle) {
    int code = enter("StreamQuery");
    stream *one = stream_at(handle);
    return leave(code ? code : !one ? INVALID_HANDLE : one->first ? NOT_READY : OK);
}

FAKE_API int cudaStreamSynchronize(void *handle) {
    int code = enter("StreamSynchronize");
    stream *one = stream_at(handle);
    if (!code && !one) code = INVALID_HANDLE;
    return leave(code ? code : wait_for(&fake.devices[one->device], is_empty, one));
}

FAKE_API int cudaStreamWaitEvent(void *handle, void *event_handle, unsigned flags) {
    int code = enter("StreamWaitEvent");
    event *one = event_at(event_handle);
    if (!code && (!one || flags)) code = INVALID_HANDLE;
    if (!code && one->n_records)
        code = push(handle, (op){.kind = WAIT, .event = one, .record = one->n_records - 1});
    return leave(code);
}

FAKE_API int cudaStreamIsCapturing(void *handle, int *status) {
    int code = enter("StreamIsCapturing");
    *status = handle && handle == fake.capturing;
    return leave(code ? code : stream_at(handle) ? OK : INVALID_HANDLE);
}

FAKE_API int cudaEventCreateWithFlags(void **out, unsigned flags) {
    int code = enter("EventCreateWithFlags");
    if (!code && (flags != 2 || fake.n_events == MAX_EVENTS)) code = INVALID_VALUE;
    if (code) return leave(code);
    event *one = &fake.events[fake.n_events++];
    *one = (event){.is_live = 1, .is_done = calloc(MAX_RECORDS, 1)};
    *out = one;
    return leave(OK);
}

FAKE_API int cudaEventDestroy(void *handle) {
    int code = enter("EventDestroy");
    event *one = event_at(handle);
    if (one) one->is_live = 0;
    return leave(code);
}

FAKE_API int cudaEventRecord(void *handle, void *stream_handle) {
    int code = enter("EventRecord");
    event *one = event_at(handle);
    if (!code && (!one || one->n_records == MAX_RECORDS)) code = INVALID_HANDLE;
    if (!code) code = push(stream_handle, (op){.kind = RECORD, .event = one, .record = one->n_records});
    if (!code) one->n_records++;
    return leave(code);
}

FAKE_API int cudaEventQuery(void *handle) {
    int code = enter("EventQuery");
    event *one = event_at(handle);
    return leave(code ? code : !one ? INVALID_HANDLE : is_recorded(one) ? OK : NOT_READY);
}

FAKE_API int cudaMemcpyAsync(void *to, const void *from, size_t n_bytes, int kind, void *handle) {
    int code = enter("MemcpyAsync");
    if (!code && kind != TO_HOST && kind != TO_DEVICE) code = INVALID_VALUE;
    if (!code && (!seen(to, n_bytes, kind == TO_HOST) || !seen(from, n_bytes, kind == TO_DEVICE)))
        code = INVALID_VALUE;
    if (!code) fake.n_copied += n_bytes;
    if (!code)
        code =
            push(handle, (op){.kind = COPY, .to = to, .from = from, .n_bytes = n_bytes, .copy_kind = kind});
    return leave(code);
}

FAKE_API int cudaLaunchHostFunc(void *handle, void (*function)(void *), void *arg) {
    int code = enter("LaunchHostFunc");
    return leave(code ? code : push(handle, (op){.kind = HOST_FUNCTION, .function = function, .arg = arg}));
}

int fake_launch(void *handle, void (*kernel)(void *), void *arg) {
    int code = enter("LaunchKernel");
    return leave(code ? code : push(handle, (op){.kind = KERNEL, .function = kernel, .arg = arg}));
}

FAKE_API int cudaHostAlloc(void **out, size_t n_bytes, unsigned flags) {
    (void)flags;
    int code = enter("HostAlloc");
    block *one = code ? NULL : map(n_bytes, 1);
    if (one) *out = one->user;
    fake.n_allocs += one != NULL;
    return leave(code ? code : one ? OK : INVALID_VALUE);
}

FAKE_API int cudaFreeHost(void *memory) {
    int code = enter("FreeHost");
    unmap(memory, 1);
    return leave(code);
}

FAKE_API int cudaMallocAsync(void **out, size_t n_bytes, void *handle) {
    int code = enter("MallocAsync");
    block *one = code || !stream_at(handle) ? NULL : map(n_bytes, 0);
    if (one) {
        one->is_ordered = 1;
        *out = one->user;
        if (fake.host_as_device) mprotect(one->user, one->n_mapped, PROT_READ | PROT_WRITE);
    }
    return leave(code ? code : one ? OK : INVALID_VALUE);
}

FAKE_API int cudaFreeAsync(void *memory, void *handle) {
    int code = enter("FreeAsync");
    const block *one = block_of(memory);
    if (!code && (!one || !one->is_ordered)) code = INVALID_VALUE;
    return leave(code ? code : push(handle, (op){.kind = FREE, .to = memory}));
}

FAKE_API int cudaMemsetAsync(void *memory, int byte, size_t n_bytes, void *handle) {
    int code = enter("MemsetAsync");
    if (!code && !seen(memory, n_bytes, 0)) code = INVALID_VALUE;
    return leave(code ? code
                      : push(handle, (op){.kind = FILL, .to = memory, .n_bytes = n_bytes, .byte = byte}));
}

FAKE_API int cudaPointerGetAttributes(void *attributes, const void *pointer) {
    int code = enter("PointerGetAttributes");
    const block *one = block_of(pointer);
    int found[2] = {0, 0};
    if (one) {
        found[0] = one->is_pinned ? 1 : 2;
        found[1] = one->device;
    } else if (fake.host_as_device) {
        found[0] = 2;
    }
    memcpy(attributes, found, sizeof found);
    return leave(code);
}

FAKE_API const char *cudaGetErrorString(int code) {
    return code == 700         ? "an illegal memory access was encountered"
           : code == NOT_READY ? "device not ready"
                               : "a fake error";
}

FAKE_API int cudaGetLastError(void) {
    return OK;
}

/* ---- control ---- */

void fake_settle(int (*n_sleeping)(void *context), void *context) {
    stream *found[MAX_STREAMS + 1];
    pthread_mutex_lock(&fake.lock);
    device *on = here();
    on->n_demands++;
    pthread_cond_broadcast(&fake.changed);
    for (;;) {
        while (!on->broken && streams_that_can(on, found)) pthread_cond_wait(&fake.changed, &fake.lock);
        int n_running = on->n_running;
        pthread_mutex_unlock(&fake.lock);
        int n = n_sleeping(context); /* takes the lock of those who sleep */
        if (n != n_running) nanosleep(&(struct timespec){0, 100000}, NULL);
        pthread_mutex_lock(&fake.lock);
        if (on->broken || (n == n_running && n_running == on->n_running && !streams_that_can(on, found)))
            break;
    }
    on->n_demands--;
    pthread_mutex_unlock(&fake.lock);
}

int fake_is_idle(int number, int *n_host_functions) {
    stream *found[MAX_STREAMS + 1];
    pthread_mutex_lock(&fake.lock);
    device *on = &fake.devices[number];
    *n_host_functions = on->n_running;
    int is = streams_that_can(on, found) == 0;
    pthread_mutex_unlock(&fake.lock);
    return is;
}

void fake_fail(const char *function, int n, int code) {
    pthread_mutex_lock(&fake.lock);
    for (int i = 0; i < MAX_FAILURES; i++)
        if (!fake.failures[i].function[0]) {
            fake.failures[i] = (failure){.n = n, .code = code};
            snprintf(fake.failures[i].function, sizeof fake.failures[i].function, "%s", function);
            break;
        }
    pthread_mutex_unlock(&fake.lock);
}

/* All work but a host function under way. With the lock. */
static void drop(stream *one) {
    op *busy = one->is_busy ? one->first : NULL;
    if (busy) one->first = busy->next;
    while (one->first) {
        op *work = one->first;
        if (work->kind == COPY && work->has_started)
            touch(block_of(work->copy_kind == TO_HOST ? work->to : work->from), -1);
        pop(one);
    }
    if (busy) {
        busy->next = NULL;
        one->first = busy;
        one->last = &busy->next;
    }
}

void fake_break(int number, int code) {
    pthread_mutex_lock(&fake.lock);
    fake.devices[number].broken = code;
    drop(&fake.devices[number].standard);
    for (int i = 0; i < fake.n_streams; i++)
        if (fake.streams[i].device == number) drop(&fake.streams[i]);
    pthread_cond_broadcast(&fake.changed);
    pthread_mutex_unlock(&fake.lock);
}

void fake_capture(void *handle) {
    fake.capturing = handle;
}

void fake_set_version(int version) {
    fake.version = version;
}

uint64_t fake_n_allocs(void) {
    return fake.n_allocs;
}

uint64_t fake_n_live(void) {
    uint64_t n = 0;
    for (int i = 0; i < fake.n_streams; i++) n += (uint64_t)fake.streams[i].is_live;
    for (int i = 0; i < fake.n_events; i++) n += (uint64_t)fake.events[i].is_live;
    for (int i = 0; i < fake.n_blocks; i++) n += fake.blocks[i].is_pinned && !fake.blocks[i].is_freed;
    return n;
}

uint64_t fake_n_copied(void) {
    pthread_mutex_lock(&fake.lock);
    uint64_t n = fake.n_copied;
    pthread_mutex_unlock(&fake.lock);
    return n;
}

uint64_t fake_n_device_blocks(void) {
    uint64_t n = 0;
    pthread_mutex_lock(&fake.lock);
    for (int i = 0; i < fake.n_blocks; i++) n += fake.blocks[i].is_ordered && !fake.blocks[i].is_freed;
    pthread_mutex_unlock(&fake.lock);
    return n;
}

static void stop(device *on) {
    if (!on->has_worker) return;
    pthread_mutex_lock(&fake.lock);
    while (on->n_running) pthread_cond_wait(&fake.changed, &fake.lock);
    on->stopping = 1;
    pthread_cond_broadcast(&fake.changed);
    pthread_mutex_unlock(&fake.lock);
    pthread_join(on->worker, NULL);
}

void fake_reset(uint64_t seed, int n_devices, fake_pace pace, int one_host_thread) {
    for (int d = 0; d < FAKE_MAX_DEVICES; d++) {
        stop(&fake.devices[d]);
        drop(&fake.devices[d].standard);
    }
    for (int i = 0; i < fake.n_streams; i++) drop(&fake.streams[i]);
    for (int i = 0; i < fake.n_events; i++) free(fake.events[i].is_done);
    unmap_all();
    fake.n_streams = fake.n_events = 0;
    fake.n_devices = n_devices;
    fake.pace = pace;
    fake.one_host_thread = one_host_thread;
    fake.host_as_device = 0;
    fake.capturing = NULL;
    fake.version = 13000;
    fake.n_allocs = fake.n_copied = 0;
    memset(fake.failures, 0, sizeof fake.failures);
    forget_mistakes();
    current_device = 0;
    for (int d = 0; d < FAKE_MAX_DEVICES; d++) {
        device *on = &fake.devices[d];
        *on = (device){.number = d, .random = (seed * 2 + 1) * 0x9e3779b97f4a7c15u + (uint64_t)d};
        on->standard = (stream){.is_live = 1, .device = d};
        on->standard.last = &on->standard.first;
    }
    catch_faults();
}
