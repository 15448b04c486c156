/* The common part of sketch and packed: select, send each owner an index, receive the union, send its values.
 *
 *   worker | select 0 | select 1 | ... own | OR | plan | encode 0 | encode 1 | ... own | add, decode
 *   wire              | index 0  | index 1 ...   | unions, agreement | values 0 | values 1 ...
 *
 * Shard "0" is the next rank's, and so on, so that no two ranks send to one owner at the same time. If shards are small or the
 * transport has no lanes, all travel in one message. The new residual is made in a spare, and swapped in only if the step
 * succeeded on all ranks.
 *
 * Arena, in bytes per element of the unit at W = 2, θ = 98.75 % and index or:
 *
 *   | index_send 1/8 | index_recv 1/8 | value_send 0.1 | value_recv 0.1 | sent 0.1 |
 *   | positions, bits, scratch, plan: of one shard | counts per rank | */
#include "codec/bitmap.h"
#include "core/clock.h"
#include "paper/index_body.h"
#include "paper/nibble.h"
#include "paper/paper.h"

#include <string.h>

enum { BATCH_BYTES = 65536 }; /* a message has at least this many bytes of indices, if there are as many */

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

/* With k = n a sketch would only be larger. */
static const tagc_coder *choose_coder(const tagc_reducer *r) {
    int is_sketch = r->options.exchange == TAGC_EXCHANGE_SKETCH && r->k < r->shard;
    return is_sketch ? &tagc_coder_sketch : &tagc_coder_packed;
}

/* The same on all ranks, whatever their k. */
static void choose_batch(tagc_reducer *r) {
    tagc_paper *p = tagc_paper_of(r);
    size_t n = (BATCH_BYTES + p->index_bytes - 1) / p->index_bytes;
    int n_partners = r->world_size - 1, is_one = r->comm && !tagc_comm_has_lanes(r->comm);
    p->batch = is_one || n >= (size_t)n_partners ? n_partners : (int)n;
    p->n_batches = n_partners ? (n_partners + p->batch - 1) / p->batch : 0;
}

static void place(tagc_reducer *r, tagc_arena *arena) {
    tagc_paper *p = tagc_paper_of(r);
    size_t n_ranks = (size_t)r->world_size;
    r->k = tagc_select_count(r->shard, r->options.sparsity);
    p->coder = choose_coder(r);
    p->max_union = r->k < r->shard / n_ranks ? r->k * n_ranks : r->shard;
    p->index_bytes = TAGC_WIRE_HEADER_BYTES +
                     tagc_aligned(tagc_index_body_bytes(tagc_paper_options_of(r)->index, r->shard));
    p->value_bytes =
        tagc_aligned(TAGC_WIRE_HEADER_BYTES + larger(p->max_union, p->coder->max_words(r)) * sizeof(float));
    choose_batch(r);
    tagc_room rooms[] = {{1, r->world_size - 1}, {2 * p->n_batches, p->batch}};
    tagc_messages_place(r, arena, rooms, 2);
    if (r->messages) {
        p->all_to_all = r->messages;
        p->index_out = r->messages + 1;
        p->value_out = p->index_out + p->n_batches;
    }
    p->index_send = tagc_arena_take(arena, n_ranks, p->index_bytes);
    p->index_recv = tagc_arena_take(arena, n_ranks, p->index_bytes);
    p->value_send = tagc_arena_take(arena, n_ranks, p->value_bytes);
    p->value_recv = tagc_arena_take(arena, n_ranks, p->value_bytes);
    p->sent_indices = tagc_arena_take(arena, n_ranks * r->k, sizeof *p->sent_indices);
    p->sent_values = tagc_arena_take(arena, n_ranks * r->k, sizeof *p->sent_values);
    p->own_positions = tagc_arena_take(arena, p->max_union, sizeof *p->own_positions);
    p->other_positions = tagc_arena_take(arena, p->max_union, sizeof *p->other_positions);
    p->bits = tagc_arena_take(arena, tagc_bitmap_bytes(r->shard), 1);
    size_t select_bytes = tagc_select_scratch_bytes(r->shard, r->k, r->options.n_threads);
    p->scratch = tagc_arena_take(arena, larger(select_bytes, p->coder->scratch_bytes(r)), 1);
    p->n_sent = tagc_arena_take(arena, n_ranks, sizeof *p->n_sent);
    p->n_union = tagc_arena_take(arena, n_ranks, sizeof *p->n_union);
    p->sketch.attempt = tagc_arena_take(arena, n_ranks, sizeof *p->sketch.attempt);
    p->coder->place(r, arena);
}

static char *index_body(char *rows, const tagc_reducer *r, int row) {
    const tagc_paper *p = tagc_paper_of(r);
    return rows + (size_t)row * p->index_bytes + TAGC_WIRE_HEADER_BYTES;
}

uint64_t tagc_index_bytes(const tagc_reducer *r) {
    return TAGC_WIRE_HEADER_BYTES + tagc_index_body_bytes(tagc_paper_options_of(r)->index, r->shard);
}

static tagc_wire_header header_of(const tagc_reducer *r, tagc_wire_kind kind, int rank) {
    return (tagc_wire_header){.kind = (int)kind,
                              .coding = tagc_paper_options_of(r)->index,
                              .rank = (uint32_t)rank,
                              .k = (uint32_t)r->k,
                              .n_elems = r->shard,
                              .unit = r->identity.unit,
                              .body_bytes = tagc_index_bytes(r) - TAGC_WIRE_HEADER_BYTES,
                              .step = r->now.number};
}

/* ---- select and index, shard by shard ---- */

static float select_shard(tagc_reducer *r, int d) {
    const tagc_paper *p = tagc_paper_of(r);
    size_t row = (size_t)d * r->shard, sent = (size_t)d * r->k;
    p->n_sent[d] = 0;
    if (r->now.stats.nonfinite) return 0; /* nothing of this step will count */
    tagc_selection selection;
    tagc_select(tagc_reducer_gradient(r) + row, tagc_reducer_fp32_row(r, r->residual, (size_t)d),
                tagc_reducer_fp32_row(r, r->now.residual, (size_t)d), r->shard, r->k, p->sent_indices + sent,
                p->sent_values + sent, p->scratch, r->pool, &selection);
    if (selection.nonfinite) {
        r->now.stats.nonfinite = 1;
        return 0;
    }
    p->n_sent[d] = selection.n_sent;
    r->now.stats.n_sent += selection.n_sent;
    return selection.n_sent ? selection.max_abs : 0;
}

static void make_index(tagc_reducer *r, int d) {
    const tagc_paper *p = tagc_paper_of(r);
    uint8_t *body = (uint8_t *)index_body(p->index_send, r, d);
    const uint32_t *indices = p->sent_indices + (size_t)d * r->k;
    if (tagc_paper_options_of(r)->index == TAGC_INDEX_SUM4)
        tagc_nibble_make(body, r->shard, indices, p->n_sent[d]);
    else
        tagc_bitmap_make(body, r->shard, indices, p->n_sent[d]);
}

/* Into its row, with a header. */
static void write_index(tagc_reducer *r, int d, float max_abs) {
    tagc_paper *p = tagc_paper_of(r);
    make_index(r, d);
    if (d == r->rank) {
        p->own_max_abs = max_abs;
        return;
    }
    tagc_wire_header header = header_of(r, TAGC_WIRE_INDEX, r->rank);
    header.n_items = (uint32_t)p->n_sent[d];
    header.max_abs = max_abs;
    tagc_wire_write(&header, p->index_send + (size_t)d * p->index_bytes);
}

static void post_indices(tagc_reducer *r, int b) {
    tagc_paper *p = tagc_paper_of(r);
    tagc_message *message = &p->index_out[b];
    tagc_message_clear(message);
    for (int s = tagc_batch_begin(p, b); s < tagc_batch_end(r, b); s++) {
        int to = tagc_partner_to(r, s), from = tagc_partner_from(r, s);
        tagc_message_to(message, to, tagc_index_bytes(r), (uint64_t)to * p->index_bytes);
        tagc_message_from(message, from, tagc_index_bytes(r), (uint64_t)from * p->index_bytes);
    }
    tagc_message_post(r, message, TAGC_ROUND_INDEX, TAGC_LEG_INDEX, p->index_send, p->index_recv);
}

static tagc_status combine_next(tagc_reducer *r);

static tagc_status select_and_send(tagc_reducer *r) {
    tagc_paper *p = tagc_paper_of(r);
    double now_s = tagc_clock_s();
    for (int s = 0, b = 0; s < r->world_size; s++) { /* the last is the own shard */
        int d = tagc_partner_to(r, s);
        float max_abs = select_shard(r, d);
        now_s = tagc_phase_end(r, TAGC_PHASE_SELECT, now_s);
        write_index(r, d, max_abs);
        if (b < p->n_batches && s + 1 == tagc_batch_end(r, b)) post_indices(r, b++);
        now_s = tagc_phase_end(r, TAGC_PHASE_INDEX, now_s);
    }
    p->n_done = 0;
    tagc_then(r, combine_next, p->index_out, p->n_batches > 0, TAGC_ROUND_UNION, TAGC_ROUND_UNION);
    return TAGC_OK;
}

/* ---- unions ---- */

/* An index or a union that arrived in row `from` of index_recv. */
static tagc_status read_index(tagc_reducer *r, tagc_wire_kind kind, int from, size_t max_items,
                              tagc_wire_header *header) {
    const tagc_paper *p = tagc_paper_of(r);
    tagc_wire_header expected = header_of(r, kind, from);
    const char *message = p->index_recv + (size_t)from * p->index_bytes;
    tagc_status status = tagc_wire_read(message, tagc_index_bytes(r), header);
    if (status == TAGC_OK) status = tagc_wire_expect_of(r->comm, &r->identity, from, header, &expected);
    if (status == TAGC_OK && header->n_items > max_items)
        status = tagc_fail(TAGC_ERR_CORRUPT, "%u elements, at most %zu can be", header->n_items, max_items);
    if (status == TAGC_OK)
        status = tagc_index_check(tagc_paper_options_of(r)->index,
                                  (const uint8_t *)message + TAGC_WIRE_HEADER_BYTES, r->shard,
                                  header->n_items, p->bits);
    if (status == TAGC_OK) return TAGC_OK;
    return tagc_fail_in(status, "%s from rank %d", kind == TAGC_WIRE_INDEX ? "index" : "union",
                        tagc_comm_name(r->comm, from));
}

static void combine(tagc_reducer *r, int from) {
    const tagc_paper *p = tagc_paper_of(r);
    uint8_t *into = (uint8_t *)index_body(p->index_send, r, r->rank);
    const uint8_t *arrived = (const uint8_t *)index_body(p->index_recv, r, from);
    switch (tagc_paper_options_of(r)->index) {
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
    const tagc_paper *p = tagc_paper_of(r);
    const char *body = index_body(d == r->rank ? p->index_send : p->index_recv, r, d);
    return tagc_index_bits(tagc_paper_options_of(r)->index, (const uint8_t *)body, r->shard, p->bits);
}

tagc_union tagc_union_of(tagc_reducer *r, int d) {
    tagc_paper *p = tagc_paper_of(r);
    uint32_t *positions = d == r->rank ? p->own_positions : p->other_positions;
    size_t n = p->n_union[d];
    if (n) tagc_bitmap_indices(tagc_union_bits(r, d), r->shard, positions);
    return (tagc_union){.n = n, .positions = positions};
}

tagc_union tagc_own_union(const tagc_reducer *r) {
    const tagc_paper *p = tagc_paper_of(r);
    return (tagc_union){.n = p->n_union[r->rank], .positions = p->own_positions};
}

/* Replaces the index of the own shard with its union. After a failure the union is empty, and the agreement says so. */
static void make_union(tagc_reducer *r) {
    tagc_paper *p = tagc_paper_of(r);
    double start_s = tagc_clock_s();
    size_t n = tagc_bitmap_count(tagc_union_bits(r, r->rank), r->shard);
    if (n > p->max_union)
        tagc_note_failure(r, tagc_fail(TAGC_ERR_CORRUPT, "the union has %zu elements, at most %zu can be", n,
                                       p->max_union));
    if (r->now.failure != TAGC_OK) {
        memset(index_body(p->index_send, r, r->rank), 0, p->index_bytes - TAGC_WIRE_HEADER_BYTES);
        n = 0;
    }
    p->n_union[r->rank] = n;
    tagc_union own = tagc_union_of(r, r->rank);
    start_s = tagc_phase_end(r, TAGC_PHASE_INDEX, start_s);
    p->coder->plan_early(r, &own);
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
}

static tagc_status read_unions(tagc_reducer *r);

static void post_unions(tagc_reducer *r) {
    tagc_paper *p = tagc_paper_of(r);
    char *own = p->index_send + (size_t)r->rank * p->index_bytes;
    tagc_wire_header header = header_of(r, TAGC_WIRE_UNION, r->rank);
    header.n_items = (uint32_t)p->n_union[r->rank];
    header.attempt = p->sketch.attempt[r->rank];
    header.max_abs = p->own_max_abs;
    tagc_wire_write(&header, own);
    tagc_message_clear(p->all_to_all);
    for (int q = 0; q < r->world_size; q++) {
        if (q == r->rank) continue;
        tagc_message_to(p->all_to_all, q, tagc_index_bytes(r), 0);
        tagc_message_from(p->all_to_all, q, tagc_index_bytes(r), (uint64_t)q * p->index_bytes);
    }
    tagc_message_post(r, p->all_to_all, TAGC_ROUND_UNION, TAGC_LEG_INDEX, own, p->index_recv);
    tagc_then(r, read_unions, p->all_to_all, 1, TAGC_ROUND_AGREE, TAGC_ROUND_AGREE);
}

/* One batch of indices has arrived. After the last, the union is sent. */
static tagc_status combine_next(tagc_reducer *r) {
    tagc_paper *p = tagc_paper_of(r);
    int b = p->n_done++;
    for (int s = tagc_batch_begin(p, b); b < p->n_batches && s < tagc_batch_end(r, b); s++) {
        tagc_wire_header header;
        int from = tagc_partner_from(r, s);
        double start_s = tagc_clock_s();
        tagc_status status = read_index(r, TAGC_WIRE_INDEX, from, r->k, &header);
        tagc_note_failure(r, status);
        if (status == TAGC_OK) {
            combine(r, from);
            if (header.max_abs > p->own_max_abs) p->own_max_abs = header.max_abs;
        }
        tagc_phase_end(r, TAGC_PHASE_INDEX, start_s);
    }
    if (p->n_done < p->n_batches) {
        tagc_then(r, combine_next, &p->index_out[p->n_done], 1, TAGC_ROUND_UNION, TAGC_ROUND_UNION);
        return TAGC_OK;
    }
    make_union(r);
    post_unions(r);
    return TAGC_OK;
}

/* ---- values ---- */

/* Elements of this rank that a lossy index dropped. packed has no place for them: they return to the residual. */
static void drop_lost(tagc_reducer *r, int d) {
    tagc_paper *p = tagc_paper_of(r);
    const uint8_t *bits = tagc_union_bits(r, d);
    uint32_t *indices = p->sent_indices + (size_t)d * r->k;
    float *values = p->sent_values + (size_t)d * r->k,
          *residual = tagc_reducer_fp32_row(r, r->now.residual, (size_t)d);
    size_t n_in = 0;
    for (size_t j = 0; j < p->n_sent[d]; j++) {
        uint32_t at = indices[j];
        int in_union = bits[at / 8] >> (at % 8) & 1;
        r->now.stats.n_lost += !in_union;
        if (!in_union && p->coder == &tagc_coder_packed) {
            residual[at] = values[j];
            continue;
        }
        indices[n_in] = at;
        values[n_in++] = values[j];
    }
    p->n_sent[d] = n_in;
}

static void encode(tagc_reducer *r, int d) {
    const tagc_coder *coder = tagc_paper_of(r)->coder;
    double start_s = tagc_clock_s();
    if (tagc_paper_options_of(r)->index == TAGC_INDEX_SUM1) drop_lost(r, d);
    tagc_union of = {.n = tagc_paper_of(r)->n_union[d]};
    if (d == r->rank)
        of = tagc_own_union(r);
    else if (coder->needs_positions || tagc_paper_options_of(r)->fill_union)
        of = tagc_union_of(r, d);
    coder->encode(r, d, &of);
    tagc_phase_end(r, TAGC_PHASE_ENCODE, start_s);
}

static uint64_t shard_bytes(const tagc_reducer *r, int d) {
    const tagc_paper *p = tagc_paper_of(r);
    return p->coder->shard_bytes(r, d, p->n_union[d]);
}

static void post_values(tagc_reducer *r, int b) {
    tagc_paper *p = tagc_paper_of(r);
    tagc_message *message = &p->value_out[b];
    tagc_message_clear(message);
    for (int s = tagc_batch_begin(p, b); s < tagc_batch_end(r, b); s++) {
        int to = tagc_partner_to(r, s), from = tagc_partner_from(r, s);
        tagc_message_to(message, to, shard_bytes(r, to), (uint64_t)to * p->value_bytes);
        tagc_message_from(message, from, shard_bytes(r, r->rank), (uint64_t)from * p->value_bytes);
    }
    tagc_message_post(r, message, TAGC_ROUND_VALUES, TAGC_LEG_VALUES, p->value_send, p->value_recv);
}

/* The round of the transfers that follow the values, if any. */
static int round_after_values(const tagc_reducer *r) {
    int posts = tagc_paper_of(r)->coder->posts || r->options.output != TAGC_OUTPUT_SHARD ||
                tagc_paper_can_overflow(r);
    return posts ? TAGC_ROUND_LAST : TAGC_NO_ROUND;
}

/* The message with the contribution of rank q to the own shard. */
static tagc_message *contribution_of(const tagc_reducer *r, int q) {
    const tagc_paper *p = tagc_paper_of(r);
    return q == r->rank ? NULL : &p->value_out[tagc_partner_step(r, q) / p->batch];
}

/* Adds contributions in rank order, as many as have arrived. */
static tagc_status add_values(tagc_reducer *r) {
    tagc_paper *p = tagc_paper_of(r);
    tagc_union own = tagc_own_union(r);
    while (p->n_done < r->world_size) {
        tagc_message *message = contribution_of(r, p->n_done);
        if (message && !tagc_message_done(r, message)) {
            tagc_then(r, add_values, message, 1, round_after_values(r), TAGC_ROUND_LAST);
            return TAGC_OK;
        }
        if (message) TAGC_TRY(tagc_message_wait(r, message));
        double start_s = tagc_clock_s();
        p->coder->add(r, p->n_done++, own.n);
        tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    }
    return p->coder->decode(r);
}

/* All ranks have valid unions: encodes and sends shard after shard. */
static tagc_status send_values(tagc_reducer *r) {
    tagc_paper *p = tagc_paper_of(r);
    TAGC_TRY(tagc_agree_end(r, NULL, NULL));
    if (r->now.stats.nonfinite) return tagc_paper_finish(r);
    int n_ahead = p->n_done;
    for (int s = 0, b = 0; s < r->world_size; s++) {
        if (s >= n_ahead) encode(r, tagc_partner_to(r, s));
        if (b < p->n_batches && s + 1 == tagc_batch_end(r, b)) post_values(r, b++);
    }
    tagc_union own = tagc_own_union(r);
    double start_s = tagc_clock_s();
    p->coder->plan(r, &own);
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    p->n_done = 0;
    tagc_then(r, add_values, contribution_of(r, 0), r->rank != 0, round_after_values(r), TAGC_ROUND_LAST);
    return TAGC_OK;
}

/* While the ranks agree, encodes the first shard, or all other ranks' shards if they travel in one message. */
static tagc_status read_unions(tagc_reducer *r) {
    tagc_paper *p = tagc_paper_of(r);
    tagc_wire_header header;
    double start_s = tagc_clock_s();
    p->max_abs = p->own_max_abs;
    for (int d = 0; d < r->world_size; d++) {
        if (d == r->rank) continue;
        tagc_status status = read_index(r, TAGC_WIRE_UNION, d, p->max_union, &header);
        tagc_note_failure(r, status);
        p->n_union[d] = status == TAGC_OK ? header.n_items : 0;
        p->sketch.attempt[d] = status == TAGC_OK ? header.attempt : 0;
        if (status == TAGC_OK && header.max_abs > p->max_abs) p->max_abs = header.max_abs;
    }
    for (int d = 0; d < r->world_size; d++) r->now.stats.n_union += p->n_union[d];
    p->sketch.exponent = tagc_sketch_scale_exponent(p->max_abs, r->world_size);
    tagc_phase_end(r, TAGC_PHASE_INDEX, start_s);
    tagc_agree_begin(r, TAGC_ROUND_AGREE, 0);
    p->n_done = 0;
    int n_ahead = p->n_batches > 1 ? 1 : r->world_size - 1;
    while (r->now.failure == TAGC_OK && !r->now.stats.nonfinite && p->n_done < n_ahead)
        encode(r, tagc_partner_to(r, p->n_done++));
    tagc_then(r, send_values, r->agreement, 1, TAGC_ROUND_VALUES, TAGC_ROUND_VALUES);
    return TAGC_OK;
}

static tagc_status start(tagc_reducer *r) {
    tagc_paper *p = tagc_paper_of(r);
    memset(p->sketch.attempt, 0, (size_t)r->world_size * sizeof *p->sketch.attempt);
    p->sketch.is_planned = 0;
    tagc_then(r, select_and_send, NULL, 0, TAGC_ROUND_INDEX, TAGC_ROUND_INDEX);
    return TAGC_OK;
}

/* ---- the table ---- */

static uint64_t residual_elems(const tagc_reducer_options *options) {
    return options->n_elems;
}

/* They differ in how the values travel (choose_coder), and in nothing else. */
#define TABLE(exchange)                                                                                      \
    {                                                                                                        \
        .id = (exchange), .state_bytes = sizeof(tagc_paper), .own_options = &tagc_paper_own_options,         \
        .residual_elems = residual_elems, .place = place, .place_work = tagc_place_no_work, .start = start,  \
        .volume = tagc_paper_volume                                                                          \
    }

const tagc_exchange_table tagc_exchange_packed = TABLE(TAGC_EXCHANGE_PACKED);
const tagc_exchange_table tagc_exchange_sketch = TABLE(TAGC_EXCHANGE_SKETCH);
