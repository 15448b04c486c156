/* The ranks of one host add their rows for the same destination before anything is encoded.
 *
 * Rows are not compressed: bf16 or fp32. The rows of the first turns are sent at once, the others while earlier rows are
 * encoded. The own part is added unrounded. Sums are fp32, in the order of local indices. */
#include "codec/bf16.h"
#include "codec/elements.h"
#include "core/clock.h"
#include "exchange/direct/direct.h"
#include "exchange/options.h"

#include <string.h>

enum {
    PIECE_ELEMS = 4096, /* elements of a piece: stays in the cache while all ranks' parts are added */
    LEAST_WINDOW = 2    /* rows in progress: one being added, one on the wire */
};
static const size_t window_bytes = (size_t)64 << 20; /* of rows under way, where that is more */

/* Without a residual nothing would take up what bf16 rounds off. */
static int is_wide(const tagc_reducer *r) {
    return r->options.format == TAGC_FORMAT_FP32 || tagc_is_without_residual(&r->options);
}

static size_t width_of(const tagc_reducer *r) {
    return is_wide(r) ? sizeof(float) : sizeof(uint16_t);
}

size_t tagc_hosts_row_bytes(const tagc_reducer *r) {
    return r->shard * width_of(r);
}

/* Whether rows are copied before they are sent. Otherwise they are sent from the gradient. */
static int is_copied(const tagc_reducer *r) {
    return !is_wide(r) || tagc_direct_of(r)->are_rows_together;
}

void tagc_hosts_shape(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    int is_blocking = r->comm && !tagc_comm_has_lanes(r->comm);
    size_t window = window_bytes / (r->shard * width_of(r) * (size_t)d->per_host);
    if (window < LEAST_WINDOW) window = LEAST_WINDOW;
    d->row_window = window < (size_t)d->n_hosts ? (int)window : d->n_hosts;
    d->are_rows_together = is_blocking && d->row_window == d->n_hosts;
}

void tagc_hosts_place_work(tagc_reducer *r, tagc_arena *arena) {
    tagc_direct *d = tagc_direct_of(r);
    size_t n_values = (size_t)d->row_window * (size_t)d->per_host * r->shard;
    d->rows_send = tagc_arena_take(arena, is_copied(r) ? n_values : 0, width_of(r));
    d->rows_recv = tagc_arena_take(arena, n_values, width_of(r));
    d->host_sum = tagc_arena_take(arena, d->coded ? r->shard : 0, sizeof *d->host_sum);
}

/* Where in rows_send and rows_recv, in values, the row of turn t to or from the rank `local` is. */
static size_t row_at(const tagc_reducer *r, int t, int local) {
    const tagc_direct *d = tagc_direct_of(r);
    return ((size_t)local * (size_t)d->row_window + (size_t)(t % d->row_window)) * r->shard;
}

/* Adds one row, piece by piece, on the threads of the pool. */
typedef struct row_work {
    const tagc_reducer *r;
    const float *from; /* the own row */
    uint16_t *halves;  /* narrowing: where it goes */
    int turn;          /* adding: of what arrived */
    float *sum;
} row_work;

static size_t piece_elems(const tagc_reducer *r, size_t at) {
    return r->shard - at < PIECE_ELEMS ? r->shard - at : PIECE_ELEMS;
}

static void narrow_work(void *arg, int index, int n_threads) {
    row_work *w = arg;
    size_t stride = (size_t)n_threads * PIECE_ELEMS;
    for (size_t at = (size_t)index * PIECE_ELEMS; at < w->r->shard; at += stride)
        tagc_bf16_narrow(w->from + at, w->halves + at, piece_elems(w->r, at));
}

static void narrow(const tagc_reducer *r, const float *from, uint16_t *halves) {
    row_work w = {.r = r, .from = from, .halves = halves};
    tagc_pool_run(r->pool, narrow_work, &w);
}

/* Readies the row of turn t for the rank `local`; returns where it is, in values. */
static size_t row_out(tagc_reducer *r, int t, int local) {
    tagc_direct *d = tagc_direct_of(r);
    size_t row = tagc_direct_row(r, tagc_host_to(d, t), local) * r->shard, at = row_at(r, t, local);
    if (!is_copied(r)) return row;
    if (is_wide(r))
        memcpy((float *)d->rows_send + at, tagc_reducer_gradient(r) + row, r->shard * sizeof(float));
    else
        narrow(r, tagc_reducer_gradient(r) + row, (uint16_t *)d->rows_send + at);
    return at;
}

/* Sends the rows of turns [t, end) to every local rank, in the message of t. */
static void post_rows(tagc_reducer *r, int t, int end) {
    tagc_direct *d = tagc_direct_of(r);
    tagc_message *message = &d->rows_in[t % d->row_window];
    size_t width = width_of(r);
    double start_s = tagc_clock_s();
    tagc_message_clear(message);
    for (int l = 0; l < d->per_host; l++) {
        if (l == d->local) continue;
        int peer = tagc_rank_of(d, d->host, l);
        size_t from = row_out(r, t, l);
        for (int more = t + 1; more < end; more++) row_out(r, more, l);
        size_t n_bytes = (size_t)(end - t) * r->shard * width;
        tagc_message_to(message, peer, n_bytes, from * width);
        tagc_message_from(message, peer, n_bytes, row_at(r, t, l) * width);
    }
    if (is_copied(r)) tagc_phase_end(r, TAGC_PHASE_ENCODE, start_s);
    tagc_message_post(r, message, TAGC_ROUND_ROWS, TAGC_LEG_VALUES,
                      is_copied(r) ? (const void *)d->rows_send : r->now.gradient, d->rows_recv);
}

void tagc_hosts_post_first(tagc_reducer *r) {
    const tagc_direct *d = tagc_direct_of(r);
    if (d->are_rows_together) {
        post_rows(r, 0, d->n_hosts);
        return;
    }
    for (int t = 0; t < d->row_window; t++) post_rows(r, t, t + 1);
}

tagc_message *tagc_hosts_rows(const tagc_reducer *r, int t) {
    const tagc_direct *d = tagc_direct_of(r);
    return &d->rows_in[d->are_rows_together ? 0 : t % d->row_window];
}

static void add_piece(const row_work *w, size_t at, size_t n) {
    const tagc_reducer *r = w->r;
    const tagc_direct *d = tagc_direct_of(r);
    float widened[PIECE_ELEMS], *sum = w->sum + at;
    for (int l = 0; l < d->per_host; l++) {
        size_t row = row_at(r, w->turn, l) + at;
        const float *part = w->from + at;
        if (l != d->local && is_wide(r)) part = (const float *)d->rows_recv + row;
        if (l != d->local && !is_wide(r)) {
            tagc_bf16_widen((const uint16_t *)d->rows_recv + row, widened, n);
            part = widened;
        }
        if (l == 0)
            memcpy(sum, part, n * sizeof *sum);
        else
            tagc_sum_add(sum, part, n);
    }
}

static void add_work(void *arg, int index, int n_threads) {
    row_work *w = arg;
    size_t stride = (size_t)n_threads * PIECE_ELEMS;
    for (size_t at = (size_t)index * PIECE_ELEMS; at < w->r->shard; at += stride)
        add_piece(w, at, piece_elems(w->r, at));
}

static tagc_status add_rows(tagc_reducer *r, int t, float *sum) {
    const tagc_direct *d = tagc_direct_of(r);
    size_t own_row = tagc_direct_row(r, tagc_host_to(d, t), d->local) * r->shard;
    TAGC_TRY(tagc_message_wait(r, tagc_hosts_rows(r, t)));
    double start_s = tagc_clock_s();
    row_work w = {.r = r, .from = tagc_reducer_gradient(r) + own_row, .turn = t, .sum = sum};
    tagc_pool_run(r->pool, add_work, &w);
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    return TAGC_OK;
}

tagc_status tagc_hosts_add(tagc_reducer *r, int t) {
    const tagc_direct *d = tagc_direct_of(r);
    TAGC_TRY(add_rows(r, t, d->host_sum));
    int next = t + d->row_window;
    if (next < d->n_hosts) post_rows(r, next, next + 1);
    return TAGC_OK;
}

/* ---- one host: a dense reduce-scatter ---- */

tagc_status tagc_hosts_sum(tagc_reducer *r) {
    float *sums = tagc_direct_sums(r);
    TAGC_TRY(add_rows(r, 0, sums));
    double start_s = tagc_clock_s();
    for (size_t i = 0; r->scale != 1.0f && i < r->shard; i++) sums[i] *= r->scale;
    r->now.stats.nonfinite |= tagc_holds_nonfinite(sums, r->shard);
    r->now.stats.n_sent = r->options.n_elems / (uint64_t)r->options.ranks_per_host;
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    return TAGC_OK;
}

/* The owner uses the same rounded sums. */
tagc_message *tagc_hosts_share(tagc_reducer *r) {
    tagc_direct *d = tagc_direct_of(r);
    float *sums = tagc_direct_sums(r);
    size_t width = width_of(r);
    uint16_t *halves = is_wide(r) ? NULL : (uint16_t *)d->rows_send;
    tagc_message *message = &d->result_out[0];
    double start_s = tagc_clock_s();
    if (halves) {
        narrow(r, sums, halves);
        tagc_bf16_widen(halves, sums, r->shard);
        r->now.stats.nonfinite |= tagc_holds_nonfinite(sums, r->shard); /* rounding up can overflow */
        tagc_phase_end(r, TAGC_PHASE_ENCODE, start_s);
    }
    tagc_message_clear(message);
    for (size_t q = 0; q < (size_t)r->world_size; q++) {
        if ((int)q == r->rank) continue;
        tagc_message_to(message, (int)q, r->shard * width, 0);
        tagc_message_from(message, (int)q, r->shard * width, q * r->shard * width);
    }
    tagc_message_post(r, message, TAGC_ROUND_RESULTS, TAGC_LEG_RESULT,
                      halves ? (const void *)halves : (const void *)sums,
                      halves ? (void *)d->rows_recv : (void *)r->now.output);
    return message;
}

void tagc_hosts_take(tagc_reducer *r) {
    const tagc_direct *d = tagc_direct_of(r);
    double start_s = tagc_clock_s();
    for (size_t q = 0; q < (size_t)r->world_size && !is_wide(r); q++)
        if ((int)q != r->rank)
            tagc_bf16_widen((const uint16_t *)d->rows_recv + q * r->shard, r->now.output + q * r->shard,
                            r->shard);
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
}
