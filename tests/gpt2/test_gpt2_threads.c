/* Ranks that live in one process compute side by side: their results must be those of a rank alone, to the
 * bit. */
#include "plain_params.h"

#include <cblas.h>
#include <pthread.h>
#include <string.h>

enum { N_THREADS = 3, N_BATCH = 2, N_TOKENS = 70, N_STEPS = 3 };

typedef struct work {
    uint64_t seed;
    double loss;
    plain_params *plain;
} work;

static const tagc_gpt2_config config = {2, 2, 32, 80, 300, 0};

static void *run(void *arg) {
    work *w = arg;
    int tokens[N_BATCH * N_TOKENS], targets[N_BATCH * N_TOKENS];
    tagc_gpt2 *model;
    w->plain = plain_create(&config, w->seed);
    assert_int_equal(tagc_gpt2_create(&config, N_BATCH, N_TOKENS, &model), TAGC_OK);
    for (int step = 0; step < N_STEPS; step++) {
        for (int i = 0; i < N_BATCH * N_TOKENS; i++) {
            tokens[i] = (i * 7 + step + (int)w->seed) % config.vocab_size;
            targets[i] = (i * 11 + step) % config.vocab_size;
        }
        w->loss = plain_forward(w->plain, model, tokens, targets, N_BATCH, N_TOKENS);
        plain_backward(w->plain, model, 1);
    }
    tagc_gpt2_destroy(model);
    return NULL;
}

TEST(test_side_by_side) {
    work alone[N_THREADS], together[N_THREADS];
    pthread_t threads[N_THREADS];
    for (int i = 0; i < N_THREADS; i++) {
        alone[i] = together[i] = (work){.seed = (uint64_t)i};
        run(&alone[i]);
    }
    for (int i = 0; i < N_THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, run, &together[i]), 0);
    for (int i = 0; i < N_THREADS; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < N_THREADS; i++) {
        assert_true(alone[i].loss == together[i].loss);
        for (int t = 0; t < alone[i].plain->n_tensors; t++)
            assert_memory_equal(alone[i].plain->grads[t], together[i].plain->grads[t],
                                alone[i].plain->info[t].n_elems * sizeof(float));
        plain_destroy(alone[i].plain);
        plain_destroy(together[i].plain);
    }
}

int main(void) {
    openblas_set_num_threads(1); /* more would add in an order of their own */
    return test_run(NULL, NULL);
}
