/* What runs where there is no better table, and the reference of the others: no instructions beyond the compiler's
 * usual ones. */
#include "codec/code_kernels.h"
#include "tagc/tagc.h"

#include <math.h>
#include <string.h>

#define TARGET
#define BMI2 0
#define NAME(x) scalar_##x
#include "codec/code_body.h"

static size_t scalar_read_codes(const uint8_t *bytes, size_t n_codes, int bits, uint32_t *positions) {
    return scalar_read_from(bytes, 0, n_codes, bits, 0, positions);
}

static size_t scalar_check_codes(const uint8_t *bytes, size_t n_codes, int bits, size_t *end) {
    *end = 0;
    return scalar_check_from(bytes, 0, n_codes, bits, end);
}

static void scalar_copy_around(float *to, const float *from, size_t n) {
    memcpy(to, from, n * sizeof *to);
}

const tagc_code_kernels tagc_code_scalar = {
    .name = "scalar",
    .count_codes = scalar_count_codes,
    .write_codes = scalar_write_any,
    .read_codes = scalar_read_codes,
    .check_codes = scalar_check_codes,
    .accumulate = scalar_accumulate,
    .largest = scalar_largest,
    .mean = scalar_mean,
    .refit = scalar_refit,
    .round = scalar_round,
    .narrow = scalar_narrow,
    .widen = scalar_widen,
    .subtract = scalar_subtract,
    .transform = scalar_transform,
    .add = scalar_add,
    .copy_around = scalar_copy_around,
};

size_t tagc_code_available(const tagc_code_kernels *available[TAGC_CODE_MAX_KERNELS]) {
    size_t n = 0;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2"))
        available[n++] = &tagc_code_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) available[n++] = &tagc_code_avx2;
#endif
    available[n++] = &tagc_code_scalar;
    return n;
}

const tagc_code_kernels *tagc_code_best(void) {
    const tagc_code_kernels *available[TAGC_CODE_MAX_KERNELS];
    tagc_code_available(available);
    return available[0];
}
