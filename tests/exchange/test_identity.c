/* The identity of reducers and gatherers: ranks that begin them in different orders, over a transport with lanes and one without. */
#include "../lengths.h"
#include "../meeting.h"
#include "orders.h"
#include "ranks.h"
#include "whole.h"

#ifdef TAGC_SANITIZED
enum { IS_SHORT = 1 };
#else
enum { IS_SHORT = 0 };
#endif

static void local_body(rank_run *run) {
    order_check c = {.comm = run->comm, .odd = *(int *)run->shared};
    order_of_all(&c, 1, IS_SHORT);
    CHECK(run, c.failure[0] == 0);
    if (c.failure[0]) snprintf(run->failure, sizeof run->failure, "%s", c.failure);
}

TEST(test_orders) {
    static const int cases[][2] = {{2, 1}, {3, 0}, {8, 5}};
    for (int i = 0; i < 3; i++) run_ranks(cases[i][0], local_body, (void *)(uintptr_t)&cases[i][1]);
}

/* Without lanes. */
typedef struct without_lanes {
    meeting meeting;
    int odd;
} without_lanes;

static void callback_body(rank_run *run) {
    without_lanes *w = run->shared;
    seat self = {&w->meeting, run->rank, run->world_size};
    order_check c = {.odd = w->odd};
    CHECK(run, tagc_comm_create_callback(&meeting_ops, &self, run->rank, run->world_size, named_ranks(),
                                         &c.comm) == TAGC_OK);
    order_of_all(&c, 1, 1);
    if (c.failure[0]) snprintf(run->failure, sizeof run->failure, "%s", c.failure);
    tagc_comm_destroy(c.comm);
}

TEST(test_orders_without_lanes) {
    static const int cases[][2] = {{2, 0}, {3, 2}, {8, 1}};
    for (int i = 0; i < 3; i++) {
        without_lanes w = {.odd = cases[i][1]};
        pthread_barrier_init(&w.meeting.barrier, NULL, (unsigned)cases[i][0]);
        run_ranks(cases[i][0], callback_body, &w);
        pthread_barrier_destroy(&w.meeting.barrier);
    }
}

/* ---- units whose messages have other lengths ---- */

typedef struct unlike {
    int exchange, format;
    double sparsity;
    uint64_t shards[2];
    int is_gather;
} unlike;

static void unlike_body(rank_run *run) {
    const unlike *of = run->shared;
    uint64_t W = (uint64_t)run->world_size,
             largest = of->shards[0] > of->shards[1] ? of->shards[0] : of->shards[1];
    float *in = calloc(largest * W, sizeof *in),
          *out[2] = {calloc(largest * W, sizeof **out), calloc(largest * W, sizeof **out)};
    tagc_reducer *r[2] = {NULL};
    tagc_gatherer *g[2] = {NULL};
    int first = run->rank == 1;
    for (uint64_t i = 0; i < largest * W; i++) in[i] = order_value(1, run->rank, i);
    for (int u = 0; u < 2; u++) {
        tagc_reducer_options o;
        tagc_reducer_options_init(&o);
        o.n_elems = of->shards[u] * W;
        o.format = of->format;
        o.sparsity = of->sparsity;
        set_exchange(&o, of->exchange);
        tagc_gatherer_options p;
        tagc_gatherer_options_init(&p);
        p.n_elems = of->shards[u] * W;
        CHECK(run, (of->is_gather ? tagc_gatherer_create(run->comm, &p, &g[u])
                                  : tagc_reducer_create(run->comm, &o, &r[u])) == TAGC_OK);
    }
    for (int i = 0; i < 2; i++) {
        int u = i ? 1 - first : first;
        CHECK(run, (of->is_gather ? begin_gatherer(g[u], in, out[u]) : begin_reducer(r[u], in, out[u])) ==
                       TAGC_OK);
    }
    for (int u = 0; u < 2; u++) {
        tagc_status status = of->is_gather ? tagc_gatherer_end(g[u]) : tagc_reducer_end(r[u], NULL);
        CHECK(run, status == TAGC_ERR_MISMATCH || status == TAGC_ERR_TRANSPORT);
        /* which unit this rank exchanges, and which the other, or which lengths met */
        const char *text = tagc_last_error(), *noun = of->is_gather ? "gatherer" : "reducer";
        char own[64], other[64];
        snprintf(own, sizeof own, "this rank exchanges \"%s %d\" of %llu elements", noun, 1 + first,
                 (unsigned long long)(of->shards[first] * W));
        snprintf(other, sizeof other, "\"%s %d\" of %llu elements", noun, 2 - first,
                 (unsigned long long)(of->shards[1 - first] * W));
        int has_names = strstr(text, "\" of") && (strstr(text, other) || run->rank > 1);
        CHECK(run, has_names || (strstr(text, own) && strstr(text, "which expects")));
        if (!of->is_gather && largest > 1u << 20) CHECK(run, has_names); /* headers of one length */
    }
    for (int u = 0; u < 2; u++) {
        tagc_reducer_destroy(r[u]);
        tagc_gatherer_destroy(g[u]);
        free(out[u]);
    }
    free(in);
}

TEST(test_other_lengths) {
    static const unlike cases[] = {{WHOLE, -1, -1, {512, 1024}, 0},
                                   {TAGC_EXCHANGE_DIRECT, -1, 0.9, {512, 4096}, 0},
                                   {TAGC_EXCHANGE_PACKED, -1, 0.9, {512, 4096}, 0},
                                   {TAGC_EXCHANGE_DIRECT, -1, 0.98, {(1u << 20) + 64, 1u << 21}, 0},
                                   {TAGC_EXCHANGE_DIRECT, -1, -1, {512, 2048}, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int W = 2; W <= 3; W++) run_ranks(W, unlike_body, (void *)(uintptr_t)&cases[i]);
}
