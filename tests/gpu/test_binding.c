/* Binding the runtime's calls by name: the library that is loaded already, and clear words where there is none that serves. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>
#include <dlfcn.h>

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
static void test_loaded_goes_first(void **state) {
    (void)state;
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

static void test_refused(void **state) {
    (void)state;
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

/* The same binding on NVIDIA's own library, where there is one: every name is there, and without a GPU it says so. */
static void test_real(void **state) {
    (void)state;
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_loaded_goes_first),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_real),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
