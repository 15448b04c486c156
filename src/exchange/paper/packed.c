/* Packed: all ranks know the union, so its values travel in its order, and adding them is all the owner does.
 */
#include "codec/paper/pack.h"
#include "codec/sum.h"
#include "core/clock.h"
#include "exchange/reducer.h"

#include <string.h>

void tagc_packed_encode(tagc_reducer *r, int d) {
    size_t row = (size_t)d * r->shard, kept = (size_t)d * r->k;
    float *packed = (float *)(r->value_send + (size_t)d * r->value_bytes);
    tagc_pack(r->list, r->n_union[d], r->kept_indices + kept, r->kept_values + kept, r->n_kept[d],
              r->options.fill_union ? r->spare->values + row : NULL, packed);
}

tagc_status tagc_packed_decode(tagc_reducer *r) {
    size_t n = r->n_union[r->rank];
    float *sums = tagc_sums(r);
    for (int q = 0; q < r->world_size; q++) {
        TAGC_TRY(tagc_contribution_wait(r, q));
        double start_s = tagc_clock_s();
        const float *from = (const float *)tagc_contribution(r, q);
        if (q == 0)
            memcpy(sums, from, n * sizeof *sums);
        else
            tagc_sum_add(sums, from, n);
        tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    }
    return TAGC_OK;
}
