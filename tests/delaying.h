/* A network whose messages take time, for tests and benches: each arrives latency_s after it was sent, and a rank's
 * messages leave one after the other at bytes_per_s. Messages between two ranks keep their order within a lane.
 *
 * Either all ranks are real, each with a comm of its own (threads of one process), or only rank 0 is and the others echo:
 * whatever rank 0 begins, each of them begins at the same moment, with the bytes that rank 0 sends in the same place of the
 * transfer. So one core measures what a step of one rank costs among many. In headers of messages the rank is put right. */
#ifndef TAGC_TESTS_DELAYING_H
#define TAGC_TESTS_DELAYING_H

#include "core/clock.h"
#include "core/status.h"
#include "exchange/wire.h"
#include "tagc/transport.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { DELAYING_LANES = 9 };

typedef struct delaying_options {
    int world_size;
    double latency_s;   /* one way */
    double jitter_s;    /* most that is added to it, drawn for each message */
    double bytes_per_s; /* what a rank sends, all its peers together; 0: no limit */
    int n_first;        /* a rank receives nothing before it has begun so many transfers */
    int has_lanes;      /* 0: made by tagc_comm_create_callback, one blocking call after the other */
    int is_echo;        /* 1: only rank 0 is real */
} delaying_options;

typedef struct delaying_message {
    double due_s;
    uint64_t n_bytes;
    struct delaying_message *next;
    unsigned char bytes[];
} delaying_message;

/* From one rank to another on one lane, in order. */
typedef struct delaying_queue {
    delaying_message *first, **end;
    uint64_t n_taken, n_asked; /* messages, and receives that wait for one */
} delaying_queue;

struct delaying_network;

typedef struct delaying_rank {
    struct delaying_network *network;
    int rank;
    double free_s;          /* when what it sent has left */
    delaying_queue *queues; /* (W, LANES) of what is sent to it */
    int n_transfers;        /* that it began */
    uint64_t n_messages;    /* that it sent */
} delaying_rank;

typedef struct delaying_network {
    delaying_options options;
    pthread_mutex_t lock;
    int is_broken;
    char error[TAGC_ERROR_TEXT_BYTES];
    delaying_rank ranks[]; /* (W,) */
} delaying_network;

typedef struct delaying_receive {
    int from;
    uint64_t turn; /* of its queue */
    uint64_t n_bytes;
    void *to;
} delaying_receive;

typedef struct delaying_request {
    int lane, n_left;
    double sent_s; /* when what this transfer sends has left */
    delaying_receive receives[];
} delaying_request;

/* ---- the network ---- */

static inline delaying_network *delaying_create(const delaying_options *options) {
    size_t n_ranks = (size_t)options->world_size, n_real = options->is_echo ? 1 : n_ranks;
    delaying_network *network = calloc(1, sizeof *network + n_real * sizeof network->ranks[0]);
    if (!network) abort();
    network->options = *options;
    pthread_mutex_init(&network->lock, NULL);
    for (size_t r = 0; r < n_real; r++) {
        delaying_rank *self = &network->ranks[r];
        self->network = network;
        self->rank = (int)r;
        self->queues = calloc(n_ranks * DELAYING_LANES, sizeof *self->queues);
        if (!self->queues) abort();
        for (size_t q = 0; q < n_ranks * DELAYING_LANES; q++) self->queues[q].end = &self->queues[q].first;
    }
    return network;
}

/* Frees the network, whose comms have been destroyed before. */
static inline void delaying_destroy(delaying_network *network) {
    int n_real = network->options.is_echo ? 1 : network->options.world_size;
    for (int r = 0; r < n_real; r++) {
        for (int q = 0; q < network->options.world_size * DELAYING_LANES; q++)
            for (delaying_message *next, *m = network->ranks[r].queues[q].first; m; m = next) {
                next = m->next;
                free(m);
            }
        free(network->ranks[r].queues);
    }
    pthread_mutex_destroy(&network->lock);
    free(network);
}

/* ---- one message ---- */

/* Replaces rank 0's number in a header by that of the echoing rank. */
static inline void delaying_rename(unsigned char *bytes, uint64_t n_bytes, int rank) {
    tagc_wire_header header;
    if (n_bytes < TAGC_WIRE_HEADER_BYTES || memcmp(bytes, "TAGC", 4) != 0) return;
    if (tagc_wire_read(bytes, n_bytes, &header) != TAGC_OK &&
        tagc_wire_read(bytes, TAGC_WIRE_HEADER_BYTES, &header) != TAGC_OK)
        return;
    header.rank = (uint32_t)rank;
    tagc_wire_write(&header, bytes);
}

static inline double delaying_jitter(const delaying_rank *self) {
    uint64_t draw = (self->n_messages + (uint64_t)self->rank * 7919) * 0x9e3779b97f4a7c15u;
    draw = (draw ^ draw >> 29) * 0xbf58476d1ce4e5b9u;
    return self->network->options.jitter_s * (double)(draw >> 40) / 16777216.0;
}

/* Puts a message into the receiver's queue. The caller holds the lock. */
static inline void delaying_send(delaying_rank *self, int to, int lane, const void *bytes, uint64_t n_bytes) {
    delaying_network *network = self->network;
    int is_echo = network->options.is_echo;
    delaying_message *m = malloc(sizeof *m + n_bytes);
    if (!m) abort();
    double now_s = tagc_clock_s();
    if (self->free_s < now_s) self->free_s = now_s;
    if (network->options.bytes_per_s > 0) self->free_s += (double)n_bytes / network->options.bytes_per_s;
    *m = (delaying_message){.due_s = self->free_s + network->options.latency_s + delaying_jitter(self),
                            .n_bytes = n_bytes};
    memcpy(m->bytes, bytes, n_bytes);
    if (is_echo) delaying_rename(m->bytes, n_bytes, to);
    delaying_rank *receiver = is_echo ? self : &network->ranks[to];
    delaying_queue *queue = &receiver->queues[(is_echo ? to : self->rank) * DELAYING_LANES + lane];
    *queue->end = m;
    queue->end = &m->next;
    self->n_messages++;
}

/* Returns 1 when the message has arrived and is in its place. The caller holds the lock. */
static inline int delaying_take(delaying_rank *self, int lane, const delaying_receive *receive) {
    delaying_queue *queue = &self->queues[receive->from * DELAYING_LANES + lane];
    delaying_message *m = queue->first;
    if (!m || queue->n_taken != receive->turn || m->due_s > tagc_clock_s()) return 0;
    if (self->n_transfers < self->network->options.n_first) return 0;
    if (m->n_bytes != receive->n_bytes) {
        self->network->is_broken = 1;
        snprintf(self->network->error, sizeof self->network->error,
                 "rank %d sends %llu bytes to rank %d, which expects %llu", receive->from,
                 (unsigned long long)m->n_bytes, self->rank, (unsigned long long)receive->n_bytes);
        return 0;
    }
    memcpy(receive->to, m->bytes, m->n_bytes);
    queue->first = m->next;
    if (!queue->first) queue->end = &queue->first;
    queue->n_taken++;
    free(m);
    return 1;
}

/* Sends all parts of a transfer. An echoing rank answers with what rank 0 sends in the same place: the i-th part to arrive is
 * the i-th that leaves. The caller holds the lock. */
static inline void delaying_send_all(delaying_rank *self, const tagc_transfer *t) {
    int is_echo = self->network->options.is_echo;
    for (uint32_t i = 0; i < t->n_sends && (!is_echo || i < t->n_receives); i++) {
        int to = is_echo ? t->receives[i].peer : t->sends[i].peer;
        if (t->sends[i].n_bytes == 0) continue;
        delaying_send(self, to, (int)t->lane, (const char *)t->send + t->sends[i].offset,
                      t->sends[i].n_bytes);
    }
}

/* ---- the table ---- */

static inline tagc_status delaying_start(void *context, const tagc_transfer *transfer, void **handle) {
    delaying_rank *self = context;
    delaying_request *request =
        malloc(sizeof *request + (size_t)transfer->n_receives * sizeof request->receives[0]);
    if (!request) abort();
    *request = (delaying_request){.lane = (int)transfer->lane};
    pthread_mutex_lock(&self->network->lock);
    delaying_send_all(self, transfer);
    self->n_transfers++;
    request->sent_s = self->free_s;
    for (uint32_t i = 0; i < transfer->n_receives; i++) {
        const tagc_part *part = &transfer->receives[i];
        if (part->n_bytes == 0) continue;
        request->receives[request->n_left++] =
            (delaying_receive){.from = part->peer,
                               .turn = self->queues[part->peer * DELAYING_LANES + request->lane].n_asked++,
                               .n_bytes = part->n_bytes,
                               .to = (char *)transfer->recv + part->offset};
    }
    pthread_mutex_unlock(&self->network->lock);
    *handle = request;
    return TAGC_OK;
}

static inline tagc_status delaying_test(void *context, void *handle, tagc_progress *progress) {
    delaying_rank *self = context;
    delaying_request *request = handle;
    tagc_status status = TAGC_OK;
    int n_before = request->n_left;
    pthread_mutex_lock(&self->network->lock);
    for (int i = 0; i < request->n_left && !self->network->is_broken;) {
        if (delaying_take(self, request->lane, &request->receives[i]))
            request->receives[i] = request->receives[--request->n_left];
        else
            i++;
    }
    if (self->network->is_broken) status = tagc_report(TAGC_ERR_TRANSPORT, self->network->error);
    pthread_mutex_unlock(&self->network->lock);
    progress->moved = request->n_left < n_before;
    progress->done = status == TAGC_OK && request->n_left == 0 && request->sent_s <= tagc_clock_s();
    if (request->n_left) progress->waiting_for = request->receives[0].from;
    if (progress->done) free(request);
    return status;
}

static inline void delaying_give_up(void *context, const tagc_failure *failure) {
    delaying_rank *self = context;
    pthread_mutex_lock(&self->network->lock);
    if (!self->network->is_broken) {
        self->network->is_broken = 1;
        snprintf(self->network->error, sizeof self->network->error, "rank %d gave up: %s", self->rank,
                 failure->reason);
    }
    pthread_mutex_unlock(&self->network->lock);
}

static inline void delaying_leave(void *context) {
    (void)context;
}

/* Exchanges in one call, which waits: for the callback transport. */
static inline tagc_status delaying_exchange(void *context, const tagc_transfer *transfer) {
    void *request;
    tagc_status status = delaying_start(context, transfer, &request);
    for (;;) {
        tagc_progress progress = {.waiting_for = -1};
        status = status == TAGC_OK ? delaying_test(context, request, &progress) : status;
        if (status != TAGC_OK || progress.done) return status;
        struct timespec pause = {.tv_nsec = 50000};
        nanosleep(&pause, NULL);
    }
}

static const tagc_transport_ops delaying_ops = {
    .abi = TAGC_TRANSPORT_ABI,
    .capabilities = TAGC_TRANSPORT_LANES,
    .name = "delaying",
    .start = delaying_start,
    .test = delaying_test,
    .cancel = delaying_give_up,
    .abort = delaying_give_up,
    .destroy = delaying_leave,
};

static const tagc_callback_ops delaying_callback = {
    .abi = TAGC_TRANSPORT_ABI, .exchange = delaying_exchange, .abort = delaying_give_up};

static inline tagc_status delaying_comm(delaying_network *network, int rank, const tagc_comm_options *options,
                                        tagc_comm **out) {
    int W = network->options.world_size;
    delaying_rank *self = &network->ranks[rank];
    if (network->options.has_lanes) return tagc_comm_create(&delaying_ops, self, rank, W, options, out);
    return tagc_comm_create_callback(&delaying_callback, self, rank, W, options, out);
}

#endif
