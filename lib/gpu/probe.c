/* Finds out whether calls that put work into a stream return before that work has run. Under CUDA_LAUNCH_BLOCKING=1 a launch does not,
 * and neither may a copy under a debugger, a profiler or a sanitizer. If such work is behind a flag, which this process has to set
 * after the call, the call never returns; and nobody would see why.
 *
 * So the calls are tried behind a flag of the probe's own, which another thread sets if they have not returned in time. A busy machine
 * may be as slow once; so only calls that are late each time are taken for waiting ones. */
#include "core/status.h"
#include "gpu/runtime.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { N_TRIALS = 2, WORK_BYTES = 64 };

typedef struct pinned {
    _Alignas(64) _Atomic uint32_t flag;
    _Alignas(64) char work[WORK_BYTES];
} pinned;

typedef struct probe {
    pinned *here;
    uint64_t flag_there;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct timespec end;
    int have_returned, was_late; /* with `lock` */
} probe;

int tagc_is_told_to_wait(void) {
    const char *said = getenv("CUDA_LAUNCH_BLOCKING");
    return said && *said && strcmp(said, "0") != 0;
}

static void *let_go_late(void *arg) {
    probe *p = arg;
    int code = 0;
    pthread_mutex_lock(&p->lock);
    while (!p->have_returned && code != ETIMEDOUT)
        code = pthread_cond_timedwait(&p->changed, &p->lock, &p->end);
    p->was_late = !p->have_returned;
    atomic_store(&p->here->flag, 1);
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

/* The calls of an exchange, behind the flag. */
static tagc_status put(const tagc_device *device, const probe *p, void *stream, const tagc_probe_work *work) {
    const tagc_runtime *runtime = &device->runtime;
    static const char what[] = "trying whether calls wait";
    TAGC_TRY(tagc_device_check(
        device, runtime->StreamWaitValue32(stream, p->flag_there, 1, TAGC_WAIT_AT_LEAST), what));
    TAGC_TRY(tagc_device_check(device, runtime->MemsetAsync(work->there, 0, WORK_BYTES, stream), what));
    if (work->launch) TAGC_TRY(work->launch(work->context, stream));
    TAGC_TRY(tagc_device_check(
        device, runtime->MemcpyAsync(p->here->work, work->there, WORK_BYTES, TAGC_COPY_TO_HOST, stream),
        what));
    return tagc_device_check(
        device, runtime->MemcpyAsync(work->there, p->here->work, WORK_BYTES, TAGC_COPY_TO_DEVICE, stream),
        what);
}

static struct timespec after_ms(int ms) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    int64_t ns = at.tv_nsec + (int64_t)(ms % 1000) * 1000000;
    return (struct timespec){at.tv_sec + ms / 1000 + (time_t)(ns / 1000000000), (long)(ns % 1000000000)};
}

/* Once. Whatever fails, nothing is in the stream afterwards. */
static tagc_status try_once(const tagc_device *device, probe *p, void *stream, const tagc_probe_work *work) {
    pthread_t thread;
    atomic_store(&p->here->flag, 0);
    p->have_returned = p->was_late = 0;
    p->end = after_ms(device->patience_ms);
    int code = pthread_create(&thread, NULL, let_go_late, p);
    if (code) return tagc_fail(TAGC_ERR_MEMORY, "no thread to try calls of CUDA with: %s", strerror(code));
    tagc_status status = put(device, p, stream, work);
    pthread_mutex_lock(&p->lock);
    p->have_returned = 1;
    pthread_cond_signal(&p->changed);
    pthread_mutex_unlock(&p->lock);
    pthread_join(thread, NULL);
    code = device->runtime.StreamSynchronize(stream);
    return status == TAGC_OK ? tagc_device_check(device, code, "waiting for a flag") : status;
}

tagc_status tagc_device_probe(const tagc_device *device, void *stream, const tagc_probe_work *work,
                              int *waits) {
    const tagc_runtime *runtime = &device->runtime;
    void *here = NULL, *there = NULL;
    TAGC_TRY(tagc_device_check(
        device, runtime->HostAlloc(&here, sizeof(pinned), TAGC_PINNED_PORTABLE | TAGC_PINNED_MAPPED),
        "allocating pinned memory"));
    tagc_status status =
        tagc_device_check(device, runtime->HostGetDevicePointer(&there, here, 0), "mapping pinned memory");
    probe p = {.here = here, .flag_there = (uint64_t)(uintptr_t)there + offsetof(pinned, flag)};
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&p.lock, NULL);
    pthread_cond_init(&p.changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    memset(p.here->work, 0, sizeof p.here->work);
    *waits = 1;
    for (int i = 0; i < N_TRIALS && status == TAGC_OK && *waits; i++) {
        status = try_once(device, &p, stream, work);
        *waits = p.was_late;
    }
    pthread_cond_destroy(&p.changed);
    pthread_mutex_destroy(&p.lock);
    if (status != TAGC_OK) runtime->StreamSynchronize(stream); /* after the call that failed, too */
    int code = runtime->FreeHost(here);
    return status == TAGC_OK ? tagc_device_check(device, code, "freeing pinned memory") : status;
}
