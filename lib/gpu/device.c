/* A device: its runtime, and error texts. */
#include "core/memory.h"
#include "core/status.h"
#include "gpu/runtime.h"

#include <stdio.h>
#include <string.h>

enum { PATIENCE_MS = 3000 };

tagc_status tagc_device_check(const tagc_device *device, int code, const char *what) {
    if (code == 0) return TAGC_OK;
    const tagc_runtime *runtime = &device->runtime;
    tagc_fail(TAGC_ERR_DEVICE, "cuda: %s failed on device %d: %s (%d)", what, device->ordinal,
              runtime->GetErrorString(code), code);
    runtime->GetLastError();
    return TAGC_ERR_DEVICE;
}

tagc_status tagc_device_enter(const tagc_device *device, int *before) {
    const tagc_runtime *runtime = &device->runtime;
    void *context = NULL;
    TAGC_TRY(tagc_device_check(device, runtime->GetDevice(before), "asking for the current device"));
    if (*before != device->ordinal)
        TAGC_TRY(tagc_device_check(device, runtime->SetDevice(device->ordinal), "choosing the device"));
    int code = runtime->CtxGetCurrent(&context);
    if (!code && !context) code = runtime->CtxSetCurrent(device->context);
    return tagc_device_check(device, code, "choosing the device's context");
}

void tagc_device_leave(const tagc_device *device, int before) {
    const tagc_runtime *runtime = &device->runtime;
    unsigned flags = 0;
    int has_context = 0;
    if (before == device->ordinal) return;
    if (runtime->DevicePrimaryCtxGetState(before, &flags, &has_context) == 0 && has_context)
        runtime->SetDevice(before);
}

tagc_status tagc_device_make_stream(const tagc_device *device, void **stream) {
    const tagc_runtime *runtime = &device->runtime;
    int least = 0, greatest = 0;
    TAGC_TRY(tagc_device_check(device, runtime->DeviceGetStreamPriorityRange(&least, &greatest),
                               "asking for priorities"));
    return tagc_device_check(device,
                             runtime->StreamCreateWithPriority(stream, TAGC_STREAM_NON_BLOCKING, greatest),
                             "making a stream");
}

tagc_status tagc_device_check_place(const tagc_device *device, const void *pointer, const char *what) {
    tagc_place place;
    TAGC_TRY(tagc_device_check(device, tagc_runtime_place(&device->runtime, pointer, &place),
                               "asking where an array is"));
    if (!place.is_device) return tagc_fail(TAGC_ERR_ARGUMENT, "%s is not in the device's memory", what);
    if (place.ordinal != device->ordinal)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s is on device %d, must be on device %d", what, place.ordinal,
                         device->ordinal);
    return TAGC_OK;
}

tagc_status tagc_device_create(const tagc_runtime *runtime, const char *where, int ordinal,
                               tagc_device **out) {
    *out = NULL;
    tagc_device probe = {.runtime = *runtime, .ordinal = ordinal};
    int n_devices = 0;
    TAGC_TRY(tagc_device_check(&probe, runtime->GetDeviceCount(&n_devices), "counting the devices"));
    if (ordinal < 0 || ordinal >= n_devices)
        return tagc_fail(TAGC_ERR_ARGUMENT, "device is %d, must be in [0, %d): cuda has so many devices here",
                         ordinal, n_devices);
    TAGC_TRY(tagc_runtime_bind_driver(&probe.runtime));
    tagc_device *device;
    TAGC_TRY(tagc_memory_create(sizeof *device, "a device", (void **)&device));
    *device = probe;
    tagc_status status = tagc_device_check(
        device, device->runtime.DevicePrimaryCtxRetain(&device->context, ordinal), "taking its context");
    if (status != TAGC_OK) {
        tagc_memory_destroy(device);
        return status;
    }
    snprintf(device->where, sizeof device->where, "%s", where);
    device->calls_wait = tagc_is_told_to_wait();
    device->patience_ms = PATIENCE_MS;
    *out = device;
    return TAGC_OK;
}

tagc_status tagc_device_open(const char *maker, const char *library, int ordinal, tagc_device **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!maker || strcmp(maker, "cuda") != 0)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "maker is %s, must be cuda", maker ? maker : "NULL");
    tagc_runtime runtime;
    char where[TAGC_WHERE_TEXT_BYTES];
    TAGC_TRY(tagc_runtime_bind(library, &runtime, where));
    tagc_status status = tagc_device_create(&runtime, where, ordinal, out);
    if (status != TAGC_OK) tagc_runtime_unbind(&runtime);
    return status;
}

const char *tagc_device_text(const tagc_device *device) {
    return device->where;
}

void tagc_device_close(tagc_device *device) {
    if (!device) return;
    device->runtime.DevicePrimaryCtxRelease(device->ordinal);
    tagc_runtime_unbind(&device->runtime);
    tagc_memory_destroy(device);
}
