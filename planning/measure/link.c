/* Measures the link: messages between two ranks and between all. Sizes grow until a message takes long enough to time, so
 * that a slow link takes no minutes and a fast one is still measured well.
 *
 * Over MPI these are plain MPI messages. Within one process the local transport copies them. */
#include "measure/link.h"

#include "core/clock.h"
#include "core/memory.h"
#include "core/status.h"
#include "files/result_file.h"
#include "launch/over_ranks.h"
#include "transport/comm.h"
#include <math.h>
#include <stdlib.h>

enum { N_TURNS = 5, FIRST_BYTES = 16 << 10, MOST_BYTES = 32 << 20, ALL_BYTES = 256 << 20 };

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

/* The latency of a large message is its time minus that of its bytes at the link's rate. MPI asks the receiver before it
 * sends one, so its bytes arrive after three ways; a small message takes one. */
tagc_status tagc_measure_pair(tagc_wire *wire, tagc_pair *pair) {
    double small_s, large_s;
    TAGC_TRY(measure_ping(wire, pair->a, pair->b, 1, &small_s));
    TAGC_TRY(measure_ping(wire, pair->a, pair->b, TAGC_LINK_LARGE_BYTES, &large_s));
    pair->latency_s = small_s / 2;
    TAGC_TRY(measure_rate(wire, ONE_WAY, pair->a, pair->b, pair->latency_s, &pair->there_bytes_per_s));
    pair->large_latency_s = large_s - small_s / 2 - TAGC_LINK_LARGE_BYTES / pair->there_bytes_per_s;
    if (!(pair->large_latency_s > pair->latency_s)) pair->large_latency_s = pair->latency_s;
    TAGC_TRY(measure_rate(wire, ONE_WAY, pair->b, pair->a, pair->latency_s, &pair->back_bytes_per_s));
    return measure_rate(wire, BOTH_WAYS, pair->a, pair->b, pair->latency_s, &pair->both_bytes_per_s);
}

tagc_status tagc_measure_all_to_all(tagc_wire *wire, double latency_s, double *bytes_per_s) {
    double per_peer;
    TAGC_TRY(measure_rate(wire, ALL, 0, 0, latency_s, &per_peer));
    *bytes_per_s = per_peer * (tagc_comm_world_size(wire->comm) - 1);
    return TAGC_OK;
}
