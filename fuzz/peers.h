/* Whole exchanges with a hostile peer. All ranks are threads of this process, over the transport of threads; one, most often the last, is
 * hostile. It runs the same code as the others, and what it sends is edited on its way, as the input says. So every message that an
 * exchange has is reached, in every state that leads to it.
 *
 * An input's edits, one after the other:
 *
 *   1 byte   which of the hostile rank's transfers, modulo how many an honest run has
 *   1 byte   bits 0 to 2: what (edit_what); bit 3: checksums are made right afterwards; bits 4 to 7: which message of
 *            the transfer, 0 for all
 *   2 bytes  where in the message, or which former message
 *   1 byte   n, then n bytes
 */
#ifndef TAGC_FUZZ_PEERS_H
#define TAGC_FUZZ_PEERS_H

#include "core/xxh3.h"
#include "exchange/wire.h"
#include "transport/comm_private.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__has_feature)
#if __has_feature(memory_sanitizer)
void __msan_check_mem_is_initialized(const volatile void *bytes, size_t n); /* of the memory sanitizer */
#define CHECK_WRITTEN(bytes, n) __msan_check_mem_is_initialized(bytes, n)
#endif
#endif
#ifndef CHECK_WRITTEN
#define CHECK_WRITTEN(bytes, n) ((void)(bytes), (void)(n))
#endif

enum { MOST_PEERS = 4, MOST_LINKS = 3, MOST_EDITS = 8, MOST_TRANSFERS = 255, SLACK = 64 };

/* Ends the process, and says where. */
#define require(holds)                                                                                       \
    do {                                                                                                     \
        if (!(holds)) {                                                                                      \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #holds);                              \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

typedef enum edit_what {
    EDIT_XOR = 0,
    EDIT_OVERWRITE = 1,
    EDIT_ADD = 2,
    EDIT_HEADER = 3,  /* a field of the header becomes the bytes */
    EDIT_WHOLE = 4,   /* the bytes, again and again */
    EDIT_REPLAY = 5,  /* a message that went before, of any transfer */
    EDIT_CUT = 6,     /* ends there */
    EDIT_LENGTHEN = 7 /* the bytes behind it */
} edit_what;

typedef struct edit {
    uint8_t transfer, what, is_summed, part;
    uint16_t at;
    uint8_t n;
    const uint8_t *bytes;
} edit;

/* As it was sent. */
typedef struct sent_message {
    struct sent_message *before;
    uint64_t n_bytes;
    uint8_t bytes[];
} sent_message;

typedef struct kept_block {
    struct kept_block *next;
} kept_block;

typedef struct transfer_key {
    uint32_t link, lane;
    uint64_t number; /* of this run, on this lane */
} transfer_key;

/* A comm of the hostile rank. */
typedef struct peer_link {
    struct peers *all;
    tagc_comm *comm;
    uint32_t number;
    const tagc_transport_ops *below;
    void *context;
    uint64_t n_started[TAGC_N_LANES];
} peer_link;

typedef struct peers {
    int n_ranks, hostile;
    int has_lanes; /* 0: one transfer after the other, as over a transport that can only block */
    tagc_transport_ops laneless; /* of honest ranks */
    tagc_comm *comms[MOST_PEERS];
    void (*body)(struct peers *all, int rank);
    pthread_barrier_t meeting; /* of all ranks */

    pthread_mutex_t lock; /* guards what follows: comm threads of the hostile rank change it */
    peer_link links[MOST_LINKS];
    uint32_t n_links;
    int is_recording;
    transfer_key transfers[MOST_TRANSFERS]; /* of an honest run */
    int n_transfers;
    edit edits[MOST_EDITS];
    int n_edits;
    kept_block *kept; /* until the run is over */
    sent_message *last;
    uint64_t n_sent;
    int are_words_alike; /* 1: on the control lane, an edit is of every message of a transfer */
    int are_words_kept;  /* 1: there are none on that lane */
    int is_changed;      /* a message arrives otherwise than it was sent */
    int is_crafted;      /* and its header says that it is right, or nothing could say that it is not */
} peers;

/* ---- edits ---- */

static inline void *keep(peers *all, size_t n_bytes) {
    kept_block *block = malloc(sizeof *block + n_bytes);
    require(block != NULL);
    block->next = all->kept;
    all->kept = block;
    return block + 1;
}

static inline int has_header(const uint8_t *bytes, uint64_t n) {
    return n >= TAGC_WIRE_HEADER_BYTES && memcmp(bytes, "TAGC", 4) == 0;
}

/* Fragments and lossless gathers: the body has a checksum of its own. */
static inline int is_apart(const uint8_t *bytes) {
    return bytes[5] == TAGC_WIRE_FRAGMENT || bytes[5] == TAGC_WIRE_LOSSLESS;
}

static inline uint64_t header_sum(const uint8_t *bytes, uint64_t n) {
    uint64_t n_body = is_apart(bytes) ? 0 : n - TAGC_WIRE_HEADER_BYTES;
    return tagc_xxh3(bytes + TAGC_WIRE_HEADER_BYTES, n_body, tagc_xxh3(bytes, 56, 0));
}

static inline void make_sums_right(uint8_t *bytes, uint64_t n) {
    if (!has_header(bytes, n)) return;
    if (is_apart(bytes)) {
        uint64_t n_body, n_here = n - TAGC_WIRE_HEADER_BYTES;
        memcpy(&n_body, bytes + 40, sizeof n_body);
        uint64_t sum = tagc_wire_sum(bytes + TAGC_WIRE_HEADER_BYTES, n_body < n_here ? n_body : n_here);
        memcpy(bytes + 28, &sum, sizeof sum);
    }
    uint64_t sum = header_sum(bytes, n);
    memcpy(bytes + 56, &sum, sizeof sum);
}

static inline const sent_message *find_sent(const peers *all, uint64_t number) {
    const sent_message *m = all->last;
    for (uint64_t i = all->n_sent ? number % all->n_sent : 0; m && i > 0; i--) m = m->before;
    return m;
}

/* Returns the message's new length, at most n + SLACK. */
static inline uint64_t apply(const peers *all, const edit *e, uint8_t *bytes, uint64_t n) {
    static const uint8_t fields[] = {4, 5, 6, 7, 8, 12, 16, 20, 24, 28, 32, 36, 40, 48};
    uint64_t at = n ? e->at % n : 0;
    if (e->what == EDIT_HEADER && n >= TAGC_WIRE_HEADER_BYTES) at = fields[e->at % sizeof fields];
    if (e->what == EDIT_CUT) return at;
    if (e->what == EDIT_LENGTHEN) {
        uint64_t n_more = e->n < SLACK ? e->n : SLACK;
        if (n_more) memcpy(bytes + n, e->bytes, n_more);
        return n + n_more;
    }
    if (e->what == EDIT_REPLAY) {
        const sent_message *m = find_sent(all, e->at);
        memset(bytes, 0, n);
        if (m) memcpy(bytes, m->bytes, m->n_bytes < n ? m->n_bytes : n);
        return n;
    }
    if (e->what == EDIT_WHOLE) {
        for (uint64_t i = 0; i < n; i++) bytes[i] = e->n ? e->bytes[i % e->n] : 0;
        return n;
    }
    for (uint64_t i = 0; i < e->n && at + i < n; i++) {
        if (e->what == EDIT_XOR)
            bytes[at + i] ^= e->bytes[i];
        else if (e->what == EDIT_ADD)
            bytes[at + i] = (uint8_t)(bytes[at + i] + e->bytes[i]);
        else
            bytes[at + i] = e->bytes[i];
    }
    return n;
}

/* What nothing promises to notice: a header that is right, and says the same unit and step; or words between ranks that have none. */
static inline int is_crafted(const sent_message *sent, const uint8_t *bytes, uint64_t n, uint32_t lane) {
    uint64_t sum;
    if (lane == TAGC_LANE_CONTROL) return 1;
    if (n != sent->n_bytes || !has_header(bytes, n)) return 0;
    memcpy(&sum, bytes + 56, sizeof sum);
    return memcmp(bytes, sent->bytes, TAGC_WIRE_HEADER_BYTES) != 0 && sum == header_sum(bytes, n) &&
           memcmp(bytes + 20, sent->bytes + 20, 4) == 0 && memcmp(bytes + 48, sent->bytes + 48, 8) == 0;
}

static inline uint64_t edit_message(peers *all, const transfer_key *key, uint32_t part,
                                    const sent_message *sent, uint8_t *bytes) {
    uint64_t n = sent->n_bytes;
    for (int i = 0; i < all->n_edits; i++) {
        const edit *e = &all->edits[i];
        const transfer_key *of = &all->transfers[e->transfer];
        int is_word = key->lane == TAGC_LANE_CONTROL,
            is_of_all = !e->part || (is_word && all->are_words_alike);
        if (of->link != key->link || of->lane != key->lane || of->number != key->number ||
            (!is_of_all && e->part - 1u != part) || n > sent->n_bytes || (is_word && all->are_words_kept))
            continue;
        n = apply(all, e, bytes, n);
        if (e->is_summed) make_sums_right(bytes, n);
    }
    if (n == sent->n_bytes && memcmp(bytes, sent->bytes, n) == 0) return n;
    all->is_changed = 1;
    all->is_crafted |= is_crafted(sent, bytes, n, key->lane);
    return n;
}

/* ---- the hostile rank's transport ---- */

static inline void record(peers *all, transfer_key key) {
    if (all->is_recording && all->n_transfers < MOST_TRANSFERS) all->transfers[all->n_transfers++] = key;
}

static inline tagc_status hostile_start(void *context, const tagc_transfer *t, void **request) {
    peer_link *link = context;
    peers *all = link->all;
    tagc_transfer changed = *t;
    uint64_t n_bytes = 0;
    for (uint32_t i = 0; i < t->n_sends; i++) n_bytes += t->sends[i].n_bytes + SLACK;
    pthread_mutex_lock(&all->lock);
    transfer_key key = {link->number, t->lane, link->n_started[t->lane]++};
    if (t->n_sends) record(all, key);
    tagc_part *sends = keep(all, t->n_sends * sizeof *sends);
    uint8_t *bytes = keep(all, n_bytes);
    sent_message *last = all->last; /* edits look at what went before this transfer */
    uint64_t at = 0;
    for (uint32_t i = 0; i < t->n_sends; i++) {
        const tagc_part *part = &t->sends[i];
        sent_message *sent = keep(all, sizeof *sent + part->n_bytes);
        *sent = (sent_message){.before = last, .n_bytes = part->n_bytes};
        if (part->n_bytes) memcpy(sent->bytes, (const char *)t->send + part->offset, part->n_bytes);
        CHECK_WRITTEN(sent->bytes, part->n_bytes);
        if (part->n_bytes) memcpy(bytes + at, sent->bytes, part->n_bytes);
        sends[i] = (tagc_part){part->peer, edit_message(all, &key, i, sent, bytes + at), at};
        at += part->n_bytes + SLACK;
        last = sent;
    }
    all->last = last;
    all->n_sent += t->n_sends;
    pthread_mutex_unlock(&all->lock);
    changed.sends = sends;
    changed.send = bytes;
    return link->below->start(link->context, &changed, request);
}

static inline tagc_status hostile_test(void *context, void *request, tagc_progress *progress) {
    const peer_link *link = context;
    return link->below->test(link->context, request, progress);
}

static inline void hostile_cancel(void *context, const tagc_failure *failure) {
    const peer_link *link = context;
    link->below->cancel(link->context, failure);
}

static inline void hostile_abort(void *context, const tagc_failure *failure) {
    const peer_link *link = context;
    link->below->abort(link->context, failure);
}

static inline void hostile_destroy(void *context) {
    const peer_link *link = context;
    link->below->destroy(link->context);
}

#define HOSTILE_OPS(lanes)                                                                                   \
    {                                                                                                        \
        .abi = TAGC_TRANSPORT_ABI, .capabilities = lanes, .name = "hostile", .start = hostile_start,         \
        .test = hostile_test, .cancel = hostile_cancel, .abort = hostile_abort, .destroy = hostile_destroy   \
    }
static const tagc_transport_ops hostile_ops = HOSTILE_OPS(TAGC_TRANSPORT_LANES),
                                laneless_hostile_ops = HOSTILE_OPS(0);

/* A comm of a rank, before it is used. What the hostile one sends over it is edited from here on. */
static inline void join(peers *all, int rank, tagc_comm *comm) {
    pthread_mutex_lock(&comm->lock);
    comm->world = 1000; /* so that an input does the same every time */
    if (!all->has_lanes) {
        all->laneless = *comm->ops;
        all->laneless.capabilities = 0;
        comm->ops = &all->laneless;
    }
    if (rank == all->hostile) {
        peer_link *link = &all->links[all->n_links];
        *link = (peer_link){
            .all = all, .comm = comm, .number = all->n_links, .below = comm->ops, .context = comm->context};
        require(all->n_links++ < MOST_LINKS);
        comm->ops = all->has_lanes ? &hostile_ops : &laneless_hostile_ops;
        comm->context = link;
    }
    pthread_mutex_unlock(&comm->lock);
}

/* ---- life ---- */

/* Silence is a failure of this test: every message of the hostile rank comes at once. */
static inline void make_peers(peers *all, int n_ranks, int hostile, int has_lanes) {
    tagc_local_group *group;
    tagc_comm_options options;
    tagc_comm_options_init(&options);
    options.timeout_s = 60;
    *all = (peers){.n_ranks = n_ranks, .hostile = hostile, .has_lanes = has_lanes};
    pthread_mutex_init(&all->lock, NULL);
    pthread_barrier_init(&all->meeting, NULL, (unsigned)n_ranks);
    require(tagc_local_group_create(n_ranks, &group) == TAGC_OK);
    for (int r = 0; r < n_ranks; r++) {
        require(tagc_comm_create_local(group, r, &options, &all->comms[r]) == TAGC_OK);
        join(all, r, all->comms[r]);
    }
    tagc_local_group_destroy(group);
}

static inline void unmake_peers(peers *all) {
    for (int r = 0; r < all->n_ranks; r++) tagc_comm_destroy(all->comms[r]);
    pthread_barrier_destroy(&all->meeting);
    pthread_mutex_destroy(&all->lock);
    *all = (peers){0};
}

typedef struct peer_thread {
    peers *all;
    int rank;
    pthread_t thread;
} peer_thread;

static inline void *peer_main(void *arg) {
    const peer_thread *self = arg;
    self->all->body(self->all, self->rank);
    return NULL;
}

/* After a lie with a right checksum ranks may be in different calls, or wait for what was never meant to come. Then the hostile one
 * leaves, so that no time-out has to pass. */
static inline void join_thread(peers *all, pthread_t thread) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 1;
    while (pthread_timedjoin_np(thread, NULL, &until) != 0) {
        pthread_mutex_lock(&all->lock);
        int is_lie = all->is_crafted;
        pthread_mutex_unlock(&all->lock);
        for (uint32_t l = 0; l < all->n_links && is_lie; l++)
            tagc_comm_abort(all->links[l].comm, "of a test");
        until.tv_sec += 1;
    }
}

/* Runs the body on all ranks, each in a thread of its own. */
static inline void run_peers(peers *all, void (*body)(peers *all, int rank)) {
    peer_thread threads[MOST_PEERS];
    all->body = body;
    all->is_changed = all->is_crafted = 0;
    for (uint32_t l = 0; l < all->n_links; l++)
        memset(all->links[l].n_started, 0, sizeof all->links[l].n_started);
    for (int r = 0; r < all->n_ranks; r++) {
        threads[r] = (peer_thread){.all = all, .rank = r};
        require(pthread_create(&threads[r].thread, NULL, peer_main, &threads[r]) == 0);
    }
    for (int r = 0; r < all->n_ranks; r++) join_thread(all, threads[r].thread);
    for (kept_block *next; all->kept; all->kept = next) {
        next = all->kept->next;
        free(all->kept);
    }
    all->last = NULL;
    all->n_sent = 0;
}

/* The same, honest; its transfers are those which edits name. */
static inline void run_honest_peers(peers *all, void (*body)(peers *all, int rank)) {
    all->n_edits = all->n_transfers = 0;
    all->is_recording = 1;
    run_peers(all, body);
    all->is_recording = 0;
}

/* After an honest run. */
static inline void read_edits(peers *all, const uint8_t *bytes, size_t n) {
    all->n_edits = 0;
    while (n >= 5 && all->n_edits < MOST_EDITS && all->n_transfers > 0) {
        edit e = {.transfer = (uint8_t)(bytes[0] % all->n_transfers),
                  .what = bytes[1] & 7,
                  .is_summed = bytes[1] >> 3 & 1,
                  .part = bytes[1] >> 4,
                  .at = (uint16_t)(bytes[2] | bytes[3] << 8),
                  .n = bytes[4],
                  .bytes = bytes + 5};
        if (e.n > n - 5) e.n = (uint8_t)(n - 5);
        all->edits[all->n_edits++] = e;
        bytes += 5 + e.n;
        n -= 5u + e.n;
    }
}

static inline int is_comm_broken(tagc_comm *comm) {
    pthread_mutex_lock(&comm->lock);
    int is = comm->broken != TAGC_OK;
    pthread_mutex_unlock(&comm->lock);
    return is;
}

static inline int is_broken(peers *all) {
    int is = 0;
    for (int r = 0; r < all->n_ranks; r++) is |= is_comm_broken(all->comms[r]);
    return is;
}

/* What an honest rank may return: none of silence, none that is not in the header. */
static inline void check_status(tagc_status status) {
    require(status == TAGC_OK || (tagc_status_check_own(status) == TAGC_OK && status != TAGC_ERR_TIMEOUT));
}

/* Every honest rank hears the same of a step or gather unless an edit tells one of them something else. */
static inline int are_edits_for_all(const peers *all) {
    for (int i = 0; i < all->n_edits; i++)
        if (all->edits[i].part) return 0;
    return 1;
}

#endif
