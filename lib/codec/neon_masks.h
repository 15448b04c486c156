/* Masks of 64 elements with NEON, which has no movemask: bytes that are all ones or zero, weighed by their bit and added in pairs. */
#ifndef TAGC_CODEC_NEON_MASKS_H
#define TAGC_CODEC_NEON_MASKS_H

#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>

#define NEON static inline __attribute__((always_inline))

/* Bit i: byte i of (4, 16) is all ones. */
NEON uint64_t neon_word_of(const uint8x16_t *bytes) {
    const uint8x16_t weights = vreinterpretq_u8_u64(vdupq_n_u64(UINT64_C(0x8040201008040201)));
    uint8x16_t low = vpaddq_u8(vandq_u8(bytes[0], weights), vandq_u8(bytes[1], weights));
    uint8x16_t high = vpaddq_u8(vandq_u8(bytes[2], weights), vandq_u8(bytes[3], weights));
    uint8x16_t sums = vpaddq_u8(low, high);
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(sums, sums)), 0);
}

NEON uint8x16_t neon_narrow16(uint16x8_t low, uint16x8_t high) {
    return vcombine_u8(vmovn_u16(low), vmovn_u16(high));
}

/* Masks of 16 elements of 4 bytes, as a byte of each. */
NEON uint8x16_t neon_narrow32(const uint32x4_t *masks) {
    return neon_narrow16(vcombine_u16(vmovn_u32(masks[0]), vmovn_u32(masks[1])),
                         vcombine_u16(vmovn_u32(masks[2]), vmovn_u32(masks[3])));
}

#endif
