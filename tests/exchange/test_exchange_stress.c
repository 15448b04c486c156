/* Combinations of options, drawn at random: shapes down to one element, values from
 * denormal to near FLT_MAX, sparsity that changes between steps, and two reducers under way at a time.
 * Whatever comes out is compared with the brute-force step. */
#include "../lengths.h"
#include "../repeats.h"
#include "direct_oracle.h"
#include "oracle.h"
#include "paper.h"
#include "ranks.h"
#include "whole.h"

#include <float.h>

enum { N_TRIALS = REPEATS(300, 120, 50), N_RANKS_LARGE = REPEATS(16, 5, 5) };
enum { N_STEPS = 3, N_UNITS = 2 };

typedef struct unit {
    tagc_reducer_options options;
    tagc_paper_options paper;
    double sparsity[N_STEPS];
    int values; /* which kind */
    int is_whole;
    float *gradients, *outputs, *residuals; /* (steps, W, n) each */
    tagc_reducer_stats stats[N_STEPS][MAX_RANKS];
} unit;

typedef struct trial {
    uint64_t seed, state; /* of the random numbers */
    int world_size;
    unit units[N_UNITS];
} trial;

static uint64_t draw(trial *t, uint64_t n) {
    return (t->state = mix(t->state)) % n;
}

static float draw_value(trial *t, int kind) {
    double u = (double)draw(t, 1 << 24) / (1 << 23) - 1;
    switch (kind) {
    case 0:
        return (float)(u * u * u);
    case 1:
        return (float)ldexp(u, (int)draw(t, 200) - 100);
    case 2:
        return (float)(u * 1e-41);
    case 3:
        return (float)((int)draw(t, 5) - 2);
    case 4:
        return draw(t, 30) ? 0.0f : (float)u;
    case 5:
        return (float)(u * FLT_MAX);
    default:
        return draw(t, 2) ? -0.0f : 0.0f;
    }
}

/* What direct has of its own. */
static void draw_direct(trial *t, unit *x) {
    tagc_reducer_options *o = &x->options;
    o->exchange = TAGC_EXCHANGE_DIRECT;
    o->format = (int)draw(t, TAGC_FORMAT_INT2 + 1);
    o->block = 16 << draw(t, 9);
    o->output = (int)draw(t, 2);
    o->sparsity = x->sparsity[0];
    tagc_reducer_options_prune(o); /* no scales, no blocks */
}

static void draw_options(trial *t, unit *x) {
    static const double sparsities[] = {0, 0.1, 0.5, 0.8, 0.95, 0.9875, 1}, ratios[] = {0, 0, 1, 1.3, 4, 100};
    tagc_reducer_options *o = &x->options;
    tagc_paper_options *p = &x->paper;
    tagc_reducer_options_init(o);
    tagc_paper_options_init(p);
    o->n_elems = (1 + draw(t, (uint64_t[]){16, 16, 700, 3000}[draw(t, 4)])) * (uint64_t)t->world_size;
    o->exchange = draw(t, 8) ? 1 + (int)draw(t, 2) : WHOLE;
    p->index = draw(t, 3) ? TAGC_INDEX_OR : (int)draw(t, 3);
    if (p->index == TAGC_INDEX_SUM4 && t->world_size > 15) p->index = TAGC_INDEX_OR;
    p->ratio = ratios[draw(t, 6)];
    p->cells = (int)draw(t, 2);
    p->unpeeled = draw(t, 2) ? TAGC_UNPEELED_PACKED : (int)draw(t, 3);
    p->fill_union = (int)draw(t, p->index == TAGC_INDEX_OR ? 3 : 2) - 1;
    o->op = (int)draw(t, 2);
    o->output = (int)draw(t, 2);
    o->n_threads = 1 + (int)draw(t, 2);
    p->seed = draw(t, UINT64_MAX);
    x->values = (int)draw(t, 7);
    for (int step = 0; step < N_STEPS; step++)
        x->sparsity[step] = step && draw(t, 2) ? x->sparsity[step - 1] : sparsities[draw(t, 7)];
    o->sparsity = x->sparsity[0];
    if (draw(t, 3) == 0) draw_direct(t, x);
    x->is_whole = o->exchange == WHOLE;
    set_exchange(o, o->exchange);
}

static void draw_unit(trial *t, unit *x) {
    draw_options(t, x);
    size_t n = (size_t)x->options.n_elems, n_values = N_STEPS * (size_t)t->world_size * n;
    x->gradients = calloc(n_values, sizeof(float));
    x->outputs = calloc(n_values, sizeof(float));
    x->residuals = calloc(n_values, sizeof(float));
    assert_true(x->gradients && x->outputs && x->residuals);
    for (size_t i = 0; i < n_values; i++) x->gradients[i] = draw_value(t, x->values);
    if (draw(t, 4) == 0) x->gradients[draw(t, n_values)] = draw(t, 2) ? NAN : -INFINITY;
}

static void body(rank_run *run) {
    trial *t = run->shared;
    tagc_reducer *reducers[N_UNITS];
    for (int u = 0; u < N_UNITS; u++) {
        tagc_reducer_options options = t->units[u].options;
        tagc_paper_options paper = t->units[u].paper;
        attach_paper(&options, &paper);
        if (!CHECK(run, tagc_reducer_create(run->comm, &options, &reducers[u]) == TAGC_OK)) return;
    }
    for (size_t step = 0; step < N_STEPS; step++) {
        size_t row = step * (size_t)run->world_size + (size_t)run->rank;
        for (int u = 0; u < N_UNITS; u++) {
            unit *x = &t->units[u];
            size_t at = row * (size_t)x->options.n_elems;
            if (!x->is_whole)
                CHECK(run, tagc_reducer_set_sparsity(reducers[u], x->sparsity[step]) == TAGC_OK);
            CHECK(run, begin_reducer(reducers[u], x->gradients + at, x->outputs + at) == TAGC_OK);
        }
        for (int u = N_UNITS - 1; u >= 0; u--) {
            unit *x = &t->units[u];
            tagc_reducer_stats_init(&x->stats[step][run->rank]);
            CHECK(run, tagc_reducer_end(reducers[u], &x->stats[step][run->rank]) == TAGC_OK);
        }
        for (int u = 0; u < N_UNITS; u++) {
            size_t n = (size_t)t->units[u].options.n_elems;
            residual_to(reducers[u], t->units[u].residuals + row * n);
        }
    }
    for (int u = 0; u < N_UNITS; u++) tagc_reducer_destroy(reducers[u]);
}

/* ---- what must have come out ---- */

/* One step of one unit, all ranks. */
typedef struct step_view {
    const trial *t;
    const unit *x;
    size_t step, W, n, shard;
    const float *gradients, *outputs, *before, *after; /* (W, n) each; residuals before and after */
    int is_dense, is_sketch, is_fixed;
    double max_abs;
} step_view;

#define EXPECT(view, condition)                                                                              \
    do {                                                                                                     \
        if (!(condition))                                                                                    \
            fail_msg("seed %d, W %zu, shard %zu, step %zu: %s", (int)(view)->t->seed, (view)->W,             \
                     (view)->shard, (view)->step, #condition);                                               \
    } while (0)

static size_t n_out(const step_view *v) {
    return v->x->options.output ? v->n : v->shard;
}

static void expect_void_step(const step_view *v) {
    if (!v->is_dense) EXPECT(v, memcmp(v->before, v->after, v->W * v->n * sizeof(float)) == 0);
    for (size_t r = 0; r < v->W; r++) {
        EXPECT(v, v->x->stats[v->step][r].nonfinite);
        for (size_t i = 0; i < n_out(v); i++) EXPECT(v, isnan(v->outputs[r * v->n + i]));
    }
}

static int same_or_close(float value, float expected, double tolerance) {
    return bits_of(value) == bits_of(expected) || (isnan(value) && isnan(expected)) ||
           fabs((double)value - (double)expected) <= tolerance;
}

/* residuals (W, n) and sums (n): what must be there after the step. */
static tagc_reducer_options run_oracle(const step_view *v, float *residuals, float *sums) {
    tagc_reducer_options options = v->x->options;
    options.sparsity = v->is_dense ? 0 : v->x->sparsity[v->step];
    int fill = v->x->paper.fill_union;
    if (fill < 0) fill = options.exchange == TAGC_EXCHANGE_PACKED && v->x->paper.index == TAGC_INDEX_OR;
    memcpy(residuals, v->before, v->W * v->n * sizeof(float));
    oracle_step(&options, (int)v->W, fill, v->is_fixed, v->gradients, residuals, sums);
    return options;
}

static int sums_overflow(const step_view *v) {
    float *residuals = malloc(v->W * v->n * sizeof(float)), *sums = malloc(v->n * sizeof(float));
    int overflow = 0;
    (void)run_oracle(v, residuals, sums);
    for (size_t i = 0; i < v->n; i++) overflow |= !isfinite(sums[i]);
    free(residuals);
    free(sums);
    return overflow;
}

static void expect_oracle(const step_view *v) {
    float *residuals = malloc(v->W * v->n * sizeof(float)), *sums = malloc(v->n * sizeof(float));
    tagc_reducer_options options = run_oracle(v, residuals, sums);
    double tolerance = v->is_sketch && !v->is_fixed ? 2e-5 * v->max_abs * (double)v->W : -1;
    for (size_t r = 0; r < v->W; r++) {
        const float *expected = sums + (options.output ? 0 : r * v->shard);
        for (size_t i = 0; i < n_out(v); i++)
            EXPECT(v, same_or_close(v->outputs[r * v->n + i], expected[i], tolerance));
    }
    if (!v->is_dense) EXPECT(v, memcmp(residuals, v->after, v->W * v->n * sizeof(float)) == 0);
    free(residuals);
    free(sums);
}

/* For what the oracle cannot foresee: what came in has gone out or stayed. */
static void expect_conserved(const step_view *v) {
    double back = v->x->options.op == TAGC_OP_AVG ? (double)v->W : 1;
    for (size_t i = 0; i < v->n; i++) {
        size_t owner = i / v->shard, at = v->x->options.output ? i : i % v->shard;
        double in = 0, out = back * (double)v->outputs[owner * v->n + at];
        for (size_t r = 0; r < v->W; r++) {
            in += (double)(v->gradients[r * v->n + i] + v->before[r * v->n + i]);
            out += (double)v->after[r * v->n + i];
        }
        EXPECT(v, fabs(in - out) <= 2e-5 * v->max_abs * (double)v->W + 1e-43);
    }
}

static void check_step(const step_view *v) {
    const tagc_paper_options *p = &v->x->paper;
    int is_void = 0;
    uint64_t n_unpeeled = 0;
    for (size_t r = 0; r < v->W; r++) n_unpeeled += v->x->stats[v->step][r].n_unpeeled;
    for (size_t i = 0; i < v->W * v->n; i++) is_void |= !isfinite(v->gradients[i] + v->before[i]);
    int is_foreseen = p->index != TAGC_INDEX_SUM1 && (n_unpeeled == 0 || p->unpeeled == TAGC_UNPEELED_PACKED);
    /* fp32 cells may overflow where single values, and even sums, do not; and the oracle does not know lossy sums */
    if (!v->is_dense && !(is_foreseen && (v->is_fixed || !v->is_sketch)) && v->max_abs > 1e36)
        is_void |= v->x->stats[v->step][0].nonfinite;
    if (!is_void && (v->is_dense || is_foreseen)) is_void = sums_overflow(v);
    if (is_void) {
        expect_void_step(v);
        return;
    }
    EXPECT(v, !v->x->stats[v->step][0].nonfinite);
    if (v->is_dense || is_foreseen)
        expect_oracle(v);
    else if (v->max_abs < 1e36 && (p->index != TAGC_INDEX_SUM1 || !v->is_sketch) &&
             (n_unpeeled == 0 || p->unpeeled == TAGC_UNPEELED_RESIDUAL))
        expect_conserved(v);
}

/* Whether what any rank encodes is finite. */
static int can_encode(const direct_model *m, const step_view *v, const float *before) {
    int is_finite = 1;
    for (size_t i = 0; i < m->n_ranks * m->n; i++)
        is_finite &= isfinite(m->has_residual ? v->gradients[i] + before[i] : v->gradients[i]);
    return is_finite;
}

/* before (W, n): residuals, which become those that must be there after the step. */
static void check_direct(const step_view *v, float *before, int had_residual) {
    tagc_reducer_options options = v->x->options;
    options.sparsity = v->x->sparsity[v->step];
    direct_model m = direct_model_of(&options, (int)v->W);
    m.has_residual |= had_residual;
    float *expected = malloc(v->W * v->n * sizeof(float)), *owned = calloc(v->n, sizeof(float)),
          *output = malloc(v->n * sizeof(float));
    uint64_t n_sent[MAX_RANKS] = {0};
    int is_finite = can_encode(&m, v, before);
    memcpy(expected, before, v->W * v->n * sizeof(float));
    if (is_finite) direct_step(&m, v->step + 1, v->gradients, expected, owned, n_sent);
    for (size_t i = 0; i < v->n; i++) is_finite &= isfinite(owned[i]);
    if (is_finite) memcpy(before, expected, v->W * v->n * sizeof(float));
    for (size_t r = 0; r < v->W; r++) {
        const float *out = v->outputs + r * v->n;
        EXPECT(v, v->x->stats[v->step][r].nonfinite == !is_finite);
        direct_expected(&m, r, owned, output);
        for (size_t i = 0; i < direct_output(&m); i++)
            EXPECT(v, is_finite ? bits_of(out[i]) == bits_of(output[i]) : isnan(out[i]));
        EXPECT(v, !m.has_residual || memcmp(before + r * v->n, v->after + r * v->n,
                                            direct_residual(&m) * sizeof(float)) == 0);
    }
    free(expected);
    free(owned);
    free(output);
}

static void check_direct_unit(const trial *t, const unit *x) {
    size_t W = (size_t)t->world_size, n = (size_t)x->options.n_elems;
    float *before = malloc(W * n * sizeof(float));
    int had_residual = x->options.format > TAGC_FORMAT_BF16;
    for (size_t i = 0; i < W * n; i++) before[i] = TAGC_ZERO_RESIDUAL;
    for (size_t step = 0; step < N_STEPS; step++) {
        size_t at = step * W * n;
        step_view v = {.t = t, .x = x, .step = step, .W = W, .n = n, .shard = n / W};
        v.gradients = x->gradients + at;
        v.outputs = x->outputs + at;
        v.after = x->residuals + at;
        had_residual |= x->sparsity[step] > 0;
        check_direct(&v, before, had_residual);
    }
    free(before);
}

static void check_unit(const trial *t, const unit *x) {
    if (x->options.exchange == TAGC_EXCHANGE_DIRECT && !x->is_whole) {
        check_direct_unit(t, x);
        return;
    }
    size_t W = (size_t)t->world_size, n = (size_t)x->options.n_elems;
    float *nothing = malloc(W * n * sizeof(float));
    for (size_t i = 0; i < W * n; i++) nothing[i] = TAGC_ZERO_RESIDUAL;
    for (size_t step = 0; step < N_STEPS; step++) {
        size_t at = step * W * n;
        step_view v = {.t = t, .x = x, .step = step, .W = W, .n = n, .shard = n / W};
        v.gradients = x->gradients + at;
        v.outputs = x->outputs + at;
        v.after = x->residuals + at;
        v.is_dense = x->is_whole;
        v.before = step && !v.is_dense ? v.after - W * n : nothing;
        v.is_sketch = x->options.exchange == TAGC_EXCHANGE_SKETCH &&
                      tagc_select_count(v.shard, x->sparsity[step]) < v.shard;
        v.is_fixed = v.is_sketch && x->paper.cells == TAGC_CELLS_FIXED;
        for (size_t i = 0; i < W * n; i++)
            v.max_abs = fmax(v.max_abs, fabs((double)(v.gradients[i] + v.before[i])));
        check_step(&v);
    }
    free(nothing);
}

TEST(test_random) {
    static const int world_sizes[] = {1, 2, 2, 3, 4, N_RANKS_LARGE};
    for (uint64_t seed = 0; seed < N_TRIALS; seed++) {
        trial t = {.seed = seed, .state = seed};
        t.world_size = world_sizes[draw(&t, 6)];
        for (int u = 0; u < N_UNITS; u++) draw_unit(&t, &t.units[u]);
        run_ranks(t.world_size, body, &t);
        for (int u = 0; u < N_UNITS; u++) {
            check_unit(&t, &t.units[u]);
            free(t.units[u].gradients);
            free(t.units[u].outputs);
            free(t.units[u].residuals);
        }
    }
}
