/* The path of direct for values that travel whole: fp32 or bf16, all of them, without a residual. There is nothing
 * to encode, so bodies have no header and no length of their own, and a shard travels in chunks. While one is added, the next two are
 * on the wire, in both directions and with all peers.
 *
 *   wire    | in 0 | in 1 | in 2 | out 0 | in 3 | out 1 | in 4 ...   in: contributions
 *   worker         | add 0 | add 1 | add 2 | add 3 ...               out: sums, where they are sent back
 *
 * Sums are the same bits as on the path of fragments (direct.c), which ranks take together where one of them has its arrays on a
 * device, or a residual. The two share their rounds, so ranks that take different ones notice it at the first message.
 *
 * Memory of a step: | chunks in progress, in the formats of wire and output |: depth of them, the smaller of DEPTH and all. */
#include "codec/bf16.h"
#include "codec/elements.h"
#include "core/clock.h"
#include "exchange/direct/direct.h"
#include "exchange/options.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

enum {
    DEPTH = 3,            /* chunks in progress: one being added, two on the wire */
    CHUNK_ELEMS = 262144, /* 1 MiB of fp32: long enough for the wire, short enough for the cache */
    MIN_CHUNK_ELEMS = 4096,
    PIECE_ELEMS = 4096,       /* elements of a piece: stays in the cache while all ranks' parts are added */
    CHUNKS_AT_FULL_LENGTH = 8 /* with more ranks, chunks get shorter, so that the buffers do not grow */
};
enum {
    ROUND_IN = TAGC_ROUND_HEADERS,
    ROUND_OUT = TAGC_ROUND_RESULTS,
    ROUND_AGREEMENT = TAGC_ROUND_DIRECT_AGREEMENT
};

typedef struct whole {
    size_t chunk;         /* elements of a shard that travel at a time */
    size_t n_added;       /* chunks, in the step under way */
    tagc_message *moving; /* (DEPTH, 2): in, and out where sums are sent back */
    char *sent;           /* (depth, W, chunk) in the wire's format, unless the gradient is in it */
    char *arrived;        /* (depth, W, chunk) as well */
    uint16_t *sums_sent;  /* (depth, chunk) bf16 wire and sums sent back */
    uint16_t *sums;       /* (depth, W, chunk) as well */
} whole;

static whole *of(const tagc_reducer *r) {
    return r->state;
}

static int is_half(const tagc_reducer *r) {
    return r->options.format == TAGC_FORMAT_BF16;
}

static size_t wire_bytes(const tagc_reducer *r) {
    return is_half(r) ? sizeof(uint16_t) : sizeof(float);
}

/* 1 if contributions are written in another format before they are sent. */
static int is_converted(const tagc_reducer *r) {
    return r->options.gradient != r->options.format;
}

static tagc_message *in_of(const tagc_reducer *r, size_t c) {
    return &of(r)->moving[c % DEPTH * 2];
}

/* Of a shard. */
static size_t n_chunks(const tagc_reducer *r) {
    const whole *w = of(r);
    return (r->shard + w->chunk - 1) / w->chunk;
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
    whole *w = of(r);
    size_t n_ranks = (size_t)r->world_size;
    w->chunk = CHUNK_ELEMS;
    if (n_ranks > CHUNKS_AT_FULL_LENGTH) w->chunk = CHUNK_ELEMS / n_ranks * CHUNKS_AT_FULL_LENGTH;
    if (w->chunk < MIN_CHUNK_ELEMS) w->chunk = MIN_CHUNK_ELEMS;
    if (w->chunk > r->shard) w->chunk = r->shard;

    tagc_messages_place(r, arena, &(tagc_room){2 * DEPTH, r->world_size - 1}, 1);
    w->moving = r->messages;
}

static void place_work(tagc_reducer *r, tagc_arena *arena) {
    whole *w = of(r);
    size_t depth = n_chunks(r) < DEPTH ? n_chunks(r) : DEPTH;
    size_t n_values = depth * (size_t)r->world_size * w->chunk, width = wire_bytes(r);
    int has_half_sums = is_half(r) && tagc_direct_has_results(r);
    w->arrived = tagc_arena_take(arena, n_values, width);
    w->sent = tagc_arena_take(arena, is_converted(r) ? n_values : 0, width);
    w->sums_sent = tagc_arena_take(arena, has_half_sums ? depth * w->chunk : 0, sizeof *w->sums_sent);
    w->sums = tagc_arena_take(arena, has_half_sums ? n_values : 0, sizeof *w->sums);
}

/* ---- one chunk, piece by piece, on the threads of the pool: elements are independent, so their number changes no result ---- */

typedef struct chunk_work {
    const tagc_reducer *r;
    size_t c;
    float *out;            /* adding: (chunk elements) */
    atomic_int *nonfinite; /* adding and widening: a thread that sees NaN or Inf sets it to 1 */
} chunk_work;

static size_t piece_elems(size_t n, size_t at) {
    return n - at < PIECE_ELEMS ? n - at : PIECE_ELEMS;
}

/* Fragments of a shard are divided by W before they are added, and sums that are sent back after that. With a power of two it makes no
 * difference but to numbers below 2^-126, and once is faster. */
static int is_divided_first(const tagc_reducer *r) {
    return r->scale != 1.0f && !tagc_direct_has_results(r) && (r->world_size & (r->world_size - 1)) != 0;
}

static void scale(const tagc_reducer *r, float *sums, size_t n) {
    if (r->scale != 1.0f)
        for (size_t i = 0; i < n; i++) sums[i] *= r->scale;
}

/* Values [first, first + n) of the gradient as fp32. */
static void read_gradient(const tagc_reducer *r, size_t first, float *to, size_t n) {
    if (r->options.gradient == TAGC_FORMAT_BF16)
        tagc_bf16_widen((const uint16_t *)r->now.gradient + first, to, n);
    else
        memcpy(to, (const float *)r->now.gradient + first, n * sizeof *to);
}

static void convert_work(void *arg, int index, int n_threads) {
    const chunk_work *w = arg;
    const tagc_reducer *r = w->r;
    const whole *d = of(r);
    size_t n_ranks = (size_t)r->world_size, buffer = w->c % DEPTH, n = chunk_elems(r, w->c);
    for (size_t q = 0; q < n_ranks; q++) {
        size_t first = chunk_begin(r, q, w->c);
        char *to = d->sent + (buffer * n_ranks + q) * d->chunk * wire_bytes(r);
        for (size_t at = (size_t)index * PIECE_ELEMS; at < n; at += (size_t)n_threads * PIECE_ELEMS) {
            if (is_half(r))
                tagc_bf16_narrow(tagc_reducer_gradient(r) + first + at, (uint16_t *)(void *)to + at,
                                 piece_elems(n, at));
            else
                read_gradient(r, first + at, (float *)(void *)to + at, piece_elems(n, at));
        }
    }
}

/* Sends contributions to chunk c: straight from the gradient, or converted first. */
static void post_in(tagc_reducer *r, size_t c) {
    const whole *d = of(r);
    size_t n = chunk_elems(r, c), n_ranks = (size_t)r->world_size, width = wire_bytes(r);
    size_t buffer = c % DEPTH * n_ranks * d->chunk * width;
    tagc_message *message = &in_of(r, c)[0];
    int converts = is_converted(r);
    double start_s = tagc_clock_s();
    chunk_work w = {.r = r, .c = c};
    tagc_message_clear(message);
    message->round_bytes = n * width;
    if (converts) tagc_pool_run(r->pool, convert_work, &w);
    for (size_t q = 0; q < n_ranks; q++) {
        if ((int)q == r->rank) continue;
        size_t at = converts ? q * d->chunk : chunk_begin(r, q, c);
        tagc_message_to(message, (int)q, n * width, at * width);
        tagc_message_from(message, (int)q, n * width, q * d->chunk * width);
    }
    if (converts) tagc_phase_end(r, TAGC_PHASE_ENCODE, start_s);
    tagc_message_post(r, message, ROUND_IN, TAGC_LEG_VALUES,
                      converts ? (const void *)(d->sent + buffer) : r->now.gradient, d->arrived + buffer);
}

/* The own values: as others got theirs, or where sums are sent back, unrounded. The sums may take their place. */
static void read_own(const chunk_work *w, size_t at, float *to, size_t n) {
    const tagc_reducer *r = w->r;
    size_t first = chunk_begin(r, (size_t)r->rank, w->c) + at;
    read_gradient(r, first, to, n);
    if (!is_half(r) || tagc_direct_has_results(r)) return;
    uint16_t rounded[PIECE_ELEMS];
    tagc_bf16_narrow(to, rounded, n);
    tagc_bf16_widen(rounded, to, n);
}

static void add_piece(const chunk_work *w, size_t at, size_t n) {
    const tagc_reducer *r = w->r;
    const whole *d = of(r);
    size_t n_ranks = (size_t)r->world_size, buffer = w->c % DEPTH * n_ranks * d->chunk;
    float widened[PIECE_ELEMS], own[PIECE_ELEMS], *out = w->out + at;
    int divides_first = is_divided_first(r);
    read_own(w, at, own, n);
    memset(out, 0, n * sizeof *out); /* so that zeros add up to 0, and not to -0 */
    for (size_t q = 0; q < n_ranks; q++) {
        size_t arrived = buffer + q * d->chunk + at;
        const float *from = own;
        if ((int)q != r->rank && is_half(r)) {
            tagc_bf16_widen((const uint16_t *)(const void *)d->arrived + arrived, widened, n);
            from = widened;
        } else if ((int)q != r->rank) {
            from = (const float *)(const void *)d->arrived + arrived;
        }
        if (divides_first) {
            for (size_t i = 0; i < n; i++) widened[i] = from[i] * r->scale;
            from = widened;
        }
        tagc_sum_add(out, from, n);
    }
    int is_rounded_later = is_half(r) && tagc_direct_has_results(r);
    if (!is_rounded_later && !divides_first) scale(r, out, n);
    /* Test for NaN and Inf here, while the sums are in the cache. */
    if (tagc_holds_nonfinite(out, n)) atomic_store_explicit(w->nonfinite, 1, memory_order_relaxed);
}

static void add_work(void *arg, int index, int n_threads) {
    const chunk_work *w = arg;
    size_t n = chunk_elems(w->r, w->c);
    for (size_t at = (size_t)index * PIECE_ELEMS; at < n; at += (size_t)n_threads * PIECE_ELEMS)
        add_piece(w, at, piece_elems(n, at));
}

/* Rounds the sums of chunk c, which the owner uses as all others do. Rounding up can overflow. */
static void round_sums_work(void *arg, int index, int n_threads) {
    const chunk_work *w = arg;
    const whole *d = of(w->r);
    size_t n = chunk_elems(w->r, w->c);
    uint16_t *halves = d->sums_sent + w->c % DEPTH * d->chunk;
    for (size_t at = (size_t)index * PIECE_ELEMS; at < n; at += (size_t)n_threads * PIECE_ELEMS) {
        size_t n_piece = piece_elems(n, at);
        tagc_bf16_narrow(w->out + at, halves + at, n_piece);
        tagc_bf16_widen(halves + at, w->out + at, n_piece);
        scale(w->r, w->out + at, n_piece);
        if (tagc_holds_nonfinite(w->out + at, n_piece))
            atomic_store_explicit(w->nonfinite, 1, memory_order_relaxed);
    }
}

static void widen_sums_work(void *arg, int index, int n_threads) {
    const chunk_work *w = arg;
    const tagc_reducer *r = w->r;
    const whole *d = of(r);
    size_t n_ranks = (size_t)r->world_size, buffer = w->c % DEPTH, n = chunk_elems(r, w->c);
    for (size_t q = 0; q < n_ranks; q++) {
        if ((int)q == r->rank) continue;
        float *to = r->now.output + chunk_begin(r, q, w->c);
        for (size_t at = (size_t)index * PIECE_ELEMS; at < n; at += (size_t)n_threads * PIECE_ELEMS) {
            tagc_bf16_widen(d->sums + (buffer * n_ranks + q) * d->chunk + at, to + at, piece_elems(n, at));
            scale(r, to + at, piece_elems(n, at));
        }
    }
}

/* ---- the course ---- */

static void run(tagc_reducer *r, void (*work)(void *arg, int index, int n_threads), size_t c, float *out) {
    atomic_int nonfinite = 0;
    chunk_work w = {r, c, out, &nonfinite};
    tagc_pool_run(r->pool, work, &w);
    r->now.stats.nonfinite |= atomic_load(&nonfinite);
}

/* Sends the sums of chunk c to all ranks. */
static void post_out(tagc_reducer *r, size_t c, float *out) {
    const whole *d = of(r);
    size_t n = chunk_elems(r, c), buffer = c % DEPTH, n_ranks = (size_t)r->world_size, width = wire_bytes(r);
    tagc_message *message = &in_of(r, c)[1];
    int is_bf16 = is_half(r);
    tagc_message_clear(message);
    message->round_bytes = n * width;
    for (size_t q = 0; q < n_ranks; q++) {
        if ((int)q == r->rank) continue;
        tagc_message_to(message, (int)q, n * width, 0);
        tagc_message_from(message, (int)q, n * width,
                          (is_bf16 ? q * d->chunk : chunk_begin(r, q, c)) * width);
    }
    if (is_bf16) run(r, round_sums_work, c, out);
    const void *sent = is_bf16 ? (const void *)(d->sums_sent + buffer * d->chunk) : (const void *)out;
    void *recv = is_bf16 ? (void *)(d->sums + buffer * n_ranks * d->chunk) : (void *)r->now.output;
    tagc_message_post(r, message, ROUND_OUT, TAGC_LEG_RESULT, sent, recv);
}

/* The sums of chunk c have arrived from all ranks. */
static void finish_out(tagc_reducer *r, size_t c) {
    if (!is_half(r)) return;
    double start_s = tagc_clock_s();
    run(r, widen_sums_work, c, NULL);
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
}

static tagc_status finish(tagc_reducer *r) {
    size_t n = n_chunks(r);
    int has_results = tagc_direct_has_results(r);
    for (size_t c = n > DEPTH ? n - DEPTH : 0; has_results && c < n; c++) finish_out(r, c);
    r->now.stats.n_sent = r->now.stats.n_union = r->options.n_elems;
    if (has_results) r->now.stats.n_returned = r->options.n_elems;
    return tagc_direct_finish(r);
}

/* The lowest and the highest round in which the action that adds chunk c may post. */
static int low_of(const tagc_reducer *r, size_t c) {
    int after = tagc_direct_has_results(r) ? ROUND_OUT : ROUND_AGREEMENT;
    return c + DEPTH < n_chunks(r) ? ROUND_IN : after;
}

static int high_of(const tagc_reducer *r, size_t c) {
    if (c + 1 == n_chunks(r)) return ROUND_AGREEMENT;
    return tagc_direct_has_results(r) ? ROUND_OUT : ROUND_IN;
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
    return r->now.output + chunk_begin(r, tagc_direct_has_results(r) ? (size_t)r->rank : 0, c);
}

/* Chunk c is added, and the sums whose place it had have arrived. After the last chunk, the agreement goes beside the sums. */
static tagc_status send_on(tagc_reducer *r) {
    size_t c = of(r)->n_added++, n = n_chunks(r);
    int has_results = tagc_direct_has_results(r);
    if (has_results && c >= DEPTH) finish_out(r, c - DEPTH);
    if (has_results) post_out(r, c, sums_of(r, c));
    if (c + DEPTH < n) post_in(r, c + DEPTH);
    if (c + 1 == n) tagc_agree_begin(r, ROUND_AGREEMENT, 0);
    go_on(r);
    return TAGC_OK;
}

static tagc_status add(tagc_reducer *r) {
    size_t c = of(r)->n_added;
    double start_s = tagc_clock_s();
    run(r, add_work, c, sums_of(r, c));
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
    size_t n_others = (size_t)r->world_size - 1, width = wire_bytes(r);
    out->chunk_elems = of(r)->chunk;
    out->n_moving = DEPTH;
    for (size_t c = 0, n = n_chunks(r); c < n; c++) {
        double n_bytes = (double)(n_others * chunk_elems(r, c) * width);
        tagc_volume_add(out, TAGC_LEG_VALUES, n_bytes);
        if (tagc_direct_has_results(r)) tagc_volume_add(out, TAGC_LEG_RESULT, n_bytes);
    }
    tagc_volume_add(out, TAGC_LEG_CONTROL, (double)(n_others * TAGC_WIRE_HEADER_BYTES));
    return TAGC_OK;
}

const tagc_exchange_table tagc_exchange_whole = {
    .id = TAGC_EXCHANGE_DIRECT,
    .state_bytes = sizeof(whole),
    .overlap = TAGC_OVERLAP_ROWS,
    .residual_elems = tagc_direct_residual_elems,
    .place = place,
    .place_work = place_work,
    .start = start,
    .volume = volume,
};
