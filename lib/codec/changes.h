/* What changed in an array, exactly: positions (gaps.h), then by how many units in the last place (integers.h).
 *
 * Elements of `width` bytes are taken as sign and magnitude and put in the order of the numbers that they are, -Inf to Inf with NaN at both
 * ends: -0 is -1, 0 is 0. So what changes a little is a small difference of integers. It is taken modulo 2^(8 width), hence any element
 * can become any other.
 *
 * The array is divided into segments of 2^20 elements (the last may be shorter). Each is encoded by itself, little-endian, unaligned:
 *
 *   0    u32   n_items
 *   4    u8    form: 0 all elements as they are, 1 differences, 2 the new values of the items
 *   5    u8    order of the integers (form 1, else 0)
 *   6    u16   0
 *   8    u32   bytes of the last part
 *   12         the positions of the items, unless n_items is 0 or all of the segment; then
 *              form 0 and 2: n_items elements; form 1: an integer for each item, 2 d - 1 if its difference d is positive, else -2 d - 2
 *
 * The sender chooses what takes the fewest bytes. A segment without changes has n_items 0, form 1 and nothing behind its 12 bytes. */
#ifndef TAGC_CODEC_CHANGES_H
#define TAGC_CODEC_CHANGES_H

#include "codec/differ.h"
#include "core/status.h"

#define TAGC_CHANGES_SEGMENT ((size_t)1 << 20) /* elements */

size_t tagc_changes_body_max_bytes(size_t width, size_t n);
size_t tagc_changes_encode_scratch_bytes(size_t n);
size_t tagc_changes_decode_scratch_bytes(void);

/* Writes at most tagc_changes_body_max_bytes; returns how many. before: NULL or (n). scratch: TAGC_ALIGNMENT-aligned, and not used if
 * before is NULL. *n_changes: elements that differ, n if before is NULL. */
size_t tagc_changes_body_encode(const tagc_differ_kernels *kernels, size_t width, const void *before,
                                const void *after, size_t n, uint8_t *body, void *scratch,
                                uint64_t *n_changes);

/* Accepts any bytes. Returns 1 if decode would take them and would read n_bytes. *is_whole: all segments are of form 0. */
int tagc_changes_body_valid(size_t width, const uint8_t *body, size_t n_bytes, size_t n, int *is_whole);
/* body must be valid. */
void tagc_changes_body_decode(size_t width, const uint8_t *body, void *values, size_t n, void *scratch);

#endif
