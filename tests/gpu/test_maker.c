/* The library of kernels is found, and what is missing is said. */
#include "../test.h"
#include "gpu/maker.h"

#include <stdlib.h>
#include <string.h>

TEST(test_missing) {
    const tagc_maker *maker;
    setenv("TAGC_CUDA_LIBRARY", "/nowhere/libtagc-cuda.so", 1);
    assert_int_equal(tagc_maker_load(&maker), TAGC_ERR_UNSUPPORTED);
    assert_non_null(strstr(tagc_last_error(), "kernels for CUDA are missing: /nowhere/libtagc-cuda.so"));
    setenv("TAGC_CUDA_LIBRARY", "libm.so.6", 1);
    assert_int_equal(tagc_maker_load(&maker), TAGC_ERR_UNSUPPORTED);
    assert_non_null(strstr(tagc_last_error(), "libm.so.6 has kernels of version 0"));
    assert_null(maker);
}

/* The library of kernels if there is nvcc, else the tests' own, whose kernels run on the processor. Neither call needs a GPU. */
TEST(test_cuda) {
    const tagc_maker *maker;
    const char *library = getenv("TAGC_TEST_CUDA_LIBRARY");
    if (!library || !*library) skip();
    setenv("TAGC_CUDA_LIBRARY", library, 1);
    assert_int_equal(tagc_maker_load(&maker), TAGC_OK);
    assert_int_equal(maker->abi, TAGC_MAKER_ABI);
    assert_ptr_not_equal(maker->batches, &tagc_batch_cpu);
    tagc_batch_row row = {.options = {.n = 100, .k = 101, .sparse = 1, .values = 2, .block = 128}};
    tagc_batch *batch;
    assert_int_equal(maker->batches->create(TAGC_BATCH_ENCODE, &row, 1, NULL, NULL, NULL, NULL, &batch),
                     TAGC_ERR_ARGUMENT);
    assert_non_null(strstr(maker->batches->last_error(), "n is 100 and k 101"));
    row.options.k = 10;
    assert_true(maker->batches->work_bytes(TAGC_BATCH_ENCODE, &row, 1, 1) > 0);
    unsetenv("TAGC_CUDA_LIBRARY");
}
