/* How much a peer may send before its transfers have started here. No socket is in it: frames are fed as a read feeds them. */
#include "../test.h"
#include "transport/native/native.h"

#include <stdlib.h>
#include <string.h>

enum { W = 2 };

typedef struct stage {
    tagc_native *self;
    native_socket socket;
} stage;

static void make(stage *s) {
    s->self = calloc(1, sizeof *s->self);
    s->self->world_size = W;
    s->self->n_sockets = 1;
    s->self->giver = s->self->failed_rank = -1;
    s->self->names = calloc(W, sizeof *s->self->names);
    s->self->peers = calloc(W, sizeof *s->self->peers);
    for (int r = 0; r < W; r++) {
        s->self->peers[r].rank = r;
        s->self->names[r] = 10 + r;
    }
    s->socket = (native_socket){.self = s->self, .peer = &s->self->peers[1]};
}

static void destroy(stage *s) {
    tagc_native_drop_early(s->self);
    assert_int_equal(s->self->n_early, 0);
    assert_int_equal(s->self->peers[1].n_early_bytes, 0);
    free(s->socket.in_early);
    free(s->self->names);
    free(s->self->peers);
    free(s->self);
}

/* The bytes of bodies are never written, so that the system need not find memory for them. */
static tagc_status feed(stage *s, native_frame frame) {
    unsigned char header[NATIVE_HEADER_BYTES];
    tagc_native_write_header(&frame, header);
    tagc_status status = tagc_native_feed(&s->socket, header, sizeof header);
    return status == TAGC_OK && frame.n_bytes ? tagc_native_feed_direct(&s->socket, frame.n_bytes) : status;
}

static void assert_refused(stage *s, native_frame frame, const char *text) {
    assert_int_equal(feed(s, frame), TAGC_ERR_CORRUPT);
    assert_string_equal(tagc_last_error(), text);
    assert_int_equal(tagc_last_rank(), 1);
}

static native_frame piece(uint64_t sequence, uint64_t at) {
    return (native_frame){.kind = NATIVE_DATA,
                          .lane = 3,
                          .n_bytes = NATIVE_PIECE_BYTES,
                          .sequence = sequence,
                          .total = 4 << 20,
                          .offset = at * NATIVE_PIECE_BYTES};
}

TEST(a_part_comes_once) {
    stage s;
    make(&s);
    for (uint64_t at = 0; at < 4; at++) assert_int_equal(feed(&s, piece(5, at)), TAGC_OK);
    assert_int_equal(feed(&s, piece(6, 0)), TAGC_OK); /* of another transfer */
    assert_refused(&s, piece(5, 0), "rank 11 sent more bytes of a part than it has");
    destroy(&s);
    make(&s);
    assert_refused(&s, piece(5, 4),
                   "rank 11 sent more of a part than it may before its receiver has started");
    destroy(&s);
    make(&s);
    native_frame whole = {.kind = NATIVE_DATA, .lane = 3, .n_bytes = 1000, .total = 1000};
    assert_int_equal(feed(&s, whole), TAGC_OK);
    whole.n_bytes = 1;
    assert_refused(&s, whole, "rank 11 sent more bytes of a part than it has");
    destroy(&s);
}

TEST(an_answer_comes_once) {
    stage s;
    make(&s);
    const native_frame ready = {.kind = NATIVE_READY, .lane = 3, .sequence = 5, .total = 4 << 20};
    assert_int_equal(feed(&s, piece(5, 0)), TAGC_OK);
    assert_int_equal(feed(&s, ready), TAGC_OK);
    assert_refused(&s, ready, "rank 11 sent an answer twice");
    destroy(&s);
}

TEST(nobody_is_far_ahead) {
    stage s;
    make(&s);
    s.self->n_started[3] = 100;
    assert_int_equal(feed(&s, piece(100 + NATIVE_MOST_AHEAD - 1, 0)), TAGC_OK);
    assert_refused(&s, piece(100 + NATIVE_MOST_AHEAD, 0), "rank 11 sent a frame of a transfer too far ahead");
    destroy(&s);
}

TEST(all_of_them_have_a_limit) {
    stage s;
    make(&s);
    uint64_t most = NATIVE_MOST_EARLY_BYTES / NATIVE_PIECE_BYTES, n = 0;
    tagc_status status = TAGC_OK;
    while (status == TAGC_OK && n <= most) {
        status = feed(&s, piece(n / 4, n % 4));
        n += status == TAGC_OK;
    }
    assert_int_equal(status, TAGC_ERR_CORRUPT);
    assert_string_equal(tagc_last_error(), "rank 11 sent more than it may before its receiver has started");
    assert_true(n >= most * 9 / 10);
    destroy(&s);
}
