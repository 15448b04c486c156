/* What flags cost on this machine, and what stands still while a stream waits for one: the first facts on hardware, before any training.
 * Where there is no device it says so, and ends with 77.
 *
 *   bench_flags [--part flags|facts|waits] [--library FILE] [--load FILE] [--rounds N] [--streams N[,N...]] [--wait-ms N]
 *
 * facts: what is here, and whether the driver's functions are found in both ways.
 * waits: whether the library finds out that calls wait, as with CUDA_LAUNCH_BLOCKING=1; ends with 1 where it does not.
 * flags (what it does unless told otherwise; load: the library of gpu_load.h, without which no kernel is tried):
 * 1. The time from the host's store, over a waiting stream that writes another flag, to the host's sight of that (rounds: 10000).
 * 2. Of so many streams (4,8,16,32,64), which come to an end of a memset, a copy or a kernel while the first waits; at both priorities.
 *    CUDA_DEVICE_MAX_CONNECTIONS is the caller's matter.
 * 3. Which calls from a second thread return while a stream waits.
 * 4. How many pieces of work behind a flag the driver takes before a call waits (at most 4096).
 * What has not ended after wait-ms (300) counts as standing still. Each line is one fact. */
#include "core/clock.h"
#include "core/status.h"
#include "gpu/runtime.h"
#include "gpu_load.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_STREAMS = 64, MAX_COUNTS = 8, MAX_PLACES = 4096, N_BYTES = 4096, NOT_HERE = 77, LINE = 64 };

static tagc_device *device;
static const tagc_runtime *runtime;
static double wait_s = 0.3;
static int (*load_nothing)(void *stream, int which); /* NULL: there are no kernels */

static void check(int code, const char *what) {
    if (code == 0) return;
    fprintf(stderr, "bench_flags: %s: %s (%d)\n", what, runtime->GetErrorString(code), code);
    exit(1);
}

static void pause_us(long us) {
    nanosleep(&(struct timespec){0, us * 1000}, NULL);
}

/* Pinned memory, and where the device sees it. */
typedef struct pinned {
    char *here;
    uint64_t there;
} pinned;

static pinned make_pinned(size_t n_bytes) {
    void *here, *there;
    check(runtime->HostAlloc(&here, n_bytes, TAGC_PINNED_PORTABLE | TAGC_PINNED_MAPPED), "HostAlloc");
    check(runtime->HostGetDevicePointer(&there, here, 0), "HostGetDevicePointer");
    memset(here, 0, n_bytes);
    return (pinned){here, (uint64_t)(uintptr_t)there};
}

/* Flag i: a line of the cache each. */
static _Atomic uint32_t *flag(pinned flags, int i) {
    return (_Atomic uint32_t *)(void *)(flags.here + (size_t)i * LINE);
}

static uint64_t flag_there(pinned flags, int i) {
    return flags.there + (uint64_t)i * LINE;
}

static void wait_for(void *stream, pinned flags, int i, uint32_t value) {
    check(runtime->StreamWaitValue32(stream, flag_there(flags, i), value, TAGC_WAIT_AT_LEAST),
          "StreamWaitValue32");
}

static void write_to(void *stream, pinned flags, int i, uint32_t value) {
    check(runtime->StreamWriteValue32(stream, flag_there(flags, i), value, 0), "StreamWriteValue32");
}

static void *make_stream(int priority) {
    void *stream;
    check(runtime->StreamCreateWithPriority(&stream, TAGC_STREAM_NON_BLOCKING, priority),
          "StreamCreateWithPriority");
    return stream;
}

/* ---- 1 ---- */

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure_latency(int n_rounds) {
    enum { AT_A_TIME = 64 };
    pinned flags = make_pinned(2 * LINE);
    void *stream = make_stream(0);
    double *took = malloc((size_t)n_rounds * sizeof *took);
    for (int i = 0; i < n_rounds; i++) {
        for (int j = 0; i % AT_A_TIME == 0 && j < AT_A_TIME; j++) {
            wait_for(stream, flags, 0, (uint32_t)(i + j + 1));
            write_to(stream, flags, 1, (uint32_t)(i + j + 1));
        }
        double begin = tagc_time_s();
        atomic_store(flag(flags, 0), (uint32_t)(i + 1));
        while (atomic_load(flag(flags, 1)) < (uint32_t)(i + 1) && tagc_time_s() < begin + 10) {
        }
        took[i] = 1e6 * (tagc_time_s() - begin);
    }
    atomic_store(flag(flags, 0), (uint32_t)(n_rounds + AT_A_TIME));
    check(runtime->StreamSynchronize(stream), "StreamSynchronize");
    qsort(took, (size_t)n_rounds, sizeof *took, by_size);
    printf("latency of two flags: median %.2f us, 99 %% %.2f us, most %.2f us, of %d\n", took[n_rounds / 2],
           took[n_rounds * 99 / 100], took[n_rounds - 1], n_rounds);
    free(took);
    check(runtime->FreeHost(flags.here), "FreeHost");
    check(runtime->StreamDestroy(stream), "StreamDestroy");
}

/* ---- 2 ---- */

static const char *const kinds[] = {"memset", "copy to the device", "copy to the host", "kernel"};

static void put(void *stream, int kind, void *there, pinned here) {
    if (kind == 0)
        check(runtime->MemsetAsync(there, 0, N_BYTES, stream), "MemsetAsync");
    else if (kind == 1)
        check(runtime->MemcpyAsync(there, here.here, N_BYTES, TAGC_COPY_TO_DEVICE, stream), "MemcpyAsync");
    else if (kind == 2)
        check(runtime->MemcpyAsync(here.here, there, N_BYTES, TAGC_COPY_TO_HOST, stream), "MemcpyAsync");
    else
        check(load_nothing(stream, 0), "a launch");
}

static void count_stalls(int n, int kind, int priority, const char *name) {
    void *streams[MAX_STREAMS], *there;
    pinned flags = make_pinned((size_t)MAX_STREAMS * LINE), here = make_pinned(N_BYTES);
    int n_stalled = 0, n_late = 0;
    for (int i = 0; i < n; i++) streams[i] = make_stream(priority);
    check(runtime->MallocAsync(&there, N_BYTES, streams[0]), "MallocAsync");
    if (load_nothing) check(load_nothing(streams[0], 0), "a launch"); /* so that it is loaded */
    check(runtime->StreamSynchronize(streams[0]), "StreamSynchronize");
    wait_for(streams[0], flags, 0, 1);
    for (int i = 1; i < n; i++) {
        put(streams[i], kind, there, here);
        write_to(streams[i], flags, i, 1);
    }
    double end = tagc_time_s() + wait_s;
    do {
        n_stalled = 0;
        for (int i = 1; i < n; i++) n_stalled += atomic_load(flag(flags, i)) == 0;
        if (n_stalled) pause_us(200);
    } while (n_stalled && tagc_time_s() < end);
    atomic_store(flag(flags, 0), 1);
    for (int i = 0; i < n; i++) n_late += runtime->StreamSynchronize(streams[i]) != 0;
    printf("%d streams of %s priority, %s: %d of %d stand still while one waits%s\n", n, name, kinds[kind],
           n_stalled, n - 1, n_late ? ", and some failed" : "");
    check(runtime->FreeAsync(there, streams[0]), "FreeAsync");
    for (int i = 0; i < n; i++) {
        runtime->StreamSynchronize(streams[i]);
        check(runtime->StreamDestroy(streams[i]), "StreamDestroy");
    }
    check(runtime->FreeHost(flags.here), "FreeHost");
    check(runtime->FreeHost(here.here), "FreeHost");
}

/* ---- 3 ---- */

typedef struct second {
    void (*call)(struct second *);
    void *stream, *memory, *pinned;
    int (*malloc)(void **, size_t);
    int (*free)(void *);
    atomic_int is_over;
    int code;
} second;

static void call_malloc(second *s) {
    s->code = s->malloc(&s->memory, N_BYTES);
}
static void call_free(second *s) {
    s->code = s->free(s->memory);
}
static void call_host_alloc(second *s) {
    s->code = runtime->HostAlloc(&s->pinned, N_BYTES, TAGC_PINNED_PORTABLE);
}
static void call_free_host(second *s) {
    s->code = runtime->FreeHost(s->pinned);
}
static void call_stream(second *s) {
    void *made;
    s->code = runtime->StreamCreateWithPriority(&made, TAGC_STREAM_NON_BLOCKING, 0);
    if (!s->code) s->stream = made;
}
static void call_memset(second *s) {
    s->code = runtime->MemsetAsync(s->memory, 1, N_BYTES, s->stream);
}
static void call_kernel(second *s) {
    s->code = load_nothing(s->stream, 1);
}
static void call_kernel_again(second *s) {
    s->code = load_nothing(s->stream, 1);
}
static void call_event(second *s) {
    void *event;
    s->code = runtime->EventCreateWithFlags(&event, TAGC_EVENT_WITHOUT_TIMING);
    if (!s->code) s->code = runtime->EventDestroy(event);
}

static void *second_main(void *arg) {
    second *s = arg;
    int before;
    if (tagc_device_enter(device, &before) == TAGC_OK) s->call(s);
    atomic_store(&s->is_over, 1);
    return NULL;
}

static void try_calls(void) {
    static const struct {
        const char *name;
        void (*call)(second *);
    } calls[] = {{"cudaMalloc", call_malloc},
                 {"a stream's creation", call_stream},
                 {"a memset", call_memset},
                 {"the first launch of a kernel", call_kernel},
                 {"its second launch", call_kernel_again},
                 {"an event's creation", call_event},
                 {"cudaHostAlloc", call_host_alloc},
                 {"cudaFreeHost", call_free_host},
                 {"cudaFree", call_free}};
    pinned flags = make_pinned(LINE);
    void *waiting = make_stream(0);
    second s = {.stream = make_stream(0)};
    *(void **)&s.malloc = dlsym(runtime->library, "cudaMalloc");
    *(void **)&s.free = dlsym(runtime->library, "cudaFree");
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        pthread_t thread;
        s.call = calls[i].call;
        if (!load_nothing && (s.call == call_kernel || s.call == call_kernel_again)) continue;
        atomic_store(&s.is_over, 0);
        wait_for(waiting, flags, 0, (uint32_t)i + 1);
        if (pthread_create(&thread, NULL, second_main, &s)) exit(1);
        double end = tagc_time_s() + wait_s;
        while (!atomic_load(&s.is_over) && tagc_time_s() < end) pause_us(200);
        int is_over = atomic_load(&s.is_over);
        atomic_store(flag(flags, 0), (uint32_t)i + 1);
        pthread_join(thread, NULL);
        check(runtime->StreamSynchronize(waiting), "StreamSynchronize");
        printf("%s from a second thread: %s\n", calls[i].name,
               s.code    ? runtime->GetErrorString(s.code)
               : is_over ? "returns while a stream waits"
                         : "WAITS for the device");
    }
    check(runtime->FreeHost(flags.here), "FreeHost");
    check(runtime->StreamDestroy(waiting), "StreamDestroy");
}

/* ---- 4 ---- */

typedef struct watch {
    pinned flags;
    atomic_int n, is_over, has_let_go;
} watch;

/* Lets the stream go on when no call has returned for a while. */
static void *watch_main(void *arg) {
    watch *w = arg;
    int seen = -1;
    double since = tagc_time_s();
    while (!atomic_load(&w->is_over) && tagc_time_s() < since + wait_s) {
        int n = atomic_load(&w->n);
        if (n != seen) since = tagc_time_s();
        seen = n;
        pause_us(200);
    }
    atomic_store(&w->has_let_go, !atomic_load(&w->is_over));
    atomic_store(flag(w->flags, 0), 1);
    return NULL;
}

static void count_places(void) {
    watch w = {.flags = make_pinned(LINE)};
    void *stream = make_stream(0), *there;
    pthread_t thread;
    check(runtime->MallocAsync(&there, N_BYTES, stream), "MallocAsync");
    check(runtime->StreamSynchronize(stream), "StreamSynchronize");
    if (pthread_create(&thread, NULL, watch_main, &w)) exit(1);
    wait_for(stream, w.flags, 0, 1);
    while (atomic_load(&w.n) < MAX_PLACES && !atomic_load(&w.has_let_go)) {
        check(runtime->MemsetAsync(there, 0, N_BYTES, stream), "MemsetAsync");
        atomic_fetch_add(&w.n, 1);
    }
    atomic_store(&w.is_over, 1);
    pthread_join(thread, NULL);
    check(runtime->StreamSynchronize(stream), "StreamSynchronize");
    printf("places behind a flag: %s%d\n", atomic_load(&w.has_let_go) ? "" : "at least ", atomic_load(&w.n));
    check(runtime->FreeAsync(there, stream), "FreeAsync");
    check(runtime->StreamSynchronize(stream), "StreamSynchronize");
    check(runtime->StreamDestroy(stream), "StreamDestroy");
    check(runtime->FreeHost(w.flags.here), "FreeHost");
}

static _Noreturn void refuse(const char *name) {
    fprintf(stderr, "bench_flags: %s is not known or lacks its value: see the opening of bench_flags.c\n",
            name);
    exit(2);
}

/* ---- parts ---- */

static void show_facts(void) {
    const char *connections = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    int least = 0, greatest = 0, answer = 0;
    void *found = NULL, *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    check(runtime->DeviceGetStreamPriorityRange(&least, &greatest), "DeviceGetStreamPriorityRange");
    printf("%s; connections %s; priorities %d to %d\n", tagc_device_text(device),
           connections ? connections : "8, the default", least, greatest);
    if (runtime->GetDriverEntryPointByVersion)
        (void)runtime->GetDriverEntryPointByVersion("cuStreamWaitValue32", &found, 11070, 0, &answer);
    printf("cuStreamWaitValue32 by version: %s; by name in libcuda: %s\n",
           !runtime->GetDriverEntryPointByVersion ? "the runtime is too old"
           : found                                ? "found"
                                                  : "NOT found",
           !driver                                   ? "there is no libcuda"
           : dlsym(driver, "cuStreamWaitValue32_v2") ? "found"
                                                     : "NOT found");
    if (driver) dlclose(driver);
}

/* Returns what main() ends with. */
static int try_waits(void) {
    tagc_kernels *kernels;
    double begin = tagc_time_s();
    int is_told = tagc_is_told_to_wait();
    tagc_status status = tagc_kernels_open(device, &kernels);
    printf("kernels: %s, after %.1f s\n", status == TAGC_OK ? "open" : tagc_last_error(),
           tagc_time_s() - begin);
    tagc_kernels_close(kernels);
    printf("calls wait: %s; CUDA_LAUNCH_BLOCKING is %sset\n", device->calls_wait ? "yes" : "no",
           is_told ? "" : "not ");
    return device->calls_wait != is_told || (status == TAGC_OK) == is_told;
}

static void measure_flags(int n_rounds, const char *streams) {
    int least = 0, greatest = 0;
    check(runtime->DeviceGetStreamPriorityRange(&least, &greatest), "DeviceGetStreamPriorityRange");
    if (device->calls_wait) {
        printf("CUDA_LAUNCH_BLOCKING is set: what follows would wait for ever\n");
        return;
    }
    measure_latency(n_rounds);
    try_calls();
    count_places();
    for (const char *at = streams; *at; at += strcspn(at, ","), at += *at == ',') {
        int n = atoi(at);
        if (n < 2 || n > MAX_STREAMS) refuse("--streams");
        for (int kind = 0; kind < 3 + !!load_nothing; kind++)
            for (int p = 0; p < 2; p++)
                count_stalls(n, kind, p ? greatest : least, p ? "the greatest" : "the least");
    }
}

static void open_load(const char *file) {
    void *opened = dlopen(file, RTLD_NOW), *found = opened ? dlsym(opened, "tagc_load_nothing") : NULL;
    if (!found) {
        fprintf(stderr, "bench_flags: %s\n", dlerror());
        exit(2);
    }
    memcpy(&load_nothing, &found, sizeof found);
}

int main(int argc, char **argv) {
    const char *library = NULL, *streams = "4,8,16,32,64", *part = "flags", *load = NULL;
    int n_rounds = 10000, before, code = 0;
    for (int i = 1; i < argc; i += 2) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!value)
            refuse(name);
        else if (!strcmp(name, "--library"))
            library = value;
        else if (!strcmp(name, "--load"))
            load = value;
        else if (!strcmp(name, "--part") &&
                 (!strcmp(value, "flags") || !strcmp(value, "facts") || !strcmp(value, "waits")))
            part = value;
        else if (!strcmp(name, "--streams"))
            streams = value;
        else if (!strcmp(name, "--rounds") && atoi(value) > 0)
            n_rounds = atoi(value);
        else if (!strcmp(name, "--wait-ms") && atoi(value) > 0)
            wait_s = 1e-3 * atoi(value);
        else
            refuse(name);
    }
    if (tagc_device_open("cuda", library, 0, &device) != TAGC_OK) {
        printf("bench_flags: skipped: %s\n", tagc_last_error());
        return NOT_HERE;
    }
    runtime = &device->runtime;
    if (load) open_load(load);
    if (tagc_device_enter(device, &before) != TAGC_OK) {
        fprintf(stderr, "bench_flags: %s\n", tagc_last_error());
        return 1;
    }
    setvbuf(stdout, NULL, _IOLBF, 0); /* a line that is there stays, whatever follows */
    show_facts();
    if (!strcmp(part, "waits")) code = try_waits();
    if (!strcmp(part, "flags")) measure_flags(n_rounds, streams);
    tagc_device_leave(device, before);
    tagc_device_close(device);
    return code;
}
