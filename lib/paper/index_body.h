/* Received bodies of indices and unions: their sizes and what makes them sound. coding: a tagc_index. */
#ifndef TAGC_PAPER_INDEX_BODY_H
#define TAGC_PAPER_INDEX_BODY_H

#include "tagc/tagc.h"

/* Returns the bytes of an index or union body of n elements. */
size_t tagc_index_body_bytes(int coding, size_t n);
/* TAGC_ERR_CORRUPT if bits past n are set or the number of set bits is not n_items. */
tagc_status tagc_index_check(int coding, const uint8_t *body, size_t n, size_t n_items, uint8_t *scratch);
/* Returns such a body as a plain bitmap: the body itself, or one made in `scratch` (bitmap bytes). */
const uint8_t *tagc_index_bits(int coding, const uint8_t *body, size_t n, uint8_t *scratch);

/* TAGC_ERR_CORRUPT unless the n_positions are ascending and set in the bitmap of n bits. */
tagc_status tagc_index_check_positions(const uint32_t *positions, size_t n_positions, const uint8_t *bits,
                                       size_t n);

#endif
