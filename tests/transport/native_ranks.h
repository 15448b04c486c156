/* Ranks of the native transport in one test process, or in forks of it: what they tell each other is in memory that forks
 * share. */
#ifndef TAGC_TESTS_NATIVE_RANKS_H
#define TAGC_TESTS_NATIVE_RANKS_H

#include "pattern.h"
#include "ranks.h"

#include "tagc/native.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

enum { NATIVE_TEST_RANKS = 16, NATIVE_TEST_HELLO = 48 };

typedef struct native_group {
    int world_size;
    const char *local;
    int n_sockets;
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

/* What rank `from` shows to rank `to`. */
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
    options.names = group->names;
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

static inline void native_hello(unsigned char *hello, int kind, int from, int to, int index, int key_from,
                                int key_to) {
    memset(hello, 0, NATIVE_TEST_HELLO);
    memcpy(hello, "tagc", 4);
    hello[4] = 1;
    hello[5] = (unsigned char)kind;
    hello[6] = (unsigned char)index;
    hello[8] = (unsigned char)from;
    hello[12] = (unsigned char)to;
    native_key(key_from, key_to, hello + 16);
}

static inline int has(const char *part) {
    return strstr(tagc_last_error(), part) != NULL;
}

#endif
