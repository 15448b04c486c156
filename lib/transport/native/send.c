/* What leaves. Each socket takes the next piece when the kernel has taken the one before it. Parts take turns, so that a
 * large one does not hold up small ones, and several sockets share the pieces of a large one. */
#include "transport/native/native.h"

#include <linux/sockios.h>
#include <string.h>
#include <sys/ioctl.h>

static uint64_t allowed(const native_send *send) {
    return send->is_ready || send->n_bytes < NATIVE_EAGER_BYTES ? send->n_bytes : NATIVE_EAGER_BYTES;
}

void tagc_native_queue_send(native_peer *peer, native_send *send) {
    if (send->is_queued || send->n_taken == allowed(send)) return;
    send->is_queued = 1;
    send->next = NULL;
    if (peer->first)
        peer->last->next = send;
    else
        peer->first = send;
    peer->last = send;
}

void tagc_native_queue_ready(native_peer *peer, native_receive *receive) {
    receive->next = NULL;
    if (peer->first_ready)
        peer->last_ready->next = receive;
    else
        peer->first_ready = receive;
    peer->last_ready = receive;
}

static int take_ready_frame(native_peer *peer, native_socket *socket) {
    const native_receive *receive = peer->first_ready;
    if (!receive) return 0;
    peer->first_ready = receive->next;
    const native_request *request = receive->request;
    native_frame frame = {.kind = NATIVE_READY,
                          .lane = (uint8_t)request->transfer.lane,
                          .sequence = request->sequence,
                          .total = receive->n_bytes};
    tagc_native_write_header(&frame, socket->out_header);
    socket->out = NULL;
    socket->out_bytes = 0;
    return 1;
}

/* Returns 0 if there is nothing to send. */
static int take_piece(native_peer *peer, native_socket *socket) {
    if (take_ready_frame(peer, socket)) return 1;
    native_send *send = peer->first;
    if (!send) return 0;
    peer->first = send->next;
    send->is_queued = 0;
    uint64_t n = allowed(send) - send->n_taken;
    if (n > NATIVE_PIECE_BYTES) n = NATIVE_PIECE_BYTES;
    native_frame frame = {.kind = NATIVE_DATA,
                          .lane = (uint8_t)send->request->transfer.lane,
                          .n_bytes = (uint32_t)n,
                          .sequence = send->request->sequence,
                          .total = send->n_bytes,
                          .offset = send->n_taken};
    tagc_native_write_header(&frame, socket->out_header);
    socket->out = send;
    socket->out_data = send->data + send->n_taken;
    socket->out_bytes = (uint32_t)n;
    send->n_taken += n;
    tagc_native_queue_send(peer, send);
    return 1;
}

static void end_piece(native_socket *socket) {
    native_send *send = socket->out;
    if (!send) return;
    socket->out = NULL;
    send->n_written += socket->out_bytes;
    send->request->moved = 1;
    if (send->n_written == send->n_bytes) send->request->n_left--;
}

/* What the peer has sent before it closed the connection is still read: it may say why. */
static void stop_writing(native_socket *socket, int error) {
    socket->cannot_write = 1;
    if (!socket->peer->last_error) socket->peer->last_error = error;
}

static void on_written(uv_write_t *write, int status) {
    native_socket *socket = write->data;
    tagc_native *self = socket->self;
    tagc_native_take_state(self);
    socket->is_writing = 0;
    if (status < 0) {
        if (!socket->is_closing) stop_writing(socket, status);
    } else {
        end_piece(socket);
        tagc_native_write_pieces(socket);
    }
    tagc_native_leave_state(self);
}

/* In the place of both buffers, what they are on the way. */
static int seal(native_socket *socket, uv_buf_t buffers[2], unsigned *n_buffers) {
    size_t n_bytes;
    for (unsigned i = 0; i < *n_buffers; i++)
        if (!tagc_native_tls_write(socket->tls, buffers[i].base, buffers[i].len)) return 0;
    const void *sealed = tagc_native_tls_sealed(socket->tls, &n_bytes);
    buffers[0] = uv_buf_init((char *)(uintptr_t)sealed, (unsigned)n_bytes);
    *n_buffers = 1;
    return n_bytes > 0;
}

/* Returns 1 if all has left, 0 if the rest of it leaves later, and an error of libuv if nothing can leave any more. Without `state`. */
static int write_all(native_socket *socket, uv_buf_t buffers[2], unsigned n_buffers) {
    uv_stream_t *stream = (uv_stream_t *)&socket->tcp;
    uv_buf_t *rest = buffers;
    if (socket->tls && !seal(socket, buffers, &n_buffers)) return UV_ENOMEM;
    int n = uv_try_write(stream, buffers, n_buffers);
    if (n < 0 && n != UV_EAGAIN) return n;
    size_t n_written = n < 0 ? 0 : (size_t)n;
    for (; n_buffers > 0 && n_written >= rest->len; rest++, n_buffers--) n_written -= rest->len;
    if (n_buffers == 0) return 1;
    rest->base += n_written;
    rest->len -= n_written;
    socket->write.data = socket;
    n = uv_write(&socket->write, stream, rest, n_buffers, on_written); /* copies the list */
    if (n < 0) return n;
    socket->is_writing = 1;
    return 0;
}

void tagc_native_write_pieces(native_socket *socket) {
    while (!socket->is_writing && !socket->cannot_write && !socket->is_closing && !socket->is_alerted &&
           !socket->self->has_given_up && take_piece(socket->peer, socket)) {
        uv_buf_t buffers[2] = {uv_buf_init((char *)socket->out_header, NATIVE_HEADER_BYTES),
                               uv_buf_init((char *)(uintptr_t)socket->out_data, socket->out_bytes)};
        unsigned n_buffers = socket->out_bytes ? 2 : 1;
        tagc_native_leave_state(socket->self);
        int n = write_all(socket, buffers, n_buffers);
        tagc_native_take_state(socket->self);
        if (n > 0) end_piece(socket);
        if (n < 0) stop_writing(socket, n);
    }
}

/* Other threads' sockets take part where there is more than a piece. */
static void wake_others(const native_peer *peer) {
    const native_send *send = peer->first;
    if (!send || (!send->next && allowed(send) - send->n_taken <= NATIVE_PIECE_BYTES)) return;
    for (int i = 1; i < NATIVE_MOST_SOCKETS; i++)
        if (peer->sockets[i] && peer->sockets[i]->loop) uv_async_send(&peer->sockets[i]->loop->wake);
}

void tagc_native_push(native_peer *peer) {
    wake_others(peer);
    for (int i = 0; i < NATIVE_MOST_SOCKETS && (peer->first || peer->first_ready); i++)
        if (peer->sockets[i] && !peer->sockets[i]->loop) tagc_native_write_pieces(peer->sockets[i]);
}

/* Returns whether it has now had the frame, or cannot have it any more. */
static int tell_peer(native_peer *peer, const native_frame *frame, const char *text) {
    int may_later = 0;
    for (int i = 0; i < NATIVE_MOST_SOCKETS; i++) {
        native_socket *socket = peer->sockets[i];
        if (!socket || socket->is_closing || socket->cannot_write) continue;
        may_later = 1;
        if (socket->is_alerted) return 1;
        if (socket->is_writing) continue;
        tagc_native_write_header(frame, socket->out_header);
        socket->out = NULL;
        uv_buf_t buffers[2] = {uv_buf_init((char *)socket->out_header, NATIVE_HEADER_BYTES),
                               uv_buf_init((char *)(uintptr_t)text, frame->n_bytes)};
        int n = write_all(socket, buffers, frame->n_bytes ? 2 : 1);
        if (n >= 0) return 1;
        stop_writing(socket, n);
    }
    return !may_later;
}

/* text: stays as long as the connections. */
int tagc_native_tell(tagc_native *self, const native_frame *frame, const char *text) {
    int n_left = 0;
    for (int r = 0; r < self->world_size; r++) {
        native_peer *peer = &self->peers[r];
        if (!peer->is_told) peer->is_told = tell_peer(peer, frame, text);
        n_left += !peer->is_told;
    }
    return n_left;
}

/* A connection that is closed while bytes from the peer are unread drops what the peer's host has not acknowledged. */
uint64_t tagc_native_on_the_way(const tagc_native *self) {
    uint64_t n_bytes = 0;
    for (int r = 0; r < self->world_size; r++)
        for (int i = 0; i < self->n_sockets; i++) {
            const native_socket *socket = self->peers[r].sockets[i];
            uv_os_fd_t fd;
            int n_unacknowledged = 0;
            if (!socket || socket->is_closing || socket->cannot_write) continue;
            n_bytes += uv_stream_get_write_queue_size((const uv_stream_t *)&socket->tcp);
            if (uv_fileno((const uv_handle_t *)&socket->tcp, &fd) == 0 &&
                ioctl(fd, SIOCOUTQ, &n_unacknowledged) == 0 && n_unacknowledged > 0)
                n_bytes += (uint64_t)n_unacknowledged;
        }
    return n_bytes;
}
