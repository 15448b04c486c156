/* Within a host: the ranks of one host add what they have for the same destination before anything is encoded.
 *
 * Rows travel whole, bf16 or fp32, while the row before them is encoded. The own part is added as it is; sums are fp32,
 * in the order of local indices. */
#include "codec/bf16.h"
#include "codec/sum.h"
#include "core/clock.h"
#include "exchange/direct/direct.h"
#include "exchange/reducer.h"

#include <string.h>

enum { PIECE_ELEMS = 4096 }; /* of a sum: stays in the cache while all ranks' parts are added */

static int is_wide(const tagc_reducer *r) {
    return r->options.values == TAGC_VALUES_FP32;
}

static size_t width_of(const tagc_reducer *r) {
    return is_wide(r) ? sizeof(float) : sizeof(uint16_t);
}

void tagc_hosts_place(tagc_reducer *r, tagc_arena *arena) {
    tagc_direct *d = &r->direct;
    size_t n_slots = (size_t)(d->n_hosts < TAGC_HOST_DEPTH ? d->n_hosts : TAGC_HOST_DEPTH);
    size_t n_values = n_slots * (size_t)d->per_host * r->shard;
    d->halves_send = tagc_arena_take(arena, is_wide(r) ? 0 : n_values, sizeof *d->halves_send);
    d->host_recv = tagc_arena_take(arena, n_values, width_of(r));
    d->host_sum = tagc_arena_take(arena, d->coded ? r->shard : 0, sizeof *d->host_sum);
}

/* One row of work, piece by piece, on as many threads as there are. */
typedef struct row_job {
    const tagc_reducer *r;
    const float *from; /* the own row */
    uint16_t *halves;  /* narrowing: where it goes */
    size_t slot;       /* adding: of what arrived */
    float *sum;
} row_job;

static size_t piece_elems(const tagc_reducer *r, size_t at) {
    return r->shard - at < PIECE_ELEMS ? r->shard - at : PIECE_ELEMS;
}

static void narrow_work(void *arg, int index, int n_threads) {
    row_job *job = arg;
    size_t stride = (size_t)n_threads * PIECE_ELEMS;
    for (size_t at = (size_t)index * PIECE_ELEMS; at < job->r->shard; at += stride)
        tagc_bf16_narrow(job->from + at, job->halves + at, piece_elems(job->r, at));
}

static void narrow(const tagc_reducer *r, const float *from, uint16_t *halves) {
    row_job job = {.r = r, .from = from, .halves = halves};
    tagc_pool_run(r->pool, narrow_work, &job);
}

/* To every local rank the row of its counterpart on the host of stage s. */
void tagc_hosts_post(tagc_reducer *r, int s) {
    tagc_direct *d = &r->direct;
    size_t n_local = (size_t)d->per_host, slot = (size_t)s % TAGC_HOST_DEPTH, width = width_of(r);
    uint16_t *halves = is_wide(r) ? NULL : d->halves_send + slot * n_local * r->shard;
    tagc_message *message = &d->host_in[slot];
    tagc_message_clear(message);
    double start_s = tagc_clock_s();
    for (int l = 0; l < d->per_host; l++) {
        if (l == d->local) continue;
        int peer = tagc_rank_of(d, d->host, l);
        size_t row = tagc_direct_row(r, tagc_host_to(d, s), l) * r->shard;
        if (halves) narrow(r, r->gradient + row, halves + (size_t)l * r->shard);
        tagc_message_send(message, peer, r->shard * width, (halves ? (size_t)l * r->shard : row) * width);
        tagc_message_receive(message, peer, r->shard * width, (size_t)l * r->shard * width);
    }
    if (halves) tagc_phase_end(r, TAGC_PHASE_ENCODE, start_s);
    tagc_message_post(r, message, TAGC_LEG_VALUES, halves ? (const void *)halves : (const void *)r->gradient,
                      d->host_recv + slot * n_local * r->shard * width);
}

static void add_piece(const row_job *job, size_t at, size_t n) {
    const tagc_reducer *r = job->r;
    const tagc_direct *d = &r->direct;
    float widened[PIECE_ELEMS], *sum = job->sum + at;
    for (int l = 0; l < d->per_host; l++) {
        size_t row = (job->slot * (size_t)d->per_host + (size_t)l) * r->shard + at;
        const float *part = job->from + at;
        if (l != d->local && is_wide(r)) part = (const float *)d->host_recv + row;
        if (l != d->local && !is_wide(r)) {
            tagc_bf16_widen((const uint16_t *)d->host_recv + row, widened, n);
            part = widened;
        }
        if (l == 0)
            memcpy(sum, part, n * sizeof *sum);
        else
            tagc_sum_add(sum, part, n);
    }
}

static void add_work(void *arg, int index, int n_threads) {
    row_job *job = arg;
    size_t stride = (size_t)n_threads * PIECE_ELEMS;
    for (size_t at = (size_t)index * PIECE_ELEMS; at < job->r->shard; at += stride)
        add_piece(job, at, piece_elems(job->r, at));
}

static tagc_status add_rows(tagc_reducer *r, int s, float *sum) {
    tagc_direct *d = &r->direct;
    size_t slot = (size_t)s % TAGC_HOST_DEPTH;
    size_t own_row = tagc_direct_row(r, tagc_host_to(d, s), d->local) * r->shard;
    TAGC_TRY(tagc_message_wait(r, &d->host_in[slot]));
    double start_s = tagc_clock_s();
    row_job job = {.r = r, .from = r->gradient + own_row, .slot = slot, .sum = sum};
    tagc_pool_run(r->pool, add_work, &job);
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    return TAGC_OK;
}

tagc_status tagc_hosts_add(tagc_reducer *r, int s) {
    TAGC_TRY(add_rows(r, s, r->direct.host_sum));
    if (s + TAGC_HOST_DEPTH < r->direct.n_hosts) tagc_hosts_post(r, s + TAGC_HOST_DEPTH);
    return TAGC_OK;
}

/* ---- one host: a dense reduce-scatter ---- */

/* Sums to all, in the width of the rows: the owner, too, goes on with what the others get. */
static tagc_status share_sums(tagc_reducer *r, float *sums) {
    tagc_direct *d = &r->direct;
    size_t width = width_of(r);
    uint16_t *halves = is_wide(r) ? NULL : d->halves_send;
    double start_s = tagc_clock_s();
    if (halves) {
        narrow(r, sums, halves);
        tagc_bf16_widen(halves, sums, r->shard);
        r->stats.nonfinite |= tagc_holds_nonfinite(sums, r->shard); /* rounding up can overflow */
        tagc_phase_end(r, TAGC_PHASE_ENCODE, start_s);
    }
    tagc_message_clear(r->round);
    for (size_t q = 0; q < (size_t)r->world_size; q++) {
        if ((int)q == r->rank) continue;
        tagc_message_send(r->round, (int)q, r->shard * width, 0);
        tagc_message_receive(r->round, (int)q, r->shard * width, q * r->shard * width);
    }
    tagc_message_post(r, r->round, TAGC_LEG_RESULT, halves ? (const void *)halves : (const void *)sums,
                      halves ? (void *)d->host_recv : (void *)r->output);
    TAGC_TRY(tagc_message_wait(r, r->round));
    if (!halves) return TAGC_OK;
    start_s = tagc_clock_s();
    for (size_t q = 0; q < (size_t)r->world_size; q++)
        if ((int)q != r->rank)
            tagc_bf16_widen((const uint16_t *)d->host_recv + q * r->shard, r->output + q * r->shard,
                            r->shard);
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    return TAGC_OK;
}

tagc_status tagc_hosts_step(tagc_reducer *r) {
    float *sums = tagc_direct_sums(r);
    TAGC_TRY(add_rows(r, 0, sums));
    double start_s = tagc_clock_s();
    for (size_t i = 0; r->scale != 1.0f && i < r->shard; i++) sums[i] *= r->scale;
    r->stats.nonfinite |= tagc_holds_nonfinite(sums, r->shard);
    r->stats.n_kept = r->options.n_elems / (uint64_t)r->options.ranks_per_host;
    r->stats.n_union = r->options.n_elems;
    tagc_phase_end(r, TAGC_PHASE_DECODE, start_s);
    return r->options.all_reduce == 1 ? share_sums(r, sums) : TAGC_OK;
}
