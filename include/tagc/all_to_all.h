/* An all-to-all of arrays in few bits: every rank has something for every other one, of any length. For the tokens of a model with
 * experts, and for attention whose heads are spread over ranks.
 *
 *   tagc_all_to_all_create    makes the object, once
 *   tagc_all_to_all_run       one call: sends a part of `input` to each rank, and receives one of `output` from each
 *
 * What a rank keeps arrives bit for bit. A message to another rank goes as tagc/blocks.h encodes it, or whole: if the caller says so, or
 * if it is short. There is no residual. docs/reference/wire-format.md draws the bytes.
 *
 * Levels are the caller's, as for reducers and gatherers. On hosts of several ranks, ranks of a host first give each other what is for
 * ranks of the same place elsewhere, by whatever is fast there; then an all-to-all over the ranks of one place (tagc_comm_split) has one
 * message for each other host, and each element crosses once. */
#ifndef TAGC_ALL_TO_ALL_H
#define TAGC_ALL_TO_ALL_H

#include "tagc/blocks.h"
#include "tagc/tagc.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tagc_all_to_all tagc_all_to_all;

typedef struct tagc_all_to_all_options {
    /* Written by _init. */
    size_t struct_bytes;
    /* As in tagc_reducer_options. */
    uint64_t tag;
    /* A message of fewer elements travels whole. [0, 2^31), default 4096. */
    uint64_t min_elems;
} tagc_all_to_all_options;

TAGC_API void tagc_all_to_all_options_init_sized(tagc_all_to_all_options *options, size_t struct_bytes);
#define tagc_all_to_all_options_init(options) tagc_all_to_all_options_init_sized((options), sizeof *(options))

/* One call, as this rank sees it. */
typedef struct tagc_all_to_all_call {
    /* Written by _init. */
    size_t struct_bytes;
    /* (n_input) what is for rank 0, then what is for rank 1, and so on. It may be NULL if n_input is 0. */
    const void *input;
    uint64_t n_input;
    /* (n_output) what came from rank 0, and so on. It must not overlap `input`. */
    void *output;
    uint64_t n_output;
    /* (W) how many elements go to each rank, [0, 2^40], in sum n_input. */
    const uint64_t *sends;
    /* (W) how many come from each rank, in sum n_output. It is for the caller to know what the others send. */
    const uint64_t *receives;
    /* The length of both arrays of counts: W. Required. */
    uint64_t n_counts;
    /* How messages are encoded; NULL (default): they travel whole. The same on all ranks, but for rounding and seed.
     * The seed need not differ between ranks, but between calls that are rounded at random. */
    const tagc_blocks_options *blocks;
    /* Bytes of an element, [1, 16], default 4: with `blocks` those of blocks->element. The same on all ranks. */
    uint64_t element_bytes;
    /* Numbers that must be equal in the sum over all ranks, modulo 2^64, or the call fails: what the caller itself sent and expects
     * beyond these arrays, such as within a host. Default 0. */
    uint64_t sent_word;
    uint64_t expected_word;
} tagc_all_to_all_call;

TAGC_API void tagc_all_to_all_call_init_sized(tagc_all_to_all_call *call, size_t struct_bytes);
#define tagc_all_to_all_call_init(call) tagc_all_to_all_call_init_sized((call), sizeof *(call))

/* Collective. TAGC_ERR_MISMATCH on all ranks if their options differ. */
TAGC_API tagc_status tagc_all_to_all_create(tagc_comm *comm, const tagc_all_to_all_options *options,
                                            tagc_all_to_all **out);

/* Collective. Starts a call and returns at once. The caller must not touch the arrays until _end returns, nor the two of counts and
 * `blocks`; `call` itself is copied. Calls of a comm run in the order of their _begin, one after the other, beside reducers, and in
 * one order with gathers. That order must be the same on all ranks; where it is not, the comm breaks with TAGC_ERR_MISMATCH.
 *
 * An argument that is wrong on one rank fails the call on all; on that rank _begin returns it when the call is over. */
TAGC_API tagc_status tagc_all_to_all_begin(tagc_all_to_all *all_to_all, const tagc_all_to_all_call *call);

/* Instead of _begin and _end, on a rank that cannot begin: as tagc_reducer_fail. */
TAGC_API tagc_status tagc_all_to_all_fail(tagc_all_to_all *all_to_all, tagc_status status,
                                          const char *reason);

/* Waits for the call. Before any element travels all ranks compare what they send with what the others expect:
 * TAGC_ERR_MISMATCH on all of them where that differs anywhere, and `output` is unchanged. If a rank receives damaged
 * bytes, it returns TAGC_ERR_CORRUPT, and all ranks return it from their next call. A block that holds NaN or Inf arrives as NaN.
 *
 * Memory for messages grows to the largest call so far. If there is none for this one, the call fails on all ranks. */
TAGC_API tagc_status tagc_all_to_all_end(tagc_all_to_all *all_to_all);

/* Collective, blocking. _begin and _end in one call. */
TAGC_API tagc_status tagc_all_to_all_run(tagc_all_to_all *all_to_all, const tagc_all_to_all_call *call);

/* If a call is in progress, waits for it first. */
TAGC_API void tagc_all_to_all_destroy(tagc_all_to_all *all_to_all);

#ifdef __cplusplus
}
#endif

#endif
