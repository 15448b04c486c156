/* The table for processors without a better one, and the reference for the others. It uses no special instructions. */
#include "codec/code_kernels.h"
#include "core/cpu.h"

#include <math.h>
#include <string.h>

#define TARGET
#define WIDTH 4
#define NAME(x) scalar_##x
#include "codec/code_vectors.h"

INLINE UVEC scalar_max(UVEC a, UVEC b) {
    UVEC larger = (UVEC)((IVEC)a > (IVEC)b);
    return (larger & a) | (~larger & b);
}

INLINE VEC scalar_clamp(VEC x, float most) {
    const VEC high = (VEC){0} + most, low = (VEC){0} - most;
    UVEC above = (UVEC)(x > low);
    x = (VEC)((above & (UVEC)x) | (~above & (UVEC)low));
    UVEC below = (UVEC)(x < high);
    return (VEC)((below & (UVEC)x) | (~below & (UVEC)high));
}

INLINE void scalar_pack(const UVEC *codes, int bits, uint8_t *out) {
    uint64_t words[2] = {0, 0};
    for (int i = 0; i < TAGC_CODE_LANES; i++)
        words[i / 8] |= (uint64_t)codes[i / WIDTH][i % WIDTH] << i % 8 * bits;
    for (int i = 0; i < 2 * bits; i++) out[i] = (uint8_t)(words[i / bits] >> i % bits * 8);
}

INLINE void scalar_unpack(const uint8_t *in, int bits, UVEC *codes) {
    uint32_t lanes[TAGC_CODE_LANES];
    for (int i = 0; i < TAGC_CODE_LANES; i++) lanes[i] = in[i * bits / 8] >> i * bits % 8 & ((1 << bits) - 1);
    memcpy(codes, lanes, sizeof lanes);
}

INLINE void scalar_spread(const uint8_t *random, UVEC *thresholds) {
    UVEC all;
    memcpy(&all, random, sizeof all);
    UVEC of_0 = all >> 8 | all << 24, of_1 = all >> 16 | all << 16, of_2 = all >> 24 | all << 8;
    UVEC a = __builtin_shufflevector(of_0, of_1, 0, 4, 1, 5),
         b = __builtin_shufflevector(of_2, all, 0, 4, 1, 5);
    UVEC c = __builtin_shufflevector(of_0, of_1, 2, 6, 3, 7),
         d = __builtin_shufflevector(of_2, all, 2, 6, 3, 7);
    thresholds[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
    thresholds[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
    thresholds[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
    thresholds[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
}

INLINE void scalar_halves(UVEC half, uint8_t *out) {
    for (int i = 0; i < WIDTH; i++) tagc_store16(out + 2 * i, half[i]);
}

#include "codec/code_body.h"

#define WRITE_CODES scalar_write_any
#define TABLE tagc_code_scalar
#define LEVEL "scalar"
#include "codec/code_table.h"

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
