/* The header of every message except plain arrays, and of a saved residual.
 *
 * Received bytes may be damaged or forged. _read proves that header and body belong together before any length in them is
 * used. docs/reference/wire-format.md draws the bytes. */
#ifndef TAGC_EXCHANGE_WIRE_H
#define TAGC_EXCHANGE_WIRE_H

#include "tagc/tagc.h"
#include "transport/identity.h"

#define TAGC_WIRE_HEADER_BYTES 64
#define TAGC_WIRE_VERSION 2
/* Of what outlives a step, and names no unit of a comm: of a state, and of blocks and changes. */
#define TAGC_WIRE_STATE_VERSION 2
#define TAGC_WIRE_SAVED_VERSION 1
#define TAGC_WIRE_CHANGES_VERSION 3
#define TAGC_WIRE_CHANGES_OLDEST 2 /* that is read: it has other codes, and a list per class */
enum { TAGC_WIRE_MAX_INDEX = 2 };  /* the largest tagc_index */

typedef enum tagc_wire_kind {
    TAGC_WIRE_INDEX = 1, /* body: the elements that the sender selected in the receiver's shard */
    TAGC_WIRE_UNION = 2, /* body: the elements that any rank selected in the sender's shard */
    TAGC_WIRE_AGREE = 3, /* no body: how the sender fares */
    TAGC_WIRE_LEFTOVER =
        4, /* body: uint32 positions in the sender's shard that could not be recovered from its sketch */
    TAGC_WIRE_STATE = 5, /* body: the rows of a residual, see codec/residual.h */
    TAGC_WIRE_FRAGMENT =
        6, /* direct: followed by the front of the body, or nothing; the rest comes in another transfer */
    TAGC_WIRE_PARAMETERS =
        7, /* gathers of deltas: coding 0 whole (bf16), 1 a delta; after n_items checksums */
    TAGC_WIRE_BLOCKS =
        8, /* tagc/blocks.h: n_elems values with a scale per k, which follow from the options alone */
    TAGC_WIRE_CHANGES =
        9, /* tagc/changes.h: what differs in n_elems elements of k bytes; coding 0 all of them, 1 the changes */
    TAGC_WIRE_LOSSLESS =
        10, /* lossless gathers: segment n_items of a row, n_elems; followed by the front of the body, as a fragment */
    TAGC_WIRE_COUNTS = 11, /* all-to-all: what the sender has for others, see all_to_all.h */
    TAGC_WIRE_LAST = TAGC_WIRE_COUNTS
} tagc_wire_kind;

#define TAGC_WIRE_FLAG_NONFINITE 1u /* the sender's unit holds NaN or Inf */
#define TAGC_WIRE_FLAG_FAILED 2u    /* fragment: the sender failed in this step and sends no body */

typedef struct tagc_wire_header {
    int kind; /* tagc_wire_kind */
    int coding; /* tagc_index of an index or union, tagc_format of a fragment, state or blocks, see the kinds, else 0 */
    uint32_t flags; /* TAGC_WIRE_FLAG_ */
    uint32_t rank;  /* of the sender; state: of the rank that saved it */
    uint32_t
        k; /* the most elements that the sender selects in a shard; state: values of a row; blocks: values per scale; changes: bytes of an element; counts: the rank that failed */
    uint64_t
        n_elems; /* of the shard, below 2^32; state: of the unit; blocks, changes: of the array; counts: ranks */
    uint32_t unit; /* identity of the reducer or gatherer (transport/identity.h); state, blocks, changes: 0 */
    uint32_t
        n_items; /* elements in the body; agreement: leftovers of the sender's shard; state: rows; counts: numbers of 8 bytes */
    uint32_t attempt;  /* union: added to the seed of the sketch's hashes */
    float max_abs;     /* index: largest |acc| of the fragment; union: the largest over ranks */
    uint32_t status;   /* agreement, counts: tagc_status of the sender */
    uint64_t body_sum; /* fragment and lossless, instead of attempt and max_abs: tagc_wire_sum of the body */
    uint32_t longest
        [2]; /* agreement, instead of attempt and max_abs: bytes of the longest body, and of the body of sums */
    uint64_t tag;         /* state, instead of attempt and max_abs: of its reducer's options */
    int output;           /* state, instead of flags: as well */
    uint32_t world_size;  /* state, instead of status */
    uint32_t index_bytes; /* fragment, instead of status: first bytes of the body, which are positions */
    uint64_t body_bytes;  /* size of the body; fragment and lossless: of front and rest together */
    uint64_t word;        /* agreement, instead of body_bytes: what all ranks must have alike */
    uint64_t
        step; /* number of this step of the reducer, or gather of the gatherer, from 1; state: of the last one */
} tagc_wire_header;

/* Checksum of a body that does not travel in one piece with its header. */
uint64_t tagc_wire_sum(const void *body, uint64_t n_bytes);

/* Writes the header of a body that is already in place at message + TAGC_WIRE_HEADER_BYTES. The body of a fragment, or of a
 * lossless gather, has a checksum of its own, body_sum. */
void tagc_wire_write(const tagc_wire_header *header, void *message);
/* The same of a body that is elsewhere. */
void tagc_wire_write_of(const tagc_wire_header *header, const void *body, void *message);

/* TAGC_ERR_CORRUPT unless the n_bytes are one whole message: magic, version, known kind, fields in range, a body of
 * exactly the stated length, checksum. For a fragment or a lossless gather it checks the header only. */
tagc_status tagc_wire_read(const void *message, uint64_t n_bytes, tagc_wire_header *header);

/* TAGC_ERR_CORRUPT (TAGC_ERR_MISMATCH for k) unless the fields that the receiver knows in advance (kind, coding, rank, k,
 * n_elems, step) are as in `expected`. */
tagc_status tagc_wire_expect(const tagc_wire_header *header, const tagc_wire_header *expected);

/* The same of a message in a step of this reducer or gatherer, from that rank of the comm. If the message is of the expected
 * kind and of another unit: TAGC_ERR_MISMATCH, whose text names both. */
tagc_status tagc_wire_expect_of(tagc_comm *comm, const tagc_identity *own, int from,
                                const tagc_wire_header *header, const tagc_wire_header *expected);

#endif
