/* See fake_runtime.h: the calls. One lock for everything. Handles and blocks are kept until the next reset, so that a use after the end
 * is found rather than fatal. */
#include "fake_private.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct fake_state fake = {.lock = PTHREAD_MUTEX_INITIALIZER,
                          .changed = PTHREAD_COND_INITIALIZER,
                          .n_devices = 1,
                          .pace = FAKE_EAGER, /* of programs that do not know that it is a fake */
                          .limit_ms = LIMIT_MS,
                          .version = 13000};
_Thread_local int current_device, in_host_function, in_kernel;
_Thread_local void *current_context;

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

/* With the lock. */
static int push(void *handle, op work) {
    static const char *const functions[] = {"LaunchKernel",    "MemcpyAsync",        "EventRecord",
                                            "StreamWaitEvent", "LaunchHostFunc",     "FreeAsync",
                                            "MemsetAsync",     "StreamWriteValue32", "StreamWaitValue32"};
    stream *to = stream_at(handle);
    if (!to) return INVALID_HANDLE;
    if (handle && handle == fake.capturing) mistake("work for a stream that is being captured");
    here();
    int code = wait_for_room(to, functions[work.kind]);
    if (code) return code;
    op *one = malloc(sizeof *one);
    *one = work;
    one->next = NULL;
    one->order = fake.n_pushed++;
    if (!to->first) to->last = &to->first;
    *to->last = one;
    to->last = &one->next;
    to->n_ops++;
    return OK;
}

static int is_stream_over(const void *of) {
    return is_over(of);
}

/* Waits until all that the stream has has run, if the manners say so. */
static int run_first(void *handle, const char *function, int if_so) {
    return if_so
               ? wait_until(here(), function, "until its work has run", 1, is_stream_over, stream_at(handle))
               : OK;
}

static int is_recorded(const event *one) {
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
    pthread_mutex_lock(&fake.lock);
    if (fake.version >= 12000) fake.contexts |= 1u << ordinal;
    current_context = fake.contexts >> ordinal & 1 ? &fake.devices[ordinal] : NULL;
    pthread_mutex_unlock(&fake.lock);
    return OK;
}

FAKE_API int cudaStreamCreateWithPriority(void **out, unsigned flags, int priority) {
    int code = enter("StreamCreateWithPriority");
    if (!code && (flags != 1 || fake.n_streams == MAX_STREAMS)) code = INVALID_VALUE;
    if (!code && (priority > LEAST_PRIORITY || priority < GREATEST_PRIORITY)) /* CUDA clamps it */
        mistake("a priority out of the device's range");
    if (code) return leave(code);
    stream *one = &fake.streams[fake.n_streams++];
    *one = (stream){.is_live = 1, .device = current_device, .number = fake.n_streams, .priority = priority};
    one->last = &one->first;
    here();
    *out = one;
    return leave(OK);
}

FAKE_API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    int code = enter("DeviceGetStreamPriorityRange");
    *least = LEAST_PRIORITY;
    *greatest = GREATEST_PRIORITY;
    return leave(code);
}

int fake_stream(void **out) {
    return cudaStreamCreateWithPriority(out, 1, LEAST_PRIORITY);
}

int fake_n_streams(int priority) {
    int n = 0;
    for (int i = 0; i < fake.n_streams; i++)
        n += fake.streams[i].is_live && fake.streams[i].priority == priority;
    return n;
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
    return leave(code ? code : !one ? INVALID_HANDLE : is_over(one) ? OK : NOT_READY);
}

FAKE_API int cudaStreamSynchronize(void *handle) {
    int code = enter("StreamSynchronize");
    stream *one = stream_at(handle);
    if (!code && !one) code = INVALID_HANDLE;
    if (!code)
        code = wait_until(&fake.devices[one->device], "StreamSynchronize",
                          "until a stream has nothing left to do", 0, is_stream_over, one);
    return leave(code);
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

int cudaEventQuery(void *handle) {
    int code = enter("EventQuery");
    event *one = event_at(handle);
    return leave(code ? code : !one ? INVALID_HANDLE : is_recorded(one) ? OK : NOT_READY);
}

FAKE_API int cudaMemcpyAsync(void *to, const void *from, size_t n_bytes, int kind, void *handle) {
    int code = enter("MemcpyAsync");
    if (!code && kind != TO_HOST && kind != TO_DEVICE && kind != THERE) code = INVALID_VALUE;
    if (!code && (!seen(to, n_bytes, kind == TO_HOST) || !seen(from, n_bytes, kind == TO_DEVICE)))
        code = INVALID_VALUE;
    if (!code) fake.n_copied += n_bytes;
    if (!code)
        code =
            push(handle, (op){.kind = COPY, .to = to, .from = from, .n_bytes = n_bytes, .copy_kind = kind});
    return leave(code ? code : run_first(handle, "MemcpyAsync", fake.manners.copy_blocking));
}

int cudaLaunchHostFunc(void *handle, void (*function)(void *), void *arg) {
    int code = enter("LaunchHostFunc");
    return leave(code ? code : push(handle, (op){.kind = HOST_FUNCTION, .function = function, .arg = arg}));
}

int fake_load(void (*kernel)(void *)) {
    int code = enter("FuncGetAttributes");
    return leave(code ? code : load(kernel));
}

static int launch(int code, void *handle, void (*kernel)(void *), void *arg) {
    if (!code) code = load(kernel);
    if (!code) code = push(handle, (op){.kind = KERNEL, .function = kernel, .arg = arg});
    return leave(code ? code : run_first(handle, "LaunchKernel", fake.manners.launch_blocking));
}

int fake_launch(void *handle, void (*kernel)(void *), void *arg) {
    return launch(enter("LaunchKernel"), handle, kernel, arg);
}

/* ---- calls of the driver, which makes no context ---- */

enum { WAIT_AT_LEAST = 0, WAIT_EQUAL = 1 };

static int enter_driver(const char *function) {
    void *before = current_context;
    int code = enter(function);
    if (code || before) return code;
    mistake("a call of the driver in a thread without a context");
    current_context = NULL;
    return NO_CONTEXT;
}

int fake_load_by_driver(void (*kernel)(void *)) {
    int code = enter_driver("FuncGetAttributes");
    return leave(code ? code : load(kernel));
}

int fake_launch_by_driver(void *handle, void (*kernel)(void *), void *arg) {
    return launch(enter_driver("LaunchKernel"), handle, kernel, arg);
}

static int write_value_32(void *handle, uint64_t address, uint32_t value, unsigned flags) {
    int code = enter_driver("StreamWriteValue32");
    if (!code && flags) code = NOT_SUPPORTED;
    uint32_t *at = code ? NULL : seen_flag(address);
    if (!code && !at) code = INVALID_VALUE;
    return leave(code ? code : push(handle, (op){.kind = WRITE_FLAG, .to = (char *)at, .value = value}));
}

static int wait_value_32(void *handle, uint64_t address, uint32_t value, unsigned flags) {
    int code = enter_driver("StreamWaitValue32");
    if (!code && flags > WAIT_EQUAL) code = NOT_SUPPORTED;
    uint32_t *at = code ? NULL : seen_flag(address);
    if (!code && !at) code = INVALID_VALUE;
    int n_polls = (int)(draw(here()) % (fake.manners.late_flags ? 64 : 4));
    return leave(code ? code
                      : push(handle, (op){.kind = WAIT_FLAG,
                                          .to = (char *)at,
                                          .value = value,
                                          .is_equal = flags == WAIT_EQUAL,
                                          .n_polls = n_polls}));
}

static int primary_context_state(int ordinal, unsigned *flags, int *is_active) {
    if (ordinal < 0 || ordinal >= fake.n_devices) return INVALID_VALUE;
    pthread_mutex_lock(&fake.lock);
    *flags = 0;
    *is_active = (int)(fake.contexts >> ordinal & 1);
    pthread_mutex_unlock(&fake.lock);
    return OK;
}

static int context_get(void **context) {
    *context = current_context;
    return OK;
}

static int context_set(void *context) {
    current_context = context;
    return OK;
}

static int context_retain(void **context, int ordinal) {
    if (ordinal < 0 || ordinal >= fake.n_devices) return INVALID_VALUE;
    pthread_mutex_lock(&fake.lock);
    fake.contexts |= 1u << ordinal;
    fake.n_retained++;
    pthread_mutex_unlock(&fake.lock);
    *context = &fake.devices[ordinal];
    return OK;
}

static int context_release(int ordinal) {
    (void)ordinal;
    pthread_mutex_lock(&fake.lock);
    fake.n_retained--;
    pthread_mutex_unlock(&fake.lock);
    return OK;
}

/* Functions of any type. */
static const struct {
    const char *name;
    void (*call)(void);
} driver_calls[] = {{"cuStreamWriteValue32", (void (*)(void))write_value_32},
                    {"cuStreamWaitValue32", (void (*)(void))wait_value_32},
                    {"cuDevicePrimaryCtxGetState", (void (*)(void))primary_context_state},
                    {"cuCtxGetCurrent", (void (*)(void))context_get},
                    {"cuCtxSetCurrent", (void (*)(void))context_set},
                    {"cuDevicePrimaryCtxRetain", (void (*)(void))context_retain},
                    {"cuDevicePrimaryCtxRelease", (void (*)(void))context_release}};

int cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned version,
                                     unsigned long long flags, int *status) {
    int code = enter("GetDriverEntryPointByVersion");
    *out = NULL;
    if (!code && version > DRIVER_VERSION) code = INVALID_VALUE;
    for (size_t i = 0; i < sizeof driver_calls / sizeof *driver_calls; i++)
        if (!code && !flags && !fake.is_driver_old && !strcmp(symbol, driver_calls[i].name))
            memcpy(out, &driver_calls[i].call, sizeof *out);
    *status = *out ? 0 : 1; /* cudaDriverEntryPointSymbolNotFound */
    return leave(code);
}

void fake_set_driver_old(void) {
    fake.is_driver_old = 1;
}

/* ---- memory in the order of streams; fake_memory.c has the rest ---- */

FAKE_API int cudaMallocAsync(void **out, size_t n_bytes, void *handle) {
    int code = enter("MallocAsync");
    block *one = code || !stream_at(handle) ? NULL : map(n_bytes, 0);
    if (one) {
        one->is_ordered = 1;
        fake.n_allocs++;
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
    if (!code) code = push(handle, (op){.kind = FILL, .to = memory, .n_bytes = n_bytes, .byte = byte});
    return leave(code ? code : run_first(handle, "MemsetAsync", fake.manners.copy_blocking));
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

unsigned fake_contexts(void) {
    return fake.contexts;
}

uint64_t fake_n_live(void) {
    uint64_t n = 0;
    for (int i = 0; i < fake.n_streams; i++) n += (uint64_t)fake.streams[i].is_live;
    for (int i = 0; i < fake.n_events; i++) n += (uint64_t)fake.events[i].is_live;
    for (int i = 0; i < fake.n_blocks; i++) n += fake.blocks[i].is_pinned && !fake.blocks[i].is_freed;
    return n + (uint64_t)fake.n_retained;
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

/* Of programs that do not reset it. */
__attribute__((constructor)) static void begin(void) {
    behave_as_told();
}

void fake_reset(uint64_t seed, int n_devices, fake_pace pace, int one_host_thread) {
    for (int d = 0; d < FAKE_MAX_DEVICES; d++) {
        stop(&fake.devices[d]);
        drop(&fake.devices[d].standard);
    }
    for (int i = 0; i < fake.n_streams; i++) drop(&fake.streams[i]);
    for (int i = 0; i < fake.n_events; i++) free(fake.events[i].is_done);
    unmap_all();
    fake.n_streams = fake.n_events = fake.n_retained = 0;
    current_context = NULL;
    fake.n_devices = n_devices;
    fake.pace = pace;
    fake.one_host_thread = one_host_thread;
    fake.host_as_device = 0;
    fake.capturing = NULL;
    fake.version = 13000;
    fake.is_driver_old = 0;
    fake.contexts = 0;
    fake.n_allocs = fake.n_copied = fake.n_pushed = 0;
    behave_as_told();
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
