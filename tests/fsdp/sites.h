/* What the tests of local steps share: a toy model, and runs of it on sites. */
#ifndef TAGC_TEST_SITES_H
#define TAGC_TEST_SITES_H

#include "toy.h"

#include "fsdp/checkpoint.h"
#include "fsdp/checkpoint_files.h"
#include "fsdp/internal.h"

enum { EVERY = 3, STEPS = 14, MOST_SITES = 4 };

static toy_model model;

static inline void options_of(tagc_fsdp_options *o, int sharding, int n_local, int is_dense) {
    tagc_fsdp_options_init(o);
    o->sharding = sharding;
    o->ranks_per_host = n_local;
    o->local_steps = EVERY;
    o->reducer.exchange = is_dense ? TAGC_EXCHANGE_DENSE : TAGC_EXCHANGE_DIRECT;
    if (!is_dense) o->reducer.sparsity = 0.9;
}

/* One step of this rank's share of a batch that is cut into `n_ranks`; loss of the share. */
static inline double step_of(tagc_fsdp *f, int step, int rank, int n_ranks, tagc_fsdp_stats *stats) {
    int n = model.n_samples / n_ranks;
    uint64_t first = (uint64_t)(step * model.n_samples + rank * n);
    double loss = toy_forward(&model, f, 1, first, n);
    toy_backward(&model, f, first, n);
    CHECK_OK(tagc_fsdp_step(f, 0.01, stats));
    return loss;
}

typedef struct run {
    tagc_fsdp_options options;
    const char *dir;   /* NULL: no checkpoint */
    int from, save_at; /* steps */
    float *results[TOY_MAX_RANKS];
    double losses[STEPS][TOY_MAX_RANKS];
    tagc_fsdp_stats stats[STEPS][TOY_MAX_RANKS];
} run;

static inline void train(tagc_comm *comm, void *arg) {
    run *r = arg;
    int rank = tagc_comm_rank(comm), world_size = tagc_comm_world_size(comm);
    tagc_fsdp *f;
    CHECK_OK(tagc_fsdp_create(comm, model.tensors, model.n_tensors, &r->options, NULL, &f));
    CHECK_OK(tagc_fsdp_fill(f, toy_fill, NULL));
    if (r->from > 0) {
        char path[TAGC_PATH_BYTES], *extra;
        uint64_t step;
        CHECK_OK(tagc_checkpoint_find(comm, r->dir, path, sizeof path));
        CHECK_OK(tagc_checkpoint_load(f, comm, path, &step, &extra));
        CHECK(step == (uint64_t)r->from && strcmp(extra, "more") == 0);
        free(extra);
    }
    for (int step = r->from; step < STEPS; step++) {
        tagc_fsdp_stats *stats = &r->stats[step][rank];
        int is_due = tagc_fsdp_round_is_due(f);
        r->losses[step][rank] = step_of(f, step, rank, world_size, stats);
        CHECK(!stats->skipped && stats->is_round == is_due);
        if (step + 1 == r->save_at)
            CHECK_OK(tagc_checkpoint_save(f, comm, r->dir, (uint64_t)r->save_at, "more"));
    }
    CHECK_OK(tagc_fsdp_synchronize(f, &r->stats[STEPS - 1][rank]));
    CHECK_OK(tagc_fsdp_synchronize(f, NULL)); /* nothing is left to exchange */
    int every = r->options.local_steps, n_fragments = r->options.local_fragments;
    if (n_fragments == 1)
        CHECK(r->stats[STEPS - 1][rank].n_rounds == (uint64_t)((STEPS + every - 1) / every));
    toy_read(&model, f, r->results[rank]);
    tagc_fsdp_destroy(f);
}

static inline void open_run(run *r, int sharding, int n_local, int is_dense) {
    *r = (run){0};
    options_of(&r->options, sharding, n_local, is_dense);
    for (int i = 0; i < TOY_MAX_RANKS; i++) r->results[i] = calloc(toy_n_params(&model), sizeof(float));
}

static inline void close_run(run *r) {
    for (int i = 0; i < TOY_MAX_RANKS; i++) free(r->results[i]);
}

static inline void check_alike(const run *r, int world_size) {
    for (int rank = 1; rank < world_size; rank++)
        assert_memory_equal(r->results[rank], r->results[0], toy_n_params(&model) * sizeof(float));
}

static inline size_t place_of(int tensor) { /* in all tensors, end to end */
    size_t at = 0;
    for (int t = 0; t < tensor; t++) at += model.tensors[t].n_elems;
    return at;
}

/* Adds the values (n) of a part to sums (n_params), where its rank holds all of its tensors. */
static inline void add_values(const tagc_fsdp *f, const tagc_local_part *part, const float *values,
                              uint64_t n, double *sums) {
    uint64_t at = 0;
    for (int k = 0; n > 0 && k < part->n_members; k++) {
        int tensor = f->local->members[part->first_member + k];
        for (size_t j = 0; j < model.tensors[tensor].n_elems; j++)
            sums[place_of(tensor) + j] += (double)values[at++];
    }
    for (; at < n; at++) CHECK(values[at] == 0); /* padding */
}

static inline void add_residuals(const tagc_fsdp *f, double *sums) {
    for (int i = 0; i < f->local->n_parts; i++) {
        uint64_t n;
        const float *residual = tagc_reducer_residual(f->local->parts[i].reducer, &n);
        add_values(f, &f->local->parts[i], residual, n, sums);
    }
}

#endif
