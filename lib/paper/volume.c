/* Bytes of a step of sketch and packed, message by message as index.c, results.c and leftovers.c send them. */
#include "paper/paper.h"

#include <math.h>

/* An expected number need not be whole, but cells are. */
static double expected_bytes(tagc_reducer *r, const tagc_volume_data *data, int d) {
    const tagc_paper *p = tagc_paper_of(r);
    double n = data->n_union ? (double)data->n_union[d] : data->union_density * (double)r->shard;
    if (p->coder == &tagc_coder_packed) return n * sizeof(float);
    return (double)p->coder->shard_bytes(r, d, (size_t)llround(n));
}

tagc_status tagc_paper_volume(tagc_reducer *r, const tagc_volume_data *data, tagc_volume *v) {
    const tagc_paper *p = tagc_paper_of(r);
    if (!data || !(data->n_union || (data->union_density >= 0 && data->union_density <= 1)))
        return tagc_fail(TAGC_ERR_ARGUMENT, "union_density is %g, must be in [0, 1]",
                         data ? data->union_density : -1.0);
    double n_others = r->world_size - 1, message = (double)tagc_index_bytes(r);
    double n_own = data->n_union ? (double)data->n_union[r->rank] : data->union_density * (double)r->shard;
    v->sketching = p->coder == &tagc_coder_sketch;
    for (int b = 0; b < p->n_batches; b++) {
        double n_bytes = 0;
        for (int s = tagc_batch_begin(p, b); s < tagc_batch_end(r, b); s++)
            n_bytes += expected_bytes(r, data, tagc_partner_to(r, s));
        tagc_volume_add(v, TAGC_LEG_INDEX, message * (tagc_batch_end(r, b) - tagc_batch_begin(p, b)));
        tagc_volume_add(v, TAGC_LEG_VALUES, n_bytes);
    }
    tagc_volume_add(v, TAGC_LEG_INDEX, n_others * message); /* the union of the own shard */
    tagc_volume_add(v, TAGC_LEG_CONTROL, n_others * TAGC_WIRE_HEADER_BYTES);
    if (v->sketching) tagc_volume_add(v, TAGC_LEG_CONTROL, n_others * TAGC_WIRE_HEADER_BYTES);
    if (v->sketching && data->n_left) tagc_leftovers_volume(r, data->n_left, v);
    if (r->options.output != TAGC_OUTPUT_SHARD)
        tagc_volume_add(v, TAGC_LEG_RESULT, n_others * n_own * sizeof(float));
    return TAGC_OK;
}
