/* Lossless gathers: bf16 with exponents in codes (codec/exponents.h), whose bytes only their sender knows.
 *
 * A row is divided into segments of the same size on all ranks, up to eight, each a message, so that one is encoded
 * while another is on the wire, and decoded as soon as it is here. Without a message about lengths: a message is a
 * header and the front of a body, whose length all ranks know. It is a little more than the body of this row and segment
 * took in the gather before, and weights change slowly. The rest of a longer body follows in a second transfer, which
 * all ranks know from the headers of that segment. Body of a segment:
 *
 *   u32 x pieces   where each piece of 16384 values ends, from the end of this table
 *   pieces         each as codec/exponents.h says
 *
 * A header that is damaged breaks the comm, for only its sender knows what it will send. Who gets a damaged body fails
 * at once and says so in its next message; that gather fails on all ranks. */
#include "codec/bf16.h"
#include "codec/exponents.h"
#include "exchange/gatherer/gatherer.h"
#include "exchange/wire.h"

#include <stdio.h>
#include <string.h>

enum { CHUNK = TAGC_EXPONENTS_CHUNK, PIECE = 4 * CHUNK, LEAST_PIECES = 4, MOST_SEGMENTS = 8 };

static size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

static size_t n_pieces_of(size_t n) {
    return (n + PIECE - 1) / PIECE;
}

static size_t table_bytes(size_t n) {
    return n_pieces_of(n) * sizeof(uint32_t);
}

static size_t max_body(size_t n) {
    return table_bytes(n) + tagc_exponents_max_bytes(n);
}

/* A body is seldom longer than that of the gather before by more. */
static size_t front_after(size_t n_bytes, size_t n) {
    return smaller(n_bytes + n_bytes / 256 + 64, max_body(n));
}

/* Of a bell curve, 11.2 bits a value: for forecasts and the first gather. */
static size_t expected_front(size_t n) {
    return front_after(table_bytes(n) + n * 7 / 5, n);
}

/* ---- layout ---- */

static size_t segment_elems(const tagc_gatherer *g) {
    size_t n_pieces = (n_pieces_of(g->shard) + MOST_SEGMENTS - 1) / MOST_SEGMENTS;
    return PIECE * (n_pieces < LEAST_PIECES ? LEAST_PIECES : n_pieces);
}

static size_t message_room(size_t n) {
    return tagc_aligned(TAGC_WIRE_HEADER_BYTES + max_body(n));
}

void tagc_gatherer_lossless_lay_out(tagc_gatherer *g) {
    size_t n = segment_elems(g), n_before = (g->shard - 1) / n;
    g->n_segments = (int)n_before + 1;
    g->row_bytes = n_before * message_room(n) + message_room(g->shard - n_before * n);
}

void tagc_gatherer_lossless_place(tagc_gatherer *g, tagc_arena *arena) {
    size_t n = segment_elems(g), n_rows = (size_t)g->world_size;
    tagc_segment *segments = tagc_arena_take(arena, (size_t)g->n_segments, sizeof *segments);
    for (int k = 0; k < g->n_segments; k++) {
        size_t first = (size_t)k * n;
        tagc_segment s = {.first = first,
                          .n = smaller(n, g->shard - first),
                          .at = (size_t)k * message_room(n),
                          .front = tagc_arena_take(arena, n_rows, sizeof *s.front),
                          .n_bytes = tagc_arena_take(arena, n_rows, sizeof *s.n_bytes)};
        tagc_delivery_place(g, arena, &s.delivery);
        if (segments) segments[k] = s;
    }
    g->segments = segments;
}

void tagc_gatherer_lossless_init(tagc_gatherer *g) {
    for (int k = 0; k < g->n_segments; k++)
        for (int r = 0; r < g->world_size; r++) g->segments[k].front[r] = expected_front(g->segments[k].n);
}

size_t tagc_gatherer_lossless_bytes(const tagc_gatherer *g) {
    size_t n = segment_elems(g), n_bytes = 0;
    for (size_t first = 0; first < g->shard; first += n)
        n_bytes += TAGC_WIRE_HEADER_BYTES + expected_front(smaller(n, g->shard - first));
    return n_bytes;
}

static uint8_t *message_of(const tagc_gatherer *g, const tagc_segment *s, int row) {
    return tagc_gatherer_row(g, row) + s->at;
}

static uint8_t *body_of(const tagc_gatherer *g, const tagc_segment *s, int row) {
    return message_of(g, s, row) + TAGC_WIRE_HEADER_BYTES;
}

/* ---- transfers ---- */

/* Posts fronts, or the rests of bodies that are longer. */
static void post(tagc_gatherer *g, tagc_segment *s, int is_rest) {
    for (int r = 0; r < g->world_size; r++) {
        uint64_t message = (uint64_t)r * g->row_bytes + s->at, front = TAGC_WIRE_HEADER_BYTES + s->front[r];
        uint64_t n_rest = s->n_bytes[r] > s->front[r] ? s->n_bytes[r] - s->front[r] : 0;
        s->delivery.extents[r] = is_rest ? (tagc_extent){.offset = message + front, .n_bytes = n_rest}
                                         : (tagc_extent){.offset = message, .n_bytes = front};
    }
    tagc_delivery_post(g, &s->delivery, is_rest ? TAGC_LANE_RESTS : TAGC_LANE_GATHER,
                       g->rows + s->delivery.extents[g->rank].offset, g->rows);
}

/* ---- the own row ---- */

/* A thread's share of the pieces of a segment of one row. */
typedef struct pieces {
    const tagc_gatherer *g;
    const tagc_segment *s;
    uint8_t *body;
    size_t n_bytes;        /* decoding */
    void *values;          /* decoding: the row of `full` */
    atomic_int is_damaged; /* decoding */
} pieces;

static void encode_pieces(void *arg, int index, int n_threads) {
    const pieces *p = arg;
    uint16_t halves[CHUNK];
    for (size_t i = (size_t)index; i < n_pieces_of(p->s->n); i += (size_t)n_threads) {
        size_t first = i * PIECE, end = smaller(first + PIECE, p->s->n);
        uint8_t *to = p->body + table_bytes(p->s->n) + i * tagc_exponents_max_bytes(PIECE);
        uint32_t n_bytes = 0;
        for (size_t at = first; at < end; at += CHUNK) {
            size_t n = smaller(CHUNK, end - at);
            tagc_bf16_narrow(p->g->own + p->s->first + at, halves, n);
            n_bytes += (uint32_t)tagc_exponents_encode(halves, n, to + n_bytes);
        }
        memcpy(p->body + i * sizeof n_bytes, &n_bytes, sizeof n_bytes);
    }
}

/* Moves encoded pieces together, and turns the table of their lengths into one of their ends. Returns the bytes of the
 * body. */
static size_t join_pieces(uint8_t *body, size_t n) {
    uint8_t *first = body + table_bytes(n);
    uint32_t end = 0;
    for (size_t i = 0; i < n_pieces_of(n); i++) {
        uint32_t n_bytes;
        memcpy(&n_bytes, body + i * sizeof n_bytes, sizeof n_bytes);
        memmove(first + end, first + i * tagc_exponents_max_bytes(PIECE), n_bytes);
        end += n_bytes;
        memcpy(body + i * sizeof end, &end, sizeof end);
    }
    return table_bytes(n) + end;
}

static void encode(tagc_gatherer *g, int segment) {
    tagc_segment *s = &g->segments[segment];
    uint8_t *body = body_of(g, s, g->rank);
    pieces work = {.g = g, .s = s, .body = body};
    tagc_pool_run(g->pool, encode_pieces, &work);
    size_t n_bytes = join_pieces(body, s->n);
    s->n_bytes[g->rank] = n_bytes;
    if (n_bytes < s->front[g->rank]) memset(body + n_bytes, 0, s->front[g->rank] - n_bytes);
    tagc_wire_header header = {.kind = TAGC_WIRE_LOSSLESS,
                               .rank = (uint32_t)g->rank,
                               .n_elems = s->n,
                               .unit = g->identity.unit,
                               .n_items = (uint32_t)segment,
                               .status = (uint32_t)g->failure,
                               .body_sum = tagc_wire_sum(body, n_bytes),
                               .body_bytes = n_bytes,
                               .step = g->n_begun};
    tagc_wire_write(&header, message_of(g, s, g->rank));
}

/* Writes the own row to `full` as the others will have it, while it is on the wire. */
static void put_own(tagc_gatherer *g) {
    void *to = tagc_gatherer_full(g, g->rank);
    uint16_t halves[CHUNK];
    if (g->width == sizeof *halves) {
        tagc_bf16_narrow(g->own, to, g->shard);
        return;
    }
    for (size_t at = 0; at < g->shard; at += CHUNK) {
        size_t n = smaller(CHUNK, g->shard - at);
        tagc_bf16_narrow(g->own + at, halves, n);
        tagc_bf16_widen(halves, (float *)to + at, n);
    }
}

static void begin(tagc_gatherer *g) {
    g->n_fronts = g->n_rests = 0;
    g->told = TAGC_OK;
    g->damage = NULL;
    g->is_of_other_unit = 0;
    for (int k = 0; k < g->n_segments; k++) {
        encode(g, k);
        post(g, &g->segments[k], 0);
    }
    put_own(g);
    g->is_posted = 1;
}

/* ---- everyone's ---- */

static tagc_status read_header(const tagc_gatherer *g, int segment, int row, tagc_wire_header *header) {
    const tagc_segment *s = &g->segments[segment];
    tagc_wire_header expected = {
        .kind = TAGC_WIRE_LOSSLESS, .rank = (uint32_t)row, .n_elems = s->n, .step = g->n_begun};
    TAGC_TRY(tagc_wire_read(message_of(g, s, row), TAGC_WIRE_HEADER_BYTES, header));
    TAGC_TRY(tagc_wire_expect_of(g->comm, &g->identity, row, header, &expected));
    if (header->n_items != (uint32_t)segment)
        return tagc_fail(TAGC_ERR_CORRUPT, "segment is %u, expected %d", header->n_items, segment);
    if (header->body_bytes < table_bytes(s->n) || header->body_bytes > max_body(s->n))
        return tagc_fail(TAGC_ERR_CORRUPT, "the body has %llu bytes, must have %zu to %zu",
                         (unsigned long long)header->body_bytes, table_bytes(s->n), max_body(s->n));
    return TAGC_OK;
}

/* The body of another unit follows as its header says, and is received and left alone. Only one of the same shape can be. */
static int is_of_other_unit(tagc_gatherer *g, const tagc_wire_header *header, size_t n) {
    if (header->unit == g->identity.unit || header->body_bytes > max_body(n) ||
        !tagc_identity_may_be_alike(g->comm, &g->identity, header->unit))
        return 0;
    if (!g->is_of_other_unit) snprintf(g->other_unit, sizeof g->other_unit, "%s", tagc_last_error());
    g->is_of_other_unit = 1;
    return 1;
}

/* Notes what the headers of a segment say. */
static tagc_status read_headers(tagc_gatherer *g, int segment) {
    tagc_segment *s = &g->segments[segment];
    s->has_rest = 0;
    for (int r = 0; r < g->world_size; r++) {
        tagc_wire_header header = {.status = (uint32_t)g->failure, .body_bytes = s->n_bytes[r]};
        int name = tagc_comm_name(g->comm, r);
        tagc_status status = r == g->rank ? TAGC_OK : read_header(g, segment, r, &header);
        if (status == TAGC_ERR_MISMATCH && is_of_other_unit(g, &header, s->n))
            header.status = TAGC_OK; /* of another gatherer */
        else if (status == TAGC_ERR_MISMATCH && header.unit != g->identity.unit)
            return tagc_identity_abort(g->comm, &g->identity, r, header.unit);
        else if (status != TAGC_OK)
            return tagc_comm_give_up(g->comm, tagc_fail_in(status, "header of parameters from rank %d", name),
                                     r);
        s->n_bytes[r] = (size_t)header.body_bytes;
        s->has_rest |= s->n_bytes[r] > s->front[r];
        if (header.status == TAGC_OK || g->told != TAGC_OK) continue;
        g->told = (tagc_status)header.status;
        g->told_by = name;
    }
    return TAGC_OK;
}

static int decode_piece(const pieces *p, size_t i) {
    uint32_t begin = 0, end;
    uint16_t halves[PIECE];
    size_t n = smaller(PIECE, p->s->n - i * PIECE), n_table = table_bytes(p->s->n),
           first = p->s->first + i * PIECE;
    if (i > 0) memcpy(&begin, p->body + (i - 1) * sizeof begin, sizeof begin);
    memcpy(&end, p->body + i * sizeof end, sizeof end);
    if (begin > end || end > p->n_bytes - n_table) return 0;
    int is_narrow = p->g->width == sizeof *halves;
    uint16_t *to = is_narrow ? (uint16_t *)p->values + first : halves;
    if (!tagc_exponents_decode(p->body + n_table + begin, end - begin, to, n)) return 0;
    if (!is_narrow) tagc_bf16_widen(halves, (float *)p->values + first, n);
    return 1;
}

static void decode_pieces(void *arg, int index, int n_threads) {
    pieces *p = arg;
    for (size_t i = (size_t)index; i < n_pieces_of(p->s->n); i += (size_t)n_threads)
        if (!decode_piece(p, i)) atomic_store_explicit(&p->is_damaged, 1, memory_order_relaxed);
}

static const char *decode_row(tagc_gatherer *g, const tagc_segment *s, int row) {
    const uint8_t *message = message_of(g, s, row);
    pieces work = {.g = g,
                   .s = s,
                   .body = body_of(g, s, row),
                   .n_bytes = s->n_bytes[row],
                   .values = tagc_gatherer_full(g, row)};
    tagc_wire_header header;
    if (tagc_wire_read(message, TAGC_WIRE_HEADER_BYTES, &header) != TAGC_OK ||
        tagc_wire_sum(work.body, work.n_bytes) != header.body_sum)
        return "the checksum is wrong";
    tagc_pool_run(g->pool, decode_pieces, &work);
    return atomic_load(&work.is_damaged) ? "codes are damaged" : NULL;
}

static void decode(tagc_gatherer *g, const tagc_segment *s) {
    if (g->is_of_other_unit) return;
    for (int r = 0; r < g->world_size; r++) {
        const char *damage = r == g->rank ? NULL : decode_row(g, s, r);
        if (!damage || g->damage) continue;
        g->damage = damage;
        g->damaged_row = r;
    }
}

static tagc_status take_front(tagc_gatherer *g) {
    int segment = g->n_fronts++;
    tagc_segment *s = &g->segments[segment];
    TAGC_TRY(tagc_delivery_wait(g, &s->delivery));
    TAGC_TRY(read_headers(g, segment));
    if (s->has_rest)
        post(g, s, 1);
    else
        decode(g, s);
    return TAGC_OK;
}

static tagc_status take_rest(tagc_gatherer *g) {
    tagc_segment *s = &g->segments[g->n_rests++];
    TAGC_TRY(tagc_delivery_wait(g, &s->delivery));
    decode(g, s);
    return TAGC_OK;
}

static tagc_status conclude(tagc_gatherer *g) {
    if (g->is_of_other_unit) { /* as all ranks see, so that all keep their fronts */
        g->failure = TAGC_OK;
        return tagc_fail(TAGC_ERR_MISMATCH, "%s", g->other_unit);
    }
    for (int k = 0; k < g->n_segments; k++)
        for (int r = 0; r < g->world_size; r++)
            g->segments[k].front[r] = front_after(g->segments[k].n_bytes[r], g->segments[k].n);
    g->failure = g->damage ? TAGC_ERR_CORRUPT : TAGC_OK;
    if (g->damage)
        return tagc_fail(TAGC_ERR_CORRUPT, "parameters from rank %d: %s",
                         tagc_comm_name(g->comm, g->damaged_row), g->damage);
    return tagc_gatherer_told(g->told, g->told_by);
}

/* ---- the course: all fronts out, all fronts in, rests ---- */

/* Rests that are not there need no run. */
static int is_over(tagc_gatherer *g) {
    if (!g->is_posted || g->n_fronts < g->n_segments) return 0;
    while (g->n_rests < g->n_segments && !g->segments[g->n_rests].has_rest) g->n_rests++;
    return g->n_rests == g->n_segments;
}

int tagc_gatherer_lossless_is_ready(const tagc_gatherer *g) {
    int segment = g->n_fronts < g->n_segments ? g->n_fronts : g->n_rests;
    return tagc_delivery_is_done(g, &g->segments[segment].delivery);
}

tagc_status tagc_gatherer_lossless_run(tagc_gatherer *g) {
    tagc_status status = TAGC_OK;
    if (!g->is_posted)
        begin(g);
    else
        status = g->n_fronts < g->n_segments ? take_front(g) : take_rest(g);
    if (status != TAGC_OK) {
        for (int k = 0; k < g->n_segments; k++) (void)tagc_delivery_wait(g, &g->segments[k].delivery);
        return status;
    }
    if (is_over(g)) return conclude(g);
    g->task.more = 1;
    g->task.next_lanes = g->task.later_lanes = g->n_fronts < g->n_segments ? 1u << TAGC_LANE_RESTS : 0;
    return TAGC_OK;
}
