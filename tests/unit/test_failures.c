/* What one rank does wrong is the same failure on all ranks, nobody waits, and the next exchange is right. */
#include "exchange/wire.h"
#include "transport/comm_private.h"
#include "world.h"

static uint64_t matrix[] = {33, 7};
static const tagc_tensor tensors[] = {{"a", matrix, 2, 0, TAGC_CLASS_COMPRESSED},
                                      {"b", matrix, 2, 0, TAGC_CLASS_DENSE},
                                      {"c", matrix, 2, 1, TAGC_CLASS_MILD}};
enum { N = 33 * 7, N_ALL = 3 };

typedef struct own_arrays {
    float gradients[N_ALL][N], sums[N_ALL][N];
    tagc_piece in[N_ALL], out[N_ALL];
} own_arrays;

static void fill_own(member *m, const tagc_model *model, own_arrays *a) {
    for (uint32_t t = 0; t < N_ALL; t++) {
        uint64_t first, n;
        EXPECT(m, tagc_model_owned(model, m->rank, t, &first, &n) == TAGC_OK);
        for (int i = 0; i < N; i++) a->gradients[t][i] = (float)(m->rank + i);
        a->in[t] = (tagc_piece){t, 0, N, a->gradients[t]};
        a->out[t] = (tagc_piece){t, first, n, a->sums[t]};
    }
}

static tagc_model *make_model(member *m, int n_places) {
    tagc_model_options o;
    tagc_schedule_options all;
    tagc_model *model = NULL;
    tagc_schedule_options_init(&all);
    all.gentle = 0;
    all.sparsity = all.mild_sparsity = 0;
    all.format = all.mild_format = TAGC_FORMAT_INT8;
    tagc_model_options_init(&o);
    o.schedule.options = &all;
    o.formats.residual = TAGC_FORMAT_FP32;
    (void)n_places;
    EXPECT(m, tagc_model_create(m->within, m->between, tensors, N_ALL, &o, &model) == TAGC_OK);
    return model;
}

static tagc_status run_unit(tagc_model *model, uint32_t unit, own_arrays *a) {
    uint32_t first = unit == 0 ? 0 : 2, n = unit == 0 ? 2 : 1;
    tagc_status status = tagc_model_begin(model, unit, a->in + first, n, a->out + first, n);
    return status == TAGC_OK ? tagc_model_end(model, unit, NULL) : status;
}

static void check_right(member *m, tagc_model *model, own_arrays *a) {
    float mean = (float)(m->w->n_hosts * m->w->n_places - 1) / 2;
    fill_own(m, model, a);
    EXPECT(m, run_unit(model, 0, a) == TAGC_OK);
    EXPECT(m, run_unit(model, 1, a) == TAGC_OK);
    for (uint32_t t = 0; t < N_ALL; t++)
        for (uint64_t i = 0; i < a->out[t].n_elems; i++)
            EXPECT(m, fabsf(a->sums[t][i] - (mean + (float)(a->out[t].first + i))) < 3.0f);
}

static void spoil(own_arrays *a, int kind) {
    switch (kind) {
    case 0:
        a->in[0].n_elems = N + 1;
        break;
    case 1:
        a->in[1].first = UINT64_MAX;
        break;
    case 2:
        a->in[0].values = NULL;
        break;
    case 3:
        a->in[1].tensor = 2;
        break; /* of another unit */
    case 4:
        a->in[1] = a->in[0];
        break; /* the same elements twice */
    case 5:
        a->out[0].first++;
        break; /* beyond what this rank owns */
    case 6:
        a->out[1].n_elems = UINT64_MAX;
        break;
    default:
        a->in[0].tensor = 99;
        break;
    }
}

static void arguments_body(member *m) {
    own_arrays *a = calloc(1, sizeof *a);
    tagc_model *model = make_model(m, m->w->n_places);
    for (int kind = 0; model && kind < 8 && !m->failure[0]; kind++) {
        fill_own(m, model, a);
        if (m->rank == 1) spoil(a, kind);
        EXPECT(m, run_unit(model, 0, a) == TAGC_ERR_ARGUMENT);
        if (m->rank == 1)
            EXPECT(m, strstr(tagc_last_error(), kind == 5 || kind == 6 ? "sums[" : "gradients[") != NULL);
        if (m->rank != 1) EXPECT(m, strstr(tagc_last_error(), "rank") != NULL);
        check_right(m, model, a);
    }
    tagc_model_destroy(model);
    free(a);
}

/* A list that is NULL, after an exchange whose lists were not, where the own row is read after a failure, too. */
static void no_list_body(member *m) {
    own_arrays *a = calloc(1, sizeof *a);
    tagc_model *model = NULL;
    tagc_model_options o;
    tagc_model_options_init(&o);
    o.layout.output = TAGC_OUTPUT_UNIT;
    EXPECT(m, tagc_model_create(m->within, m->between, tensors, N_ALL, &o, &model) == TAGC_OK);
    for (int step = 0; model && step < 3; step++) {
        int is_wrong = step == 1 && m->rank == 1;
        fill_own(m, model, a);
        tagc_status status =
            tagc_model_begin(model, 0, is_wrong ? NULL : a->in, 2, is_wrong ? NULL : a->out, 2);
        if (status == TAGC_OK) status = tagc_model_end(model, 0, NULL);
        EXPECT(m, status == (step == 1 ? TAGC_ERR_ARGUMENT : TAGC_OK));
    }
    tagc_model_destroy(model);
    free(a);
}

/* No rank has a gradient of a tensor, or one rank alone has none: its host's sum of the others would have no place. */
static void no_piece_body(member *m) {
    own_arrays *a = calloc(1, sizeof *a);
    tagc_model *model = make_model(m, m->w->n_places);
    int has_place = m->w->n_places == 1;
    for (int who = -1; model && who < m->w->n_hosts * m->w->n_places && !m->failure[0]; who++) {
        int gives = who >= 0 && m->rank != who;
        fill_own(m, model, a);
        memset(a->sums, 0x7f, sizeof a->sums);
        tagc_status status = tagc_model_begin(model, 0, a->in + !gives, 1 + (size_t)gives, a->out, 2);
        if (status == TAGC_OK) status = tagc_model_end(model, 0, NULL);
        EXPECT(m, status == (who < 0 || has_place ? TAGC_OK : TAGC_ERR_ARGUMENT));
        if (status != TAGC_OK && m->rank == who)
            EXPECT(m, strstr(tagc_last_error(), "elements of a of") != NULL);
        for (uint64_t i = 0; who < 0 && i < a->out[0].n_elems; i++) EXPECT(m, a->sums[0][i] == 0);
        if (status == TAGC_OK) EXPECT(m, tagc_model_forget(model) == TAGC_OK);
        check_right(m, model, a);
        EXPECT(m, tagc_model_forget(model) == TAGC_OK);
    }
    tagc_model_destroy(model);
    free(a);
}

TEST(an_argument_of_one_rank) {
    run_world(3, 1, no_piece_body, NULL);
    run_world(2, 2, no_piece_body, NULL);
    run_world(3, 1, no_list_body, NULL);
    run_world(2, 2, no_list_body, NULL);
    run_world(3, 1, arguments_body, NULL);
    run_world(2, 2, arguments_body, NULL);
}

static void nonfinite_body(member *m) {
    own_arrays *a = calloc(1, sizeof *a);
    tagc_model *model = make_model(m, 1);
    if (!model) return;
    check_right(m, model, a);
    size_t n = tagc_reducer_residual_elems(model->tensors[0].part->reducer);
    float *before = malloc(n * sizeof(float)), *after = malloc(n * sizeof(float));
    EXPECT(m, tagc_reducer_get_residual(model->tensors[0].part->reducer, before, n) == TAGC_OK);
    fill_own(m, model, a);
    if (m->rank == 1) a->gradients[0][5] = NAN;
    tagc_model_stats stats;
    tagc_model_stats_init(&stats);
    EXPECT(m, tagc_model_begin(model, 0, a->in, 2, a->out, 2) == TAGC_OK);
    EXPECT(m, tagc_model_end(model, 0, &stats) == TAGC_OK);
    EXPECT(m, stats.nonfinite);
    for (uint64_t i = 0; i < a->out[0].n_elems; i++) EXPECT(m, isnan(a->sums[0][i]));
    for (uint64_t i = 0; i < a->out[1].n_elems; i++) EXPECT(m, !isnan(a->sums[1][i])); /* another part */
    EXPECT(m, tagc_reducer_get_residual(model->tensors[0].part->reducer, after, n) == TAGC_OK);
    EXPECT(m, memcmp(before, after, n * sizeof(float)) == 0);
    free(before);
    free(after);
    tagc_model_destroy(model);
    free(a);
}

TEST(what_is_not_finite) {
    run_world(3, 1, nonfinite_body, NULL);
    run_world(2, 2, nonfinite_body, NULL);
}

/* ---- the order of units ---- */

static const tagc_tensor alike[] = {{"x", matrix, 2, 0, TAGC_CLASS_COMPRESSED},
                                    {"y", matrix, 2, 1, TAGC_CLASS_COMPRESSED}};

static void order_body(member *m) {
    own_arrays *a = calloc(1, sizeof *a);
    tagc_model *model = NULL;
    tagc_model_options o;
    tagc_model_options_init(&o);
    o.formats.residual = TAGC_FORMAT_FP32;
    EXPECT(m, tagc_model_create(m->within, m->between, alike, 2, &o, &model) == TAGC_OK);
    for (int step = 0; model && step < 4 && !m->failure[0]; step++) {
        int is_swapped = step % 2 == 1, other = is_swapped && m->rank == 1;
        tagc_status status[2];
        for (uint32_t t = 0; t < 2; t++) {
            uint64_t first, n;
            EXPECT(m, tagc_model_owned(model, m->rank, t, &first, &n) == TAGC_OK);
            for (int i = 0; i < N; i++) a->gradients[t][i] = t ? 100.0f : 1.0f;
            a->in[t] = (tagc_piece){t, 0, N, a->gradients[t]};
            a->out[t] = (tagc_piece){t, first, n, a->sums[t]};
        }
        for (int k = 0; k < 2; k++) {
            uint32_t unit = (uint32_t)(other ? 1 - k : k);
            EXPECT(m, tagc_model_begin(model, unit, &a->in[unit], 1, &a->out[unit], 1) == TAGC_OK);
        }
        for (uint32_t unit = 0; unit < 2; unit++) {
            status[unit] = tagc_model_end(model, unit, NULL);
            EXPECT(m, status[unit] == (is_swapped ? TAGC_ERR_MISMATCH : TAGC_OK));
            if (is_swapped)
                EXPECT(m, strstr(tagc_last_error(), "unit 0, x") && strstr(tagc_last_error(), "unit 1, y"));
            for (uint64_t i = 0; !is_swapped && i < a->out[unit].n_elems; i++)
                EXPECT(m, fabsf(a->sums[unit][i] - (unit ? 100.0f : 1.0f)) < (unit ? 2.0f : 0.02f));
        }
        EXPECT(m, tagc_model_step(model, 1.0) == TAGC_OK);
    }
    tagc_model_destroy(model);
    free(a);
}

TEST(units_in_another_order) {
    run_world(2, 1, order_body, NULL);
    run_world(5, 1, order_body, NULL);
}

/* ---- calls ---- */

static void calls_body(member *m) {
    own_arrays *a = calloc(1, sizeof *a);
    tagc_model *model = make_model(m, 1);
    size_t n;
    int done;
    if (!model) return;
    fill_own(m, model, a);
    EXPECT(m, tagc_model_end(model, 0, NULL) == TAGC_ERR_STATE);
    EXPECT(m, tagc_model_test(model, 0, &done) == TAGC_ERR_STATE);
    EXPECT(m, tagc_model_begin(model, 2, NULL, 0, NULL, 0) == TAGC_ERR_ARGUMENT);
    EXPECT(m, tagc_model_begin(model, 0, a->in, 2, a->out, 2) == TAGC_OK);
    EXPECT(m, tagc_model_begin(model, 0, a->in, 2, a->out, 2) == TAGC_ERR_STATE);
    EXPECT(m, tagc_model_step(model, 1) == TAGC_ERR_STATE && strstr(tagc_last_error(), "unit 0"));
    EXPECT(m, tagc_model_save(model, NULL, 0, &n) == TAGC_ERR_STATE);
    EXPECT(m, tagc_model_scale(model, 2) == TAGC_ERR_STATE);
    EXPECT(m, tagc_model_end(model, 0, NULL) == TAGC_OK);
    EXPECT(m, tagc_model_scale(model, 0) == TAGC_ERR_ARGUMENT);
    EXPECT(m, tagc_model_plan(model, 9, NULL) == TAGC_ERR_ARGUMENT);
    static const double wrong[] = {(double)NAN, (double)INFINITY, -1e39}; /* the last is none in fp32 */
    for (size_t k = 0; k < sizeof wrong / sizeof *wrong; k++) {
        EXPECT(m, tagc_model_set_factor(model, 0, wrong[k]) == TAGC_ERR_ARGUMENT);
        EXPECT(m, strstr(tagc_last_error(), "must be finite in fp32") != NULL);
    }
    check_right(m, model, a); /* with the factor 1 that it had */
    EXPECT(m, tagc_model_begin(model, 1, a->in + 2, 1, a->out + 2, 1) == TAGC_OK);
    tagc_model_destroy(model); /* waits */
    free(a);
}

TEST(calls_in_a_wrong_order) {
    run_world(2, 1, calls_body, NULL);
}

/* A factor that is none changes nothing; another one is that of every residual. */
static void scale_body(member *m) {
    static const double wrong[] = {0, -1, (double)NAN, (double)INFINITY};
    own_arrays *a = calloc(1, sizeof *a);
    tagc_model *model = make_model(m, 1);
    float before[N] = {0}, after[N] = {0};
    tagc_piece read_before = {0, 0, N, before}, read_after = {0, 0, N, after};
    int n_kept = 0;
    if (!model) return;
    check_right(m, model, a);
    EXPECT(m, tagc_model_get_residual(model, 0, &read_before, 1) == TAGC_OK);
    for (int i = 0; i < N; i++) n_kept += before[i] != 0;
    EXPECT(m, n_kept > N / 4);
    for (size_t k = 0; k < sizeof wrong / sizeof *wrong; k++) {
        EXPECT(m, tagc_model_scale(model, wrong[k]) == TAGC_ERR_ARGUMENT);
        EXPECT(m, tagc_model_get_residual(model, 0, &read_after, 1) == TAGC_OK);
        EXPECT(m, memcmp(before, after, sizeof before) == 0);
    }
    EXPECT(m, tagc_model_scale(model, 4) == TAGC_OK);
    EXPECT(m, tagc_model_get_residual(model, 0, &read_after, 1) == TAGC_OK);
    for (int i = 0; i < N; i++) EXPECT(m, after[i] == 4 * before[i]);
    tagc_model_destroy(model);
    free(a);
}

TEST(residuals_follow_a_scale) {
    run_world(2, 1, scale_body, NULL);
    run_world(2, 2, scale_body, NULL);
}

/* ---- what ranks were made with ---- */

static void made_body(member *m) {
    int kind = *(int *)m->w->shared;
    tagc_tensor own[N_ALL];
    tagc_model_options o;
    tagc_model *model;
    tagc_status expected = TAGC_ERR_MISMATCH;
    memcpy(own, tensors, sizeof own);
    tagc_model_options_init(&o);
    uint64_t other[] = {33, 8};
    if (m->rank == 1) {
        if (kind == 0) own[0].name = "z";
        if (kind == 1) own[1].shape = other;
        if (kind == 2) own[2].kind = TAGC_CLASS_DENSE;
        if (kind == 3) own[2].unit = 0, own[1].unit = 1;
        if (kind == 4) o.layout.output = m->w->n_places > 1 ? TAGC_OUTPUT_HOST_SHARD : TAGC_OUTPUT_UNIT;
        if (kind == 12) o.layout.cut = TAGC_CUT_FLAT;
        if (kind == 13) o.formats.block = 64;
    }
    static const uint64_t none[N_ALL * (MOST_RANKS + 1)];
    if ((kind >= 5 && kind < 12) || kind >= 15) expected = TAGC_ERR_ARGUMENT;
    if (kind == 14) expected = TAGC_ERR_UNSUPPORTED;
    if (m->rank == 1 || m->w->n_hosts == 1) {
        if (kind == 5) own[1].name = "a";
        if (kind == 6) own[1].name = "";
        if (kind == 7) own[2].unit = 7;
        if (kind == 8) own[2].unit = 2;
        if (kind == 9) o.formats.residual = TAGC_FORMAT_INT2;
        if (kind == 10) own[0].n_dims = 65;
        if (kind == 11) o.n_threads = 0;
        if (kind == 14) o.layout.cut = TAGC_CUT_FLAT_ARRAYS, o.formats.sum = TAGC_ELEMENT_BF16;
        if (kind == 15) o.layout.cut = TAGC_CUT_RANGES;
        if (kind == 16) o.layout.ranges = none;
        if (kind == 17)
            o.layout.cut = TAGC_CUT_RANGES, o.layout.ranges = none; /* which end before the tensors do */
    }
    EXPECT(m, tagc_model_create(m->within, m->between, own, N_ALL, &o, &model) == expected);
    EXPECT(m, model == NULL && tagc_last_error()[0] && !strstr(tagc_last_error(), "must be,"));
    tagc_model_destroy(model);
}

TEST(ranks_that_differ) {
    for (int kind = 0; kind < 18; kind++) {
        run_world(3, 1, made_body, &kind);
        if (kind >= 5 && kind != 12 && kind != 13) run_world(1, 1, made_body, &kind);
        run_world(2, 2, made_body, &kind);
    }
}

/* Lists that are not the unit's flats, on all ranks and on one. */
static void flats_body(member *m) {
    tagc_model_options o;
    tagc_model *model;
    float gradient[1024] = {0}, sums[1024];
    tagc_model_options_init(&o);
    o.layout.cut = TAGC_CUT_FLAT_ARRAYS;
    o.op = TAGC_OP_SUM;
    tagc_comm *within = m->w->n_places > 1 ? m->within : NULL;
    if (!EXPECT(m, tagc_model_create(within, m->between, tensors, N_ALL, &o, &model) == TAGC_OK)) return;
    tagc_piece in[4], out[4];
    uint32_t n = model->units[0].n_parts;
    for (uint32_t p = 0; p < n; p++) {
        const tagc_model_part *part = &model->units[0].parts[p];
        in[p] = (tagc_piece){part->members[0], 0, part->width * (uint64_t)model->n_owners, gradient};
        out[p] = (tagc_piece){part->members[0], 0, part->width, sums};
        if (!EXPECT(m, in[p].n_elems <= 1024)) return;
    }
    for (int kind = 0; kind < 6; kind++) {
        tagc_piece bad = in[0];
        size_t n_bad = n;
        const tagc_piece *list = &bad;
        if (kind == 0) n_bad = n - 1;
        if (kind == 1) bad.n_elems--;
        if (kind == 2) bad.first = 1;
        if (kind == 3) bad.values = NULL;
        if (kind == 4) bad.tensor = N_ALL;
        if (kind == 5) list = NULL;
        tagc_piece pieces[4];
        memcpy(pieces, in, sizeof pieces);
        pieces[0] = bad;
        EXPECT(m, tagc_model_begin(model, 0, list ? pieces : NULL, n_bad, out, n) == TAGC_ERR_ARGUMENT);
        EXPECT(m, strstr(tagc_last_error(), "gradients must have") != NULL);
    }
    EXPECT(m, tagc_model_begin(model, 0, in, n, in, n) == TAGC_ERR_ARGUMENT);
    EXPECT(m, strstr(tagc_last_error(), "sums must have") != NULL);
    for (int wrong = 0; wrong < 2; wrong++) { /* rank 1 alone: the others' _end says so */
        tagc_status status = tagc_model_begin(model, 0, in, m->rank == 1 && wrong == 0 ? 0 : n, out,
                                              m->rank == 1 && wrong == 1 ? 0 : n);
        EXPECT(m, status == (m->rank == 1 ? TAGC_ERR_ARGUMENT : TAGC_OK));
        if (status == TAGC_OK) status = tagc_model_end(model, 0, NULL);
        EXPECT(m,
               status == TAGC_ERR_ARGUMENT && strstr(tagc_last_error(), m->rank == 1 ? "must have" : "rank"));
    }
    EXPECT(m, tagc_model_begin(model, 0, in, n, out, n) == TAGC_OK);
    EXPECT(m, tagc_model_end(model, 0, NULL) == TAGC_OK);
    tagc_model_destroy(model);
}

TEST(lists_that_are_no_flats) {
    run_world(2, 1, flats_body, NULL);
    run_world(2, 2, flats_body, NULL);
}

/* ---- two levels: what one place alone hears ---- */

typedef enum damage_what {
    DAMAGE_BODY,      /* of fragments: they are refused, and the step fails */
    DAMAGE_AGREEMENT, /* the ranks of the place cannot go on */
    DAMAGE_LENGTH     /* of the schedule's sums, likewise */
} damage_what;

/* The comm between hosts of the last rank. What it sends is damaged once. */
typedef struct liar {
    const tagc_transport_ops *below;
    void *context;
    atomic_int what, n_damaged; /* what: -1: nothing */
    tagc_part part;             /* until the transfer is over */
    unsigned char bytes[1 << 16];
} liar;

static int lies_about(const liar *l, const tagc_transfer *t, const unsigned char *bytes, uint64_t n) {
    int what = atomic_load(&l->what), has_header = n >= 64 && memcmp(bytes, "TAGC", 4) == 0;
    if (what == DAMAGE_LENGTH) return t->lane == TAGC_LANE_CONTROL;
    return has_header && bytes[5] == (what == DAMAGE_BODY ? TAGC_WIRE_FRAGMENT : TAGC_WIRE_AGREE);
}

static tagc_status liar_start(void *context, const tagc_transfer *t, void **request) {
    liar *l = context;
    tagc_transfer changed = *t;
    if (t->n_sends == 1 && t->sends[0].n_bytes < sizeof l->bytes - 1 && atomic_load(&l->what) >= 0) {
        uint64_t n = t->sends[0].n_bytes;
        memcpy(l->bytes, (const char *)t->send + t->sends[0].offset, n);
        if (lies_about(l, t, l->bytes, n)) {
            l->part = (tagc_part){t->sends[0].peer, n + (atomic_load(&l->what) == DAMAGE_LENGTH), 0};
            l->bytes[n - 1] ^= 1;
            changed.sends = &l->part;
            changed.send = l->bytes;
            atomic_fetch_add(&l->n_damaged, 1);
            atomic_store(&l->what, -1);
        }
    }
    return l->below->start(l->context, &changed, request);
}

static tagc_status liar_test(void *context, void *request, tagc_progress *progress) {
    const liar *l = context;
    return l->below->test(l->context, request, progress);
}

static void liar_cancel(void *context, const tagc_failure *failure) {
    const liar *l = context;
    l->below->cancel(l->context, failure);
}

static void liar_abort(void *context, const tagc_failure *failure) {
    const liar *l = context;
    l->below->abort(l->context, failure);
}

static void liar_destroy(void *context) {
    const liar *l = context;
    l->below->destroy(l->context);
}

static const tagc_transport_ops liar_ops = {.abi = TAGC_TRANSPORT_ABI,
                                            .capabilities = TAGC_TRANSPORT_LANES,
                                            .name = "liar",
                                            .start = liar_start,
                                            .test = liar_test,
                                            .cancel = liar_cancel,
                                            .abort = liar_abort,
                                            .destroy = liar_destroy};

static liar told_lies;

static void set_lie(const member *m, int what) {
    if (m->rank == m->w->n_hosts * m->w->n_places - 1) atomic_store(&told_lies.what, what);
}

static void become_liar(member *m) {
    if (m->rank != m->w->n_hosts * m->w->n_places - 1) return;
    pthread_mutex_lock(&m->between->lock);
    told_lies.below = m->between->ops;
    told_lies.context = m->between->context;
    atomic_store(&told_lies.what, -1);
    atomic_store(&told_lies.n_damaged, 0);
    m->between->ops = &liar_ops;
    m->between->context = &told_lies;
    pthread_mutex_unlock(&m->between->lock);
}

typedef struct lie {
    int what, output;
    pthread_barrier_t all_told;
} lie;

/* What is damaged may be the last word, and the host that sent it go on as far as the next one. The other host calls no more. */
static void hear_lie(member *m, tagc_model *model, own_arrays *a, const lie *about) {
    tagc_reducer *heard = model->tensors[0].part->reducer; /* its fragment is the first that comes */
    size_t n = tagc_reducer_residual_elems(heard);
    float *before = malloc(n * sizeof *before), *after = malloc(n * sizeof *after);
    EXPECT(m, n > 0 && tagc_reducer_get_residual(heard, before, n) == TAGC_OK);
    set_lie(m, about->what);
    fill_own(m, model, a);
    tagc_status status = about->what == DAMAGE_LENGTH ? tagc_model_step(model, 1) : run_unit(model, 0, a);
    if (about->what != DAMAGE_BODY && status == TAGC_OK) status = run_unit(model, 0, a);
    EXPECT(m, status == (about->what == DAMAGE_LENGTH ? TAGC_ERR_MISMATCH : TAGC_ERR_CORRUPT));
    /* The other place has exchanged its part. */
    EXPECT(m, tagc_reducer_get_residual(heard, after, n) == TAGC_OK);
    if (about->what == DAMAGE_BODY && m->place == m->w->n_places - 1)
        EXPECT(m, memcmp(before, after, n * sizeof *before) == 0);
    free(before);
    free(after);
}

static void lie_body(member *m) {
    lie *about = m->w->shared;
    own_arrays *a = calloc(1, sizeof *a);
    tagc_model *model = NULL;
    tagc_model_options o;
    tagc_model_options_init(&o);
    o.layout.output = about->output;
    become_liar(m);
    EXPECT(m, tagc_model_create(m->within, m->between, tensors, N_ALL, &o, &model) == TAGC_OK);
    for (int step = 0; step < 20 && !m->failure[0]; step++) { /* the last one decides */
        if (step == 19 && about->what != DAMAGE_LENGTH) hear_lie(m, model, a, about);
        if (step == 19 && about->what != DAMAGE_BODY) break;
        check_right(m, model, a);
        EXPECT(m, tagc_model_step(model, 1) == TAGC_OK);
    }
    if (about->what == DAMAGE_LENGTH && !m->failure[0]) {
        check_right(m, model, a);
        hear_lie(m, model, a, about);
    }
    for (int step = 0; step < 30 && about->what == DAMAGE_BODY && !m->failure[0]; step++) {
        check_right(m, model, a); /* nothing is broken, and all go on alike */
        EXPECT(m, tagc_model_step(model, 1) == TAGC_OK);
    }
    pthread_barrier_wait(&about->all_told); /* comms stay, so that nobody learns of it by their end */
    tagc_model_destroy(model);
    free(a);
}

TEST(a_lie_to_one_place) {
    static const int outputs[] = {TAGC_OUTPUT_SHARD, TAGC_OUTPUT_HOST_SHARD, TAGC_OUTPUT_UNIT};
    for (int what = DAMAGE_BODY; what <= DAMAGE_LENGTH; what++)
        for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++) {
            lie about = {.what = what, .output = outputs[i]};
            pthread_barrier_init(&about.all_told, NULL, 4);
            run_world(2, 2, lie_body, &about);
            pthread_barrier_destroy(&about.all_told);
            assert_int_equal(told_lies.n_damaged, 1);
        }
}

/* One rank fails to begin the second of three units, and another ends them the other way round. */
static void order_of_ends_body(member *m) {
    static const tagc_tensor three[] = {{"x", matrix, 2, 0, TAGC_CLASS_COMPRESSED},
                                        {"y", matrix, 2, 1, TAGC_CLASS_COMPRESSED},
                                        {"z", matrix, 2, 2, TAGC_CLASS_COMPRESSED}};
    own_arrays *a = calloc(1, sizeof *a);
    tagc_model *model = NULL;
    tagc_model_options o;
    tagc_model_options_init(&o);
    o.layout.output = *(int *)m->w->shared;
    EXPECT(m, tagc_model_create(m->within, m->between, three, 3, &o, &model) == TAGC_OK);
    for (int step = 0; model && step < 3; step++) {
        int is_wrong = step == 1;
        tagc_status begun[3];
        fill_own(m, model, a);
        if (is_wrong && m->rank == 3) a->in[1].values = NULL;
        for (uint32_t u = 0; u < 3; u++) begun[u] = tagc_model_begin(model, u, &a->in[u], 1, &a->out[u], 1);
        for (uint32_t k = 0; k < 3; k++) {
            uint32_t u = m->rank == 2 ? 2 - k : k;
            tagc_status status = begun[u] == TAGC_OK ? tagc_model_end(model, u, NULL) : begun[u];
            EXPECT(m, status == (is_wrong && u == 1 ? TAGC_ERR_ARGUMENT : TAGC_OK));
            for (uint64_t i = 0; status == TAGC_OK && i < a->out[u].n_elems; i++)
                EXPECT(m, fabsf(a->sums[u][i] - (1.5f + (float)(a->out[u].first + i))) < 3.0f);
        }
        EXPECT(m, tagc_model_step(model, 1) == TAGC_OK);
    }
    tagc_model_destroy(model);
    free(a);
}

TEST(units_that_end_in_another_order) {
    int outputs[] = {TAGC_OUTPUT_SHARD, TAGC_OUTPUT_UNIT};
    for (int i = 0; i < 2; i++) run_world(2, 2, order_of_ends_body, &outputs[i]);
}
