/* The exchange dense: every value goes to its owner, which adds in rank order.
 *
 * A shard travels in chunks. While one is added, the next two are on the wire, in both directions and with all peers.
 *
 *   wire    | in 0 | in 1 | in 2 | out 0 | in 3 | out 1 | in 4 ...   in: contributions
 *   worker         | add 0 | add 1 | add 2 | add 3 ...               out: sums, all-reduce only
 *
 * Memory of a step: | chunks in progress, in the formats of wire and output |. */
#include "codec/bf16.h"
#include "codec/sum.h"
#include "core/clock.h"
#include "exchange/reducer.h"

#include <stdatomic.h>
#include <string.h>

enum {
    DEPTH = 3,            /* chunks in progress: one being added, two on the wire */
    CHUNK_ELEMS = 262144, /* 1 MiB of fp32: long enough for the wire, short enough for the cache */
    MIN_CHUNK_ELEMS = 4096,
    PIECE_ELEMS = 4096,       /* elements of a piece: stays in the cache while all ranks' parts are added */
    CHUNKS_AT_FULL_LENGTH = 8 /* with more ranks, chunks get shorter, so that the buffers do not grow */
};
enum { ROUND_IN, ROUND_OUT, ROUND_AGREEMENT };

typedef struct dense {
    size_t chunk;          /* elements of a shard that travel at a time */
    size_t n_added;        /* chunks, in the step under way */
    tagc_message *moving;  /* (DEPTH, 2): in, and out with TAGC_OUTPUT_UNIT */
    float *recv_chunks;    /* (DEPTH, W, chunk) fp32 wire */
    uint16_t *send_halves; /* (DEPTH, W, chunk) bf16 wire */
    uint16_t *recv_halves; /* (DEPTH, W, chunk) */
    uint16_t *sum_halves;  /* (DEPTH, chunk) bf16 wire and all-reduce */
    uint16_t *sums_recv;   /* (DEPTH, W, chunk) */
} dense;

static dense *of(const tagc_reducer *r) {
    return r->state;
}

static int is_half(const tagc_reducer *r) {
    return r->options.format == TAGC_FORMAT_BF16;
}

static tagc_message *in_of(const tagc_reducer *r, size_t c) {
    return &of(r)->moving[c % DEPTH * 2];
}

static uint64_t residual_elems(const tagc_reducer_options *options, int world_size) {
    (void)options, (void)world_size;
    return 0;
}

static uint64_t output_elems(const tagc_reducer_options *options, int world_size) {
    return options->output != TAGC_OUTPUT_SHARD ? options->n_elems : options->n_elems / (uint64_t)world_size;
}

/* Of a shard. */
static size_t n_chunks(const tagc_reducer *r) {
    const dense *d = of(r);
    return (r->shard + d->chunk - 1) / d->chunk;
}

static size_t chunk_elems(const tagc_reducer *r, size_t c) {
    size_t chunk = of(r)->chunk, n_left = r->shard - c * chunk;
    return n_left < chunk ? n_left : chunk;
}

/* Where chunk c of an owner's shard begins in the unit. */
static size_t chunk_begin(const tagc_reducer *r, size_t owner, size_t c) {
    return owner * r->shard + c * of(r)->chunk;
}

static void place(tagc_reducer *r, tagc_arena *arena) {
    dense *d = of(r);
    size_t n_ranks = (size_t)r->world_size;
    d->chunk = CHUNK_ELEMS;
    if (n_ranks > CHUNKS_AT_FULL_LENGTH) d->chunk = CHUNK_ELEMS / n_ranks * CHUNKS_AT_FULL_LENGTH;
    if (d->chunk < MIN_CHUNK_ELEMS) d->chunk = MIN_CHUNK_ELEMS;
    if (d->chunk > r->shard) d->chunk = r->shard;

    tagc_messages_place(r, arena, &(tagc_room){2 * DEPTH, r->world_size - 1}, 1);
    d->moving = r->messages;
}

static void place_work(tagc_reducer *r, tagc_arena *arena) {
    dense *d = of(r);
    size_t n_ranks = (size_t)r->world_size;
    size_t n_values = DEPTH * n_ranks * d->chunk;
    int is_bf16 = is_half(r), is_all = r->options.output != TAGC_OUTPUT_SHARD;
    d->recv_chunks = tagc_arena_take(arena, is_bf16 ? 0 : n_values, sizeof *d->recv_chunks);
    d->send_halves = tagc_arena_take(arena, is_bf16 ? n_values : 0, sizeof *d->send_halves);
    d->recv_halves = tagc_arena_take(arena, is_bf16 ? n_values : 0, sizeof *d->recv_halves);
    d->sum_halves = tagc_arena_take(arena, is_bf16 && is_all ? DEPTH * d->chunk : 0, sizeof *d->sum_halves);
    d->sums_recv = tagc_arena_take(arena, is_bf16 && is_all ? n_values : 0, sizeof *d->sums_recv);
}

/* Adds one chunk, piece by piece, on the threads of the pool. Elements are independent, so the number of threads changes no
 * result. */
typedef struct chunk_work {
    const tagc_reducer *r;
    size_t c;
    float *out;            /* adding: (chunk elements) */
    atomic_int *nonfinite; /* adding: a thread that sees NaN or Inf sets it to 1 */
} chunk_work;

static size_t piece_elems(size_t n, size_t at) {
    return n - at < PIECE_ELEMS ? n - at : PIECE_ELEMS;
}

static void narrow_work(void *arg, int index, int n_threads) {
    const chunk_work *w = arg;
    const tagc_reducer *r = w->r;
    const dense *d = of(r);
    size_t n_ranks = (size_t)r->world_size, buffer = w->c % DEPTH, n = chunk_elems(r, w->c);
    for (size_t q = 0; q < n_ranks; q++) {
        size_t begin = chunk_begin(r, q, w->c);
        for (size_t at = (size_t)index * PIECE_ELEMS; at < n; at += (size_t)n_threads * PIECE_ELEMS)
            tagc_bf16_narrow(tagc_reducer_gradient(r) + begin + at,
                             d->send_halves + (buffer * n_ranks + q) * d->chunk + at, piece_elems(n, at));
    }
}

/* Sends contributions to chunk c: straight from the gradient, or rounded first. */
static void post_in(tagc_reducer *r, size_t c) {
    const dense *d = of(r);
    size_t n = chunk_elems(r, c), buffer = c % DEPTH, n_ranks = (size_t)r->world_size;
    tagc_message *message = &in_of(r, c)[0];
    tagc_message_clear(message);
    int is_bf16 = is_half(r);
    size_t width = is_bf16 ? sizeof(uint16_t) : sizeof(float);
    message->round_bytes = n * width;
    uint16_t *halves = is_bf16 ? d->send_halves + buffer * n_ranks * d->chunk : NULL;
    double start_s = tagc_clock_s();
    chunk_work w = {.r = r, .c = c};
    if (is_bf16) tagc_pool_run(r->pool, narrow_work, &w);
    for (size_t q = 0; q < n_ranks; q++) {
        if ((int)q == r->rank) continue;
        size_t at = is_bf16 ? q * d->chunk : chunk_begin(r, q, c);
        tagc_message_to(message, (int)q, n * width, at * width);
        tagc_message_from(message, (int)q, n * width, q * d->chunk * width);
    }
    if (is_bf16) tagc_phase_end(r, TAGC_PHASE_ENCODE, start_s);
    void *recv = is_bf16 ? (void *)(d->recv_halves + buffer * n_ranks * d->chunk)
                         : (void *)(d->recv_chunks + buffer * n_ranks * d->chunk);
    tagc_message_post(r, message, ROUND_IN, TAGC_LEG_VALUES, is_bf16 ? (const void *)halves : r->now.gradient,
                      recv);
}

static void add_piece(const chunk_work *w, size_t at, size_t n) {
    const tagc_reducer *r = w->r;
    const dense *d = of(r);
    size_t n_ranks = (size_t)r->world_size, buffer = w->c % DEPTH * n_ranks * d->chunk;
    float widened[PIECE_ELEMS], kept[PIECE_ELEMS], *out = w->out + at;
    if (!is_half(r)) /* the sums may take the place of the own row */
        memcpy(kept, tagc_reducer_gradient(r) + chunk_begin(r, (size_t)r->rank, w->c) + at, n * sizeof *kept);
    for (size_t q = 0; q < n_ranks; q++) {
        int own = (int)q == r->rank;
        size_t arrived = buffer + q * d->chunk + at;
        const float *from = widened;
        if (is_half(r))
            tagc_bf16_widen((own ? d->send_halves : d->recv_halves) + arrived, widened, n);
        else
            from = own ? kept : d->recv_chunks + arrived;
        if (q == 0)
            memcpy(out, from, n * sizeof *out);
        else
            tagc_sum_add(out, from, n);
    }
    if (r->scale != 1.0f)
        for (size_t i = 0; i < n; i++) out[i] *= r->scale;
    /* Test for NaN and Inf here, while the sums are in the cache. */
    if (tagc_holds_nonfinite(out, n)) atomic_store_explicit(w->nonfinite, 1, memory_order_relaxed);
}

static void add_work(void *arg, int index, int n_threads) {
    const chunk_work *w = arg;
    size_t n = chunk_elems(w->r, w->c);
    for (size_t at = (size_t)index * PIECE_ELEMS; at < n; at += (size_t)n_threads * PIECE_ELEMS)
        add_piece(w, at, piece_elems(n, at));
}

/* Adds chunk c of all ranks, in rank order. */
static void add_chunk(tagc_reducer *r, size_t c, float *out) {
    atomic_int nonfinite = 0;
    chunk_work w = {r, c, out, &nonfinite};
    tagc_pool_run(r->pool, add_work, &w);
    r->now.stats.nonfinite |= atomic_load(&nonfinite);
}

/* Sends the sums of chunk c to all ranks. With a bf16 wire, the owner also uses the rounded sums. */
static void post_out(tagc_reducer *r, size_t c, float *out) {
    const dense *d = of(r);
    size_t n = chunk_elems(r, c), buffer = c % DEPTH, n_ranks = (size_t)r->world_size;
    tagc_message *message = &in_of(r, c)[1];
    tagc_message_clear(message);
    int is_bf16 = is_half(r);
    size_t width = is_bf16 ? sizeof(uint16_t) : sizeof(float);
    message->round_bytes = n * width;
    uint16_t *halves = is_bf16 ? d->sum_halves + buffer * d->chunk : NULL;
    for (size_t q = 0; q < n_ranks; q++) {
        if ((int)q == r->rank) continue;
        tagc_message_to(message, (int)q, n * width, 0);
        tagc_message_from(message, (int)q, n * width,
                          (is_bf16 ? q * d->chunk : chunk_begin(r, q, c)) * width);
    }
    if (is_bf16) {
        tagc_bf16_narrow(out, halves, n);
        tagc_bf16_widen(halves, out, n);
        r->now.stats.nonfinite |= tagc_holds_nonfinite(out, n); /* rounding up can overflow */
    }
    void *recv = is_bf16 ? (void *)(d->sums_recv + buffer * n_ranks * d->chunk) : (void *)r->now.output;
    tagc_message_post(r, message, ROUND_OUT, TAGC_LEG_RESULT,
                      is_bf16 ? (const void *)halves : (const void *)out, recv);
}

static void widen_work(void *arg, int index, int n_threads) {
    const chunk_work *w = arg;
    const tagc_reducer *r = w->r;
    const dense *d = of(r);
    size_t n_ranks = (size_t)r->world_size, buffer = w->c % DEPTH, n = chunk_elems(r, w->c);
    for (size_t q = 0; q < n_ranks; q++) {
        if ((int)q == r->rank) continue;
        size_t begin = chunk_begin(r, q, w->c);
        for (size_t at = (size_t)index * PIECE_ELEMS; at < n; at += (size_t)n_threads * PIECE_ELEMS)
            tagc_bf16_widen(d->sums_recv + (buffer * n_ranks + q) * d->chunk + at, r->now.output + begin + at,
                            piece_elems(n, at));
    }
}

/* The sums of chunk c have arrived from all ranks. */
static void finish_out(tagc_reducer *r, size_t c) {
    if (!is_half(r)) return;
    double start_s = tagc_clock_s();
    chunk_work w = {.r = r, .c = c};
    tagc_pool_run(r->pool, widen_work, &w);
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
}

static tagc_status finish(tagc_reducer *r) {
    size_t n = n_chunks(r);
    for (size_t c = n > DEPTH ? n - DEPTH : 0; r->options.output != TAGC_OUTPUT_SHARD && c < n; c++)
        finish_out(r, c);
    r->now.stats.n_sent = r->now.stats.n_union = r->options.n_elems;
    return tagc_agree_end(r, NULL, NULL);
}

/* The lowest and the highest round in which the action that adds chunk c may post. */
static int low_of(const tagc_reducer *r, size_t c) {
    int after = r->options.output != TAGC_OUTPUT_SHARD ? ROUND_OUT : ROUND_AGREEMENT;
    return c + DEPTH < n_chunks(r) ? ROUND_IN : after;
}

static int high_of(const tagc_reducer *r, size_t c) {
    if (c + 1 == n_chunks(r)) return ROUND_AGREEMENT;
    return r->options.output != TAGC_OUTPUT_SHARD ? ROUND_OUT : ROUND_IN;
}

static tagc_status add(tagc_reducer *r);

/* The next chunk waits for its contributions. */
static void go_on(tagc_reducer *r) {
    size_t c = of(r)->n_added;
    if (c == n_chunks(r))
        tagc_then(r, finish, r->messages, r->n_messages, TAGC_NO_ROUND, 0);
    else
        tagc_then(r, add, in_of(r, c), 1, low_of(r, c), high_of(r, c));
}

static float *sums_of(const tagc_reducer *r, size_t c) {
    return r->now.output + chunk_begin(r, r->options.output != TAGC_OUTPUT_SHARD ? (size_t)r->rank : 0, c);
}

/* Chunk c is added, and the sums whose place it had have arrived. After the last chunk, the agreement goes beside the sums. */
static tagc_status send_on(tagc_reducer *r) {
    size_t c = of(r)->n_added++, n = n_chunks(r);
    int is_all = r->options.output != TAGC_OUTPUT_SHARD;
    if (is_all && c >= DEPTH) finish_out(r, c - DEPTH);
    if (is_all) post_out(r, c, sums_of(r, c));
    if (c + DEPTH < n) post_in(r, c + DEPTH);
    if (c + 1 == n) tagc_agree_begin(r, ROUND_AGREEMENT, 0);
    go_on(r);
    return TAGC_OK;
}

static tagc_status add(tagc_reducer *r) {
    size_t c = of(r)->n_added;
    double start_s = tagc_clock_s();
    add_chunk(r, c, sums_of(r, c));
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    tagc_then(r, send_on, in_of(r, c) + 1, 1, low_of(r, c), high_of(r, c));
    return TAGC_OK;
}

static tagc_status post_first(tagc_reducer *r) {
    for (size_t c = 0, n = n_chunks(r); c < n && c < DEPTH; c++) post_in(r, c);
    go_on(r);
    return TAGC_OK;
}

static tagc_status start(tagc_reducer *r) {
    of(r)->n_added = 0;
    tagc_then(r, post_first, NULL, 0, ROUND_IN, ROUND_IN);
    return TAGC_OK;
}

static tagc_status volume(tagc_reducer *r, const tagc_volume_data *data, tagc_volume *out) {
    (void)data;
    size_t n_others = (size_t)r->world_size - 1, width = is_half(r) ? sizeof(uint16_t) : sizeof(float);
    out->chunk_elems = of(r)->chunk;
    for (size_t c = 0, n = n_chunks(r); c < n; c++) {
        double n_bytes = (double)(n_others * chunk_elems(r, c) * width);
        tagc_volume_add(out, TAGC_LEG_VALUES, n_bytes);
        if (r->options.output != TAGC_OUTPUT_SHARD) tagc_volume_add(out, TAGC_LEG_RESULT, n_bytes);
    }
    tagc_volume_add(out, TAGC_LEG_CONTROL, (double)(n_others * TAGC_WIRE_HEADER_BYTES));
    return TAGC_OK;
}

const tagc_exchange_table tagc_exchange_dense = {
    .id = TAGC_EXCHANGE_DENSE,
    .state_bytes = sizeof(dense),
    .residual_elems = residual_elems,
    .output_elems = output_elems,
    .place = place,
    .place_work = place_work,
    .start = start,
    .volume = volume,
};
