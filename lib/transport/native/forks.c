/* A fork, such as a data loader's worker, must not keep its parent's connections open: if the parent is killed, its peers would
 * see no end of them while the fork lives. So the child closes its copies, and the parent's connections go on.
 *
 * All sockets of the process are in one list. Its lock is held while a process forks, and wherever a socket is made, noted or
 * closed. libuv accepts a caller before it says so. If the process forked in between, a child has a copy that no list had: the
 * parent then hangs up, and the caller calls again. */
#include "transport/native/native.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static native_held *held_first;
static uint64_t n_forks; /* of this process */

/* ---- what fork() calls ---- */

static void before_fork(void) {
    pthread_mutex_lock(&lock);
}

static void in_parent(void) {
    n_forks++;
    pthread_mutex_unlock(&lock);
}

static void in_child(void) {
    for (native_held *held = held_first; held; held = held->next) close(held->fd);
    held_first = NULL;
    pthread_mutex_unlock(&lock);
}

static void listen_to_forks(void) {
    pthread_atfork(before_fork, in_parent, in_child);
}

/* ---- the list ---- */

void tagc_native_lock_sockets(void) {
    pthread_once(&once, listen_to_forks);
    pthread_mutex_lock(&lock);
}

void tagc_native_unlock_sockets(void) {
    pthread_mutex_unlock(&lock);
}

void tagc_native_note_socket(const uv_tcp_t *tcp, native_held *held) {
    uv_os_fd_t fd;
    if (held->is_noted || uv_fileno((const uv_handle_t *)tcp, &fd) < 0) return;
    *held = (native_held){.fd = fd, .is_noted = 1, .next = held_first};
    if (held_first) held_first->before = held;
    held_first = held;
}

uint64_t tagc_native_forks(void) {
    tagc_native_lock_sockets();
    uint64_t n = n_forks;
    tagc_native_unlock_sockets();
    return n;
}

int tagc_native_accept(uv_stream_t *listener, uv_tcp_t *tcp, native_held *held, uint64_t n_forks_before) {
    tagc_native_lock_sockets();
    int error = uv_accept(listener, (uv_stream_t *)tcp);
    uv_os_fd_t fd;
    if (error == 0) tagc_native_note_socket(tcp, held);
    if (error == 0 && n_forks != n_forks_before) {
        error = UV_ECANCELED;
        if (uv_fileno((const uv_handle_t *)tcp, &fd) == 0) shutdown(fd, SHUT_RDWR);
    }
    tagc_native_unlock_sockets();
    return error;
}

/* With the lock. */
static void forget(native_held *held) {
    if (!held->is_noted) return;
    if (held->next) held->next->before = held->before;
    if (held->before)
        held->before->next = held->next;
    else
        held_first = held->next;
    held->is_noted = 0;
}

int tagc_native_move_tcp(uv_tcp_t *from, native_held *from_held, uv_loop_t *loop, uv_tcp_t *to,
                         native_held *to_held, uv_close_cb on_closed) {
    uv_os_fd_t fd;
    int error = uv_tcp_init(loop, to);
    if (error < 0) {
        on_closed((uv_handle_t *)to);
        return error;
    }
    tagc_native_lock_sockets();
    error = uv_fileno((const uv_handle_t *)from, &fd);
    int copy = error == 0 ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
    if (error == 0) error = copy < 0 ? UV_EMFILE : uv_tcp_open(to, copy);
    if (error == 0) {
        tagc_native_note_socket(to, to_held);
        forget(from_held);
    } else if (copy >= 0) {
        close(copy);
    }
    uv_close((uv_handle_t *)(error == 0 ? from : to), on_closed);
    tagc_native_unlock_sockets();
    return error;
}

void tagc_native_close_tcp(uv_tcp_t *tcp, native_held *held, uv_close_cb on_closed) {
    tagc_native_lock_sockets();
    forget(held);
    uv_close((uv_handle_t *)tcp, on_closed); /* the socket itself is closed at once */
    tagc_native_unlock_sockets();
}
