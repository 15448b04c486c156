/* Real engines over the real GPT-2, small, ranks as threads: what plans are held against. */
#ifndef TAGC_TESTS_PLAN_SMALL_GPT2_H
#define TAGC_TESTS_PLAN_SMALL_GPT2_H

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../check.h"
#include "../test.h"
#include "core/status.h"
#include "fsdp/fsdp.h"
#include "gpt2/gpt2.h"

enum { MAX_RANKS = 8 };

static inline uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* A run of `n_steps` optimizer steps over the same global batches whatever the number of ranks and micro-steps. */
typedef struct small_run {
    tagc_gpt2_config config;
    tagc_fsdp_options options;
    int world_size, n_sequences, n_tokens, n_steps; /* n_sequences: of the global batch of a step */
    double lr;
    void (*watch)(tagc_fsdp *fsdp, int rank); /* NULL, or told of each engine before the first step */
    /* results */
    tagc_fsdp_stats stats[MAX_RANKS]; /* of the last step */
    tagc_fsdp_memory memory;
    float *params; /* (n_params) of rank 0, or NULL; made by the caller */
    double loss;   /* mean of the last step's global batch */
    double norm;
    double loss_parts[MAX_RANKS];
    tagc_local_group *group;
} small_run;

typedef struct small_rank {
    small_run *run;
    int rank;
} small_rank;

static inline tagc_status small_fill(void *context, int tensor, size_t first, size_t n, float *values) {
    tagc_gpt2_init_tensor(context, tensor, 5, first, n, values);
    return TAGC_OK;
}

/* Makes sequence `index` of the run: a walk with some structure, the next token as target. */
static inline void small_sequence(const small_run *run, uint64_t index, int *tokens, int *targets) {
    int vocab = run->config.vocab_size, token = (int)(mix(index) % (uint64_t)vocab);
    for (int t = 0; t < run->n_tokens; t++) {
        tokens[t] = token;
        token = (token * 3 + 1 + (int)(mix(index * 1000 + (uint64_t)t) % 2)) % vocab;
        targets[t] = token;
    }
}

static inline void small_step(small_run *run, int rank, tagc_fsdp *f, tagc_gpt2 *model, uint64_t step) {
    int n_micro = run->options.n_micro_steps, n = run->n_sequences / (run->world_size * n_micro);
    int *tokens = malloc((size_t)(n * run->n_tokens) * 2 * sizeof *tokens),
        *targets = tokens + n * run->n_tokens;
    tagc_params params = {f, tagc_fsdp_use, tagc_fsdp_done, tagc_fsdp_grad, tagc_fsdp_grad_done};
    double sum = 0;
    for (int micro = 0; micro < n_micro; micro++) {
        uint64_t first = step * (uint64_t)run->n_sequences + (uint64_t)((micro * run->world_size + rank) * n);
        for (int i = 0; i < n; i++)
            small_sequence(run, first + (uint64_t)i, tokens + i * run->n_tokens, targets + i * run->n_tokens);
        double loss;
        CHECK_OK(tagc_fsdp_forward_begin(f, 1));
        CHECK_OK(tagc_gpt2_forward(model, &params, tokens, targets, n, run->n_tokens, &loss));
        CHECK_OK(tagc_fsdp_backward_begin(f));
        CHECK_OK(tagc_gpt2_backward(model, &params, 1));
        sum += loss / n_micro;
    }
    CHECK_OK(tagc_fsdp_step(f, run->lr, &run->stats[rank]));
    CHECK(!run->stats[rank].skipped);
    run->loss_parts[rank] = sum;
    free(tokens);
}

static inline void small_read(small_run *run, int rank, tagc_fsdp *f) {
    float *at = rank == 0 ? run->params : malloc(tagc_gpt2_n_params(&run->config) * sizeof *at), *mine = at;
    for (int i = 0; i < tagc_gpt2_n_tensors(&run->config); i++) {
        tagc_tensor_info info;
        tagc_gpt2_tensor(&run->config, i, &info);
        CHECK_OK(tagc_fsdp_read_tensor(f, i, at));
        at += info.n_elems;
    }
    if (rank != 0) free(mine);
}

static inline void *small_main(void *arg) {
    small_rank *self = arg;
    small_run *run = self->run;
    tagc_comm_options comm_options;
    tagc_comm_options_init(&comm_options);
    comm_options.timeout_s = 120;
    tagc_comm *comm;
    CHECK_OK(tagc_comm_create_local(run->group, self->rank, &comm_options, &comm));
    int n_tensors = tagc_gpt2_n_tensors(&run->config);
    tagc_tensor_info *tensors = calloc((size_t)n_tensors, sizeof *tensors);
    for (int i = 0; i < n_tensors; i++) tagc_gpt2_tensor(&run->config, i, &tensors[i]);
    tagc_fsdp *f;
    tagc_gpt2 *model;
    CHECK_OK(tagc_fsdp_create(comm, tensors, n_tensors, &run->options, NULL, &f));
    if (run->watch) run->watch(f, self->rank);
    CHECK_OK(tagc_fsdp_fill(f, small_fill, &run->config));
    CHECK_OK(tagc_gpt2_create(&run->config, run->n_sequences, run->n_tokens, &model));
    for (int step = 0; step < run->n_steps; step++) small_step(run, self->rank, f, model, (uint64_t)step);
    if (self->rank == 0) tagc_fsdp_memory_used(f, &run->memory);
    if (run->params) small_read(run, self->rank, f);
    tagc_gpt2_destroy(model);
    tagc_fsdp_destroy(f);
    tagc_comm_destroy(comm);
    free(tensors);
    return NULL;
}

static inline void small_train(small_run *run) {
    tagc_fsdp_options_resolve(&run->options); /* for plans of the same */
    small_rank ranks[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    CHECK_OK(tagc_local_group_create(run->world_size, &run->group));
    for (int r = 0; r < run->world_size; r++) {
        ranks[r] = (small_rank){run, r};
        CHECK(pthread_create(&threads[r], NULL, small_main, &ranks[r]) == 0);
    }
    run->loss = 0;
    for (int r = 0; r < run->world_size; r++) {
        pthread_join(threads[r], NULL);
        run->loss += run->loss_parts[r] / run->world_size;
    }
    run->norm = run->stats[0].grad_norm;
    tagc_local_group_destroy(run->group);
}

#endif
