/* What a rank of the native transport does with the bytes of a peer that has shown its key: frames of any kind, in reads of
 * any length, of transfers that have started, have not, or are complete.
 *
 * Input: steps of 1 byte and what it asks for. 0 to 199: a read of that many bytes. 200 to 219: a frame's header with small
 * fields, of 6 bytes. 220 and more: this rank starts a transfer, whose sizes are in 2 bytes. */
#include "transport/native/native.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

enum { W = 3, MOST_REQUESTS = 40, MOST_PART = 3 << 20, GUARD = 64 };

typedef struct started {
    native_request request;
    native_send sends[W - 1];
    native_receive receives[W - 1];
    tagc_part send_parts[W - 1], receive_parts[W - 1];
    unsigned char *recv;
    uint64_t n_recv;
} started;

static tagc_native *make(void) {
    tagc_native *self = calloc(1, sizeof *self);
    self->peers = calloc(W, sizeof *self->peers);
    self->names = calloc(W, sizeof *self->names);
    self->world_size = W;
    self->n_sockets = 1;
    self->giver = self->failed_rank = -1;
    for (int r = 0; r < W; r++) self->peers[r].rank = self->names[r] = r;
    return self;
}

/* Few sizes, so that frames often fit a part. */
static uint64_t size_of(uint8_t drawn) {
    static const uint64_t sizes[] = {0, 100, 3000, 2 << 20};
    return sizes[drawn % 4];
}

static void start(tagc_native *self, started *s, uint8_t lane, uint64_t n_first, uint64_t n_second) {
    uint64_t sizes[W - 1] = {n_first, n_second};
    s->n_recv = n_first + n_second + GUARD;
    s->recv = calloc(1, s->n_recv);
    native_request *request = &s->request;
    request->sends = s->sends;
    request->receives = s->receives;
    for (int i = 0; i < W - 1; i++) {
        s->receive_parts[i] = (tagc_part){.peer = i + 1, .n_bytes = sizes[i], .offset = i ? n_first : 0};
        s->send_parts[i] = s->receive_parts[i];
        s->receives[i] = (native_receive){.request = request, .n_bytes = sizes[i], .peer = i + 1};
        s->sends[i] =
            (native_send){.request = request, .n_bytes = sizes[i], .n_taken = sizes[i], .peer = i + 1};
        request->n_left += sizes[i] > 0;
    }
    request->transfer = (tagc_transfer){.lane = lane,
                                        .n_sends = W - 1,
                                        .n_receives = W - 1,
                                        .sends = s->send_parts,
                                        .receives = s->receive_parts,
                                        .send = s->recv,
                                        .recv = s->recv};
    request->sequence = self->n_started[lane]++;
    request->next = self->active[lane];
    self->active[lane] = request;
}

/* As a read does: to where the body belongs if enough of it is missing. */
static tagc_status feed(native_socket *socket, const uint8_t *bytes, size_t n_bytes) {
    size_t n_wanted;
    unsigned char *target = tagc_native_direct_target(socket, &n_wanted);
    if (!target) return tagc_native_feed(socket, bytes, n_bytes);
    if (n_bytes > n_wanted) n_bytes = n_wanted;
    memcpy(target, bytes, n_bytes);
    return tagc_native_feed_direct(socket, n_bytes);
}

static tagc_status step(tagc_native *self, native_socket *socket, started *all, int *n_started,
                        const uint8_t **data, size_t *n_bytes) {
    uint8_t what = *(*data)++;
    --*n_bytes;
    if (what >= 220 && *n_bytes >= 2 && *n_started < MOST_REQUESTS) {
        started *s = &all[(*n_started)++];
        start(self, s, what % 2, size_of((*data)[0]), size_of((*data)[1]));
        *data += 2;
        *n_bytes -= 2;
        return tagc_native_take_early(self, &s->request);
    }
    if (what >= 200 && *n_bytes >= 6) {
        const uint8_t *f = *data;
        native_frame frame = {.kind = f[0] < 128 ? NATIVE_DATA : f[0] % 6,
                              .lane = f[1] % 128 < 4 ? 9 : f[1] % 2,
                              .n_bytes = f[2],
                              .sequence = f[3] % 3,
                              .total = size_of(f[4]),
                              .offset = f[5]};
        if (f[1] & 128) frame.n_bytes *= 1200;
        unsigned char header[NATIVE_HEADER_BYTES];
        tagc_native_write_header(&frame, header);
        *data += 6;
        *n_bytes -= 6;
        return feed(socket, header, sizeof header);
    }
    size_t n = what < *n_bytes ? what : *n_bytes;
    tagc_status status = feed(socket, *data, n);
    *data += n;
    *n_bytes -= n;
    return status;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    static started all[MOST_REQUESTS];
    memset(all, 0, sizeof all);
    tagc_native *self = make();
    native_socket socket = {.self = self, .peer = &self->peers[1]};
    int n_started = 0;
    tagc_status status = TAGC_OK;
    while (n_bytes > 0 && status == TAGC_OK) status = step(self, &socket, all, &n_started, &data, &n_bytes);
    for (int i = 0; i < n_started; i++) {
        const native_receive *receive = &all[i].receives[0];
        if (receive->n_received > receive->n_bytes || receive->n_received > receive->n_announced) abort();
        for (uint64_t j = 0; j < GUARD; j++)
            if (all[i].recv[all[i].n_recv - 1 - j]) abort();
        free(all[i].recv);
    }
    tagc_native_drop_early(self);
    if (self->n_early) abort();
    free(socket.in_early);
    free(self->names);
    free(self->peers);
    free(self);
    return 0;
}
