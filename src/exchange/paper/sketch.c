/* Count sketch as the carrier of values: cells instead of values, peeled by the owner, who then deals with
 * what did not peel. Whether it peels depends on the union alone, so a small union looks for a seed that
 * works beforehand. */
#include "codec/paper/pack.h"
#include "codec/paper/peel.h"
#include "codec/sum.h"
#include "core/clock.h"
#include "exchange/reducer.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define TARGET_LOAD 0.75   /* items per cell; the limit of peeling is 0.818 */
#define HOPELESS_LOAD 0.82 /* no seed will help */
#define SPARE_CELLS 32     /* small sketches scatter more about the limit */
#define EARLY_ITEMS                                                                                          \
    65536 /* more are planned while their cells travel: large sketches do not fail by chance */
#define MAX_ATTEMPTS 32
#define DIRT_PER_MAX 0.01f /* fp32 cells: what may be left in one, as a part of the largest sum */

static size_t wanted_cells(const tagc_reducer *r, size_t n_items) {
    double wanted = r->options.ratio > 0 ? (double)r->shard / r->options.ratio
                                         : (double)n_items / TARGET_LOAD + SPARE_CELLS;
    return (size_t)ceil(wanted);
}

/* Every rank comes to the same shape: all know the number of items and the attempt. */
static tagc_sketch sketch_of(const tagc_reducer *r, int d) {
    tagc_sketch sketch;
    tagc_sketch_init(&sketch, r->shard, wanted_cells(r, r->n_union[d]), r->options.seed + r->attempt[d]);
    return sketch;
}

size_t tagc_sketch_max_cells(const tagc_reducer *r) {
    tagc_sketch sketch;
    size_t wanted = wanted_cells(r, r->max_union);
    tagc_sketch_init(&sketch, r->shard, wanted, 0);
    /* A smaller wish can be rounded up to more: by 1 in 4096, or to the least. */
    return sketch.n_cells + wanted / 2048 + 96;
}

size_t tagc_sketch_scratch_bytes(const tagc_reducer *r) {
    tagc_sketch sketch;
    tagc_sketch_init(&sketch, r->shard, r->max_cells, 0);
    return tagc_peeling_scratch_bytes(&sketch, r->max_union);
}

uint64_t tagc_sketch_shard_bytes(const tagc_reducer *r, int d) {
    return sketch_of(r, d).n_cells * sizeof(float);
}

static void make_plan(tagc_reducer *r) {
    tagc_sketch sketch = sketch_of(r, r->rank);
    tagc_peeling_place(&r->plan, r->plan_memory, r->n_union[r->rank]);
    tagc_peeling_make(&r->plan, &sketch, r->list, r->n_union[r->rank], r->scratch);
    r->planned = 1;
}

void tagc_sketch_plan_early(tagc_reducer *r) {
    size_t n_items = r->n_union[r->rank];
    if (n_items > EARLY_ITEMS) return;
    uint32_t *attempt = &r->attempt[r->rank];
    make_plan(r);
    if (r->plan.n_peeled == n_items ||
        (double)n_items > HOPELESS_LOAD * (double)sketch_of(r, r->rank).n_cells)
        return;
    while (r->plan.n_peeled < n_items && *attempt + 1 < MAX_ATTEMPTS) {
        ++*attempt;
        make_plan(r);
    }
}

/* ---- encode ---- */

static float unit_of_fixed(const tagc_reducer *r) {
    return ldexpf(1.0f, -r->exponent);
}

/* Rounding to fixed point leaves a remainder that an fp32 holds exactly: it stays in the residual. */
static void keep_remainders(tagc_reducer *r, int d, const uint32_t *indices, const float *values, size_t n) {
    float *residual = r->spare->values + (size_t)d * r->shard, unit = unit_of_fixed(r);
    for (size_t j = 0; j < n; j++) {
        float remainder = values[j] - (float)r->fixed[j] * unit;
        residual[indices[j]] = remainder == 0 ? TAGC_ZERO_RESIDUAL : remainder;
    }
}

void tagc_sketch_encode_shard(tagc_reducer *r, int d) {
    tagc_sketch sketch = sketch_of(r, d);
    void *cells = r->value_send + (size_t)d * r->value_bytes;
    const uint32_t *indices = r->kept_indices + (size_t)d * r->k;
    const float *values = r->kept_values + (size_t)d * r->k;
    size_t n = r->n_kept[d];
    if (r->options.fill_union) {
        float *filled = tagc_sums(r); /* free until decoding */
        tagc_pack(r->list, r->n_union[d], indices, values, n, r->spare->values + (size_t)d * r->shard,
                  filled);
        indices = r->list;
        values = filled;
        n = r->n_union[d];
    }
    memset(cells, 0, sketch.n_cells * sizeof(float));
    if (r->options.cells == TAGC_CELLS_FIXED) {
        tagc_sketch_encode_fixed(&sketch, indices, values, n, r->exponent, cells, r->fixed);
        keep_remainders(r, d, indices, values, n);
    } else {
        tagc_sketch_encode(&sketch, indices, values, n, cells);
    }
}

/* ---- leftovers ---- */

/* What this rank put into the sketch of shard d at `position`: acc again, which is the old residual's secret.
 */
static float encoded_value(const tagc_reducer *r, int d, uint32_t position) {
    size_t at = (size_t)d * r->shard + position;
    if (!r->options.fill_union) {
        const uint32_t *indices = r->kept_indices + (size_t)d * r->k;
        size_t low = 0, high = r->n_kept[d];
        while (low < high) {
            size_t middle = low + (high - low) / 2;
            if (indices[middle] < position)
                low = middle + 1;
            else
                high = middle;
        }
        if (low == r->n_kept[d] || indices[low] != position) return TAGC_ZERO_RESIDUAL;
    }
    return r->gradient[at] + r->residual[at];
}

/* The same as 4 bytes that the owner adds: an fp32, or an integer in fixed point. */
static uint32_t encoded_word(const tagc_reducer *r, int d, uint32_t position) {
    float value = encoded_value(r, d, position);
    uint32_t word;
    if (r->options.cells == TAGC_CELLS_FIXED) return (uint32_t)lrintf(value * ldexpf(1.0f, r->exponent));
    memcpy(&word, &value, sizeof word);
    return word;
}

static uint32_t add_words(const tagc_reducer *r, uint32_t a, uint32_t b) {
    if (r->options.cells == TAGC_CELLS_FIXED) return a + b;
    float x, y;
    memcpy(&x, &a, sizeof x);
    memcpy(&y, &b, sizeof y);
    x += y;
    memcpy(&a, &x, sizeof a);
    return a;
}

static const uint32_t *left_positions(const tagc_reducer *r, int d) {
    return (const uint32_t *)(tagc_contribution(r, d) + TAGC_WIRE_HEADER_BYTES);
}

static uint64_t left_message_bytes(const tagc_reducer *r, int d) {
    return r->n_left[d] ? TAGC_WIRE_HEADER_BYTES + r->n_left[d] * sizeof(uint32_t) : 0;
}

/* Every owner tells all ranks where its leftovers are. */
static tagc_status exchange_positions(tagc_reducer *r) {
    char *own = tagc_contribution(r, r->rank);
    uint32_t *positions = (uint32_t *)(own + TAGC_WIRE_HEADER_BYTES);
    for (size_t i = 0; i < r->n_left[r->rank]; i++)
        positions[i] = r->list[r->plan.order[r->plan.n_peeled + i]];
    tagc_wire_header header = {.kind = TAGC_WIRE_LEFTOVER,
                               .rank = (uint32_t)r->rank,
                               .k = (uint32_t)r->k,
                               .n_elems = r->shard,
                               .n_items = r->n_left[r->rank],
                               .body_bytes = r->n_left[r->rank] * sizeof(uint32_t),
                               .step = r->step};
    tagc_wire_write(&header, own);
    tagc_message_clear(r->round);
    for (int q = 0; q < r->world_size; q++) {
        if (q == r->rank) continue;
        tagc_message_send(r->round, q, left_message_bytes(r, r->rank), 0);
        tagc_message_receive(r->round, q, left_message_bytes(r, q), (uint64_t)q * r->value_bytes);
    }
    tagc_message_post(r, r->round, TAGC_LEG_LEFTOVER, own, r->value_recv);
    return tagc_message_wait(r, r->round);
}

static tagc_status read_positions(tagc_reducer *r, int d) {
    if (r->n_left[d] == 0 || d == r->rank) return TAGC_OK;
    tagc_wire_header header, expected = {.kind = TAGC_WIRE_LEFTOVER,
                                         .rank = (uint32_t)d,
                                         .k = (uint32_t)r->k,
                                         .n_elems = r->shard,
                                         .step = r->step};
    tagc_status status = tagc_wire_read(tagc_contribution(r, d), left_message_bytes(r, d), &header);
    if (status == TAGC_OK) status = tagc_wire_expect(&header, &expected);
    if (status == TAGC_OK)
        status =
            tagc_wire_check_positions(left_positions(r, d), r->n_left[d], tagc_union_bits(r, d), r->shard);
    return status == TAGC_OK ? TAGC_OK : tagc_fail_in(status, "leftovers from rank %d", d);
}

static void return_to_residual(tagc_reducer *r, int d) {
    const uint32_t *positions = left_positions(r, d);
    float *residual = r->spare->values + (size_t)d * r->shard;
    for (size_t i = 0; i < r->n_left[d]; i++) {
        float value = encoded_value(r, d, positions[i]);
        if (value != 0)
            residual[positions[i]] = value; /* with the remainder that was there: acc as a whole */
    }
}

/* Leftovers of shard d, plainly, into row d of value_send. */
static void write_leftovers(tagc_reducer *r, int d, int valid) {
    const uint32_t *positions = left_positions(r, d);
    uint32_t *words = (uint32_t *)(r->value_send + (size_t)d * r->value_bytes);
    for (size_t i = 0; i < r->n_left[d]; i++) words[i] = valid ? encoded_word(r, d, positions[i]) : 0;
}

static tagc_status exchange_leftovers(tagc_reducer *r, uint32_t *sums) {
    size_t n_left = r->n_left[r->rank];
    tagc_message_clear(r->round);
    for (int q = 0; q < r->world_size; q++) {
        if (q == r->rank) continue;
        tagc_message_send(r->round, q, r->n_left[q] * sizeof(uint32_t), (uint64_t)q * r->value_bytes);
        tagc_message_receive(r->round, q, n_left * sizeof(uint32_t), (uint64_t)q * r->value_bytes);
    }
    tagc_message_post(r, r->round, TAGC_LEG_LEFTOVER, r->value_send, r->value_recv);
    TAGC_TRY(tagc_message_wait(r, r->round));
    double start_s = tagc_clock_s();
    const uint32_t *positions = left_positions(r, r->rank);
    for (size_t i = 0; i < n_left; i++) {
        uint32_t sum = 0;
        for (int q = 0; q < r->world_size; q++) {
            uint32_t word = q == r->rank ? encoded_word(r, q, positions[i])
                                         : ((const uint32_t *)tagc_contribution(r, q))[i];
            sum = q == 0 ? word : add_words(r, sum, word);
        }
        sums[r->plan.order[r->plan.n_peeled + i]] = sum;
    }
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    return TAGC_OK;
}

/* All ranks go through this when any shard has leftovers. */
static tagc_status settle_leftovers(tagc_reducer *r, uint32_t *sums) {
    TAGC_TRY(exchange_positions(r));
    double start_s = tagc_clock_s();
    for (int d = 0; d < r->world_size; d++) {
        tagc_status status = read_positions(r, d);
        tagc_note_failure(r, status);
        if (r->options.unpeeled == TAGC_UNPEELED_PACKED) {
            if (d != r->rank) write_leftovers(r, d, status == TAGC_OK);
        } else if (status == TAGC_OK) {
            return_to_residual(r, d);
        }
    }
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    if (r->options.unpeeled == TAGC_UNPEELED_PACKED) TAGC_TRY(exchange_leftovers(r, sums));
    tagc_agree_begin(r, 0);
    return tagc_agree_end(r);
}

/* ---- decode ---- */

/* Cells of all ranks added in rank order, in the first rank's place. */
static tagc_status add_cells(tagc_reducer *r, size_t n_cells) {
    char *into = tagc_contribution(r, 0);
    TAGC_TRY(tagc_contribution_wait(r, 0));
    for (int q = 1; q < r->world_size; q++) {
        TAGC_TRY(tagc_contribution_wait(r, q));
        double start_s = tagc_clock_s();
        const char *from = tagc_contribution(r, q);
        if (r->options.cells == TAGC_CELLS_FIXED) {
            uint32_t *sums = (uint32_t *)into;
            for (size_t c = 0; c < n_cells; c++) sums[c] += ((const uint32_t *)from)[c];
        } else {
            tagc_sum_add((float *)into, (const float *)from, n_cells);
        }
        tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    }
    return TAGC_OK;
}

/* fp32 sums of huge values that are finite one by one. What is left of an infinity after peeling is no number
 * either, so that looking at the consumed cells is enough. */
static int has_overflowed(const tagc_reducer *r, const void *cells, size_t n_cells, size_t n_items) {
    if (r->options.cells == TAGC_CELLS_FIXED) return 0;
    double most_in_a_cell = (double)r->own_max_abs * r->world_size * (double)n_items;
    return most_in_a_cell > FLT_MAX && tagc_holds_nonfinite(cells, n_cells);
}

/* Peels the cells into `sums`. Returns 1 when what is left in the cells contradicts the union. */
static int peel(tagc_reducer *r, const tagc_sketch *sketch, void *cells, void *sums) {
    int estimate = r->options.unpeeled == TAGC_UNPEELED_ESTIMATE;
    if (r->options.cells == TAGC_CELLS_FIXED) {
        tagc_peeling_replay_fixed(&r->plan, sketch, r->list, cells, sums);
        if (estimate) tagc_peeling_estimate_fixed(&r->plan, sketch, r->list, cells, sums);
        return tagc_peeling_dirty_fixed(&r->plan, sketch, cells);
    }
    tagc_peeling_replay(&r->plan, sketch, r->list, cells, sums);
    if (estimate) tagc_peeling_estimate(&r->plan, sketch, r->list, cells, sums);
    return tagc_peeling_dirty(&r->plan, sketch, cells, DIRT_PER_MAX * (float)r->world_size * r->own_max_abs);
}

tagc_status tagc_sketch_decode(tagc_reducer *r) {
    double start_s = tagc_clock_s();
    size_t n_items = r->n_union[r->rank];
    if (!r->planned) make_plan(r);
    tagc_sketch sketch = sketch_of(r, r->rank);
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    TAGC_TRY(add_cells(r, sketch.n_cells));

    start_s = tagc_clock_s();
    uint32_t *sums = (uint32_t *)tagc_sums(r);
    int is_dirty = peel(r, &sketch, tagc_contribution(r, 0), sums);
    if (has_overflowed(r, tagc_contribution(r, 0), sketch.n_cells, n_items))
        r->stats.nonfinite = 1;
    else if (is_dirty && r->options.index != TAGC_INDEX_SUM1) /* whose unions are wrong by design */
        tagc_note_failure(
            r, tagc_fail(TAGC_ERR_CORRUPT, "shard %d: the sketch holds values outside the union", r->rank));
    r->stats.n_cells = sketch.n_cells;
    r->stats.load = (double)n_items / (double)sketch.n_cells;
    r->stats.peel_rounds = r->plan.n_rounds;
    r->stats.n_unpeeled = n_items - r->plan.n_peeled;
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);

    tagc_agree_begin(r, r->options.unpeeled == TAGC_UNPEELED_ESTIMATE ? 0 : n_items - r->plan.n_peeled);
    TAGC_TRY(tagc_agree_end(r));
    if (r->stats.nonfinite) return TAGC_OK;
    uint64_t n_left = 0;
    for (int d = 0; d < r->world_size; d++) n_left += r->n_left[d];
    if (n_left > 0) TAGC_TRY(settle_leftovers(r, sums));
    if (r->options.cells != TAGC_CELLS_FIXED) return TAGC_OK;
    float unit = unit_of_fixed(r);
    for (size_t j = 0; j < n_items; j++) {
        int32_t fixed;
        memcpy(&fixed, &sums[j], sizeof fixed);
        float value = (float)fixed * unit;
        memcpy(&sums[j], &value, sizeof value);
    }
    return TAGC_OK;
}
