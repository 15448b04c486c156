/* What is selected against a plain loop: parameters stand still (lr 0), so that gradients are known, and every step's selection
 * and residual is made again by sorting. */
#include "unsent.h"

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

static void shadow_step(script *s, const tagc_flat *flat, const float *g, shadow *x) {
    size_t n = flat->n_padded;
    size_t k = (size_t)floor((double)n * (1 - s->options.reducer.sparsity) + 1e-6);
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
            shadow_step(s, flat, g, &shadows[i]);
            compare(flat->gradient, shadows[i].out, flat->n_padded);
            CHECK(residual_to(reducer_of(f, i), g) == flat->n_padded);
            compare(g, shadows[i].residual, flat->n_padded);
            free(g);
        }
    }
    for (int i = 0; i < f->tables.n_flats; i++) {
        free(shadows[i].residual);
        free(shadows[i].out);
    }
    tagc_fsdp_destroy(f);
}

static void the_largest_are_sent_and_the_rest_stays(void **state) {
    (void)state;
    script s = {.n_steps = 6};
    toy_gpt(&s.model, 2, 7, 0);
    tagc_fsdp_options_init(&s.options);
    s.options.policy = TAGC_POLICY_ALL;
    s.options.reducer.exchange = TAGC_EXCHANGE_PACKED;
    s.options.reducer.sparsity = 0.9375;
    toy_run(1, run_alone, &s);
    assert_true(s.n_sent > 100);
}

/* ---- how large a residual is ---- */

typedef struct growths {
    script s;
    /* Of each parameter of the schedule: its residual's norm in gradients' norms. */
    double of_ranks[TOY_MAX_RANKS][64];
    size_t n;
} growths;

/* All ranks see the same samples, so that a rank's gradient is the mean gradient. The first window ends with the last step. */
static void fill_a_window(tagc_comm *comm, void *arg) {
    growths *g = arg;
    script *s = &g->s;
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, s->model.tensors, s->model.n_tensors, &s->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    for (int step = 0; step < 20; step++) {
        uint64_t first = (uint64_t)(step * s->model.n_samples);
        toy_forward(&s->model, f, 1, first, s->model.n_samples);
        toy_backward(&s->model, f, first, s->model.n_samples);
        CHECK_OK(tagc_fsdp_step(f, 0, NULL));
    }
    const tagc_schedule_sums *sums = (const tagc_schedule_sums *)(const void *)(f->model->own + 3);
    for (size_t i = 0; i < f->model->n_tensors; i++)
        g->of_ranks[tagc_comm_rank(comm)][f->model->full[i]] = sqrt(sums[i].residual / sums[i].gradient);
    if (tagc_comm_rank(comm) == 0) g->n = f->model->n_tensors;
    tagc_fsdp_destroy(f);
}

/* What 4 bits leave behind is then the same share of the gradient for any number of ranks and hosts, but for the borders of
 * shards. Owners that send sums round no second time where the mean is over a power of two. */
static void growth_does_not_depend_on_ranks_and_hosts(void **state) {
    (void)state;
    static const struct {
        int world_size, sharding, n_local;
    } worlds[] = {
        {4, TAGC_SHARD_FULL, 1}, {2, TAGC_SHARD_NONE, 1}, {4, TAGC_SHARD_FULL, 2}, {8, TAGC_SHARD_HYBRID, 4}};
    growths first = {0};
    for (size_t v = 0; v < sizeof worlds / sizeof *worlds; v++) {
        growths g = {0};
        toy_gpt(&g.s.model, 2, 16, 0);
        tagc_fsdp_options_init(&g.s.options);
        g.s.options.policy = TAGC_POLICY_ALL;
        g.s.options.gentle = 1;
        g.s.options.sharding = worlds[v].sharding;
        g.s.options.ranks_per_host = worlds[v].n_local;
        g.s.options.two_level = worlds[v].sharding == TAGC_SHARD_FULL && worlds[v].n_local > 1;
        g.s.options.reducer.exchange = TAGC_EXCHANGE_DIRECT;
        toy_run(worlds[v].world_size, fill_a_window, &g);
        if (v == 0) first = g;
        assert_true(g.n > 8);
        for (size_t i = 0; i < g.n; i++) {
            double growth = g.of_ranks[0][i], expected = first.of_ranks[0][i];
            assert_true(growth > 0.02 && growth < 0.3 && fabs(growth / expected - 1) < 0.1);
            for (int rank = 1; rank < worlds[v].world_size; rank++)
                assert_true(g.of_ranks[rank][i] == growth);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_largest_are_sent_and_the_rest_stays),
        cmocka_unit_test(growth_does_not_depend_on_ranks_and_hosts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
