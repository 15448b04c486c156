/* Connections to all ranks: each rank calls those below it and is called by those above. Both prove that they have their key:
 *
 *   caller                                                       called rank
 *   call: who it is, a random number                         --->
 *                                                            <---  challenge: who it is, another random number
 *   proof: HMAC(its key, call | challenge)                   --->
 *                                                            <---  proof: HMAC(its key, all of the above)
 *
 * Both random numbers are in both proofs, so nobody can use again what it has seen. Who does not prove soon that it is a rank is refused,
 * however many such connections there are; a rank that was refused by mistake, because others filled the port, calls again. The caller's
 * end opens after the other, so that it hears where it was refused. */
#include "core/clock.h"
#include "core/sha256.h"
#include "transport/native/native.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    CALL = 1,
    CHALLENGE = 2,
    TICK_MS = 20,
    FIRST_RETRY_MS = 20,
    MOST_RETRY_MS = 1000,
    TALK_MS = 10000,
    KEEP_ALIVE_S = 60,
    TICKS_PER_LOOK = 10 /* at all open connections */
};
enum { MORE_PENDING = 128 }; /* than ranks have connections to open */

/* ---- the lock ---- */

void tagc_native_enter(tagc_native *self, native_guard *guard) {
    sigset_t pipe, pending;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    sigpending(&pending);
    guard->had_pipe = sigismember(&pending, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, &guard->before);
    pthread_mutex_lock(&self->lock);
}

void tagc_native_leave(tagc_native *self, native_guard *guard) {
    pthread_mutex_unlock(&self->lock);
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    const struct timespec now = {0};
    if (!guard->had_pipe) sigtimedwait(&pipe, NULL, &now);
    pthread_sigmask(SIG_SETMASK, &guard->before, NULL);
}

/* ---- closing ---- */

static void on_closed(uv_handle_t *handle) {
    native_socket *socket = handle->data;
    tagc_native_tls_end(socket->tls);
    free(socket->in_early);
    free(socket);
}

static void forget_pending(tagc_native *self, const native_socket *socket) {
    for (native_socket **link = &self->pending; *link; link = &(*link)->next)
        if (*link == socket) {
            *link = socket->next;
            self->n_pending--;
            return;
        }
}

void tagc_native_close_socket(native_socket *socket) {
    if (socket->is_closing) return;
    socket->is_closing = 1;
    native_peer *peer = socket->peer;
    if (!peer) forget_pending(socket->self, socket);
    if (peer && peer->sockets[socket->index] == socket) {
        peer->sockets[socket->index] = NULL;
        if (socket->is_open) peer->n_open--;
    }
    tagc_native_close_tcp(&socket->tcp, &socket->held, on_closed);
}

void tagc_native_close_all(tagc_native *self) {
    for (int r = 0; r < self->world_size; r++)
        for (int i = 0; i < self->n_sockets; i++)
            if (self->peers[r].sockets[i]) tagc_native_close_socket(self->peers[r].sockets[i]);
    while (self->pending) tagc_native_close_socket(self->pending);
    if (self->is_listening && !uv_is_closing((uv_handle_t *)&self->listener))
        tagc_native_close_tcp(&self->listener, &self->listener_held, NULL);
    self->is_listening = 0;
    for (int i = 0; i < self->n_more; i++) {
        uv_handle_t *wake = (uv_handle_t *)&self->more[i]->wake;
        if (!uv_is_closing(wake)) uv_close(wake, NULL);
        uv_run(&self->more[i]->uv, UV_RUN_DEFAULT);
    }
    uv_run(&self->loop, UV_RUN_DEFAULT); /* until no handle is left */
}

static void refuse(native_socket *socket) {
    socket->self->n_refused++;
    tagc_native_close_socket(socket);
}

static tagc_status make_socket(tagc_native *self, native_socket **out) {
    native_socket *socket = calloc(1, sizeof *socket);
    *out = NULL;
    if (!socket) return tagc_fail(TAGC_ERR_MEMORY, "out of memory for a connection");
    int error = uv_tcp_init(&self->loop, &socket->tcp);
    if (error < 0) {
        free(socket);
        return tagc_fail(TAGC_ERR_MEMORY, "no socket: %s", uv_strerror(error));
    }
    socket->tcp.data = socket;
    socket->self = self;
    *out = socket;
    return TAGC_OK;
}

/* ---- what both ends say ---- */

static void put(unsigned char *to, uint32_t value) {
    for (int i = 0; i < 4; i++) to[i] = (unsigned char)(value >> (8 * i));
}

static uint32_t get(const unsigned char *from) {
    uint32_t value = 0;
    for (int i = 0; i < 4; i++) value |= (uint32_t)from[i] << (8 * i);
    return value;
}

static const unsigned char *key(const tagc_native *self, int rank, int is_theirs) {
    return self->keys + ((size_t)rank * 2 + (size_t)is_theirs) * TAGC_NATIVE_KEY_BYTES;
}

/* Over all that both ends have said so far. */
static void prove(const native_socket *socket, int rank, int is_theirs, unsigned char *proof) {
    tagc_hmac_sha256(key(socket->self, rank, is_theirs), TAGC_NATIVE_KEY_BYTES, socket->talk, socket->n_talk,
                     proof);
}

static void add_proof(native_socket *socket, int rank) {
    prove(socket, rank, 0, socket->talk + socket->n_talk);
    socket->n_talk += NATIVE_PROOF_BYTES;
}

/* Of the last that was heard. */
static int is_proved(native_socket *socket, int rank) {
    unsigned char expected[NATIVE_PROOF_BYTES];
    uint32_t n_talk = socket->n_talk;
    socket->n_talk -= NATIVE_PROOF_BYTES;
    prove(socket, rank, 1, expected);
    socket->n_talk = n_talk;
    return tagc_is_same_secret(socket->talk + n_talk - NATIVE_PROOF_BYTES, expected, sizeof expected);
}

/* Returns 0, or an error of libuv. */
static int write_now(native_socket *socket, const void *bytes, size_t n_bytes) {
    uv_buf_t buffer = uv_buf_init((char *)(uintptr_t)bytes, (unsigned)n_bytes);
    int n = uv_try_write((uv_stream_t *)&socket->tcp, &buffer, 1);
    return n == (int)n_bytes ? 0 : n < 0 ? n : UV_EIO;
}

/* Sends what was added to the talk, and awaits so many bytes. */
static int say(native_socket *socket, uint32_t n_before, uint32_t n_expected) {
    socket->n_awaited = socket->n_talk + n_expected;
    return write_now(socket, socket->talk + n_before, socket->n_talk - n_before);
}

static int add_call(native_socket *socket, int kind, int to) {
    const tagc_native *self = socket->self;
    unsigned char *call = socket->talk + socket->n_talk;
    memcpy(call, "tagc", 4);
    call[4] = NATIVE_VERSION;
    call[5] = (unsigned char)kind;
    call[6] = (unsigned char)socket->index;
    call[7] = self->tls != NULL;
    put(call + 8, (uint32_t)self->rank);
    put(call + 12, (uint32_t)to);
    socket->n_talk += NATIVE_CALL_BYTES;
    return uv_random(NULL, NULL, call + 16, NATIVE_NONCE_BYTES, 0, NULL);
}

/* Returns who says that it calls, or NULL if no rank would say that. */
static native_peer *recognise(tagc_native *self, const unsigned char *call, int kind) {
    uint32_t from = get(call + 8), to = get(call + 12);
    int is_one = memcmp(call, "tagc", 4) == 0 && call[4] == NATIVE_VERSION && call[5] == kind &&
                 call[6] < self->n_sockets && call[7] == (self->tls != NULL) && to == (uint32_t)self->rank &&
                 from < (uint32_t)self->world_size && (kind == CALL ? from > to : from < to);
    return is_one ? &self->peers[from] : NULL;
}

static void open_socket(native_socket *socket) {
    uv_read_stop((uv_stream_t *)&socket->tcp); /* frames may follow; they are for later */
    uv_tcp_nodelay(&socket->tcp, 1);
    uv_tcp_keepalive(&socket->tcp, 1, KEEP_ALIVE_S);
    socket->is_open = 1;
    socket->peer->n_open++;
}

/* ---- the called end ---- */

/* Nothing is left to read and the other end is closed, so that it was no rank's last words. */
static int is_dead(const native_socket *socket) {
    uv_os_fd_t fd;
    char byte;
    if (uv_fileno((const uv_handle_t *)&socket->tcp, &fd) != 0 || tagc_native_tls_has_more(socket->tls))
        return 0;
    ssize_t n = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

/* It has proved that it is that rank. If it has called before, that connection has ended, as it knows first. */
static void welcome(native_socket *socket, int rank) {
    native_peer *peer = &socket->self->peers[rank];
    if (peer->sockets[socket->index]) tagc_native_close_socket(peer->sockets[socket->index]);
    forget_pending(socket->self, socket);
    socket->peer = peer;
    peer->sockets[socket->index] = socket;
}

/* Hears the call, then the proof. */
static int hear_caller(native_socket *socket) {
    uint32_t n_before = socket->n_talk;
    int rank = (int)get(socket->talk + 8);
    if (n_before == NATIVE_CALL_BYTES) {
        if (!recognise(socket->self, socket->talk, CALL)) return UV_EPROTO;
        socket->index = socket->talk[6];
        int error = add_call(socket, CHALLENGE, rank);
        return error < 0 ? error : say(socket, n_before, NATIVE_PROOF_BYTES);
    }
    if (!is_proved(socket, rank)) return UV_EPROTO;
    welcome(socket, rank);
    add_proof(socket, rank);
    return say(socket, n_before, 0);
}

/* ---- the calling end ---- */

static void retry_later(native_socket *socket, int error) {
    native_peer *peer = socket->peer;
    uint64_t *retry_ms = &peer->retry_ms[socket->index], *pause_ms = &peer->pause_ms;
    *pause_ms = *pause_ms ? *pause_ms * 2 : FIRST_RETRY_MS;
    if (*pause_ms > MOST_RETRY_MS) *pause_ms = MOST_RETRY_MS;
    *retry_ms = uv_now(&socket->self->loop) + *pause_ms;
    peer->last_error = error;
    tagc_native_close_socket(socket);
}

static void give_room(uv_handle_t *handle, size_t wanted, uv_buf_t *buffer);
static void on_heard(uv_stream_t *stream, ssize_t n, const uv_buf_t *buffer);

static void on_connected(uv_connect_t *connecting, int status) {
    native_socket *socket = connecting->data;
    if (socket->is_closing) return;
    if (status == 0) status = add_call(socket, CALL, socket->peer->rank);
    if (status == 0) status = say(socket, 0, NATIVE_CALL_BYTES);
    if (status == 0) status = uv_read_start((uv_stream_t *)&socket->tcp, give_room, on_heard);
    if (status < 0) retry_later(socket, status);
}

/* Hears the challenge, then the proof. */
static int hear_called(native_socket *socket) {
    const unsigned char *challenge = socket->talk + NATIVE_CALL_BYTES;
    uint32_t n_before = socket->n_talk;
    int rank = socket->peer->rank;
    if (n_before == NATIVE_TALK_BYTES) return is_proved(socket, rank) ? 0 : UV_EPROTO;
    if (recognise(socket->self, challenge, CHALLENGE) != socket->peer || challenge[6] != socket->index)
        return UV_EPROTO;
    add_proof(socket, rank);
    return say(socket, n_before, NATIVE_PROOF_BYTES);
}

static tagc_status call(tagc_native *self, native_peer *peer, int index) {
    struct sockaddr_storage address;
    TAGC_TRY(tagc_native_read_address(
        self, peer->rank, self->addresses + (size_t)peer->rank * TAGC_NATIVE_ADDRESS_BYTES, &address));
    native_socket *socket;
    TAGC_TRY(make_socket(self, &socket));
    socket->is_caller = 1;
    socket->peer = peer;
    socket->index = index;
    socket->connecting.data = socket;
    peer->sockets[index] = socket;
    tagc_native_lock_sockets();
    int error =
        uv_tcp_connect(&socket->connecting, &socket->tcp, (const struct sockaddr *)&address, on_connected);
    tagc_native_note_socket(&socket->tcp, &socket->held);
    tagc_native_unlock_sockets();
    if (error < 0) retry_later(socket, error);
    return TAGC_OK;
}

/* ---- either end ---- */

static void fail(native_socket *socket, int error) {
    if (socket->is_caller)
        retry_later(socket, error);
    else if (socket->peer)
        tagc_native_close_socket(socket); /* it will call again */
    else
        refuse(socket);
}

/* Goes on with the handshake of TLS. Its first bytes may follow the proof at once. */
static void shake(native_socket *socket) {
    size_t n_bytes;
    int is_done = tagc_native_tls_shake(socket->tls);
    const void *bytes = tagc_native_tls_sealed(socket->tls, &n_bytes);
    if (is_done < 0 || (n_bytes && write_now(socket, bytes, n_bytes) < 0))
        fail(socket, UV_EPROTO);
    else if (is_done)
        open_socket(socket);
}

/* Both ends have proved who they are. Only they can know this key, and no other connection has it. */
static void seal_or_open(native_socket *socket) {
    unsigned char both[TAGC_SHA256_BYTES];
    int rank = socket->peer->rank;
    if (!socket->self->tls) {
        open_socket(socket);
        return;
    }
    prove(socket, rank, !socket->is_caller, both); /* the caller's key */
    tagc_hmac_sha256(key(socket->self, rank, socket->is_caller), TAGC_NATIVE_KEY_BYTES, both, sizeof both,
                     both);
    socket->tls = tagc_native_tls_begin(socket->self->tls, socket->is_caller, both);
    if (socket->tls)
        shake(socket);
    else
        fail(socket, UV_ENOMEM);
}

static void give_room(uv_handle_t *handle, size_t wanted, uv_buf_t *buffer) {
    native_socket *socket = handle->data;
    (void)wanted;
    *buffer = socket->tls ? uv_buf_init((char *)socket->self->staging, NATIVE_STAGING_BYTES)
                          : uv_buf_init((char *)socket->talk + socket->n_talk,
                                        socket->n_awaited - socket->n_talk); /* frames may follow */
}

static void on_heard(uv_stream_t *stream, ssize_t n, const uv_buf_t *buffer) {
    native_socket *socket = stream->data;
    if (n < 0) fail(socket, (int)n);
    if (n <= 0) return;
    if (socket->tls) {
        if (tagc_native_tls_put(socket->tls, buffer->base, (size_t)n))
            shake(socket);
        else
            fail(socket, UV_ENOMEM);
        return;
    }
    socket->n_talk += (uint32_t)n;
    if (socket->n_talk < socket->n_awaited) return;
    int error = socket->is_caller ? hear_called(socket) : hear_caller(socket);
    if (error < 0)
        fail(socket, error);
    else if (socket->n_talk == NATIVE_TALK_BYTES)
        seal_or_open(socket);
}

/* ---- strangers ---- */

void tagc_native_on_caller(uv_stream_t *listener, int status) {
    tagc_native *self = listener->data;
    native_socket *socket;
    if (status < 0 || !self->keys || make_socket(self, &socket) != TAGC_OK) return;
    socket->next = self->pending;
    self->pending = socket;
    self->n_pending++;
    socket->deadline_ms = uv_now(&self->loop) + TALK_MS;
    socket->n_awaited = NATIVE_CALL_BYTES;
    int error = tagc_native_accept(listener, &socket->tcp, &socket->held, self->n_forks);
    if (error == 0) error = uv_read_start((uv_stream_t *)&socket->tcp, give_room, on_heard);
    if (error == UV_ECANCELED) {
        tagc_native_close_socket(socket); /* it will call again */
        return;
    }
    if (error < 0) refuse(socket);
    /* a rank speaks at once, so the oldest is none */
    native_socket *oldest = self->pending;
    while (oldest && oldest->next) oldest = oldest->next;
    if (self->n_pending > self->world_size * self->n_sockets + MORE_PENDING) refuse(oldest);
}

static void refuse_late(tagc_native *self, uint64_t now_ms) {
    for (native_socket *next, *socket = self->pending; socket; socket = next) {
        next = socket->next;
        if (socket->deadline_ms <= now_ms) refuse(socket);
    }
}

/* ---- all of them ---- */

/* A connection that opened may end while others are awaited. Its caller calls again, and finds its place empty. */
static void close_dead(tagc_native *self) {
    for (int r = 0; r < self->world_size; r++)
        for (int i = 0; i < self->n_sockets; i++) {
            native_socket *socket = self->peers[r].sockets[i];
            if (!socket || !socket->is_open || !is_dead(socket)) continue;
            if (socket->is_caller)
                retry_later(socket, UV_ECONNRESET);
            else
                tagc_native_close_socket(socket);
            self->peers[r].last_error = UV_ECONNRESET;
        }
}

static void on_tick(uv_timer_t *timer) {
    tagc_native *self = timer->data;
    refuse_late(self, uv_now(timer->loop));
    if (self->n_ticks++ % TICKS_PER_LOOK == 0) close_dead(self);
}

static tagc_status call_where_due(tagc_native *self) {
    uint64_t now_ms = uv_now(&self->loop);
    for (int r = 0; r < self->rank; r++)
        for (int i = 0; i < self->n_sockets; i++)
            if (!self->peers[r].sockets[i] && self->peers[r].retry_ms[i] <= now_ms)
                TAGC_TRY(call(self, &self->peers[r], i));
    return TAGC_OK;
}

static int count_missing(const tagc_native *self, int *first) {
    int n = 0;
    for (int r = self->world_size - 1; r >= 0; r--)
        if (r != self->rank && self->peers[r].n_open < self->n_sockets) {
            n++;
            *first = r;
        }
    return n;
}

static int is_called(const tagc_native *self, const native_peer *peer) {
    for (int i = 0; i < self->n_sockets; i++)
        if (peer->sockets[i] && peer->sockets[i]->is_caller && peer->sockets[i]->n_talk &&
            !peer->sockets[i]->is_open)
            return 1;
    return 0;
}

static const char *why(const tagc_native *self, const native_peer *peer) {
    switch (peer->last_error) {
    case 0:
        return is_called(self, peer) ? "it, or another program at its address, does not answer"
                                     : "it did not call";
    case UV_EOF:
    case UV_ECONNRESET:
        return "it, or another program at its address, closed the connection: keys may differ, or it has "
               "too many files open";
    case UV_EPROTO:
        return "what answers at its address does not have its key";
    default:
        return uv_strerror(peer->last_error);
    }
}

static tagc_status late(const tagc_native *self, int n_missing, int first, double timeout_s) {
    char more[32] = "";
    if (n_missing > 1) snprintf(more, sizeof more, " and %d more", n_missing - 1);
    if (tagc_native_free_files(1) == 0) /* libuv hangs up on callers then, and says nothing */
        return tagc_fail(
            TAGC_ERR_MEMORY,
            "no connection to rank %d%s within %g s: this rank has too many files open (ulimit -n)",
            tagc_native_name(self, first), more, timeout_s);
    return tagc_fail(self->peers[first].last_error ? TAGC_ERR_TRANSPORT : TAGC_ERR_TIMEOUT,
                     "no connection to rank %d%s within %g s: %s", tagc_native_name(self, first), more,
                     timeout_s, why(self, &self->peers[first]));
}

static tagc_status connect_all(tagc_native *self, double timeout_s) {
    double until_s = tagc_clock_s() + timeout_s;
    int first = -1, n_missing;
    uv_update_time(&self->loop);
    while ((n_missing = count_missing(self, &first)) > 0) {
        if (tagc_clock_s() > until_s) return late(self, n_missing, first, timeout_s);
        TAGC_TRY(call_where_due(self));
        self->n_forks = tagc_native_forks();
        uv_run(&self->loop, UV_RUN_ONCE);
    }
    return TAGC_OK;
}

static tagc_status end_listening(tagc_native *self) {
    while (self->pending) refuse(self->pending);
    if (self->is_listening) tagc_native_close_tcp(&self->listener, &self->listener_held, NULL);
    self->is_listening = 0;
    uv_close((uv_handle_t *)&self->timer, NULL);
    uv_run(&self->loop, UV_RUN_DEFAULT); /* no socket reads now, so nothing else keeps it */
    return TAGC_OK;
}

tagc_status tagc_native_connect(tagc_native *native, const void *addresses, const void *keys,
                                double timeout_s) {
    if (!native) return tagc_fail(TAGC_ERR_ARGUMENT, "native is NULL");
    if (!addresses) return tagc_fail(TAGC_ERR_ARGUMENT, "addresses is NULL");
    if (!keys) return tagc_fail(TAGC_ERR_ARGUMENT, "keys is NULL");
    if (!(timeout_s > 0 && timeout_s <= 1e6))
        return tagc_fail(TAGC_ERR_ARGUMENT, "timeout_s is %g, must be in (0, 1e6]", timeout_s);
    if (native->process != getpid())
        return tagc_fail(TAGC_ERR_STATE,
                         "tagc_native_open was called before this process was forked: open another");
    if (!native->is_listening)
        return tagc_fail(TAGC_ERR_STATE, "tagc_native_connect was called before: its port is closed");
    unsigned char own[TAGC_NATIVE_ADDRESS_BYTES];
    int n_here = 0;
    TAGC_TRY(tagc_native_address(native, own));
    for (int r = 0; r < native->world_size; r++) {
        struct sockaddr_storage address;
        const unsigned char *from = (const unsigned char *)addresses + (size_t)r * TAGC_NATIVE_ADDRESS_BYTES;
        TAGC_TRY(tagc_native_read_address(native, r, from, &address));
        n_here += !memcmp(from + 16, own + 16, TAGC_NATIVE_ADDRESS_BYTES - 16);
    }
    native->n_here = n_here;
    native_guard guard;
    tagc_native_enter(native, &guard);
    native->addresses = addresses;
    native->keys = keys;
    uv_timer_init(&native->loop, &native->timer);
    native->timer.data = native;
    uv_timer_start(&native->timer, on_tick, TICK_MS, TICK_MS);
    tagc_status status = connect_all(native, timeout_s);
    native->is_connected = status == TAGC_OK;
    if (status != TAGC_OK) {
        uv_close((uv_handle_t *)&native->timer, NULL);
        tagc_native_close_all(native);
    } else {
        end_listening(native);
    }
    native->addresses = native->keys = NULL;
    tagc_native_leave(native, &guard);
    return status;
}

uint64_t tagc_native_refused(const tagc_native *native) {
    return native ? native->n_refused : 0;
}
