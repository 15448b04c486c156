/* A model's exchange against plain sums: who gets what, from pieces of every shape, while several units are under way; and that nothing
 * is lost while the schedule changes what is sent. */
#include "../repeats.h"
#include "codec/elements.h"
#include "world.h"

/* ---- sums that any order of additions gives exactly ---- */

typedef struct plain_case {
    shape_of_model shape;
    uint64_t seed;
    int output, op, gradient, sum, cut, n_steps;
} plain_case;

/* Small whole numbers: their sums over 16 ranks are exact in bf16 and fp16. */
static float plain_gradient(const plain_case *c, int rank, uint32_t tensor, uint64_t i, int step) {
    return (float)(int)(number_of(c->seed, (uint64_t)rank * 64 + tensor, i, (uint64_t)step) % 7) - 3.0f;
}

/* Cuts [first, first + n) of a tensor into pieces, each in memory of its own order: one array, backwards. */
static size_t cut(tagc_piece *pieces, char *array, size_t element_bytes, uint32_t tensor, uint64_t first,
                  uint64_t n, uint64_t seed) {
    uint64_t end = first + n;
    size_t n_pieces = 0;
    char *at = array + n * element_bytes;
    while (first < end) {
        uint64_t n_here = 1 + number_of(seed, tensor, first, 9) % (end - first);
        at -= n_here * element_bytes;
        pieces[n_pieces++] = (tagc_piece){tensor, first, n_here, at};
        first += n_here;
        if (n_pieces == 7 && first < end) { /* the rest in one */
            at -= (end - first) * element_bytes;
            pieces[n_pieces++] = (tagc_piece){tensor, first, end - first, at};
            break;
        }
    }
    return n_pieces;
}

/* Ranges of all tensors, of which some owners have nothing: what tagc_model_options.layout.ranges takes. */
static void make_ranges(const shape_of_model *shape, int n_owners, uint64_t seed, uint64_t *ranges) {
    for (uint32_t t = 0; t < shape->n; t++)
        for (int owner = 0; owner <= n_owners; owner++, ranges++) {
            uint64_t n = shape->n_elems[t], before = owner > 0 ? ranges[-1] : 0;
            uint64_t random = number_of(seed, t, (uint64_t)owner, 31), n_here = random % (n - before + 1);
            *ranges = owner == 0 ? 0 : owner == n_owners ? n : random % 3 == 0 ? before : before + n_here;
        }
}

typedef struct unit_arrays {
    tagc_piece gradients[8 * MOST_TENSORS], sums[8 * MOST_TENSORS], checked[8 * MOST_TENSORS];
    size_t n_gradients, n_sums, n_checked;
    void *blocks[2 * MOST_TENSORS];
    size_t n_blocks;
} unit_arrays;

/* ---- flats: what lies where, in the plainest way ---- */

static int n_owners_of(const member *m, int output) {
    return output == TAGC_OUTPUT_SHARD ? m->w->n_hosts * m->w->n_places : m->w->n_places;
}

static uint64_t flat_elems(const member *m, const tagc_model *model, const plain_case *c, uint32_t unit,
                           int kind) {
    uint64_t n = 0;
    for (uint32_t t = unit; t < c->shape.n; t += c->shape.n_units)
        if (tagc_model_class(model, t) == kind) n += c->shape.n_elems[t];
    return tagc_padded_elems(n, m->w->n_hosts * m->w->n_places);
}

static void check_ranges(member *m, const tagc_model *model, const shape_of_model *shape, int n_owners,
                         const uint64_t *ranges) {
    for (uint32_t t = 0; t < shape->n; t++)
        for (int rank = 0; rank < m->w->n_hosts * m->w->n_places; rank++) {
            uint64_t first, n, begin = ranges[(int)t * (n_owners + 1) + rank % n_owners],
                               end = ranges[(int)t * (n_owners + 1) + rank % n_owners + 1];
            EXPECT(m, tagc_model_owned(model, rank, t, &first, &n) == TAGC_OK);
            EXPECT(m, n == end - begin && (n == 0 || first == begin));
        }
}

/* Each element of a flat belongs to the owner of its chunk. */
static void check_owned(member *m, const tagc_model *model, const plain_case *c) {
    int n_owners = n_owners_of(m, c->output), n_ranks = m->w->n_hosts * m->w->n_places;
    for (uint32_t unit = 0; unit < c->shape.n_units; unit++)
        for (int kind = 0; kind < 3; kind++) {
            uint64_t at = 0, chunk = flat_elems(m, model, c, unit, kind) / (uint64_t)n_owners;
            for (uint32_t t = unit; t < c->shape.n; t += c->shape.n_units) {
                if (tagc_model_class(model, t) != kind) continue;
                for (int rank = 0; rank < n_ranks; rank++) {
                    uint64_t first, n_owned, n = 0, lowest = 0, owner = (uint64_t)(rank % n_owners);
                    EXPECT(m, tagc_model_owned(model, rank, t, &first, &n_owned) == TAGC_OK);
                    for (uint64_t i = c->shape.n_elems[t]; i-- > 0;)
                        if (c->output == TAGC_OUTPUT_UNIT || (at + i) / chunk == owner) n++, lowest = i;
                    EXPECT(m, n_owned == n && (n == 0 || first == lowest));
                }
                at += c->shape.n_elems[t];
            }
        }
}

/* One array for each flat, with the padding. */
static void fill_flats(member *m, tagc_model *model, const plain_case *c, uint32_t unit, int step,
                       unit_arrays *a) {
    a->n_gradients = a->n_sums = a->n_checked = a->n_blocks = 0;
    for (int kind = 0; kind < 3; kind++) {
        uint64_t n = flat_elems(m, model, c, unit, kind), at = 0, first, n_owned;
        uint64_t n_owners = (uint64_t)n_owners_of(m, c->output), chunk = n / n_owners;
        uint64_t begin = c->output == TAGC_OUTPUT_UNIT ? 0 : (uint64_t)m->rank % n_owners * chunk;
        float *gradient = NULL, *sums = NULL;
        for (uint32_t t = unit; t < c->shape.n; t += c->shape.n_units) {
            if (tagc_model_class(model, t) != kind) continue;
            if (!gradient) {
                gradient = calloc(n, sizeof *gradient);
                sums = malloc(n * sizeof *sums);
                a->blocks[a->n_blocks++] = gradient;
                a->blocks[a->n_blocks++] = sums;
                a->gradients[a->n_gradients++] = (tagc_piece){t, 0, n, gradient};
                a->sums[a->n_sums++] = (tagc_piece){t, 0, c->output == TAGC_OUTPUT_UNIT ? n : chunk, sums};
            }
            for (uint64_t i = 0; i < c->shape.n_elems[t]; i++)
                gradient[at + i] = plain_gradient(c, m->rank, t, i, step);
            EXPECT(m, tagc_model_owned(model, m->rank, t, &first, &n_owned) == TAGC_OK);
            if (n_owned > 0)
                a->checked[a->n_checked++] = (tagc_piece){t, first, n_owned, sums + (at + first - begin)};
            at += c->shape.n_elems[t];
        }
    }
}

/* left_out: a tensor of which no piece is passed, or -1. */
static void fill_arrays(member *m, tagc_model *model, const plain_case *c, uint32_t unit, int step,
                        int left_out, unit_arrays *a) {
    a->n_gradients = a->n_sums = a->n_blocks = 0;
    for (uint32_t t = unit; t < c->shape.n; t += c->shape.n_units) {
        uint64_t n = c->shape.n_elems[t], first, n_owned;
        size_t g = tagc_element_bytes(c->gradient), s = tagc_element_bytes(c->sum);
        EXPECT(m, tagc_model_owned(model, m->rank, t, &first, &n_owned) == TAGC_OK);
        char *gradient = malloc(n * g), *sums = malloc(n_owned * s + 1);
        a->blocks[a->n_blocks++] = gradient;
        a->blocks[a->n_blocks++] = sums;
        memset(sums, 0x7f, n_owned * s);
        size_t n_pieces = cut(a->gradients + a->n_gradients, gradient, g, t, 0, n,
                              c->seed + (uint64_t)(step * 16 + m->rank));
        for (size_t p = a->n_gradients; p < a->n_gradients + n_pieces; p++)
            for (uint64_t i = 0; i < a->gradients[p].n_elems; i++) {
                float value = plain_gradient(c, m->rank, t, a->gradients[p].first + i, step);
                tagc_elements_write(&value, a->gradients[p].values, c->gradient, i, 1);
            }
        if ((int)t != left_out) a->n_gradients += n_pieces;
        if (n_owned > 0) a->n_sums += cut(a->sums + a->n_sums, sums, s, t, first, n_owned, c->seed + 77);
    }
    memcpy(a->checked, a->sums, sizeof a->checked);
    a->n_checked = a->n_sums;
}

static void check_sums(member *m, const plain_case *c, int step, int left_out, unit_arrays *a) {
    const world *w = m->w;
    int n_ranks = w->n_hosts * w->n_places;
    for (size_t p = 0; p < a->n_checked; p++)
        for (uint64_t i = 0; i < a->checked[p].n_elems; i++) {
            float sum = 0, got, expected;
            uint32_t t = a->checked[p].tensor;
            for (int r = 0; r < n_ranks && (int)t != left_out; r++)
                sum += plain_gradient(c, r, t, a->checked[p].first + i, step);
            expected = c->op == TAGC_OP_AVG ? sum * (1.0f / (float)w->n_hosts) : sum;
            uint16_t half;
            if (c->sum == TAGC_ELEMENT_FP16)
                half = tagc_fp16_nearest(expected), expected = tagc_fp16_wide(half);
            if (c->sum == TAGC_ELEMENT_BF16)
                tagc_bf16_narrow(&expected, &half, 1), tagc_bf16_widen(&half, &expected, 1);
            tagc_elements_read(a->checked[p].values, c->sum, i, 1, &got);
            if (!EXPECT(m, got == expected)) {
                snprintf(m->failure, sizeof m->failure, "step %d, %s[%llu]: %g, not %g", step,
                         c->shape.names[t], (unsigned long long)(a->checked[p].first + i), (double)got,
                         (double)expected);
                return;
            }
        }
}

/* What a rank sends the others of its host at least: its gradient but for the own place, and where all get all sums, those of its place. */
static uint64_t least_within(const member *m, const plain_case *c, uint32_t unit) {
    uint64_t n = 0, n_places = (uint64_t)m->w->n_places;
    size_t n_bytes = sizeof(float) + (c->output == TAGC_OUTPUT_UNIT ? tagc_element_bytes(c->sum) : 0);
    for (uint32_t t = unit; t < c->shape.n; t += c->shape.n_units) n += c->shape.n_elems[t];
    return n / n_places * (n_places - 1) * n_bytes;
}

static void plain_body(member *m) {
    const plain_case *c = m->w->shared;
    tagc_model_options o;
    tagc_schedule_options all;
    tagc_model *model;
    tagc_schedule_options_init(&all);
    all.gentle = 0;
    all.sparsity = all.mild_sparsity = 0;
    all.format = all.mild_format = TAGC_FORMAT_FP32;
    tagc_model_options_init(&o);
    o.schedule.options = &all;
    o.layout.output = c->output;
    o.op = c->op;
    o.formats.gradient = c->gradient;
    o.formats.sum = c->sum;
    o.layout.cut = c->cut;
    uint64_t ranges[MOST_TENSORS * (MOST_RANKS + 1)];
    make_ranges(&c->shape, n_owners_of(m, c->output), c->seed, ranges);
    if (c->cut == TAGC_CUT_RANGES) o.layout.ranges = ranges;
    if (!EXPECT(m, tagc_model_create(m->within, m->between, c->shape.tensors, c->shape.n, &o, &model) ==
                       TAGC_OK))
        return;
    unit_arrays *arrays = calloc(c->shape.n_units, sizeof *arrays);
    size_t n_bytes;
    EXPECT(m, tagc_model_save(model, NULL, 0, &n_bytes) ==
                  (c->cut == TAGC_CUT_RANGES ? TAGC_ERR_UNSUPPORTED : TAGC_OK));
    if (c->cut == TAGC_CUT_RANGES)
        check_ranges(m, model, &c->shape, n_owners_of(m, c->output), ranges);
    else if (c->cut != TAGC_CUT_ROWS)
        check_owned(m, model, c);
    for (int step = 0; step < c->n_steps && !m->failure[0]; step++) {
        int left_out = step % 3 == 2 ? (int)(number_of(c->seed, (uint64_t)step, 4, 4) % c->shape.n) : -1;
        if (c->cut == TAGC_CUT_FLAT_ARRAYS) left_out = -1;
        uint32_t first = (uint32_t)(number_of(c->seed, (uint64_t)step, 5, 5) %
                                    c->shape.n_units); /* another order in each step */
        for (uint32_t k = 0; k < c->shape.n_units; k++) {
            uint32_t unit = (first + k) % c->shape.n_units;
            if (c->cut == TAGC_CUT_FLAT_ARRAYS)
                fill_flats(m, model, c, unit, step, &arrays[unit]);
            else
                fill_arrays(m, model, c, unit, step, left_out, &arrays[unit]);
            EXPECT(m, tagc_model_begin(model, unit, arrays[unit].gradients, arrays[unit].n_gradients,
                                       arrays[unit].sums, arrays[unit].n_sums) == TAGC_OK);
        }
        for (uint32_t unit = 0; unit < c->shape.n_units; unit++) {
            tagc_model_stats stats;
            tagc_model_stats_init(&stats);
            EXPECT(m, tagc_model_end(model, unit, &stats) == TAGC_OK);
            EXPECT(m, !stats.nonfinite && stats.n_bytes_within >= least_within(m, c, unit));
            check_sums(m, c, step, left_out, &arrays[unit]);
            while (arrays[unit].n_blocks > 0) free(arrays[unit].blocks[--arrays[unit].n_blocks]);
        }
        EXPECT(m, tagc_model_step(model, NAN) == TAGC_OK);
    }
    free(arrays);
    tagc_model_destroy(model);
}

TEST(sums_are_plain_sums) {
    static const int worlds[][2] = {{1, 1}, {2, 1}, {3, 1}, {5, 1}, {8, 1},
                                    {2, 2}, {3, 2}, {2, 3}, {4, 2}, {1, 3}};
    static const int cuts[] = {TAGC_CUT_ROWS,        TAGC_CUT_ROWS,   TAGC_CUT_ROWS,
                               TAGC_CUT_FLAT,        TAGC_CUT_FLAT,   TAGC_CUT_FLAT,
                               TAGC_CUT_FLAT_ARRAYS, TAGC_CUT_RANGES, TAGC_CUT_RANGES};
    static plain_case c;
    uint64_t seed = 1;
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        for (int output = 0; output < 3; output++)
            for (int variant = 0; variant < 9; variant++) {
                int n_places = worlds[i][1], element = variant % 3;
                c = (plain_case){.seed = seed++,
                                 .output = output,
                                 .gradient = element,
                                 .sum = (element + (int)i) % 3,
                                 .cut = cuts[variant],
                                 .n_steps = 4};
                if (c.cut == TAGC_CUT_RANGES && output == TAGC_OUTPUT_UNIT) continue;
                if (seed % REPEATS(1, 7, 13)) continue; /* no factor of 9, 3 or 10: each option meets each */
                if (c.cut == TAGC_CUT_FLAT_ARRAYS) c.gradient = c.sum = TAGC_ELEMENT_FP32;
                int is_exact = (worlds[i][0] & (worlds[i][0] - 1)) == 0; /* a mean of these numbers */
                c.op = n_places == 1 && is_exact ? (int)(seed % 2) : TAGC_OP_SUM;
                make_shape(&c.shape, c.seed, 3 + (uint32_t)(seed % 20), 1 + (uint32_t)(seed % 4));
                run_world(worlds[i][0], n_places, plain_body, &c);
            }
}

/* ---- nothing is lost ---- */

typedef struct lossy_case {
    shape_of_model shape;
    uint64_t seed;
    int output, cut, n_steps, moment, reaches_last;
    double *sent[MOST_RANKS], *residual[MOST_RANKS]; /* (all elements): what owners got, and what stays */
    int owner_of_row[MOST_RANKS];
} lossy_case;

static float lossy_gradient(const lossy_case *c, int rank, uint32_t tensor, uint64_t i, int step) {
    uint64_t bits = number_of(c->seed, (uint64_t)rank * 64 + tensor, i, (uint64_t)step);
    return ((float)(bits >> 40) / 8388608.0f - 1.0f) * (float)(1u << (i % 9));
}

/* What stays of a tensor on this rank, by element. */
static void add_residual(member *m, const tagc_model *model, uint32_t tensor, double *residual) {
    const tagc_member *t = &model->tensors[tensor];
    uint64_t n = tagc_reducer_residual_elems(t->part->reducer);
    if (n == 0) return;
    float *values = malloc(n * sizeof *values);
    EXPECT(m, tagc_reducer_get_residual(t->part->reducer, values, n) == TAGC_OK);
    for (uint64_t i = 0; i < t->n_elems; i++) {
        uint64_t at = tagc_part_find(t->part, t, i);
        if (at != UINT64_MAX) residual[i] += (double)values[at];
    }
    free(values);
}

static void lossy_body(member *m) {
    lossy_case *c = m->w->shared;
    tagc_model_options o;
    tagc_model *model;
    tagc_model_options_init(&o);
    o.layout.output = c->output;
    o.layout.cut = c->cut;
    o.op = TAGC_OP_SUM;
    o.schedule.moment = c->moment;
    o.formats.residual = TAGC_FORMAT_FP32;
    uint64_t ranges[MOST_TENSORS * (MOST_RANKS + 1)];
    make_ranges(&c->shape, n_owners_of(m, c->output), c->seed, ranges);
    if (c->cut == TAGC_CUT_RANGES) o.layout.ranges = ranges;
    if (!EXPECT(m, tagc_model_create(m->within, m->between, c->shape.tensors, c->shape.n, &o, &model) ==
                       TAGC_OK))
        return;
    /* All gradients of all units lie side by side, and so do the sums: padding that came from a neighbour would be lost. */
    uint64_t n_all = 0, at_sums = 0, starts[MOST_TENSORS], first, n_owned;
    for (uint32_t t = 0; t < c->shape.n; t++) starts[t] = n_all, n_all += c->shape.n_elems[t];
    float *gradients = malloc(n_all * sizeof *gradients), *sums = malloc(n_all * sizeof *sums);
    tagc_piece in[MOST_TENSORS], out[MOST_TENSORS];
    for (int step = 0; step < c->n_steps && !m->failure[0]; step++) {
        for (uint32_t t = 0; t < c->shape.n; t++)
            for (uint64_t i = 0; i < c->shape.n_elems[t]; i++)
                gradients[starts[t] + i] = lossy_gradient(c, m->rank, t, i, step);
        uint32_t n_in[MOST_TENSORS], begin[MOST_TENSORS], n = 0;
        at_sums = 0;
        for (uint32_t u = 0; u < c->shape.n_units; u++) {
            begin[u] = n;
            for (uint32_t t = u; t < c->shape.n; t += c->shape.n_units, n++) {
                EXPECT(m, tagc_model_owned(model, m->rank, t, &first, &n_owned) == TAGC_OK);
                in[n] = (tagc_piece){t, 0, c->shape.n_elems[t], gradients + starts[t]};
                out[n] = (tagc_piece){t, first, n_owned, sums + at_sums};
                at_sums += n_owned;
            }
            n_in[u] = n - begin[u];
            EXPECT(m, tagc_model_begin(model, u, in + begin[u], n_in[u], out + begin[u], n_in[u]) == TAGC_OK);
        }
        for (uint32_t u = 0; u < c->shape.n_units; u++) EXPECT(m, tagc_model_end(model, u, NULL) == TAGC_OK);
        for (uint32_t k = 0; k < n; k++)
            for (uint64_t i = 0; i < out[k].n_elems; i++)
                c->sent[m->rank][starts[out[k].tensor] + out[k].first + i] +=
                    (double)((float *)out[k].values)[i];
        EXPECT(m, tagc_model_step(model, 3.0 + m->rank) == TAGC_OK);
    }
    for (uint32_t t = 0; t < c->shape.n; t++) {
        tagc_schedule_plan plan;
        add_residual(m, model, t, c->residual[m->rank] + starts[t]);
        EXPECT(m, tagc_model_plan(model, t, &plan) == TAGC_OK);
        if (c->reaches_last) EXPECT(m, plan.level == TAGC_LEVEL_LAST);
        if (c->moment == TAGC_MOMENT_STAYS && tagc_model_class(model, t) == TAGC_CLASS_COMPRESSED)
            EXPECT(m, plan.level < TAGC_LEVEL_LAST);
    }
    free(gradients);
    free(sums);
    tagc_model_destroy(model);
}

static void lossy(int n_hosts, int n_places, int output, int cut, int moment, int n_steps, int reaches_last,
                  uint64_t seed) {
    static lossy_case c;
    int n_ranks = n_hosts * n_places;
    uint64_t n_all = 0, at = 0;
    c = (lossy_case){.seed = seed,
                     .output = output,
                     .cut = cut,
                     .n_steps = n_steps,
                     .moment = moment,
                     .reaches_last = reaches_last};
    make_shape(&c.shape, seed, 9, 3);
    for (uint32_t t = 0; t < c.shape.n; t++) n_all += c.shape.n_elems[t];
    for (int r = 0; r < n_ranks; r++) {
        c.sent[r] = calloc(n_all, sizeof(double));
        c.residual[r] = calloc(n_all, sizeof(double));
    }
    run_world(n_hosts, n_places, lossy_body, &c);
    for (uint32_t t = 0; t < c.shape.n; t++)
        for (uint64_t i = 0; i < c.shape.n_elems[t]; i++, at++) {
            double expected = 0, got = 0, magnitude = 1;
            for (int step = 0; step < n_steps; step++)
                for (int r = 0; r < n_ranks; r++) {
                    double value = (double)lossy_gradient(&c, r, t, i, step);
                    expected += value;
                    magnitude += fabs(value);
                }
            /* Every sum has one owner; where all get all, rank 0 has them. */
            int n_copies = output == TAGC_OUTPUT_SHARD ? 1 : output == TAGC_OUTPUT_UNIT ? n_ranks : n_hosts;
            for (int r = 0; r < n_ranks; r++) got += c.sent[r][at] / n_copies + c.residual[r][at];
            /* fp32 residuals; between ranks of a host gradients travel in bf16. */
            double bound = (n_places > 1 ? 4e-3 : 2e-6) * magnitude;
            if (!(fabs(got - expected) <= bound))
                fail_msg("%d x %d, output %d: %s[%llu]: %.9g arrived or stayed, %.9g went in", n_hosts,
                         n_places, output, c.shape.names[t], (unsigned long long)i, got, expected);
        }
    for (int r = 0; r < n_ranks; r++) free(c.sent[r]), free(c.residual[r]);
}

TEST(nothing_is_lost) {
    enum { SHARD = TAGC_OUTPUT_SHARD, UNIT = TAGC_OUTPUT_UNIT, HOST_SHARD = TAGC_OUTPUT_HOST_SHARD };
    enum { ROWS = TAGC_CUT_ROWS, FLAT = TAGC_CUT_FLAT, RANGES = TAGC_CUT_RANGES };
    enum { NONE = TAGC_MOMENT_NONE, SHORTENS = TAGC_MOMENT_SHORTENS, STAYS = TAGC_MOMENT_STAYS };
    static const struct {
        int n_hosts, n_places, output, cut, moment, n_steps, reaches_last;
        uint64_t seed;
    } cases[] = {
        {3, 1, SHARD, ROWS, NONE, 170, 1, 10},      {3, 1, SHARD, FLAT, NONE, 170, 1, 10},
        {3, 1, UNIT, ROWS, NONE, 170, 1, 11},       {2, 2, SHARD, RANGES, NONE, 130, 0, 28},
        {3, 1, UNIT, FLAT, NONE, 170, 1, 11},       {3, 1, HOST_SHARD, ROWS, NONE, 170, 1, 12},
        {2, 3, HOST_SHARD, FLAT, NONE, 130, 0, 26}, {3, 1, HOST_SHARD, FLAT, NONE, 170, 1, 12},
        {2, 1, SHARD, ROWS, STAYS, 130, 0, 20},     {7, 1, SHARD, ROWS, SHORTENS, 90, 0, 23},
        {2, 2, SHARD, ROWS, NONE, 170, 1, 21},      {2, 2, SHARD, FLAT, NONE, 130, 0, 25},
        {2, 2, UNIT, ROWS, NONE, 70, 0, 24},        {2, 3, HOST_SHARD, ROWS, NONE, 130, 0, 22},
        {3, 1, SHARD, RANGES, NONE, 170, 1, 10},    {2, 3, HOST_SHARD, RANGES, NONE, 130, 0, 29},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i += REPEATS(1, 3, 7))
        lossy(cases[i].n_hosts, cases[i].n_places, cases[i].output, cases[i].cut, cases[i].moment,
              cases[i].n_steps, cases[i].reaches_last, cases[i].seed);
}

/* ---- defaults ---- */

static void defaults_are_safe_body(member *m) {
    uint64_t matrix[] = {64, 128}, vector[] = {128};
    tagc_tensor tensors[] = {{"h.0.mlp.c_fc.weight", matrix, 2, 0, TAGC_CLASS_BY_NAME},
                             {"h.0.attn.c_attn.weight", matrix, 2, 0, TAGC_CLASS_BY_NAME},
                             {"h.0.ln_1.weight", vector, 1, 0, TAGC_CLASS_BY_NAME}};
    tagc_model *model;
    tagc_schedule_plan plan;
    double beta1, beta2;
    if (!EXPECT(m, tagc_model_create(NULL, m->between, tensors, 3, NULL, &model) == TAGC_OK)) return;
    EXPECT(m, tagc_model_class(model, 0) == TAGC_CLASS_COMPRESSED);
    EXPECT(m, tagc_model_class(model, 1) == TAGC_CLASS_MILD);
    EXPECT(m, tagc_model_class(model, 2) == TAGC_CLASS_DENSE);
    EXPECT(m, tagc_model_class(model, 3) == -1);
    for (uint32_t t = 0; t < 2; t++) {
        EXPECT(m, tagc_model_plan(model, t, &plan) == TAGC_OK);
        EXPECT(m, plan.level == TAGC_LEVEL_FRESH && plan.sparsity == 0 && plan.format == TAGC_FORMAT_INT8);
        EXPECT(m, tagc_model_betas(model, t, 0.9, 0.95, &beta1, &beta2) == TAGC_OK);
        EXPECT(m, beta1 == 0.9 && beta2 == 0.95);
    }
    tagc_model_destroy(model);
}

TEST(defaults_are_safe) {
    run_world(2, 1, defaults_are_safe_body, NULL);
}

/* ---- without residuals ---- */

enum { N_ONCE = 3000, ONCE_STEPS = 48 };

static float once_gradient(int rank, uint64_t i) {
    return (float)(number_of(3, (uint64_t)rank, i, 0) >> 40) / 8388608.0f - 1.0f;
}

/* The same gradient again and again: what is rounded off in one step is lost, so it must average out. */
static void once_body(member *m) {
    uint64_t shape = N_ONCE;
    tagc_tensor tensor = {"once", &shape, 1, 0, TAGC_CLASS_COMPRESSED};
    tagc_schedule_options schedule;
    tagc_model_options o;
    tagc_model *model;
    tagc_schedule_options_init(&schedule);
    schedule.gentle = schedule.fresh = 0;
    schedule.sparsity = 0;
    schedule.format = TAGC_FORMAT_INT4;
    tagc_model_options_init(&o);
    o.schedule.options = &schedule;
    o.layout.output = TAGC_OUTPUT_UNIT;
    o.formats.residual = TAGC_RESIDUAL_NONE;
    o.formats.result = TAGC_FORMAT_INT8;
    if (!EXPECT(m, tagc_model_create(m->within, m->between, &tensor, 1, &o, &model) == TAGC_OK)) return;
    EXPECT(m, tagc_model_has_residual(model, 0) == 0);
    static _Thread_local float gradient[N_ONCE], sums[N_ONCE];
    static _Thread_local double mean[N_ONCE];
    double first = 0, all = 0;
    memset(mean, 0, sizeof mean);
    for (int step = 0; step < ONCE_STEPS; step++) {
        for (uint64_t i = 0; i < N_ONCE; i++) gradient[i] = once_gradient(m->rank, i);
        tagc_piece in = {0, 0, N_ONCE, gradient}, out = {0, 0, N_ONCE, sums};
        EXPECT(m, tagc_model_begin(model, 0, &in, 1, &out, 1) == TAGC_OK);
        EXPECT(m, tagc_model_end(model, 0, NULL) == TAGC_OK);
        for (uint64_t i = 0; i < N_ONCE; i++) mean[i] += (double)sums[i] / ONCE_STEPS;
        for (uint64_t i = 0; i < N_ONCE && step == 0; i++) {
            double exact = 0;
            for (int r = 0; r < m->w->n_hosts * m->w->n_places; r++)
                exact += (double)once_gradient(r, i) / (m->w->n_hosts * m->w->n_places);
            first += pow((double)sums[i] - exact, 2);
        }
    }
    for (uint64_t i = 0; i < N_ONCE; i++) {
        double exact = 0;
        for (int r = 0; r < m->w->n_hosts * m->w->n_places; r++)
            exact += (double)once_gradient(r, i) / (m->w->n_hosts * m->w->n_places);
        all += pow(mean[i] - exact, 2);
    }
    EXPECT(m, first > 0 && all < first / (ONCE_STEPS / 4));
    EXPECT(m, tagc_model_has_residual(model, 0) == 0);
    tagc_model_destroy(model);
}

TEST(means_are_right_without_residuals) {
    run_world(2, 1, once_body, NULL);
    run_world(2, 2, once_body, NULL);
}
