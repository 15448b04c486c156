/* The header in front of every message that is not plain values, and of a saved residual.
 *
 * Whatever arrives may be damaged or made up: _read proves that header and body belong together before anyone
 * looks at a length in it. docs/wire-format.md draws the bytes. */
#ifndef TAGC_EXCHANGE_WIRE_H
#define TAGC_EXCHANGE_WIRE_H

#include "tagc/paper.h"

#define TAGC_WIRE_HEADER_BYTES 64
#define TAGC_WIRE_VERSION 2

typedef enum tagc_wire_kind {
    TAGC_WIRE_INDEX = 1, /* body: what the sender kept of the receiver's shard */
    TAGC_WIRE_UNION = 2, /* body: what any rank kept of the sender's shard */
    TAGC_WIRE_AGREE = 3, /* no body: how the sender fares */
    TAGC_WIRE_LEFTOVER =
        4,               /* body: positions of the sender's shard that its sketch did not give back, uint32 */
    TAGC_WIRE_STATE = 5, /* body: a residual, float */
    TAGC_WIRE_FRAGMENT =
        6, /* direct: of the body the front is behind it, or nothing, and the rest follows in another transfer */
    TAGC_WIRE_PARAMETERS =
        7 /* gathers of deltas: coding 0 whole (bf16), 1 a delta, behind n_items checksums */
} tagc_wire_kind;

#define TAGC_WIRE_FLAG_NONFINITE 1u /* the sender's unit holds NaN or Inf */
#define TAGC_WIRE_FLAG_FAILED 2u    /* fragment: the sender has failed in this step, and sends no body */

typedef struct tagc_wire_header {
    int kind;          /* tagc_wire_kind */
    int coding;        /* tagc_index of an index or union body, tagc_format of a fragment, else 0 */
    uint32_t flags;    /* TAGC_WIRE_FLAG_ */
    uint32_t rank;     /* of the sender */
    uint32_t k;        /* most elements that the sender keeps of a shard */
    uint64_t n_elems;  /* of the shard; of the unit in a state */
    uint32_t n_items;  /* elements in the body; in agreement: leftovers of the sender's shard */
    uint32_t attempt;  /* union: added to the seed of the sketch's hashes */
    float max_abs;     /* index: largest |acc| of the fragment; union: the largest over ranks */
    uint32_t status;   /* agreement: tagc_status of the sender */
    uint64_t body_sum; /* fragment, in place of attempt and max_abs: tagc_wire_sum of the body */
    uint32_t longest
        [2]; /* agreement, in place of attempt and max_abs: bytes of the longest body, and of the body of sums */
    uint32_t index_bytes; /* fragment, in place of status: first bytes of the body, which are positions */
    uint64_t body_bytes;  /* behind the header; fragment: of the body, wherever it travels */
    uint64_t step;        /* how many steps the reducer, or gathers the gatherer, has begun: from 1 */
} tagc_wire_header;

/* Checksum of a fragment's body. */
uint64_t tagc_wire_sum(const void *body, uint64_t n_bytes);

/* Writes the header in front of a body that is already in place at message + TAGC_WIRE_HEADER_BYTES. That of a fragment
 * has a checksum of its own, body_sum. */
void tagc_wire_write(const tagc_wire_header *header, void *message);

/* TAGC_ERR_CORRUPT unless the n_bytes are one whole message: magic, version, known kind, fields in range, a
 * body of exactly the length said, checksum. Of a fragment the header alone. */
tagc_status tagc_wire_read(const void *message, uint64_t n_bytes, tagc_wire_header *header);

/* TAGC_ERR_CORRUPT, or TAGC_ERR_MISMATCH for k, unless the fields that the receiver knows beforehand (kind,
 * coding, rank, k, n_elems, step) are as in `expected`. */
tagc_status tagc_wire_expect(const tagc_wire_header *header, const tagc_wire_header *expected);

/* TAGC_ERR_CORRUPT unless the n_positions are ascending and set in the bitmap of n bits. */
tagc_status tagc_wire_check_positions(const uint32_t *positions, size_t n_positions, const uint8_t *bits,
                                      size_t n);

/* Bytes of an index or union body of n elements. */
size_t tagc_wire_index_bytes(int coding, size_t n);
/* TAGC_ERR_CORRUPT when bits past n are set or the number of set bits is not n_items. */
tagc_status tagc_wire_check_index(int coding, const uint8_t *body, size_t n, size_t n_items,
                                  uint8_t *scratch);
/* Such a body as a plain bitmap: itself, or where it is none what is made of it in `scratch` (bitmap bytes). */
const uint8_t *tagc_wire_bits(int coding, const uint8_t *body, size_t n, uint8_t *scratch);

#endif
