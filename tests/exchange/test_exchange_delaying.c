/* Ranks of the delaying network that only echo cost a step as many messages as real ones. That what arrives late arrives whole and in
 * order, test_exchange_interleaved.c shows. */
#include "../delaying.h"
#include "../lengths.h"
#include "ranks.h"
#include "whole.h"

enum { N_RANKS = 5, N_ELEMS = N_RANKS * 512 };

typedef struct shared {
    delaying_network *network;
    int exchange;
    int n_transfers[N_RANKS];
} shared;

static tagc_reducer *make_reducer(tagc_comm *comm, int exchange) {
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.n_elems = N_ELEMS;
    options.sparsity = 0.9;
    set_exchange(&options, exchange);
    tagc_reducer *reducer;
    return tagc_reducer_create(comm, &options, &reducer) == TAGC_OK ? reducer : NULL;
}

static int count_step(tagc_comm *comm, const delaying_rank *self, int exchange) {
    float gradient[N_ELEMS], output[N_ELEMS / N_RANKS];
    for (uint64_t i = 0; i < N_ELEMS; i++) gradient[i] = random_gradient(5, self->rank, i);
    tagc_reducer *reducer = make_reducer(comm, exchange);
    if (!reducer) return -1;
    int n_before = self->n_transfers;
    tagc_status status = run_reducer(reducer, gradient, output, NULL);
    int n = self->n_transfers - n_before;
    tagc_reducer_destroy(reducer);
    return status == TAGC_OK ? n : -1;
}

static void step_body(rank_run *run) {
    shared *all = run->shared;
    tagc_comm *comm;
    if (!CHECK(run, delaying_comm(all->network, run->rank, NULL, &comm) == TAGC_OK)) return;
    double start_s = tagc_clock_s();
    all->n_transfers[run->rank] = count_step(comm, &all->network->ranks[run->rank], all->exchange);
    CHECK(run, tagc_clock_s() - start_s >= 2 * all->network->options.latency_s);
    tagc_comm_destroy(comm);
}

static int count_echoed(const delaying_options *options, int exchange) {
    delaying_options echo = *options;
    echo.is_echo = 1;
    delaying_network *network = delaying_create(&echo);
    tagc_comm *comm;
    assert_int_equal(delaying_comm(network, 0, NULL, &comm), TAGC_OK);
    int n = count_step(comm, &network->ranks[0], exchange);
    tagc_comm_destroy(comm);
    delaying_destroy(network);
    return n;
}

TEST(test_reducers) {
    static const int exchanges[] = {WHOLE, TAGC_EXCHANGE_PACKED, TAGC_EXCHANGE_DIRECT};
    for (int i = 0; i < 6; i++) {
        delaying_options options = {.world_size = N_RANKS, .latency_s = 1e-3, .has_lanes = i % 2};
        shared all = {.exchange = exchanges[i / 2], .network = delaying_create(&options)};
        run_threads(N_RANKS, step_body, &all);
        assert_true(all.n_transfers[0] > 0);
        assert_int_equal(count_echoed(&options, all.exchange), all.n_transfers[0]);
        delaying_destroy(all.network);
    }
}
