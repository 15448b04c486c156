/* The loops of code_body.h with AVX2 and BMI2: vectors of 16 are two registers. */
#include "codec/code_kernels.h"
#include "tagc/tagc.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

#define TARGET __attribute__((target("avx2,bmi2,popcnt")))
#define BMI2 1
#define NAME(x) avx2_##x
#include "codec/code_body.h"

TARGET static size_t avx2_read_codes(const uint8_t *bytes, size_t n_codes, int bits, uint32_t *positions) {
    return avx2_read_from(bytes, 0, n_codes, bits, 0, positions);
}

TARGET static size_t avx2_check_codes(const uint8_t *bytes, size_t n_codes, int bits, size_t *end) {
    *end = 0;
    return avx2_check_from(bytes, 0, n_codes, bits, end);
}

TARGET static void avx2_copy_around(float *to, const float *from, size_t n) {
    for (; n > 0 && ((uintptr_t)to & 31); n--) *to++ = *from++;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
    for (; i < n; i++) to[i] = from[i];
    _mm_sfence();
}

const tagc_code_kernels tagc_code_avx2 = {
    .name = "avx2",
    .count_codes = avx2_count_codes,
    .write_codes = avx2_write_codes,
    .read_codes = avx2_read_codes,
    .check_codes = avx2_check_codes,
    .accumulate = avx2_accumulate,
    .largest = avx2_largest,
    .mean = avx2_mean,
    .refit = avx2_refit,
    .round = avx2_round,
    .narrow = avx2_narrow,
    .widen = avx2_widen,
    .subtract = avx2_subtract,
    .transform = avx2_transform,
    .add = avx2_add,
    .copy_around = avx2_copy_around,
};
#endif
