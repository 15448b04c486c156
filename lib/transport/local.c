/* Ranks as threads of one process.
 *
 * There is no queue. Each rank publishes its requests under one lock. When both sides have published the same
 * (lane, sequence number), the receiver copies from the sender's buffer. If a rank has started a request and it is no
 * longer published, it is complete and had nothing for the rank that looks for it. That reveals sizes that do not
 * agree, even if one of them is zero. */
#include "core/memory.h"
#include "core/status.h"
#include "transport/comm.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { N_LANES = 8 };

typedef enum part_state {
    PART_DONE = 0,
    PART_OPEN = 1,  /* to be copied by the receiver */
    PART_AGREED = 2 /* sends whose receiver is known to expect as many bytes */
} part_state;

typedef struct request {
    tagc_transfer transfer;
    uint64_t sequence;            /* of its lane */
    uint32_t n_pending;           /* parts that are not done */
    unsigned char *receive_state; /* (transfer.n_receives) part_state */
    unsigned char *send_state;    /* (transfer.n_sends) */
    uint32_t capacity;            /* parts of both directions, stored behind this struct */
    int n_copying;                /* peers that now read our buffer without the lock */
    tagc_status status;
    int sender; /* of what is not expected */
    char error[TAGC_ERROR_TEXT_BYTES];
    struct request *next;
} request;

typedef struct local_rank {
    tagc_local_group *group;
    int rank, name; /* name: for messages */
    int attached, left;
    uint64_t n_started[N_LANES];
    request *shown; /* under way */
    request *pool;  /* for reuse; touched by the comm thread only */
} local_rank;

struct tagc_local_group {
    int world_size;
    pthread_mutex_t lock;
    int n_comms;           /* that exist */
    int is_destroyed;      /* by the caller; its last comm frees it */
    pthread_cond_t copied; /* a request's n_copying fell to 0 */
    tagc_status broken;    /* other than TAGC_OK: for good, by `error` */
    int failed_rank;
    char error[TAGC_ERROR_TEXT_BYTES];
    local_rank ranks[]; /* (W,) */
};

/* Call with the lock. Keeps the first reason. `by`: the rank that found the failure. */
static void group_break(const local_rank *by, const tagc_failure *failure) {
    tagc_local_group *group = by->group;
    if (group->broken != TAGC_OK) return;
    group->broken = failure->status;
    group->failed_rank = failure->rank;
    snprintf(group->error, sizeof group->error, "rank %d gave up: %s", by->name, failure->reason);
}

static void group_leave(const local_rank *leaver) {
    tagc_local_group *group = leaver->group;
    if (group->broken != TAGC_OK) return;
    group->broken = TAGC_ERR_TRANSPORT;
    group->failed_rank = leaver->rank;
    snprintf(group->error, sizeof group->error, "rank %d left", leaver->name);
}

/* ---- one request ---- */

static request *find(const local_rank *peer, const request *mine) {
    request *other = peer->shown;
    while (other && (other->transfer.lane != mine->transfer.lane || other->sequence != mine->sequence))
        other = other->next;
    return other;
}

static void mismatch(const local_rank *from, uint64_t n_sent, const local_rank *to, uint64_t n_expected,
                     request *a, request *b) {
    a->status = TAGC_ERR_MISMATCH;
    a->sender = from->rank;
    snprintf(a->error, sizeof a->error, "rank %d sends %llu bytes to rank %d, which expects %llu", from->name,
             (unsigned long long)n_sent, to->name, (unsigned long long)n_expected);
    if (!b) return;
    b->status = a->status;
    b->sender = a->sender;
    memcpy(b->error, a->error, sizeof b->error);
}

/* Call with the lock, which it releases while it copies. n_copying keeps `theirs` alive meanwhile. */
static void copy_part(local_rank *self, request *mine, uint32_t i, request *theirs, const tagc_part *sent) {
    tagc_local_group *group = self->group;
    const tagc_part *part = &mine->transfer.receives[i];
    theirs->n_copying++;
    pthread_mutex_unlock(&group->lock);
    memcpy((char *)mine->transfer.recv + part->offset, (const char *)theirs->transfer.send + sent->offset,
           (size_t)part->n_bytes);
    pthread_mutex_lock(&group->lock);
    if (--theirs->n_copying == 0) pthread_cond_broadcast(&group->copied);
    mine->receive_state[i] = PART_DONE;
    mine->n_pending--;
    theirs->send_state[sent - theirs->transfer.sends] = PART_DONE;
    theirs->n_pending--;
}

/* Call with the lock. Whether `peer` has started this transfer. *theirs is NULL if it is complete there. */
static int has_started(local_rank *self, const request *mine, int peer, request **theirs) {
    local_rank *other = &self->group->ranks[peer];
    if (other->n_started[mine->transfer.lane] <= mine->sequence) {
        if (other->left) group_leave(other);
        return 0;
    }
    *theirs = find(other, mine);
    return 1;
}

/* Call with the lock. Copies the i-th part to receive. Returns 0 if its peer has not started the transfer. */
static int receive_part(local_rank *self, request *mine, uint32_t i) {
    const tagc_part *part = &mine->transfer.receives[i], *sent = NULL;
    request *theirs;
    if (!has_started(self, mine, part->peer, &theirs)) return 0;
    if (theirs) sent = tagc_find_part(theirs->transfer.sends, theirs->transfer.n_sends, self->rank);
    uint64_t n_sent = sent ? sent->n_bytes : 0;
    if (n_sent != part->n_bytes)
        mismatch(&self->group->ranks[part->peer], n_sent, self, part->n_bytes, mine, theirs);
    else
        copy_part(self, mine, i, theirs, sent);
    return 1;
}

/* Call with the lock. Checks that the peer expects what is sent to it. Returns 0 if it has not started the transfer. */
static int check_send(local_rank *self, request *mine, uint32_t i) {
    const tagc_part *part = &mine->transfer.sends[i], *wanted = NULL;
    request *theirs;
    if (!has_started(self, mine, part->peer, &theirs)) return 0;
    if (theirs) wanted = tagc_find_part(theirs->transfer.receives, theirs->transfer.n_receives, self->rank);
    uint64_t n_wanted = wanted ? wanted->n_bytes : 0;
    if (n_wanted != part->n_bytes)
        mismatch(self, part->n_bytes, &self->group->ranks[part->peer], n_wanted, mine, theirs);
    else
        mine->send_state[i] = PART_AGREED;
    return 1;
}

/* Call with the lock. Tries all open parts, up to the first failure. Returns a rank that has not started the transfer, or
 * -1. */
static int advance(local_rank *self, request *mine) {
    tagc_local_group *group = self->group;
    const tagc_transfer *t = &mine->transfer;
    int missing = -1;
    for (uint32_t i = 0; i < t->n_receives && mine->status == TAGC_OK && group->broken == TAGC_OK; i++)
        if (mine->receive_state[i] == PART_OPEN && !receive_part(self, mine, i))
            missing = t->receives[i].peer;
    for (uint32_t i = 0; i < t->n_sends && mine->status == TAGC_OK && group->broken == TAGC_OK; i++)
        if (mine->send_state[i] == PART_OPEN && !check_send(self, mine, i)) missing = t->sends[i].peer;
    return missing;
}

static void hide(local_rank *self, request *mine) {
    request **link = &self->shown;
    while (*link != mine) link = &(*link)->next;
    *link = mine->next;
    mine->next = self->pool;
    self->pool = mine;
}

/* ---- the table ---- */

/* A request with room for n_states parts of both directions together. */
static tagc_status take_request(local_rank *self, uint32_t n_states, request **out) {
    for (request **link = &self->pool; *link; link = &(*link)->next)
        if ((*link)->capacity >= n_states) {
            *out = *link;
            *link = (*out)->next;
            return TAGC_OK;
        }
    void *memory;
    TAGC_TRY(tagc_memory_create(sizeof(request) + n_states, "local transfer", &memory));
    *out = memory;
    (*out)->capacity = n_states;
    return TAGC_OK;
}

static uint32_t open_parts(const tagc_part *parts, uint32_t n_parts, unsigned char *states) {
    uint32_t n_open = 0;
    for (uint32_t i = 0; i < n_parts; i++) {
        states[i] = parts[i].n_bytes ? PART_OPEN : PART_DONE;
        n_open += states[i];
    }
    return n_open;
}

static tagc_status local_start(void *context, const tagc_transfer *transfer, void **handle) {
    local_rank *self = context;
    tagc_local_group *group = self->group;
    request *mine;
    TAGC_TRY(take_request(self, transfer->n_sends + transfer->n_receives, &mine));
    mine->transfer = *transfer;
    mine->status = TAGC_OK;
    mine->receive_state = (unsigned char *)(mine + 1);
    mine->send_state = mine->receive_state + transfer->n_receives;
    mine->n_pending = open_parts(transfer->receives, transfer->n_receives, mine->receive_state) +
                      open_parts(transfer->sends, transfer->n_sends, mine->send_state);
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
    uint32_t n_pending = mine->n_pending;
    progress->waiting_for = advance(self, mine);
    progress->moved = mine->n_pending < n_pending;
    if (mine->status != TAGC_OK) {
        status = tagc_blame(tagc_fail(mine->status, "%s", mine->error), mine->sender);
    } else if (mine->n_pending == 0) {
        progress->done = 1;
        hide(self, mine);
    } else if (group->broken != TAGC_OK) {
        status = tagc_blame(tagc_fail(group->broken, "%s", group->error), group->failed_rank);
    }
    pthread_mutex_unlock(&group->lock);
    return status;
}

/* After a break no thread starts to copy. Waits for those that have started. */
static void local_cancel(void *context, const tagc_failure *failure) {
    local_rank *self = context;
    tagc_local_group *group = self->group;
    pthread_mutex_lock(&group->lock);
    group_break(self, failure);
    while (self->shown) {
        while (self->shown->n_copying > 0) pthread_cond_wait(&group->copied, &group->lock);
        hide(self, self->shown);
    }
    pthread_mutex_unlock(&group->lock);
}

static void local_abort(void *context, const tagc_failure *failure) {
    local_rank *self = context;
    pthread_mutex_lock(&self->group->lock);
    group_break(self, failure);
    pthread_mutex_unlock(&self->group->lock);
}

static void free_group(tagc_local_group *group) {
    pthread_cond_destroy(&group->copied);
    pthread_mutex_destroy(&group->lock);
    tagc_memory_destroy(group);
}

static void local_destroy(void *context) {
    local_rank *self = context;
    tagc_local_group *group = self->group;
    for (request *next, *pooled = self->pool; pooled; pooled = next) {
        next = pooled->next;
        tagc_memory_destroy(pooled);
    }
    self->pool = NULL;
    pthread_mutex_lock(&group->lock);
    self->left = 1;
    int is_last = --group->n_comms == 0 && group->is_destroyed;
    pthread_mutex_unlock(&group->lock);
    if (is_last) free_group(group);
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
        group->ranks[r].rank = group->ranks[r].name = r;
    }
    *out = group;
    return TAGC_OK;
}

void tagc_local_group_destroy(tagc_local_group *group) {
    if (!group) return;
    pthread_mutex_lock(&group->lock);
    group->is_destroyed = 1;
    int is_last = group->n_comms == 0;
    pthread_mutex_unlock(&group->lock);
    if (is_last) free_group(group);
}

/* What a rank says while a comm is split: the group that it made, if it leads one, and how that went. */
typedef struct split_word {
    tagc_local_group *group;
    int32_t status;
} split_word;

/* The others of a group learn where it is, since all are threads of one process. words (W,). */
static tagc_status share_group(tagc_comm *comm, const tagc_split_group *about,
                               const tagc_comm_options *options, split_word *words, tagc_comm **out) {
    int is_leader = tagc_comm_rank(comm) == about->leader, n_ranks = tagc_comm_world_size(comm);
    split_word own = {0};
    if (is_leader) own.status = (int32_t)tagc_local_group_create(about->n, &own.group);
    tagc_status status = tagc_comm_all_gather(comm, &own, sizeof own, words, (size_t)n_ranks * sizeof own);
    for (int rank = 0; status == TAGC_OK && rank < n_ranks; rank++) status = (tagc_status)words[rank].status;
    tagc_local_group *group = status == TAGC_OK ? words[about->leader].group : NULL;
    if (status == TAGC_OK) {
        own.status = (int32_t)tagc_comm_create_local(group, about->index, options, out);
        status = tagc_comm_all_gather(comm, &own, sizeof own, words, (size_t)n_ranks * sizeof own);
        for (int rank = 0; status == TAGC_OK && rank < n_ranks; rank++)
            status = (tagc_status)words[rank].status;
    }
    if (is_leader) tagc_local_group_destroy(own.group);
    return status;
}

static tagc_status local_split(tagc_comm *comm, const tagc_split_group *about,
                               const tagc_comm_options *options, tagc_comm **out) {
    void *words;
    tagc_status status = tagc_memory_create((size_t)tagc_comm_world_size(comm) * sizeof(split_word),
                                            "groups of ranks", &words);
    if (status != TAGC_OK) {
        tagc_comm_abort(comm, "no memory for groups of ranks");
        return status;
    }
    status = share_group(comm, about, options, words, out);
    tagc_memory_destroy(words);
    if (status == TAGC_OK) return TAGC_OK;
    tagc_comm_destroy(*out);
    *out = NULL;
    return tagc_fail(status, "ranks could not make a comm of their own: %s", tagc_status_name(status));
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
    group->n_comms += !taken;
    pthread_mutex_unlock(&group->lock);
    if (taken) return tagc_fail(TAGC_ERR_STATE, "rank %d of this group already has a comm", rank);
    tagc_comm_options checked;
    tagc_status status = tagc_comm_read_options(options, &checked);
    if (status == TAGC_OK && checked.names) self->name = checked.names[rank];
    if (status == TAGC_OK) status = tagc_comm_create(&local_ops, self, rank, group->world_size, options, out);
    if (status == TAGC_OK) {
        tagc_comm_set_split(*out, local_split);
        return TAGC_OK;
    }
    pthread_mutex_lock(&group->lock);
    self->attached = 0;
    group->n_comms--;
    pthread_mutex_unlock(&group->lock);
    return status;
}
