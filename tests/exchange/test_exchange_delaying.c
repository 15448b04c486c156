/* The delaying network itself, and reducers on it: what arrives late arrives whole and in order, and ranks that only echo
 * cost a step as many messages as real ones. */
#include "../delaying.h"
#include "../lengths.h"
#include "../ranks.h"
#include "../transport/pattern.h"
#include "whole.h"

enum { N_RANKS = 5, N_ELEMS = N_RANKS * 512 };

typedef struct shared {
    delaying_network *network;
    tagc_local_group *group;
    int exchange;
    int n_transfers[N_RANKS];
    float outputs[2][N_RANKS][N_ELEMS / N_RANKS]; /* delayed, and not */
} shared;

static void storm_body(rank_run *run) {
    shared *all = run->shared;
    tagc_comm *comm;
    CHECK(run, delaying_comm(all->network, run->rank, NULL, &comm) == TAGC_OK);
    if (run->failure[0]) return;
    CHECK(run, pattern_storm(comm, 3, 20, 4000) == 0);
    double start_s = tagc_clock_s();
    /* The other ranks enter the second barrier after this rank's message of the first has come, and answer it. */
    for (int i = 0; i < 2; i++) CHECK(run, tagc_comm_barrier(comm) == TAGC_OK);
    CHECK(run, tagc_clock_s() - start_s >= 2 * all->network->options.latency_s);
    tagc_comm_destroy(comm);
}

static void storm(int has_lanes) {
    shared all = {.network = delaying_create(&(delaying_options){
                      .world_size = N_RANKS, .latency_s = 2e-3, .bytes_per_s = 1e8, .has_lanes = has_lanes})};
    run_threads(N_RANKS, storm_body, &all);
    delaying_destroy(all.network);
}

TEST(test_storm) {
    storm(1);
    storm(0);
}

static tagc_reducer *make_reducer(tagc_comm *comm, int exchange) {
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.n_elems = N_ELEMS;
    options.sparsity = 0.9;
    set_exchange(&options, exchange);
    tagc_reducer *reducer;
    return tagc_reducer_create(comm, &options, &reducer) == TAGC_OK ? reducer : NULL;
}

static void fill(float *gradient, int rank) {
    for (uint64_t i = 0; i < N_ELEMS; i++)
        gradient[i] = (float)(pattern_hash(5, (uint64_t)rank, i, 1) >> 40) / 16777216.0f - 0.5f;
}

static void step_body(rank_run *run) {
    shared *all = run->shared;
    float gradient[N_ELEMS];
    fill(gradient, run->rank);
    for (int i = 0; i < 2; i++) {
        tagc_comm *comm;
        tagc_status status = i ? tagc_comm_create_local(all->group, run->rank, NULL, &comm)
                               : delaying_comm(all->network, run->rank, NULL, &comm);
        CHECK(run, status == TAGC_OK);
        tagc_reducer *reducer = run->failure[0] ? NULL : make_reducer(comm, all->exchange);
        CHECK(run, reducer != NULL);
        if (!reducer) return;
        int n_before = all->network->ranks[run->rank].n_transfers;
        CHECK(run, run_reducer(reducer, gradient, all->outputs[i][run->rank], NULL) == TAGC_OK);
        if (i == 0) all->n_transfers[run->rank] = all->network->ranks[run->rank].n_transfers - n_before;
        tagc_reducer_destroy(reducer);
        tagc_comm_destroy(comm);
    }
    const float *delayed = all->outputs[0][run->rank], *prompt = all->outputs[1][run->rank];
    CHECK(run, memcmp(delayed, prompt, sizeof all->outputs[0][0]) == 0);
}

static int count_echoed(const delaying_options *options, int exchange) {
    delaying_options echo = *options;
    echo.is_echo = 1;
    delaying_network *network = delaying_create(&echo);
    tagc_comm *comm;
    float gradient[N_ELEMS], output[N_ELEMS / N_RANKS];
    fill(gradient, 0);
    assert_int_equal(delaying_comm(network, 0, NULL, &comm), TAGC_OK);
    tagc_reducer *reducer = make_reducer(comm, exchange);
    assert_non_null(reducer);
    int n_before = network->ranks[0].n_transfers;
    assert_int_equal(run_reducer(reducer, gradient, output, NULL), TAGC_OK);
    int n = network->ranks[0].n_transfers - n_before;
    tagc_reducer_destroy(reducer);
    tagc_comm_destroy(comm);
    delaying_destroy(network);
    return n;
}

TEST(test_reducers) {
    static const int exchanges[] = {WHOLE, TAGC_EXCHANGE_PACKED, TAGC_EXCHANGE_DIRECT};
    for (int i = 0; i < 6; i++) {
        delaying_options options = {.world_size = N_RANKS, .latency_s = 1e-3, .has_lanes = i % 2};
        shared *all = calloc(1, sizeof *all);
        assert_non_null(all);
        all->exchange = exchanges[i / 2];
        all->network = delaying_create(&options);
        assert_int_equal(tagc_local_group_create(N_RANKS, &all->group), TAGC_OK);
        run_threads(N_RANKS, step_body, all);
        assert_int_equal(count_echoed(&options, all->exchange), all->n_transfers[0]);
        tagc_local_group_destroy(all->group);
        delaying_destroy(all->network);
        free(all);
    }
}
