/* The loops of code_body.h with NEON: codes go to and from bytes in whole vectors. Reading gaps stays a loop over codes. */
#include "codec/code_kernels.h"
#include "tagc/tagc.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#include <math.h>
#include <string.h>

#define TARGET
#define WIDTH 4
#define NAME(x) neon_##x
#include "codec/code_vectors.h"

INLINE UVEC neon_max(UVEC a, UVEC b) {
    return (UVEC)vmaxq_u32((uint32x4_t)a, (uint32x4_t)b);
}

INLINE VEC neon_clamp(VEC x, float most) {
    float32x4_t above = vmaxnmq_f32((float32x4_t)x, vdupq_n_f32(-most)); /* the number where x is NaN */
    return (VEC)vminq_f32(above, vdupq_n_f32(most));
}

/* Neighbours come together by halves: 8 bits of two codes, then of four, then of eight. */
INLINE void neon_pack(const UVEC *codes, int bits, uint8_t *out) {
    uint16x8_t low = vcombine_u16(vmovn_u32((uint32x4_t)codes[0]), vmovn_u32((uint32x4_t)codes[1]));
    uint16x8_t high = vcombine_u16(vmovn_u32((uint32x4_t)codes[2]), vmovn_u32((uint32x4_t)codes[3]));
    uint8x16_t bytes = vcombine_u8(vmovn_u16(low), vmovn_u16(high));
    if (bits == 8) {
        vst1q_u8(out, bytes);
        return;
    }
    uint16x8_t pairs = vreinterpretq_u16_u8(bytes);
    pairs = vorrq_u16(pairs, vshlq_u16(vshrq_n_u16(pairs, 8), vdupq_n_s16((int16_t)bits)));
    uint8x8_t twos = vmovn_u16(pairs); /* two codes each */
    if (bits == 4) {
        vst1_u8(out, twos);
        return;
    }
    uint16x4_t quads = vreinterpret_u16_u8(twos); /* of 2 bits */
    quads = vorr_u16(quads, vshl_n_u16(vshr_n_u16(quads, 8), 4));
    uint8x8_t fours = vmovn_u16(vcombine_u16(quads, quads));
    uint32_t word = vget_lane_u32(vreinterpret_u32_u8(fours), 0);
    memcpy(out, &word, sizeof word);
}

/* The byte of each of 16 codes, shifted so that the code is at its end. */
INLINE void neon_unpack(const uint8_t *in, int bits, UVEC *codes) {
    static const uint8_t bytes_of[3][16] = {{0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3},
                                            {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7},
                                            {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
    static const int8_t shifts_of[3][16] = {{0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6},
                                            {0, -4, 0, -4, 0, -4, 0, -4, 0, -4, 0, -4, 0, -4, 0, -4},
                                            {0}};
    int row = __builtin_ctz((unsigned)bits) - 1;
    uint8_t here[16] = {0};
    memcpy(here, in, 2 * (size_t)bits);
    uint8x16_t bytes = vqtbl1q_u8(vld1q_u8(here), vld1q_u8(bytes_of[row]));
    bytes = vandq_u8(vshlq_u8(bytes, vld1q_s8(shifts_of[row])), vdupq_n_u8((uint8_t)((1 << bits) - 1)));
    uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
    codes[0] = (UVEC)vmovl_u16(vget_low_u16(low));
    codes[1] = (UVEC)vmovl_u16(vget_high_u16(low));
    codes[2] = (UVEC)vmovl_u16(vget_low_u16(high));
    codes[3] = (UVEC)vmovl_u16(vget_high_u16(high));
}

INLINE void neon_spread(const uint8_t *random, UVEC *thresholds) {
    /* byte j of four comes to the top of lane j, and the three others below it */
    static const uint8_t places[16] = {1, 2, 3, 0, 2, 3, 0, 1, 3, 0, 1, 2, 0, 1, 2, 3};
    uint8x16_t bytes = vld1q_u8(random), from = vld1q_u8(places);
    for (int p = 0; p < 4; p++, from = vaddq_u8(from, vdupq_n_u8(4)))
        thresholds[p] = (UVEC)vqtbl1q_u8(bytes, from);
}

INLINE void neon_halves(UVEC half, uint8_t *out) {
    vst1_u8(out, vreinterpret_u8_u16(vmovn_u32((uint32x4_t)half)));
}

#include "codec/code_body.h"

#define WRITE_CODES neon_write_any
#define TABLE tagc_code_neon
#define LEVEL "neon"
#include "codec/code_table.h"
#endif
