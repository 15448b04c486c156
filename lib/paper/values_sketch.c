/* Sends values in a count sketch: cells instead of values. The owner peels it, and then handles what did not peel. The union
 * alone decides whether it peels, so for a small union the owner searches a seed that works in advance.
 *
 * Cells and sums have 4 bytes each: fp32, or with fixed-point cells integers until tagc_sketch_to_values. */
#include "codec/elements.h"
#include "core/clock.h"
#include "paper/pack.h"
#include "paper/paper.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define TARGET_LOAD 0.75   /* items per cell; peeling is possible up to 0.818 */
#define HOPELESS_LOAD 0.82 /* no seed will help */
#define SPARE_CELLS 32     /* small sketches scatter more about the limit */
#define EARLY_ITEMS                                                                                          \
    65536 /* above this, planned while the cells travel: large sketches do not fail by chance */
#define MAX_ATTEMPTS 32
#define DIRT_PER_MAX 0.01f /* fp32 cells: the most that may be left in one, relative to the largest sum */

static size_t wanted_cells(const tagc_reducer *r, size_t n_items) {
    double wanted = tagc_paper_options_of(r)->ratio > 0 ? (double)r->shard / tagc_paper_options_of(r)->ratio
                                                        : (double)n_items / TARGET_LOAD + SPARE_CELLS;
    return (size_t)ceil(wanted);
}

/* All ranks compute the same shape: all know the number of items and the attempt. */
static tagc_sketch sketch_of(const tagc_reducer *r, int d, size_t n_items) {
    const uint32_t *attempt = tagc_paper_of(r)->sketch.attempt; /* NULL where only sizes are wanted */
    tagc_sketch sketch;
    tagc_sketch_init(&sketch, r->shard, wanted_cells(r, n_items),
                     tagc_paper_options_of(r)->seed + (attempt ? attempt[d] : 0));
    return sketch;
}

static size_t max_cells(const tagc_reducer *r) {
    tagc_sketch sketch;
    size_t wanted = wanted_cells(r, tagc_paper_of(r)->max_union);
    tagc_sketch_init(&sketch, r->shard, wanted, 0);
    /* A smaller request can be rounded up to a larger sketch: by 1 in 4096, or to the minimum. */
    return sketch.n_cells + wanted / 2048 + 96;
}

static size_t max_words(const tagc_reducer *r) {
    size_t n_cells = max_cells(r), n_union = tagc_paper_of(r)->max_union;
    return n_cells > n_union ? n_cells : n_union;
}

static size_t scratch_bytes(const tagc_reducer *r) {
    tagc_sketch sketch;
    tagc_sketch_init(&sketch, r->shard, max_cells(r), 0);
    return tagc_peeling_scratch_bytes(&sketch, tagc_paper_of(r)->max_union);
}

static void place(tagc_reducer *r, tagc_arena *arena) {
    tagc_paper *p = tagc_paper_of(r);
    tagc_sketching *s = &p->sketch;
    int is_fixed = tagc_paper_options_of(r)->cells == TAGC_CELLS_FIXED;
    s->fixed = tagc_arena_take(arena, is_fixed ? p->max_union : 0, sizeof *s->fixed);
    s->plan_memory = tagc_arena_take(arena, tagc_peeling_bytes(p->max_union), 1);
    s->n_left = tagc_arena_take(arena, (size_t)r->world_size, sizeof *s->n_left);
}

static uint64_t shard_bytes(const tagc_reducer *r, int d, size_t n) {
    return sketch_of(r, d, n).n_cells * sizeof(float);
}

static void make_plan(tagc_reducer *r, const tagc_union *own) {
    tagc_paper *p = tagc_paper_of(r);
    tagc_sketch sketch = sketch_of(r, r->rank, own->n);
    tagc_peeling_place(&p->sketch.plan, p->sketch.plan_memory, own->n);
    tagc_peeling_make(&p->sketch.plan, &sketch, own->positions, own->n, p->scratch);
    p->sketch.is_planned = 1;
}

static void plan_early(tagc_reducer *r, const tagc_union *own) {
    tagc_sketching *s = &tagc_paper_of(r)->sketch;
    if (own->n > EARLY_ITEMS) return;
    uint32_t *attempt = &s->attempt[r->rank];
    make_plan(r, own);
    if (s->plan.n_peeled == own->n ||
        (double)own->n > HOPELESS_LOAD * (double)sketch_of(r, r->rank, own->n).n_cells)
        return;
    while (s->plan.n_peeled < own->n && *attempt + 1 < MAX_ATTEMPTS) {
        ++*attempt;
        make_plan(r, own);
    }
}

static void plan(tagc_reducer *r, const tagc_union *own) {
    if (!tagc_paper_of(r)->sketch.is_planned) make_plan(r, own);
}

/* ---- encode ---- */

/* Rounding to fixed point leaves a remainder that fp32 holds exactly. It stays in the residual. */
static void keep_remainders(tagc_reducer *r, int d, const uint32_t *indices, const float *values, size_t n) {
    const tagc_sketching *s = &tagc_paper_of(r)->sketch;
    float *residual = tagc_reducer_fp32_row(r, r->now.residual, (size_t)d), unit = ldexpf(1.0f, -s->exponent);
    for (size_t j = 0; j < n; j++) {
        float remainder = values[j] - (float)s->fixed[j] * unit;
        residual[indices[j]] = remainder == 0 ? TAGC_ZERO_RESIDUAL : remainder;
    }
}

static void encode(tagc_reducer *r, int d, const tagc_union *of) {
    const tagc_paper *p = tagc_paper_of(r);
    tagc_sketch sketch = sketch_of(r, d, of->n);
    void *cells = p->value_send + (size_t)d * p->value_bytes;
    const uint32_t *indices = p->sent_indices + (size_t)d * r->k;
    const float *values = p->sent_values + (size_t)d * r->k;
    size_t n = p->n_sent[d];
    if (tagc_paper_options_of(r)->fill_union) {
        float *filled = tagc_paper_sums(r); /* free until decoding */
        tagc_pack(of->positions, of->n, indices, values, n,
                  tagc_reducer_fp32_row(r, r->now.residual, (size_t)d), filled);
        indices = of->positions;
        values = filled;
        n = of->n;
    }
    memset(cells, 0, sketch.n_cells * sizeof(float));
    if (tagc_paper_options_of(r)->cells == TAGC_CELLS_FIXED) {
        tagc_sketch_round(values, n, p->sketch.exponent, p->sketch.fixed);
        tagc_sketch_encode(TAGC_CELLS_FIXED, &sketch, indices, p->sketch.fixed, n, cells);
        keep_remainders(r, d, indices, values, n);
    } else {
        tagc_sketch_encode(TAGC_CELLS_FP32, &sketch, indices, values, n, cells);
    }
}

/* ---- decode ---- */

/* Adds the cells of all ranks in rank order, in the first rank's place. */
static void add(tagc_reducer *r, int q, size_t n) {
    if (q == 0) return;
    size_t n_cells = sketch_of(r, r->rank, n).n_cells;
    char *into = tagc_contribution(r, 0), *from = tagc_contribution(r, q);
    if (tagc_paper_options_of(r)->cells != TAGC_CELLS_FIXED) {
        tagc_sum_add((float *)into, (const float *)from, n_cells);
        return;
    }
    uint32_t *sums = (uint32_t *)into;
    for (size_t c = 0; c < n_cells; c++) sums[c] += ((const uint32_t *)from)[c];
}

/* fp32 sums of huge finite values can overflow. After peeling, the rest of an infinity is not a number either, so it is enough
 * to test the consumed cells. */
static int has_overflowed(const tagc_reducer *r, const void *cells, size_t n_cells, size_t n_items) {
    const tagc_paper *p = tagc_paper_of(r);
    if (tagc_paper_options_of(r)->cells == TAGC_CELLS_FIXED) return 0;
    double most_in_a_cell = (double)p->own_max_abs * r->world_size * (double)n_items;
    return most_in_a_cell > FLT_MAX && tagc_holds_nonfinite(cells, n_cells);
}

/* Peels the cells into `sums`. Returns 1 if the consumed cells contradict the union. */
static int peel(tagc_reducer *r, const tagc_sketch *sketch, const tagc_union *own, void *cells, void *sums) {
    tagc_paper *p = tagc_paper_of(r);
    const tagc_peeling *plan = &p->sketch.plan;
    const tagc_cells kind = (tagc_cells)tagc_paper_options_of(r)->cells;
    tagc_peeling_replay(kind, plan, sketch, own->positions, cells, sums);
    if (tagc_paper_options_of(r)->unpeeled == TAGC_UNPEELED_ESTIMATE)
        tagc_peeling_estimate(kind, plan, sketch, own->positions, cells, sums);
    return tagc_peeling_dirty(kind, plan, sketch, cells,
                              DIRT_PER_MAX * (float)r->world_size * p->own_max_abs);
}

static tagc_status peeled(tagc_reducer *r) {
    tagc_sketching *s = &tagc_paper_of(r)->sketch;
    TAGC_TRY(tagc_agree_end(r, tagc_paper_of(r)->n_union, s->n_left));
    if (r->now.stats.nonfinite) return tagc_paper_sums_ready(r);
    return r->now.n_told > 0 ? tagc_settle_leftovers(r) : tagc_sketch_to_values(r);
}

static tagc_status decode(tagc_reducer *r) {
    const tagc_paper *p = tagc_paper_of(r);
    tagc_union own = tagc_own_union(r);
    tagc_sketch sketch = sketch_of(r, r->rank, own.n);
    double start_s = tagc_clock_s();
    int is_dirty = peel(r, &sketch, &own, tagc_contribution(r, 0), tagc_paper_sums(r));
    size_t n_left = own.n - p->sketch.plan.n_peeled;
    if (has_overflowed(r, tagc_contribution(r, 0), sketch.n_cells, own.n))
        r->now.stats.nonfinite = 1;
    else if (is_dirty &&
             tagc_paper_options_of(r)->index != TAGC_INDEX_SUM1) /* whose unions are wrong by design */
        tagc_note_failure(
            r, tagc_fail(TAGC_ERR_CORRUPT, "shard %d: the sketch holds values outside the union", r->rank));
    r->now.stats.n_cells = sketch.n_cells;
    r->now.stats.load = (double)own.n / (double)sketch.n_cells;
    r->now.stats.peel_rounds = p->sketch.plan.n_rounds;
    r->now.stats.n_unpeeled = n_left;
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    int is_estimated = tagc_paper_options_of(r)->unpeeled == TAGC_UNPEELED_ESTIMATE;
    tagc_agree_begin(r, TAGC_ROUND_LAST, is_estimated ? 0 : (uint32_t)n_left);
    tagc_then(r, peeled, r->agreement, 1, TAGC_ROUND_LAST, TAGC_ROUND_LAST);
    return TAGC_OK;
}

tagc_status tagc_sketch_to_values(tagc_reducer *r) {
    float *sums = tagc_paper_sums(r), unit = ldexpf(1.0f, -tagc_paper_of(r)->sketch.exponent);
    size_t n = tagc_paper_options_of(r)->cells == TAGC_CELLS_FIXED ? tagc_own_union(r).n : 0;
    for (size_t j = 0; j < n; j++) {
        int32_t fixed;
        memcpy(&fixed, &sums[j], sizeof fixed);
        sums[j] = (float)fixed * unit;
    }
    return tagc_paper_sums_ready(r);
}

const tagc_coder tagc_coder_sketch = {
    .max_words = max_words,
    .scratch_bytes = scratch_bytes,
    .place = place,
    .shard_bytes = shard_bytes,
    .plan_early = plan_early,
    .encode = encode,
    .plan = plan,
    .add = add,
    .decode = decode,
    .posts = 1,
};
