/* Steps of a reducer over a network of the test's own, which damages what it is told to: the second of three. */
#ifndef TAGC_TESTS_EXCHANGE_NETWORK_H
#define TAGC_TESTS_EXCHANGE_NETWORK_H

#include "../lengths.h"
#include "../take_from.h"
#include "oracle.h"
#include "paper.h"
#include "ranks.h"

#include <errno.h>
#include <time.h>

/* ---- a network of the test's own, which damages what it is told to ---- */

/* Damages a message only in the call that was asked for, and only where `from` sends anything to `to`. */
typedef void (*damage_fn)(uint8_t *bytes, uint64_t n_bytes, uint64_t where);

typedef struct network {
    pthread_mutex_t lock;
    pthread_cond_t turn;
    int world_size, n_here, is_down;
    uint64_t round;
    const tagc_transfer *transfers[MAX_RANKS];
    /* what to damage: the n-th call of rank `to`, in what `from` sends */
    int call, n_more, from, to; /* n_more: calls after it that are damaged, too */
    uint64_t where;
    damage_fn damage;
    int n_damaged, is_message; /* it was a header without a body */
    int first_call, n_calls;   /* of the second step of rank 0 */
} network;

typedef struct endpoint {
    network *net;
    int rank, n_calls;
} endpoint;

static inline tagc_status meet(network *net) {
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += 5;
    pthread_mutex_lock(&net->lock);
    uint64_t round = net->round;
    if (++net->n_here == net->world_size) {
        net->n_here = 0;
        net->round++;
        pthread_cond_broadcast(&net->turn);
    }
    while (round == net->round && !net->is_down)
        if (pthread_cond_timedwait(&net->turn, &net->lock, &end) == ETIMEDOUT) net->is_down = 1;
    tagc_status status =
        round != net->round ? TAGC_OK : tagc_report(TAGC_ERR_TRANSPORT, "the network is down");
    pthread_mutex_unlock(&net->lock);
    return status;
}

/* Whoever is through with it leaves, and the others need not wait until they are sure. */
static inline void leave(network *net) {
    pthread_mutex_lock(&net->lock);
    net->is_down = 1;
    pthread_cond_broadcast(&net->turn);
    pthread_mutex_unlock(&net->lock);
}

static inline tagc_status network_exchange(void *context, const tagc_transfer *transfer) {
    endpoint *end = context;
    network *net = end->net;
    net->transfers[end->rank] = transfer;
    tagc_status status = meet(net);
    if (status != TAGC_OK) return status;
    /* Who sees different lengths stays, too, until all have read: what they read is freed after a failure. */
    int same = 1;
    for (int s = 0; s < net->world_size; s++) {
        arrival got;
        if (s == end->rank) continue;
        same = take_from(net->transfers[s], transfer, s, end->rank, &got);
        if (!same) break;
        if (net->damage && got.n_bytes && s == net->from && end->rank == net->to &&
            end->n_calls >= net->call && end->n_calls <= net->call + net->n_more) {
            net->is_message |= got.n_bytes == 64 && memcmp(got.bytes, "TAGC", 4) == 0;
            net->damage(got.bytes, got.n_bytes, net->where);
            net->n_damaged++;
        }
    }
    end->n_calls++;
    status = meet(net);
    return same ? status : tagc_report(TAGC_ERR_TRANSPORT, "lengths differ");
}

static const tagc_callback_ops network_ops = {.abi = TAGC_TRANSPORT_ABI, .exchange = network_exchange};

/* ---- one damaged step between two good ones ---- */

typedef struct trial {
    tagc_reducer_options options;
    tagc_paper_options paper;
    network net;
    tagc_status statuses[MAX_RANKS];
    int is_broken[MAX_RANKS]; /* the comm */
    char texts[MAX_RANKS][512];
} trial;

static inline void trial_body(rank_run *run) {
    trial *t = run->shared;
    int rank = run->rank;
    endpoint end = {.net = &t->net, .rank = rank};
    size_t n = (size_t)t->options.n_elems;
    float *gradient = malloc(n * sizeof *gradient), *output = malloc(n * sizeof *output),
          *before = malloc(n * sizeof *before), *after = malloc(n * sizeof *after);
    tagc_comm *comm;
    tagc_reducer *reducer = NULL;
    CHECK(run, tagc_comm_create_callback(&network_ops, &end, rank, run->world_size, named_ranks(), &comm) ==
                   TAGC_OK);
    tagc_reducer_options options = t->options;
    tagc_paper_options paper = t->paper;
    attach_paper(&options, &paper);
    CHECK(run, tagc_reducer_create(comm, &options, &reducer) == TAGC_OK);
    for (size_t i = 0; i < n; i++) gradient[i] = random_gradient(1, rank, i);
    CHECK(run, run_reducer(reducer, gradient, output, NULL) == TAGC_OK);
    uint64_t n_residual = residual_to(reducer, before);
    int first_call = end.n_calls;
    tagc_status status = run_reducer(reducer, gradient, output, NULL);
    if (rank == 0) t->net.first_call = first_call;
    if (rank == 0) t->net.n_calls = end.n_calls - first_call;
    t->is_broken[rank] = status == TAGC_ERR_TRANSPORT || tagc_comm_failed_rank(comm) >= 0;
    if (t->is_broken[rank]) leave(&t->net);
    t->statuses[rank] = status;
    if (status != TAGC_OK) snprintf(t->texts[rank], sizeof t->texts[0], "%s", tagc_last_error());
    residual_to(reducer, after);
    if (status != TAGC_OK) CHECK(run, memcmp(before, after, n_residual * sizeof *before) == 0);
    if (status == TAGC_ERR_CORRUPT && !t->is_broken[rank]) {
        tagc_status next = run_reducer(reducer, gradient, output, NULL);
        CHECK(run, next == TAGC_OK || next == TAGC_ERR_TRANSPORT);
    }
    tagc_reducer_destroy(reducer);
    tagc_comm_destroy(comm);
    free(gradient);
    free(output);
    free(before);
    free(after);
}

static inline void run_trial(trial *t, int world_size) {
    t->net.world_size = world_size;
    pthread_mutex_init(&t->net.lock, NULL);
    pthread_cond_init(&t->net.turn, NULL);
    run_threads(world_size, trial_body, t);
    pthread_mutex_destroy(&t->net.lock);
    pthread_cond_destroy(&t->net.turn);
}

static inline trial make_trial(int world_size, int exchange, int index) {
    trial t = {0};
    tagc_reducer_options_init(&t.options);
    tagc_paper_options_init(&t.paper);
    t.options.n_elems = 2048 * (uint64_t)world_size;
    t.options.exchange = exchange;
    t.paper.index = index;
    t.paper.cells = TAGC_CELLS_FIXED;
    t.options.sparsity = 0.95;
    return t;
}

static inline void flip_bit(uint8_t *bytes, uint64_t n_bytes, uint64_t where) {
    bytes[where / 8 % n_bytes] ^= (uint8_t)(1 << where % 8);
}

#endif
