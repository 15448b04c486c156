/* Bodies of indices and unions, whose content decides how much memory is touched. */
#include "paper/index_body.h"

#include "codec/bitmap.h"
#include "core/status.h"
#include "exchange/wire.h"
#include "paper/nibble.h"
#include "tagc/paper.h"

_Static_assert((int)TAGC_INDEX_SUM1 == (int)TAGC_WIRE_MAX_INDEX, "the largest tagc_index");

tagc_status tagc_index_check_positions(const uint32_t *positions, size_t n_positions, const uint8_t *bits,
                                       size_t n) {
    for (size_t i = 0; i < n_positions; i++) {
        uint32_t at = positions[i];
        if (at >= n || (i > 0 && at <= positions[i - 1]) || !(bits[at / 8] >> (at % 8) & 1))
            return tagc_fail(TAGC_ERR_CORRUPT,
                             "leftover %zu is at %u, not an ascending position of the union", i, at);
    }
    return TAGC_OK;
}

size_t tagc_index_body_bytes(int coding, size_t n) {
    return coding == TAGC_INDEX_SUM4 ? tagc_nibble_bytes(n) : tagc_bitmap_bytes(n);
}

const uint8_t *tagc_index_bits(int coding, const uint8_t *body, size_t n, uint8_t *scratch) {
    if (coding != TAGC_INDEX_SUM4) return body;
    tagc_nibble_to_bitmap(body, n, scratch);
    return scratch;
}

tagc_status tagc_index_check(int coding, const uint8_t *body, size_t n, size_t n_items, uint8_t *scratch) {
    const uint8_t *bits = tagc_index_bits(coding, body, n, scratch);
    if (!tagc_bitmap_valid(bits, n))
        return tagc_fail(TAGC_ERR_CORRUPT, "bits past the end of the index are set");
    size_t n_set = tagc_bitmap_count(bits, n);
    if (n_set != n_items)
        return tagc_fail(TAGC_ERR_CORRUPT, "the index has %zu elements, its header says %zu", n_set, n_items);
    return TAGC_OK;
}
