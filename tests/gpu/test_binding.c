/* Binding the runtime's calls by name: the library that is loaded already, and clear words where there is none that serves. */
#include <string.h>

#include <dlfcn.h>

#include "../test.h"
#include "fake_runtime.h"
#include "gpu/runtime.h"

static void assert_refused(const char *maker, const char *library, int ordinal, tagc_status status,
                           const char *words) {
    tagc_device *device = (tagc_device *)1;
    assert_int_equal(tagc_device_open(maker, library, ordinal, &device), status);
    assert_null(device);
    if (!strstr(tagc_last_error(), words)) print_error("\"%s\" is not in \"%s\"\n", words, tagc_last_error());
    assert_non_null(strstr(tagc_last_error(), words));
}

/* Its name is that of a real runtime, which may be installed: what the process has loaded goes first. */
TEST(test_loaded_goes_first) {
    fake_reset(1, 2, FAKE_EAGER, 1);
    fake_set_version(12090);
    tagc_device *device;
    assert_int_equal(tagc_device_open("cuda", NULL, 1, &device), TAGC_OK);
    assert_string_equal(tagc_device_text(device), "cuda runtime 12.9, libcudart.so.13");
    tagc_device_close(device);
    assert_int_equal(tagc_device_open("cuda", FAKE_CUDART, 0, &device), TAGC_OK);
    tagc_device_close(device);
    tagc_device_close(NULL);
}

TEST(test_refused) {
    fake_reset(1, 2, FAKE_EAGER, 1);
    assert_refused("hip", NULL, 0, TAGC_ERR_UNSUPPORTED, "maker is hip, must be cuda");
    assert_refused(NULL, NULL, 0, TAGC_ERR_UNSUPPORTED, "maker is NULL");
    assert_refused("cuda", "libcudart-that-is-missing.so", 0, TAGC_ERR_UNSUPPORTED,
                   "there is no CUDA runtime: libcudart-that-is-missing.so");
    assert_refused("cuda", "libm.so.6", 0, TAGC_ERR_UNSUPPORTED, "libm.so.6 has no cudaRuntimeGetVersion");
    assert_refused("cuda", NULL, 2, TAGC_ERR_ARGUMENT, "device is 2, must be in [0, 2)");
    assert_refused("cuda", NULL, -1, TAGC_ERR_ARGUMENT, "device is -1");
    fake_set_version(10020);
    assert_refused("cuda", NULL, 0, TAGC_ERR_UNSUPPORTED, "is CUDA runtime 10.2, must be 11.7 or newer");
    fake_set_version(13000);
    fake_fail("GetDeviceCount", 1, 35);
    assert_refused("cuda", NULL, 0, TAGC_ERR_DEVICE,
                   "counting the devices failed on device 0: a fake error (35)");
    fake_set_driver_old();
    assert_refused("cuda", NULL, 0, TAGC_ERR_UNSUPPORTED,
                   "the CUDA driver has no cuStreamWriteValue32: must be a driver for CUDA 11.7 or newer");
    fake_reset(1, 0, FAKE_EAGER, 1);
    assert_refused("cuda", NULL, 0, TAGC_ERR_ARGUMENT, "must be in [0, 0)");
    assert_int_equal(tagc_device_open("cuda", NULL, 0, NULL), TAGC_ERR_ARGUMENT);
}

/* The runtime may be newer than the driver, as minor versions of CUDA allow. */
TEST(test_newer_than_the_driver) {
    fake_reset(1, 1, FAKE_EAGER, 1);
    fake_set_version(13010);
    tagc_device *device;
    assert_int_equal(tagc_device_open("cuda", FAKE_CUDART, 0, &device), TAGC_OK);
    assert_string_equal(tagc_device_text(device), "cuda runtime 13.1, " FAKE_CUDART);
    tagc_device_close(device);
}

/* A runtime that cannot be asked for a version, as before 12.5: by name in libcuda, once that is loaded. */
TEST(test_by_name) {
    char where[TAGC_WHERE_TEXT_BYTES];
    tagc_runtime runtime;
    void *stream, *memory, *there;
    fake_reset(1, 1, FAKE_EAGER, 1);
    assert_int_equal(tagc_runtime_bind(FAKE_CUDART, &runtime, where), TAGC_OK);
    runtime.GetDriverEntryPointByVersion = NULL;
    assert_int_equal(tagc_runtime_bind_driver(&runtime), TAGC_ERR_UNSUPPORTED);
    assert_non_null(strstr(tagc_last_error(), "the CUDA driver has no cuStreamWriteValue32"));
    void *driver = dlopen(FAKE_DRIVER, RTLD_NOW | RTLD_LOCAL);
    assert_non_null(driver);
    assert_int_equal(tagc_runtime_bind_driver(&runtime), TAGC_OK);
    assert_int_equal(fake_stream(&stream), 0);
    assert_int_equal(runtime.HostAlloc(&memory, 64, TAGC_PINNED_PORTABLE | TAGC_PINNED_MAPPED), 0);
    assert_int_equal(runtime.HostGetDevicePointer(&there, memory, 0), 0);
    memset(memory, 0, 64);
    uint64_t at = (uint64_t)(uintptr_t)there;
    assert_int_equal(runtime.StreamWriteValue32(stream, at, 7, 0), 0);
    assert_int_equal(runtime.StreamWaitValue32(stream, at, 7, TAGC_WAIT_AT_LEAST), 0);
    assert_int_equal(runtime.StreamSynchronize(stream), 0);
    assert_int_equal(*(uint32_t *)memory, 7);
    runtime.FreeHost(memory);
    runtime.StreamDestroy(stream);
    tagc_runtime_unbind(&runtime);
    dlclose(driver);
    assert_int_equal(fake_n_mistakes(), 0);
}

/* The same binding on NVIDIA's own library, where there is one: every name is there, and without a GPU it says so. */
TEST(test_real) {
    static const char *const places[] = {"/usr/local/cuda/lib64/libcudart.so",
                                         "/usr/local/cuda-13.0/lib/libcudart.so.13",
                                         "/usr/lib/x86_64-linux-gnu/libcudart.so"};
    const char *found = NULL;
    for (size_t i = 0; i < sizeof places / sizeof *places && !found; i++) {
        void *library = dlopen(places[i], RTLD_NOW | RTLD_LOCAL);
        if (!library) continue;
        found = places[i];
        dlclose(library);
    }
    if (!found) {
        print_message("no libcudart here\n");
        skip();
    }
    tagc_runtime runtime;
    char where[TAGC_WHERE_TEXT_BYTES];
    assert_int_equal(tagc_runtime_bind(found, &runtime, where), TAGC_OK);
    print_message("%s\n", where);
    int n = 0, code = runtime.GetDeviceCount(&n);
    if (code) print_message("%s\n", runtime.GetErrorString(code));
    assert_true(code != 0 || n > 0);
    tagc_runtime_unbind(&runtime);
}
