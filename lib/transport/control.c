/* Direct calls of a comm's user: rank, byte counts, and the two collectives of the control lane. */
#include "transport/comm_private.h"

#include <string.h>

const char *tagc_leg_name(int leg) {
    static const char *const names[TAGC_N_LEGS] = {"index",  "values", "leftover",
                                                   "result", "gather", "control"};
    return leg >= 0 && leg < TAGC_N_LEGS ? names[leg] : "?";
}

tagc_status tagc_report(tagc_status status, const char *text) {
    return tagc_fail(status, "%s", text ? text : "");
}

tagc_status tagc_report_rank(tagc_status status, int rank, const char *text) {
    return tagc_blame(tagc_report(status, text), rank);
}

int tagc_comm_rank(const tagc_comm *comm) {
    return comm ? comm->rank : 0;
}

int tagc_comm_world_size(const tagc_comm *comm) {
    return comm ? comm->world_size : 0;
}

int tagc_comm_has_lanes(const tagc_comm *comm) {
    return (comm->ops->capabilities & TAGC_TRANSPORT_LANES) != 0;
}

void tagc_comm_bytes(const tagc_comm *comm, uint64_t *sent, uint64_t *received, int n_legs) {
    if (!comm || n_legs < 0) return;
    pthread_mutex_t *lock = (pthread_mutex_t *)&comm->lock; /* const does not cover the lock */
    pthread_mutex_lock(lock);
    for (int leg = 0; leg < n_legs; leg++) {
        int is_known = leg < TAGC_N_LEGS;
        if (sent) sent[leg] = is_known ? comm->n_bytes_sent[leg] : 0;
        if (received) received[leg] = is_known ? comm->n_bytes_received[leg] : 0;
    }
    pthread_mutex_unlock(lock);
}

int tagc_comm_is_idle(const tagc_comm *comm) {
    if (!comm) return 1;
    pthread_mutex_t *lock = (pthread_mutex_t *)&comm->lock;
    pthread_mutex_lock(lock);
    int is_idle = comm->n_posted == comm->n_done;
    pthread_mutex_unlock(lock);
    return is_idle;
}

int tagc_comm_is_broken(tagc_comm *comm) {
    pthread_mutex_lock(&comm->lock);
    int is = comm->broken != TAGC_OK;
    pthread_mutex_unlock(&comm->lock);
    return is;
}

int tagc_comm_failed_rank(const tagc_comm *comm) {
    if (!comm) return -1;
    pthread_mutex_t *lock = (pthread_mutex_t *)&comm->lock;
    pthread_mutex_lock(lock);
    int rank =
        comm->broken == TAGC_OK || comm->failed_rank < 0 ? -1 : tagc_comm_name(comm, comm->failed_rank);
    pthread_mutex_unlock(lock);
    return rank;
}

void tagc_comm_sent_to(const tagc_comm *comm, uint64_t *sent) {
    pthread_mutex_t *lock = (pthread_mutex_t *)&comm->lock;
    pthread_mutex_lock(lock);
    memcpy(sent, comm->sent_to, (size_t)comm->world_size * sizeof *sent);
    pthread_mutex_unlock(lock);
}

void tagc_comm_recount(tagc_comm *comm, tagc_leg from, tagc_leg to, uint64_t sent, uint64_t received) {
    pthread_mutex_lock(&comm->lock);
    comm->n_bytes_sent[from] -= sent;
    comm->n_bytes_received[from] -= received;
    comm->n_bytes_sent[to] += sent;
    comm->n_bytes_received[to] += received;
    pthread_mutex_unlock(&comm->lock);
}

void tagc_comm_trace(tagc_comm *comm, const char *stream, const char *name, double start_s, double end_s,
                     uint64_t n_bytes, uint64_t tag) {
    if (!comm->options.trace) return;
    tagc_event event = {
        .stream = stream, .name = name, .start_s = start_s, .end_s = end_s, .n_bytes = n_bytes, .tag = tag};
    comm->options.trace(comm->options.trace_context, &event);
}

typedef struct gather_call {
    tagc_comm *comm;
    const void *send;
    size_t n_bytes;
    void *recv;
    tagc_leg leg;
} gather_call;

static tagc_status gather(void *arg) {
    gather_call *call = arg;
    tagc_comm *comm = call->comm;
    uint32_t n_peers = 0;
    for (int r = 0; r < comm->world_size; r++) {
        if (r == comm->rank) continue;
        comm->control_sends[n_peers] = (tagc_part){.peer = r, .n_bytes = call->n_bytes};
        comm->control_receives[n_peers++] =
            (tagc_part){.peer = r, .n_bytes = call->n_bytes, .offset = (uint64_t)r * call->n_bytes};
    }
    tagc_ticket ticket = {
        .transfer = {.n_sends = n_peers,
                     .n_receives = n_peers,
                     .sends = comm->control_sends,
                     .receives = comm->control_receives,
                     .send = call->send,
                     .recv = call->recv,
                     .round_bytes = call->n_bytes},
        .leg = call->leg,
        .tag = UINT64_MAX,
    };
    tagc_comm_post(comm, TAGC_LANE_CONTROL, &ticket);
    return tagc_comm_wait(comm, &ticket);
}

/* Without lanes only the worker may post, so the gather becomes a task in the caller's order. */
tagc_status tagc_comm_all_gather_as(tagc_comm *comm, tagc_leg leg, const void *send, size_t n_bytes,
                                    void *recv, size_t n_recv_bytes) {
    if (!comm) return tagc_fail(TAGC_ERR_ARGUMENT, "comm is NULL");
    if (n_bytes == 0) return TAGC_OK;
    if (!send) return tagc_fail(TAGC_ERR_ARGUMENT, "send is NULL and n_bytes is %zu", n_bytes);
    if (!recv) return tagc_fail(TAGC_ERR_ARGUMENT, "recv is NULL and n_bytes is %zu", n_bytes);
    if (n_bytes > SIZE_MAX / 2 / (size_t)comm->world_size)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_bytes is %zu, must be at most %zu", n_bytes,
                         SIZE_MAX / 2 / (size_t)comm->world_size);
    if (n_recv_bytes != n_bytes * (size_t)comm->world_size)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_recv_bytes is %zu, must be %zu: n_bytes of each of %d ranks",
                         n_recv_bytes, n_bytes * (size_t)comm->world_size, comm->world_size);
    TAGC_TRY(tagc_comm_check_open(comm));
    memmove((char *)recv + (size_t)comm->rank * n_bytes, send, n_bytes);
    gather_call call = {comm, send, n_bytes, recv, leg};
    if (tagc_comm_has_lanes(comm) || pthread_equal(pthread_self(), comm->workers[TAGC_WORKER_REDUCE].thread))
        return gather(&call);
    tagc_task task = {.run = gather, .arg = &call};
    tagc_comm_submit(comm, &task);
    return tagc_comm_join(comm, &task);
}

tagc_status tagc_comm_all_gather(tagc_comm *comm, const void *send, size_t n_bytes, void *recv,
                                 size_t n_recv_bytes) {
    return tagc_comm_all_gather_as(comm, TAGC_LEG_CONTROL, send, n_bytes, recv, n_recv_bytes);
}

tagc_status tagc_comm_barrier(tagc_comm *comm) {
    if (!comm) return tagc_fail(TAGC_ERR_ARGUMENT, "comm is NULL");
    unsigned char here = 0;
    return tagc_comm_all_gather(comm, &here, 1, comm->control_scratch, (size_t)comm->world_size);
}
