/* Local steps against plain engines, one for each site, whose parameters the test itself exchanges in plain loops. */
#include "sites.h"

#include "transport/group.h"
#include <stdatomic.h>

/* ---- the oracle: plain engines of one rank each, and plain loops ---- */

enum { MOST_FRAGMENTS = 16 };

typedef struct oracle {
    int n_sites, every, n_fragments, delay;
    double lr, momentum;
    float *anchor, *velocity;                   /* (n_params) */
    float *now[MOST_SITES], *taken[MOST_SITES]; /* (n_params) parameters; pseudo-gradients */
    int begun[MOST_FRAGMENTS];                  /* steps done when its round began; -1: none is under way */
    int moved[MOST_FRAGMENTS];                  /* steps since its last round began */
    double losses[STEPS][MOST_SITES];
} oracle;

/* Of the fragment that element i belongs to: its tensor's middle lies in this n_fragments-th of the model. */
static int fragment_of(const oracle *o, size_t i) {
    int tensor = 0;
    while (place_of(tensor + 1) <= i) tensor++;
    double middle = (double)place_of(tensor) + (double)model.tensors[tensor].n_elems / 2;
    if (o->n_fragments == model.n_tensors) return tensor; /* none may be empty */
    return (int)ceil(middle * o->n_fragments / (double)toy_n_params(&model)) - 1;
}

static void take(oracle *o, int fragment, int step) {
    for (size_t i = 0; i < toy_n_params(&model); i++)
        for (int s = 0; s < o->n_sites && fragment_of(o, i) == fragment; s++)
            o->taken[s][i] = o->anchor[i] - o->now[s][i];
    o->begun[fragment] = step;
    o->moved[fragment] = 0;
}

static void apply(oracle *o, int fragment) {
    for (size_t i = 0; i < toy_n_params(&model); i++) {
        if (fragment_of(o, i) != fragment) continue;
        float mean = 0, old = o->anchor[i];
        for (int s = 0; s < o->n_sites; s++) mean += o->taken[s][i];
        mean /= (float)o->n_sites; /* exact, but for three sites */
        float step = mean;
        if (o->momentum > 0) {
            o->velocity[i] = (float)o->momentum * o->velocity[i] + mean;
            step = mean + (float)o->momentum * o->velocity[i];
        }
        o->anchor[i] = old - (float)o->lr * step;
        for (int s = 0; s < o->n_sites; s++) {
            if (o->moved[fragment] == 0) o->now[s][i] = o->anchor[i];
            if (o->moved[fragment] > 0) o->now[s][i] += (o->anchor[i] - old) + o->taken[s][i];
        }
    }
    o->begun[fragment] = -1;
}

static void end_rounds(oracle *o, int step, int delay) {
    for (int k = 0; k < o->n_fragments; k++)
        if (o->begun[k] >= 0 && o->begun[k] + delay <= step) apply(o, k);
}

static void between_steps(oracle *o, int step) {
    for (int k = 0; k < o->n_fragments; k++) o->moved[k]++;
    end_rounds(o, step, o->delay);
    for (int k = 0; k < o->n_fragments; k++)
        if (step % o->every == (k + 1) * o->every / o->n_fragments % o->every) take(o, k, step);
    end_rounds(o, step, o->delay);
    for (int k = 0; k < o->n_fragments && step == STEPS; k++) { /* a run ends as one model */
        if (k == 0) end_rounds(o, step, 0);
        if (o->moved[k] == 0) continue;
        take(o, k, step);
        apply(o, k);
    }
}

static tagc_status fill_from(void *context, int tensor, size_t first, size_t n, float *values) {
    memcpy(values, (const float *)context + place_of(tensor) + first, n * sizeof *values);
    return TAGC_OK;
}

static void run_oracle(tagc_comm *comm, void *arg) {
    oracle *o = arg;
    tagc_fsdp *sites[MOST_SITES];
    tagc_fsdp_options options;
    options_of(&options, TAGC_SHARD_NONE, 1, 1);
    options.local_steps = 0;
    options.policy = TAGC_POLICY_NONE;
    for (int s = 0; s < o->n_sites; s++) {
        CHECK_OK(tagc_fsdp_create(comm, model.tensors, model.n_tensors, &options, NULL, &sites[s]));
        CHECK_OK(tagc_fsdp_fill(sites[s], toy_fill, NULL));
    }
    toy_read(&model, sites[0], o->anchor);
    for (int k = 0; k < o->n_fragments; k++) o->begun[k] = -1;
    for (int step = 0; step < STEPS; step++) {
        for (int s = 0; s < o->n_sites; s++) {
            o->losses[step][s] = step_of(sites[s], step, s, o->n_sites, NULL);
            toy_read(&model, sites[s], o->now[s]);
        }
        between_steps(o, step + 1);
        for (int s = 0; s < o->n_sites; s++) CHECK_OK(tagc_fsdp_fill(sites[s], fill_from, o->now[s]));
    }
    for (int s = 0; s < o->n_sites; s++) tagc_fsdp_destroy(sites[s]);
}

/* ---- local steps ---- */

static double largest_difference(const float *a, const float *b) {
    double most = 0;
    for (size_t i = 0; i < toy_n_params(&model); i++) most = fmax(most, fabs((double)(a[i] - b[i])));
    return most;
}

static void compare_with(const oracle *o, int n_ranks) {
    run r;
    open_run(&r, n_ranks == 1 ? TAGC_SHARD_NONE : TAGC_SHARD_HYBRID, n_ranks, 1);
    r.options.local_steps = o->every;
    r.options.local_fragments = o->n_fragments;
    r.options.local_delay = o->delay;
    r.options.outer_lr = o->lr;
    r.options.outer_momentum = o->momentum;
    toy_run(o->n_sites * n_ranks, train, &r);
    check_alike(&r, o->n_sites * n_ranks);
    if (n_ranks > 1) { /* another order of sums */
        assert_true(largest_difference(r.results[0], o->anchor) < 2e-5);
    } else if (o->n_sites == 3) {
        assert_true(largest_difference(r.results[0], o->anchor) < 2e-6);
    } else {
        assert_memory_equal(r.results[0], o->anchor, toy_n_params(&model) * sizeof(float));
        for (int step = 0; step < STEPS; step++)
            for (int s = 0; s < o->n_sites; s++) assert_true(r.losses[step][s] == o->losses[step][s]);
    }
    close_run(&r);
}

static void sites_do_what_plain_engines_and_loops_do(void **state) {
    (void)state;
    static const struct {
        int n_sites, n_ranks, every, n_fragments, delay; /* n_ranks: of a site */
        double lr, momentum;
    } cases[] = {{2, 2, EVERY, 1, 0, 1, 0}, {4, 1, EVERY, 1, 0, 0.7, 0.9}, {4, 1, 4, 2, 0, 0.7, 0.9},
                 {2, 1, 4, 1, 1, 0.7, 0},   {1, 1, 5, 3, 4, 0.5, 0.8},     {2, 2, 5, 3, 4, 0.5, 0.8},
                 {3, 1, 5, 2, 1, 0.7, 0.9}, {4, 1, 5, 3, 4, 0.5, 0.8},     {2, 1, 13, 13, 2, 1, 0}};
    size_t n = toy_n_params(&model);
    assert_int_equal(model.n_tensors, 13);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        oracle o = {.n_sites = cases[i].n_sites,
                    .every = cases[i].every,
                    .n_fragments = cases[i].n_fragments,
                    .delay = cases[i].delay,
                    .lr = cases[i].lr,
                    .momentum = cases[i].momentum};
        o.anchor = calloc((size_t)(2 + 2 * MOST_SITES) * n, sizeof *o.anchor);
        o.velocity = o.anchor + n;
        for (int s = 0; s < MOST_SITES; s++) {
            o.now[s] = o.anchor + (size_t)(2 + s) * n;
            o.taken[s] = o.anchor + (size_t)(2 + MOST_SITES + s) * n;
        }
        toy_run(1, run_oracle, &o);
        compare_with(&o, 1);
        if (cases[i].n_ranks > 1) compare_with(&o, cases[i].n_ranks);
        free(o.anchor);
    }
}

/* With no other site, a round puts the parameters back that it took, but for rounding: anchor - (anchor - now). */
static void one_site_trains_as_without_rounds(void **state) {
    (void)state;
    run local, plain;
    open_run(&local, TAGC_SHARD_NONE, 1, 1);
    open_run(&plain, TAGC_SHARD_NONE, 1, 1);
    plain.options.local_steps = 1000;
    toy_run(1, train, &local);
    toy_run(1, train, &plain);
    assert_true(largest_difference(local.results[0], plain.results[0]) < 1e-6);
    close_run(&local);
    close_run(&plain);
}

/* Between rounds nothing leaves a site, and a round's bits are counted by class. */
static void bytes_are_those_of_rounds(void **state) {
    (void)state;
    run r;
    open_run(&r, TAGC_SHARD_NONE, 1, 0);
    toy_run(3, train, &r);
    check_alike(&r, 3);
    for (int step = 0; step < STEPS; step++) {
        const tagc_fsdp_stats *s = &r.stats[step][1];
        uint64_t n_bytes = 0;
        for (int leg = 0; leg < TAGC_N_LEGS; leg++) n_bytes += s->n_bytes_sent[leg];
        /* the first step compares what the sites begin with */
        if (step != 0 && !s->is_round) assert_int_equal(n_bytes, 0);
        if (step == 0) assert_true(n_bytes < 4096 && n_bytes == s->n_bytes_sent[TAGC_LEG_CONTROL]);
        if (s->is_round) assert_true(s->n_class_bytes_sent[TAGC_CLASS_COMPRESSED] > 0);
        if (s->is_round) assert_true(n_bytes > s->n_class_bytes_sent[TAGC_CLASS_COMPRESSED]);
        if (s->is_round) assert_true(s->n_kept > 0 && s->n_kept < s->n_compressed / 4);
        if (!s->is_round) assert_int_equal(s->n_kept, 0);
    }
    close_run(&r);
}

/* ---- conservation ---- */

typedef struct ledger {
    tagc_fsdp_options options;
    double *deltas, *residuals; /* (n_params), sums over sites */
    double *first, *last;       /* anchors, (n_params) */
    pthread_mutex_t lock;
} ledger;

static void add_anchor(const tagc_fsdp *f, double *sums) {
    for (int i = 0; i < f->local->n_parts; i++)
        add_values(f, &f->local->parts[i], f->local->anchor + f->local->parts[i].at,
                   f->local->parts[i].n_elems, sums);
}

/* Pseudo-gradients that have just been taken. Without a delay they have been exchanged already. */
static void add_taken(ledger *l, const tagc_fsdp *f, const uint64_t *n_steps) {
    for (int k = 0; k < f->local->n_fragments; k++) {
        const tagc_local_fragment *g = &f->local->fragments[k];
        if (g->n_steps >= n_steps[k] + 1) continue;
        for (int i = g->first_part; i < g->first_part + g->n_parts; i++)
            add_values(f, &f->local->parts[i], f->local->delta + f->local->parts[i].at,
                       f->local->parts[i].n_elems, l->deltas);
    }
}

static void keep_ledger(tagc_comm *comm, void *arg) {
    ledger *l = arg;
    int rank = tagc_comm_rank(comm), world_size = tagc_comm_world_size(comm);
    uint64_t n_steps[MOST_FRAGMENTS] = {0};
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, model.tensors, model.n_tensors, &l->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    for (int t = 0; rank == 0 && t < model.n_tensors; t++)
        for (size_t i = 0; i < model.tensors[t].n_elems; i++)
            l->first[place_of(t) + i] = (double)toy_initial(t, i);
    for (int step = 0; step < STEPS; step++) {
        for (int k = 0; k < f->local->n_fragments; k++) n_steps[k] = f->local->fragments[k].n_steps;
        step_of(f, step, rank, world_size, NULL);
        pthread_mutex_lock(&l->lock);
        add_taken(l, f, n_steps);
        pthread_mutex_unlock(&l->lock);
    }
    for (int k = 0; k < f->local->n_fragments; k++) CHECK(f->local->fragments[k].n_away == 0);
    pthread_mutex_lock(&l->lock);
    add_residuals(f, l->residuals);
    if (rank == 0) add_anchor(f, l->last);
    pthread_mutex_unlock(&l->lock);
    tagc_fsdp_destroy(f);
}

/* Pseudo-gradients = what sites sent, by which the anchor moved, + residuals; not where residuals decay. Element by element, so
 * also fragment by fragment. */
static void nothing_of_a_pseudo_gradient_is_lost(void **state) {
    (void)state;
    static const struct {
        int world_size, every, n_fragments, delay;
        double decay;
    } cases[] = {{2, 2, 1, 0, 1}, {3, 2, 1, 0, 1}, {2, 2, 1, 0, 0.95},
                 {3, 5, 2, 1, 1}, {2, 4, 3, 0, 1}, {4, 5, 2, 1, 0.95}};
    size_t n = toy_n_params(&model);
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        ledger l = {.deltas = calloc(4 * n, sizeof(double))};
        l.residuals = l.deltas + n;
        l.first = l.deltas + 2 * n;
        l.last = l.deltas + 3 * n;
        options_of(&l.options, TAGC_SHARD_NONE, 1, 0);
        l.options.local_steps = cases[k].every;
        l.options.local_fragments = cases[k].n_fragments;
        l.options.local_delay = cases[k].delay;
        l.options.local_decay = cases[k].decay;
        pthread_mutex_init(&l.lock, NULL);
        toy_run(cases[k].world_size, keep_ledger, &l);
        double worst = 0, most = 0, held = 0;
        for (size_t i = 0; i < n; i++) {
            double sent = cases[k].world_size * (l.first[i] - l.last[i]);
            worst = fmax(worst, fabs(l.deltas[i] - sent - l.residuals[i]));
            most = fmax(most, fabs(l.deltas[i]));
            held = fmax(held, fabs(l.residuals[i]));
        }
        assert_true(held > 0.1 * most);
        assert_true(cases[k].decay < 1 ? worst > 1e-3 * most : worst < 2e-6);
        pthread_mutex_destroy(&l.lock);
        free(l.deltas);
    }
}

/* ---- a round is under way while sites train ---- */

static atomic_int n_ahead; /* steps that rank 0 has done */

/* Rank 1 takes no part in the first round before rank 0 has done two steps more. A step that waited for the round would wait
 * for ever. */
static void train_ahead(tagc_comm *comm, void *arg) {
    const tagc_fsdp_options *options = arg;
    int rank = tagc_comm_rank(comm);
    tagc_fsdp *f;
    tagc_fsdp_stats stats;
    CHECK_OK(tagc_fsdp_create(comm, model.tensors, model.n_tensors, options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    for (int step = 0; step < EVERY + 3; step++) {
        for (int i = 0; rank == 1 && step == EVERY - 1 && atomic_load(&n_ahead) < EVERY + 2; i++) {
            CHECK(i < 50000); /* rank 0 does not go on */
            usleep(1000);
        }
        if (step == EVERY + 2) CHECK(tagc_fsdp_round_is_due(f));
        step_of(f, step, rank, 2, &stats);
        if (rank == 0) atomic_store(&n_ahead, step + 1);
        CHECK(stats.n_rounds == (uint64_t)(step == EVERY + 2) && stats.is_round == (step == EVERY + 2));
    }
    tagc_fsdp_destroy(f);
}

static void sites_train_while_a_round_is_under_way(void **state) {
    (void)state;
    tagc_fsdp_options options;
    options_of(&options, TAGC_SHARD_NONE, 1, 0);
    options.local_steps = 2 * EVERY;
    options.local_fragments = 2;
    options.local_delay = 3;
    toy_run(2, train_ahead, &options);
}

static void expect_refusal(const tagc_fsdp_options *options, const char *text) {
    tagc_layout *layout;
    assert_true(tagc_layout_create(model.tensors, model.n_tensors, options, 2, &layout) != TAGC_OK);
    assert_non_null(strstr(tagc_last_error(), text));
}

static void options_are_checked(void **state) {
    (void)state;
    tagc_fsdp_options good, o;
    options_of(&good, TAGC_SHARD_NONE, 1, 0);
    o = good;
    o.sharding = TAGC_SHARD_GRAD;
    expect_refusal(&o, "sharding is 1 with local_steps 3");
    o = good;
    o.reducer.exchange = TAGC_EXCHANGE_PACKED;
    expect_refusal(&o, "exchange is 2 with local_steps 3");
    o = good;
    o.local_steps = -1;
    expect_refusal(&o, "local_steps is -1");
    o = good;
    o.local_fragments = EVERY + 1;
    expect_refusal(&o, "local_fragments is 4, allowed is 1 to 3");
    o.local_fragments = 0;
    expect_refusal(&o, "local_fragments is 0");
    o.local_steps = 30;
    o.local_fragments = 14;
    expect_refusal(&o, "local_fragments is 14, allowed is 1 to 13, the tensors of this model");
    o = good;
    o.local_delay = EVERY;
    expect_refusal(&o, "local_delay is 3, allowed is 0 to 2");
    o.local_delay = -1;
    expect_refusal(&o, "local_delay is -1");
    o = good;
    o.outer_momentum = 1;
    expect_refusal(&o, "outer_momentum is 1, allowed is [0, 1)");
    o = good;
    o.outer_lr = 0;
    expect_refusal(&o, "outer_lr is 0, allowed is (0, 10]");
    o = good;
    o.local_decay = 1.1;
    expect_refusal(&o, "local_decay is 1.1, allowed is [0, 1]");
}

/* A group's transfers are the parent's: any ranks at any distance, counted once. */
static void gather_in_groups(tagc_comm *comm, void *arg) {
    (void)arg;
    int rank = tagc_comm_rank(comm);
    tagc_comm *near, *far, *none;
    CHECK_OK(tagc_comm_create_group(comm, TAGC_GROUP_NEAR, rank / 2 * 2, 1, 2, &near));
    CHECK_OK(tagc_comm_create_group(comm, TAGC_GROUP_FAR, rank % 2, 2, 3, &far));
    CHECK(tagc_comm_create_group(comm, TAGC_GROUP_FAR, (rank + 1) % 6, 1, 1, &none) == TAGC_ERR_ARGUMENT &&
          none == NULL);
    CHECK(tagc_comm_create_group(comm, TAGC_GROUP_FAR, rank % 2, 2, 4, &none) == TAGC_ERR_ARGUMENT &&
          none == NULL);
    int pair[2], three[3];
    for (int round = 0; round < 20; round++) {
        int mine = 100 * round + rank;
        CHECK_OK(tagc_comm_all_gather(near, &mine, sizeof mine, pair));
        CHECK_OK(tagc_comm_all_gather(far, &mine, sizeof mine, three));
        for (int i = 0; i < 2; i++) CHECK(pair[i] == 100 * round + rank / 2 * 2 + i);
        for (int i = 0; i < 3; i++) CHECK(three[i] == 100 * round + rank % 2 + 2 * i);
    }
    uint64_t sent[TAGC_N_LEGS];
    tagc_comm_bytes(far, sent, NULL, TAGC_N_LEGS);
    CHECK(sent[TAGC_LEG_CONTROL] == 20 * 2 * sizeof(int));
    tagc_comm_bytes(comm, sent, NULL, TAGC_N_LEGS);
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) CHECK(sent[leg] == 0);
    tagc_comm_destroy(near);
    tagc_comm_destroy(far);
}

static void groups_carry_what_they_are_given(void **state) {
    (void)state;
    toy_run(6, gather_in_groups, NULL);
}

int main(void) {
    toy_gpt(&model, 2, 5, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups_carry_what_they_are_given),
        cmocka_unit_test(sites_do_what_plain_engines_and_loops_do),
        cmocka_unit_test(one_site_trains_as_without_rounds),
        cmocka_unit_test(bytes_are_those_of_rounds),
        cmocka_unit_test(nothing_of_a_pseudo_gradient_is_lost),
        cmocka_unit_test(sites_train_while_a_round_is_under_way),
        cmocka_unit_test(options_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
