/* Models that follow a schedule of the caller's decide as one that has its own; and what a trainer asks of them besides: residuals by tensor, statistics of parts, a
 * word that ranks must have alike, a rank that fails, and tensors that rest. */
#include "world.h"

enum { N_TENSORS = 9, N_UNITS = 3, N_STEPS = 150 };

static float gradient_of(int rank, uint32_t tensor, uint64_t i, int step) {
    uint64_t bits = number_of(7, (uint64_t)rank * 64 + tensor, i, (uint64_t)step);
    return ((float)(bits >> 40) / 8388608.0f - 1.0f) * (float)(1u << (i % 9));
}

typedef struct own_unit {
    tagc_model *model;
    uint32_t numbers[N_TENSORS], n; /* of its tensors, in the whole shape */
    tagc_tensor tensors[N_TENSORS];
    tagc_piece pieces[N_TENSORS];
    float *values[N_TENSORS];
} own_unit;

static void fill(own_unit *u, const shape_of_model *s, int rank, int step) {
    for (uint32_t i = 0; i < u->n; i++) {
        uint32_t t = u->numbers[i];
        for (uint64_t k = 0; k < s->n_elems[t]; k++) u->values[i][k] = gradient_of(rank, t, k, step);
        u->pieces[i] = (tagc_piece){i, 0, s->n_elems[t], u->values[i]};
    }
}

static void choose(const shape_of_model *s, uint32_t unit, own_unit *u) {
    *u = (own_unit){0};
    for (uint32_t t = 0; t < s->n; t++) {
        if (unit != UINT32_MAX && t % N_UNITS != unit) continue;
        u->tensors[u->n] = s->tensors[t];
        u->tensors[u->n].shape = s->shapes[t];
        u->tensors[u->n].name = s->names[t];
        if (unit != UINT32_MAX) u->tensors[u->n].unit = 0;
        u->values[u->n] = malloc((size_t)s->n_elems[t] * sizeof(float));
        u->numbers[u->n++] = t;
    }
}

static void drop(own_unit *u) {
    tagc_model_destroy(u->model);
    for (uint32_t i = 0; i < u->n; i++) free(u->values[i]);
}

/* What the schedule knows: all but the DENSE ones. */
static tagc_schedule *make_schedule(member *m, const own_unit *all, const tagc_schedule_options *o,
                                    uint32_t *number_of_tensor) {
    tagc_schedule_parameter described[N_TENSORS];
    tagc_schedule *schedule = NULL;
    size_t n = 0;
    for (uint32_t t = 0; t < all->n; t++) {
        number_of_tensor[t] = (uint32_t)n;
        if (all->tensors[t].kind == TAGC_CLASS_DENSE) continue;
        uint64_t n_elems = 1;
        for (size_t d = 0; d < all->tensors[t].n_dims; d++) n_elems *= all->tensors[t].shape[d];
        described[n++] =
            (tagc_schedule_parameter){all->tensors[t].name, n_elems, (tagc_class)all->tensors[t].kind};
    }
    EXPECT(m, tagc_schedule_create(o, described, n, &schedule) == TAGC_OK);
    for (size_t i = 0; schedule && i < n; i++)
        EXPECT(m, tagc_schedule_set_moment(schedule, i, TAGC_MOMENT_NONE) == TAGC_OK);
    return schedule;
}

/* What tagc_model_step does with its own schedule. */
static void step_together(member *m, tagc_schedule *schedule, own_unit *units) {
    uint32_t full[N_TENSORS];
    tagc_schedule_sums sums[N_TENSORS], all[MOST_RANKS * N_TENSORS];
    size_t n_full = 0, n;
    int n_ranks = m->w->n_hosts, has_changed = 0;
    for (uint32_t u = 0; u < N_UNITS; u++) {
        EXPECT(m, tagc_model_take_full(units[u].model, 0, full + n_full, sums + n_full, &n) == TAGC_OK);
        n_full += n;
    }
    if (n_full > 0) {
        EXPECT(m, tagc_comm_all_gather(m->between, sums, n_full * sizeof *sums, all,
                                       (size_t)n_ranks * n_full * sizeof *sums) == TAGC_OK);
        for (size_t i = 0; i < n_full * sizeof *sums / sizeof(double); i++) {
            ((double *)sums)[i] = 0;
            for (int r = 0; r < n_ranks; r++)
                ((double *)sums)[i] +=
                    ((double *)all)[(size_t)r * n_full * sizeof *sums / sizeof(double) + i];
        }
        EXPECT(m, tagc_schedule_see(schedule, full, n_full, sums, 0) == TAGC_OK);
    }
    EXPECT(m, tagc_schedule_step(schedule, &has_changed, NULL) == TAGC_OK);
    for (uint32_t u = 0; has_changed && u < N_UNITS; u++)
        EXPECT(m, tagc_model_follow(units[u].model) == TAGC_OK);
}

static void same_plans_body(member *m) {
    shape_of_model s;
    own_unit whole, units[N_UNITS];
    tagc_schedule_options so;
    tagc_model_options o;
    uint32_t number[N_TENSORS], own[N_TENSORS];
    int reached = 0;
    make_shape(&s, 11, N_TENSORS, N_UNITS);
    tagc_schedule_options_init(&so);
    so.fresh = 1;
    tagc_model_options_init(&o);
    o.layout.output = TAGC_OUTPUT_UNIT;
    o.schedule.options = &so;
    o.schedule.moment = TAGC_MOMENT_NONE;
    choose(&s, UINT32_MAX, &whole);
    EXPECT(m, tagc_model_create(NULL, m->between, whole.tensors, whole.n, &o, &whole.model) == TAGC_OK);
    EXPECT(m, tagc_model_follow(whole.model) == TAGC_ERR_STATE);
    tagc_schedule *schedule = make_schedule(m, &whole, &so, number);
    o.schedule.follows = schedule;
    for (uint32_t u = 0; u < N_UNITS; u++) {
        choose(&s, u, &units[u]);
        for (uint32_t i = 0; i < units[u].n; i++) own[i] = number[units[u].numbers[i]];
        o.schedule.numbers = own;
        o.tag = u;
        EXPECT(m, tagc_model_create(NULL, m->between, units[u].tensors, units[u].n, &o, &units[u].model) ==
                      TAGC_OK);
        if (!units[u].model) return;
        EXPECT(m, tagc_model_step(units[u].model, 1.0) == TAGC_ERR_STATE);
    }
    for (int step = 0; step < N_STEPS && !m->failure[0]; step++) {
        for (uint32_t u = 0; u < N_UNITS; u++) { /* all under way at once */
            tagc_piece pieces[N_TENSORS];
            uint32_t n = 0;
            if (u == 0) fill(&whole, &s, m->rank, step);
            for (uint32_t t = u; t < s.n; t += N_UNITS) pieces[n++] = whole.pieces[t];
            fill(&units[u], &s, m->rank, step);
            EXPECT(m, tagc_model_begin(units[u].model, 0, units[u].pieces, units[u].n, units[u].pieces,
                                       units[u].n) == TAGC_OK);
            EXPECT(m, tagc_model_begin(whole.model, u, pieces, n, pieces, n) == TAGC_OK);
            EXPECT(m, tagc_model_end(whole.model, u, NULL) == TAGC_OK);
        }
        for (uint32_t u = 0; u < N_UNITS; u++) EXPECT(m, tagc_model_end(units[u].model, 0, NULL) == TAGC_OK);
        EXPECT(m, tagc_model_step(whole.model, NAN) == TAGC_OK);
        step_together(m, schedule, units);
        for (uint32_t u = 0; u < N_UNITS && step % 7 == 3; u++) /* which changes nothing */
            EXPECT(m, tagc_model_ask(units[u].model, 0, (uint64_t)step) == TAGC_OK);
        for (uint32_t u = 0; u < N_UNITS; u++)
            for (uint32_t i = 0; i < units[u].n; i++) {
                uint32_t t = units[u].numbers[i];
                tagc_schedule_plan a, b;
                EXPECT(m, tagc_model_plan(whole.model, t, &a) == TAGC_OK);
                EXPECT(m, tagc_model_plan(units[u].model, i, &b) == TAGC_OK);
                EXPECT(m, a.level == b.level && a.format == b.format && a.sparsity == b.sparsity);
                reached |= s.tensors[t].kind != TAGC_CLASS_DENSE && a.level == TAGC_LEVEL_LAST;
                EXPECT(m, !memcmp(whole.values[t], units[u].values[i], s.n_elems[t] * sizeof(float)));
            }
    }
    EXPECT(m, reached);
    drop(&whole);
    for (uint32_t u = 0; u < N_UNITS; u++) drop(&units[u]);
    tagc_schedule_destroy(schedule);
}

TEST(a_schedule_of_the_callers) {
    run_world(2, 1, same_plans_body, NULL);
    run_world(3, 1, same_plans_body, NULL);
}

/* ---- one unit ---- */

static void make_one(member *m, shape_of_model *s, own_unit *u, int output, uint64_t rests) {
    tagc_model_options o;
    tagc_schedule_options so;
    make_shape(s, 23, N_TENSORS, 1);
    tagc_schedule_options_init(&so);
    so.gentle = 0;
    tagc_model_options_init(&o);
    o.layout.output = output;
    o.schedule.options = &so;
    o.rests = rests;
    o.formats.residual = TAGC_FORMAT_FP32;
    choose(s, UINT32_MAX, u);
    EXPECT(m, tagc_model_create(m->within, m->between, u->tensors, u->n, &o, &u->model) == TAGC_OK);
}

/* In two pieces each, backwards in memory. */
static size_t residual_pieces(const shape_of_model *s, float *const *values, tagc_piece *pieces) {
    size_t n = 0;
    for (uint32_t t = 0; t < s->n; t++) {
        uint64_t half = s->n_elems[t] / 2;
        pieces[n++] = (tagc_piece){t, 0, half, values[t] + (s->n_elems[t] - half)};
        pieces[n++] = (tagc_piece){t, half, s->n_elems[t] - half, values[t]};
    }
    return n;
}

static void residuals_body(member *m) {
    shape_of_model s;
    own_unit u;
    tagc_piece pieces[2 * N_TENSORS], sums[N_TENSORS];
    float *kept[N_TENSORS], *again[N_TENSORS];
    make_one(m, &s, &u, m->w->n_places > 1 ? TAGC_OUTPUT_HOST_SHARD : TAGC_OUTPUT_UNIT, 0);
    if (!u.model) return;
    double held = 0;
    for (uint32_t t = 0; t < s.n; t++) {
        kept[t] = malloc((size_t)s.n_elems[t] * sizeof(float));
        again[t] = malloc((size_t)s.n_elems[t] * sizeof(float));
        for (uint64_t i = 0; i < s.n_elems[t]; i++) kept[t][i] = again[t][i] = TAGC_ZERO_RESIDUAL;
    }
    for (int step = 0; step < 3; step++) {
        fill(&u, &s, m->rank, step);
        for (uint32_t t = 0; t < s.n; t++) {
            uint64_t first, n;
            EXPECT(m, tagc_model_owned(u.model, m->rank, t, &first, &n) == TAGC_OK);
            sums[t] = (tagc_piece){t, first, n, u.values[t] + first};
        }
        EXPECT(m, tagc_model_begin(u.model, 0, u.pieces, u.n, sums, u.n) == TAGC_OK);
        EXPECT(m, tagc_model_get_residual(u.model, 0, u.pieces, u.n) == TAGC_ERR_STATE);
        EXPECT(m, tagc_model_end(u.model, 0, NULL) == TAGC_OK);
    }
    size_t n = residual_pieces(&s, kept, pieces);
    EXPECT(m, tagc_model_get_residual(u.model, 0, pieces, n) == TAGC_OK);
    for (uint32_t t = 0; t < s.n; t++) { /* against the reducer's own array */
        const tagc_member *of = &u.model->tensors[t];
        uint64_t n_residual = tagc_reducer_residual_elems(of->part->reducer), half = s.n_elems[t] / 2;
        EXPECT(m, tagc_model_has_residual(u.model, t) == (n_residual > 0));
        float *all = calloc(n_residual + 1, sizeof(float));
        if (n_residual) EXPECT(m, tagc_reducer_get_residual(of->part->reducer, all, n_residual) == TAGC_OK);
        for (uint64_t i = 0; i < s.n_elems[t]; i++) {
            uint64_t at = n_residual ? tagc_part_find(of->part, of, i) : UINT64_MAX;
            float got = i < half ? kept[t][s.n_elems[t] - half + i] : kept[t][i - half];
            EXPECT(m, got == (at == UINT64_MAX ? 0 : all[at]));
            held += fabs((double)got);
        }
        free(all);
    }
    EXPECT(m, held > 0);
    EXPECT(m, tagc_model_forget(u.model) == TAGC_OK);
    EXPECT(m, tagc_model_get_residual(u.model, 0, u.pieces, u.n) == TAGC_OK);
    for (uint32_t t = 0; t < s.n; t++)
        for (uint64_t i = 0; tagc_model_has_residual(u.model, t) && m->w->n_places == 1 && i < s.n_elems[t];
             i++)
            EXPECT(m, u.values[t][i] == 0);
    EXPECT(m, tagc_model_set_residual(u.model, 0, pieces, n) == TAGC_OK);
    n = residual_pieces(&s, again, pieces);
    EXPECT(m, tagc_model_get_residual(u.model, 0, pieces, n) == TAGC_OK);
    for (uint32_t t = 0; t < s.n; t++)
        EXPECT(m, !memcmp(kept[t], again[t], (size_t)s.n_elems[t] * sizeof(float)));
    EXPECT(m, tagc_model_set_residual(u.model, 0, NULL, 0) == TAGC_OK); /* nothing is covered */
    EXPECT(m, tagc_model_get_residual(u.model, 0, pieces, n) == TAGC_OK);
    for (uint32_t t = 0; t < s.n; t++)
        for (uint64_t i = 0; i < s.n_elems[t]; i++) EXPECT(m, again[t][i] == 0);
    for (uint32_t t = 0; t < s.n; t++) free(kept[t]), free(again[t]);
    drop(&u);
}

TEST(residuals_by_tensor) {
    run_world(3, 1, residuals_body, NULL);
    run_world(2, 2, residuals_body, NULL);
}

static void words_body(member *m) {
    shape_of_model s;
    own_unit u;
    make_one(m, &s, &u, TAGC_OUTPUT_UNIT, 0);
    if (!u.model) return;
    for (int step = 0; step < 6 && !m->failure[0]; step++) {
        int differs = step % 3 == 1;
        fill(&u, &s, m->rank, step);
        EXPECT(m, tagc_model_set_word(u.model, 0, 5 + (uint64_t)(differs && m->rank == 1)) == TAGC_OK);
        if (step % 3 == 2 && m->rank == 1) {
            EXPECT(m, tagc_model_begin_failed(u.model, 0, TAGC_OK, "") == TAGC_ERR_ARGUMENT);
            EXPECT(m, tagc_model_begin_failed(u.model, 0, TAGC_ERR_IO, "no gradient today") == TAGC_OK);
            EXPECT(m, tagc_model_end(u.model, 0, NULL) == TAGC_ERR_IO);
            EXPECT(m, strstr(tagc_last_error(), "no gradient today") != NULL);
            continue;
        }
        if (differs && m->rank == 2) /* the word comes first */
            EXPECT(m, tagc_model_begin_failed(u.model, 0, TAGC_ERR_STATE, "why") == TAGC_OK);
        else
            EXPECT(m, tagc_model_begin(u.model, 0, u.pieces, u.n, u.pieces, u.n) == TAGC_OK);
        tagc_status status = tagc_model_end(u.model, 0, NULL);
        EXPECT(m, status == (differs ? TAGC_ERR_MISMATCH : step % 3 == 2 ? TAGC_ERR_IO : TAGC_OK));
        if (differs) EXPECT(m, strstr(tagc_last_error(), "rank 1 differs from rank 0 in the word") != NULL);
        if (step % 3 == 2) EXPECT(m, strstr(tagc_last_error(), "rank 1 failed") != NULL);
    }
    /* one asks something else, one asks while the others begin, all ask the same */
    EXPECT(m, tagc_model_ask(u.model, 0, 7 + (uint64_t)(m->rank == 2)) == TAGC_ERR_MISMATCH);
    EXPECT(m, tagc_model_set_word(u.model, 0, 7) == TAGC_OK);
    if (m->rank == 1) {
        EXPECT(m, tagc_model_ask(u.model, 0, 7) == TAGC_ERR_MISMATCH);
    } else {
        EXPECT(m, tagc_model_begin(u.model, 0, u.pieces, u.n, u.pieces, u.n) == TAGC_OK);
        EXPECT(m, tagc_model_end(u.model, 0, NULL) == TAGC_ERR_MISMATCH);
    }
    EXPECT(m, tagc_model_ask(u.model, 0, 7) == TAGC_OK);
    EXPECT(m, tagc_model_begin(u.model, 0, u.pieces, u.n, u.pieces, u.n) == TAGC_OK);
    EXPECT(m, tagc_model_ask(u.model, 0, 7) == TAGC_ERR_STATE);
    EXPECT(m, tagc_model_end(u.model, 0, NULL) == TAGC_OK);
    drop(&u);
}

/* Whoever differs, ranks of other hosts and places hear of it. */
static void words_of_hosts_body(member *m) {
    shape_of_model s;
    own_unit u;
    make_one(m, &s, &u, TAGC_OUTPUT_UNIT, 0);
    for (int odd = 0; u.model && odd < m->w->n_hosts * m->w->n_places && !m->failure[0]; odd++) {
        uint64_t word = 7 + (uint64_t)(m->rank == odd);
        EXPECT(m, tagc_model_ask(u.model, 0, word) == TAGC_ERR_MISMATCH);
        EXPECT(m, tagc_model_ask(u.model, 0, 7) == TAGC_OK);
        fill(&u, &s, m->rank, odd);
        EXPECT(m, tagc_model_set_word(u.model, 0, word) == TAGC_OK);
        EXPECT(m, tagc_model_begin(u.model, 0, u.pieces, u.n, u.pieces, u.n) == TAGC_OK);
        EXPECT(m, tagc_model_end(u.model, 0, NULL) == TAGC_ERR_MISMATCH);
        EXPECT(m, tagc_model_set_word(u.model, 0, 7) == TAGC_OK);
        if (m->rank == odd)
            EXPECT(m, tagc_model_begin_failed(u.model, 0, TAGC_ERR_IO, "no gradient today") == TAGC_OK);
        else
            EXPECT(m, tagc_model_begin(u.model, 0, u.pieces, u.n, u.pieces, u.n) == TAGC_OK);
        EXPECT(m, tagc_model_end(u.model, 0, NULL) == TAGC_ERR_IO);
        EXPECT(m, (m->rank == odd) == (strstr(tagc_last_error(), "rank") == NULL));
        EXPECT(m, tagc_model_begin(u.model, 0, u.pieces, u.n, u.pieces, u.n) == TAGC_OK);
        EXPECT(m, tagc_model_end(u.model, 0, NULL) == TAGC_OK);
    }
    drop(&u);
}

TEST(a_word_and_a_rank_that_fails) {
    run_world(3, 1, words_body, NULL);
    run_world(2, 2, words_of_hosts_body, NULL);
}

static void parts_body(member *m) {
    shape_of_model s;
    own_unit u;
    make_one(m, &s, &u, TAGC_OUTPUT_UNIT, 0);
    if (!u.model) return;
    fill(&u, &s, m->rank, 1);
    tagc_model_stats whole;
    tagc_model_stats_init(&whole);
    EXPECT(m, tagc_model_begin(u.model, 0, u.pieces, u.n, u.pieces, u.n) == TAGC_OK);
    EXPECT(m, tagc_model_end(u.model, 0, &whole) == TAGC_OK);
    uint64_t n_all = 0, n_bytes = 0, n_sent = 0, n_expected = 0, n_elems;
    uint32_t tensor, n_parts = tagc_model_n_parts(u.model, 0), kinds = 0;
    EXPECT(m, n_parts == 3 && tagc_model_n_parts(u.model, 1) == 0);
    for (uint32_t p = 0; p < n_parts; p++) {
        tagc_reducer_stats stats;
        tagc_reducer_stats_init(&stats);
        EXPECT(m, tagc_model_part_stats(u.model, 0, p, &tensor, &n_elems, &stats) == TAGC_OK);
        kinds |= 1u << tagc_model_class(u.model, tensor);
        n_all += n_elems;
        n_sent += stats.n_sent;
        for (int leg = 0; leg < TAGC_N_LEGS; leg++) n_bytes += stats.n_bytes_sent[leg];
    }
    for (uint32_t t = 0; t < s.n; t++) n_expected += s.n_elems[t];
    EXPECT(m, kinds == 7 && n_all == n_expected && n_bytes == whole.n_bytes_sent && n_sent == whole.n_sent);
    EXPECT(m, tagc_model_part_stats(u.model, 0, n_parts, NULL, NULL, NULL) == TAGC_ERR_ARGUMENT);
    drop(&u);
}

TEST(statistics_of_parts) {
    run_world(2, 1, parts_body, NULL);
}

/* A tensor without a gradient: its sum is zero, and what stays of it is as before, bit for bit; and sums of the others are not lost. */
static void rests_body(member *m) {
    shape_of_model s;
    own_unit u;
    float *before[N_TENSORS], *after[N_TENSORS];
    tagc_piece pieces[2 * N_TENSORS];
    make_one(m, &s, &u, TAGC_OUTPUT_UNIT, 1);
    if (!u.model) return;
    for (uint32_t t = 0; t < s.n; t++) {
        before[t] = calloc((size_t)s.n_elems[t], sizeof(float));
        after[t] = calloc((size_t)s.n_elems[t], sizeof(float));
    }
    for (int step = 0; step < 6; step++) {
        size_t n = residual_pieces(&s, before, pieces);
        EXPECT(m, tagc_model_get_residual(u.model, 0, pieces, n) == TAGC_OK);
        fill(&u, &s, m->rank, step);
        uint32_t out = (uint32_t)step % s.n, n_given = u.n;
        memset(u.values[out], 0, (size_t)s.n_elems[out] * sizeof(float));
        EXPECT(m, tagc_model_begin(u.model, 0, u.pieces, n_given, u.pieces, u.n) == TAGC_OK);
        EXPECT(m, tagc_model_end(u.model, 0, NULL) == TAGC_OK);
        n = residual_pieces(&s, after, pieces);
        EXPECT(m, tagc_model_get_residual(u.model, 0, pieces, n) == TAGC_OK);
        EXPECT(m, !memcmp(before[out], after[out], (size_t)s.n_elems[out] * sizeof(float)));
        for (uint64_t i = 0; i < s.n_elems[out]; i++) EXPECT(m, u.values[out][i] == 0);
    }
    for (uint32_t t = 0; t < s.n; t++) free(before[t]), free(after[t]);
    drop(&u);
}

static void exchange_owned(member *m, const shape_of_model *s, own_unit *u) {
    tagc_piece sums[N_TENSORS];
    for (uint32_t t = 0; t < s->n; t++) {
        uint64_t first, n;
        EXPECT(m, tagc_model_owned(u->model, m->rank, t, &first, &n) == TAGC_OK);
        sums[t] = (tagc_piece){t, first, n, u->values[t] + first};
    }
    EXPECT(m, tagc_model_begin(u->model, 0, u->pieces, u->n, sums, u->n) == TAGC_OK);
    EXPECT(m, tagc_model_end(u->model, 0, NULL) == TAGC_OK);
}

/* Of hosts with two ranks, whose sum decides. What one of them alone has a gradient of goes out as if nothing rested, also what the other
 * one keeps; and where their gradients cancel each other out, both keep what they have, bit for bit. */
static void rests_of_hosts_body(member *m) {
    shape_of_model s;
    own_unit u, plain;
    float *before[N_TENSORS], *after[N_TENSORS], *of_plain[N_TENSORS];
    tagc_piece pieces[2 * N_TENSORS];
    make_one(m, &s, &u, TAGC_OUTPUT_HOST_SHARD, 1);
    make_one(m, &s, &plain, TAGC_OUTPUT_HOST_SHARD, 0);
    if (!u.model || !plain.model) return;
    for (uint32_t t = 0; t < s.n; t++) {
        before[t] = calloc((size_t)s.n_elems[t], sizeof(float));
        after[t] = calloc((size_t)s.n_elems[t], sizeof(float));
        of_plain[t] = calloc((size_t)s.n_elems[t], sizeof(float));
    }
    for (int step = 0; step < 18; step++) {
        uint32_t out = (uint32_t)step % s.n;
        int cancels = step >= 9; /* from then on the two models differ */
        size_t n = residual_pieces(&s, before, pieces), n_bytes = (size_t)s.n_elems[out] * sizeof(float);
        EXPECT(m, tagc_model_get_residual(u.model, 0, pieces, n) == TAGC_OK);
        fill(&u, &s, m->rank, step);
        fill(&plain, &s, m->rank, step);
        for (uint64_t i = 0; i < s.n_elems[out]; i++) {
            float value = gradient_of(2 * m->host, out, i, step);
            float own = m->place == 0 ? value : cancels ? -value : 0;
            u.values[out][i] = plain.values[out][i] = own;
        }
        exchange_owned(m, &s, &u);
        exchange_owned(m, &s, &plain);
        n = residual_pieces(&s, after, pieces);
        EXPECT(m, tagc_model_get_residual(u.model, 0, pieces, n) == TAGC_OK);
        n = residual_pieces(&s, of_plain, pieces);
        EXPECT(m, tagc_model_get_residual(plain.model, 0, pieces, n) == TAGC_OK);
        if (cancels) EXPECT(m, !memcmp(before[out], after[out], n_bytes));
        for (uint32_t t = 0; !cancels && t < s.n; t++) {
            EXPECT(m, !memcmp(after[t], of_plain[t], (size_t)s.n_elems[t] * sizeof(float)));
            EXPECT(m, !memcmp(u.values[t], plain.values[t], (size_t)s.n_elems[t] * sizeof(float)));
        }
    }
    for (uint32_t t = 0; t < s.n; t++) free(before[t]), free(after[t]), free(of_plain[t]);
    drop(&u);
    drop(&plain);
}

TEST(tensors_that_rest) {
    run_world(2, 1, rests_body, NULL);
    run_world(3, 1, rests_body, NULL);
    run_world(2, 2, rests_of_hosts_body, NULL);
}
