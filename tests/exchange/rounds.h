/* A network with lanes that counts rounds instead of seconds: nothing arrives before the rank has nothing left to do, and
 * then everything that is under way arrives. So the rounds of a step are the latencies that it takes one after the other.
 *
 * Only rank 0 is real. The others echo: the i-th part that arrives is the i-th that leaves, with the peer's rank in its
 * header. What arrives can be damaged. */
#ifndef TAGC_TESTS_EXCHANGE_ROUNDS_H
#define TAGC_TESTS_EXCHANGE_ROUNDS_H

#include <stdlib.h>
#include <string.h>

#include "../test.h"
#include "exchange/reducer.h"
#include "transport/comm_private.h"

struct rounds;
/* Of the n-th transfer of a lane, what comes from `from`. */
typedef void (*rounds_damage)(struct rounds *net, int lane, int n, int from, uint8_t *bytes,
                              uint64_t n_bytes);

typedef struct rounds_request {
    int round;
    uint32_t n;
    struct {
        void *to;
        uint8_t *bytes;
        uint64_t n_bytes;
    } parts[];
} rounds_request;

typedef struct rounds {
    tagc_comm *comm;
    int world_size;
    int is_held; /* atomic: nothing arrives */
    int round, n_under_way, n_deliverable;
    int n_transfers[TAGC_N_LANES];
    rounds_damage damage;
    uint64_t where, at; /* for damage: a bit, and the byte that it was */
    int lane, turn, n_damaged;
    int was_broken;
} rounds;

static inline void rounds_rename(uint8_t *bytes, uint64_t n_bytes, int rank) {
    tagc_wire_header header;
    if (n_bytes < TAGC_WIRE_HEADER_BYTES) return;
    if (tagc_wire_read(bytes, n_bytes, &header) != TAGC_OK &&
        tagc_wire_read(bytes, TAGC_WIRE_HEADER_BYTES, &header) != TAGC_OK)
        return;
    header.rank = (uint32_t)rank;
    tagc_wire_write(&header, bytes);
}

static inline tagc_status rounds_start(void *context, const tagc_transfer *t, void **handle) {
    rounds *net = context;
    rounds_request *request = malloc(sizeof *request + t->n_receives * sizeof request->parts[0]);
    *request = (rounds_request){.round = net->round, .n = t->n_receives};
    assert_int_equal(t->n_sends, t->n_receives);
    int turn = net->n_transfers[t->lane]++;
    for (uint32_t i = 0; i < t->n_receives; i++) {
        const tagc_part *in = &t->receives[i], *out = &t->sends[i];
        uint8_t *bytes = malloc(in->n_bytes);
        memcpy(bytes, (const char *)t->send + out->offset,
               in->n_bytes < out->n_bytes ? in->n_bytes : out->n_bytes);
        rounds_rename(bytes, in->n_bytes, in->peer);
        if (net->damage) net->damage(net, (int)t->lane, turn, in->peer, bytes, in->n_bytes);
        request->parts[i].to = (char *)t->recv + in->offset;
        request->parts[i].bytes = bytes;
        request->parts[i].n_bytes = in->n_bytes;
    }
    if (!request->n) request->round = -1; /* nothing to wait for */
    net->n_under_way++;
    net->n_deliverable += request->round < net->round;
    *handle = request;
    return TAGC_OK;
}

/* Returns 1 when the workers wait, nothing is posted, and all that could arrive has. */
static inline int rounds_is_still(rounds *net) {
    pthread_mutex_lock(&net->comm->lock);
    const tagc_comm *comm = net->comm;
    int is_still = !comm->posted;
    for (int i = 0; i < TAGC_N_WORKERS; i++) {
        const tagc_worker *worker = &comm->workers[i];
        int has_seen_all = !worker->awaits_tickets || comm->n_done == worker->n_done_seen;
        is_still &= worker->is_idle && has_seen_all && !worker->tasks;
    }
    pthread_mutex_unlock(&net->comm->lock);
    return is_still && net->n_deliverable == 0 && !__atomic_load_n(&net->is_held, __ATOMIC_ACQUIRE);
}

static inline void rounds_free(rounds_request *request) {
    for (uint32_t i = 0; i < request->n; i++) free(request->parts[i].bytes);
    free(request);
}

static inline tagc_status rounds_test(void *context, void *handle, tagc_progress *progress) {
    rounds *net = context;
    rounds_request *request = handle;
    if (request->round == net->round && rounds_is_still(net)) {
        net->round++;
        net->n_deliverable = net->n_under_way;
    }
    if (request->round == net->round) return TAGC_OK;
    for (uint32_t i = 0; i < request->n; i++)
        memcpy(request->parts[i].to, request->parts[i].bytes, request->parts[i].n_bytes);
    rounds_free(request);
    net->n_under_way--;
    net->n_deliverable--;
    progress->done = 1;
    return TAGC_OK;
}

static inline void rounds_give_up(void *context, const tagc_failure *failure) {
    (void)failure;
    ((rounds *)context)->was_broken = 1;
}

static inline void rounds_destroy(void *context) {
    (void)context;
}

static const tagc_transport_ops rounds_ops = {
    .abi = TAGC_TRANSPORT_ABI,
    .capabilities = TAGC_TRANSPORT_LANES,
    .name = "rounds",
    .start = rounds_start,
    .test = rounds_test,
    .cancel = rounds_give_up,
    .abort = rounds_give_up,
    .destroy = rounds_destroy,
};

static inline void rounds_create(rounds *net, int world_size) {
    *net = (rounds){.world_size = world_size, .is_held = 1};
    tagc_comm *comm;
    assert_int_equal(tagc_comm_create(&rounds_ops, net, 0, world_size, named_ranks(), &comm), TAGC_OK);
    net->comm = comm;
    __atomic_store_n(&net->is_held, 0, __ATOMIC_RELEASE);
}

#endif
