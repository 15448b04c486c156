/* Values that cannot be recovered from a sketch. Every owner sends their positions to all ranks. The ranks send the values
 * uncompressed, or return them to their residuals.
 *
 *   owners    --- positions of the leftovers of their shards ---> all
 *   all       --- policy "packed": their values, 4 bytes each ---> owners
 *   all       <-> agreement */
#include "core/clock.h"
#include "paper/index_body.h"
#include "paper/locate.h"
#include "paper/paper.h"

#include <math.h>
#include <string.h>

/* What this rank put into the sketch of shard d at `position`. Recomputed from gradient + old residual; the sum was never
 * stored. */
static float encoded_value(const tagc_reducer *r, int d, uint32_t position) {
    const tagc_paper *p = tagc_paper_of(r);
    size_t at = (size_t)d * r->shard + position;
    if (!tagc_paper_options_of(r)->fill_union) {
        const uint32_t *indices = p->sent_indices + (size_t)d * r->k;
        size_t low = 0, high = p->n_sent[d];
        while (low < high) {
            size_t middle = low + (high - low) / 2;
            if (indices[middle] < position)
                low = middle + 1;
            else
                high = middle;
        }
        if (low == p->n_sent[d] || indices[low] != position) return TAGC_ZERO_RESIDUAL;
    }
    return tagc_reducer_gradient(r)[at] + tagc_reducer_fp32_row(r, r->residual, 0)[at];
}

/* The same as a word for the owner to add. */
static uint32_t encoded_word(const tagc_reducer *r, int d, uint32_t position) {
    float value = encoded_value(r, d, position);
    int32_t fixed;
    if (tagc_paper_options_of(r)->cells != TAGC_CELLS_FIXED) return tagc_float_word(value);
    tagc_sketch_round(&value, 1, tagc_paper_of(r)->sketch.exponent, &fixed);
    return (uint32_t)fixed;
}

/* Positions behind a header, in the rows of contributions, which are unused by now. */
static const uint32_t *left_positions(const tagc_reducer *r, int d) {
    return (const uint32_t *)(tagc_contribution(r, d) + TAGC_WIRE_HEADER_BYTES);
}

static uint64_t positions_bytes(uint64_t n_left) {
    return n_left ? TAGC_WIRE_HEADER_BYTES + n_left * sizeof(uint32_t) : 0;
}

static tagc_status positions_here(tagc_reducer *r);

tagc_status tagc_settle_leftovers(tagc_reducer *r) {
    tagc_paper *p = tagc_paper_of(r);
    const tagc_sketching *s = &p->sketch;
    tagc_union union_ = tagc_own_union(r);
    char *own = tagc_contribution(r, r->rank);
    uint32_t *positions = (uint32_t *)(own + TAGC_WIRE_HEADER_BYTES);
    for (size_t i = 0; i < s->n_left[r->rank]; i++)
        positions[i] = union_.positions[s->plan.order[s->plan.n_peeled + i]];
    tagc_wire_header header = {.kind = TAGC_WIRE_LEFTOVER,
                               .rank = (uint32_t)r->rank,
                               .k = (uint32_t)r->k,
                               .n_elems = r->shard,
                               .unit = r->identity.unit,
                               .n_items = s->n_left[r->rank],
                               .body_bytes = s->n_left[r->rank] * sizeof(uint32_t),
                               .step = r->now.number};
    tagc_wire_write(&header, own);
    tagc_message_clear(p->all_to_all);
    for (int q = 0; q < r->world_size; q++) {
        if (q == r->rank) continue;
        tagc_message_to(p->all_to_all, q, positions_bytes(s->n_left[r->rank]), 0);
        tagc_message_from(p->all_to_all, q, positions_bytes(s->n_left[q]), (uint64_t)q * p->value_bytes);
    }
    tagc_message_post(r, p->all_to_all, TAGC_ROUND_LAST, TAGC_LEG_LEFTOVER, own, p->value_recv);
    tagc_then(r, positions_here, p->all_to_all, 1, TAGC_ROUND_LAST, TAGC_ROUND_LAST);
    return TAGC_OK;
}

static tagc_status read_positions(tagc_reducer *r, int d) {
    uint32_t n_left = tagc_paper_of(r)->sketch.n_left[d];
    if (n_left == 0 || d == r->rank) return TAGC_OK;
    tagc_wire_header header, expected = {.kind = TAGC_WIRE_LEFTOVER,
                                         .rank = (uint32_t)d,
                                         .k = (uint32_t)r->k,
                                         .n_elems = r->shard,
                                         .step = r->now.number};
    tagc_status status = tagc_wire_read(tagc_contribution(r, d), positions_bytes(n_left), &header);
    if (status == TAGC_OK) status = tagc_wire_expect_of(r->comm, &r->identity, d, &header, &expected);
    if (status == TAGC_OK)
        status = tagc_index_check_positions(left_positions(r, d), n_left, tagc_union_bits(r, d), r->shard);
    return status == TAGC_OK ? TAGC_OK
                             : tagc_fail_in(status, "leftovers from rank %d", tagc_comm_name(r->comm, d));
}

static void return_to_residual(tagc_reducer *r, int d) {
    const uint32_t *positions = left_positions(r, d);
    float *residual = tagc_reducer_fp32_row(r, r->now.residual, (size_t)d);
    for (size_t i = 0; i < tagc_paper_of(r)->sketch.n_left[d]; i++) {
        float value = encoded_value(r, d, positions[i]);
        if (value != 0)
            residual[positions[i]] = value; /* plus the remainder that was there: acc as a whole */
    }
}

/* Writes the leftovers of shard d, uncompressed, to row d of value_send. */
static void write_leftovers(tagc_reducer *r, int d, int valid) {
    const tagc_paper *p = tagc_paper_of(r);
    const uint32_t *positions = left_positions(r, d);
    uint32_t *words = (uint32_t *)(p->value_send + (size_t)d * p->value_bytes);
    for (size_t i = 0; i < p->sketch.n_left[d]; i++) words[i] = valid ? encoded_word(r, d, positions[i]) : 0;
}

static tagc_status settled(tagc_reducer *r) {
    TAGC_TRY(tagc_agree_end(r, NULL, NULL));
    return r->now.stats.nonfinite ? tagc_paper_sums_ready(r) : tagc_sketch_to_values(r);
}

static void agree(tagc_reducer *r) {
    tagc_agree_begin(r, TAGC_ROUND_LAST, 0);
    tagc_then(r, settled, r->agreement, 1, TAGC_ROUND_LAST, TAGC_ROUND_LAST);
}

/* Adds the words of all ranks, in rank order, to the sums of the peeled values. */
static tagc_status leftovers_here(tagc_reducer *r) {
    const tagc_sketching *s = &tagc_paper_of(r)->sketch;
    const uint32_t *positions = left_positions(r, r->rank);
    tagc_word *sums = (tagc_word *)tagc_paper_sums(r);
    double start_s = tagc_clock_s();
    for (size_t i = 0; i < s->n_left[r->rank]; i++) {
        uint32_t sum = 0;
        for (int q = 0; q < r->world_size; q++) {
            uint32_t word;
            memcpy(&word, tagc_contribution(r, q) + i * sizeof word, sizeof word);
            if (q == r->rank) word = encoded_word(r, q, positions[i]);
            sum = q == 0 ? word : tagc_word_sum((tagc_cells)tagc_paper_options_of(r)->cells, sum, word);
        }
        sums[s->plan.order[s->plan.n_peeled + i]] = sum;
    }
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    agree(r);
    return TAGC_OK;
}

static void post_leftovers(tagc_reducer *r) {
    tagc_paper *p = tagc_paper_of(r);
    const uint32_t *n_left = p->sketch.n_left;
    tagc_message_clear(p->all_to_all);
    for (int q = 0; q < r->world_size; q++) {
        if (q == r->rank) continue;
        tagc_message_to(p->all_to_all, q, n_left[q] * sizeof(uint32_t), (uint64_t)q * p->value_bytes);
        tagc_message_from(p->all_to_all, q, n_left[r->rank] * sizeof(uint32_t), (uint64_t)q * p->value_bytes);
    }
    tagc_message_post(r, p->all_to_all, TAGC_ROUND_LAST, TAGC_LEG_LEFTOVER, p->value_send, p->value_recv);
    tagc_then(r, leftovers_here, p->all_to_all, 1, TAGC_ROUND_LAST, TAGC_ROUND_LAST);
}

static tagc_status positions_here(tagc_reducer *r) {
    double start_s = tagc_clock_s();
    int is_packed = tagc_paper_options_of(r)->unpeeled == TAGC_UNPEELED_PACKED;
    for (int d = 0; d < r->world_size; d++) {
        tagc_status status = read_positions(r, d);
        tagc_note_failure(r, status);
        if (is_packed && d != r->rank) write_leftovers(r, d, status == TAGC_OK);
        if (!is_packed && status == TAGC_OK) return_to_residual(r, d);
    }
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    if (is_packed)
        post_leftovers(r);
    else
        agree(r);
    return TAGC_OK;
}

void tagc_leftovers_volume(const tagc_reducer *r, const uint64_t *n_left, tagc_volume *v) {
    uint64_t n_others = (uint64_t)r->world_size - 1, sum = 0, of_others = 0;
    for (int d = 0; d < r->world_size; d++) {
        sum += n_left[d];
        of_others += d == r->rank ? 0 : n_left[d];
    }
    if (sum == 0 || tagc_paper_options_of(r)->unpeeled == TAGC_UNPEELED_ESTIMATE) return;
    tagc_volume_add(v, TAGC_LEG_LEFTOVER, (double)(n_others * positions_bytes(n_left[r->rank])));
    if (tagc_paper_options_of(r)->unpeeled == TAGC_UNPEELED_PACKED)
        tagc_volume_add(v, TAGC_LEG_LEFTOVER, (double)of_others * sizeof(uint32_t));
    tagc_volume_add(v, TAGC_LEG_CONTROL, (double)(n_others * TAGC_WIRE_HEADER_BYTES));
}
