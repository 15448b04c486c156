/* What goes wrong in a step must end the same way on every rank: a gradient that is not a number is skipped,
 * calls out of order are told apart, and the other ranks do not wait for a rank that gives up. */
#include "unsent.h"

#include "fsdp/internal.h"

typedef struct run {
    toy_model model;
    tagc_fsdp_options options;
    int bad_step, leave_out; /* -1: none; leave_out: the bad step is not taken at all */
    float *values;
    pthread_mutex_t lock;
    int n_skipped;
} run;

static void train(tagc_comm *comm, void *arg) {
    run *r = arg;
    toy_model model = r->model;
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, model.tensors, model.n_tensors, &r->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    int last = tagc_comm_rank(comm) == tagc_comm_world_size(comm) - 1;
    for (int step = 0; step < 5; step++) {
        if (r->leave_out && step == r->bad_step) continue;
        model.poison = last && step == r->bad_step ? 4 : 0; /* one tensor on one rank */
        tagc_fsdp_stats stats;
        float before = f->tables.flats[0].master[0];
        toy_step(&model, comm, f, r->options.n_micro_steps, (uint64_t)step, 0.01, &stats);
        CHECK(stats.skipped == (step == r->bad_step));
        CHECK(isfinite(stats.grad_norm) == !stats.skipped);
        CHECK((before == f->tables.flats[0].master[0]) == stats.skipped);
        pthread_mutex_lock(&r->lock);
        r->n_skipped += stats.skipped;
        pthread_mutex_unlock(&r->lock);
    }
    float *values = malloc(toy_n_params(&model) * sizeof *values);
    toy_read(&model, f, values);
    if (tagc_comm_rank(comm) == 0) memcpy(r->values, values, toy_n_params(&model) * sizeof *values);
    free(values);
    tagc_fsdp_destroy(f);
}

/* Dense: as if the step had never been. */
TEST(bad_step_is_skipped) {
    for (int variant = 0; variant < 9; variant++) {
        run a = {.bad_step = 2};
        toy_gpt(&a.model, 2, 5, 0);
        tagc_fsdp_options_init(&a.options);
        a.options.policy = TAGC_POLICY_NONE;
        a.options.sharding = variant % 3;
        a.options.n_micro_steps = variant < 3 ? 1 : 2;
        a.options.exchange_each_micro_step = variant >= 6;
        run b = a;
        b.leave_out = 1;
        size_t n = toy_n_params(&a.model);
        a.values = calloc(n, sizeof *a.values);
        b.values = calloc(n, sizeof *b.values);
        pthread_mutex_init(&a.lock, NULL);
        pthread_mutex_init(&b.lock, NULL);
        toy_run(2, train, &a);
        toy_run(2, train, &b);
        assert_int_equal(a.n_skipped, 2);
        assert_int_equal(b.n_skipped, 0);
        assert_memory_equal(a.values, b.values, n * sizeof *a.values);
        free(a.values);
        free(b.values);
    }
}

/* ---- nothing is lost on the way through a compressed exchange ---- */

typedef struct ledger {
    toy_model model;
    tagc_fsdp_options options;
    int poison;
    double *in, *out; /* (n_params) sums over ranks: gradient + residual before, received + residual after */
    double *residual_change;
    pthread_mutex_t lock;
} ledger;

static void add_residual(const tagc_fsdp *f, const toy_model *m, double sign, double *sum) {
    for (int t = 0; t < m->n_tensors; t++) {
        add_unsent(f, t, sign, sum);
        sum += m->tensors[t].n_elems;
    }
}

static void keep_accounts(tagc_comm *comm, void *arg) {
    ledger *l = arg;
    const toy_model *m = &l->model;
    toy_model last_model = *m;
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, m->tensors, m->n_tensors, &l->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    toy_step(m, comm, f, 1, 0, 0.01, NULL);
    pthread_mutex_lock(&l->lock);
    add_residual(f, m, 1, l->in);
    add_residual(f, m, -1, l->residual_change);
    pthread_mutex_unlock(&l->lock);
    if (tagc_comm_rank(comm) == 0) last_model.poison = l->poison;
    tagc_fsdp_stats stats;
    toy_step(&last_model, comm, f, 1, 1, 0.01, &stats);
    CHECK(stats.skipped == (l->poison != 0));
    pthread_mutex_lock(&l->lock);
    double *in = l->in, *out = l->out;
    for (int t = 0; t < m->n_tensors; in += m->tensors[t].n_elems, out += m->tensors[t].n_elems, t++) {
        const tagc_place *p = &f->tables.places[t];
        const tagc_flat *flat = &f->tables.flats[p->flat];
        for (size_t i = 0; i < m->tensors[t].n_elems; i++)
            in[i] += (double)flat->full_gradient[p->offset + i];
        for (size_t i = 0; i < p->n; i++)
            out[p->first + i] += (double)flat->gradient[p->at + i] * tagc_comm_world_size(comm);
    }
    add_residual(f, m, 1, l->out);
    add_residual(f, m, 1, l->residual_change);
    pthread_mutex_unlock(&l->lock);
    tagc_fsdp_destroy(f);
}

static void ledger_run(ledger *l, int exchange) {
    toy_gpt(&l->model, 2, 9, 0);
    tagc_fsdp_options_init(&l->options);
    l->options.policy = TAGC_POLICY_NON_ATTENTION_LINEAR;
    l->options.reducer.exchange = exchange;
    l->options.reducer.sparsity = 0.85;
    l->options.reducer.residual = TAGC_FORMAT_FP32;
    l->options.grads_in_flight = 8; /* every unit keeps its gradient to the end of the step */
    size_t n = toy_n_params(&l->model);
    l->in = calloc(3 * n, sizeof *l->in);
    l->out = l->in + n;
    l->residual_change = l->out + n;
    pthread_mutex_init(&l->lock, NULL);
    toy_run(3, keep_accounts, l);
}

TEST(nothing_is_lost) {
    for (int exchange = TAGC_EXCHANGE_SKETCH; exchange <= TAGC_EXCHANGE_DIRECT; exchange++) {
        ledger l = {0};
        ledger_run(&l, exchange);
        double changed = 0;
        for (size_t i = 0; i < toy_n_params(&l.model); i++) {
            assert_true(fabs(l.in[i] - l.out[i]) <= 4e-5);
            changed = fmax(changed, fabs(l.residual_change[i]));
        }
        assert_true(changed > 0);
        free(l.in);
    }
}

/* The residuals of the flat that held the NaN are as before. */
TEST(skipped_flats_keep_their_residual) {
    ledger l = {.poison = 1}; /* the token embedding */
    ledger_run(&l, TAGC_EXCHANGE_PACKED);
    for (size_t i = 0; i < l.model.tensors[0].n_elems; i++) assert_true(l.residual_change[i] == 0);
    free(l.in);
}

/* ---- calls out of order ---- */

static void misuse(tagc_comm *comm, void *arg) {
    (void)arg;
    toy_model m;
    toy_gpt(&m, 1, 4, 0);
    tagc_fsdp_options options;
    tagc_fsdp_options_init(&options);
    options.reducer.exchange = TAGC_EXCHANGE_PACKED;
    tagc_fsdp *f;
    const float *p;
    float *g;
    CHECK_OK(tagc_fsdp_create(comm, m.tensors, m.n_tensors, &options, NULL, &f));
    CHECK(tagc_fsdp_use(f, 0, &p) == TAGC_ERR_STATE);
    CHECK(tagc_fsdp_backward_begin(f) == TAGC_ERR_STATE);
    CHECK(tagc_fsdp_step(f, 0.1, NULL) == TAGC_ERR_STATE);
    toy_forward(&m, f, 0, 0, 1);
    CHECK(tagc_fsdp_backward_begin(f) == TAGC_ERR_STATE); /* that was an evaluation */
    toy_forward(&m, f, 1, 0, 1);
    CHECK(tagc_fsdp_use(f, m.n_tensors, &p) == TAGC_ERR_ARGUMENT);
    CHECK(tagc_fsdp_grad(f, 0, &g) == TAGC_ERR_STATE);
    toy_backward(&m, f, 0, 1);
    CHECK(tagc_fsdp_grad_done(f, 0) == TAGC_ERR_STATE);
    CHECK(tagc_fsdp_backward_begin(f) == TAGC_ERR_STATE);
    CHECK(tagc_fsdp_step(f, NAN, NULL) == TAGC_ERR_ARGUMENT);
    CHECK(tagc_fsdp_step(f, -1, NULL) == TAGC_ERR_ARGUMENT);
    CHECK_OK(tagc_fsdp_step(f, 0.1, NULL));
    CHECK(tagc_fsdp_step(f, 0.1, NULL) == TAGC_ERR_STATE);
    CHECK(tagc_fsdp_read_tensor(f, -1, NULL) == TAGC_ERR_ARGUMENT);
    tagc_fsdp_destroy(f);
    tagc_fsdp_destroy(NULL);
}

TEST(order_is_checked) {
    toy_run(1, misuse, NULL);
    toy_run(2, misuse, NULL);
}

/* Tensors without a gradient count as zero: only weight decay moves them. */
static void silent(tagc_comm *comm, void *arg) {
    (void)arg;
    toy_model m;
    toy_gpt(&m, 1, 4, 0);
    tagc_fsdp_options options;
    tagc_fsdp_options_init(&options);
    options.reducer.exchange = TAGC_EXCHANGE_PACKED;
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, m.tensors, m.n_tensors, &options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    toy_forward(&m, f, 1, 0, 1);
    CHECK_OK(tagc_fsdp_backward_begin(f));
    tagc_fsdp_stats stats;
    CHECK_OK(tagc_fsdp_step(f, 0.5, &stats));
    CHECK(stats.grad_norm == 0 && !stats.skipped);
    float values[23 * 4];
    CHECK_OK(tagc_fsdp_read_tensor(f, 0, values));
    for (size_t i = 0; i < 23 * 4; i++) CHECK(fabsf(values[i] - 0.95f * toy_initial(0, i)) < 1e-6f);
    tagc_fsdp_destroy(f);
}

TEST(missing_gradients_are_zero) {
    toy_run(2, silent, NULL);
}

/* A unit that backward read in the step before comes ahead again, and goes unread: harmless. */
static void change_mind(tagc_comm *comm, void *arg) {
    (void)arg;
    toy_model m;
    toy_gpt(&m, 3, 4, 0);
    tagc_fsdp_options options;
    tagc_fsdp_options_init(&options);
    options.reducer.exchange = TAGC_EXCHANGE_PACKED;
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, m.tensors, m.n_tensors, &options, NULL, &f));
    for (uint64_t step = 0; step < 4; step++) {
        if (step % 2 == 0) {
            toy_step(&m, comm, f, 1, step, 0.1, NULL);
            continue;
        }
        toy_forward(&m, f, 1, 0, 1);
        CHECK_OK(tagc_fsdp_backward_begin(f));
        for (int t = m.n_tensors - 1; t >= 0; t--) {
            float *g;
            CHECK_OK(tagc_fsdp_grad(f, t, &g));
            CHECK_OK(tagc_fsdp_grad_done(f, t));
        }
        CHECK_OK(tagc_fsdp_step(f, 0.1, NULL));
    }
    tagc_fsdp_destroy(f);
}

TEST(unread_gathers_are_harmless) {
    toy_run(2, change_mind, NULL);
}

/* ---- a rank gives up ---- */

static tagc_status try_step(const toy_model *m, tagc_fsdp *f) {
    const float *p;
    float *g;
    TAGC_TRY(tagc_fsdp_forward_begin(f, 1));
    for (int t = 0; t < m->n_tensors; t++) {
        TAGC_TRY(tagc_fsdp_use(f, t, &p));
        tagc_fsdp_done(f, t);
    }
    TAGC_TRY(tagc_fsdp_backward_begin(f));
    for (int t = m->n_tensors - 1; t >= 0; t--) {
        TAGC_TRY(tagc_fsdp_use(f, t, &p));
        TAGC_TRY(tagc_fsdp_grad(f, t, &g));
        g[0] += p[0];
        tagc_fsdp_done(f, t);
        TAGC_TRY(tagc_fsdp_grad_done(f, t));
    }
    return tagc_fsdp_step(f, 0.1, NULL);
}

static void give_up(tagc_comm *comm, void *arg) {
    toy_model m;
    toy_gpt(&m, 3, 4, 0);
    tagc_fsdp_options options;
    tagc_fsdp_options_init(&options);
    options.reducer.exchange = TAGC_EXCHANGE_PACKED;
    options.sharding = *(int *)arg;
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, m.tensors, m.n_tensors, &options, NULL, &f));
    toy_step(&m, comm, f, 1, 0, 0.1, NULL);
    tagc_status together = tagc_comm_barrier(comm); /* may already hear of the end */
    if (tagc_comm_rank(comm) == 1) {
        CHECK_OK(together);
        tagc_comm_abort(comm, "the cat sat on the keyboard");
    } else {
        CHECK(try_step(&m, f) == TAGC_ERR_TRANSPORT);
        CHECK(strstr(tagc_last_error(), "the cat sat on the keyboard") != NULL);
        CHECK(tagc_fsdp_forward_begin(f, 1) != TAGC_OK || try_step(&m, f) != TAGC_OK); /* and no way back */
    }
    tagc_fsdp_destroy(f);
}

TEST(a_rank_gives_up) {
    for (int sharding = 0; sharding < 3; sharding++) toy_run(3, give_up, &sharding);
}
