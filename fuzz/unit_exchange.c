/* Exchanges of a model (tagc/model.h) with a hostile peer (peers.h): a saved state is loaded, units are exchanged, ranks decide together
 * what the next step sends, and exchange again. In one level and two.
 *
 * Input: 1 byte (the kind of model), 1 byte (what the hostile rank does otherwise, see `act`), then edits. */
#include "peers.h"
#include "unit/unit.h"

#include <math.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

enum { N_TENSORS = 4, N_UNITS = 2, N_ROUNDS = 2, MOST_ELEMS = 640, N_BEFORE = 59 };
enum { ACT_OTHER_ORDER = 1, ACT_FAIL = 2, ACT_OTHER_WORD = 4, ACT_OTHER_FILE = 8 };

static const uint64_t shapes[N_TENSORS][2] = {{24, 20}, {7, 1}, {16, 16}, {32, 20}};
static const tagc_tensor tensors[N_TENSORS] = {{"a", shapes[0], 2, 0, TAGC_CLASS_COMPRESSED},
                                               {"b", shapes[1], 2, 0, TAGC_CLASS_DENSE},
                                               {"c", shapes[2], 2, 1, TAGC_CLASS_MILD},
                                               {"d", shapes[3], 2, 1, TAGC_CLASS_COMPRESSED}};

static const struct kind {
    int n_ranks, hostile, n_places, output, cut, is_whole;
    int files; /* the kind whose files it loads, or -1: its own */
} kinds[] = {
    {3, 2, 1, TAGC_OUTPUT_UNIT, TAGC_CUT_ROWS, 0, -1}, {3, 2, 1, TAGC_OUTPUT_SHARD, TAGC_CUT_ROWS, 0, -1},
    {3, 2, 1, TAGC_OUTPUT_UNIT, TAGC_CUT_FLAT, 0, -1}, {3, 2, 1, TAGC_OUTPUT_SHARD, TAGC_CUT_FLAT, 1, -1},
    {4, 3, 2, TAGC_OUTPUT_UNIT, TAGC_CUT_ROWS, 0, -1}, {4, 3, 2, TAGC_OUTPUT_SHARD, TAGC_CUT_FLAT, 0, -1},
    {2, 0, 1, TAGC_OUTPUT_UNIT, TAGC_CUT_ROWS, 0, 0},
};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

typedef struct model_peers {
    peers all;
    const struct kind *of;
    int act;
    tagc_comm *within[MOST_PEERS], *between[MOST_PEERS];
    tagc_model *models[MOST_PEERS];
    uint8_t *saved[MOST_PEERS]; /* by the first world, for all that follow */
    size_t n_saved[MOST_PEERS];
    const struct model_peers *files; /* whose files are loaded */
    tagc_status loaded[MOST_PEERS], stepped[MOST_PEERS], statuses[MOST_PEERS][N_ROUNDS][N_UNITS];
    float gradients[MOST_PEERS][N_TENSORS][MOST_ELEMS], sums[MOST_PEERS][N_TENSORS][MOST_ELEMS];
    float got[MOST_PEERS][N_ROUNDS][N_TENSORS][MOST_ELEMS],
        honest[MOST_PEERS][N_ROUNDS][N_TENSORS][MOST_ELEMS];
} model_peers;

static model_peers *of_peers(peers *all) {
    return (model_peers *)(void *)((char *)all - offsetof(model_peers, all));
}

static int is_hostile(const model_peers *p, int rank) {
    return rank == p->of->hostile;
}

static void make_model(peers *all, int rank) {
    model_peers *p = of_peers(all);
    int L = p->of->n_places;
    p->between[rank] = all->comms[rank];
    if (L > 1) {
        require(tagc_comm_split(all->comms[rank], rank / L, &p->within[rank]) == TAGC_OK);
        require(tagc_comm_split(all->comms[rank], rank % L, &p->between[rank]) == TAGC_OK);
        join(all, rank, p->within[rank]);
        join(all, rank, p->between[rank]);
    }
    tagc_schedule_options schedule;
    tagc_model_options options;
    tagc_schedule_options_init(&schedule);
    tagc_model_options_init(&options);
    options.schedule.options = &schedule;
    options.schedule.moment = TAGC_MOMENT_SHORTENS;
    options.layout.output = p->of->output;
    options.layout.cut = p->of->cut;
    if (p->of->is_whole) {
        schedule.sparsity = 0;
        schedule.format = TAGC_FORMAT_BF16;
    }
    require(tagc_model_create(p->within[rank], p->between[rank], tensors, N_TENSORS, &options,
                              &p->models[rank]) == TAGC_OK);
}

static void fill_gradients(model_peers *p, int rank, int round) {
    for (int t = 0; t < N_TENSORS; t++)
        for (int i = 0; i < MOST_ELEMS; i++) {
            float x = (float)((i * 7919 + rank * 131 + t * 17 + round * 71) % 1009 - 504) / 504.0f;
            p->gradients[rank][t][i] = x * x * x;
        }
}

static tagc_status begin_unit(model_peers *p, int rank, int round, uint32_t unit) {
    tagc_model *model = p->models[rank];
    tagc_piece in[N_TENSORS], out[N_TENSORS];
    uint32_t n = 0;
    /* Lists stay until the exchange ends. */
    static _Thread_local tagc_piece lists[N_UNITS][2][N_TENSORS];
    for (uint32_t t = 0; t < N_TENSORS; t++) {
        uint64_t first, n_owned;
        if (tensors[t].unit != unit) continue;
        require(tagc_model_owned(model, rank, t, &first, &n_owned) == TAGC_OK);
        in[n] = (tagc_piece){t, 0, shapes[t][0] * shapes[t][1], p->gradients[rank][t]};
        out[n++] = (tagc_piece){t, first, n_owned, p->sums[rank][t] + first};
    }
    memcpy(lists[unit][0], in, sizeof in);
    memcpy(lists[unit][1], out, sizeof out);
    if (is_hostile(p, rank) && (p->act & ACT_FAIL) && round == 0 && unit == 0)
        return tagc_model_begin_failed(model, unit, TAGC_ERR_MEMORY, "of a test");
    require(tagc_model_set_word(model, unit, is_hostile(p, rank) && (p->act & ACT_OTHER_WORD) ? 1 : 7) ==
            TAGC_OK);
    return tagc_model_begin(model, unit, lists[unit][0], n, lists[unit][1], n);
}

static void exchange(model_peers *p, int rank, int round) {
    tagc_status begun[N_UNITS];
    int is_turned = is_hostile(p, rank) && (p->act & ACT_OTHER_ORDER);
    memset(p->sums[rank], 0, sizeof p->sums[rank]);
    for (uint32_t i = 0; i < N_UNITS; i++) {
        uint32_t u = is_turned ? N_UNITS - 1 - i : i;
        begun[u] = begin_unit(p, rank, round, u);
    }
    for (uint32_t u = 0; u < N_UNITS; u++) {
        int is_begun = p->models[rank]->units[u].is_begun;
        tagc_status status = is_begun ? tagc_model_end(p->models[rank], u, NULL) : TAGC_OK;
        p->statuses[rank][round][u] = begun[u] == TAGC_OK ? status : begun[u];
    }
    memcpy(p->got[rank][round], p->sums[rank], sizeof p->sums[rank]);
}

/* Who fails alone leaves the others in a sequence of calls that it will not follow. */
static tagc_status leave_after(model_peers *p, int rank, tagc_status status) {
    if (status == TAGC_OK) return status;
    if (p->within[rank]) tagc_comm_abort(p->within[rank], "of a test");
    tagc_comm_abort(p->between[rank], "of a test");
    return status;
}

/* Every rank passes all files, and the hostile one may pass one alone. */
static tagc_status load(model_peers *p, int rank) {
    const void *files[MOST_PEERS];
    size_t n = 0;
    for (size_t i = 0; i < MOST_PEERS && p->files->saved[i]; i++) files[n++] = p->files->saved[i];
    if (is_hostile(p, rank) && (p->act & ACT_OTHER_FILE)) n = 1;
    return tagc_model_load(p->models[rank], files, p->files->n_saved, n);
}

static void act(peers *all, int rank) {
    model_peers *p = of_peers(all);
    p->stepped[rank] = TAGC_OK;
    memset(p->statuses[rank], 0, sizeof p->statuses[rank]);
    p->loaded[rank] = leave_after(p, rank, load(p, rank));
    if (p->loaded[rank] != TAGC_OK) return;
    for (int round = 0; round < N_ROUNDS; round++) {
        fill_gradients(p, rank, round);
        exchange(p, rank, round);
        if (round > 0) continue;
        p->stepped[rank] = leave_after(p, rank, tagc_model_step(p->models[rank], 1.0));
        if (p->stepped[rank] != TAGC_OK) return;
    }
}

/* Steps until the next one decides, and saves. */
static void prepare(peers *all, int rank) {
    model_peers *p = of_peers(all);
    tagc_model *model = p->models[rank];
    for (int i = 0; i < N_BEFORE; i++) {
        fill_gradients(p, rank, i);
        exchange(p, rank, 0);
        require(tagc_model_step(model, 1.0) == TAGC_OK);
    }
    size_t n;
    require(tagc_model_save(model, NULL, 0, &n) == TAGC_OK);
    p->saved[rank] = malloc(n);
    require(p->saved[rank] && tagc_model_save(model, p->saved[rank], n, &p->n_saved[rank]) == TAGC_OK);
}

/* ---- what must hold ---- */

static void check(const model_peers *p) {
    int is_exact = !p->all.is_changed && !(p->act & ACT_OTHER_FILE);
    for (int rank = 0; rank < p->of->n_ranks; rank++) {
        if (is_hostile(p, rank)) continue;
        check_status(p->loaded[rank]);
        check_status(p->stepped[rank]);
    }
    for (int round = 0; round < N_ROUNDS; round++) {
        int is_right = 1;
        for (int rank = 0; rank < p->of->n_ranks; rank++)
            for (int u = 0; u < N_UNITS && !is_hostile(p, rank); u++) {
                check_status(p->statuses[rank][round][u]);
                is_right &= p->loaded[rank] == TAGC_OK && p->stepped[rank] == TAGC_OK &&
                            p->statuses[rank][round][u] == TAGC_OK;
            }
        is_exact &= is_right;
        for (int rank = 0; rank < p->of->n_ranks && is_exact; rank++)
            require(is_hostile(p, rank) ||
                    memcmp(p->got[rank][round], p->honest[rank][round], sizeof p->got[rank][round]) == 0);
    }
}

static int is_anything_broken(model_peers *p) {
    int is = is_broken(&p->all);
    for (int rank = 0; rank < p->of->n_ranks; rank++)
        is |= is_comm_broken(p->between[rank]) || (p->within[rank] && is_comm_broken(p->within[rank]));
    return is;
}

/* ---- life ---- */

static model_peers *peers_of(int kind);

static void make(model_peers *p) {
    p->files = p->of->files < 0 ? p : peers_of(p->of->files);
    make_peers(&p->all, p->of->n_ranks, p->of->hostile, 1);
    /* A lie that not all hear leaves ranks in different calls, until one of them gives up waiting. */
    p->all.are_words_alike = p->of->n_places == 1;
    p->all.are_words_kept = p->of->n_places > 1;
    p->act = 0;
    run_peers(&p->all, make_model);
    if (p->files == p && !p->saved[0]) run_peers(&p->all, prepare);
    run_peers(&p->all, act);
    run_honest_peers(&p->all, act);
    for (int rank = 0; rank < p->of->n_ranks; rank++)
        for (int round = 0; round < N_ROUNDS; round++)
            for (int u = 0; u < N_UNITS; u++) require(p->statuses[rank][round][u] == TAGC_OK);
    memcpy(p->honest, p->got, sizeof p->honest);
}

static void unmake(model_peers *p) {
    for (int rank = 0; rank < p->of->n_ranks; rank++) {
        tagc_model_destroy(p->models[rank]);
        tagc_comm_destroy(p->within[rank]);
        if (p->between[rank] != p->all.comms[rank]) tagc_comm_destroy(p->between[rank]);
        p->within[rank] = p->between[rank] = NULL;
    }
    unmake_peers(&p->all);
}

static model_peers *peers_of(int kind) {
    static model_peers *all_peers[N_KINDS];
    model_peers **p = &all_peers[kind];
    if (!*p) {
        *p = calloc(1, sizeof **p);
        require(*p != NULL);
        (*p)->of = &kinds[kind];
    }
    if (!(*p)->all.n_ranks) make(*p);
    return *p;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    if (n_bytes < 2) return 0;
    model_peers *p = peers_of(data[0] % N_KINDS);
    p->act = data[1];
    read_edits(&p->all, data + 2, n_bytes - 2);
    run_peers(&p->all, act);
    check(p);
    p->all.n_edits = p->act = 0; /* honest from here on */
    if (is_anything_broken(p)) {
        unmake(p);
        return 0;
    }
    run_peers(&p->all, act);
    check(p);
    for (int u = 0; u < N_UNITS; u++) require(p->statuses[p->of->n_ranks - 1][N_ROUNDS - 1][u] == TAGC_OK);
    return 0;
}
