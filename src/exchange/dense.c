/* The plain exchange: every value goes to its owner, who adds in rank order.
 *
 * A shard travels in chunks. While one is added the next two are on the wire, in both directions and with all
 * peers.
 *
 *   wire    | in 0 | in 1 | in 2 | out 0 | in 3 | out 1 | in 4 ...   in: contributions
 *   worker         | add 0 | add 1 | add 2 | add 3 ...               out: sums, all-reduce only */
#include "codec/bf16.h"
#include "codec/sum.h"
#include "core/clock.h"
#include "exchange/reducer.h"

#include <string.h>

enum {
    CHUNK_ELEMS = 262144, /* 1 MiB of fp32: long enough for the wire, short enough for the cache */
    MIN_CHUNK_ELEMS = 4096,
    CHUNKS_AT_FULL_LENGTH = 8 /* ranks; with more the chunks get shorter, so that the buffers do not grow */
};

static size_t n_chunks(const tagc_reducer *r) {
    return (r->shard + r->chunk - 1) / r->chunk;
}

static size_t chunk_elems(const tagc_reducer *r, size_t c) {
    size_t begin = c * r->chunk;
    return r->shard - begin < r->chunk ? r->shard - begin : r->chunk;
}

void tagc_dense_place(tagc_reducer *r, tagc_arena *arena) {
    size_t n_ranks = (size_t)r->world_size;
    r->chunk = CHUNK_ELEMS;
    if (n_ranks > CHUNKS_AT_FULL_LENGTH) r->chunk = CHUNK_ELEMS / n_ranks * CHUNKS_AT_FULL_LENGTH;
    if (r->chunk < MIN_CHUNK_ELEMS) r->chunk = MIN_CHUNK_ELEMS;
    if (r->chunk > r->shard) r->chunk = r->shard;

    tagc_messages_place(r, arena, 1 + 2 * TAGC_DENSE_DEPTH, 0);
    if (r->messages) {
        r->round = r->messages;
        r->chunk_in = r->messages + 1;
        r->chunk_out = r->chunk_in + TAGC_DENSE_DEPTH;
    }
    size_t n_slots = TAGC_DENSE_DEPTH * n_ranks * r->chunk;
    int is_bf16 = r->options.wire == TAGC_WIRE_BF16, is_all = r->options.all_reduce;
    r->recv_chunks = tagc_arena_take(arena, is_bf16 ? 0 : n_slots, sizeof *r->recv_chunks);
    r->widened = tagc_arena_take(arena, is_bf16 ? r->chunk : 0, sizeof *r->widened);
    r->send_halves = tagc_arena_take(arena, is_bf16 ? n_slots : 0, sizeof *r->send_halves);
    r->recv_halves = tagc_arena_take(arena, is_bf16 ? n_slots : 0, sizeof *r->recv_halves);
    r->sum_halves =
        tagc_arena_take(arena, is_bf16 && is_all ? TAGC_DENSE_DEPTH * r->chunk : 0, sizeof *r->sum_halves);
    r->sums_recv = tagc_arena_take(arena, is_bf16 && is_all ? n_slots : 0, sizeof *r->sums_recv);
}

/* Contributions to chunk c: straight from the gradient, or rounded first. */
static void post_in(tagc_reducer *r, size_t c) {
    size_t n = chunk_elems(r, c), slot = c % TAGC_DENSE_DEPTH, n_ranks = (size_t)r->world_size;
    tagc_message *message = &r->chunk_in[slot];
    tagc_message_clear(message);
    int is_bf16 = r->options.wire == TAGC_WIRE_BF16;
    size_t width = is_bf16 ? sizeof(uint16_t) : sizeof(float);
    uint16_t *halves = is_bf16 ? r->send_halves + slot * n_ranks * r->chunk : NULL;
    double start_s = tagc_clock_s();
    for (size_t d = 0; d < n_ranks; d++) {
        const float *from = r->gradient + d * r->shard + c * r->chunk;
        if (is_bf16) tagc_bf16_narrow(from, halves + d * r->chunk, n);
        if ((int)d == r->rank) continue;
        tagc_message_send(message, (int)d, n * width,
                          (is_bf16 ? d * r->chunk : d * r->shard + c * r->chunk) * width);
        tagc_message_receive(message, (int)d, n * width, d * r->chunk * width);
    }
    if (is_bf16) tagc_phase_end(r, TAGC_PHASE_ENCODE, start_s);
    void *recv = is_bf16 ? (void *)(r->recv_halves + slot * n_ranks * r->chunk)
                         : (void *)(r->recv_chunks + slot * n_ranks * r->chunk);
    tagc_message_post(r, message, TAGC_LEG_VALUES, is_bf16 ? (const void *)halves : (const void *)r->gradient,
                      recv);
}

/* Chunk c of every rank, in rank order, from the first rank's bits on. */
static void add_chunk(tagc_reducer *r, size_t c, float *out) {
    size_t n = chunk_elems(r, c), n_ranks = (size_t)r->world_size,
           slot = c % TAGC_DENSE_DEPTH * n_ranks * r->chunk;
    for (size_t q = 0; q < n_ranks; q++) {
        int own = (int)q == r->rank;
        const float *from;
        if (r->options.wire == TAGC_WIRE_BF16) {
            tagc_bf16_widen((own ? r->send_halves : r->recv_halves) + slot + q * r->chunk, r->widened, n);
            from = r->widened;
        } else {
            from = own ? r->gradient + q * r->shard + c * r->chunk : r->recv_chunks + slot + q * r->chunk;
        }
        if (q == 0)
            memcpy(out, from, n * sizeof *out);
        else
            tagc_sum_add(out, from, n);
    }
    if (r->scale != 1.0f)
        for (size_t i = 0; i < n; i++) out[i] *= r->scale;
}

/* Sums of chunk c to everybody. With a bf16 wire the owner, too, goes on with the rounded ones. */
static void post_out(tagc_reducer *r, size_t c, float *out) {
    size_t n = chunk_elems(r, c), slot = c % TAGC_DENSE_DEPTH, n_ranks = (size_t)r->world_size;
    tagc_message *message = &r->chunk_out[slot];
    tagc_message_clear(message);
    int is_bf16 = r->options.wire == TAGC_WIRE_BF16;
    size_t width = is_bf16 ? sizeof(uint16_t) : sizeof(float);
    uint16_t *halves = is_bf16 ? r->sum_halves + slot * r->chunk : NULL;
    for (size_t d = 0; d < n_ranks; d++) {
        if ((int)d == r->rank) continue;
        tagc_message_send(message, (int)d, n * width, 0);
        tagc_message_receive(message, (int)d, n * width,
                             (is_bf16 ? d * r->chunk : d * r->shard + c * r->chunk) * width);
    }
    if (is_bf16) {
        tagc_bf16_narrow(out, halves, n);
        tagc_bf16_widen(halves, out, n);
        r->stats.nonfinite |= tagc_holds_nonfinite(out, n); /* rounding up can overflow */
    }
    void *recv = is_bf16 ? (void *)(r->sums_recv + slot * n_ranks * r->chunk) : (void *)r->output;
    tagc_message_post(r, message, TAGC_LEG_RESULT, is_bf16 ? (const void *)halves : (const void *)out, recv);
}

static tagc_status finish_out(tagc_reducer *r, size_t c) {
    size_t n = chunk_elems(r, c), slot = c % TAGC_DENSE_DEPTH, n_ranks = (size_t)r->world_size;
    TAGC_TRY(tagc_message_wait(r, &r->chunk_out[slot]));
    if (r->options.wire != TAGC_WIRE_BF16) return TAGC_OK;
    double start_s = tagc_clock_s();
    for (size_t d = 0; d < n_ranks; d++)
        if ((int)d != r->rank)
            tagc_bf16_widen(r->sums_recv + (slot * n_ranks + d) * r->chunk,
                            r->output + d * r->shard + c * r->chunk, n);
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    return TAGC_OK;
}

/* Largest bit pattern of |value|: NaN and Inf are on top. */
int tagc_holds_nonfinite(const float *values, size_t n) {
    uint32_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        bits &= 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest >= 0x7f800000u;
}

void tagc_dense_start(tagc_reducer *r) {
    for (size_t c = 0, n = n_chunks(r); c < n && c < TAGC_DENSE_DEPTH; c++) post_in(r, c);
}

tagc_status tagc_dense_step(tagc_reducer *r) {
    size_t n = n_chunks(r);
    int is_all = r->options.all_reduce;
    float *sums = r->output + (is_all ? (size_t)r->rank * r->shard : 0);
    for (size_t c = 0; c < n; c++) {
        float *out = sums + c * r->chunk;
        TAGC_TRY(tagc_message_wait(r, &r->chunk_in[c % TAGC_DENSE_DEPTH]));
        double start_s = tagc_clock_s();
        add_chunk(r, c, out);
        r->stats.nonfinite |= tagc_holds_nonfinite(out, chunk_elems(r, c));
        tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
        if (is_all && c >= TAGC_DENSE_DEPTH) TAGC_TRY(finish_out(r, c - TAGC_DENSE_DEPTH));
        if (is_all) post_out(r, c, out);
        if (c + TAGC_DENSE_DEPTH < n) post_in(r, c + TAGC_DENSE_DEPTH);
    }
    for (size_t c = n > TAGC_DENSE_DEPTH ? n - TAGC_DENSE_DEPTH : 0; is_all && c < n; c++)
        TAGC_TRY(finish_out(r, c));
    r->stats.n_kept = r->stats.n_union = r->options.n_elems;
    tagc_agree_begin(r, 0);
    return TAGC_OK;
}
