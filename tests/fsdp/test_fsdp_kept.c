/* What is kept against a plain loop: parameters stand still (lr 0), so that gradients are known, and every step's selection
 * and residual is made again by sorting. */
#include "toy.h"

#include "fsdp/guard.h"
#include "fsdp/internal.h"

typedef struct script {
    toy_model model;
    tagc_fsdp_options options;
    int n_steps;
    uint64_t n_sent;
} script;

typedef struct shadow {
    float *residual, *out; /* (n_padded) */
} shadow;

static const float *sort_values;

static int by_magnitude(const void *a, const void *b) { /* largest first, then lowest index */
    uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;
    float x = fabsf(sort_values[i]), y = fabsf(sort_values[j]);
    return x != y ? (x < y) - (x > y) : (i > j) - (i < j);
}

/* What the gradient of a flat was: the toy's formula on parameters that do not move. */
static void gradient_of(const script *s, const tagc_fsdp *f, int index, uint64_t step, float *out) {
    const tagc_flat *flat = &f->tables.flats[index];
    memset(out, 0, flat->n_padded * sizeof *out);
    for (int i = flat->first_member; i < flat->first_member + flat->n_members; i++) {
        int t = f->tables.members[i];
        for (size_t j = 0; j < s->model.tensors[t].n_elems; j++) {
            float sum = 0;
            for (int sample = 0; sample < s->model.n_samples; sample++)
                sum += toy_initial(t, j) -
                       toy_target(t, j, step * (uint64_t)s->model.n_samples + (uint64_t)sample);
            out[f->tables.places[t].offset + j] = toy_stiffness(t) * sum / (float)s->model.n_samples;
        }
    }
}

static void shadow_step(script *s, const tagc_flat *flat, uint64_t step, float *g, shadow *x) {
    size_t n = flat->n_padded;
    int n_warmup = s->options.sparsity_warmup;
    double kept = 1 - s->options.reducer.sparsity;
    if (step < (uint64_t)n_warmup) kept = 0.25 * pow(kept / 0.25, (double)step / n_warmup);
    size_t k = (size_t)floor((double)n * kept + 1e-6);
    uint32_t *order = calloc(n, sizeof *order);
    for (size_t i = 0; i < n; i++) {
        x->residual[i] += g[i];
        x->out[i] = 0;
        order[i] = (uint32_t)i;
    }
    sort_values = x->residual;
    qsort(order, n, sizeof *order, by_magnitude);
    for (size_t i = 0; i < k; i++) {
        x->out[order[i]] = x->residual[order[i]];
        x->residual[order[i]] = 0;
        s->n_sent++;
    }
    free(order);
}

static void compare(const float *a, const float *b, size_t n) {
    for (size_t i = 0; i < n; i++) CHECK(a[i] == b[i]);
}

static void run_alone(tagc_comm *comm, void *arg) {
    script *s = arg;
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, s->model.tensors, s->model.n_tensors, &s->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    shadow shadows[64] = {0};
    for (int i = 0; i < f->tables.n_flats; i++) {
        size_t n = f->tables.flats[i].n_padded;
        shadows[i] = (shadow){calloc(n, sizeof(float)), calloc(n, sizeof(float))};
    }
    for (int step = 0; step < s->n_steps; step++) {
        toy_step(&s->model, comm, f, 1, (uint64_t)step, 0, NULL);
        for (int i = 0; i < f->tables.n_flats; i++) {
            const tagc_flat *flat = &f->tables.flats[i];
            float *g = calloc(flat->n_padded, sizeof *g);
            gradient_of(s, f, i, (uint64_t)step, g);
            shadow_step(s, flat, (uint64_t)step, g, &shadows[i]);
            compare(flat->gradient, shadows[i].out, flat->n_padded);
            compare(tagc_reducer_residual(flat->reducer, NULL), shadows[i].residual, flat->n_padded);
            free(g);
        }
    }
    double norm, sum = 0;
    CHECK_OK(tagc_fsdp_residual_norm(f, &norm));
    for (int i = 0; i < f->tables.n_flats; i++)
        for (size_t j = 0; j < f->tables.flats[i].n_padded; j++)
            sum += (double)shadows[i].residual[j] * (double)shadows[i].residual[j];
    CHECK(fabs(norm - sqrt(sum)) <= 1e-9 * norm);
    for (int i = 0; i < f->tables.n_flats; i++) {
        free(shadows[i].residual);
        free(shadows[i].out);
    }
    tagc_fsdp_destroy(f);
}

static void a_warm_up_keeps_what_it_says(void **state) {
    (void)state;
    static const int steps[] = {0, 3, 4};
    for (size_t v = 0; v < sizeof steps / sizeof *steps; v++) {
        script s = {.n_steps = 6};
        toy_gpt(&s.model, 2, 7, 0);
        tagc_fsdp_options_init(&s.options);
        s.options.policy = TAGC_POLICY_ALL;
        s.options.reducer.exchange = TAGC_EXCHANGE_PACKED;
        s.options.reducer.sparsity = 0.9375;
        s.options.sparsity_warmup = steps[v];
        toy_run(1, run_alone, &s);
        assert_true(s.n_sent > 100);
    }
}

static void run_bad(tagc_comm *comm, void *arg) {
    script *s = arg;
    tagc_fsdp *f;
    CHECK(tagc_fsdp_create(comm, s->model.tensors, s->model.n_tensors, &s->options, NULL, &f) ==
          TAGC_ERR_ARGUMENT);
    CHECK(f == NULL);
}

static void a_bad_number_is_refused(void **state) {
    (void)state;
    script s = {.n_steps = 1};
    toy_gpt(&s.model, 1, 5, 0);
    tagc_fsdp_options_init(&s.options);
    s.options.sparsity_warmup = -1;
    toy_run(2, run_bad, &s);
}

/* ---- the norm of the residuals ---- */

typedef struct norms {
    script s;
    double of_ranks[TOY_MAX_RANKS], own_squares; /* the latter of rank 0, by a plain loop */
} norms;

/* All ranks see the same samples, so that a rank's gradient is the mean gradient. */
static void accumulate(tagc_comm *comm, void *arg) {
    norms *n = arg;
    script *s = &n->s;
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, s->model.tensors, s->model.n_tensors, &s->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    for (int step = 0; step < s->n_steps; step++) {
        uint64_t first = (uint64_t)(step * s->model.n_samples);
        toy_forward(&s->model, f, 1, first, s->model.n_samples);
        toy_backward(&s->model, f, first, s->model.n_samples);
        CHECK_OK(tagc_fsdp_step(f, 0, NULL));
    }
    CHECK_OK(tagc_fsdp_residual_norm(f, &n->of_ranks[tagc_comm_rank(comm)]));
    for (int i = 0; tagc_comm_rank(comm) == 0 && i < f->tables.n_flats; i++) {
        uint64_t n_elems;
        const float *residual = tagc_reducer_residual(f->tables.flats[i].reducer, &n_elems);
        for (uint64_t k = 0; k < n_elems; k++) n->own_squares += (double)residual[k] * (double)residual[k];
    }
    tagc_fsdp_destroy(f);
}

/* What waits is then the same share of the mean gradient for any number of ranks and hosts, but for the borders of
 * shards; and without hosts, each rank has the same residual. */
static void the_residual_norm_does_not_depend_on_ranks_and_hosts(void **state) {
    (void)state;
    static const struct {
        int world_size, sharding, n_local;
    } worlds[] = {
        {4, TAGC_SHARD_FULL, 1}, {2, TAGC_SHARD_NONE, 1}, {4, TAGC_SHARD_FULL, 2}, {6, TAGC_SHARD_HYBRID, 3}};
    double own = 0;
    for (size_t v = 0; v < sizeof worlds / sizeof *worlds; v++) {
        norms n = {.s = {.n_steps = 3}};
        toy_gpt(&n.s.model, 2, 16, 0);
        tagc_fsdp_options_init(&n.s.options);
        n.s.options.policy = TAGC_POLICY_ALL;
        n.s.options.gentle = 0;
        n.s.options.sharding = worlds[v].sharding;
        n.s.options.ranks_per_host = worlds[v].n_local;
        n.s.options.two_level = worlds[v].sharding == TAGC_SHARD_FULL && worlds[v].n_local > 1;
        n.s.options.reducer.exchange = TAGC_EXCHANGE_DIRECT;
        n.s.options.reducer.format = TAGC_FORMAT_FP32;
        n.s.options.reducer.sparsity = 0.9;
        toy_run(worlds[v].world_size, accumulate, &n);
        if (v == 0) own = sqrt(n.own_squares);
        assert_true(own > 0 && fabs(n.of_ranks[0] / own - 1) < (v == 0 ? 1e-6 : 0.02));
        for (int rank = 1; rank < worlds[v].world_size; rank++)
            assert_true(n.of_ranks[rank] == n.of_ranks[0]);
    }
}

/* ---- the guard ---- */

static void a_factor_changes_what_is_kept(tagc_comm *comm, void *arg) {
    script *s = arg;
    tagc_fsdp *f;
    tagc_fsdp_stats stats;
    CHECK_OK(tagc_fsdp_create(comm, s->model.tensors, s->model.n_tensors, &s->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    static const double factors[] = {1, 2, 4, 64, 1}, kept[] = {0.0625, 0.125, 0.25, 1, 0.0625};
    for (int i = 0; i < 5; i++) {
        tagc_fsdp_set_kept_factor(f, factors[i]);
        toy_step(&s->model, comm, f, 1, (uint64_t)i, 0.001, &stats);
        double share = (double)stats.n_kept / (double)stats.n_compressed;
        CHECK(fabs(share - kept[i]) < 0.03 * kept[i] + 0.02);
    }
    tagc_fsdp_destroy(f);
}

static void the_engine_follows_the_guard(void **state) {
    (void)state;
    script s = {.n_steps = 0};
    toy_gpt(&s.model, 2, 24, 0);
    tagc_fsdp_options_init(&s.options);
    s.options.reducer.exchange = TAGC_EXCHANGE_PACKED;
    s.options.reducer.sparsity = 0.9375;
    toy_run(2, a_factor_changes_what_is_kept, &s);
}

static void the_guard_backs_off_and_returns(void **state) {
    (void)state;
    tagc_guard g;
    int n[4] = {0};
    tagc_guard_init(&g, 10, 1.0 / 64);
    assert_true(g.max_factor == 64);
    /* A healthy run, with noise: nothing. */
    for (int i = 0; i < 300; i++)
        n[tagc_guard_update(&g, 3 - 0.002 * i + 0.05 * (double)toy_number((uint64_t)i), 1, 8)]++;
    assert_int_equal(n[TAGC_GUARD_SAME], 300);
    /* The residual grows: doubled again and again up to all, and no further. */
    memset(n, 0, sizeof n);
    for (int i = 0; i < 100; i++) n[tagc_guard_update(&g, 2.4, 1, 20)]++;
    assert_int_equal(n[TAGC_GUARD_RESIDUAL], 6);
    assert_int_equal(n[TAGC_GUARD_SAME], 94);
    assert_true(g.factor == 64);
    /* Calm: back, slowly. */
    memset(n, 0, sizeof n);
    for (int i = 0; i < 1000; i++) n[tagc_guard_update(&g, 2.4, 1, 1)]++;
    assert_int_equal(n[TAGC_GUARD_CALM], 6);
    assert_true(g.factor == 1);
    /* A jump of the loss, also to no number at all. */
    memset(n, 0, sizeof n);
    n[tagc_guard_update(&g, 3.4, 1, 1)]++;
    assert_int_equal(n[TAGC_GUARD_LOSS], 1);
    for (int i = 0; i < 10; i++) n[tagc_guard_update(&g, NAN, 1, 1)]++;
    assert_int_equal(n[TAGC_GUARD_LOSS], 3);
    assert_true(isfinite(g.loss) && isfinite(g.spread));
    /* A skipped step says nothing. */
    tagc_guard before = g;
    assert_int_equal(tagc_guard_update(&g, 2.4, INFINITY, 1), TAGC_GUARD_SAME);
    assert_memory_equal(&before, &g, sizeof g);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_warm_up_keeps_what_it_says),
        cmocka_unit_test(a_bad_number_is_refused),
        cmocka_unit_test(the_residual_norm_does_not_depend_on_ranks_and_hosts),
        cmocka_unit_test(the_engine_follows_the_guard),
        cmocka_unit_test(the_guard_backs_off_and_returns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
