/* A device: the table of its runtime's functions, and error texts. */
#include "core/memory.h"
#include "core/status.h"
#include "device/runtime.h"

#include <string.h>

tagc_status tagc_device_check(const tagc_device *device, int code, const char *what) {
    if (code == 0) return TAGC_OK;
    const tagc_runtime *runtime = &device->runtime;
    tagc_fail(TAGC_ERR_DEVICE, "%s: %s failed on device %d: %s (%d)", runtime->maker, what, device->ordinal,
              runtime->error_text(runtime->context, code), code);
    runtime->forget_error(runtime->context);
    return TAGC_ERR_DEVICE;
}

tagc_status tagc_device_enter(const tagc_device *device, int *before) {
    const tagc_runtime *runtime = &device->runtime;
    TAGC_TRY(tagc_device_check(device, runtime->device_get(runtime->context, before),
                               "asking for the current device"));
    if (*before == device->ordinal) return TAGC_OK;
    return tagc_device_check(device, runtime->device_set(runtime->context, device->ordinal),
                             "choosing the device");
}

void tagc_device_leave(const tagc_device *device, int before) {
    const tagc_runtime *runtime = &device->runtime;
    if (before != device->ordinal) runtime->device_set(runtime->context, before);
}

tagc_status tagc_device_check_place(const tagc_device *device, const void *pointer, const char *what) {
    const tagc_runtime *runtime = &device->runtime;
    tagc_place place = {0, 0};
    TAGC_TRY(tagc_device_check(device, runtime->pointer_place(runtime->context, pointer, &place),
                               "asking where an array is"));
    if (!place.is_device) return tagc_fail(TAGC_ERR_ARGUMENT, "%s is not in the device's memory", what);
    if (place.ordinal != device->ordinal)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s is on device %d, must be on device %d", what, place.ordinal,
                         device->ordinal);
    return TAGC_OK;
}

tagc_status tagc_device_create(const tagc_runtime *runtime, int ordinal, tagc_device **out) {
    *out = NULL;
    if (runtime->abi != TAGC_RUNTIME_ABI)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "the table of the runtime has number %u, must be %u",
                         runtime->abi, TAGC_RUNTIME_ABI);
    tagc_device probe = {.runtime = *runtime, .ordinal = ordinal};
    int n_devices = 0;
    TAGC_TRY(tagc_device_check(&probe, runtime->device_count(runtime->context, &n_devices),
                               "counting the devices"));
    if (ordinal < 0 || ordinal >= n_devices)
        return tagc_fail(TAGC_ERR_ARGUMENT, "device is %d, must be in [0, %d): %s has so many devices here",
                         ordinal, n_devices, runtime->maker);
    tagc_device *device;
    TAGC_TRY(tagc_memory_create(sizeof *device, "a device", (void **)&device));
    *device = probe;
    *out = device;
    return TAGC_OK;
}

tagc_status tagc_device_open(const char *maker, const char *library, int ordinal, tagc_device **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!maker || strcmp(maker, "cuda") != 0)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "maker is %s, must be cuda", maker ? maker : "NULL");
    tagc_runtime runtime;
    TAGC_TRY(tagc_cuda_bind(library, &runtime));
    tagc_status status = tagc_device_create(&runtime, ordinal, out);
    if (status != TAGC_OK) runtime.unload(runtime.context);
    return status;
}

const char *tagc_device_text(const tagc_device *device) {
    return device->runtime.where;
}

void tagc_device_close(tagc_device *device) {
    if (!device) return;
    device->runtime.unload(device->runtime.context);
    tagc_memory_destroy(device);
}
