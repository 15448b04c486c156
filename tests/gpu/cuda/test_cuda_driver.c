/* The host's side of libtagc-cuda.so as nvcc made it, over a driver of no device: each device gets code that it can run, all kernels are in it, and
 * launches have their arguments. */
#include "../../test.h"
#include "codec/batch.h"
#include "core/memory.h"
#include "fake_modules.h"
#include "gpu/maker.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SOURCES = 4, THREADS = 256 };

static fake_modules *driver(void) {
    static fake_modules *state;
    if (!state) {
        void *library = dlopen(FAKE_MODULES, RTLD_NOW);
        fake_modules *(*own)(void) = NULL;
        assert_non_null(library);
        *(void **)&own = dlsym(library, "fake_modules_state");
        state = own();
    }
    return state;
}

static const tagc_maker *maker(void) {
    const tagc_maker *out;
    driver(); /* before the library asks for the system's */
    setenv("TAGC_CUDA_LIBRARY", CUDA_LIBRARY, 1);
    assert_int_equal(tagc_maker_load(&out), TAGC_OK);
    return out;
}

static void be(int number, int major, int minor) {
    fake_modules *d = driver();
    d->device = number;
    d->major[number] = major;
    d->minor[number] = minor;
}

/* Of the binaries that there are: the newest of its generation that is not newer; else minus the PTX, which is for the oldest. */
static int expected(int is) {
    char list[] = ARCHITECTURES;
    int best = 0, first = 0;
    for (char *one = strtok(list, ","); one; one = strtok(NULL, ",")) {
        int architecture = atoi(one);
        if (!first) first = architecture;
        if (architecture / 10 == is / 10 && architecture <= is && architecture > best) best = architecture;
    }
    return best ? best : -first;
}

TEST(test_devices) {
    static const int all[] = {75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121};
    enum { N = sizeof all / sizeof *all };
    for (int turn = 0; turn < 2; turn++) /* the second time everything is loaded */
        for (int i = 0; i < N; i++) {
            be(i, all[i] / 10, all[i] % 10);
            if (-expected(all[i]) > all[i]) continue; /* built for newer ones */
            assert_int_equal(maker()->prepare(), TAGC_OK);
            assert_int_equal(driver()->architecture[i], expected(all[i]));
            assert_int_equal(driver()->n_modules[i], SOURCES);
        }
    be(N, 6, 1);
    assert_int_equal(maker()->prepare(), TAGC_ERR_DEVICE);
    assert_non_null(strstr(maker()->batches->last_error(), "loading a kernel: no kernel image is available"));
}

TEST(test_launches) {
    static int is_void;
    static uint16_t array[100];
    fake_modules *d = driver();
    void *stream = &d;
    be(0, 9, 0);
    assert_int_equal(maker()->prepare(), TAGC_OK);
    d->n_launches = 0;
    assert_int_equal(maker()->runs->spoil(&is_void, array, sizeof array, stream), TAGC_OK);
    assert_int_equal(d->n_launches, 1);
    const fake_launch *one = &d->launches[0];
    assert_non_null(strstr(one->name, "spoil_array"));
    assert_int_equal(one->block, THREADS);
    assert_int_equal(one->grid, 1);
    assert_ptr_equal(one->stream, stream);
    const unsigned long long words[] = {(uintptr_t)&is_void, (uintptr_t)array, 100};
    assert_memory_equal(one->words, words, sizeof words);
    /* A failure is this library's, and only of that call. */
    d->fails_with = 719;
    assert_int_equal(maker()->runs->spoil(&is_void, array, sizeof array, stream), TAGC_ERR_DEVICE);
    assert_non_null(strstr(maker()->batches->last_error(), "a failure of the fake driver"));
    assert_int_equal(maker()->runs->spoil(&is_void, array, sizeof array, stream), TAGC_OK);
}

/* What lies in the tables is what the first launches have as arguments; the others are those of README's table. */
TEST(test_batch) {
    static const char *const kernels[] = {"unpack_parcel", "unpack_parcel", "sample_rows", "stream_rows",
                                          "refine_rows",   "refine_rows",   "refine_rows", "count_rows",
                                          "gather_rows",   "emit_rows"};
    enum { N = sizeof kernels / sizeof *kernels };
    const tagc_batch_maker *batches = maker()->batches;
    tagc_batch_row row = {
        .options = {.n = 100000, .k = 5000, .sparse = 1, .values = 2, .block = 128, .residual = 2}};
    tagc_batch_result result;
    tagc_batch *batch;
    fake_modules *d = driver();
    be(0, 9, 0);
    row.gradient = &row;
    row.residual_in = (void *)(uintptr_t)(16 * TAGC_ALIGNMENT);
    row.residual_out = (void *)(uintptr_t)(4096 * TAGC_ALIGNMENT);
    char *work = malloc(batches->work_bytes(TAGC_BATCH_ENCODE, &row, 1, 1) + TAGC_ALIGNMENT);
    d->n_launches = 0;
    assert_int_equal(batches->create(TAGC_BATCH_ENCODE, &row, 1, &result,
                                     work + (TAGC_ALIGNMENT - (uintptr_t)work % TAGC_ALIGNMENT), NULL, d,
                                     &batch),
                     TAGC_OK);
    assert_int_equal(batches->point(batch, &row, &result), TAGC_OK);
    assert_int_equal(batches->run(batch), TAGC_OK);
    assert_int_equal(d->n_launches, N);
    assert_int_equal(d->n_launches, batches->n_launches(TAGC_BATCH_ENCODE, &row, 1));
    for (int i = 0; i < N; i++) {
        if (!strstr(d->launches[i].name, kernels[i]))
            print_error("%s is not %s\n", d->launches[i].name, kernels[i]);
        assert_non_null(strstr(d->launches[i].name, kernels[i]));
        assert_ptr_equal(d->launches[i].stream, d);
        assert_int_equal(d->launches[i].block, THREADS);
    }
    const void *arrays[] = {row.gradient, row.residual_in, row.residual_out};
    assert_memory_equal(d->launches[0].words, arrays, sizeof arrays);
    batches->destroy(batch);
    free(work);
}
