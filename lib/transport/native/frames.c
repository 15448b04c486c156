/* What arrives from peers: headers are checked, bodies go to the receiver's buffers. There is no socket here, so that a
 * fuzzer can feed it. */
#include "transport/native/native.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- headers, little-endian ---- */

static void put(unsigned char *to, uint64_t value, int n_bytes) {
    for (int i = 0; i < n_bytes; i++) to[i] = (unsigned char)(value >> (8 * i));
}

static uint64_t get(const unsigned char *from, int n_bytes) {
    uint64_t value = 0;
    for (int i = 0; i < n_bytes; i++) value |= (uint64_t)from[i] << (8 * i);
    return value;
}

void tagc_native_write_header(const native_frame *frame, unsigned char *header) {
    header[0] = frame->kind;
    header[1] = frame->lane;
    put(header + 2, 0, 2);
    put(header + 4, frame->n_bytes, 4);
    put(header + 8, frame->sequence, 8);
    put(header + 16, frame->total, 8);
    put(header + 24, frame->offset, 8);
}

static tagc_status read_header(const unsigned char *header, native_frame *frame) {
    *frame = (native_frame){.kind = header[0],
                            .lane = header[1],
                            .n_bytes = (uint32_t)get(header + 4, 4),
                            .sequence = get(header + 8, 8),
                            .total = get(header + 16, 8),
                            .offset = get(header + 24, 8)};
    int fits = frame->n_bytes <= frame->total && frame->offset <= frame->total - frame->n_bytes;
    if (header[2] || header[3] || frame->lane >= NATIVE_LANES) return TAGC_ERR_CORRUPT;
    switch (frame->kind) {
    case NATIVE_DATA:
        return frame->n_bytes >= 1 && frame->n_bytes <= NATIVE_PIECE_BYTES && fits ? TAGC_OK
                                                                                   : TAGC_ERR_CORRUPT;
    case NATIVE_READY:
        return frame->n_bytes == 0 && frame->offset == 0 ? TAGC_OK : TAGC_ERR_CORRUPT;
    case NATIVE_GAVE_UP:
        return frame->n_bytes < NATIVE_REASON_BYTES && frame->total >= 1 &&
                       frame->total <= TAGC_LAST_STATUS && frame->offset <= INT32_MAX
                   ? TAGC_OK
                   : TAGC_ERR_CORRUPT;
    case NATIVE_GOODBYE:
        return frame->n_bytes == 0 ? TAGC_OK : TAGC_ERR_CORRUPT;
    default:
        return TAGC_ERR_CORRUPT;
    }
}

/* ---- requests ---- */

void tagc_native_break(tagc_native *self, const tagc_failure *failure, int giver) {
    if (self->broken != TAGC_OK) return;
    self->broken = failure->status;
    self->failed_rank = failure->rank;
    self->giver = giver;
    snprintf(self->reason, sizeof self->reason, "%s", failure->reason);
}

static native_request *find(tagc_native *self, uint32_t lane, uint64_t sequence) {
    native_request *request = self->active[lane];
    while (request && request->sequence != sequence) request = request->next;
    return request;
}

static tagc_status corrupt(const native_socket *socket, const char *what) {
    int from = socket->peer->rank;
    tagc_fail(TAGC_ERR_CORRUPT, "rank %d sent %s", tagc_native_name(socket->self, from), what);
    return tagc_blame(TAGC_ERR_CORRUPT, from);
}

static tagc_status mismatch(const tagc_native *self, int from, uint64_t n_sent, int to, uint64_t n_expected) {
    tagc_fail(TAGC_ERR_MISMATCH, "rank %d sends %llu bytes to rank %d, which expects %llu",
              tagc_native_name(self, from), (unsigned long long)n_sent, tagc_native_name(self, to),
              (unsigned long long)n_expected);
    return tagc_blame(TAGC_ERR_MISMATCH, from);
}

/* The part that a frame belongs to; *out NULL if its transfer has not started here. */
static tagc_status find_receive(native_socket *socket, const native_frame *frame, native_receive **out) {
    tagc_native *self = socket->self;
    native_request *request = find(self, frame->lane, frame->sequence);
    int from = socket->peer->rank;
    *out = NULL;
    if (!request)
        return frame->sequence < self->n_started[frame->lane]
                   ? mismatch(self, from, frame->total, self->rank, 0)
                   : TAGC_OK;
    const tagc_transfer *t = &request->transfer;
    const tagc_part *part = tagc_find_part(t->receives, t->n_receives, from);
    if (!part || part->n_bytes != frame->total)
        return mismatch(self, from, frame->total, self->rank, part ? part->n_bytes : 0);
    *out = &request->receives[part - t->receives];
    return TAGC_OK;
}

static unsigned char *place_of(const native_receive *receive, uint64_t offset) {
    const tagc_transfer *t = &receive->request->transfer;
    return (unsigned char *)t->recv + t->receives[receive - receive->request->receives].offset + offset;
}

static tagc_status announce(const native_socket *socket, native_receive *receive, const native_frame *frame) {
    if (frame->n_bytes > receive->n_bytes - receive->n_announced)
        return corrupt(socket, "more bytes of a part than it has");
    receive->n_announced += frame->n_bytes;
    return TAGC_OK;
}

static void add_received(native_receive *receive, uint64_t n_bytes) {
    receive->n_received += n_bytes;
    receive->request->moved = 1;
    if (receive->n_received == receive->n_bytes) receive->request->n_left--;
}

/* Whether a peer may send this frame before its transfer has started here: so much of a part once, and an answer once. */
static tagc_status check_early(const native_socket *socket, const native_frame *frame) {
    const native_peer *peer = socket->peer;
    uint64_t n_bytes = frame->n_bytes,
             most = frame->total < NATIVE_EAGER_BYTES ? frame->total : NATIVE_EAGER_BYTES;
    if (frame->sequence - socket->self->n_started[frame->lane] >= NATIVE_MOST_AHEAD)
        return corrupt(socket, "a frame of a transfer too far ahead");
    if (peer->n_early_bytes + sizeof(native_early) + n_bytes > NATIVE_MOST_EARLY_BYTES)
        return corrupt(socket, "more than it may before its receiver has started");
    if (frame->kind == NATIVE_DATA && frame->offset + frame->n_bytes > NATIVE_EAGER_BYTES)
        return corrupt(socket, "more of a part than it may before its receiver has started");
    for (const native_early *early = peer->early; early; early = early->next) {
        const native_frame *other = &early->frame;
        if (other->lane != frame->lane || other->sequence != frame->sequence || other->kind != frame->kind)
            continue;
        if (frame->kind == NATIVE_READY) return corrupt(socket, "an answer twice");
        n_bytes += other->n_bytes;
        if (n_bytes > most) return corrupt(socket, "more bytes of a part than it has");
    }
    return TAGC_OK;
}

static tagc_status make_early(const native_socket *socket, const native_frame *frame, native_early **out) {
    *out = NULL;
    TAGC_TRY(check_early(socket, frame));
    native_early *early = malloc(sizeof *early + frame->n_bytes);
    *out = early;
    if (!early)
        return tagc_fail(TAGC_ERR_MEMORY, "out of memory for %u bytes that arrived early", frame->n_bytes);
    *early = (native_early){.frame = *frame};
    return TAGC_OK;
}

/* Until its transfer starts here: _take_early. */
static void keep_early(tagc_native *self, native_peer *peer, native_early *early) {
    early->next = peer->early;
    peer->early = early;
    peer->n_early_bytes += sizeof *early + early->frame.n_bytes;
    self->n_early++;
}

static void drop_early(tagc_native *self, native_peer *peer, native_early **link) {
    native_early *early = *link;
    *link = early->next;
    peer->n_early_bytes -= sizeof *early + early->frame.n_bytes;
    free(early);
    self->n_early--;
}

static tagc_status take_ready(native_socket *socket, const native_frame *frame) {
    tagc_native *self = socket->self;
    native_request *request = find(self, frame->lane, frame->sequence);
    if (!request) {
        if (frame->sequence < self->n_started[frame->lane])
            return tagc_blame(tagc_fail(TAGC_ERR_MISMATCH,
                                        "rank %d sent less than the %llu bytes that rank %d expects",
                                        tagc_native_name(self, self->rank), (unsigned long long)frame->total,
                                        tagc_native_name(self, socket->peer->rank)),
                              self->rank);
        native_early *early;
        TAGC_TRY(make_early(socket, frame, &early));
        keep_early(self, socket->peer, early);
        return TAGC_OK;
    }
    const tagc_transfer *t = &request->transfer;
    const tagc_part *part = tagc_find_part(t->sends, t->n_sends, socket->peer->rank);
    if (!part || part->n_bytes != frame->total)
        return mismatch(self, self->rank, part ? part->n_bytes : 0, socket->peer->rank, frame->total);
    native_send *send = &request->sends[part - t->sends];
    send->is_ready = 1;
    self->has_answers = 1;
    tagc_native_queue_send(socket->peer, send);
    return TAGC_OK;
}

/* ---- bytes ---- */

/* With a complete header in socket->in_header. */
static tagc_status begin_frame(native_socket *socket) {
    native_frame *frame = &socket->in;
    if (read_header(socket->in_header, frame) != TAGC_OK) return corrupt(socket, "a frame that is none");
    socket->in_left = frame->n_bytes;
    socket->in_receive = NULL;
    socket->in_early = NULL;
    switch (frame->kind) {
    case NATIVE_READY:
        return take_ready(socket, frame);
    case NATIVE_GOODBYE:
        socket->peer->has_left = 1;
        return TAGC_OK;
    case NATIVE_GAVE_UP:
        socket->in_target = (unsigned char *)socket->self->in_reason;
        return TAGC_OK;
    default:
        break;
    }
    TAGC_TRY(find_receive(socket, frame, &socket->in_receive));
    if (socket->in_receive) {
        socket->in_target = place_of(socket->in_receive, frame->offset);
        return announce(socket, socket->in_receive, frame);
    }
    TAGC_TRY(make_early(socket, frame, &socket->in_early));
    socket->in_target = socket->in_early->data;
    return TAGC_OK;
}

static tagc_status copy_early(const native_socket *socket, native_receive *receive,
                              const native_early *early) {
    TAGC_TRY(announce(socket, receive, &early->frame));
    memcpy(place_of(receive, early->frame.offset), early->data, early->frame.n_bytes);
    add_received(receive, early->frame.n_bytes);
    return TAGC_OK;
}

/* A whole frame that began before its transfer started: it may have started meanwhile. */
static tagc_status end_early(native_socket *socket) {
    native_early *early = socket->in_early;
    native_receive *receive;
    socket->in_early = NULL;
    keep_early(socket->self, socket->peer, early);
    TAGC_TRY(find_receive(socket, &early->frame, &receive));
    if (!receive) return TAGC_OK;
    TAGC_TRY(copy_early(socket, receive, early));
    drop_early(socket->self, socket->peer, &socket->peer->early);
    return TAGC_OK;
}

static tagc_status end_frame(native_socket *socket) {
    tagc_native *self = socket->self;
    socket->n_in_header = 0;
    if (socket->in_early) return end_early(socket);
    socket->in_receive = NULL;
    if (socket->in.kind != NATIVE_GAVE_UP) return TAGC_OK;
    self->in_reason[socket->in.n_bytes] = 0;
    const tagc_failure failure = {(tagc_status)socket->in.total, (int)socket->in.offset - 1, self->in_reason};
    tagc_native_break(self, &failure, (int)(socket->in.sequence & INT32_MAX));
    return TAGC_OK;
}

/* n_bytes are at in_target already. */
static tagc_status advance(native_socket *socket, uint32_t n_bytes) {
    socket->in_target += n_bytes;
    socket->in_left -= n_bytes;
    if (socket->in_receive)
        add_received(socket->in_receive, n_bytes);
    else
        socket->self->moved = 1;
    return socket->in_left ? TAGC_OK : end_frame(socket);
}

tagc_status tagc_native_feed(native_socket *socket, const unsigned char *data, size_t n_bytes) {
    while (n_bytes > 0) {
        size_t n;
        if (socket->n_in_header < NATIVE_HEADER_BYTES) {
            n = NATIVE_HEADER_BYTES - socket->n_in_header;
            if (n > n_bytes) n = n_bytes;
            memcpy(socket->in_header + socket->n_in_header, data, n);
            socket->n_in_header += (uint32_t)n;
            if (socket->n_in_header == NATIVE_HEADER_BYTES) {
                TAGC_TRY(begin_frame(socket));
                if (!socket->in_left) TAGC_TRY(end_frame(socket));
            }
        } else {
            n = socket->in_left < n_bytes ? socket->in_left : n_bytes;
            memcpy(socket->in_target, data, n);
            TAGC_TRY(advance(socket, (uint32_t)n));
        }
        data += n;
        n_bytes -= n;
    }
    return TAGC_OK;
}

unsigned char *tagc_native_direct_target(native_socket *socket, size_t *n_bytes) {
    *n_bytes = socket->in_left;
    return socket->n_in_header == NATIVE_HEADER_BYTES && socket->in_left >= NATIVE_STAGING_BYTES / 4
               ? socket->in_target
               : NULL;
}

tagc_status tagc_native_feed_direct(native_socket *socket, size_t n_bytes) {
    return advance(socket, (uint32_t)n_bytes);
}

/* ---- what came early ---- */

static tagc_status take_one(tagc_native *self, native_peer *peer, const native_early *early) {
    native_socket from = {.self = self, .peer = peer}; /* for texts of errors */
    if (early->frame.kind == NATIVE_READY) return take_ready(&from, &early->frame);
    native_receive *receive;
    TAGC_TRY(find_receive(&from, &early->frame, &receive));
    return copy_early(&from, receive, early);
}

static tagc_status take_from(tagc_native *self, native_peer *peer, const native_request *request) {
    for (native_early **link = &peer->early; *link;) {
        const native_frame *frame = &(*link)->frame;
        if (frame->lane != request->transfer.lane || frame->sequence != request->sequence) {
            link = &(*link)->next;
            continue;
        }
        TAGC_TRY(take_one(self, peer, *link));
        drop_early(self, peer, link);
    }
    return TAGC_OK;
}

/* Of all peers, also those that sent what this rank does not expect. */
tagc_status tagc_native_take_early(tagc_native *self, native_request *request) {
    for (int r = 0; r < self->world_size && self->n_early; r++)
        TAGC_TRY(take_from(self, &self->peers[r], request));
    return TAGC_OK;
}

void tagc_native_drop_early(tagc_native *self) {
    for (int r = 0; r < self->world_size; r++)
        while (self->peers[r].early) drop_early(self, &self->peers[r], &self->peers[r].early);
}
