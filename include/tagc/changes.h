/* Exact changes of arrays: what differs between two versions of an array, bit for bit, as one message. For weights that a trainer
 * sends to others after every step, most of which a step leaves as they are.
 *
 *   tagc_changes_max_bytes    tells how much room a message may need
 *   tagc_changes_encode       writes the message; the caller sends or stores it
 *   tagc_changes_check        says whether a message that arrived is sound
 *   tagc_changes_apply        checks it, too, and turns the array that its sender had before into the one that it had after
 *
 * Values are never computed with, only compared and moved: NaN, infinities and -0 arrive with the same bits. An array is of floating-point
 * numbers of element_bytes 1, 2 or 4 (fp8, bf16, fp16, fp32), or of anything else of that size. What changes by a few units in the last
 * place, as weights do, takes the fewest bytes.
 *
 * A receiver that has a part of the array may apply a message to an array of this length, with anything in the place of what it lacks, and
 * keep its part, unless the message is by magnitude: that says which elements change by their order among those of about the same
 * magnitude, which takes fewer bytes, and needs all that `before` was.
 *
 * All functions are local, work in host memory, and may be called from several threads at once. None keeps anything from one call to the
 * next; _encode allocates up to 17 MB, _apply up to 9 MB, and they free it again. A message that says what changed does not say in what: the caller
 * sees to it that the receiver has the array that `before` was. docs/reference/wire-format.md draws the bytes. */
#ifndef TAGC_CHANGES_H
#define TAGC_CHANGES_H

#include "tagc/tagc.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a message says: all of an array, or what changed. */
typedef enum tagc_changes_form {
    TAGC_CHANGES_WHOLE = 0,
    TAGC_CHANGES_BY_PLACE = 1,
    TAGC_CHANGES_BY_MAGNITUDE = 2
} tagc_changes_form;

/* Sets *n_bytes to the most that a message of n_elems elements, in [0, 2^32 - 64], can take: little more than the array itself.
 * element_bytes is 1, 2 or 4. */
TAGC_API tagc_status tagc_changes_max_bytes(int element_bytes, uint64_t n_elems, uint64_t *n_bytes);

/* Encodes into `message` how `after` differs from `before`, both (n_elems) and unchanged by it. If before is NULL, the message has all of
 * `after`, and a receiver needs no array of its own. Sets *n_bytes to the length of the message, and *n_changes, which may be NULL, to
 * the number of elements that differ (n_elems if before is NULL). by_magnitude: 1 if all receivers have the whole of `before`, else 0.
 * max_bytes must be at least what tagc_changes_max_bytes says. The arrays must not overlap the message, and need no alignment. */
TAGC_API tagc_status tagc_changes_encode(int element_bytes, const void *before, const void *after,
                                         uint64_t n_elems, int by_magnitude, void *message,
                                         uint64_t max_bytes, uint64_t *n_bytes, uint64_t *n_changes);

/* TAGC_OK if tagc_changes_apply would accept the message. Accepts any bytes: TAGC_ERR_CORRUPT if they are damaged, TAGC_ERR_MISMATCH if
 * they are sound and were encoded with another element_bytes or n_elems. Sets *form, which may be NULL: by place also where by_magnitude
 * would not have saved anything. */
TAGC_API tagc_status tagc_changes_check(int element_bytes, const void *message, uint64_t n_bytes,
                                        uint64_t n_elems, tagc_changes_form *form);

/* Turns `values` (n_elems), which must be as `before` was, into `after`. Accepts any bytes and fails like tagc_changes_check; `values` is
 * unchanged then. If `values` was another array, it becomes one that is of no use; where that can be seen, this is TAGC_ERR_MISMATCH.
 * `values` must not overlap the message, and needs no alignment. */
TAGC_API tagc_status tagc_changes_apply(int element_bytes, const void *message, uint64_t n_bytes,
                                        void *values, uint64_t n_elems);

#ifdef __cplusplus
}
#endif

#endif
