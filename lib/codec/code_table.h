/* The table of a level. Included after code_body.h, with TABLE and LEVEL, its names, and
 *
 *   WRITE_CODES       the function that writes codes of gaps
 *   HAS_READERS       defined where the includer has NAME(read_codes) and NAME(check_codes) of its own
 *   STREAM(p, v)      stores a vector past the cache, p aligned; left out where that cannot be */

#include "codec/residual_body.h"

#ifndef HAS_READERS
KERNEL size_t NAME(read_codes)(const uint8_t *bytes, size_t n_codes, int bits, uint32_t *positions) {
    return NAME(read_from)(bytes, 0, n_codes, bits, 0, positions);
}

KERNEL size_t NAME(check_codes)(const uint8_t *bytes, size_t n_codes, int bits, size_t *end) {
    *end = 0;
    return NAME(check_from)(bytes, 0, n_codes, bits, end);
}
#endif

KERNEL void NAME(copy_around)(float *to, const float *from, size_t n) {
#ifdef STREAM
    for (; n > 0 && (uintptr_t)to % sizeof(VEC); n--) *to++ = *from++;
    size_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) STREAM(to + i, NAME(load)(from + i));
    for (; i < n; i++) to[i] = from[i];
    _mm_sfence();
#else
    memcpy(to, from, n * sizeof *to);
#endif
}

const tagc_code_kernels TABLE = {
    .name = LEVEL,
    .count_codes = NAME(count_codes),
    .write_codes = WRITE_CODES,
    .read_codes = NAME(read_codes),
    .check_codes = NAME(check_codes),
    .accumulate = NAME(accumulate),
    .largest = NAME(largest),
    .mean = NAME(mean),
    .refit = NAME(refit),
    .round = NAME(round),
    .dither = NAME(dither),
    .narrow = NAME(narrow),
    .widen_halves = NAME(widen_halves),
    .widen = NAME(widen),
    .add = NAME(add),
    .write_residual = NAME(write_residual),
    .put_int8 = NAME(put_int8),
    .read_residual = NAME(read_residual),
    .copy_around = NAME(copy_around),
};
