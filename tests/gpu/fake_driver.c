/* libcuda.so.1 of the fake runtime, for runtimes that cannot be asked for a version of a function of the driver. The functions that
 * libtagc needs have their second versions' names; the first are others, which fail. */
#include "fake_runtime.h"

#include <string.h>

static void find(const char *symbol, void *into) {
    void *found;
    int status;
    cudaGetDriverEntryPointByVersion(symbol, &found, 11070, 0, &status);
    memcpy(into, &found, sizeof found);
}

FAKE_API int cuStreamWriteValue32_v2(void *stream, uint64_t address, uint32_t value, unsigned flags) {
    int (*call)(void *, uint64_t, uint32_t, unsigned);
    find("cuStreamWriteValue32", &call);
    return call(stream, address, value, flags);
}

FAKE_API int cuStreamWaitValue32_v2(void *stream, uint64_t address, uint32_t value, unsigned flags) {
    int (*call)(void *, uint64_t, uint32_t, unsigned);
    find("cuStreamWaitValue32", &call);
    return call(stream, address, value, flags);
}

FAKE_API int cuDevicePrimaryCtxGetState(int ordinal, unsigned *flags, int *is_active) {
    int (*call)(int, unsigned *, int *);
    find("cuDevicePrimaryCtxGetState", &call);
    return call(ordinal, flags, is_active);
}

FAKE_API int cuCtxGetCurrent(void **context) {
    int (*call)(void **);
    find("cuCtxGetCurrent", &call);
    return call(context);
}

FAKE_API int cuCtxSetCurrent(void *context) {
    int (*call)(void *);
    find("cuCtxSetCurrent", &call);
    return call(context);
}

FAKE_API int cuDevicePrimaryCtxRetain(void **context, int ordinal) {
    int (*call)(void **, int);
    find("cuDevicePrimaryCtxRetain", &call);
    return call(context, ordinal);
}

FAKE_API int cuDevicePrimaryCtxRelease_v2(int ordinal) {
    int (*call)(int);
    find("cuDevicePrimaryCtxRelease", &call);
    return call(ordinal);
}

enum { NOT_SUPPORTED = 801 };

FAKE_API int cuStreamWriteValue32(void *stream, uint64_t address, uint32_t value, unsigned flags) {
    (void)stream, (void)address, (void)value, (void)flags;
    return NOT_SUPPORTED;
}

FAKE_API int cuStreamWaitValue32(void *stream, uint64_t address, uint32_t value, unsigned flags) {
    (void)stream, (void)address, (void)value, (void)flags;
    return NOT_SUPPORTED;
}
