/* Bodies of indices as they are received: what is sound, and damage that must be refused. */
#include <string.h>

#include "../test.h"
#include "codec/bitmap.h"
#include "paper/index_body.h"
#include "paper/nibble.h"
#include "tagc/paper.h"

TEST(test_index_bodies) {
    uint8_t body[64] = {0}, scratch[64];
    static const uint32_t indices[] = {0, 7, 63, 64, 99};
    for (int coding = TAGC_INDEX_OR; coding <= TAGC_INDEX_SUM1; coding++) {
        memset(body, 0, sizeof body);
        if (coding == TAGC_INDEX_SUM4)
            tagc_nibble_make(body, 100, indices, 5);
        else
            tagc_bitmap_make(body, 100, indices, 5);
        assert_int_equal(tagc_index_check(coding, body, 100, 5, scratch), TAGC_OK);
        assert_int_equal(tagc_index_check(coding, body, 100, 4, scratch), TAGC_ERR_CORRUPT);
        assert_int_equal(tagc_index_check(coding, body, 100, 6, scratch), TAGC_ERR_CORRUPT);
        const uint8_t *bits = tagc_index_bits(coding, body, 100, scratch);
        assert_int_equal(tagc_bitmap_count(bits, 100), 5);
        assert_int_equal(tagc_index_check_positions(indices, 5, bits, 100), TAGC_OK);
        assert_int_equal(tagc_index_check_positions((const uint32_t[]){7, 0}, 2, bits, 100),
                         TAGC_ERR_CORRUPT);
        assert_int_equal(tagc_index_check_positions((const uint32_t[]){7, 7}, 2, bits, 100),
                         TAGC_ERR_CORRUPT);
        assert_int_equal(tagc_index_check_positions((const uint32_t[]){8}, 1, bits, 100), TAGC_ERR_CORRUPT);
        assert_int_equal(tagc_index_check_positions((const uint32_t[]){UINT32_MAX}, 1, bits, 100),
                         TAGC_ERR_CORRUPT);
        body[coding == TAGC_INDEX_SUM4 ? 50 : 12] |= 0x10; /* element 100 or 101 */
        assert_int_equal(tagc_index_check(coding, body, 100, 6, scratch), TAGC_ERR_CORRUPT);
    }
}
