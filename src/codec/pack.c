/* Packing and unpacking along the union index. One pass over memory each: the scattered accesses of a block
 * stay in the cache while it is worked on. */
#include "codec/pack.h"
#include "codec/select.h"

#include <string.h>

void tagc_pack(const uint32_t *union_indices, size_t n_union, const uint32_t *indices, const float *values,
               size_t n_kept, float *residual, float *packed) {
    size_t k = 0;
    for (size_t j = 0; j < n_union; j++) {
        uint32_t i = union_indices[j];
        if (k < n_kept && indices[k] == i) {
            packed[j] = values[k++];
        } else if (residual) {
            packed[j] = residual[i];
            residual[i] = TAGC_ZERO_RESIDUAL;
        } else {
            packed[j] = -0.0f;
        }
    }
}

void tagc_pack_add(float *into, const float *from, size_t n) {
    for (size_t i = 0; i < n; i++) into[i] += from[i];
}

void tagc_unpack(const uint32_t *union_indices, size_t n_union, const float *packed, float scale, float *out,
                 size_t n) {
    enum { BLOCK = 4096 }; /* 16 KiB of output: zeroed and filled while in the first-level cache */
    size_t j = 0;
    for (size_t begin = 0; begin < n; begin += BLOCK) {
        size_t end = n - begin < BLOCK ? n : begin + BLOCK;
        memset(out + begin, 0, (end - begin) * sizeof(float));
        for (; j < n_union && union_indices[j] < end; j++)
            out[union_indices[j]] = scale == 1 ? packed[j] : packed[j] * scale;
    }
}
