/* All ranks but rank 0 of a job that is connected by the native transport, in one thread: what rank 0 sends to rank r comes back
 * from rank W - r, in the same place of the transfer, some time later (tests/delaying.h does the same without sockets). For
 * where an exchange goes round, rank 0 sends to rank s and receives from rank W - s. */
#ifndef TAGC_BENCH_NATIVE_ECHO_H
#define TAGC_BENCH_NATIVE_ECHO_H

#include "../tests/delaying.h"
#include "tagc/native.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { ECHO_HELLO = 48, ECHO_HEADER = 32, ECHO_MOST_RANKS = 256, ECHO_BODY = 1 << 18 };

typedef struct echo_answer {
    double due_s;
    int peer;
    size_t n_bytes;
    struct echo_answer *next;
    unsigned char bytes[];
} echo_answer;

typedef struct native_echo {
    int world_size;
    double latency_s;
    unsigned char addresses[ECHO_MOST_RANKS * TAGC_NATIVE_ADDRESS_BYTES];
    int fds[ECHO_MOST_RANKS];
    echo_answer *first, **end; /* in the order in which they are due */
    pthread_t thread;
} native_echo;

static inline void echo_all(int fd, void *bytes, size_t n_bytes, int is_send) {
    for (size_t at = 0; at < n_bytes;) {
        ssize_t n = is_send ? send(fd, (char *)bytes + at, n_bytes - at, MSG_NOSIGNAL)
                            : recv(fd, (char *)bytes + at, n_bytes - at, MSG_WAITALL);
        if (n <= 0) abort();
        at += (size_t)n;
    }
}

static inline void echo_call(native_echo *echo, int rank) {
    struct sockaddr_in to = {.sin_family = AF_INET};
    memcpy(&to.sin_port, echo->addresses + 8, 2);
    memcpy(&to.sin_addr, echo->addresses + 16, 4);
    int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to) != 0) abort();
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    unsigned char hello[ECHO_HELLO] = {
        't', 'a', 'g', 'c', 1, 1, 0, 0, (unsigned char)rank}; /* its key is zero */
    echo_all(fd, hello, sizeof hello, 1);
    echo_all(fd, hello, sizeof hello, 0);
    echo->fds[rank] = fd;
}

/* Returns 0 when rank 0 has left. */
static inline int echo_hear(native_echo *echo, int rank) {
    unsigned char header[ECHO_HEADER];
    if (recv(echo->fds[rank], header, sizeof header, MSG_WAITALL) != ECHO_HEADER || header[0] != 1) return 0;
    uint32_t n_bytes = header[4] | (uint32_t)header[5] << 8 | (uint32_t)header[6] << 16;
    echo_answer *answer = malloc(sizeof *answer + ECHO_HEADER + n_bytes);
    if (!answer) abort();
    *answer = (echo_answer){.due_s = tagc_clock_s() + echo->latency_s,
                            .peer = echo->world_size - rank,
                            .n_bytes = ECHO_HEADER + n_bytes};
    memcpy(answer->bytes, header, ECHO_HEADER);
    echo_all(echo->fds[rank], answer->bytes + ECHO_HEADER, n_bytes, 0);
    delaying_rename(answer->bytes + ECHO_HEADER, n_bytes, answer->peer);
    *echo->end = answer;
    echo->end = &answer->next;
    return 1;
}

static inline void echo_answer_due(native_echo *echo) {
    while (echo->first && echo->first->due_s <= tagc_clock_s()) {
        echo_answer *answer = echo->first;
        echo_all(echo->fds[answer->peer], answer->bytes, answer->n_bytes, 1);
        echo->first = answer->next;
        if (!echo->first) echo->end = &echo->first;
        free(answer);
    }
}

static inline void *echo_main(void *arg) {
    native_echo *echo = arg;
    struct pollfd polled[ECHO_MOST_RANKS];
    for (int r = 1; r < echo->world_size; r++) {
        echo_call(echo, r);
        polled[r] = (struct pollfd){.fd = echo->fds[r], .events = POLLIN};
    }
    for (int is_over = 0; !is_over;) {
        double wait_s = echo->first ? echo->first->due_s - tagc_clock_s() : 1;
        const struct timespec pause = {.tv_nsec = wait_s > 0 ? (long)(wait_s * 1e9) % 1000000000 : 0};
        if (ppoll(polled + 1, (nfds_t)(echo->world_size - 1), &pause, NULL) > 0)
            for (int r = 1; r < echo->world_size; r++)
                if (polled[r].revents && !echo_hear(echo, r)) is_over = 1;
        echo_answer_due(echo);
    }
    for (int r = 1; r < echo->world_size; r++) close(echo->fds[r]);
    return NULL;
}

/* Rank 0's comm, and the thread of the others. */
static inline tagc_status native_echo_create(native_echo *echo, int world_size, double latency_s,
                                             tagc_comm **out) {
    static const unsigned char keys[2 * ECHO_MOST_RANKS * TAGC_NATIVE_KEY_BYTES];
    tagc_native_options options;
    tagc_native *native;
    *echo = (native_echo){.world_size = world_size, .latency_s = latency_s};
    echo->end = &echo->first;
    tagc_native_options_init(&options);
    options.local = "127.0.0.1";
    TAGC_TRY(tagc_native_open(&options, 0, world_size, &native));
    for (int r = 0; r < world_size; r++) /* rank 0 calls nobody */
        TAGC_TRY(tagc_native_address(native, echo->addresses + (size_t)r * TAGC_NATIVE_ADDRESS_BYTES));
    if (pthread_create(&echo->thread, NULL, echo_main, echo)) abort();
    TAGC_TRY(tagc_native_connect(native, echo->addresses, keys, 60));
    return tagc_comm_create_native(native, NULL, out);
}

/* After the comm is destroyed. */
static inline void native_echo_end(native_echo *echo) {
    pthread_join(echo->thread, NULL);
    for (echo_answer *next, *answer = echo->first; answer; answer = next) {
        next = answer->next;
        free(answer);
    }
}

#endif
