/* Many steps and a gather under way at once over a network that delays every message for another while, begun in random orders and
 * ended in others: bit for bit what the same steps come to one by one, at any number of ranks. And nothing is left waiting when a rank
 * gives up. */
#include "../delaying.h"
#include "../lengths.h"
#include "../repeats.h"
#include "exchange/direct/direct.h"
#include "ranks.h"
#include "transport/comm_private.h"
#include "whole.h"

#include <math.h>
#include <stdatomic.h>

enum {
    N_STEPS = 3,
    CHUNK = 262144,
    LARGE_UNIT = 10, /* and those behind it: of many elements */
    N_UNITS = 13,
    PERIOD = 65537, /* of the gradients of large units: a prime, so that no two chunks have the same */
    NAN_UNIT = 3,   /* in step 1, rank 1 */
    N_GATHERED = 700
};

/* Two of one size share spares; the large direct one has more ranks than fit into one parcel, and few buffers; the first of the large
 * whole ones is longer than what such a step has under way. */
static const struct {
    int exchange, output, format;
    uint64_t shard;
    double sparsity;
} plan[N_UNITS] = {
    {TAGC_EXCHANGE_DIRECT, 0, -1, 640, 0.95},
    {TAGC_EXCHANGE_DIRECT, 1, -1, 640, 0.9},
    {TAGC_EXCHANGE_PACKED, 0, -1, 640, 0.9},
    {TAGC_EXCHANGE_PACKED, 1, -1, 640, 0.9},
    {WHOLE, 1, TAGC_FORMAT_FP32, 5000, -1},
    {TAGC_EXCHANGE_SKETCH, 1, -1, 300, 0.9},
    {TAGC_EXCHANGE_DIRECT, 1, TAGC_FORMAT_FP32, 200, 0.8},
    {TAGC_EXCHANGE_DIRECT, 1, -1, 300, 0},
    {WHOLE, 0, TAGC_FORMAT_FP32, 64, -1},
    {WHOLE, 0, TAGC_FORMAT_BF16, 3000, -1},
    {TAGC_EXCHANGE_DIRECT, 0, -1, 0, 0.99}, /* 2^20 elements and a few, whatever the number of ranks */
    {WHOLE, 0, TAGC_FORMAT_FP32, 4 * CHUNK + 5, -1},
    {WHOLE, 1, TAGC_FORMAT_BF16, CHUNK + 1, -1},
};

typedef struct shared {
    delaying_network *network; /* NULL: one by one, over the local transport */
    float *outputs[MAX_RANKS][N_STEPS][N_UNITS], *residuals[MAX_RANKS][N_UNITS];
    int first_unit, end_unit;
} shared;

static size_t elems_of(int u, int world_size) {
    uint64_t n = plan[u].shard ? plan[u].shard * (uint64_t)world_size : (1u << 20) + 16 * 1024;
    return (size_t)tagc_padded_elems(n, world_size);
}

static void fill(float *gradient, size_t n, int rank, int step, int u) {
    for (size_t i = 0; i < n && i < PERIOD; i++)
        gradient[i] = random_gradient((uint64_t)(step * N_UNITS + u), rank, i);
    for (size_t i = PERIOD; i < n; i++) gradient[i] = gradient[i - PERIOD];
    if (u == NAN_UNIT && step == 1 && rank == 1) gradient[n / 2] = NAN;
}

static tagc_reducer *make(rank_run *run, tagc_comm *comm, int u) {
    tagc_reducer_options options;
    tagc_reducer *reducer = NULL;
    tagc_reducer_options_init(&options);
    options.output = plan[u].output;
    options.format = plan[u].format;
    options.sparsity = plan[u].sparsity;
    set_exchange(&options, plan[u].exchange);
    options.n_elems = elems_of(u, run->world_size);
    if (!CHECK(run, tagc_reducer_create(comm, &options, &reducer) == TAGC_OK)) return NULL;
    if (plan[u].shard == 0) { /* buffers are laid out again, with the smallest window */
        tagc_direct_of(reducer)->travel.window_bytes = 1;
        CHECK(run, tagc_reducer_set_sparsity(reducer, 0.5) == TAGC_OK);
        CHECK(run, tagc_reducer_set_sparsity(reducer, options.sparsity) == TAGC_OK);
        const tagc_direct *d = tagc_direct_of(reducer);
        CHECK(run,
              run->world_size < 6 || !tagc_comm_has_lanes(comm) || d->travel.window < d->travel.n_parcels);
    }
    return reducer;
}

/* The i-th of n in an order that `seed` shuffles. */
static int shuffled(uint64_t seed, int i, int n) {
    int order[N_UNITS];
    for (int k = 0; k < n; k++) order[k] = k;
    for (int k = n - 1; k > 0; k--) {
        int other = (int)(mix(seed * 64 + (uint64_t)k) % (uint64_t)(k + 1)), kept = order[k];
        order[k] = order[other];
        order[other] = kept;
    }
    return order[i];
}

/* Of all ranks, in fp32. */
static tagc_gatherer *make_gatherer(rank_run *run, tagc_comm *comm) {
    tagc_gatherer_options options;
    tagc_gatherer *gatherer = NULL;
    tagc_gatherer_options_init(&options);
    options.n_elems = N_GATHERED * (uint64_t)run->world_size;
    CHECK(run, tagc_gatherer_create(comm, &options, &gatherer) == TAGC_OK);
    return gatherer;
}

static void steps(rank_run *run, tagc_comm *comm, int is_together) {
    shared *all = run->shared;
    int first = all->first_unit, n = all->end_unit - first, rank = run->rank;
    tagc_reducer *reducers[N_UNITS] = {NULL};
    float *gradients[N_UNITS] = {NULL}, shard[N_GATHERED],
          *full = calloc(N_GATHERED * MAX_RANKS, sizeof *full);
    for (int u = first; u < all->end_unit; u++) {
        reducers[u] = make(run, comm, u);
        gradients[u] = malloc(elems_of(u, run->world_size) * sizeof(float));
    }
    tagc_gatherer *gatherer = make_gatherer(run, comm);
    for (int step = 0; step < N_STEPS && !run->failure[0]; step++) {
        for (int u = first; u < all->end_unit; u++)
            fill(gradients[u], elems_of(u, run->world_size), rank, step, u);
        for (int i = 0; i < N_GATHERED; i++) shard[i] = (float)(step + rank + i);
        for (int i = 0; i < n; i++) {
            int u = first + shuffled((uint64_t)step, i, n);
            if (is_together && mix((uint64_t)(step * 1000 + rank * 50 + i)) % 3 == 0)
                nanosleep(&(struct timespec){.tv_nsec = 300000}, NULL);
            CHECK(run, begin_reducer(reducers[u], gradients[u], all->outputs[rank][step][u]) == TAGC_OK);
            if (i == n / 2) CHECK(run, begin_gatherer(gatherer, shard, full) == TAGC_OK);
            if (!is_together) CHECK(run, tagc_reducer_end(reducers[u], NULL) == TAGC_OK);
        }
        CHECK(run, tagc_gatherer_end(gatherer) == TAGC_OK);
        for (int i = 0; i < N_GATHERED * run->world_size; i++)
            CHECK(run, full[i] == (float)(step + i / N_GATHERED + i % N_GATHERED));
        for (int i = 0; i < n && is_together; i++) {
            int u = first + shuffled((uint64_t)(step * 100 + rank + 7), i, n);
            CHECK(run, tagc_reducer_end(reducers[u], NULL) == TAGC_OK);
        }
    }
    for (int u = first; u < all->end_unit; u++) {
        residual_to(reducers[u], all->residuals[rank][u]);
        tagc_reducer_destroy(reducers[u]);
        free(gradients[u]);
    }
    tagc_gatherer_destroy(gatherer);
    free(full);
}

static void body(rank_run *run) {
    shared *all = run->shared;
    tagc_comm *comm;
    if (!all->network) {
        steps(run, run->comm, 0);
        return;
    }
    if (!CHECK(run, delaying_comm(all->network, run->rank, NULL, &comm) == TAGC_OK)) return;
    steps(run, comm, 1);
    tagc_comm_destroy(comm);
}

static void run_units(shared *all, int world_size, const delaying_options *delays) {
    for (int r = 0; r < world_size; r++)
        for (int u = all->first_unit; u < all->end_unit; u++) {
            all->residuals[r][u] = calloc(elems_of(u, world_size), sizeof(float));
            for (int s = 0; s < N_STEPS; s++)
                all->outputs[r][s][u] = calloc(elems_of(u, world_size), sizeof(float));
        }
    all->network = delays ? delaying_create(delays) : NULL;
    run_ranks(world_size, body, all);
    if (delays) delaying_destroy(all->network);
}

static void compare(shared *a, shared *b, int world_size) {
    for (int r = 0; r < world_size; r++)
        for (int u = a->first_unit; u < a->end_unit; u++) {
            size_t n_bytes = elems_of(u, world_size) * sizeof(float);
            assert_memory_equal(a->residuals[r][u], b->residuals[r][u], n_bytes);
            for (int s = 0; s < N_STEPS; s++)
                assert_memory_equal(a->outputs[r][s][u], b->outputs[r][s][u], n_bytes);
        }
}

static void destroy(shared *all, int world_size) {
    for (int r = 0; r < world_size; r++)
        for (int u = all->first_unit; u < all->end_unit; u++) {
            free(all->residuals[r][u]);
            for (int s = 0; s < N_STEPS; s++) free(all->outputs[r][s][u]);
        }
}

TEST(test_random_orders) {
    static const int worlds[] = {2, 3, 6, 1, 16};
    for (int w = 0; w < REPEATS(5, 3, 2); w++) {
        int W = worlds[w], end_unit = W == 3 ? N_UNITS : W < 16 ? LARGE_UNIT + 1 : LARGE_UNIT;
        shared alone = {.end_unit = end_unit};
        run_units(&alone, W, NULL);
        for (int has_lanes = 0; has_lanes < 2; has_lanes++) {
            shared together = {.end_unit = end_unit};
            run_units(&together, W,
                      &(delaying_options){
                          .world_size = W, .latency_s = 2e-4, .jitter_s = 1e-3, .has_lanes = has_lanes});
            compare(&alone, &together, W);
            destroy(&together, W);
        }
        destroy(&alone, W);
    }
}

/* ---- news that come between two questions ---- */

static atomic_int draws_late_news, n_late; /* whether there are any, and how many there were */

/* Stand between the exchanges and the comm (the linker's --wrap). The first n questions about a message are answered no, whether it
 * has come or not, and n is drawn when the message is posted. The last of these answers takes until the message has come: the next
 * question, a moment later, is answered yes. So what a rank is told depends on what it asks, and never on the machine's speed. */
void __real_tagc_comm_post(tagc_comm *comm, tagc_lane lane, tagc_ticket *ticket);
void __wrap_tagc_comm_post(tagc_comm *comm, tagc_lane lane, tagc_ticket *ticket);
int __real_tagc_comm_is_done(tagc_comm *comm, const tagc_ticket *ticket);
int __wrap_tagc_comm_is_done(tagc_comm *comm, const tagc_ticket *ticket);

/* Of the thread that posts messages and asks about them: how often each is still answered no. */
static int *left_of(const tagc_ticket *ticket) {
    enum { MOST = 64 };
    static _Thread_local struct {
        const tagc_ticket *ticket;
        int n_left;
    } posted[MOST];
    int i = 0;
    while (i < MOST - 1 && posted[i].ticket && posted[i].ticket != ticket) i++;
    if (posted[i].ticket != ticket) posted[i].n_left = 0;
    posted[i].ticket = ticket;
    return &posted[i].n_left;
}

void __wrap_tagc_comm_post(tagc_comm *comm, tagc_lane lane, tagc_ticket *ticket) {
    static _Thread_local int n_posted;
    /* Ranks differ, so that each number meets each message on some rank. */
    if (atomic_load(&draws_late_news)) *left_of(ticket) = 1 + (comm->rank + n_posted++) % 5;
    __real_tagc_comm_post(comm, lane, ticket);
}

int __wrap_tagc_comm_is_done(tagc_comm *comm, const tagc_ticket *ticket) {
    int *n_left = atomic_load(&draws_late_news) ? left_of(ticket) : NULL;
    if (!n_left || !*n_left) return __real_tagc_comm_is_done(comm, ticket);
    if (--*n_left == 0) {
        while (!__real_tagc_comm_is_done(comm, ticket))
            nanosleep(&(struct timespec){.tv_nsec = 250000}, NULL);
        atomic_fetch_add(&n_late, 1);
    }
    pthread_mutex_lock(&comm->lock); /* who is told no asks again when something has come */
    comm->n_done++;
    pthread_mutex_unlock(&comm->lock);
    return 0;
}

/* A large unit with a small window, all of which are used before the first header comes: the body of an older parcel has to leave
 * before its memory is written again, however the news of its header fall between the questions. */
TEST(test_news_between_two_questions) {
    enum { W = 7 };
    shared alone = {.first_unit = LARGE_UNIT, .end_unit = LARGE_UNIT + 1}, late = alone;
    run_units(&alone, W, NULL);
    atomic_store(&draws_late_news, 1);
    run_units(&late, W, &(delaying_options){.world_size = W, .latency_s = 1e-3, .has_lanes = 1});
    atomic_store(&draws_late_news, 0);
    compare(&alone, &late, W);
    assert_true(atomic_load(&n_late) >=
                W * N_STEPS); /* each rank asks about the agreement of each step until it has come */
    destroy(&late, W);
    destroy(&alone, W);
}

/* ---- a rank gives up ---- */

/* Everything is under way when rank 1 does, before its unit `at`; what is never ended goes with its reducer. */
typedef struct giving_up {
    int at;
    pthread_barrier_t all_made; /* else the others may be making theirs still, and fail there */
} giving_up;

static void give_up_body(rank_run *run) {
    giving_up *g = run->shared;
    tagc_reducer *reducers[LARGE_UNIT];
    float *gradients[LARGE_UNIT], *outputs[LARGE_UNIT];
    for (int u = 0; u < LARGE_UNIT; u++) {
        size_t n = elems_of(u, run->world_size);
        reducers[u] = make(run, run->comm, u);
        gradients[u] = malloc(n * sizeof(float));
        outputs[u] = malloc(n * sizeof(float));
        fill(gradients[u], n, run->rank, 0, u);
    }
    pthread_barrier_wait(&g->all_made);
    for (int u = 0; u < LARGE_UNIT; u++) {
        if (run->rank == 1 && u == g->at) tagc_comm_abort(run->comm, "enough");
        CHECK(run, begin_reducer(reducers[u], gradients[u], outputs[u]) == TAGC_OK);
    }
    for (int u = LARGE_UNIT - 1; u > 2; u--) {
        tagc_status status = tagc_reducer_end(reducers[u], NULL);
        CHECK(run, status == TAGC_ERR_TRANSPORT || (status == TAGC_OK && u < g->at));
    }
    for (int u = 0; u < LARGE_UNIT; u++) {
        tagc_reducer_destroy(reducers[u]);
        free(gradients[u]);
        free(outputs[u]);
    }
}

TEST(test_an_abort_ends_every_wait) {
    for (int at = 1; at < LARGE_UNIT; at += REPEATS(1, 1, 4)) {
        giving_up g = {.at = at};
        pthread_barrier_init(&g.all_made, NULL, 3);
        run_ranks(3, give_up_body, &g);
        pthread_barrier_destroy(&g.all_made);
    }
}
