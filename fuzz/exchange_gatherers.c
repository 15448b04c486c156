/* Gathers of parameters, whole, as deltas and without loss, with a hostile peer (peers.h).
 *
 * Input: 1 byte (the kind of gather), 1 byte (what ranks do otherwise, see `act`), then edits. */
#include "../tests/lengths.h"
#include "peers.h"

#include <math.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

enum { N_GATHERERS = 2, N_GATHERS = 3, SHARD = 700, MOST_ELEMS = MOST_PEERS * 2 * SHARD };
enum { ACT_OTHER_ORDER = 1, ACT_FAIL = 2, ACT_OTHER_LENGTH = 4, ACT_NONFINITE = 8 };

static const struct kind {
    int n_ranks, format, delta, lossless, full_format, rounding, check_every, is_laneless;
} kinds[] = {
    {3, TAGC_FORMAT_FP32, 0, 0, 0, 0, 0, 0},
    {3, TAGC_FORMAT_BF16, 0, 0, TAGC_FORMAT_BF16, 0, 0, 0},
    {3, TAGC_FORMAT_INT8, 0, 0, 0, 0, 0, 0},
    {3, TAGC_FORMAT_INT8, 0, 0, 0, TAGC_ROUNDING_STOCHASTIC, 0, 0},
    {3, TAGC_FORMAT_INT8, 1, 0, 0, 0, 2, 0},
    {3, TAGC_FORMAT_INT4, 1, 0, TAGC_FORMAT_BF16, 0, 0, 0},
    {3, TAGC_FORMAT_INT2, 1, 0, 0, 0, 0, 0},
    {3, TAGC_FORMAT_BF16, 0, 1, TAGC_FORMAT_BF16, 0, 0, 0},
    {3, TAGC_FORMAT_BF16, 0, 1, TAGC_FORMAT_BF16, 0, 0, 1},
    {3, TAGC_FORMAT_INT4, 1, 0, 0, 0, 2, 1},
};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

typedef struct gather_peers {
    peers all;
    const struct kind *of;
    int act;
    tagc_gatherer *gatherers[MOST_PEERS][N_GATHERERS];
    tagc_status statuses[MOST_PEERS][N_GATHERS][N_GATHERERS];
    float full[MOST_PEERS][N_GATHERERS][MOST_ELEMS]; /* or bf16 */
    float got[MOST_PEERS][N_GATHERS][N_GATHERERS][MOST_ELEMS],
        honest[MOST_PEERS][N_GATHERS][N_GATHERERS][MOST_ELEMS];
    float shards[MOST_PEERS][2 * SHARD];
} gather_peers;

static gather_peers *of_peers(peers *all) {
    return (gather_peers *)(void *)((char *)all - offsetof(gather_peers, all));
}

/* Deltas and lossless gathers have headers with checksums. */
static int is_summed(const struct kind *of) {
    return of->delta || of->lossless;
}

static size_t full_bytes(const tagc_gatherer *g) {
    return (size_t)g->options.n_elems * g->width;
}

static void make_gatherers(peers *all, int rank) {
    gather_peers *p = of_peers(all);
    const struct kind *of = p->of;
    for (int u = 0; u < N_GATHERERS; u++) {
        tagc_gatherer_options options;
        tagc_gatherer_options_init(&options);
        options.n_elems = (uint64_t)of->n_ranks * (SHARD + 16u * (unsigned)u);
        options.format = of->format;
        options.delta = of->delta;
        options.lossless = (uint64_t)of->lossless;
        options.full_format = (uint64_t)of->full_format;
        options.rounding = (uint64_t)of->rounding;
        options.check_every = (uint64_t)of->check_every;
        require(tagc_gatherer_create(all->comms[rank], &options, &p->gatherers[rank][u]) == TAGC_OK);
    }
}

/* Weights, which change a little from one gather to the next. */
static void fill_shard(gather_peers *p, int rank, int gather) {
    for (int i = 0; i < 2 * SHARD; i++) {
        float x = (float)((i * 7919 + rank * 131) % 1009 - 504) / 504.0f;
        p->shards[rank][i] = x * x * x + 1e-3f * (float)((i + gather) % 5);
    }
    if (rank == p->of->n_ranks - 1 && (p->act & ACT_NONFINITE) && gather == 1)
        memset(p->shards[rank], 0xff, sizeof(float));
}

static tagc_status begin_gather(gather_peers *p, int rank, int gather, int u) {
    int is_hostile = rank == p->of->n_ranks - 1;
    tagc_gatherer *g = p->gatherers[rank][u];
    if (is_hostile && (p->act & ACT_FAIL) && gather == 1)
        return tagc_gatherer_fail(g, TAGC_ERR_MEMORY, "of a test");
    if (is_hostile && (p->act & ACT_OTHER_LENGTH) && gather == 1)
        return tagc_gatherer_begin(g, p->shards[rank], g->shard + 1, p->full[rank][u], g->options.n_elems);
    return begin_gatherer(g, p->shards[rank], p->full[rank][u]);
}

static void act(peers *all, int rank) {
    gather_peers *p = of_peers(all);
    int is_turned = rank == p->of->n_ranks - 1 && (p->act & ACT_OTHER_ORDER);
    for (int u = 0; u < N_GATHERERS; u++) { /* as in the first run */
        tagc_gatherer *g = p->gatherers[rank][u];
        require(tagc_gatherer_reset(g) == TAGC_OK);
        g->n_begun = 10;
        if (g->is_lossless) tagc_gatherer_lossless_init(g);
    }
    for (int gather = 0; gather < N_GATHERS; gather++) {
        tagc_status begun[N_GATHERERS];
        fill_shard(p, rank, gather);
        for (int i = 0; i < N_GATHERERS; i++) {
            int u = is_turned ? N_GATHERERS - 1 - i : i;
            begun[u] = begin_gather(p, rank, gather, u);
        }
        for (int u = 0; u < N_GATHERERS; u++) {
            tagc_gatherer *g = p->gatherers[rank][u];
            p->statuses[rank][gather][u] = begun[u] == TAGC_OK ? tagc_gatherer_end(g) : begun[u];
            memcpy(p->got[rank][gather][u], p->full[rank][u], full_bytes(g));
        }
    }
}

/* Where a gather failed on a rank, later ones of it may send whole parameters, which are others than replicas. */
static void check(const gather_peers *p) {
    int n_honest = p->of->n_ranks - 1;
    for (int u = 0; u < N_GATHERERS; u++) {
        int is_exact =
            !(p->act & ACT_NONFINITE) && (!p->all.is_changed || (is_summed(p->of) && !p->all.is_crafted));
        for (int gather = 0; gather < N_GATHERS; gather++) {
            for (int rank = 0; rank < n_honest; rank++) {
                tagc_status status = p->statuses[rank][gather][u];
                check_status(status);
                if (status == TAGC_OK && is_exact)
                    require(memcmp(p->got[rank][gather][u], p->honest[rank][gather][u],
                                   full_bytes(p->gatherers[rank][u])) == 0);
            }
            for (int rank = 0; rank < n_honest; rank++) is_exact &= p->statuses[rank][gather][u] == TAGC_OK;
        }
    }
}

static void check_all_right(const gather_peers *p) {
    for (int rank = 0; rank < p->of->n_ranks; rank++)
        for (int gather = 0; gather < N_GATHERS; gather++)
            for (int u = 0; u < N_GATHERERS; u++) require(p->statuses[rank][gather][u] == TAGC_OK);
}

static void make(gather_peers *p) {
    make_peers(&p->all, p->of->n_ranks, p->of->n_ranks - 1, !p->of->is_laneless);
    run_peers(&p->all, make_gatherers);
    p->act = 0;
    run_honest_peers(&p->all, act);
    check_all_right(p);
    memcpy(p->honest, p->got, sizeof p->honest);
}

static void unmake(gather_peers *p) {
    for (int rank = 0; rank < p->of->n_ranks; rank++)
        for (int u = 0; u < N_GATHERERS; u++) tagc_gatherer_destroy(p->gatherers[rank][u]);
    unmake_peers(&p->all);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    static gather_peers *all_peers[N_KINDS];
    if (n_bytes < 2) return 0;
    gather_peers **at = &all_peers[data[0] % N_KINDS], *p = *at;
    if (!p) {
        p = *at = calloc(1, sizeof *p);
        require(p != NULL);
        p->of = &kinds[data[0] % N_KINDS];
    }
    if (!p->all.n_ranks) make(p);
    p->act = data[1];
    read_edits(&p->all, data + 2, n_bytes - 2);
    run_peers(&p->all, act);
    check(p);
    p->all.n_edits = p->act = 0; /* honest from here on */
    if (is_broken(&p->all)) {
        unmake(p);
        return 0;
    }
    run_peers(&p->all, act); /* of which the first gather may tell of a failure before */
    check(p);
    run_peers(&p->all, act);
    check(p);
    check_all_right(p);
    return 0;
}
