/* Inside of an all-to-all: what a rank says before anything travels, and what it knows of the others. Tests and fuzzers look at it. */
#ifndef TAGC_EXCHANGE_ALL_TO_ALL_H
#define TAGC_EXCHANGE_ALL_TO_ALL_H

#include "tagc/all_to_all.h"
#include "transport/comm.h"
#include "transport/identity.h"

/* No count is above it, so that no sum over ranks overflows. */
#define TAGC_MAX_COUNT (UINT64_C(1) << 40)

/* What ranks compare. `sent` adds up a checksum of each (from, to, count) as its sender has it, `expected` as its receiver
 * has it: over all ranks the two sums are equal where all counts are. */
typedef struct tagc_counts_word {
    uint64_t sent, expected;
    uint64_t alike; /* options of the call, which all must have */
} tagc_counts_word;

/* What a rank says of itself. */
typedef struct tagc_counts_said {
    tagc_counts_word word;
    tagc_status status;
} tagc_counts_said;

struct tagc_all_to_all {
    tagc_comm *comm;
    tagc_identity identity;
    tagc_all_to_all_options options;
    int rank, world_size;
    int begun;
    uint64_t n_begun;
    tagc_task task;
    /* Of this rank: why it takes part for the others' sake alone, or that it got damaged bytes in the call before. */
    tagc_status failure;
    char failure_text[TAGC_ERROR_TEXT_BYTES];

    tagc_all_to_all_call call;
    tagc_blocks_options blocks; /* of the call, if it is coded */
    int is_coded;

    /* One arena, of what does not depend on counts. */
    void *arena;
    size_t arena_bytes;
    uint8_t *said, *heard;       /* messages of counts: of this rank, and (W) of all */
    uint64_t *from_in, *to_out;  /* (W) where in input and output a rank's part begins */
    uint64_t *told;              /* (W) what each rank sends here, after a mismatch */
    tagc_part *sends, *receives; /* (W) */

    /* Grows to the largest call: | messages to others, by rank | from others |. */
    void *messages;
    size_t messages_bytes;
    uint8_t *sent, *received;
};

/* Bytes that a rank sends another one in a call: what they compare, and n elements. blocks: of the call, or NULL. */
uint64_t tagc_all_to_all_bytes(const tagc_all_to_all_options *options, const tagc_blocks_options *blocks,
                               uint64_t element_bytes, uint64_t n_elems);

#endif
