/* What changed in an array, exactly: positions by classes of magnitude (classes.h), and by how many units in the last place.
 *
 * Elements of `width` bytes are taken as sign and magnitude and put in the order of the numbers that they are, -Inf to Inf with NaN at both
 * ends: -0 is -1, 0 is 0. So what changes a little is a small difference of integers. It is taken modulo 2^(8 width), hence any element
 * can become any other.
 *
 * The array is divided into segments of 2^20 elements (the last may be shorter). Each is encoded by itself, little-endian, unaligned:
 *
 *   0    u32   n_items
 *   4    u8    form: 0 all elements as they are, 1 what changed
 *   5    u8    lists, of form 1 with items from 1 to TAGC_CLASS_LISTS_MAX; else 0
 *   6    u16   0
 *   8          form 0: n_items elements. Form 1, per list:
 *                u8 the first grade of its class, u8 code of the gaps, u8 code of the integers, u8 least size, u32 items, u32 bytes
 *              then of each list a stream of pairs (integers.h): the gap to the item in elements of the class, and the integer less the
 *              least of that size
 *
 * The integer is 2 d - 1 if the difference d is positive, else -2 d - 2, and its size floor(log2 |d|). Most differences are by 1: where
 * these have a list of their own, their integers take the bit of the sign, and positions say the rest.
 *
 * The sender chooses what takes the fewest bytes. If receivers lack elements, it takes one class: positions are then places in the segment. A
 * segment without changes has n_items 0 and form 1. */
#ifndef TAGC_CODEC_CHANGES_H
#define TAGC_CODEC_CHANGES_H

#include "codec/classes.h"
#include "codec/differ.h"
#include "core/status.h"
#include "tagc/changes.h"

#define TAGC_CHANGES_SEGMENT ((size_t)1 << 20) /* elements */

typedef struct tagc_changes_kernels {
    const tagc_differ_kernels *differ;
    const tagc_classes_kernels *classes;
} tagc_changes_kernels;

tagc_changes_kernels tagc_changes_best(void); /* what this processor can run */

size_t tagc_changes_body_max_bytes(size_t width, size_t n);
/* most_items: in a segment. */
size_t tagc_changes_scratch_bytes(size_t n, size_t most_items);

/* Writes at most tagc_changes_body_max_bytes; returns how many, or SIZE_MAX if a segment has more than most_items items. before: NULL or (n).
 * scratch: tagc_changes_scratch_bytes, TAGC_ALIGNMENT-aligned, and not used if before is NULL. *n_changes: elements that differ, n if
 * before is NULL. by_magnitude: with several classes, where that takes fewer bytes. */
size_t tagc_changes_body_encode(const tagc_changes_kernels *kernels, size_t width, const void *before,
                                const void *after, size_t n, int by_magnitude, uint8_t *body, void *scratch,
                                size_t most_items, uint64_t *n_changes);

/* Accepts any bytes. Returns 1 if decode would take them and would read n_bytes. *most_items: in a segment; *form: whole if all segments
 * are of form 0, by magnitude if one has several classes. */
int tagc_changes_body_valid(size_t width, const uint8_t *body, size_t n_bytes, size_t n, size_t *most_items,
                            tagc_changes_form *form);
/* body must be valid; scratch as above. Returns 0 if values have fewer elements of some class than the sender's had: they are not what it
 * made the body from, and are undefined then. */
int tagc_changes_body_decode(const tagc_changes_kernels *kernels, size_t width, const uint8_t *body,
                             void *values, size_t n, void *scratch, size_t most_items);

#endif
