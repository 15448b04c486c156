/* Gathers followed by a naive coder of the test's own: every rank knows all masters, and what each must be given. And a
 * transport without lanes, which damages what it is told to and counts what crosses between hosts. */
#ifndef TAGC_TESTS_EXCHANGE_GATHERS_H
#define TAGC_TESTS_EXCHANGE_GATHERS_H

#include "../lengths.h"
#include "../take_from.h"
#include "exchange/options.h"
#include "exchange/volume.h"
#include "exchange/wire.h"
#include "oracle.h"
#include "ranks.h"
#include "tagc/transport.h"

enum { BLOCK = 256, MAX_SHARD = 1500 };

/* ---- the naive coder ---- */

/* Writes what is left of x after its blocks were rounded to decoded (n). */
static inline void naive_round(int bits, const float *x, size_t n, float *decoded) {
    for (size_t at = 0; at < n; at += BLOCK) {
        size_t m = n - at < BLOCK ? n - at : BLOCK;
        float up = 0, down = 0;
        for (size_t i = at; i < at + m; i++) {
            up = x[i] > up ? x[i] : up;
            down = -x[i] > down ? -x[i] : down;
        }
        float share = bits == 8 ? 1.0f / 128 : bits == 4 ? 1.0f / 8.5f : 0.375f;
        float scale = up > down ? -bf16_nearest(up * share) : bf16_nearest(down * share);
        for (size_t i = at; i < at + m; i++) {
            double q = scale == 0 ? 0 : nearbyint((double)(x[i] * (1.0f / scale))), half = 1 << (bits - 1);
            decoded[i] =
                (float)(fmin(fmax(q, -half), half - 1) + 0.0) * scale; /* + 0: an integer has no -0 */
        }
    }
}

static inline void naive_follow(int bits, const float *master, float *replica, size_t n) {
    float difference[MAX_SHARD] = {0}, decoded[MAX_SHARD];
    for (size_t i = 0; i < n; i++) difference[i] = master[i] - replica[i];
    naive_round(bits, difference, n, decoded);
    for (size_t i = 0; i < n; i++) replica[i] = bf16_nearest(replica[i] + decoded[i]);
}

/* ---- a transport without lanes that can damage what one rank receives ---- */

typedef void (*damage_fn)(uint8_t *bytes, uint64_t n_bytes, uint64_t where);

typedef struct trial {
    tagc_gatherer_options options;
    int kind; /* tagc_gather_kind, as the options say */
    size_t shard;
    int n_steps, has_lanes;
    /* without lanes: in gather number `step`, what `from` sends to `to` */
    int step, from, to, n_damaged;
    int which, n_met; /* the first such message, or one after it */
    uint64_t where;
    damage_fn damage;
    int now[MAX_RANKS];
    pthread_barrier_t barrier;
    const tagc_transfer *transfers[MAX_RANKS];
} trial;

typedef struct seat {
    trial *t;
    int rank, world_size;
} seat;

static inline tagc_status exchange_all(void *context, const tagc_transfer *transfer) {
    seat *self = context;
    trial *t = self->t;
    t->transfers[self->rank] = transfer;
    pthread_barrier_wait(&t->barrier);
    int same = 1;
    for (int s = 0; s < self->world_size; s++) {
        arrival got;
        if (s == self->rank) continue;
        same &= take_from(t->transfers[s], transfer, s, self->rank, &got);
        if (t->damage && got.n_bytes && t->now[self->rank] == t->step && s == t->from &&
            self->rank == t->to && t->n_met++ == t->which) {
            t->damage(got.bytes, got.n_bytes, t->where);
            t->n_damaged++;
        }
    }
    pthread_barrier_wait(&t->barrier);
    return same ? TAGC_OK : tagc_report(TAGC_ERR_CORRUPT, "ranks are in different transfers");
}

static const tagc_callback_ops trial_ops = {.abi = TAGC_TRANSPORT_ABI, .exchange = exchange_all};

/* ---- one rank's view of a trial ---- */

typedef struct view {
    rank_run *run;
    trial *t;
    seat seat;
    tagc_comm *comm;
    tagc_gatherer *gatherer;
    size_t n;
    float *masters;  /* (W, shard) */
    float *expected; /* (W, shard) */
    void *full;      /* (W, shard) of full_format */
} view;

static inline float full_at(const view *v, size_t i) {
    if (v->t->options.full_format == TAGC_FORMAT_FP32) return ((const float *)v->full)[i];
    return bf16_wide(((const uint16_t *)v->full)[i]);
}

/* value: one that bf16 has */
static inline void set_full(view *v, size_t i, float value) {
    if (v->t->options.full_format == TAGC_FORMAT_FP32)
        ((float *)v->full)[i] = value;
    else
        ((uint16_t *)v->full)[i] = (uint16_t)(bits_of(value) >> 16);
}

static inline int bits_of_kind(int kind) {
    return kind == TAGC_GATHER_DELTA4 ? 4 : kind == TAGC_GATHER_DELTA2 ? 2 : 8;
}

static inline float step_of(int step, int rank, size_t i) {
    return random_gradient((uint64_t)step + 100, rank, i) * (step == 0 ? 10.0f : 1.0f);
}

static inline int open_view(rank_run *run, view *v) {
    trial *t = run->shared;
    *v = (view){.run = run, .t = t, .seat = {t, run->rank, run->world_size}, .comm = run->comm};
    if (!t->has_lanes)
        CHECK(run, tagc_comm_create_callback(&trial_ops, &v->seat, run->rank, run->world_size, named_ranks(),
                                             &v->comm) == TAGC_OK);
    v->n = (size_t)run->world_size * t->shard;
    v->masters = calloc(v->n, sizeof(float));
    v->expected = calloc(v->n, sizeof(float));
    v->full = calloc(v->n, t->options.full_format == TAGC_FORMAT_FP32 ? sizeof(float) : sizeof(uint16_t));
    tagc_gatherer_options options = t->options;
    options.n_elems = v->n;
    t->now[run->rank] = -1;
    return CHECK(run, tagc_gatherer_create(v->comm, &options, &v->gatherer) == TAGC_OK);
}

static inline void close_view(view *v) {
    tagc_gatherer_destroy(v->gatherer);
    if (!v->t->has_lanes) tagc_comm_destroy(v->comm);
    free(v->masters);
    free(v->expected);
    free(v->full);
}

/* Changes the masters, which stay about as large as they are. */
static inline void move_masters(view *v, int step) {
    for (size_t i = 0; i < v->n; i++)
        v->masters[i] = 0.95f * v->masters[i] + step_of(step, (int)(i / v->t->shard), i % v->t->shard);
}

static inline tagc_status gather(view *v, int step) {
    v->t->now[v->run->rank] = step;
    tagc_status status =
        begin_gatherer(v->gatherer, v->masters + (size_t)v->run->rank * v->t->shard, v->full);
    if (status == TAGC_OK) status = tagc_gatherer_end(v->gatherer);
    return status;
}

static inline void expect(view *v, int whole) {
    size_t shard = v->t->shard;
    for (int r = 0; r < v->run->world_size; r++) {
        float *row = v->expected + (size_t)r * shard;
        const float *master = v->masters + (size_t)r * shard;
        if (v->t->kind == TAGC_GATHER_FP32)
            memcpy(row, master, shard * sizeof *row);
        else if (v->t->kind == TAGC_GATHER_INT8)
            naive_round(8, master, shard, row);
        else if (whole || v->t->kind == TAGC_GATHER_BF16)
            for (size_t i = 0; i < shard; i++) row[i] = bf16_nearest(master[i]);
        else
            naive_follow(bits_of_kind(v->t->kind), master, row, shard);
    }
}

static inline int row_is_as_expected(const view *v, int row) {
    size_t begin = (size_t)row * v->t->shard, same = 0;
    for (size_t i = begin; i < begin + v->t->shard; i++)
        same += bits_of(full_at(v, i)) == bits_of(v->expected[i]);
    return same == v->t->shard;
}

static inline int is_as_expected(const view *v) {
    int same = 0;
    for (int row = 0; row < v->run->world_size; row++) same += row_is_as_expected(v, row);
    return same == v->run->world_size;
}

static inline uint64_t sent_bytes(const view *v) {
    uint64_t sent[TAGC_N_LEGS];
    tagc_comm_bytes(v->comm, sent, NULL, TAGC_N_LEGS);
    return sent[TAGC_LEG_GATHER];
}

static inline void run_trial(trial *t, int world_size, void (*body)(rank_run *run)) {
    pthread_barrier_init(&t->barrier, NULL, (unsigned)world_size);
    run_ranks(world_size, body, t);
    pthread_barrier_destroy(&t->barrier);
}

static inline trial make_trial(int kind, int has_lanes) {
    trial t = {.kind = kind, .shard = 700, .n_steps = 6, .has_lanes = has_lanes};
    tagc_gatherer_options_init(&t.options);
    tagc_gatherer_options_choose(&t.options, kind);
    return t;
}

#endif
