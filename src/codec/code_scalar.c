/* The table for processors without a better one, and the reference for the others. It uses no special instructions. */
#include "codec/code_kernels.h"
#include "core/cpu.h"

#include <math.h>
#include <string.h>

typedef float scalar_vec __attribute__((vector_size(16)));
typedef uint32_t scalar_uvec __attribute__((vector_size(16)));
typedef int32_t scalar_ivec __attribute__((vector_size(16)));
#define VEC scalar_vec
#define UVEC scalar_uvec
#define IVEC scalar_ivec
#define TARGET
#define WIDTH 4
#define NAME(x) scalar_##x
#define PARTNERS(v, h) __builtin_shufflevector(v, v, 0 ^ (h), 1 ^ (h), 2 ^ (h), 3 ^ (h))

static inline UVEC scalar_max(UVEC a, UVEC b) {
    UVEC larger = (UVEC)((IVEC)a > (IVEC)b);
    return (larger & a) | (~larger & b);
}

static inline VEC scalar_clamp(VEC x, float most) {
    const VEC high = (VEC){0} + most, low = (VEC){0} - most;
    UVEC above = (UVEC)(x > low);
    x = (VEC)((above & (UVEC)x) | (~above & (UVEC)low));
    UVEC below = (UVEC)(x < high);
    return (VEC)((below & (UVEC)x) | (~below & (UVEC)high));
}

static inline void scalar_pack(const UVEC *codes, int bits, uint8_t *out) {
    uint64_t words[2] = {0, 0};
    for (int i = 0; i < TAGC_CODE_LANES; i++)
        words[i / 8] |= (uint64_t)codes[i / WIDTH][i % WIDTH] << i % 8 * bits;
    for (int i = 0; i < 2 * bits; i++) out[i] = (uint8_t)(words[i / bits] >> i % bits * 8);
}

static inline void scalar_unpack(const uint8_t *in, int bits, UVEC *codes) {
    for (int i = 0; i < TAGC_CODE_LANES; i++)
        codes[i / WIDTH][i % WIDTH] = in[i * bits / 8] >> i * bits % 8 & ((1 << bits) - 1);
}

static inline void scalar_halves(UVEC half, uint8_t *out) {
    for (int i = 0; i < WIDTH; i++) tagc_store16(out + 2 * i, half[i]);
}

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
    .widen_halves = scalar_widen_halves,
    .widen = scalar_widen,
    .subtract = scalar_subtract,
    .transform = scalar_transform,
    .add = scalar_add,
    .copy_around = scalar_copy_around,
};

size_t tagc_code_available(const tagc_code_kernels *available[TAGC_CODE_MAX_KERNELS]) {
    size_t n = 0;
#if defined(__x86_64__)
    if (tagc_cpu_has_vbmi2()) available[n++] = &tagc_code_avx512;
    if (tagc_cpu_has(TAGC_CPU_AVX2)) available[n++] = &tagc_code_avx2;
#endif
#if defined(__aarch64__)
    if (tagc_cpu_has(TAGC_CPU_NEON)) available[n++] = &tagc_code_neon;
#endif
    available[n++] = &tagc_code_scalar;
    return n;
}

const tagc_code_kernels *tagc_code_best(void) {
    const tagc_code_kernels *available[TAGC_CODE_MAX_KERNELS];
    tagc_code_available(available);
    return available[0];
}
