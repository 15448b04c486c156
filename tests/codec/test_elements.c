/* Elements in 16 bits: what widens and narrows again, and how values are rounded. */
#include "../test.h"
#include "codec/elements.h"

#include <math.h>

static uint16_t half_bits(float value) {
    uint16_t bits;
    tagc_elements_write(&value, &bits, TAGC_ELEMENT_FP16, 0, 1);
    return bits;
}

/* All 65,536 of them widen and narrow to themselves, and what is between two goes to the nearer, or the even one. */
TEST(test_fp16) {
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        uint16_t half = (uint16_t)bits;
        float wide;
        tagc_elements_read(&half, TAGC_ELEMENT_FP16, 0, 1, &wide);
        if ((bits & 0x7fff) > 0x7c00) {
            assert_true(isnan(wide));
            assert_true((half_bits(wide) & 0x7fff) > 0x7c00);
            continue;
        }
        assert_int_equal(half_bits(wide), bits);
        uint16_t next = (uint16_t)(bits + 1);
        float above;
        tagc_elements_read(&next, TAGC_ELEMENT_FP16, 0, 1, &above);
        if ((bits & 0x7fff) >= 0x7bff) continue; /* Inf comes next */
        float middle = (wide + above) / 2;
        assert_int_equal(half_bits(middle), bits & 1 ? next : bits);
        assert_int_equal(half_bits(nextafterf(middle, above)), next);
        assert_int_equal(half_bits(nextafterf(middle, wide)), bits);
    }
    assert_int_equal(half_bits(65519.996f), 0x7bff);
    assert_int_equal(half_bits(65520.0f), 0x7c00);
    assert_int_equal(half_bits(-1e30f), 0xfc00);
    uint16_t one = 0x3c00, two = 0x4000;
    float wide;
    tagc_elements_read(&one, TAGC_ELEMENT_FP16, 0, 1, &wide);
    assert_true(wide == 1.0f);
    tagc_elements_read(&two, TAGC_ELEMENT_FP16, 0, 1, &wide);
    assert_true(wide == 2.0f);
}
