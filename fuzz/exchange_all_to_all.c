/* All-to-alls with a hostile peer (peers.h).
 *
 * Input: 1 byte (the kind), 1 byte (what the hostile rank does otherwise, see `act`), then edits. */
#include "exchange/all_to_all.h"
#include "peers.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

enum { N_CALLS = 3, MOST_COUNT = 400, MOST_ELEMS = MOST_PEERS * MOST_COUNT };
enum { ACT_MORE = 1, ACT_FAIL = 2, ACT_OTHER_FORMAT = 4, ACT_NONFINITE = 8 };

static const struct kind {
    int n_ranks, format, rounding, is_laneless;
} kinds[] = {
    {3, TAGC_FORMAT_INT8, TAGC_ROUNDING_NEAREST, 0}, {3, TAGC_FORMAT_INT4, TAGC_ROUNDING_STOCHASTIC, 0},
    {4, TAGC_FORMAT_INT8, TAGC_ROUNDING_NEAREST, 0}, {4, TAGC_FORMAT_INT4, TAGC_ROUNDING_STOCHASTIC, 0},
    {4, TAGC_FORMAT_FP32, TAGC_ROUNDING_NEAREST, 0}, {4, TAGC_FORMAT_FP32, TAGC_ROUNDING_NEAREST, 1},
    {3, TAGC_FORMAT_INT2, TAGC_ROUNDING_NEAREST, 1},
};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

typedef struct token_peers {
    peers all;
    const struct kind *of;
    int act;
    tagc_all_to_all *objects[MOST_PEERS];
    tagc_status statuses[MOST_PEERS][N_CALLS];
    float got[MOST_PEERS][N_CALLS][MOST_ELEMS], honest[MOST_PEERS][N_CALLS][MOST_ELEMS];
    float input[MOST_PEERS][MOST_ELEMS];
} token_peers;

static token_peers *of_peers(peers *all) {
    return (token_peers *)(void *)((char *)all - offsetof(token_peers, all));
}

static uint64_t count_of(int call, int from, int to) {
    return (uint64_t)(from * 131 + to * 57 + call * 97) % MOST_COUNT;
}

static void make_objects(peers *all, int rank) {
    token_peers *p = of_peers(all);
    tagc_all_to_all_options options;
    tagc_all_to_all_options_init(&options);
    options.min_elems = 100;
    require(tagc_all_to_all_create(all->comms[rank], &options, &p->objects[rank]) == TAGC_OK);
}

static tagc_status run_call(token_peers *p, int rank, int call) {
    int n_ranks = p->of->n_ranks, is_odd = rank == n_ranks - 1 && call == 1;
    uint64_t sends[MOST_PEERS], receives[MOST_PEERS];
    tagc_blocks_options blocks;
    tagc_all_to_all_call c;
    tagc_all_to_all_call_init(&c);
    tagc_blocks_options_init(&blocks);
    for (int r = 0; r < n_ranks; r++) {
        sends[r] = count_of(call, rank, r) + (is_odd && r == 0 && (p->act & ACT_MORE));
        receives[r] = count_of(call, r, rank);
        c.n_input += sends[r];
        c.n_output += receives[r];
    }
    for (uint64_t i = 0; i < c.n_input; i++)
        p->input[rank][i] = (float)((i * 7919 + (uint64_t)(rank * 131 + call)) % 1009) / 504.0f - 1;
    if (is_odd && (p->act & ACT_NONFINITE)) memset(p->input[rank], 0xff, sizeof(float));
    memset(p->got[rank][call], 0, sizeof p->got[rank][call]);
    c.input = p->input[rank];
    c.output = p->got[rank][call];
    c.sends = sends;
    c.receives = receives;
    c.n_counts = (uint64_t)n_ranks;
    blocks.format = is_odd && (p->act & ACT_OTHER_FORMAT) ? TAGC_FORMAT_INT8 : p->of->format;
    blocks.rounding = p->of->rounding;
    if (p->of->format != TAGC_FORMAT_FP32) c.blocks = &blocks;
    if (is_odd && (p->act & ACT_FAIL))
        return tagc_all_to_all_fail(p->objects[rank], TAGC_ERR_MEMORY, "of a test");
    return tagc_all_to_all_run(p->objects[rank], &c);
}

static void act(peers *all, int rank) {
    token_peers *p = of_peers(all);
    p->objects[rank]->n_begun = 10; /* as in the first run */
    for (int call = 0; call < N_CALLS; call++) p->statuses[rank][call] = run_call(p, rank, call);
}

/* Counts have checksums, and so have blocks; elements that travel whole have none. */
static void check(const token_peers *p) {
    int n_honest = p->of->n_ranks - 1, is_exact = !p->all.is_changed && !(p->act & ACT_NONFINITE);
    for (int rank = 0; rank < n_honest; rank++)
        for (int call = 0; call < N_CALLS; call++) {
            tagc_status status = p->statuses[rank][call];
            /* a peer may say of itself that it was silent */
            if (!p->all.is_crafted || status != TAGC_ERR_TIMEOUT) check_status(status);
            if (status == TAGC_OK && is_exact)
                require(memcmp(p->got[rank][call], p->honest[rank][call], sizeof p->got[rank][call]) == 0);
        }
}

static void check_all_right(const token_peers *p) {
    for (int rank = 0; rank < p->of->n_ranks; rank++)
        for (int call = 0; call < N_CALLS; call++) require(p->statuses[rank][call] == TAGC_OK);
}

static void make(token_peers *p) {
    make_peers(&p->all, p->of->n_ranks, p->of->n_ranks - 1, !p->of->is_laneless);
    run_peers(&p->all, make_objects);
    p->act = 0;
    run_honest_peers(&p->all, act);
    check_all_right(p);
    memcpy(p->honest, p->got, sizeof p->honest);
}

static void unmake(token_peers *p) {
    for (int rank = 0; rank < p->of->n_ranks; rank++) tagc_all_to_all_destroy(p->objects[rank]);
    unmake_peers(&p->all);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    static token_peers *all_peers[N_KINDS];
    if (n_bytes < 2) return 0;
    token_peers **at = &all_peers[data[0] % N_KINDS], *p = *at;
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
    run_peers(&p->all, act); /* of which the first call may tell of damage before */
    check(p);
    run_peers(&p->all, act);
    check(p);
    check_all_right(p);
    return 0;
}
