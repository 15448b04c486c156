/* Gathers in two levels: the same bits as one gather of all ranks, each row across to a host once, and failures that every rank of a
 * host learns of. */
#include "../repeats.h"
#include "exchange/options.h"
#include "exchange/volume.h"
#include "unit/gather.h"
#include "world.h"

enum { N_STEPS = 8, RESET_AT = 4, NAN_AT = 5, RESET_AGAIN_AT = 7, MOST_SHARD = 3000 };

typedef struct trial {
    int kind, check_every;
    uint64_t shard;
    tagc_local_group *all; /* of all ranks, for the gather in one level */
} trial;

static tagc_gatherer_options options_of(const trial *t, int n_ranks) {
    tagc_gatherer_options o;
    tagc_gatherer_options_init(&o);
    o.n_elems = t->shard * (uint64_t)n_ranks;
    tagc_gatherer_options_choose(&o, t->kind);
    o.check_every = o.delta ? (uint64_t)t->check_every : 0;
    o.tag = 3;
    return o;
}

/* About as large as it was; in one step on one rank not finite. */
static void move_master(float *master, uint64_t n, int step, int rank, int last) {
    for (uint64_t i = 0; i < n; i++) {
        double u = (double)(number_of((uint64_t)step, (uint64_t)rank, i, 0) >> 40) / 16777216.0 - 0.5;
        master[i] = 0.95f * master[i] + (float)(u * u * u) * (step == 0 ? 80 : 1);
    }
    if (step == NAN_AT && rank == last) master[n / 2] = NAN;
    if (step == NAN_AT + 1 && rank == last) master[n / 2] = 0.25f;
}

static uint64_t sent_over(const tagc_comm *comm) {
    uint64_t sent[TAGC_N_LEGS];
    tagc_comm_bytes(comm, sent, NULL, TAGC_N_LEGS);
    return sent[TAGC_LEG_GATHER];
}

static int is_same(const float *a, const float *b, uint64_t n) {
    for (uint64_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof *a) != 0 && !(isnan(a[i]) && isnan(b[i]))) return 0;
    return 1;
}

/* What the two levels send, in a step that sends neither whole parameters of a delta nor checksums. */
static void check_bytes(member *m, const tagc_gatherer_options *options, uint64_t n_between,
                        uint64_t n_within) {
    const world *w = m->w;
    tagc_gatherer_options between, within;
    tagc_volume volume;
    tagc_flat_gather_split(options, w->n_hosts, w->n_places, &between, &within);
    EXPECT(m, tagc_gatherer_volume(&between, w->n_hosts, &volume) == TAGC_OK);
    EXPECT(m, options->lossless || (double)n_between == volume.n_bytes[TAGC_LEG_GATHER]);
    EXPECT(m, tagc_gatherer_volume(&within, w->n_places, &volume) == TAGC_OK);
    EXPECT(m, (double)n_within == w->n_hosts * volume.n_bytes[TAGC_LEG_GATHER]);
}

static void follow_body(member *m) {
    trial *t = m->w->shared;
    int n_ranks = m->w->n_hosts * m->w->n_places;
    tagc_gatherer_options options = options_of(t, n_ranks);
    uint64_t n = options.n_elems;
    float *master = calloc(t->shard, sizeof(float)), *full = calloc(n, sizeof(float)),
          *expected = calloc(n, sizeof(float));
    tagc_comm *all;
    tagc_gatherer *one_level = NULL;
    tagc_flat_gatherer *two_levels = NULL;
    EXPECT(m, tagc_comm_create_local(t->all, m->rank, NULL, &all) == TAGC_OK);
    EXPECT(m, tagc_gatherer_create(all, &options, &one_level) == TAGC_OK);
    EXPECT(m, tagc_flat_gatherer_create(m->within, m->between, &options, &two_levels) == TAGC_OK);
    for (int step = 0; step < N_STEPS && !m->failure[0]; step++) {
        move_master(master, t->shard, step, m->rank, n_ranks - 1);
        if (step == RESET_AT || step == RESET_AGAIN_AT) {
            EXPECT(m, tagc_gatherer_reset(one_level) == TAGC_OK);
            EXPECT(m, tagc_flat_gatherer_reset(two_levels) == TAGC_OK);
            EXPECT(m, tagc_flat_gatherer_replica(two_levels) == 0);
            for (uint64_t i = 0; i < n; i++) full[i] = expected[i] = (float)m->rank; /* whatever it was */
        }
        uint64_t between = sent_over(m->between), within = m->within ? sent_over(m->within) : 0;
        EXPECT(m, tagc_gatherer_begin(one_level, master, t->shard, expected, n) == TAGC_OK);
        EXPECT(m, tagc_flat_gatherer_begin(two_levels, master, full) == TAGC_OK);
        EXPECT(m, tagc_gatherer_end(one_level) == TAGC_OK);
        EXPECT(m, tagc_flat_gatherer_end(two_levels) == TAGC_OK);
        /* After a row that was not finite, all ranks of its place send whole parameters; in one level all ranks do. */
        int is_repair = options.delta && step == NAN_AT + 1, last = n_ranks - 1;
        for (int r = 0; r < n_ranks; r++)
            if (!is_repair || r % m->w->n_places == last % m->w->n_places)
                if (!EXPECT(m, is_same(full + (uint64_t)r * t->shard, expected + (uint64_t)r * t->shard,
                                       t->shard)))
                    snprintf(m->failure, sizeof m->failure, "kind %d, shard %d, step %d: row %d differs",
                             t->kind, (int)t->shard, step, r);
        int is_whole =
            options.delta && (step == 0 || step == RESET_AT || step == NAN_AT + 1 || step == RESET_AGAIN_AT);
        int is_checked = options.delta && t->check_every && (step + 1) % t->check_every == 0;
        if (m->within && !is_whole && !is_checked)
            check_bytes(m, &options, sent_over(m->between) - between, sent_over(m->within) - within);
        uint64_t n_gathers;
        if (step == NAN_AT)
            continue; /* a row of the last rank is void, which others of its place know alone */
        int has_replica = tagc_gatherer_replica(one_level, &n_gathers) != NULL;
        EXPECT(m, tagc_flat_gatherer_replica(two_levels) == (has_replica ? (uint64_t)step + 1 : 0));
        if (step != 2 || !has_replica) continue;
        /* As a run that goes on from a checkpoint. */
        tagc_flat_gatherer_destroy(two_levels);
        EXPECT(m, tagc_flat_gatherer_create(m->within, m->between, &options, &two_levels) == TAGC_OK);
        EXPECT(m, tagc_flat_gatherer_set_replica(two_levels, full, (uint64_t)step + 1) == TAGC_OK);
    }
    tagc_gatherer_destroy(one_level);
    tagc_flat_gatherer_destroy(two_levels);
    tagc_comm_destroy(all);
    free(master), free(full), free(expected);
}

static const int worlds[][2] = {{2, 2}, {3, 2}, {2, 3}, {4, 2}, {1, 4}, {4, 1}, {2, 4}};
enum { N_WORLDS = sizeof worlds / sizeof *worlds, STRIDE = REPEATS(1, 3, 5) };

TEST(test_as_one_level) {
    int n = 0;
    for (int w = 0; w < N_WORLDS; w++)
        for (int kind = 0; kind < TAGC_N_GATHER_KINDS; kind++) {
            if (n++ % STRIDE != 0) continue;
            static const uint64_t shards[] = {700, 1, 256, MOST_SHARD};
            trial t = {.kind = kind, .check_every = kind % 2 ? 3 : 0, .shard = shards[n % 4]};
            assert_int_equal(tagc_local_group_create(worlds[w][0] * worlds[w][1], &t.all), TAGC_OK);
            run_world(worlds[w][0], worlds[w][1], follow_body, &t);
            tagc_local_group_destroy(t.all);
        }
}

/* Several at once, ended in another order than begun, beside a gather that is never ended. */
static void many_body(member *m) {
    enum { N_FLATS = 4, SHARD = 500, N_ROUNDS = 5 };
    int n_ranks = m->w->n_hosts * m->w->n_places;
    tagc_flat_gatherer *gatherers[N_FLATS] = {NULL};
    uint64_t n = SHARD * (uint64_t)n_ranks;
    float *own = calloc(N_FLATS * SHARD, sizeof *own), *full = calloc(N_FLATS * n, sizeof *full);
    for (int f = 0; f < N_FLATS; f++) {
        trial t = {.kind = f % 2 ? TAGC_GATHER_BF16 : TAGC_GATHER_FP32, .shard = SHARD};
        tagc_gatherer_options options = options_of(&t, n_ranks);
        EXPECT(m, tagc_flat_gatherer_create(m->within, m->between, &options, &gatherers[f]) == TAGC_OK);
    }
    for (int round = 0; round < N_ROUNDS && !m->failure[0]; round++) {
        for (int f = 0; f < N_FLATS; f++) {
            for (int i = 0; i < SHARD; i++) own[f * SHARD + i] = (float)(m->rank * 8 + f + round + i % 5);
            EXPECT(m, tagc_flat_gatherer_begin(gatherers[f], own + f * SHARD, full + (uint64_t)f * n) ==
                          TAGC_OK);
        }
        for (int i = 0; i < N_FLATS; i++) {
            int f = (i * 3 + m->rank + round) % N_FLATS, is_right = 1;
            EXPECT(m, tagc_flat_gatherer_end(gatherers[f]) == TAGC_OK);
            for (uint64_t k = 0; k < n; k++)
                is_right &= full[(uint64_t)f * n + k] ==
                            (float)((int)(k / SHARD) * 8 + f + round + (int)(k % SHARD % 5));
            EXPECT(m, is_right);
        }
    }
    EXPECT(m, tagc_flat_gatherer_begin(gatherers[0], own, full) == TAGC_OK);
    for (int f = 0; f < N_FLATS; f++) tagc_flat_gatherer_destroy(gatherers[f]);
    free(own), free(full);
}

TEST(test_many) {
    run_world(2, 2, many_body, NULL);
    run_world(3, 2, many_body, NULL);
}

/* The comm of place 0 breaks: its ranks know why, and those beside them are told, in this gather. */
static void broken_body(member *m) {
    trial t = {.kind = TAGC_GATHER_FP32, .shard = 64};
    tagc_gatherer_options options = options_of(&t, m->w->n_hosts * m->w->n_places);
    tagc_flat_gatherer *gatherer;
    float own[64] = {0}, full[64 * MOST_RANKS];
    if (!EXPECT(m, tagc_flat_gatherer_create(m->within, m->between, &options, &gatherer) == TAGC_OK)) return;
    EXPECT(m, tagc_flat_gatherer_begin(gatherer, own, full) == TAGC_OK);
    EXPECT(m, tagc_flat_gatherer_end(gatherer) == TAGC_OK);
    if (m->rank == 0) tagc_comm_abort(m->between, "enough");
    tagc_status status = tagc_flat_gatherer_begin(gatherer, own, full);
    if (status == TAGC_OK) status = tagc_flat_gatherer_end(gatherer);
    EXPECT(m, status == TAGC_ERR_TRANSPORT);
    EXPECT(m, strstr(tagc_last_error(), m->place == 0 ? "enough" : "rank 0 failed in this gather"));
    tagc_flat_gatherer_destroy(gatherer);
}

TEST(test_broken) {
    run_world(2, 2, broken_body, NULL);
    run_world(2, 3, broken_body, NULL);
}

/* One rank that differs: its place refuses, and so do all others. */
static void differing_body(member *m) {
    trial t = {.kind = TAGC_GATHER_DELTA8, .shard = 64};
    tagc_gatherer_options options = options_of(&t, m->w->n_hosts * m->w->n_places);
    tagc_flat_gatherer *gatherer;
    if (m->rank == 3) options.format = TAGC_FORMAT_INT4;
    EXPECT(m, tagc_flat_gatherer_create(m->within, m->between, &options, &gatherer) == TAGC_ERR_MISMATCH);
    EXPECT(m, gatherer == NULL && strstr(tagc_last_error(), "format"));
}

TEST(test_differing) {
    run_world(2, 2, differing_body, NULL);
    run_world(3, 2, differing_body, NULL);
}
