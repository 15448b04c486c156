/* Further loops, each with a thread, for links that one thread does not fill: the kernel's copies are what takes the time, and it makes
 * those of several threads at the same time. Loop i takes the connections of every peer whose index leaves i, so that small messages
 * leave by the comm's own thread, on connection 0, and wait for nobody. */
#include "transport/native/native.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MBITS_OF_A_THREAD = 15000, MOST_BY_LINK = 4 };

/* ---- how many ---- */

static int is_same(const struct sockaddr *a, const struct sockaddr_storage *b) {
    if (!a || a->sa_family != b->ss_family) return 0;
    if (a->sa_family == AF_INET)
        return !memcmp(&((const struct sockaddr_in *)a)->sin_addr, &((const struct sockaddr_in *)b)->sin_addr,
                       sizeof(struct in_addr));
    return a->sa_family == AF_INET6 &&
           !memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr, &((const struct sockaddr_in6 *)b)->sin6_addr,
                   sizeof(struct in6_addr));
}

/* Mbit/s of the interface that has this rank's address; 0: the system does not say, as of loopback and of most virtual ones. */
static long link_mbits(const tagc_native *self) {
    struct ifaddrs *all = NULL;
    char path[64 + IF_NAMESIZE] = "";
    long mbits = 0;
    if (getifaddrs(&all) != 0) return 0;
    for (const struct ifaddrs *one = all; one; one = one->ifa_next)
        if (is_same(one->ifa_addr, &self->address))
            snprintf(path, sizeof path, "/sys/class/net/%s/speed", one->ifa_name);
    freeifaddrs(all);
    FILE *file = path[0] ? fopen(path, "r") : NULL;
    if (!file) return 0;
    if (fscanf(file, "%ld", &mbits) != 1) mbits = 0;
    fclose(file);
    return mbits > 0 ? mbits : 0;
}

static int count_threads(const tagc_native *self) {
    int n = self->n_threads;
    if (n == 0) {
        long n_here = self->n_here > 0 ? self->n_here : 1,
             of_cores = sysconf(_SC_NPROCESSORS_ONLN) / n_here / 2;
        long of_link = (link_mbits(self) / n_here + MBITS_OF_A_THREAD - 1) / MBITS_OF_A_THREAD;
        long wanted = of_link < of_cores ? of_link : of_cores;
        n = (int)(wanted < 1 ? 1 : wanted > MOST_BY_LINK ? MOST_BY_LINK : wanted);
    }
    return n < self->n_sockets ? n : self->n_sockets;
}

/* ---- their loops ---- */

static void on_wake(uv_async_t *wake) {
    native_loop *loop = wake->data;
    tagc_native *self = loop->self;
    tagc_native_take_state(self);
    for (int r = 0; r < self->world_size; r++) {
        native_peer *peer = &self->peers[r];
        for (int i = 1; i < self->n_sockets && (peer->first || peer->first_ready); i++)
            if (peer->sockets[i] && peer->sockets[i]->loop == loop)
                tagc_native_write_pieces(peer->sockets[i]);
    }
    tagc_native_leave_state(self);
}

static native_loop *make_loop(tagc_native *self) {
    void *memory;
    if (tagc_memory_create(sizeof(native_loop), "a loop of connections", &memory) != TAGC_OK) return NULL;
    native_loop *loop = memory;
    loop->self = self;
    loop->wake.data = loop;
    if (uv_loop_init(&loop->uv) == 0) {
        if (uv_async_init(&loop->uv, &loop->wake, on_wake) == 0) return loop;
        uv_loop_close(&loop->uv);
    }
    tagc_memory_destroy(loop);
    return NULL;
}

static void on_moved(uv_handle_t *handle) {
    free(handle->data);
}

/* Into that loop, as another native_socket. */
static void move_socket(native_socket *from, native_loop *loop) {
    native_socket *to = malloc(sizeof *to);
    if (!to) return;
    tagc_native_lock_sockets(); /* others change where it is in the list of all */
    *to = *from;
    tagc_native_unlock_sockets();
    to->loop = loop;
    to->held = (native_held){0};
    to->tcp.data = to;
    if (tagc_native_move_tcp(&from->tcp, &from->held, &loop->uv, &to->tcp, &to->held, on_moved) == 0)
        from->peer->sockets[from->index] = to;
}

void tagc_native_share(tagc_native *self) {
    int n_more = count_threads(self) - 1, n = 0;
    while (n < n_more && (self->more[n] = make_loop(self)) != NULL) n++;
    for (int r = 0; r < self->world_size && n; r++)
        for (int i = 0; i < self->n_sockets; i++) {
            native_socket *socket = self->peers[r].sockets[i];
            if (socket && i % (n + 1)) move_socket(socket, self->more[i % (n + 1) - 1]);
        }
    self->n_more = n;
    if (n) uv_run(&self->loop, UV_RUN_NOWAIT); /* lets go of what was moved: nothing reads yet */
}

static void *loop_main(void *arg) {
    native_loop *loop = arg;
    while (!atomic_load(&loop->ends)) uv_run(&loop->uv, UV_RUN_ONCE);
    return NULL;
}

void tagc_native_start_threads(tagc_native *self) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before); /* SIGPIPE, and those that are the caller's */
    for (int i = 0; i < self->n_more; i++)
        self->more[i]->has_thread =
            pthread_create(&self->more[i]->thread, NULL, loop_main, self->more[i]) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void tagc_native_end_threads(tagc_native *self) {
    for (int i = 0; i < self->n_more; i++) {
        native_loop *loop = self->more[i];
        if (!loop->has_thread) continue;
        atomic_store(&loop->ends, 1);
        uv_async_send(&loop->wake);
        pthread_join(loop->thread, NULL);
        loop->has_thread = 0;
    }
}
