/* The table of the native transport, and the life of requests. */
#include "transport/native/native.h"

#include "core/clock.h"
#include "transport/comm.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* ---- reading ---- */

static unsigned char *staging_of(const native_socket *socket) {
    return socket->loop ? socket->loop->staging : socket->self->staging;
}

static void give_room(uv_handle_t *handle, size_t wanted, uv_buf_t *buffer) {
    native_socket *socket = handle->data;
    size_t n_bytes;
    (void)wanted;
    unsigned char *target = socket->tls ? NULL : tagc_native_direct_target(socket, &n_bytes);
    *buffer = target ? uv_buf_init((char *)target, (unsigned)n_bytes)
                     : uv_buf_init((char *)staging_of(socket), NATIVE_STAGING_BYTES);
}

static void note_end(tagc_native *self, native_peer *peer, int error) {
    if (error != UV_EOF || !peer->last_error) peer->last_error = error;
    if (peer->ended) return;
    peer->ended = ++self->n_ended;
    peer->ended_ms = tagc_native_now_ms();
}

/* is_here: what arrived here, else what this rank sent. */
static tagc_status changed(native_socket *socket, int is_here) {
    int sender = is_here ? socket->peer->rank : socket->self->rank;
    if (is_here) {
        size_t n_bytes;
        const void *alert = tagc_native_tls_alert(socket->tls, &n_bytes);
        uv_buf_t buffer = uv_buf_init((char *)(uintptr_t)alert, (unsigned)n_bytes);
        socket->is_alerted =
            n_bytes > 0 && uv_write(&socket->alert, (uv_stream_t *)&socket->tcp, &buffer, 1, NULL) == 0;
    }
    tagc_fail(TAGC_ERR_CORRUPT, "what rank %d sent was changed on the way",
              tagc_native_name(socket->self, sender));
    return tagc_blame(TAGC_ERR_CORRUPT, sender);
}

/* What has arrived goes to where it belongs, as far as it can be opened. */
static tagc_status feed_opened(native_socket *socket) {
    native_tls *tls = socket->tls;
    for (;;) {
        size_t n_wanted;
        unsigned char *target = tagc_native_direct_target(socket, &n_wanted);
        int n = target ? tagc_native_tls_read(tls, target, n_wanted)
                       : tagc_native_tls_read(tls, tls->opened, sizeof tls->opened);
        if (n == 0) return TAGC_OK;
        if (n < 0) return changed(socket, n == -1);
        TAGC_TRY(target ? tagc_native_feed_direct(socket, (size_t)n)
                        : tagc_native_feed(socket, tls->opened, (size_t)n));
    }
}

static tagc_status feed_sealed(native_socket *socket, size_t n_bytes) {
    if (!tagc_native_tls_put(socket->tls, staging_of(socket), n_bytes))
        return tagc_fail(TAGC_ERR_MEMORY, "out of memory for %zu bytes that arrived", n_bytes);
    return feed_opened(socket);
}

static void take_outcome(native_socket *socket, tagc_status status) {
    if (status == TAGC_OK) return;
    const tagc_failure failure = {status, tagc_last_rank(), tagc_last_error()};
    tagc_native_break(socket->self, &failure, -1);
    uv_read_stop((uv_stream_t *)&socket->tcp); /* open, so that the peer can be told */
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buffer) {
    native_socket *socket = stream->data;
    tagc_native *self = socket->self;
    tagc_native_take_state(self);
    if (n < 0) {
        note_end(self, socket->peer, (int)n);
        tagc_native_close_socket(socket);
    } else {
        unsigned char *staging = staging_of(socket);
        int is_staged = buffer->base == (char *)staging;
        take_outcome(socket, socket->tls ? feed_sealed(socket, (size_t)n)
                             : is_staged ? tagc_native_feed(socket, staging, (size_t)n)
                                         : tagc_native_feed_direct(socket, (size_t)n));
    }
    tagc_native_leave_state(self);
}

/* A host without power answers nothing. The kernel then ends its connections as early as the comm would break. */
static void limit_silence(uv_tcp_t *tcp, double timeout_s) {
    unsigned timeout_ms = timeout_s < 1 ? 1000 : (unsigned)(1e3 * timeout_s);
    uv_os_fd_t fd;
    if (uv_fileno((uv_handle_t *)tcp, &fd) == 0)
        (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof timeout_ms);
}

static void start_reading(tagc_native *self, double timeout_s) {
    tagc_native_share(self);
    for (int r = 0; r < self->world_size; r++)
        for (int i = 0; i < self->n_sockets; i++) {
            native_socket *socket = self->peers[r].sockets[i];
            if (!socket) continue;
            limit_silence(&socket->tcp, timeout_s);
            uv_read_start((uv_stream_t *)&socket->tcp, give_room, on_read);
            if (socket->tls && tagc_native_tls_has_more(socket->tls)) /* frames behind the handshake */
                take_outcome(socket, feed_opened(socket));
        }
    tagc_native_start_threads(self);
}

/* Frames that arrived may allow more to leave. With `state`, but for the while that the loop runs. */
static void run_loop(tagc_native *self) {
    tagc_native_leave_state(self);
    uv_run(&self->loop, UV_RUN_NOWAIT);
    for (int i = 0; i < self->n_more; i++) /* the system had no thread for it */
        if (!self->more[i]->has_thread) uv_run(&self->more[i]->uv, UV_RUN_NOWAIT);
    tagc_native_take_state(self);
    if (!self->has_answers) return;
    self->has_answers = 0;
    for (int r = 0; r < self->world_size; r++) tagc_native_push(&self->peers[r]);
}

/* ---- requests ---- */

/* With room for that many parts. */
static tagc_status take_request(tagc_native *self, uint32_t n_sends, uint32_t n_receives,
                                native_request **out) {
    for (native_request **link = &self->pool; *link; link = &(*link)->next)
        if ((*link)->n_sends >= n_sends && (*link)->n_receives >= n_receives) {
            *out = *link;
            *link = (*out)->next;
            return TAGC_OK;
        }
    void *memory;
    TAGC_TRY(tagc_memory_create(sizeof(native_request) + n_sends * sizeof(native_send) +
                                    n_receives * sizeof(native_receive),
                                "native transfer", &memory));
    *out = memory;
    (*out)->n_sends = n_sends;
    (*out)->n_receives = n_receives;
    (*out)->sends = (native_send *)(*out + 1);
    (*out)->receives = (native_receive *)((*out)->sends + n_sends);
    return TAGC_OK;
}

static void retire(tagc_native *self, native_request *request) {
    native_request **link = &self->active[request->transfer.lane];
    while (*link != request) link = &(*link)->next;
    *link = request->next;
    request->next = self->pool;
    self->pool = request;
    if (self->poller == request) self->poller = NULL;
}

static void fill(native_request *request) {
    const tagc_transfer *t = &request->transfer;
    request->n_left = request->first_open = 0;
    request->moved = 0;
    for (uint32_t i = 0; i < t->n_receives; i++) {
        const tagc_part *part = &t->receives[i];
        request->receives[i] =
            (native_receive){.request = request, .n_bytes = part->n_bytes, .peer = part->peer};
        request->n_left += part->n_bytes > 0;
    }
    for (uint32_t i = 0; i < t->n_sends; i++) {
        const tagc_part *part = &t->sends[i];
        request->sends[i] = (native_send){.request = request, .n_bytes = part->n_bytes, .peer = part->peer};
        if (part->n_bytes) request->sends[i].data = (const unsigned char *)t->send + part->offset;
        request->n_left += part->n_bytes > 0;
    }
}

/* Staggered, so that ranks do not all send to one. */
static void begin_parts(tagc_native *self, native_request *request) {
    const tagc_transfer *t = &request->transfer;
    for (uint32_t i = 0; i < t->n_receives; i++)
        if (t->receives[i].n_bytes > NATIVE_EAGER_BYTES) {
            tagc_native_queue_ready(&self->peers[t->receives[i].peer], &request->receives[i]);
            tagc_native_push(&self->peers[t->receives[i].peer]);
        }
    uint32_t first = 0;
    while (first < t->n_sends && t->sends[first].peer < self->rank) first++;
    for (uint32_t i = 0; i < t->n_sends; i++) {
        native_send *send = &request->sends[(first + i) % t->n_sends];
        if (!send->n_bytes) continue;
        tagc_native_queue_send(&self->peers[send->peer], send);
        tagc_native_push(&self->peers[send->peer]);
    }
}

/* ---- failures ---- */

static tagc_status fail_broken(const tagc_native *self) {
    if (self->giver >= 0)
        tagc_fail(self->broken, "rank %d gave up: %s", self->giver, self->reason);
    else
        tagc_fail(self->broken, "%s", self->reason);
    return tagc_blame(self->broken, self->failed_rank);
}

static tagc_status fail_gone(const tagc_native *self, const native_peer *peer) {
    int name = tagc_native_name(self, peer->rank);
    if (peer->has_left)
        tagc_fail(TAGC_ERR_TRANSPORT, "rank %d left", name);
    else
        tagc_fail(TAGC_ERR_TRANSPORT, "rank %d ended or cannot be reached any more: %s", name,
                  peer->last_error == UV_EOF ? "its connection closed" : uv_strerror(peer->last_error));
    return tagc_blame(TAGC_ERR_TRANSPORT, peer->rank);
}

static int is_open_receive(const native_receive *receive) {
    return receive->n_received < receive->n_bytes;
}

static int is_open_send(const native_send *send) {
    return send->n_written < send->n_bytes;
}

static const native_peer *earlier(const native_peer *a, const native_peer *b) {
    return !b->ended || (a && a->ended < b->ended) ? a : b;
}

/* Fails if a peer has ended that the request still needs. The first to end is the one to name: others end because it did.
 * One connection is enough, because what was on its way there is lost. */
static tagc_status check_peers(const tagc_native *self, const native_request *request) {
    const tagc_transfer *t = &request->transfer;
    const native_peer *first = NULL;
    for (uint32_t i = 0; i < t->n_receives; i++)
        if (is_open_receive(&request->receives[i])) first = earlier(first, &self->peers[t->receives[i].peer]);
    for (uint32_t i = 0; i < t->n_sends; i++)
        if (is_open_send(&request->sends[i])) first = earlier(first, &self->peers[t->sends[i].peer]);
    if (!first) return TAGC_OK;
    int is_over = tagc_native_now_ms() - first->ended_ms >= NATIVE_GRACE_MS;
    return is_over || (first->has_left && !first->n_open) ? fail_gone(self, first) : TAGC_OK;
}

/* A rank that the request waits for: one that has to send, if there is any. */
static int waits_for(native_request *request) {
    const tagc_transfer *t = &request->transfer;
    uint32_t *i = &request->first_open;
    while (*i < t->n_receives && !is_open_receive(&request->receives[*i])) ++*i;
    if (*i < t->n_receives) return t->receives[*i].peer;
    for (uint32_t s = 0; s < t->n_sends; s++)
        if (is_open_send(&request->sends[s])) return t->sends[s].peer;
    return -1;
}

/* A frame that is half sent has to leave before another can say why. Reads, too, so that peers that do the same go on. */
static void bid_farewell(tagc_native *self, const native_frame *frame) {
    double begin_s = tagc_clock_s(), moved_s = begin_s;
    uint64_t n_before = UINT64_MAX;
    const struct timespec pause = {.tv_nsec = 1000000};
    for (;;) {
        int n_untold = tagc_native_tell(self, frame, self->reason);
        uint64_t n_bytes = tagc_native_on_the_way(self);
        if (!n_untold && !n_bytes) return;
        double now_s = tagc_clock_s();
        if (n_bytes != n_before) moved_s = now_s;
        n_before = n_bytes;
        if (now_s - moved_s > 1e-3 * NATIVE_GRACE_MS || now_s - begin_s > 1e-3 * NATIVE_FAREWELL_MS) return;
        nanosleep(&pause, NULL);
        uv_run(&self->loop, UV_RUN_NOWAIT);
        for (int i = 0; i < self->n_more; i++) uv_run(&self->more[i]->uv, UV_RUN_NOWAIT);
    }
}

/* Tells the peers who gave up, and lets go of all buffers. Without `state`. */
static void give_up(tagc_native *self, const tagc_failure *failure) {
    if (self->has_given_up) return;
    tagc_native_end_threads(self);
    self->has_given_up = 1;
    tagc_native_break(self, failure, tagc_native_name(self, self->rank));
    int giver = self->giver >= 0 ? self->giver : tagc_native_name(self, self->rank);
    native_frame frame = {.kind = NATIVE_GAVE_UP,
                          .n_bytes = (uint32_t)strlen(self->reason),
                          .sequence = (uint64_t)giver,
                          .total = (uint64_t)self->broken,
                          .offset = (uint64_t)(self->failed_rank + 1)};
    bid_farewell(self, &frame);
    tagc_native_close_all(self);
}

/* ---- the table ---- */

static tagc_status native_start(void *context, const tagc_transfer *transfer, void **handle) {
    tagc_native *self = context;
    native_request *request = NULL;
    pthread_mutex_lock(&self->lock);
    tagc_native_take_state(self);
    tagc_status status = self->broken != TAGC_OK
                             ? fail_broken(self)
                             : take_request(self, transfer->n_sends, transfer->n_receives, &request);
    if (status == TAGC_OK) {
        request->transfer = *transfer;
        request->sequence = self->n_started[transfer->lane]++;
        request->next = self->active[transfer->lane];
        self->active[transfer->lane] = request;
        fill(request);
        begin_parts(self, request);
        status = tagc_native_take_early(self, request);
        *handle = request;
    }
    tagc_native_leave_state(self);
    pthread_mutex_unlock(&self->lock);
    return status;
}

static tagc_status native_test(void *context, void *handle, tagc_progress *progress) {
    tagc_native *self = context;
    native_request *request = handle;
    tagc_status status = TAGC_OK;
    pthread_mutex_lock(&self->lock);
    tagc_native_take_state(self);
    if (!self->has_given_up && (!self->poller || self->poller == request)) {
        self->poller = request;
        run_loop(self);
    }
    progress->moved = request->moved | self->moved;
    request->moved = self->moved = 0;
    if (request->n_left == 0) {
        progress->done = 1;
        retire(self, request);
    } else if (self->broken != TAGC_OK) {
        status = fail_broken(self);
    } else {
        progress->waiting_for = waits_for(request);
        if (self->n_ended) status = check_peers(self, request);
    }
    tagc_native_leave_state(self);
    pthread_mutex_unlock(&self->lock);
    return status;
}

static void native_cancel(void *context, const tagc_failure *failure) {
    tagc_native *self = context;
    pthread_mutex_lock(&self->lock);
    give_up(self, failure);
    for (int lane = 0; lane < NATIVE_LANES; lane++)
        while (self->active[lane]) retire(self, self->active[lane]);
    pthread_mutex_unlock(&self->lock);
}

static void native_abort(void *context, const tagc_failure *failure) {
    tagc_native *self = context;
    native_guard guard;
    if (self->process != getpid()) return;
    tagc_native_enter(self, &guard);
    give_up(self, failure);
    tagc_native_leave(self, &guard);
}

void tagc_native_destroy(tagc_native *native) {
    if (!native || native->process != getpid())
        return; /* the lock and the loop of a fork may be in any state */
    native_guard guard;
    tagc_native_enter(native, &guard);
    tagc_native_end_threads(native);
    const native_frame goodbye = {.kind = NATIVE_GOODBYE};
    if (native->is_connected && !native->has_given_up) (void)tagc_native_tell(native, &goodbye, "");
    if (native->has_loop) {
        tagc_native_close_all(native);
        uv_loop_close(&native->loop);
    }
    for (int i = 0; i < native->n_more; i++) {
        uv_loop_close(&native->more[i]->uv);
        tagc_memory_destroy(native->more[i]);
    }
    tagc_native_tls_close(native->tls);
    tagc_native_leave(native, &guard);
    pthread_mutex_destroy(&native->lock);
    pthread_mutex_destroy(&native->state);
    tagc_native_drop_early(native);
    for (native_request *next, *pooled = native->pool; pooled; pooled = next) {
        next = pooled->next;
        tagc_memory_destroy(pooled);
    }
    tagc_memory_destroy(native);
}

static void native_destroy(void *context) {
    tagc_native_destroy(context);
}

static const tagc_transport_ops native_ops = {
    .abi = TAGC_TRANSPORT_ABI,
    .capabilities = TAGC_TRANSPORT_LANES,
    .name = "native",
    .start = native_start,
    .test = native_test,
    .cancel = native_cancel,
    .abort = native_abort,
    .destroy = native_destroy,
};

tagc_status tagc_comm_create_native(tagc_native *native, const tagc_comm_options *options, tagc_comm **out) {
    if (!out) return tagc_fail(TAGC_ERR_ARGUMENT, "out is NULL");
    *out = NULL;
    if (!native) return tagc_fail(TAGC_ERR_ARGUMENT, "native is NULL");
    if (!native->is_connected)
        return tagc_fail(TAGC_ERR_STATE, "tagc_native_connect has to succeed before tagc_comm_create_native");
    if (native->has_comm) return tagc_fail(TAGC_ERR_STATE, "this tagc_native already has a comm");
    tagc_comm_options named;
    TAGC_TRY(tagc_comm_read_options(options, &named));
    start_reading(native, named.timeout_s);
    if (!named.names) named.names = native->names;
    tagc_status status = tagc_comm_create(&native_ops, native, native->rank, native->world_size, &named, out);
    native->has_comm = status == TAGC_OK;
    return status;
}
