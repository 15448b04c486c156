/* Whether compression pays, on both sides of each boundary. */
#include "../test.h"
#include "tagc/tagc.h"

#include <math.h>

#define UNKNOWN TAGC_VERDICT_UNKNOWN
#define PAYS TAGC_VERDICT_PAYS
#define ALIKE TAGC_VERDICT_NO_DIFFERENCE
#define COSTS TAGC_VERDICT_COSTS

static void check(double baseline_s, double compressed_s, double spread_s, tagc_verdict expected) {
    tagc_verdict seen = tagc_verdict_of(baseline_s, compressed_s, spread_s);
    if (seen != expected)
        fail_msg("%g s, %g s, spread %g s: %s instead of %s", baseline_s, compressed_s, spread_s,
                 tagc_verdict_name(seen), tagc_verdict_name(expected));
}

TEST(the_margin) {
    const double most = 1 + TAGC_VERDICT_MARGIN;
    check(1, 1, 0, ALIKE);
    check(2, 1, 0, PAYS);
    check(1, 2, 0, COSTS);
    for (double scale = 0x1p-1000; scale < 0x1p1000; scale *= 0x1p100) {
        double above = scale * nextafter(most, 2);
        check(scale * most, scale, 0, ALIKE);
        check(above, scale, 0, PAYS);
        check(scale, scale * most, 0, ALIKE);
        check(scale, above, 0, COSTS);
    }
}

TEST(the_spread) {
    check(1.5, 1, 0.25, PAYS);
    check(1.5, 1, nextafter(0.5, 0), PAYS);
    check(1.5, 1, 0.5, ALIKE);
    check(1.5, 1, 1e300, ALIKE);
    check(1, 1.5, nextafter(0.5, 0), COSTS);
    check(1, 1.5, 0.5, ALIKE);
    check(1.04, 1, 0.01, ALIKE); /* beyond the spread, within the margin */
}

TEST(what_is_no_time) {
    const double none[] = {0, -0.0, -1, (double)NAN, (double)INFINITY, -(double)INFINITY};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
        check(none[i], 1, 0, UNKNOWN);
        check(1, none[i], 0, UNKNOWN);
        check(none[i], none[i], 0, UNKNOWN);
        if (none[i] != 0) check(2, 1, none[i], UNKNOWN);
    }
    check(2, 1, -0.0, PAYS);
    check(2, 1, -1e-300, UNKNOWN);
}

TEST(names) {
    assert_string_equal(tagc_verdict_name(UNKNOWN), "unknown");
    assert_string_equal(tagc_verdict_name(PAYS), "pays");
    assert_string_equal(tagc_verdict_name(ALIKE), "makes no difference");
    assert_string_equal(tagc_verdict_name(COSTS), "costs");
    assert_string_equal(tagc_verdict_name(-1), "?");
    assert_string_equal(tagc_verdict_name(4), "?");
}
