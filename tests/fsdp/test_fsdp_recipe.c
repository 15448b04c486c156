/* Recipes against a plain loop: parameters stand still (lr 0), so that gradients are known, and every step's selection,
 * residual and momentum is made again by sorting. */
#include "toy.h"

#include "fsdp/guard.h"
#include "fsdp/internal.h"

typedef struct script {
    toy_model model;
    tagc_fsdp_options options;
    int n_steps;
    uint64_t n_cleared; /* momenta that were cleared */
} script;

typedef struct shadow {
    float *u, *residual, *out; /* (n_padded) */
} shadow;

static const float *sort_values;

static int by_magnitude(const void *a, const void *b) { /* largest first, then lowest index */
    uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;
    float x = fabsf(sort_values[i]), y = fabsf(sort_values[j]);
    return x != y ? (x < y) - (x > y) : (i > j) - (i < j);
}

static float bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t low = bits & 0xffff;
    bits -= low;
    if (low > 0x8000 || (low == 0x8000 && (bits & 0x10000))) bits += 0x10000;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* What the gradient of a flat was: the toy's formula on parameters that do not move. */
static void gradient_of(const script *s, const tagc_fsdp *f, int index, uint64_t step, float *out) {
    const tagc_flat *flat = &f->flats[index];
    memset(out, 0, flat->n_padded * sizeof *out);
    for (int i = flat->first_member; i < flat->first_member + flat->n_members; i++) {
        int t = f->members[i];
        for (size_t j = 0; j < s->model.tensors[t].n_elems; j++) {
            float sum = 0;
            for (int sample = 0; sample < s->model.n_samples; sample++)
                sum += toy_initial(t, j) -
                       toy_target(t, j, step * (uint64_t)s->model.n_samples + (uint64_t)sample);
            out[f->places[t].offset + j] = toy_stiffness(t) * sum / (float)s->model.n_samples;
        }
    }
}

static void shadow_step(script *s, const tagc_flat *flat, uint64_t step, float *g, shadow *x) {
    const tagc_recipes *r = &s->options.recipes;
    size_t n = flat->n_padded;
    double kept = 1 - s->options.reducer.sparsity;
    if (step < (uint64_t)r->sparsity_warmup)
        kept = 0.25 * pow(kept / 0.25, (double)step / r->sparsity_warmup);
    size_t k = (size_t)floor((double)n * kept + 1e-6);
    float m = (float)r->local_momentum, *acc = calloc(n, sizeof *acc);
    uint32_t *order = calloc(n, sizeof *order);
    for (size_t i = 0; i < n; i++) {
        x->residual[i] = (float)(x->residual[i] * r->residual_decay);
        x->u[i] = m * x->u[i] + (1 - m) * g[i];
        acc[i] = x->u[i] + x->residual[i];
        order[i] = (uint32_t)i;
        x->out[i] = 0;
        x->residual[i] = acc[i];
    }
    sort_values = acc;
    qsort(order, n, sizeof *order, by_magnitude);
    for (size_t i = 0; i < k; i++) {
        x->out[order[i]] = acc[order[i]];
        x->residual[order[i]] = 0;
        if (acc[order[i]] != 0) x->u[order[i]] = 0;
        s->n_cleared++;
    }
    for (size_t i = 0; i < n && r->residual_bf16; i++) x->residual[i] = bf16(x->residual[i]);
    free(order);
    free(acc);
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
    for (int i = 0; i < f->n_flats; i++) {
        size_t n = f->flats[i].n_padded;
        shadows[i] = (shadow){calloc(n, sizeof(float)), calloc(n, sizeof(float)), calloc(n, sizeof(float))};
    }
    for (int step = 0; step < s->n_steps; step++) {
        toy_step(&s->model, comm, f, 1, (uint64_t)step, 0, NULL);
        for (int i = 0; i < f->n_flats; i++) {
            const tagc_flat *flat = &f->flats[i];
            float *g = calloc(flat->n_padded, sizeof *g);
            gradient_of(s, f, i, (uint64_t)step, g);
            shadow_step(s, flat, (uint64_t)step, g, &shadows[i]);
            compare(flat->gradient, shadows[i].out, flat->n_padded);
            compare(tagc_reducer_residual(flat->reducer, NULL), shadows[i].residual, flat->n_padded);
            if (flat->recipe.momentum != NULL) compare(flat->recipe.momentum, shadows[i].u, flat->n_padded);
            free(g);
        }
    }
    double norm, sum = 0;
    CHECK_OK(tagc_fsdp_residual_norm(f, &norm));
    for (int i = 0; i < f->n_flats; i++)
        for (size_t j = 0; j < f->flats[i].n_padded; j++)
            sum += (double)shadows[i].residual[j] * (double)shadows[i].residual[j];
    CHECK(fabs(norm - sqrt(sum)) <= 1e-9 * norm);
    for (int i = 0; i < f->n_flats; i++) {
        free(shadows[i].u);
        free(shadows[i].residual);
        free(shadows[i].out);
    }
    tagc_fsdp_destroy(f);
}

static void recipes_do_what_they_say(void **state) {
    (void)state;
    static const tagc_recipes variants[] = {
        {.residual_decay = 1},
        {.residual_decay = 0.9},
        {.residual_decay = 1, .sparsity_warmup = 4},
        {.residual_decay = 1, .local_momentum = 0.9},
        {.residual_decay = 1, .residual_bf16 = 1},
        {.residual_decay = 0.99, .local_momentum = 0.5, .residual_bf16 = 1, .sparsity_warmup = 3}};
    for (size_t v = 0; v < sizeof variants / sizeof *variants; v++) {
        script s = {.n_steps = 6};
        toy_gpt(&s.model, 2, 7, 0);
        tagc_fsdp_options_init(&s.options);
        s.options.policy = TAGC_POLICY_ALL;
        s.options.reducer.sparsity = 0.9375;
        s.options.recipes = variants[v];
        toy_run(1, run_alone, &s);
        assert_true(s.n_cleared > 100);
    }
}

/* ---- low rank ---- */

enum { MAX_LOW = 4096 };

typedef struct low_script {
    script s;
    double conserved[MAX_LOW]; /* sum over ranks of what is to be sent, then less what was: 0 in the end */
    double before[MAX_LOW], left[MAX_LOW];
    pthread_mutex_t lock;
} low_script;

/* Over all ranks: gradients and residuals before are what owners got and residuals after. */
static void run_low_rank(tagc_comm *comm, void *arg) {
    low_script *low = arg;
    script *s = &low->s;
    tagc_fsdp *f;
    int world_size = tagc_comm_world_size(comm), n_here = s->model.n_samples / world_size;
    CHECK_OK(tagc_fsdp_create(comm, s->model.tensors, s->model.n_tensors, &s->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    for (int step = 0; step < s->n_steps; step++) {
        /* lr 0: the gradient of the first step of every rank, each step */
        toy_step(&s->model, comm, f, 1, 0, 0, NULL);
        CHECK_OK(tagc_comm_barrier(comm));
    }
    const tagc_flat *flat = &f->flats[0];
    CHECK(flat->n_padded <= MAX_LOW);
    const float *residual = tagc_reducer_residual(flat->reducer, NULL);
    pthread_mutex_lock(&low->lock);
    for (uint64_t j = 0; j < flat->n_padded; j++) low->left[j] += (double)residual[j];
    for (uint64_t j = 0; j < flat->n_owned; j++)
        low->conserved[flat->first_owned + j] -= (double)flat->gradient[j] * world_size;
    for (int i = flat->first_member; i < flat->first_member + flat->n_members; i++) {
        int t = f->members[i];
        for (size_t j = 0; j < s->model.tensors[t].n_elems; j++) {
            double sum = 0;
            for (int sample = 0; sample < n_here; sample++)
                sum += (double)toy_initial(t, j) -
                       (double)toy_target(t, j, (uint64_t)(tagc_comm_rank(comm) * n_here + sample));
            low->before[f->places[t].offset + j] += (double)toy_stiffness(t) * sum / n_here;
        }
    }
    pthread_mutex_unlock(&low->lock);
    tagc_fsdp_destroy(f);
}

static void run_low(low_script *low, int world_size, int rank, double sparsity) {
    memset(low, 0, sizeof *low);
    pthread_mutex_init(&low->lock, NULL);
    toy_gpt(&low->s.model, 1, 16, 0);
    low->s.n_steps = 1;
    tagc_fsdp_options_init(&low->s.options);
    low->s.options.policy = TAGC_POLICY_ALL;
    low->s.options.reducer.sparsity = sparsity;
    low->s.options.recipes.low_rank = rank;
    toy_run(world_size, run_low_rank, low);
}

static double length(const double *x) {
    double sum = 0;
    for (int i = 0; i < MAX_LOW; i++) sum += x[i] * x[i];
    return sqrt(sum);
}

static void low_rank_loses_nothing(void **state) {
    (void)state;
    low_script *low = calloc(1, sizeof *low);
    double left[3];
    for (int v = 0; v < 3; v++) {
        static const int ranks[] = {0, 2, 32};
        for (int world_size = 2; world_size <= 4; world_size += 2) {
            run_low(low, world_size, ranks[v], 0.9375);
            double wrong = 0;
            for (int i = 0; i < MAX_LOW; i++)
                wrong = fmax(wrong, fabs(low->before[i] + low->conserved[i] - low->left[i]));
            assert_true(wrong < 1e-5 && length(low->before) > 1);
        }
        left[v] = length(low->left) / length(low->before);
    }
    assert_true(left[0] > 0.1 && left[1] < 0.95 * left[0]);
    assert_true(left[2] < 1e-4); /* as many directions as there are: all is sent */
    free(low);
}

static void run_bad(tagc_comm *comm, void *arg) {
    script *s = arg;
    tagc_fsdp *f;
    CHECK(tagc_fsdp_create(comm, s->model.tensors, s->model.n_tensors, &s->options, NULL, &f) ==
          TAGC_ERR_ARGUMENT);
    CHECK(f == NULL);
}

static void bad_numbers_are_refused(void **state) {
    (void)state;
    static const tagc_recipes bad[] = {{.residual_decay = 1.1},
                                       {.residual_decay = NAN},
                                       {.residual_decay = 1, .sparsity_warmup = -1},
                                       {.residual_decay = 1, .local_momentum = 1},
                                       {.residual_decay = 1, .low_rank = 65},
                                       {.residual_decay = 1, .residual_bf16 = 2}};
    for (size_t v = 0; v < sizeof bad / sizeof *bad; v++) {
        script s = {.n_steps = 1};
        toy_gpt(&s.model, 1, 5, 0);
        tagc_fsdp_options_init(&s.options);
        s.options.recipes = bad[v];
        toy_run(2, run_bad, &s);
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
        cmocka_unit_test(recipes_do_what_they_say),        cmocka_unit_test(low_rank_loses_nothing),
        cmocka_unit_test(bad_numbers_are_refused),         cmocka_unit_test(the_engine_follows_the_guard),
        cmocka_unit_test(the_guard_backs_off_and_returns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
