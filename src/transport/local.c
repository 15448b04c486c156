/* Ranks as threads of one process.
 *
 * Nothing is queued: every rank shows its requests under one lock, and the receiver copies straight out of
 * the sender's buffer once both sides show the same (lane, sequence number). A request that is not found
 * although its rank has started it is complete, hence has nothing to do with whoever looks for it: that is
 * how sizes that do not agree are noticed even when one of them is zero. */
#include "core/memory.h"
#include "core/status.h"
#include "tagc/transport.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { N_LANES = 8 };

typedef struct request {
    tagc_transfer transfer;
    uint64_t sequence;           /* of its lane */
    int n_pending;               /* ones in the two arrays below */
    unsigned char *recv_pending; /* (W,) still to be copied from there */
    unsigned char *send_pending; /* (W,) not yet copied by them */
    int n_copying;               /* peers that are reading our buffer right now, without the lock */
    tagc_status status;
    char error[TAGC_ERROR_TEXT_BYTES];
    struct request *next;
} request;

typedef struct local_rank {
    tagc_local_group *group;
    int rank;
    int attached, left;
    uint64_t n_started[N_LANES];
    request *shown; /* under way */
    request *pool;  /* for reuse; touched by the comm thread only */
} local_rank;

struct tagc_local_group {
    int world_size;
    pthread_mutex_t lock;
    pthread_cond_t copied; /* a request's n_copying fell to 0 */
    int broken;            /* for good, by `error` */
    char error[TAGC_ERROR_TEXT_BYTES];
    local_rank ranks[]; /* (W,) */
};

/* With the lock. The first reason stays. */
static void group_break(tagc_local_group *group, int rank, const char *reason) {
    if (group->broken) return;
    group->broken = 1;
    if (reason)
        snprintf(group->error, sizeof group->error, "rank %d gave up: %s", rank, reason);
    else
        snprintf(group->error, sizeof group->error, "rank %d left", rank);
}

/* ---- one request ---- */

static request *find(const local_rank *peer, const request *mine) {
    request *other = peer->shown;
    while (other && (other->transfer.lane != mine->transfer.lane || other->sequence != mine->sequence))
        other = other->next;
    return other;
}

static void mismatch(int from, uint64_t n_sent, int to, uint64_t n_expected, request *a, request *b) {
    a->status = TAGC_ERR_CORRUPT;
    snprintf(a->error, sizeof a->error, "rank %d sends %llu bytes to rank %d, which expects %llu", from,
             (unsigned long long)n_sent, to, (unsigned long long)n_expected);
    if (!b) return;
    b->status = a->status;
    memcpy(b->error, a->error, sizeof b->error);
}

/* With the lock, which it gives up while it copies; `theirs` cannot go away meanwhile because of n_copying.
 */
static void copy_from(local_rank *self, request *mine, int source, request *theirs) {
    tagc_local_group *group = self->group;
    const tagc_transfer *to = &mine->transfer, *from = &theirs->transfer;
    theirs->n_copying++;
    pthread_mutex_unlock(&group->lock);
    memcpy((char *)to->recv + to->recv_offset[source],
           (const char *)from->send + from->send_offset[self->rank], (size_t)to->recv_bytes[source]);
    pthread_mutex_lock(&group->lock);
    if (--theirs->n_copying == 0) pthread_cond_broadcast(&group->copied);
    mine->recv_pending[source] = 0;
    mine->n_pending--;
    theirs->send_pending[self->rank] = 0;
    theirs->n_pending--;
}

/* With the lock. Takes what is there from `peer`, and checks that it wants what is sent to it. Returns 1 when
 * nothing is left to do with it for now. */
static int meet(local_rank *self, request *mine, int peer) {
    local_rank *other = &self->group->ranks[peer];
    uint32_t lane = mine->transfer.lane;
    if (other->n_started[lane] <= mine->sequence) {
        if (other->left) group_break(self->group, peer, NULL);
        return 0;
    }
    request *theirs = find(other, mine);
    uint64_t n_sent = theirs ? theirs->transfer.send_bytes[self->rank] : 0;
    uint64_t n_wanted = theirs ? theirs->transfer.recv_bytes[self->rank] : 0;
    if (mine->recv_pending[peer] && n_sent != mine->transfer.recv_bytes[peer])
        mismatch(peer, n_sent, self->rank, mine->transfer.recv_bytes[peer], mine, theirs);
    else if (mine->send_pending[peer] && n_wanted != mine->transfer.send_bytes[peer])
        mismatch(self->rank, mine->transfer.send_bytes[peer], peer, n_wanted, mine, theirs);
    else if (mine->recv_pending[peer])
        copy_from(self, mine, peer, theirs);
    return 1;
}

static void hide(local_rank *self, request *mine) {
    request **link = &self->shown;
    while (*link != mine) link = &(*link)->next;
    *link = mine->next;
    mine->next = self->pool;
    self->pool = mine;
}

/* ---- the table ---- */

static tagc_status take_request(local_rank *self, request **out) {
    size_t n_ranks = (size_t)self->group->world_size;
    if (self->pool) {
        *out = self->pool;
        self->pool = self->pool->next;
        return TAGC_OK;
    }
    void *memory;
    TAGC_TRY(tagc_memory_create(sizeof(request) + 2 * n_ranks, "local transfer", &memory));
    *out = memory;
    (*out)->recv_pending = (unsigned char *)(*out + 1);
    (*out)->send_pending = (*out)->recv_pending + n_ranks;
    return TAGC_OK;
}

static tagc_status local_start(void *context, const tagc_transfer *transfer, void **handle) {
    local_rank *self = context;
    tagc_local_group *group = self->group;
    int me = self->rank;
    if (transfer->lane >= N_LANES)
        return tagc_fail(TAGC_ERR_ARGUMENT, "transfer.lane is %u, must be below %d", transfer->lane, N_LANES);
    if (transfer->send_bytes[me] != transfer->recv_bytes[me])
        return tagc_fail(TAGC_ERR_CORRUPT, "rank %d sends %llu bytes to itself and expects %llu", me,
                         (unsigned long long)transfer->send_bytes[me],
                         (unsigned long long)transfer->recv_bytes[me]);
    if (transfer->send_bytes[me])
        memmove((char *)transfer->recv + transfer->recv_offset[me],
                (const char *)transfer->send + transfer->send_offset[me], (size_t)transfer->send_bytes[me]);
    request *mine;
    TAGC_TRY(take_request(self, &mine));
    mine->transfer = *transfer;
    mine->status = TAGC_OK;
    mine->n_pending = 0;
    for (int r = 0; r < group->world_size; r++) {
        mine->recv_pending[r] = r != me && transfer->recv_bytes[r] > 0;
        mine->send_pending[r] = r != me && transfer->send_bytes[r] > 0;
        mine->n_pending += mine->recv_pending[r] + mine->send_pending[r];
    }
    pthread_mutex_lock(&group->lock);
    mine->sequence = self->n_started[transfer->lane]++;
    mine->next = self->shown;
    self->shown = mine;
    pthread_mutex_unlock(&group->lock);
    *handle = mine;
    return TAGC_OK;
}

static tagc_status local_test(void *context, void *handle, tagc_progress *progress) {
    local_rank *self = context;
    tagc_local_group *group = self->group;
    request *mine = handle;
    tagc_status status = TAGC_OK;
    pthread_mutex_lock(&group->lock);
    int n_pending = mine->n_pending;
    for (int r = 0; r < group->world_size && mine->status == TAGC_OK && !group->broken; r++)
        if ((mine->recv_pending[r] || mine->send_pending[r]) && !meet(self, mine, r))
            progress->waiting_for = r;
    progress->moved = mine->n_pending < n_pending;
    if (mine->status != TAGC_OK) {
        status = tagc_fail(mine->status, "%s", mine->error);
    } else if (mine->n_pending == 0) {
        progress->done = 1;
        hide(self, mine);
    } else if (group->broken) {
        status = tagc_fail(TAGC_ERR_TRANSPORT, "%s", group->error);
    }
    pthread_mutex_unlock(&group->lock);
    return status;
}

/* Once broken, nobody begins to copy; those who have begun are waited for. */
static void local_cancel(void *context, const char *reason) {
    local_rank *self = context;
    tagc_local_group *group = self->group;
    pthread_mutex_lock(&group->lock);
    group_break(group, self->rank, reason);
    while (self->shown) {
        while (self->shown->n_copying > 0) pthread_cond_wait(&group->copied, &group->lock);
        hide(self, self->shown);
    }
    pthread_mutex_unlock(&group->lock);
}

static void local_abort(void *context, const char *reason) {
    local_rank *self = context;
    pthread_mutex_lock(&self->group->lock);
    group_break(self->group, self->rank, reason);
    pthread_mutex_unlock(&self->group->lock);
}

static void local_destroy(void *context) {
    local_rank *self = context;
    pthread_mutex_lock(&self->group->lock);
    self->left = 1;
    pthread_mutex_unlock(&self->group->lock);
    for (request *next, *pooled = self->pool; pooled; pooled = next) {
        next = pooled->next;
        tagc_memory_destroy(pooled);
    }
    self->pool = NULL;
}

static const tagc_transport_ops local_ops = {
    .abi = TAGC_TRANSPORT_ABI,
    .capabilities = TAGC_TRANSPORT_LANES,
    .name = "local",
    .start = local_start,
    .test = local_test,
    .cancel = local_cancel,
    .abort = local_abort,
    .destroy = local_destroy,
};

/* ---- the group ---- */

tagc_status tagc_local_group_create(int world_size, tagc_local_group **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (world_size < 1 || world_size > 1024)
        return tagc_fail(TAGC_ERR_ARGUMENT, "world_size is %d, must be in [1, 1024]", world_size);
    void *memory;
    TAGC_TRY(tagc_memory_create(sizeof(tagc_local_group) + (size_t)world_size * sizeof(local_rank),
                                "local group", &memory));
    tagc_local_group *group = memory;
    group->world_size = world_size;
    pthread_mutex_init(&group->lock, NULL);
    pthread_cond_init(&group->copied, NULL);
    for (int r = 0; r < world_size; r++) {
        group->ranks[r].group = group;
        group->ranks[r].rank = r;
    }
    *out = group;
    return TAGC_OK;
}

void tagc_local_group_destroy(tagc_local_group *group) {
    if (!group) return;
    pthread_cond_destroy(&group->copied);
    pthread_mutex_destroy(&group->lock);
    tagc_memory_destroy(group);
}

tagc_status tagc_comm_create_local(tagc_local_group *group, int rank, const tagc_comm_options *options,
                                   tagc_comm **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!group) return tagc_fail(TAGC_ERR_ARGUMENT, "group is NULL");
    if (rank < 0 || rank >= group->world_size)
        return tagc_fail(TAGC_ERR_ARGUMENT, "rank is %d, must be in [0, %d)", rank, group->world_size);
    local_rank *self = &group->ranks[rank];
    pthread_mutex_lock(&group->lock);
    int taken = self->attached;
    self->attached = 1;
    pthread_mutex_unlock(&group->lock);
    if (taken) return tagc_fail(TAGC_ERR_STATE, "rank %d of this group already has a comm", rank);
    tagc_status status = tagc_comm_create(&local_ops, self, rank, group->world_size, options, out);
    if (status == TAGC_OK) return TAGC_OK;
    pthread_mutex_lock(&group->lock);
    self->attached = 0;
    pthread_mutex_unlock(&group->lock);
    return status;
}
