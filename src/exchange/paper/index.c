/* The first half that sketch and packed share: select, tell each owner what was kept, learn the union of all.
 *
 *   worker | select 0 | select 1 | ... own | OR | plan | encode 0 | encode 1 | ... own | add, decode
 *   wire              | index 0  | index 1 ...   | unions, agreement | values 0 | values 1 ...
 *
 * Shard "0" here is the next rank's, and so on round, so that no two ranks send to one owner at the same
 * time. The new residual grows in the spare; only a step that succeeded on all ranks swaps it in. */
#include "codec/bitmap.h"
#include "codec/paper/nibble.h"
#include "codec/paper/pack.h"
#include "core/clock.h"
#include "exchange/reducer.h"

#include <float.h>
#include <math.h>
#include <string.h>

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

void tagc_indexed_place(tagc_reducer *r, tagc_arena *arena) {
    size_t n_ranks = (size_t)r->world_size;
    int is_fixed = r->options.cells == TAGC_CELLS_FIXED;
    r->k = tagc_select_count(r->shard, r->options.sparsity);
    r->sketching = r->options.exchange == TAGC_EXCHANGE_SKETCH && r->k < r->shard;
    r->max_union = r->k < r->shard / n_ranks ? r->k * n_ranks : r->shard;
    r->max_cells = r->sketching ? tagc_sketch_max_cells(r) : 0;
    r->index_bytes = TAGC_WIRE_HEADER_BYTES + tagc_aligned(tagc_wire_index_bytes(r->options.index, r->shard));
    r->value_bytes =
        tagc_aligned(TAGC_WIRE_HEADER_BYTES + larger(r->max_union, r->max_cells) * sizeof(float));

    tagc_messages_place(r, arena, 1, 2 * (r->world_size - 1));
    if (r->messages) {
        r->round = r->messages;
        r->index_out = r->messages + 1;
        r->value_out = r->index_out + (r->world_size - 1);
    }
    r->index_send = tagc_arena_take(arena, n_ranks, r->index_bytes);
    r->index_recv = tagc_arena_take(arena, n_ranks, r->index_bytes);
    r->value_send = tagc_arena_take(arena, n_ranks, r->value_bytes);
    r->value_recv = tagc_arena_take(arena, n_ranks, r->value_bytes);
    r->kept_indices = tagc_arena_take(arena, n_ranks * r->k, sizeof *r->kept_indices);
    r->kept_values = tagc_arena_take(arena, n_ranks * r->k, sizeof *r->kept_values);
    r->list = tagc_arena_take(arena, r->max_union, sizeof *r->list);
    r->bits = tagc_arena_take(arena, tagc_bitmap_bytes(r->shard), 1);
    r->fixed = tagc_arena_take(arena, r->sketching && is_fixed ? r->max_union : 0, sizeof *r->fixed);
    r->plan_memory = tagc_arena_take(arena, r->sketching ? tagc_peeling_bytes(r->max_union) : 0, 1);
    size_t select_bytes = tagc_select_scratch_bytes(r->shard, r->k, r->options.n_threads);
    r->scratch =
        tagc_arena_take(arena, larger(select_bytes, r->sketching ? tagc_sketch_scratch_bytes(r) : 0), 1);
    r->n_kept = tagc_arena_take(arena, n_ranks, sizeof *r->n_kept);
    r->n_union = tagc_arena_take(arena, n_ranks, sizeof *r->n_union);
    r->attempt = tagc_arena_take(arena, n_ranks, sizeof *r->attempt);
    r->n_left = tagc_arena_take(arena, n_ranks, sizeof *r->n_left);
}

static char *index_body(char *rows, const tagc_reducer *r, int row) {
    return rows + (size_t)row * r->index_bytes + TAGC_WIRE_HEADER_BYTES;
}

static uint64_t message_bytes(const tagc_reducer *r) {
    return TAGC_WIRE_HEADER_BYTES + tagc_wire_index_bytes(r->options.index, r->shard);
}

static tagc_wire_header header_of(const tagc_reducer *r, tagc_wire_kind kind, int rank) {
    return (tagc_wire_header){.kind = (int)kind,
                              .coding = r->options.index,
                              .rank = (uint32_t)rank,
                              .k = (uint32_t)r->k,
                              .n_elems = r->shard,
                              .body_bytes = message_bytes(r) - TAGC_WIRE_HEADER_BYTES,
                              .step = r->step};
}

/* ---- select and index, shard by shard ---- */

static float select_shard(tagc_reducer *r, int d) {
    size_t row = (size_t)d * r->shard, kept = (size_t)d * r->k;
    r->n_kept[d] = 0;
    if (r->stats.nonfinite) return 0; /* nothing of this step will count */
    tagc_selection selection;
    tagc_select(r->gradient + row, r->residual + row, r->spare->values + row, r->shard, r->k,
                r->kept_indices + kept, r->kept_values + kept, r->scratch, r->pool, &selection);
    if (selection.nonfinite) {
        r->stats.nonfinite = 1;
        return 0;
    }
    r->n_kept[d] = selection.n_kept;
    r->stats.n_kept += selection.n_kept;
    return selection.n_kept ? selection.max_abs : 0;
}

static void make_index(tagc_reducer *r, int d) {
    uint8_t *body = (uint8_t *)index_body(r->index_send, r, d);
    const uint32_t *indices = r->kept_indices + (size_t)d * r->k;
    if (r->options.index == TAGC_INDEX_SUM4)
        tagc_nibble_make(body, r->shard, indices, r->n_kept[d]);
    else
        tagc_bitmap_make(body, r->shard, indices, r->n_kept[d]);
}

static void select_and_send(tagc_reducer *r) {
    double now_s = tagc_clock_s();
    for (int s = 0; s < r->world_size; s++) { /* the last is the own shard */
        int d = tagc_partner_to(r, s), from = tagc_partner_from(r, s);
        float max_abs = select_shard(r, d);
        now_s = tagc_phase_end(r, TAGC_PHASE_SELECT, now_s);
        make_index(r, d);
        if (d != r->rank) {
            char *message = r->index_send + (size_t)d * r->index_bytes;
            tagc_wire_header header = header_of(r, TAGC_WIRE_INDEX, r->rank);
            header.n_items = (uint32_t)r->n_kept[d];
            header.max_abs = max_abs;
            tagc_wire_write(&header, message);
            tagc_message_pair(&r->index_out[s], d, message_bytes(r), from, message_bytes(r));
            tagc_message_post(r, &r->index_out[s], TAGC_LEG_INDEX, message,
                              r->index_recv + (size_t)from * r->index_bytes);
        } else {
            r->own_max_abs = max_abs;
        }
        now_s = tagc_phase_end(r, TAGC_PHASE_INDEX, now_s);
    }
}

/* ---- unions ---- */

/* An index or a union as it arrived in row `from` of index_recv. */
static tagc_status read_index(tagc_reducer *r, tagc_wire_kind kind, int from, size_t max_items,
                              tagc_wire_header *header) {
    tagc_wire_header expected = header_of(r, kind, from);
    const char *message = r->index_recv + (size_t)from * r->index_bytes;
    tagc_status status = tagc_wire_read(message, message_bytes(r), header);
    if (status == TAGC_OK) status = tagc_wire_expect(header, &expected);
    if (status == TAGC_OK && header->n_items > max_items)
        status = tagc_fail(TAGC_ERR_CORRUPT, "%u elements, at most %zu can be", header->n_items, max_items);
    if (status == TAGC_OK)
        status = tagc_wire_check_index(r->options.index, (const uint8_t *)message + TAGC_WIRE_HEADER_BYTES,
                                       r->shard, header->n_items, r->bits);
    if (status == TAGC_OK) return TAGC_OK;
    return tagc_fail_in(status, "%s from rank %d", kind == TAGC_WIRE_INDEX ? "index" : "union", from);
}

static void combine(tagc_reducer *r, int from) {
    uint8_t *into = (uint8_t *)index_body(r->index_send, r, r->rank);
    const uint8_t *arrived = (const uint8_t *)index_body(r->index_recv, r, from);
    switch (r->options.index) {
    case TAGC_INDEX_SUM4:
        tagc_nibble_add(into, arrived, r->shard);
        break;
    case TAGC_INDEX_SUM1:
        tagc_bitmap_add_bytes(into, arrived, r->shard);
        break;
    default:
        tagc_bitmap_or(into, arrived, r->shard);
    }
}

const uint8_t *tagc_union_bits(tagc_reducer *r, int d) {
    const char *body = index_body(d == r->rank ? r->index_send : r->index_recv, r, d);
    return tagc_wire_bits(r->options.index, (const uint8_t *)body, r->shard, r->bits);
}

size_t tagc_union_list(tagc_reducer *r, int d) {
    return r->n_union[d] ? tagc_bitmap_indices(tagc_union_bits(r, d), r->shard, r->list) : 0;
}

/* The union of the own shard, in place of the own index. After a failure it is empty, and says so in
 * agreement. */
static tagc_status make_union(tagc_reducer *r) {
    for (int s = 0; s + 1 < r->world_size; s++) {
        tagc_wire_header header;
        int from = tagc_partner_from(r, s);
        TAGC_TRY(tagc_message_wait(r, &r->index_out[s]));
        double start_s = tagc_clock_s();
        tagc_status status = read_index(r, TAGC_WIRE_INDEX, from, r->k, &header);
        tagc_note_failure(r, status);
        if (status == TAGC_OK) {
            combine(r, from);
            if (header.max_abs > r->own_max_abs) r->own_max_abs = header.max_abs;
        }
        tagc_phase_end(r, TAGC_PHASE_INDEX, start_s);
    }
    double start_s = tagc_clock_s();
    size_t n = tagc_bitmap_count(tagc_union_bits(r, r->rank), r->shard);
    if (n > r->max_union)
        tagc_note_failure(r, tagc_fail(TAGC_ERR_CORRUPT, "the union has %zu elements, at most %zu can be", n,
                                       r->max_union));
    if (r->failure != TAGC_OK) {
        memset(index_body(r->index_send, r, r->rank), 0, r->index_bytes - TAGC_WIRE_HEADER_BYTES);
        n = 0;
    }
    r->n_union[r->rank] = n;
    start_s = tagc_phase_end(r, TAGC_PHASE_INDEX, start_s);
    if (r->sketching) {
        tagc_union_list(r, r->rank);
        tagc_sketch_plan_early(r);
        tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    }
    return TAGC_OK;
}

static tagc_status exchange_unions(tagc_reducer *r) {
    char *own = r->index_send + (size_t)r->rank * r->index_bytes;
    tagc_wire_header header = header_of(r, TAGC_WIRE_UNION, r->rank);
    header.n_items = (uint32_t)r->n_union[r->rank];
    header.attempt = r->attempt[r->rank];
    header.max_abs = r->own_max_abs;
    tagc_wire_write(&header, own);
    tagc_message_clear(r->round);
    for (int q = 0; q < r->world_size; q++) {
        if (q == r->rank) continue;
        tagc_message_send(r->round, q, message_bytes(r), 0);
        tagc_message_receive(r->round, q, message_bytes(r), (uint64_t)q * r->index_bytes);
    }
    tagc_message_post(r, r->round, TAGC_LEG_INDEX, own, r->index_recv);
    TAGC_TRY(tagc_message_wait(r, r->round));

    double start_s = tagc_clock_s();
    r->max_abs = r->own_max_abs;
    for (int d = 0; d < r->world_size; d++) {
        if (d == r->rank) continue;
        tagc_status status = read_index(r, TAGC_WIRE_UNION, d, r->max_union, &header);
        tagc_note_failure(r, status);
        r->n_union[d] = status == TAGC_OK ? header.n_items : 0;
        r->attempt[d] = status == TAGC_OK ? header.attempt : 0;
        if (status == TAGC_OK && header.max_abs > r->max_abs) r->max_abs = header.max_abs;
    }
    for (int d = 0; d < r->world_size; d++) r->stats.n_union += r->n_union[d];
    r->exponent = tagc_sketch_scale_exponent(r->max_abs, r->world_size);
    tagc_phase_end(r, TAGC_PHASE_INDEX, start_s);
    return TAGC_OK;
}

/* ---- values ---- */

/* What a lossy index dropped of this rank's elements. Packed has no place for them: back to the residual. */
static void drop_lost(tagc_reducer *r, int d) {
    const uint8_t *bits = tagc_union_bits(r, d);
    uint32_t *indices = r->kept_indices + (size_t)d * r->k;
    float *values = r->kept_values + (size_t)d * r->k, *residual = r->spare->values + (size_t)d * r->shard;
    size_t n_in = 0;
    for (size_t j = 0; j < r->n_kept[d]; j++) {
        uint32_t at = indices[j];
        int in_union = bits[at / 8] >> (at % 8) & 1;
        r->stats.n_lost += !in_union;
        if (!in_union && !r->sketching) {
            residual[at] = values[j];
            continue;
        }
        indices[n_in] = at;
        values[n_in++] = values[j];
    }
    r->n_kept[d] = n_in;
}

static void encode(tagc_reducer *r, int d) {
    double start_s = tagc_clock_s();
    if (r->options.index == TAGC_INDEX_SUM1) drop_lost(r, d);
    if (!r->sketching || r->options.fill_union || d == r->rank) tagc_union_list(r, d);
    if (r->sketching)
        tagc_sketch_encode_shard(r, d);
    else
        tagc_packed_encode(r, d);
    tagc_phase_end(r, TAGC_PHASE_ENCODE, start_s);
}

static uint64_t shard_bytes(const tagc_reducer *r, int d) {
    return r->sketching ? tagc_sketch_shard_bytes(r, d) : r->n_union[d] * sizeof(float);
}

/* Encodes and sends shard after shard; the first is encoded while the ranks agree that they all have good
 * unions. */
static tagc_status send_values(tagc_reducer *r) {
    tagc_agree_begin(r, 0);
    if (r->failure == TAGC_OK && !r->stats.nonfinite) encode(r, tagc_partner_to(r, 0));
    TAGC_TRY(tagc_agree_end(r));
    if (r->stats.nonfinite) return TAGC_OK;
    for (int s = 0; s < r->world_size; s++) {
        int d = tagc_partner_to(r, s), from = tagc_partner_from(r, s);
        if (s > 0) encode(r, d);
        if (d == r->rank) break;
        tagc_message_pair(&r->value_out[s], d, shard_bytes(r, d), from, shard_bytes(r, r->rank));
        tagc_message_post(r, &r->value_out[s], TAGC_LEG_VALUES, r->value_send + (size_t)d * r->value_bytes,
                          r->value_recv + (size_t)from * r->value_bytes);
    }
    return TAGC_OK;
}

tagc_status tagc_contribution_wait(tagc_reducer *r, int from) {
    return from == r->rank ? TAGC_OK : tagc_message_wait(r, &r->value_out[tagc_partner_step(r, from)]);
}

/* The own shard comes first: its union is still in r->list, encoded last and decoded since. */
static void unpack(tagc_reducer *r, int d, const float *sums, float *output) {
    double start_s = tagc_clock_s();
    size_t n = d == r->rank ? r->n_union[d] : tagc_union_list(r, d);
    tagc_unpack(r->list, n, sums, r->scale, output, r->shard);
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
}

/* All-reduce: everybody knows all unions, so the sums need no positions either. */
static tagc_status exchange_results(tagc_reducer *r) {
    tagc_message_clear(r->round);
    for (int q = 0; q < r->world_size; q++) {
        if (q == r->rank) continue;
        tagc_message_send(r->round, q, r->n_union[r->rank] * sizeof(float), 0);
        tagc_message_receive(r->round, q, r->n_union[q] * sizeof(float), (uint64_t)q * r->value_bytes);
    }
    tagc_message_post(r, r->round, TAGC_LEG_RESULT, tagc_sums(r), r->value_recv);
    unpack(r, r->rank, tagc_sums(r), r->output + (size_t)r->rank * r->shard);
    TAGC_TRY(tagc_message_wait(r, r->round));
    for (int d = 0; d < r->world_size; d++)
        if (d != r->rank)
            unpack(r, d, (const float *)(r->value_recv + (size_t)d * r->value_bytes),
                   r->output + (size_t)d * r->shard);
    return TAGC_OK;
}

/* Values that are finite one by one can add up to more, also where cells were exact. All ranks know whether that can be;
 * half of the range is for what rounding adds. */
static tagc_status agree_on_sums(tagc_reducer *r) {
    if ((double)r->max_abs * r->world_size <= FLT_MAX / 2) return TAGC_OK;
    r->stats.nonfinite |= tagc_holds_nonfinite(tagc_sums(r), r->n_union[r->rank]);
    tagc_agree_begin(r, 0);
    return tagc_agree_end(r);
}

tagc_status tagc_indexed_step(tagc_reducer *r) {
    memset(r->attempt, 0, (size_t)r->world_size * sizeof *r->attempt);
    r->planned = 0;
    select_and_send(r);
    TAGC_TRY(make_union(r));
    TAGC_TRY(exchange_unions(r));
    TAGC_TRY(send_values(r));
    if (!r->stats.nonfinite) TAGC_TRY(r->sketching ? tagc_sketch_decode(r) : tagc_packed_decode(r));
    if (!r->stats.nonfinite) TAGC_TRY(agree_on_sums(r));
    if (r->stats.nonfinite) {
        size_t n = r->options.all_reduce ? (size_t)r->options.n_elems : r->shard;
        for (size_t i = 0; i < n; i++) r->output[i] = NAN;
        return TAGC_OK;
    }
    if (r->options.all_reduce) return exchange_results(r);
    unpack(r, r->rank, tagc_sums(r), r->output);
    return TAGC_OK;
}
