/* See kernels.h. */
#include "gpu/kernels.h"
#include "core/status.h"
#include "exchange/device_memory.h"
#include "tagc/device.h"

#include <string.h>

static const tagc_runtime *runtime_of(const tagc_kernels *k) {
    return &k->device->runtime;
}

tagc_status tagc_kernels_enter(tagc_kernels *k) {
    int before;
    pthread_mutex_lock(&k->lock);
    tagc_status status = tagc_device_enter(k->device, &before);
    if (status == TAGC_OK)
        k->before = before;
    else
        pthread_mutex_unlock(&k->lock);
    return status;
}

void tagc_kernels_leave(tagc_kernels *k) {
    tagc_device_leave(k->device, k->before);
    pthread_mutex_unlock(&k->lock);
}

tagc_status tagc_kernels_check(const tagc_kernels *k, tagc_status status) {
    return status == TAGC_OK ? TAGC_OK : tagc_fail(status, "%s", k->maker->batches->last_error());
}

/* ---- memory ---- */

static tagc_status take(tagc_kernels *k, size_t n_bytes, const char *what, void **out) {
    const tagc_runtime *runtime = runtime_of(k);
    *out = NULL;
    TAGC_TRY(tagc_device_check(k->device, runtime->MallocAsync(out, n_bytes, k->stream), what));
    k->n_live_bytes += n_bytes;
    return TAGC_OK;
}

static void give(tagc_kernels *k, void *memory, size_t n_bytes) {
    const tagc_runtime *runtime = runtime_of(k);
    if (!memory) return;
    if (runtime->FreeAsync(memory, k->stream)) runtime->GetLastError();
    k->n_live_bytes -= n_bytes;
}

static tagc_status heap_create(void *context, size_t n_bytes, const char *what, void **out) {
    tagc_kernels *k = tagc_kernels_in(context);
    *out = NULL;
    TAGC_TRY(tagc_kernels_enter(k));
    tagc_status status = take(k, n_bytes ? n_bytes : 1, what, out);
    tagc_kernels_leave(k);
    return status == TAGC_OK
               ? TAGC_OK
               : tagc_fail_in(status, "no memory on the device for %s (%zu bytes)", what, n_bytes);
}

static void heap_destroy(void *context, void *memory, size_t n_bytes) {
    tagc_kernels *k = tagc_kernels_in(context);
    if (!memory || tagc_kernels_enter(k) != TAGC_OK) return; /* of a device that failed nothing comes back */
    give(k, memory, n_bytes ? n_bytes : 1);
    tagc_kernels_leave(k);
}

static tagc_status reserve_pinned(tagc_kernels *k, size_t n_bytes) {
    const tagc_runtime *runtime = runtime_of(k);
    void *larger;
    TAGC_TRY(tagc_device_check(k->device, runtime->HostAlloc(&larger, n_bytes, TAGC_PINNED_PORTABLE),
                               "allocating pinned memory"));
    if (k->pinned) {
        memcpy(k->pinned, &k->outgrown, sizeof k->outgrown);
        k->outgrown = k->pinned;
        k->n_outgrown_bytes += k->pinned_bytes;
    }
    k->pinned = larger;
    k->pinned_bytes = n_bytes;
    return TAGC_OK;
}

tagc_status tagc_kernels_reserve(tagc_kernels *k, size_t work_bytes, size_t pinned_bytes) {
    if (pinned_bytes > k->pinned_bytes) TAGC_TRY(reserve_pinned(k, pinned_bytes));
    if (work_bytes <= k->work_bytes) return TAGC_OK;
    void *larger;
    TAGC_TRY(take(k, work_bytes, "allocating memory for kernels", &larger));
    give(k, k->work, k->work_bytes);
    k->work = larger;
    k->work_bytes = work_bytes;
    k->n_moves++;
    return TAGC_OK;
}

/* ---- copies ---- */

tagc_status tagc_kernels_copy(tagc_kernels *k, void *to, const void *from, size_t n_bytes, tagc_copy kind) {
    const tagc_runtime *runtime = runtime_of(k);
    if (n_bytes == 0) return TAGC_OK;
    return tagc_device_check(k->device, runtime->MemcpyAsync(to, from, n_bytes, kind, k->stream),
                             kind == TAGC_COPY_TO_HOST     ? "copying to the host"
                             : kind == TAGC_COPY_TO_DEVICE ? "copying to the device"
                                                           : "copying on the device");
}

tagc_status tagc_kernels_wait(tagc_kernels *k) {
    const tagc_runtime *runtime = runtime_of(k);
    return tagc_device_check(k->device, runtime->StreamSynchronize(k->stream), "waiting for kernels");
}

static tagc_status pass(tagc_kernels *k, char *here, char *there, size_t n_bytes, tagc_copy kind) {
    int is_read = kind == TAGC_COPY_TO_HOST;
    for (size_t at = 0, n; at < n_bytes; at += n) {
        n = n_bytes - at < k->pinned_bytes ? n_bytes - at : k->pinned_bytes;
        if (!is_read) memcpy(k->pinned, here + at, n);
        TAGC_TRY(tagc_kernels_copy(k, is_read ? k->pinned : there + at, is_read ? there + at : k->pinned, n,
                                   kind));
        TAGC_TRY(tagc_kernels_wait(k));
        if (is_read) memcpy(here + at, k->pinned, n);
    }
    return TAGC_OK;
}

tagc_status tagc_kernels_read(tagc_kernels *k, void *to, const void *from, size_t n_bytes) {
    TAGC_TRY(tagc_kernels_enter(k));
    tagc_status status = pass(k, to, (char *)(size_t)from, n_bytes, TAGC_COPY_TO_HOST);
    tagc_kernels_leave(k);
    return status;
}

tagc_status tagc_kernels_write(tagc_kernels *k, void *to, const void *from, size_t n_bytes) {
    TAGC_TRY(tagc_kernels_enter(k));
    tagc_status status = pass(k, (char *)(size_t)from, to, n_bytes, TAGC_COPY_TO_DEVICE);
    tagc_kernels_leave(k);
    return status;
}

static tagc_status fill(tagc_kernels *k, char *to, uint32_t word, uint64_t n_bytes) {
    size_t most = k->pinned_bytes / sizeof word * sizeof word;
    for (size_t i = 0; i < most && i < n_bytes; i += sizeof word) memcpy(k->pinned + i, &word, sizeof word);
    for (uint64_t at = 0, part; at < n_bytes; at += part) {
        part = n_bytes - at < most ? n_bytes - at : most;
        TAGC_TRY(tagc_kernels_copy(k, to + at, k->pinned, (size_t)part, TAGC_COPY_TO_DEVICE));
    }
    return tagc_kernels_wait(k);
}

static tagc_status check_place(void *context, const void *array, const char *what) {
    return tagc_device_check_place(tagc_kernels_in(context)->device, array, what);
}

static tagc_status read_array(void *context, void *to, const void *from, size_t n_bytes) {
    return tagc_kernels_read(tagc_kernels_in(context), to, from, n_bytes);
}

static tagc_status write_array(void *context, void *to, const void *from, size_t n_bytes) {
    return tagc_kernels_write(tagc_kernels_in(context), to, from, n_bytes);
}

static tagc_status fill_array(void *context, void *array, uint32_t word, uint64_t n_bytes) {
    tagc_kernels *k = tagc_kernels_in(context);
    TAGC_TRY(tagc_kernels_enter(k));
    tagc_status status = fill(k, array, word, n_bytes);
    tagc_kernels_leave(k);
    return status;
}

/* ---- life ---- */

/* A kernel that does nothing: its orders are 0. */
static tagc_status launch_one(void *context, void *stream) {
    const tagc_kernels *k = context;
    return tagc_kernels_check(k, k->maker->runs->spoil(k->work, k->work, sizeof(int), stream));
}

/* An exchange puts launches behind flags that are set only when all of it is in streams. */
static tagc_status refuse_to_wait(tagc_kernels *k) {
    const tagc_probe_work work = {.there = k->work, .launch = launch_one, .context = k};
    int is_told = k->device->calls_wait;
    if (!is_told) TAGC_TRY(tagc_device_probe(k->device, k->stream, &work, &k->device->calls_wait));
    if (!k->device->calls_wait) return TAGC_OK;
    return tagc_fail(TAGC_ERR_UNSUPPORTED,
                     "here a launch of a kernel waits until it has run, so that kernels cannot exchange: %s",
                     is_told ? "CUDA_LAUNCH_BLOCKING is set in the environment"
                             : "a debugger, a profiler or a sanitizer may be the reason");
}

/* Makes every call that an exchange will make once, while no exchange waits. */
static tagc_status try_out(tagc_kernels *k) {
    const tagc_runtime *runtime = runtime_of(k);
    TAGC_TRY(tagc_device_make_stream(k->device, &k->stream));
    TAGC_TRY(tagc_kernels_check(k, k->maker->prepare()));
    TAGC_TRY(tagc_kernels_reserve(k, TAGC_ALIGNMENT, TAGC_LEAST_PINNED_BYTES));
    TAGC_TRY(tagc_device_check(k->device, runtime->MemsetAsync(k->work, 0, TAGC_ALIGNMENT, k->stream),
                               "writing to memory of the device"));
    TAGC_TRY(tagc_kernels_wait(k));
    return refuse_to_wait(k);
}

tagc_status tagc_kernels_create(tagc_device *device, const tagc_maker *maker, tagc_kernels **out) {
    tagc_kernels *k;
    *out = NULL;
    TAGC_TRY(tagc_memory_create(sizeof *k, "kernels", (void **)&k));
    *k = (tagc_kernels){.self = k, .device = device, .maker = maker};
    k->arrays = (tagc_arrays){.heap = {.context = k, .create = heap_create, .destroy = heap_destroy},
                              .maker = maker->batches,
                              .check = check_place,
                              .read = read_array,
                              .write = write_array,
                              .fill = fill_array};
    pthread_mutex_init(&k->lock, NULL);
    tagc_status status = tagc_kernels_enter(k);
    if (status == TAGC_OK) {
        status = try_out(k);
        tagc_kernels_leave(k);
    }
    if (status != TAGC_OK) {
        char text[TAGC_ERROR_TEXT_BYTES];
        memcpy(text, tagc_last_error(), sizeof text);
        tagc_kernels_close(k);
        return tagc_fail(status, "%s", text);
    }
    *out = k;
    return TAGC_OK;
}

tagc_status tagc_kernels_open(tagc_device *device, tagc_kernels **out) {
    const tagc_maker *maker;
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!device) return tagc_fail(TAGC_ERR_ARGUMENT, "device is NULL");
    TAGC_TRY(tagc_maker_load(&maker));
    return tagc_kernels_create(device, maker, out);
}

uint64_t tagc_kernels_bytes(tagc_kernels *k) {
    if (!k) return 0;
    pthread_mutex_lock(&k->lock);
    uint64_t n_bytes = k->n_live_bytes;
    pthread_mutex_unlock(&k->lock);
    return n_bytes;
}

uint64_t tagc_kernels_pinned_bytes(tagc_kernels *k) {
    if (!k) return 0;
    pthread_mutex_lock(&k->lock);
    uint64_t n_bytes = k->pinned_bytes + k->n_outgrown_bytes;
    pthread_mutex_unlock(&k->lock);
    return n_bytes;
}

void tagc_kernels_close(tagc_kernels *k) {
    if (!k) return;
    const tagc_runtime *runtime = runtime_of(k);
    if (tagc_kernels_enter(k) == TAGC_OK) {
        give(k, k->work, k->work_bytes);
        if (k->stream) runtime->StreamSynchronize(k->stream);
        if (k->pinned) runtime->FreeHost(k->pinned);
        for (void *next; k->outgrown; k->outgrown = next) {
            memcpy(&next, k->outgrown, sizeof next);
            runtime->FreeHost(k->outgrown);
        }
        if (k->stream) runtime->StreamDestroy(k->stream);
        runtime->GetLastError();
        tagc_kernels_leave(k);
    }
    pthread_mutex_destroy(&k->lock);
    tagc_memory_destroy(k);
}
