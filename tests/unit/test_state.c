/* A model's saved state: bit for bit with the same ranks, the same sums of residuals with others; and what is damaged, missing, of another
 * rank or of another run is refused on all ranks, and changes nothing. */
#include "../repeats.h"
#include "world.h"

enum { N_TENSORS = 9, N_UNITS = 3, MOST_FILES = 12 };

typedef struct state_case {
    shape_of_model shape;
    uint64_t seed;
    int output, moment, residual, op, cut;
    int n_before, n_after; /* steps before the save, and after it */
    char *files[MOST_FILES];
    size_t sizes[MOST_FILES];
    int n_files;
    float *sums[2][MOST_RANKS]; /* of the last step: of the run that went on, of the one that loaded */
    double *left[2]; /* (n_all) residuals of all ranks, added up, in weights of the sum: saved, loaded */
    pthread_mutex_t lock;
    /* what one rank does to its list of files */
    void (*spoil)(struct state_case *c, member *m, const void **files, size_t *sizes, size_t *n);
    tagc_status expected;
    const char *word; /* in the message */
} state_case;

static uint64_t all_elems(const shape_of_model *s, uint64_t *starts) {
    uint64_t n = 0;
    for (uint32_t t = 0; t < s->n; t++) starts[t] = n, n += s->n_elems[t];
    return n;
}

static tagc_model *make_model(member *m, const state_case *c) {
    tagc_model_options o;
    tagc_model *model = NULL;
    tagc_model_options_init(&o);
    o.layout.output = c->output;
    o.schedule.moment = c->moment;
    o.formats.residual = c->residual;
    o.op = c->op;
    o.layout.cut = c->cut;
    EXPECT(m, tagc_model_create(m->within, m->between, c->shape.tensors, c->shape.n, &o, &model) == TAGC_OK);
    return model;
}

/* One step with the gradients of that number; sums (n_all) gets what this rank owns. */
static void one_step(member *m, tagc_model *model, const state_case *c, int step, float *sums) {
    uint64_t starts[MOST_TENSORS], n_all = all_elems(&c->shape, starts), first, n_owned;
    float *gradients = malloc(n_all * sizeof *gradients);
    tagc_piece in[MOST_TENSORS], out[MOST_TENSORS];
    uint32_t n = 0;
    for (uint32_t t = 0; t < c->shape.n; t++)
        for (uint64_t i = 0; i < c->shape.n_elems[t]; i++) {
            uint64_t bits = number_of(c->seed, (uint64_t)m->rank * 64 + t, i, (uint64_t)step);
            gradients[starts[t] + i] = (float)(bits >> 40) / 8388608.0f - 1.0f;
        }
    for (uint32_t u = 0; u < N_UNITS; u++) {
        uint32_t begin = n;
        for (uint32_t t = u; t < c->shape.n; t += N_UNITS, n++) {
            EXPECT(m, tagc_model_owned(model, m->rank, t, &first, &n_owned) == TAGC_OK);
            in[n] = (tagc_piece){t, 0, c->shape.n_elems[t], gradients + starts[t]};
            out[n] = (tagc_piece){t, first, n_owned, sums + starts[t] + first};
        }
        EXPECT(m, tagc_model_begin(model, u, in + begin, n - begin, out + begin, n - begin) == TAGC_OK);
    }
    for (uint32_t u = 0; u < N_UNITS; u++) EXPECT(m, tagc_model_end(model, u, NULL) == TAGC_OK);
    EXPECT(m, tagc_model_step(model, 2.0) == TAGC_OK);
    free(gradients);
}

static void add_left(member *m, state_case *c, const tagc_model *model, double *left) {
    uint64_t starts[MOST_TENSORS];
    double weight = c->op == TAGC_OP_AVG ? 1.0 / m->w->n_hosts : 1.0;
    all_elems(&c->shape, starts);
    for (uint32_t t = 0; t < c->shape.n; t++) {
        const tagc_member *tensor = &model->tensors[t];
        uint64_t n = tagc_reducer_residual_elems(tensor->part->reducer);
        float *values = malloc(n * sizeof *values + 1);
        if (n > 0) EXPECT(m, tagc_reducer_get_residual(tensor->part->reducer, values, n) == TAGC_OK);
        pthread_mutex_lock(&c->lock);
        for (uint64_t i = 0; n > 0 && i < tensor->n_elems; i++) {
            uint64_t at = tagc_part_find(tensor->part, tensor, i);
            if (at != UINT64_MAX) left[starts[t] + i] += weight * (double)values[at];
        }
        pthread_mutex_unlock(&c->lock);
        free(values);
    }
}

static void save_body(member *m) {
    state_case *c = m->w->shared;
    tagc_model *model = make_model(m, c);
    if (!model) return;
    for (int step = 0; step < c->n_before; step++) one_step(m, model, c, step, c->sums[0][m->rank]);
    size_t n, n_again;
    EXPECT(m, tagc_model_save(model, NULL, 0, &n) == TAGC_OK);
    char *file = malloc(n);
    EXPECT(m, tagc_model_save(model, file, n - 8, &n_again) == TAGC_ERR_ARGUMENT);
    EXPECT(m, tagc_model_save(model, file, n, &n_again) == TAGC_OK && n_again == n);
    c->files[m->rank] = file;
    c->sizes[m->rank] = n;
    if (c->left[0]) add_left(m, c, model, c->left[0]);
    for (int step = c->n_before; step < c->n_before + c->n_after; step++)
        one_step(m, model, c, step, c->sums[0][m->rank]);
    tagc_model_destroy(model);
}

static void load_body(member *m) {
    state_case *c = m->w->shared;
    tagc_model *model = make_model(m, c);
    const void *files[MOST_FILES + 1];
    size_t sizes[MOST_FILES + 1], n = (size_t)c->n_files;
    if (!model) return;
    for (int i = 0; i < c->n_files; i++)
        files[i] = c->files[c->n_files - 1 - i], sizes[i] = c->sizes[c->n_files - 1 - i];
    if (c->spoil) {
        one_step(m, model, c, 0, c->sums[1][m->rank]);
        size_t n_state, n_now;
        EXPECT(m, tagc_model_save(model, NULL, 0, &n_state) == TAGC_OK);
        char *before = malloc(n_state), *now = malloc(n_state);
        EXPECT(m, tagc_model_save(model, before, n_state, &n_now) == TAGC_OK);
        c->spoil(c, m, files, sizes, &n);
        EXPECT(m, tagc_model_load(model, files, sizes, n) == c->expected);
        EXPECT(m, strstr(tagc_last_error(), c->word) != NULL);
        EXPECT(m, tagc_model_save(model, now, n_state, &n_now) == TAGC_OK && n_now == n_state &&
                      memcmp(before, now, n_state) == 0);
        free(before);
        free(now);
    } else {
        EXPECT(m, tagc_model_load(model, files, sizes, n) == TAGC_OK);
        if (c->left[1]) add_left(m, c, model, c->left[1]);
        for (int step = c->n_before; step < c->n_before + c->n_after; step++)
            one_step(m, model, c, step, c->sums[1][m->rank]);
    }
    tagc_model_destroy(model);
}

static uint64_t open_case(state_case *c, int n_ranks) {
    uint64_t starts[MOST_TENSORS];
    make_shape(&c->shape, c->seed, N_TENSORS, N_UNITS);
    uint64_t n_all = all_elems(&c->shape, starts);
    c->n_files = n_ranks;
    pthread_mutex_init(&c->lock, NULL);
    for (int run = 0; run < 2; run++)
        for (int r = 0; r < MOST_RANKS; r++) c->sums[run][r] = calloc(n_all, sizeof(float));
    return n_all;
}

static void close_case(state_case *c) {
    for (int run = 0; run < 2; run++)
        for (int r = 0; r < MOST_RANKS; r++) free(c->sums[run][r]);
    for (int i = 0; i < MOST_FILES; i++) free(c->files[i]);
    free(c->left[0]);
    free(c->left[1]);
    pthread_mutex_destroy(&c->lock);
}

TEST(same_ranks_go_on_bit_for_bit) {
    static const int worlds[][4] = {{1, 1, 0, 0}, {3, 1, 0, 0}, {2, 1, 1, 0}, {2, 2, 0, 0},
                                    {2, 3, 2, 0}, {3, 1, 0, 1}, {2, 2, 0, 1}};
    static const int n_before[] = {7, 127, 67, 127, 67, 127, 67}; /* within a window; at several levels */
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i += REPEATS(1, 2, 4)) {
        state_case c = {.seed = 40 + i,
                        .output = worlds[i][2],
                        .cut = worlds[i][3],
                        .moment = TAGC_MOMENT_NONE,
                        .residual = -1,
                        .n_before = n_before[i],
                        .n_after = 25};
        int n_ranks = worlds[i][0] * worlds[i][1];
        uint64_t n_all = open_case(&c, n_ranks);
        run_world(worlds[i][0], worlds[i][1], save_body, &c);
        run_world(worlds[i][0], worlds[i][1], load_body, &c);
        for (int r = 0; r < n_ranks; r++)
            assert_memory_equal(c.sums[0][r], c.sums[1][r], n_all * sizeof(float));
        close_case(&c);
    }
}

TEST(other_ranks_get_the_same_sum) {
    static const int worlds[][7] = {/* hosts, places; then hosts, places; output; cut, then cut */
                                    {3, 1, 2, 1, 0, 0, 0}, {2, 1, 5, 1, 0, 0, 0}, {4, 1, 2, 2, 0, 0, 0},
                                    {2, 2, 3, 1, 0, 0, 0}, {2, 2, 3, 2, 2, 0, 0}, {3, 1, 2, 1, 1, 0, 0},
                                    {6, 1, 1, 1, 0, 0, 0}, {3, 1, 2, 1, 0, 1, 1}, {2, 2, 3, 1, 0, 1, 1},
                                    {3, 1, 3, 1, 0, 0, 1}, {3, 1, 3, 1, 0, 1, 0}, {2, 3, 2, 2, 2, 1, 1}};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i += REPEATS(1, 5, 5)) {
        state_case c = {.seed = 60 + i,
                        .output = worlds[i][4],
                        .moment = TAGC_MOMENT_NONE,
                        .residual = TAGC_FORMAT_FP32,
                        .n_before = 90,
                        .cut = worlds[i][5],
                        .op = (int)(i % 2)};
        uint64_t n_all = open_case(&c, worlds[i][0] * worlds[i][1]);
        for (int k = 0; k < 2; k++) c.left[k] = calloc(n_all, sizeof(double));
        run_world(worlds[i][0], worlds[i][1], save_body, &c);
        c.cut = worlds[i][6];
        run_world(worlds[i][2], worlds[i][3], load_body, &c);
        double largest = 0;
        for (uint64_t k = 0; k < n_all; k++) {
            double bound = 1e-5 * (1 + fabs(c.left[0][k]));
            if (!(fabs(c.left[0][k] - c.left[1][k]) <= bound))
                fail_msg("case %zu, element %llu: %.9g was left, %.9g was loaded", i, (unsigned long long)k,
                         c.left[0][k], c.left[1][k]);
            largest = fmax(largest, fabs(c.left[0][k]));
        }
        assert_true(largest > 0.1);
        close_case(&c);
    }
}

/* ---- refused ---- */

static void cut_file(state_case *c, member *m, const void **files, size_t *sizes, size_t *n) {
    (void)c, (void)n, (void)files;
    if (m->rank == 1) sizes[1] -= 8; /* of rank 1: the list is backwards */
}

static void flip_bit(state_case *c, member *m, const void **files, size_t *sizes, size_t *n) {
    static char copy[1 << 20];
    (void)n;
    if (m->rank != 1 || !EXPECT(m, sizes[1] <= sizeof copy)) return;
    memcpy(copy, files[1], sizes[1]);
    copy[sizes[1] / 2 + c->seed % 64] ^= 4;
    files[1] = copy;
}

static void all_get_rank_0(state_case *c, member *m, const void **files, size_t *sizes, size_t *n) {
    (void)m;
    for (size_t i = 0; i < *n; i++) files[i] = c->files[0], sizes[i] = c->sizes[0];
}

static void one_is_missing(state_case *c, member *m, const void **files, size_t *sizes, size_t *n) {
    (void)c, (void)m;
    files[1] = files[2]; /* of 3: that of rank 1 is left out */
    sizes[1] = sizes[2];
    *n = 2;
}

static void twice(state_case *c, member *m, const void **files, size_t *sizes, size_t *n) {
    (void)c, (void)m;
    files[*n] = files[1];
    sizes[*n] = sizes[1];
    ++*n;
}

static void none(state_case *c, member *m, const void **files, size_t *sizes, size_t *n) {
    (void)c, (void)m, (void)files, (void)sizes;
    *n = 0;
}

static state_case *another;
static void one_of_another_run(state_case *c, member *m, const void **files, size_t *sizes, size_t *n) {
    (void)c, (void)n;
    if (m->rank == 1) files[1] = another->files[1], sizes[1] = another->sizes[1];
}

/* Of something else, with a right checksum. */
static void other_magic(state_case *c, member *m, const void **files, size_t *sizes, size_t *n) {
    static char copy[1 << 20];
    (void)c, (void)n;
    if (m->rank != 1 || !EXPECT(m, sizes[1] <= sizeof copy)) return;
    memcpy(copy, files[1], sizes[1]);
    copy[3] ^= 1;
    uint64_t sum = tagc_checksum(copy, sizes[1] - 8);
    memcpy(copy + sizes[1] - 8, &sum, 8);
    files[1] = copy;
}

TEST(what_does_not_fit_is_refused) {
    static const struct {
        void (*spoil)(state_case *c, member *m, const void **files, size_t *sizes, size_t *n);
        tagc_status expected;
        const char *word;
    } cases[] = {{cut_file, TAGC_ERR_CORRUPT, "checksum"},
                 {flip_bit, TAGC_ERR_CORRUPT, "checksum"},
                 {all_get_rank_0, TAGC_ERR_STATE, "came twice"},
                 {one_is_missing, TAGC_ERR_STATE, "missing"},
                 {twice, TAGC_ERR_STATE, "twice"},
                 {none, TAGC_ERR_STATE, "no rank has a file"},
                 {one_of_another_run, TAGC_ERR_MISMATCH, "save"},
                 {other_magic, TAGC_ERR_CORRUPT, "TAGCMODL"}};
    state_case c = {.seed = 80, .moment = TAGC_MOMENT_NONE, .residual = -1, .n_before = 30}, other = c;
    open_case(&c, 3);
    open_case(&other, 3);
    run_world(3, 1, save_body, &c);
    run_world(3, 1, save_body, &other);
    another = &other;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        c.spoil = cases[i].spoil;
        c.expected = cases[i].expected;
        c.word = cases[i].word;
        run_world(3, 1, load_body, &c);
        if (i == 2 || i == 3) { /* into another number of ranks */
            c.word = "rank";
            run_world(2, 1, load_body, &c);
        }
    }
    close_case(&c);
    close_case(&other);
}

/* ---- hostile: bytes change, and the checksum with them ---- */

static uint64_t hostile_seed;
static void change_bytes(state_case *c, member *m, const void **files, size_t *sizes, size_t *n) {
    static char copies[MOST_RANKS][1 << 20];
    char *copy = copies[m->rank];
    (void)c, (void)n;
    size_t own = 2 - (size_t)m->rank, n_bytes = sizes[own];
    if (!EXPECT(m, n_bytes <= sizeof copies[0])) return;
    memcpy(copy, files[own], n_bytes);
    for (int k = 0; k < 3; k++) {
        uint64_t where = number_of(hostile_seed, (uint64_t)k, 1, 0),
                 what = number_of(hostile_seed, (uint64_t)k, 2, 0);
        size_t at = k == 0 ? where % 200 : where % (n_bytes - 8); /* the header is small */
        uint64_t values[] = {0, 1, UINT64_MAX, (uint64_t)1 << 63, what, what % 4096};
        if (what % 3 == 0)
            copy[at] = (char)what;
        else
            memcpy(copy + at / 8 * 8, &values[what % 6], 8);
    }
    uint64_t sum = tagc_checksum(copy, n_bytes - 8);
    memcpy(copy + n_bytes - 8, &sum, 8);
    files[own] = copy;
}

static void hostile_body(member *m) {
    state_case *c = m->w->shared;
    tagc_model *model = make_model(m, c);
    const void *files[MOST_FILES];
    size_t sizes[MOST_FILES], n = (size_t)c->n_files;
    if (!model) return;
    for (int i = 0; i < c->n_files; i++)
        files[i] = c->files[c->n_files - 1 - i], sizes[i] = c->sizes[c->n_files - 1 - i];
    change_bytes(c, m, files, sizes, &n);
    (void)tagc_model_load(model, files, sizes, n);
    one_step(m, model, c, 0, c->sums[1][m->rank]); /* whatever it was, ranks can go on */
    tagc_model_destroy(model);
}

TEST(hostile_files_do_no_harm) {
    for (int cut = 0; cut < 2; cut++) {
        state_case c = {.seed = 90, .moment = TAGC_MOMENT_NONE, .residual = -1, .n_before = 30, .cut = cut};
        open_case(&c, 3);
        run_world(3, 1, save_body, &c);
        const char *asked = getenv("LONG"); /* make check sets it, and most often to nothing */
        int n = asked && *asked ? 20000 : REPEATS(150, 50, 10);
        for (hostile_seed = 1; hostile_seed <= (uint64_t)n; hostile_seed++) {
            c.cut = hostile_seed % 5 == 0 ? !cut : cut; /* what was cut in another way is read as well */
            run_world(3, 1, hostile_body, &c);
        }
        close_case(&c);
    }
}
