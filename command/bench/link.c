/* tagc bench --only link: latency and bandwidth of messages between two ranks, and between all. Sizes grow until a message takes
 * long enough to time, so that a slow link takes no minutes and a fast one is still measured well.
 *
 * Over MPI these are plain MPI messages. Within one process the local transport copies them. */
#include "bench/bench.h"
#include "bench/wire.h"

#include "core/clock.h"
#include "core/memory.h"
#include "core/status.h"
#include "launch/human.h"
#include "launch/over_ranks.h"
#include "transport/comm.h"
#include <math.h>
#include <stdlib.h>

enum {
    N_TURNS = 5,
    FIRST_BYTES = 16 << 10,
    MOST_BYTES = 32 << 20,
    ALL_BYTES = 256 << 20,
    LARGE_BYTES = 128 << 10, /* of a message whose latency is told */
    MAX_PAIRS = 3
};

static const double long_enough_s = 0.04; /* time of a message minus that of one of a quarter of its size */
static const double turn_s = 0.15;

/* ---- transfers ---- */

tagc_status tagc_wire_create(tagc_comm *comm, int is_mpi, double timeout_s, uint64_t n_max, tagc_wire *out) {
    size_t world_size = (size_t)tagc_comm_world_size(comm);
    void *send = NULL, *recv = NULL;
    if (n_max == 0) n_max = ALL_BYTES / world_size < MOST_BYTES ? ALL_BYTES / world_size : MOST_BYTES;
    *out = (tagc_wire){.comm = comm, .is_mpi = is_mpi, .timeout_s = timeout_s, .n_max = n_max};
    out->n_send = calloc(world_size, sizeof *out->n_send);
    out->n_recv = calloc(world_size, sizeof *out->n_recv);
    out->sends = calloc(world_size, sizeof *out->sends);
    out->receives = calloc(world_size, sizeof *out->receives);
    if (!out->n_send || !out->n_recv || !out->sends || !out->receives)
        return tagc_fail(TAGC_ERR_MEMORY, "out of memory for messages to %zu ranks", world_size);
    TAGC_TRY(tagc_memory_create(n_max, "messages", &send));
    out->send = send;
    TAGC_TRY(tagc_memory_create(world_size * n_max, "messages", &recv));
    out->recv = recv;
    return TAGC_OK;
}

void tagc_wire_destroy(tagc_wire *wire) {
    tagc_memory_destroy(wire->send);
    tagc_memory_destroy(wire->recv);
    free(wire->n_send);
    free(wire->n_recv);
    free(wire->sends);
    free(wire->receives);
    *wire = (tagc_wire){0};
}

static tagc_status exchange(const tagc_wire *wire) {
    if (wire->is_mpi) return tagc_plain_mpi_exchange(wire);
    uint32_t n_sends = 0, n_receives = 0;
    for (int peer = 0; peer < tagc_comm_world_size(wire->comm); peer++) {
        if (wire->n_send[peer])
            wire->sends[n_sends++] = (tagc_part){.peer = peer, .n_bytes = wire->n_send[peer]};
        if (wire->n_recv[peer])
            wire->receives[n_receives++] = (tagc_part){
                .peer = peer, .n_bytes = wire->n_recv[peer], .offset = (uint64_t)peer * wire->n_max};
    }
    tagc_ticket ticket = {.transfer = {.n_sends = n_sends,
                                       .n_receives = n_receives,
                                       .sends = wire->sends,
                                       .receives = wire->receives,
                                       .send = wire->send,
                                       .recv = wire->recv},
                          .leg = TAGC_LEG_VALUES,
                          .tag = UINT64_MAX};
    tagc_comm_post(wire->comm, TAGC_LANE_REDUCE, &ticket);
    return tagc_comm_wait(wire->comm, &ticket);
}

static void clear(tagc_wire *wire) {
    for (int rank = 0; rank < tagc_comm_world_size(wire->comm); rank++)
        wire->n_send[rank] = wire->n_recv[rank] = 0;
}

static tagc_status one_way(tagc_wire *wire, int from, int to, uint64_t n_bytes) {
    int rank = tagc_comm_rank(wire->comm);
    clear(wire);
    if (rank == from) wire->n_send[to] = n_bytes;
    if (rank == to) wire->n_recv[from] = n_bytes;
    return exchange(wire);
}

/* ---- patterns ---- */

typedef enum pattern { PING_PONG, ONE_WAY, BOTH_WAYS, ALL } pattern;

static tagc_status run(tagc_wire *wire, pattern kind, int a, int b, uint64_t n_bytes, int n_times) {
    int rank = tagc_comm_rank(wire->comm);
    for (int i = 0; i < n_times; i++) {
        if (kind == PING_PONG || kind == ONE_WAY) {
            TAGC_TRY(one_way(wire, a, b, n_bytes));
            /* A send is complete only when the receiver has answered. */
            if (kind == PING_PONG || i + 1 == n_times) TAGC_TRY(one_way(wire, b, a, 1));
            continue;
        }
        clear(wire);
        for (int peer = 0; peer < tagc_comm_world_size(wire->comm); peer++) {
            int meet = peer != rank && (kind == ALL || (rank == a && peer == b) || (rank == b && peer == a));
            wire->n_send[peer] = wire->n_recv[peer] = meet ? n_bytes : 0;
        }
        TAGC_TRY(exchange(wire));
    }
    return TAGC_OK;
}

/* Seconds of the slowest rank. */
static tagc_status timed(tagc_wire *wire, pattern kind, int a, int b, uint64_t n_bytes, int n_times,
                         double *seconds) {
    TAGC_TRY(tagc_comm_barrier(wire->comm));
    double start_s = tagc_clock_s();
    TAGC_TRY(run(wire, kind, a, b, n_bytes, n_times));
    *seconds = tagc_clock_s() - start_s;
    return tagc_max_over_ranks(wire->comm, seconds, 1);
}

tagc_status tagc_wire_all(tagc_wire *wire, uint64_t n_bytes, int n_times, double *seconds) {
    return timed(wire, ALL, 0, 0, n_bytes, n_times, seconds);
}

static int times_in(double budget_s, double once_s, int most) {
    double times = budget_s / (once_s > 1e-9 ? once_s : 1e-9);
    return times < 1 ? 1 : times > most ? most : (int)times;
}

/* The faster of two runs: the first message of a size opens TCP's window. */
static tagc_status timed_twice(tagc_wire *wire, pattern kind, int a, int b, uint64_t n_bytes,
                               double *seconds) {
    double again_s;
    TAGC_TRY(timed(wire, kind, a, b, n_bytes, 1, seconds));
    TAGC_TRY(timed(wire, kind, a, b, n_bytes, 1, &again_s));
    *seconds = again_s < *seconds ? again_s : *seconds;
    return TAGC_OK;
}

/* A ping of n_bytes and its empty answer: the median of turns. Rank a takes the time after a first message of both, because
 * after a barrier one rank continues up to a latency before the other. */
static tagc_status measure_ping(tagc_wire *wire, int a, int b, uint64_t n_bytes, double *out) {
    double pings[N_TURNS], once_s = 0;
    for (int i = -1; i < N_TURNS; i++) {
        int n_times = i < 0 ? 3 : times_in(turn_s / 3, once_s, 2000);
        TAGC_TRY(run(wire, PING_PONG, a, b, n_bytes, 1));
        double start_s = tagc_clock_s(), seconds = 0;
        TAGC_TRY(run(wire, PING_PONG, a, b, n_bytes, n_times));
        if (tagc_comm_rank(wire->comm) == a) seconds = tagc_clock_s() - start_s;
        TAGC_TRY(tagc_max_over_ranks(wire->comm, &seconds, 1));
        if (i < 0)
            once_s = seconds / n_times;
        else
            pings[i] = seconds / n_times;
    }
    *out = tagc_result_spread_of(pings, N_TURNS).median;
    return TAGC_OK;
}

/* Bytes per second of one direction, from the difference in time between a message and one of a quarter of its size, which
 * cancels the latency. Messages grow until the difference is well above a latency, too, because ranks may start that far
 * apart. */
static tagc_status measure_rate(tagc_wire *wire, pattern kind, int a, int b, double latency_s, double *out) {
    uint64_t n_bytes = FIRST_BYTES < wire->n_max ? FIRST_BYTES : wire->n_max;
    double before_s, once_s, rates[N_TURNS];
    TAGC_TRY(run(wire, kind, a, b, n_bytes, 1)); /* opens the connection */
    TAGC_TRY(timed_twice(wire, kind, a, b, n_bytes / 4, &before_s));
    for (;;) {
        TAGC_TRY(timed_twice(wire, kind, a, b, n_bytes, &once_s));
        if (once_s - before_s >= fmax(long_enough_s, 4 * latency_s) || n_bytes * 4 > wire->n_max) break;
        before_s = once_s;
        n_bytes *= 4;
    }
    int n_times = times_in(turn_s, once_s, 1000);
    for (int i = 0; i < N_TURNS; i++) {
        double whole_s, quarter_s;
        TAGC_TRY(timed(wire, kind, a, b, n_bytes, n_times, &whole_s));
        TAGC_TRY(timed(wire, kind, a, b, n_bytes / 4, n_times, &quarter_s));
        uint64_t three_quarters = n_bytes - n_bytes / 4;
        double n_more = (double)three_quarters * n_times;
        rates[i] = whole_s > quarter_s ? n_more / (whole_s - quarter_s) : (double)n_bytes * n_times / whole_s;
    }
    *out = tagc_result_spread_of(rates, N_TURNS).median;
    return TAGC_OK;
}

/* ---- figures ---- */

typedef struct pair {
    int a, b;               /* ranks */
    double latency_s;       /* of one byte, one way */
    double large_latency_s; /* of a message of LARGE_BYTES, without its bytes */
    double there_bytes_per_s, back_bytes_per_s, both_bytes_per_s; /* both: each direction, at once */
} pair;

/* The latency of a large message is its time minus that of its bytes at the link's rate. MPI asks the receiver before it
 * sends one, so its bytes arrive after three ways; a small message takes one. */
static tagc_status measure_pair(tagc_wire *wire, pair *p) {
    double small_s, large_s;
    TAGC_TRY(measure_ping(wire, p->a, p->b, 1, &small_s));
    TAGC_TRY(measure_ping(wire, p->a, p->b, LARGE_BYTES, &large_s));
    p->latency_s = small_s / 2;
    TAGC_TRY(measure_rate(wire, ONE_WAY, p->a, p->b, p->latency_s, &p->there_bytes_per_s));
    p->large_latency_s = large_s - small_s / 2 - LARGE_BYTES / p->there_bytes_per_s;
    if (!(p->large_latency_s > p->latency_s)) p->large_latency_s = p->latency_s;
    TAGC_TRY(measure_rate(wire, ONE_WAY, p->b, p->a, p->latency_s, &p->back_bytes_per_s));
    return measure_rate(wire, BOTH_WAYS, p->a, p->b, p->latency_s, &p->both_bytes_per_s);
}

/* ---- the part ---- */

static json_t *direction_json(int from, int to, double one_way_bytes_per_s, const pair *p) {
    return json_pack("{s:i, s:i, s:o, s:o, s:o}", "from", from, "to", to, "latency_s",
                     tagc_json_real(p->latency_s), "one_way_bytes_per_s", tagc_json_real(one_way_bytes_per_s),
                     "both_ways_bytes_per_s", tagc_json_real(p->both_bytes_per_s));
}

static json_t *link_json(const tagc_bench *bench, const pair *pairs, int n_pairs) {
    json_t *list = json_array();
    for (int i = 0; i < n_pairs; i++) {
        const pair *p = &pairs[i];
        json_array_append_new(list, direction_json(p->a, p->b, p->there_bytes_per_s, p));
        json_array_append_new(list, direction_json(p->b, p->a, p->back_bytes_per_s, p));
    }
    return json_pack("{s:o, s:o, s:i, s:o, s:o, s:o, s:o}", "latency_s", tagc_json_real(pairs[0].latency_s),
                     "large_latency_s", tagc_json_real(pairs[0].large_latency_s), "large_bytes", LARGE_BYTES,
                     "one_way_bytes_per_s", tagc_json_real(pairs[0].there_bytes_per_s),
                     "both_ways_bytes_per_s", tagc_json_real(pairs[0].both_bytes_per_s),
                     "all_to_all_bytes_per_s", tagc_json_real(bench->all_to_all_bytes_per_s), "pairs", list);
}

static void say_pair(const tagc_bench *bench, const pair *p) {
    char latency[24], large[24], there[24], back[24], both[24];
    tagc_bench_say(bench,
                   "  rank %d (%s), rank %d (%s): latency %s, of %d kB %s, one way %s there, %s back, both "
                   "ways at once %s each\n",
                   p->a, bench->hosts.names[bench->hosts.of_rank[p->a]], p->b,
                   bench->hosts.names[bench->hosts.of_rank[p->b]], tagc_human_time(p->latency_s, latency),
                   LARGE_BYTES >> 10, tagc_human_time(p->large_latency_s, large),
                   tagc_human_rate(p->there_bytes_per_s, there), tagc_human_rate(p->back_bytes_per_s, back),
                   tagc_human_rate(p->both_bytes_per_s, both));
}

/* One rank represents each host. A single host has two. */
static int choose_pairs(const tagc_bench *bench, pair pairs[MAX_PAIRS], int *n_all) {
    const tagc_hosts *hosts = &bench->hosts;
    int n = 0;
    *n_all = hosts->n_hosts > 1 ? hosts->n_hosts * (hosts->n_hosts - 1) / 2 : 1;
    if (hosts->n_hosts == 1) {
        pairs[0] = (pair){.a = 0, .b = 1};
        return 1;
    }
    for (int i = 0; i < hosts->n_hosts; i++)
        for (int k = i + 1; k < hosts->n_hosts && n < MAX_PAIRS; k++)
            pairs[n++] = (pair){.a = hosts->leaders[i], .b = hosts->leaders[k]};
    return n;
}

/* Between two ranks, all to all is both ways at once, which was measured: a second figure for it would only differ. */
static tagc_status measure_all(tagc_bench *bench, tagc_wire *wire, const pair *p) {
    char rate[24];
    if (bench->rank->world_size == 2) {
        bench->all_to_all_bytes_per_s = p->both_bytes_per_s;
        return TAGC_OK;
    }
    TAGC_TRY(measure_rate(wire, ALL, 0, 0, p->latency_s, &bench->all_to_all_bytes_per_s));
    bench->all_to_all_bytes_per_s *= bench->rank->world_size - 1;
    tagc_bench_say(bench, "  all ranks to all: %s sent by each\n",
                   tagc_human_rate(bench->all_to_all_bytes_per_s, rate));
    return TAGC_OK;
}

static tagc_status measure_link(tagc_bench *bench, tagc_wire *wire) {
    pair pairs[MAX_PAIRS] = {{0}};
    int n_all, n_pairs = choose_pairs(bench, pairs, &n_all);
    tagc_bench_say(bench, "\nLink, %s\n",
                   bench->is_mpi ? "plain MPI messages" : "messages of the local transport");
    for (int i = 0; i < n_pairs; i++) {
        TAGC_TRY(measure_pair(wire, &pairs[i]));
        say_pair(bench, &pairs[i]);
    }
    if (n_pairs < n_all) tagc_bench_say(bench, "  (%d of %d pairs of hosts)\n", n_pairs, n_all);
    TAGC_TRY(measure_all(bench, wire, &pairs[0]));
    tagc_bench_put(bench, "link", link_json(bench, pairs, n_pairs));
    return TAGC_OK;
}

tagc_status tagc_bench_link(tagc_bench *bench) {
    tagc_wire wire;
    tagc_status status =
        tagc_wire_create(bench->rank->comm, bench->is_mpi, bench->plan->options.train.timeout, 0, &wire);
    if (status == TAGC_OK) status = measure_link(bench, &wire);
    tagc_rank_finish(bench->rank, status);
    tagc_wire_destroy(&wire);
    return status;
}
