/* The schedule in the engine: the toy's gradients point one way until its parameters have come to their targets, and are noise
 * from then on. With lr 0 they never come there. */
#include "../repeats.h"
#include "folder.h"
#include "toy.h"

#include "fsdp/checkpoint.h"
#include "fsdp/internal.h"

enum {
    MAX_STEPS = 400,
    WINDOW = 20,
    FRESH = 60,      /* steps at the first level */
    UNUSED_ROWS = 15 /* of the embedding's 23 */
};

typedef struct script {
    toy_model model;
    tagc_fsdp_options options;
    double lr;
    int n_steps, save_at[6],
        load_at; /* save after so many steps each; begin from what was saved after so many */
    enum { NOTHING, LOAD, FORK } from;
    const char *dir;
    int levels[TOY_MAX_RANKS][MAX_STEPS][TAGC_N_LEVELS]; /* flats by rank, step and level */
    double bits[MAX_STEPS], loss;                        /* rank 0's; of the last step */
    uint64_t optimizer_bytes[2];                         /* rank 0's; at the beginning and at the end */
    float *params;                                       /* of the end */
} script;

static void run(tagc_comm *comm, void *arg) {
    script *s = arg;
    tagc_fsdp *f;
    tagc_fsdp_stats stats;
    int rank = tagc_comm_rank(comm);
    uint64_t first = 0;
    CHECK_OK(tagc_fsdp_create(comm, s->model.tensors, s->model.n_tensors, &s->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    if (s->from != NOTHING) {
        char path[1024], *extra;
        snprintf(path, sizeof path, "%s/step-%08d", s->dir, s->load_at);
        CHECK_OK(
            (s->from == FORK ? tagc_checkpoint_fork : tagc_checkpoint_load)(f, comm, path, &first, &extra));
        free(extra);
    }
    tagc_fsdp_memory memory[2];
    tagc_fsdp_memory_used(f, &memory[0]);
    for (int i = (int)first; i < s->n_steps; i++) {
        double loss = toy_step(&s->model, comm, f, 1, (uint64_t)i, s->lr, &stats);
        memcpy(s->levels[rank][i], stats.n_at_level, sizeof stats.n_at_level);
        for (int k = 0; k < 6; k++)
            if (i + 1 == s->save_at[k]) CHECK_OK(tagc_checkpoint_save(f, comm, s->dir, (uint64_t)i + 1, ""));
        if (rank != 0) continue;
        s->loss = loss;
        s->bits[i] = stats.bits_per_param[TAGC_LEG_INDEX] + stats.bits_per_param[TAGC_LEG_VALUES] +
                     stats.bits_per_param[TAGC_LEG_RESULT];
    }
    tagc_fsdp_memory_used(f, &memory[1]);
    for (int i = 0; i < 2 && rank == 0; i++) s->optimizer_bytes[i] = memory[i].optimizer;
    float *params = calloc(toy_n_params(&s->model), sizeof *params);
    toy_read(&s->model, f, params);
    if (rank == 0)
        s->params = params;
    else
        free(params);
    tagc_fsdp_destroy(f);
}

static script *make(int gentle, double lr, int n_steps) {
    script *s = calloc(1, sizeof *s);
    toy_gpt(&s->model, 2, 32, 1);
    s->model.no_loss = 1;
    tagc_fsdp_options_init(&s->options);
    s->options.policy = TAGC_POLICY_NON_ATTENTION_LINEAR;
    s->options.gentle = gentle;
    s->options.clip_norm = 0;
    s->lr = lr;
    s->n_steps = n_steps;
    return s;
}

static void drop(script *s) {
    free(s->params);
    free(s);
}

static double cost_of_unused(const script *s) {
    double cost = 0;
    for (size_t i = toy_n_used(&s->model, 0); i < s->model.tensors[0].n_elems; i++)
        cost += toy_unused_cost((double)s->params[i]); /* the embedding comes first in params */
    return cost;
}

static void check_ranks(const script *s, int world_size, int from) {
    for (int rank = 1; rank < world_size; rank++)
        for (int i = from; i < s->n_steps; i++)
            assert_memory_equal(s->levels[rank][i], s->levels[0][i], sizeof s->levels[0][i]);
}

static int n_all(const script *s) {
    return tagc_fsdp_n_below_last(s->levels[0][0]) + s->levels[0][0][TAGC_LEVEL_LAST];
}

/* Unused rows hold nothing up once their gradients have faded next to those of the others. Without a beta1 in the end, the
 * first moment of what is compressed is gone by then. */
TEST(it_comes_to_the_last_level) {
    static const struct {
        int sharding, n_unused_rows;
    } cases[] = {{TAGC_SHARD_GRAD, 0}, {TAGC_SHARD_NONE, 0}, {TAGC_SHARD_GRAD, UNUSED_ROWS}};
    for (size_t v = REPEATS(0, 2, 2); v < 3; v++) {
        int last = 299;
        script *s = make(1, 0.03, last + 1);
        s->options.sharding = cases[v].sharding;
        s->options.beta1_compressed = 0;
        s->model.n_unused_rows = cases[v].n_unused_rows;
        toy_run(2, run, s);
        check_ranks(s, 2, 0);
        /* embedding, two units with a compressed and a mild flat each ... */
        assert_true(s->levels[0][0][TAGC_LEVEL_EVERY] >= 6);
        assert_int_equal(s->levels[0][0][TAGC_LEVEL_FRESH], 0);
        assert_memory_equal(s->levels[0][WINDOW], s->levels[0][0], sizeof s->levels[0][0]);
        assert_int_equal(s->levels[0][last][TAGC_LEVEL_LAST], n_all(s));
        int n_largest = 0; /* steps in which a flat was there */
        for (int i = 1; i <= last; i++) {
            assert_true(s->levels[0][i][TAGC_LEVEL_LAST] >= s->levels[0][i - 1][TAGC_LEVEL_LAST]);
            n_largest += s->levels[0][i][TAGC_LEVEL_LARGEST] > 0;
        }
        assert_true(n_largest >= WINDOW);
        assert_true(s->bits[last] < 0.6 * s->bits[0]);
        /* half of 4.5 and what is dense: 2.52; with 128 values per scale it would be 2.34 */
        assert_true(s->bits[0] > (cases[v].sharding == TAGC_SHARD_NONE ? 2 : 1) * 2.45);
        script *without = make(0, 0.03, 1);
        without->options.sharding = cases[v].sharding;
        without->options.beta1_compressed = 0;
        toy_run(2, run, without);
        assert_true(s->optimizer_bytes[1] < s->optimizer_bytes[0]);
        assert_int_equal(s->optimizer_bytes[1], without->optimizer_bytes[0]);
        drop(without);
        drop(s);
    }
}

/* Random weights: 8 bits for three windows, and then all of the above from there on, on any number of ranks. */
TEST(random_weights_begin_in_8_bits) {
    for (int world_size = REPEATS(1, 2, 2); world_size <= REPEATS(4, 2, 2); world_size++) {
        script *s = make(1, 0.03, FRESH + 5);
        s->options.fresh = 1;
        toy_run(world_size, run, s);
        check_ranks(s, world_size, 0);
        for (int i = 0; i < s->n_steps; i++) {
            assert_int_equal(s->levels[0][i][TAGC_LEVEL_FRESH], i < FRESH ? n_all(s) : 0);
            assert_int_equal(s->levels[0][i][TAGC_LEVEL_EVERY], i < FRESH ? 0 : n_all(s));
        }
        if (world_size ==
            2) { /* 8.125 and 4.5 bits of half of the values, and what is dense: 4.33 and 2.52 */
            assert_true(s->bits[0] > 4.2 && s->bits[FRESH - 1] > 4.2 && s->bits[0] < 4.4);
            assert_true(s->bits[FRESH] > 2.45 && s->bits[FRESH] < 2.6);
        }
        drop(s);
    }
}

TEST(it_stays_where_gradients_have_a_direction) {
    script *s = make(1, 0, 102);
    toy_run(3, run, s);
    check_ranks(s, 3, 0);
    assert_int_equal(s->levels[0][101][TAGC_LEVEL_EVERY], n_all(s));
    drop(s);
}

/* A loss bound that selection from the first step fails: the toy is young for some sixty steps of this rate. Its head is
 * its embedding, most of which is unused in the second case. */
TEST(it_trains_as_dense) {
    static const int n_unused_rows[] = {0, UNUSED_ROWS};
    for (size_t v = REPEATS(0, 1, 1); v < 2; v++) {
        script *dense = make(0, 0.02, 60), *gentle = make(1, 0.02, 60), *plain = make(0, 0.02, 60);
        script *all[] = {dense, gentle, plain};
        double unused[3];
        dense->options.policy = TAGC_POLICY_NONE;
        plain->options.beta1_compressed = 0;
        for (size_t i = 0; i < 3; i++) {
            all[i]->model.n_unused_rows = n_unused_rows[v];
            all[i]->model.no_loss = 0;
            toy_run(2, run, all[i]);
            unused[i] = cost_of_unused(all[i]);
        }
        assert_true(gentle->loss < 1.01 * dense->loss);
        assert_true(plain->loss > 1.05 * dense->loss);
        assert_true(unused[1] <= 1.1 * unused[0] && unused[2] >= 2 * unused[0]); /* 1.08 and 4.0 */
        drop(dense), drop(gentle), drop(plain);
    }
}

/* In a window, between windows, while the first moment becomes short, and between levels. Who resumes need not know that the
 * weights were random. */
TEST(it_resumes_bit_for_bit) {
    static const struct {
        int fresh, n_ranks, n_steps, saves[6];
        double beta1;
    } cases[] = {{0, 2, 260, {20, 127, 190}, 0},
                 {1, 2, FRESH + 27, {13, FRESH, FRESH + 7}, -1},
                 {0, 4, 220, {140, 173}, -1}};
    for (size_t v = REPEATS(0, 2, 2); v < sizeof cases / sizeof *cases; v++) {
        char name[] = "/tmp/tagc-levels-XXXXXX";
        int n_ranks = cases[v].n_ranks;
        assert_non_null(mkdtemp(name));
        script *whole = make(1, 0.03, cases[v].n_steps);
        whole->options.fresh = cases[v].fresh;
        whole->options.beta1_compressed = cases[v].beta1;
        whole->dir = name;
        memcpy(whole->save_at, cases[v].saves, sizeof whole->save_at);
        toy_run(n_ranks, run, whole);
        int last = cases[v].n_steps - 1;
        assert_true(cases[v].fresh || whole->levels[0][last][TAGC_LEVEL_LAST] > 0);
        for (const int *at = cases[v].saves; *at > 0; at++) {
            script *rest = make(1, 0.03, cases[v].n_steps);
            rest->options.beta1_compressed = cases[v].beta1;
            rest->from = LOAD;
            rest->load_at = *at;
            rest->dir = name;
            toy_run(n_ranks, run, rest);
            check_ranks(rest, n_ranks, *at);
            for (int i = *at; i <= last; i++)
                assert_memory_equal(rest->levels[0][i], whole->levels[0][i], sizeof rest->levels[0][i]);
            assert_memory_equal(whole->params, rest->params, toy_n_params(&whole->model) * sizeof(float));
            drop(rest);
        }
        drop(whole);
        remove_folder(name);
    }
}

/* A checkpoint of a run that followed no schedule has none. */
TEST(a_run_without_it_goes_on_without_it) {
    char name[] = "/tmp/tagc-levels-XXXXXX";
    assert_non_null(mkdtemp(name));
    script *before = make(0, 0.01, 5), *after = make(1, 0.01, 8), *as_it_was = make(0, 0.01, 8);
    before->save_at[0] = after->load_at = as_it_was->load_at = 5;
    after->from = as_it_was->from = LOAD;
    after->options.fresh = 1;
    before->dir = after->dir = as_it_was->dir = name;
    toy_run(2, run, before);
    toy_run(2, run, after);
    toy_run(2, run, as_it_was);
    assert_int_equal(tagc_fsdp_n_below_last(after->levels[0][5]), 0);
    assert_memory_equal(after->params, as_it_was->params, toy_n_params(&after->model) * sizeof(float));
    drop(before), drop(after), drop(as_it_was);
    remove_folder(name);
}

static void run_bad(tagc_comm *comm, void *arg) {
    script *s = arg;
    tagc_fsdp *f;
    CHECK(tagc_fsdp_create(comm, s->model.tensors, s->model.n_tensors, &s->options, NULL, &f) ==
          TAGC_ERR_ARGUMENT);
}

TEST(a_bad_option_is_refused) {
    script *s = make(2, 0, 1);
    toy_run(2, run_bad, s);
    s->options.gentle = 1;
    s->options.fresh = 2;
    toy_run(2, run_bad, s);
    drop(s);
}

/* Forks of a run at its first level and of one at its last ones, and runs of another number of ranks that go on with them. */
TEST(a_fork_begins_with_every_value_in_4_bits) {
    static const int saved_at[] = {5, 219};
    for (int is_late = REPEATS(0, 1, 1); is_late < 2; is_late++) {
        char name[] = "/tmp/tagc-levels-XXXXXX";
        assert_non_null(mkdtemp(name));
        int at = saved_at[is_late];
        script *before = make(1, 0.03, at + 1), *fork = make(1, 0.03, at + 3), *more = make(1, 0.03, at + 3);
        before->save_at[0] = fork->load_at = more->load_at = at;
        fork->from = FORK;
        more->from = LOAD;
        before->options.fresh = !is_late;
        fork->options.fresh = more->options.fresh = 1;
        before->dir = fork->dir = more->dir = name;
        toy_run(2, run, before);
        toy_run(2, run, fork);
        toy_run(3, run, more);
        check_ranks(more, 3, at);
        assert_int_equal(before->levels[0][at][TAGC_LEVEL_FRESH], is_late ? 0 : n_all(before));
        assert_true(before->levels[0][at][TAGC_LEVEL_LAST] > 0 || !is_late);
        for (int i = at; i < at + 3; i++) {
            assert_int_equal(fork->levels[0][i][TAGC_LEVEL_EVERY], n_all(before));
            assert_memory_equal(more->levels[0][i], before->levels[0][at], sizeof more->levels[0][i]);
        }
        drop(before), drop(fork), drop(more);
        remove_folder(name);
    }
}

/* ---- Adam's betas ---- */

typedef struct adam_run {
    script *s;
    uint64_t n_before; /* updates before a fork */
    /* Steps with a first moment on its way, with a longer second one, and with one of full length. */
    int n_moments, n_selected, n_long;
} adam_run;

/* Each update against one by the betas of its plan. */
static void run_adam(tagc_comm *comm, void *arg) {
    adam_run *r = arg;
    script *s = r->s;
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, s->model.tensors, s->model.n_tensors, &s->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    f->n_updates = r->n_before;
    for (int i = 0; i < s->n_steps; i++) {
        float *master[16] = {0}, *moments[16] = {0};
        for (int k = 0; k < f->tables.n_flats; k++) {
            const tagc_flat *flat = &f->tables.flats[k];
            size_t n = flat->n_owned;
            master[k] = malloc(n * sizeof(float));
            moments[k] = calloc(2 * n, sizeof(float));
            memcpy(master[k], flat->master, n * sizeof(float));
            if (flat->moment1 != NULL) memcpy(moments[k], flat->moment1, n * sizeof(float));
            memcpy(moments[k] + n, flat->moment2, n * sizeof(float));
        }
        toy_step(&s->model, comm, f, 1, (uint64_t)i, s->lr, NULL);
        for (int k = 0; k < f->tables.n_flats; k++) {
            const tagc_flat *flat = &f->tables.flats[k];
            const tagc_schedule_plan *plan = &flat->plan;
            size_t n = flat->n_owned;
            uint64_t n_updates = r->n_before + (uint64_t)i + 1;
            int selects = flat->is_followed && plan->n_selected > 0;
            tagc_adamw adamw = {
                .lr = s->lr, .epsilon = s->options.epsilon, .gradient_scale = 1, .n_updates = n_updates};
            tagc_schedule_betas(tagc_fsdp_schedule(f), flat->is_followed ? plan->moment : 1,
                                selects ? n_updates : 0, s->options.beta1, s->options.beta2, &adamw.beta1,
                                &adamw.beta2);
            r->n_moments += adamw.beta1 < 0.89 && adamw.beta1 > 0.51;
            r->n_selected += selects && adamw.beta2 > 0.96;
            r->n_long += selects && adamw.beta2 > 0.9949;
            tagc_adamw_update(&adamw, master[k], moments[k], moments[k] + n, flat->gradient, n);
            CHECK(memcmp(master[k], flat->master, flat->n_elems * sizeof(float)) == 0);
            free(master[k]);
            free(moments[k]);
        }
    }
    tagc_fsdp_destroy(f);
}

TEST(betas_are_those_of_the_plan) {
    adam_run r = {.s = make(1, 0.03, 260)};
    r.s->options.weight_decay = 0;
    toy_run(1, run_adam, &r);
    assert_true(r.n_moments >= WINDOW && r.n_selected >= WINDOW && r.n_long == 0);
    drop(r.s);
}

/* Moments come with a fork, so its second one may be long as soon as values are selected. */
TEST(updates_before_a_fork_count) {
    if (REPEATS(0, 1, 1)) skip(); /* a sanitizer sees nothing here that it does not in the test above */
    adam_run r = {.s = make(1, 0.03, 260), .n_before = 1000};
    r.s->options.weight_decay = 0;
    toy_run(1, run_adam, &r);
    assert_true(r.n_selected >= WINDOW && r.n_long == r.n_selected);
    drop(r.s);
}

/* ---- gradients that a test chooses ---- */

typedef struct chosen {
    toy_model model;
    tagc_fsdp_options options;
    int world_size, n_windows;
    /* Whether the gradients of a tensor point one way in this window, with a level of noise below that. */
    int (*points)(const struct chosen *c, int tensor, int window);
    float (*size)(int tensor); /* of its gradients */
    double (*loss)(int window);
    tagc_alarm alarms[16]; /* rank 0's, with the windows at whose end they came */
    int alarm_windows[16], n_alarms;
    int n_every[64]; /* rank 0's flats at EVERY after each window */
    int n_checked;
} chosen;

static float gradient(const chosen *c, int rank, int step, int tensor, size_t i) {
    uint64_t key = ((uint64_t)tensor << 20 | i) * 1000003 + (uint64_t)step * 16 + (uint64_t)rank;
    float noise = toy_number(key),
          way = c->points(c, tensor, step / WINDOW) ? (i % 2 == 0 ? 1.0f : -1.0f) : 0.0f;
    return (c->size == NULL ? 1 : c->size(tensor)) * (way + 0.5f * noise);
}

static void step_with(const chosen *c, tagc_fsdp *f, int rank, int step) {
    const toy_model *m = &c->model;
    const float *p;
    CHECK_OK(tagc_fsdp_forward_begin(f, 1));
    for (int layer = 0; layer < m->n_layers; layer++)
        for (int t = 0; t < m->n_tensors; t++) {
            if (m->tensors[t].layer != layer) continue;
            CHECK_OK(tagc_fsdp_use(f, t, &p));
            tagc_fsdp_done(f, t);
        }
    CHECK_OK(tagc_fsdp_backward_begin(f));
    for (int layer = m->n_layers - 1; layer >= 0; layer--)
        for (int t = m->n_tensors - 1; t >= 0; t--) {
            float *g;
            if (m->tensors[t].layer != layer) continue;
            CHECK_OK(tagc_fsdp_use(f, t, &p));
            CHECK_OK(tagc_fsdp_grad(f, t, &g));
            for (size_t i = 0; i < m->tensors[t].n_elems; i++) g[i] += gradient(c, rank, step, t, i);
            tagc_fsdp_done(f, t);
            CHECK_OK(tagc_fsdp_grad_done(f, t));
        }
    if (c->loss != NULL) tagc_fsdp_watch_loss(f, c->loss(step / WINDOW) + 0.01 * (step % 2));
    CHECK_OK(tagc_fsdp_step(f, 1e-4, NULL));
}

/* The same, as the layer for PyTorch does it: a schedule per rank, samples out of whole gradients, and sums over ranks. */
typedef struct plain {
    tagc_schedule *of_rank[TOY_MAX_RANKS];
    int tensors[TOY_MAX_TENSORS]; /* by parameter */
    size_t n;
} plain;

static void open_plain(const chosen *c, const tagc_fsdp *f, plain *p) {
    tagc_schedule_parameter parameters[TOY_MAX_TENSORS];
    tagc_schedule_options options;
    tagc_schedule_options_init(&options);
    options.fresh = c->options.fresh;
    for (int i = 0; i < f->tables.n_flats; i++) {
        const tagc_flat *flat = &f->tables.flats[i];
        for (int k = flat->first_member; k < flat->first_member + flat->n_members && flat->is_followed; k++) {
            const tagc_tensor_info *t = &c->model.tensors[f->tables.members[k]];
            p->tensors[p->n] = f->tables.members[k];
            parameters[p->n++] = (tagc_schedule_parameter){t->name, t->n_elems, (tagc_class)flat->class_};
        }
    }
    for (int rank = 0; rank < c->world_size; rank++) {
        CHECK_OK(tagc_schedule_create(&options, parameters, p->n, &p->of_rank[rank]));
        for (size_t i = 0; i < p->n; i++)
            if (parameters[i].kind == TAGC_CLASS_COMPRESSED)
                CHECK_OK(tagc_schedule_set_moment(p->of_rank[rank], i, TAGC_MOMENT_SHORTENS));
    }
}

static void close_plain(const chosen *c, plain *p) {
    for (int rank = 0; rank < c->world_size; rank++) tagc_schedule_destroy(p->of_rank[rank]);
}

static void step_plain(const chosen *c, plain *p, int step) {
    tagc_schedule_sums sums[TOY_MAX_TENSORS] = {0};
    uint32_t all[TOY_MAX_TENSORS];
    int is_full = 0;
    for (int rank = 0; rank < c->world_size; rank++)
        for (uint32_t i = 0; i < p->n; i++) {
            uint64_t positions[TAGC_SCHEDULE_SAMPLE];
            float values[TAGC_SCHEDULE_SAMPLE];
            size_t n, n_full;
            uint32_t count, full;
            tagc_schedule_sums own;
            all[i] = i;
            tagc_schedule_positions(c->model.tensors[p->tensors[i]].n_elems, positions, &n);
            for (size_t k = 0; k < n; k++)
                values[k] = gradient(c, rank, step, p->tensors[i], (size_t)positions[k]);
            count = (uint32_t)n;
            CHECK_OK(tagc_schedule_add(p->of_rank[rank], &i, &count, 1, values, &full, &n_full));
            if (n_full == 0) continue;
            CHECK_OK(tagc_schedule_take(p->of_rank[rank], &i, 1, &own));
            sums[i].signal += own.signal;
            sums[i].weight += own.weight;
            sums[i].square += own.square;
            sums[i].n_square += own.n_square;
            is_full = 1;
        }
    for (int rank = 0; rank < c->world_size; rank++) {
        if (is_full) CHECK_OK(tagc_schedule_see(p->of_rank[rank], all, p->n, sums, 0));
        CHECK_OK(tagc_schedule_step(p->of_rank[rank], NULL, NULL));
    }
}

static void compare_plans(chosen *c, tagc_fsdp *f, const plain *p) {
    for (uint32_t i = 0; i < p->n; i++) {
        tagc_schedule_plan own, other;
        CHECK_OK(tagc_schedule_get_plan(tagc_fsdp_schedule(f), &f->model->tensors[p->tensors[i]].parameter,
                                        NULL, 1, &own));
        CHECK_OK(tagc_schedule_get_plan(p->of_rank[0], &i, NULL, 1, &other));
        CHECK(own.level == other.level && own.format == other.format && own.block == other.block);
        CHECK(own.sparsity == other.sparsity && own.moment == other.moment &&
              own.n_selected == other.n_selected);
        c->n_checked +=
            own.level == TAGC_LEVEL_LAST && own.sparsity != 0.95 && own.sparsity != 0.85; /* shares */
    }
    /* A flat has the level of its most careful member, and its reducer follows. */
    for (int i = 0; i < f->tables.n_flats; i++) {
        const tagc_flat *flat = &f->tables.flats[i];
        tagc_schedule_plan of_flat;
        tagc_layout_flat info;
        uint32_t members[TOY_MAX_TENSORS];
        if (!flat->is_followed) continue;
        for (uint32_t k = 0; k < (uint32_t)flat->n_members; k++)
            for (members[k] = 0; p->tensors[members[k]] != f->tables.members[flat->first_member + (int)k];)
                members[k]++;
        CHECK_OK(tagc_schedule_get_plan(p->of_rank[0], members, NULL, (size_t)flat->n_members, &of_flat));
        CHECK_OK(tagc_fsdp_flat_info(f, i, &info));
        CHECK(flat->plan.level == of_flat.level && info.reducer.sparsity == of_flat.sparsity);
        CHECK(info.reducer.format == (int)of_flat.format);
        CHECK(of_flat.block == 0 || info.reducer.block == of_flat.block);
    }
}

static void run_chosen(tagc_comm *comm, void *arg) {
    chosen *c = arg;
    tagc_fsdp *f;
    plain p = {0};
    int rank = tagc_comm_rank(comm), n_levels[TAGC_N_LEVELS];
    CHECK_OK(tagc_fsdp_create(comm, c->model.tensors, c->model.n_tensors, &c->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    int is_compared = rank == 0 && c->loss == NULL; /* losses are the engine's alone here */
    if (is_compared) open_plain(c, f, &p);
    for (int step = 0; step < WINDOW * c->n_windows; step++) {
        step_with(c, f, rank, step);
        if (is_compared) step_plain(c, &p, step);
        if (is_compared) compare_plans(c, f, &p);
        tagc_alarm alarms[TAGC_N_ALARM_KINDS];
        size_t n;
        tagc_schedule_take_alarms(tagc_fsdp_schedule(f), alarms, &n);
        for (size_t i = 0; rank == 0 && i < n; i++) {
            c->alarm_windows[c->n_alarms] = step / WINDOW;
            c->alarms[c->n_alarms++] = alarms[i];
        }
        tagc_fsdp_levels(f, n_levels);
        if (rank == 0) c->n_every[step / WINDOW] = n_levels[TAGC_LEVEL_EVERY];
    }
    if (is_compared) close_plain(c, &p);
    tagc_fsdp_destroy(f);
}

static void choose(chosen *c, int world_size, int n_windows) {
    *c = (chosen){.world_size = world_size, .n_windows = n_windows};
    toy_gpt(&c->model, 3, 16, 0);
    tagc_fsdp_options_init(&c->options);
    c->options.sharding = TAGC_SHARD_GRAD;
    c->options.gentle = 1;
}

/* Tensors learn to be noise one after the other, two of them point one way again later, and sizes differ. */
static int in_turns(const chosen *c, int tensor, int window) {
    int again = c->n_windows - 10; /* time enough to begin anew, and to go on */
    if (window >= again && window < again + 2 && tensor % 7 == 3) return 1;
    return window < tensor % 5;
}

static float of_many_sizes(int tensor) {
    return 0.1f * (float)(1 + tensor % 4);
}

/* However gradients lie in flats, shards and buckets. */
TEST(engine_and_pytorch_decide_alike) {
    for (int variant = REPEATS(0, 1, 1); variant < 5; variant += REPEATS(1, 2, 2)) {
        chosen c;
        int n_windows =
            variant == 1 ? 30 : 20; /* a first moment falls more slowly in a model of random weights */
        choose(&c, variant == 0 ? 1 : variant == 3 ? 4 : 2, n_windows);
        c.points = in_turns;
        c.size = of_many_sizes;
        c.options.fresh = variant == 1;
        c.options.sharding = variant == 2   ? TAGC_SHARD_NONE
                             : variant == 3 ? TAGC_SHARD_FULL
                                            : TAGC_SHARD_GRAD;
        c.options.bucket_elems = variant == 4 ? 1000000 : 0;
        toy_run(c.world_size, run_chosen, &c);
        assert_true(c.n_checked > WINDOW); /* shares that are not their level's */
        assert_true(variant == 1 || c.n_alarms > 0);
        assert_int_equal(c.n_every[n_windows - 1], 0);
    }
}

static int but_one(const chosen *c, int tensor, int window) {
    return c->model.tensors[tensor].layer == 2 && window < 7;
}

/* One layer that still learns holds its own flats back, and in a bucket those of the whole bucket. */
TEST(a_bucket_goes_on_when_all_of_it_may) {
    for (int buckets = REPEATS(0, 1, 1); buckets < 2; buckets++) {
        chosen c;
        choose(&c, 2, 13);
        c.points = but_one;
        c.options.bucket_elems = buckets ? 1000000 : 0;
        toy_run(2, run_chosen, &c);
        /* of embedding and blocks, or their bucket with the head, a compressed and a mild one each, of the head */
        assert_int_equal(c.n_every[0], buckets ? 4 : 2 + 3 * 2 + 1);
        assert_int_equal(c.n_every[6], buckets ? 3 : 5); /* mild ones wait for all that is compressed */
        assert_int_equal(c.n_every[12], 0);
    }
}

static int never(const chosen *c, int tensor, int window) {
    (void)c, (void)tensor, (void)window;
    return 0;
}

static int once_more(const chosen *c, int tensor, int window) {
    return window == 9 && strcmp(c->model.tensors[tensor].name, "h.1.mlp.c_fc.weight") == 0;
}

static double rises(int window) {
    return window >= 9 ? 3 : 2;
}

TEST(what_fails_begins_anew) {
    for (int of_loss = 0; of_loss < 2; of_loss++) {
        chosen c;
        choose(&c, 2, 12);
        c.points = of_loss ? never : once_more;
        c.loss = of_loss ? rises : NULL;
        toy_run(2, run_chosen, &c);
        assert_int_equal(c.n_every[8], 0);
        assert_int_equal(c.n_alarms, 1);
        assert_int_equal(c.alarms[0].kind, of_loss ? TAGC_ALARM_LOSS : TAGC_ALARM_DIRECTION);
        assert_int_equal(c.alarm_windows[0], of_loss ? 10 : 9);
        if (of_loss) {
            assert_true(c.alarms[0].n_parameters > 8 && fabs(c.alarms[0].value - 0.5) < 0.01);
            assert_true(c.n_every[10] > 8);
        } else {
            assert_int_equal(c.alarms[0].n_parameters, 1);
            assert_true(c.alarms[0].value > 2.6);
            assert_int_equal(c.n_every[9], 1);
        }
    }
}
