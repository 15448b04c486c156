/* Runs of the toy model on all ranks, and what must hold for each: every rank ends with the same parameters, and they are
 * those of the oracle in double. */
#ifndef TAGC_TEST_TOY_RUNS_H
#define TAGC_TEST_TOY_RUNS_H

#include "toy.h"

typedef struct toy_exact {
    const toy_model *model;
    tagc_fsdp_options options;
    int n_steps;
    /* NULL, or what else must hold at the end. Collective. */
    void (*check)(tagc_comm *comm, const tagc_fsdp *f);
    /* (n_params), the same on all ranks */
    float *result;
    /* of the last step, the same on all ranks */
    double norm, loss;
    /* of rank 0's last step */
    tagc_fsdp_stats stats;
    pthread_mutex_t lock;
    int n_done;
} toy_exact;

/* With default options. The caller frees result. */
static inline toy_exact toy_exact_of(const toy_model *model, int n_steps) {
    toy_exact r = {.model = model, .n_steps = n_steps, .result = malloc(toy_n_params(model) * sizeof(float))};
    tagc_fsdp_options_init(&r.options);
    return r;
}

/* What the steps of r come to. The caller frees it. */
static inline toy_oracle toy_exact_oracle(const toy_exact *r) {
    toy_oracle oracle;
    toy_oracle_init(&oracle, r->model);
    for (int step = 0; step < r->n_steps; step++)
        toy_oracle_step(&oracle, r->model, &r->options, (uint64_t)step, 0.01);
    return oracle;
}

static inline void toy_exact_train(tagc_comm *comm, void *arg) {
    toy_exact *r = arg;
    size_t n = toy_n_params(r->model);
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, r->model->tensors, r->model->n_tensors, &r->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    tagc_fsdp_stats stats = {0};
    for (int step = 0; step < r->n_steps; step++) {
        if (step == 1) toy_forward(r->model, f, 0, 0, 1); /* an evaluation in between changes nothing */
        toy_step(r->model, comm, f, r->options.n_micro_steps, (uint64_t)step, 0.01, &stats);
        CHECK(!stats.skipped);
    }
    if (r->check) r->check(comm, f);
    double seen = toy_forward(r->model, f, 0, 0, 1);
    float *values = malloc(n * sizeof *values);
    toy_read(r->model, f, values);
    pthread_mutex_lock(&r->lock);
    if (r->n_done++ == 0) {
        memcpy(r->result, values, n * sizeof *values);
        r->norm = stats.grad_norm;
        r->loss = seen;
    }
    CHECK(memcmp(r->result, values, n * sizeof *values) == 0);
    CHECK(r->norm == stats.grad_norm && r->loss == seen);
    if (tagc_comm_rank(comm) == 0) r->stats = stats;
    pthread_mutex_unlock(&r->lock);
    free(values);
    tagc_fsdp_destroy(f);
}

static inline void toy_exact_run(toy_exact *r, int world_size) {
    r->n_done = 0;
    pthread_mutex_init(&r->lock, NULL);
    toy_run(world_size, toy_exact_train, r);
    pthread_mutex_destroy(&r->lock);
    assert_int_equal(r->n_done, world_size);
}

static inline void toy_exact_compare(const toy_exact *r, const toy_oracle *oracle, int world_size) {
    double worst = 0;
    for (size_t i = 0; i < oracle->n; i++) worst = fmax(worst, fabs((double)r->result[i] - oracle->p[i]));
    const tagc_fsdp_options *o = &r->options;
    if (!(worst <= 2e-5))
        print_error("W %d of hosts of %d, sharding %d wrap %d prefetch %d micro %d each %d: off by %g\n",
                    world_size, o->ranks_per_host, o->sharding, o->wrap, o->prefetch, o->n_micro_steps,
                    o->exchange_each_micro_step, worst);
    assert_true(worst <= 2e-5);
    assert_true(fabs(r->norm - oracle->norm) <= 1e-5 * oracle->norm);
}

/* How far parameters are from the targets' mean, 0, as a share of where they began. */
static inline double toy_distance(const toy_model *m, const float *params) {
    double start = 0, end = 0;
    size_t at = 0;
    for (int t = 0; t < m->n_tensors; t++)
        for (size_t i = 0; i < m->tensors[t].n_elems; i++, at++) {
            start += pow((double)toy_initial(t, i), 2);
            end += pow((double)params[at], 2);
        }
    return end / start;
}

#endif
