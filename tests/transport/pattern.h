/* Random personalised exchanges whose sizes and bytes every rank can work out alone: the oracle of all
 * transports. */
#ifndef TAGC_TESTS_PATTERN_H
#define TAGC_TESTS_PATTERN_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "transport/comm.h"

enum { PATTERN_GUARD = 0xA5, PATTERN_GUARD_BYTES = 16 };

static inline uint64_t pattern_hash(uint64_t seed, uint64_t a, uint64_t b, uint64_t c) {
    uint64_t x = seed * 0x9E3779B97F4A7C15u + a * 0xBF58476D1CE4E5B9u + b * 0x94D049BB133111EBu + c + 1;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* A third of the messages are empty, and a few are much longer than the others. */
static inline uint64_t pattern_bytes(uint64_t seed, int source, int target, uint64_t max_bytes) {
    uint64_t x = pattern_hash(seed, (uint64_t)source, (uint64_t)target, 7);
    if (x % 3 == 0) return 0;
    return (x >> 8) % (x % 16 == 1 ? max_bytes : max_bytes / 16 + 1);
}

static inline void pattern_fill(unsigned char *at, uint64_t n_bytes, uint64_t seed, int source, int target) {
    uint64_t x = pattern_hash(seed, (uint64_t)source, (uint64_t)target, 11);
    for (uint64_t i = 0; i < n_bytes; i++) at[i] = (unsigned char)(x >> (i % 57)) ^ (unsigned char)(i >> 3);
}

typedef struct pattern {
    tagc_ticket ticket;
    uint64_t seed;
    tagc_part *sends, *receives; /* (W - 1) each at most */
    unsigned char *send, *recv, *expected;
    uint64_t n_recv; /* bytes in recv, guards included */
} pattern;

/* Some empty messages are named as parts of no bytes, others are not named. */
static inline uint32_t pattern_add(tagc_part *parts, uint32_t n, int peer, uint64_t n_bytes,
                                   uint64_t offset) {
    if (n_bytes == 0 && (offset + (uint64_t)peer) % 2) return n;
    parts[n] = (tagc_part){.peer = peer, .n_bytes = n_bytes, .offset = offset};
    return n + 1;
}

static inline void pattern_make(pattern *p, uint64_t seed, int rank, int world_size, uint64_t max_bytes,
                                tagc_leg leg) {
    size_t W = (size_t)world_size;
    uint64_t n_send = 0, n_recv = PATTERN_GUARD_BYTES;
    uint32_t n_sends = 0, n_receives = 0;
    *p = (pattern){
        .seed = seed, .sends = calloc(W, sizeof *p->sends), .receives = calloc(W, sizeof *p->sends)};
    for (int r = 0; r < world_size; r++) {
        if (r == rank) continue;
        uint64_t sent = pattern_bytes(seed, rank, r, max_bytes),
                 received = pattern_bytes(seed, r, rank, max_bytes);
        n_sends = pattern_add(p->sends, n_sends, r, sent, n_send);
        n_send += sent;
        n_receives = pattern_add(p->receives, n_receives, r, received, n_recv);
        n_recv += received + PATTERN_GUARD_BYTES;
    }
    p->n_recv = n_recv;
    p->send = malloc(n_send + 1);
    p->recv = malloc(n_recv);
    p->expected = malloc(n_recv);
    memset(p->recv, PATTERN_GUARD, n_recv);
    memset(p->expected, PATTERN_GUARD, n_recv);
    for (uint32_t i = 0; i < n_sends; i++)
        pattern_fill(p->send + p->sends[i].offset, p->sends[i].n_bytes, seed, rank, p->sends[i].peer);
    for (uint32_t i = 0; i < n_receives; i++)
        pattern_fill(p->expected + p->receives[i].offset, p->receives[i].n_bytes, seed, p->receives[i].peer,
                     rank);
    p->ticket.transfer = (tagc_transfer){.n_sends = n_sends,
                                         .n_receives = n_receives,
                                         .sends = p->sends,
                                         .receives = p->receives,
                                         .send = p->send,
                                         .recv = p->recv};
    p->ticket.leg = leg;
    p->ticket.tag = seed;
}

static inline uint64_t pattern_total(const tagc_part *parts, uint32_t n_parts) {
    uint64_t total = 0;
    for (uint32_t i = 0; i < n_parts; i++) total += parts[i].n_bytes;
    return total;
}

static inline uint64_t pattern_sent(const pattern *p) {
    return pattern_total(p->sends, p->ticket.transfer.n_sends);
}

static inline uint64_t pattern_received(const pattern *p) {
    return pattern_total(p->receives, p->ticket.transfer.n_receives);
}

/* Returns 1 when exactly what the others sent has arrived, and the counters say so. */
static inline int pattern_arrived(const pattern *p) {
    return memcmp(p->recv, p->expected, p->n_recv) == 0 && p->ticket.n_bytes_sent == pattern_sent(p) &&
           p->ticket.n_bytes_received == pattern_received(p);
}

static inline void pattern_free(pattern *p) {
    free(p->sends);
    free(p->receives);
    free(p->send);
    free(p->recv);
    free(p->expected);
}

/* Posts `n` patterns on each of three lanes, lanes interleaved and waited for in an order of this rank's own,
 * and returns how many did not arrive, plus one when the comm's byte counters did not grow by what was sent.
 * A comm without lanes gets one order for all. */
static inline int pattern_storm(tagc_comm *comm, uint64_t seed, int n, uint64_t max_bytes) {
    enum { N_LANES = 3 };
    int rank = tagc_comm_rank(comm), world_size = tagc_comm_world_size(comm), n_bad = 0;
    pattern *patterns = calloc((size_t)(N_LANES * n), sizeof *patterns);
    for (int i = 0; i < N_LANES * n; i++)
        pattern_make(&patterns[i], seed * 1000 + (uint64_t)i, rank, world_size, max_bytes,
                     (tagc_leg)(i % TAGC_N_LEGS));
    uint64_t sent[TAGC_N_LEGS], received[TAGC_N_LEGS];
    tagc_comm_bytes(comm, sent, received, TAGC_N_LEGS);
    int next[N_LANES] = {0};
    uint64_t own = tagc_comm_has_lanes(comm) ? (uint64_t)rank + 1 : 0;
    for (int posted = 0; posted < N_LANES * n; posted++) {
        int lane = (int)(pattern_hash(seed, own, (uint64_t)posted, 3) % N_LANES);
        while (next[lane] == n) lane = (lane + 1) % N_LANES;
        tagc_comm_post(comm, (tagc_lane)lane, &patterns[lane * n + next[lane]++].ticket);
    }
    for (int i = 0; i < N_LANES * n; i++) {
        pattern *p = &patterns[own % 2 ? i : N_LANES * n - 1 - i];
        n_bad += tagc_comm_wait(comm, &p->ticket) != TAGC_OK || !pattern_arrived(p);
        sent[p->ticket.leg] += pattern_sent(p);
        received[p->ticket.leg] += pattern_received(p);
    }
    uint64_t sent_now[TAGC_N_LEGS], received_now[TAGC_N_LEGS];
    tagc_comm_bytes(comm, sent_now, received_now, TAGC_N_LEGS);
    n_bad += memcmp(sent, sent_now, sizeof sent) != 0 || memcmp(received, received_now, sizeof received) != 0;
    for (int i = 0; i < N_LANES * n; i++) pattern_free(&patterns[i]);
    free(patterns);
    return n_bad;
}

#endif
