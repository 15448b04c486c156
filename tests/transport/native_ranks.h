/* Ranks of the native transport in one test process, or in forks of it: what they tell each other is in memory that forks
 * share. */
#ifndef TAGC_TESTS_NATIVE_RANKS_H
#define TAGC_TESTS_NATIVE_RANKS_H

#include "../ranks.h"
#include "pattern.h"
#include "transport/comm.h"

#include "core/sha256.h"
#include "tagc/native.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    NATIVE_TEST_RANKS = 16,
    CALL_BYTES = 48,
    PROOF_BYTES = 32,
    TALK_BYTES = 2 * (CALL_BYTES + PROOF_BYTES)
};

typedef struct native_group {
    int world_size;
    const char *local;
    int n_sockets;
    int n_threads; /* of each rank's connections; TAGC_TEST_NATIVE_THREADS, or 0 */
    int tls;
    int32_t names[NATIVE_TEST_RANKS];
    double timeout_s; /* of comms */
    pthread_barrier_t opened, met;
    unsigned char addresses[NATIVE_TEST_RANKS][TAGC_NATIVE_ADDRESS_BYTES];
    void *extra;
    pid_t fork; /* of a rank that is a process; it sleeps */
} native_group;

static inline native_group *native_group_make(int world_size, int n_sockets) {
    native_group *group =
        mmap(NULL, sizeof *group, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(group != MAP_FAILED);
    *group = (native_group){
        .world_size = world_size, .local = "127.0.0.1", .n_sockets = n_sockets, .timeout_s = 60};
    const char *n_threads = getenv("TAGC_TEST_NATIVE_THREADS");
    if (n_threads) group->n_threads = atoi(n_threads);
    for (int r = 0; r < NATIVE_TEST_RANKS; r++) group->names[r] = r;
    pthread_barrierattr_t shared;
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&group->opened, &shared, (unsigned)world_size);
    pthread_barrier_init(&group->met, &shared, (unsigned)world_size);
    pthread_barrierattr_destroy(&shared);
    return group;
}

static inline void native_group_free(native_group *group) {
    munmap(group, sizeof *group);
}

/* With what rank `from` proves itself to rank `to`. */
static inline void native_key(int from, int to, unsigned char *key) {
    pattern_fill(key, TAGC_NATIVE_KEY_BYTES, 99, from, to);
}

static inline void native_keys(int rank, int world_size, unsigned char *keys) {
    for (int r = 0; r < world_size; r++) {
        native_key(rank, r, keys + (size_t)(2 * r) * TAGC_NATIVE_KEY_BYTES);
        native_key(r, rank, keys + (size_t)(2 * r + 1) * TAGC_NATIVE_KEY_BYTES);
    }
}

static inline tagc_native *native_open(rank_run *run, native_group *group) {
    tagc_native_options options;
    tagc_native *native = NULL;
    tagc_native_options_init(&options);
    options.local = group->local;
    options.n_sockets = group->n_sockets;
    options.n_threads = (uint64_t)group->n_threads;
    options.names = group->names;
    options.tls = (uint64_t)group->tls;
    CHECK(run, tagc_native_open(&options, run->rank, group->world_size, &native) == TAGC_OK);
    if (native) CHECK(run, tagc_native_address(native, group->addresses[run->rank]) == TAGC_OK);
    return native;
}

static inline tagc_comm *native_join(rank_run *run, native_group *group, tagc_native *native) {
    unsigned char keys[2 * NATIVE_TEST_RANKS * TAGC_NATIVE_KEY_BYTES];
    native_keys(run->rank, group->world_size, keys);
    tagc_status status = tagc_native_connect(native, group->addresses, keys, 60);
    CHECK(run, status == TAGC_OK);
    tagc_comm *comm = NULL;
    tagc_comm_options options;
    tagc_comm_options_init(&options);
    options.timeout_s = group->timeout_s;
    if (status == TAGC_OK) CHECK(run, tagc_comm_create_native(native, &options, &comm) == TAGC_OK);
    if (!comm) tagc_native_destroy(native);
    return comm;
}

/* NULL after a failure, which is recorded. */
static inline tagc_comm *native_comm(rank_run *run, native_group *group) {
    tagc_native *native = native_open(run, group);
    pthread_barrier_wait(&group->opened);
    return native ? native_join(run, group, native) : NULL;
}

/* ---- a peer that is a bare socket ---- */

static inline int native_dial(const unsigned char *address) {
    struct sockaddr_in to = {.sin_family = AF_INET};
    memcpy(&to.sin_port, address + 8, 2);
    memcpy(&to.sin_addr, address + 16, 4);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&to, sizeof to) == 0) return fd;
    if (fd >= 0) close(fd);
    return -1;
}

/* Each talk has random numbers of its own, which are `nonce` in all bytes. */
static inline void write_call(unsigned char *call, int kind, int from, int to, int index, int nonce) {
    memset(call, 0, 16);
    memset(call + 16, nonce, CALL_BYTES - 16);
    memcpy(call, "tagc", 4);
    call[4] = 2;
    call[5] = (unsigned char)kind;
    call[6] = (unsigned char)index;
    call[8] = (unsigned char)from;
    call[12] = (unsigned char)to;
}

/* Behind a talk of n bytes: that of rank `from` for rank `to`. */
static inline void write_proof(unsigned char *talk, size_t n, int from, int to) {
    unsigned char key[TAGC_NATIVE_KEY_BYTES];
    native_key(from, to, key);
    tagc_hmac_sha256(key, sizeof key, talk, n, talk + n);
}

static inline int is_proof(const unsigned char *talk, size_t n, int from, int to) {
    unsigned char copy[TALK_BYTES];
    memcpy(copy, talk, n);
    write_proof(copy, n, from, to);
    return memcmp(copy + n, talk + n, PROOF_BYTES) == 0;
}

static inline int send_all(int fd, const void *bytes, size_t n) {
    return fd >= 0 && send(fd, bytes, n, MSG_NOSIGNAL) == (ssize_t)n;
}

static inline int receive_all(int fd, void *bytes, size_t n) {
    const struct timeval limit = {.tv_sec = 30};
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    return recv(fd, bytes, n, MSG_WAITALL) == (ssize_t)n;
}

/* Calls as rank `from`, and goes on with the talk until it is open. Returns the socket, or -1. */
static inline int call_as(int from, int to, int index, const unsigned char *address, unsigned char *talk) {
    enum { PROOF_AT = 2 * CALL_BYTES };
    int fd = native_dial(address);
    write_call(talk, 1, from, to, index, 1);
    int is_heard = send_all(fd, talk, CALL_BYTES) && receive_all(fd, talk + CALL_BYTES, CALL_BYTES);
    if (is_heard) write_proof(talk, PROOF_AT, from, to);
    if (is_heard && send_all(fd, talk + PROOF_AT, PROOF_BYTES) &&
        receive_all(fd, talk + PROOF_AT + PROOF_BYTES, PROOF_BYTES) &&
        is_proof(talk, PROOF_AT + PROOF_BYTES, to, from))
        return fd;
    if (fd >= 0) close(fd);
    return -1;
}

static inline int has(const char *part) {
    return strstr(tagc_last_error(), part) != NULL;
}

#endif
