/* The end of a step of sketch and packed: the sums of the union become values of the output, in an all-reduce those of all
 * ranks. */
#include "core/clock.h"
#include "paper/pack.h"
#include "paper/paper.h"

#include <float.h>
#include <math.h>

/* Half of the range is reserved for rounding. */
int tagc_paper_can_overflow(const tagc_reducer *r) {
    return (double)tagc_paper_of(r)->max_abs * r->world_size > FLT_MAX / 2;
}

static void unpack(tagc_reducer *r, const tagc_union *of, const float *sums, float *output) {
    double start_s = tagc_clock_s();
    tagc_unpack(of->positions, of->n, sums, r->scale, output, r->shard);
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
}

static tagc_status unpack_results(tagc_reducer *r) {
    tagc_paper *p = tagc_paper_of(r);
    for (int d = 0; d < r->world_size; d++) {
        if (d == r->rank) continue;
        tagc_union of = tagc_union_of(r, d);
        unpack(r, &of, (const float *)(p->value_recv + (size_t)d * p->value_bytes),
               r->now.output + (size_t)d * r->shard);
    }
    return TAGC_OK;
}

/* All-reduce: all ranks know all unions, so the sums need no positions. */
static tagc_status exchange_results(tagc_reducer *r) {
    tagc_paper *p = tagc_paper_of(r);
    tagc_union own = tagc_own_union(r);
    tagc_message_clear(p->all_to_all);
    for (int q = 0; q < r->world_size; q++) {
        if (q == r->rank) continue;
        tagc_message_to(p->all_to_all, q, own.n * sizeof(float), 0);
        tagc_message_from(p->all_to_all, q, p->n_union[q] * sizeof(float), (uint64_t)q * p->value_bytes);
    }
    tagc_message_post(r, p->all_to_all, TAGC_ROUND_LAST, TAGC_LEG_RESULT, tagc_paper_sums(r), p->value_recv);
    unpack(r, &own, tagc_paper_sums(r), r->now.output + (size_t)r->rank * r->shard);
    tagc_then(r, unpack_results, p->all_to_all, 1, TAGC_NO_ROUND, 0);
    return TAGC_OK;
}

tagc_status tagc_paper_finish(tagc_reducer *r) {
    if (r->now.stats.nonfinite) {
        size_t n = r->options.output != TAGC_OUTPUT_SHARD ? (size_t)r->options.n_elems : r->shard;
        for (size_t i = 0; i < n; i++) r->now.output[i] = NAN;
        return TAGC_OK;
    }
    if (r->options.output != TAGC_OUTPUT_SHARD) return exchange_results(r);
    tagc_union own = tagc_own_union(r);
    unpack(r, &own, tagc_paper_sums(r), r->now.output);
    return TAGC_OK;
}

static tagc_status sums_agreed(tagc_reducer *r) {
    TAGC_TRY(tagc_agree_end(r, NULL, NULL));
    return tagc_paper_finish(r);
}

tagc_status tagc_paper_sums_ready(tagc_reducer *r) {
    if (r->now.stats.nonfinite || !tagc_paper_can_overflow(r)) return tagc_paper_finish(r);
    r->now.stats.nonfinite |= tagc_holds_nonfinite(tagc_paper_sums(r), tagc_own_union(r).n);
    tagc_agree_begin(r, TAGC_ROUND_LAST, 0);
    tagc_then(r, sums_agreed, r->agreement, 1, TAGC_ROUND_LAST, TAGC_ROUND_LAST);
    return TAGC_OK;
}
