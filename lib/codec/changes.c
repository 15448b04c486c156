/* Changes, see changes.h. */
#include "codec/changes.h"
#include "codec/bitmap.h"
#include "codec/gaps.h"
#include "codec/integers.h"
#include "core/memory.h"

#include <string.h>

enum { HEADER = 12, WHOLE = 0, DIFFERENCES = 1, VALUES = 2 };
enum { SEGMENT = TAGC_CHANGES_SEGMENT };

#define INLINE static inline __attribute__((always_inline))

static size_t segment_elems(size_t n, size_t at) {
    return n - at < SEGMENT ? n - at : SEGMENT;
}

size_t tagc_changes_body_max_bytes(size_t width, size_t n) {
    return n * width + HEADER * ((n + SEGMENT - 1) / SEGMENT);
}

/* ---- elements as integers ---- */

INLINE uint32_t load(size_t width, const uint8_t *from) {
    uint32_t value = 0; /* the machine is little-endian */
    memcpy(&value, from, width);
    return value;
}

INLINE uint32_t mask_of(size_t width) {
    return (uint32_t)((UINT64_C(1) << 8 * width) - 1);
}

/* Order and element, each from the other: what has the sign bit is counted down from -1. Modulo 2^(8 width). */
INLINE uint32_t turn(size_t width, uint32_t value) {
    uint32_t sign = (uint32_t)1 << (8 * width - 1);
    return value & sign ? value ^ (sign - 1) : value;
}

INLINE uint32_t integer_of(size_t width, uint32_t before, uint32_t after) {
    uint32_t d = (turn(width, after) - turn(width, before)) & mask_of(width);
    int is_negative = d >> (8 * width - 1) != 0;
    return is_negative ? 2 * ((0 - d) & mask_of(width)) - 2 : 2 * d - 1;
}

INLINE uint32_t moved(size_t width, uint32_t before, uint32_t integer) {
    uint32_t d = integer & 1 ? integer / 2 + 1 : 0 - (integer / 2 + 1);
    return turn(width, (turn(width, before) + d) & mask_of(width));
}

INLINE uint32_t most_of(size_t width) { /* of integers: there are 2^(8 width) - 1 differences */
    return mask_of(width) - 1;
}

/* ---- encode ---- */

typedef struct encoder {
    uint8_t *bits;      /* tagc_bitmap_bytes */
    uint32_t *items;    /* (n) positions in the segment */
    uint32_t *integers; /* (n) */
    uint8_t *positions; /* coded */
    void *gaps_scratch;
    size_t n_items, n_position_bytes;
} encoder;

static void lay_out(size_t n, tagc_arena *arena, encoder *e) {
    tagc_gaps most; /* with the shortest chunks, of which there are the most */
    tagc_gaps_init(&most, n, n);
    *e = (encoder){.bits = tagc_arena_take(arena, tagc_bitmap_bytes(n), 1),
                   .items = tagc_arena_take(arena, n, sizeof(uint32_t)),
                   .integers = tagc_arena_take(arena, n, sizeof(uint32_t)),
                   .positions = tagc_arena_take(arena, tagc_gaps_max_bytes(&most), 1),
                   .gaps_scratch = tagc_arena_take(arena, tagc_gaps_scratch_bytes(&most), 1)};
}

size_t tagc_changes_encode_scratch_bytes(size_t n) {
    encoder e;
    tagc_arena arena = {0};
    lay_out(n < SEGMENT ? n : SEGMENT, &arena, &e);
    return arena.n_bytes;
}

INLINE void subtract_as(size_t width, const encoder *e, const uint8_t *before, const uint8_t *after) {
    for (size_t i = 0; i < e->n_items; i++) {
        size_t at = e->items[i] * width;
        e->integers[i] = integer_of(width, load(width, before + at), load(width, after + at));
    }
}

static void subtract(size_t width, const encoder *e, const uint8_t *before, const uint8_t *after) {
    if (width == 1)
        subtract_as(1, e, before, after);
    else if (width == 2)
        subtract_as(2, e, before, after);
    else
        subtract_as(4, e, before, after);
}

static void encode_positions(encoder *e, size_t n) {
    tagc_gaps gaps;
    e->n_position_bytes = 0;
    if (e->n_items == 0 || e->n_items == n) return;
    tagc_gaps_init(&gaps, n, e->n_items);
    e->n_position_bytes = tagc_gaps_encode(&gaps, e->items, e->n_items, e->positions, e->gaps_scratch, NULL);
}

static size_t write_header(uint8_t *to, size_t n_items, int form, int order, size_t n_last) {
    tagc_store16(to, (uint32_t)n_items);
    tagc_store16(to + 2, (uint32_t)(n_items >> 16));
    to[4] = (uint8_t)form;
    to[5] = (uint8_t)order;
    tagc_store16(to + 6, 0);
    tagc_store16(to + 8, (uint32_t)n_last);
    tagc_store16(to + 10, (uint32_t)(n_last >> 16));
    return HEADER;
}

static size_t write_whole(size_t width, const uint8_t *after, size_t n, uint8_t *to) {
    memcpy(to + HEADER, after, n * width);
    return write_header(to, n, WHOLE, 0, n * width) + n * width;
}

static size_t encode_segment(const tagc_differ_kernels *kernels, size_t width, const uint8_t *before,
                             const uint8_t *after, size_t n, encoder *e, uint8_t *to) {
    tagc_differ(kernels, width, before, after, n, e->bits);
    e->n_items = tagc_bitmap_indices(e->bits, n, e->items);
    subtract(width, e, before, after);
    encode_positions(e, n);
    int order = tagc_integers_order(e->integers, e->n_items);
    size_t n_integers = tagc_integers_bytes(order, e->integers, e->n_items), n_values = e->n_items * width;
    size_t n_last = n_integers <= n_values ? n_integers : n_values;
    if (e->n_position_bytes + n_last >= n * width && e->n_items > 0) return write_whole(width, after, n, to);
    uint8_t *last = to + HEADER + e->n_position_bytes;
    memcpy(to + HEADER, e->positions, e->n_position_bytes);
    if (n_integers <= n_values)
        tagc_integers_write(order, e->integers, e->n_items, last);
    else
        for (size_t i = 0; i < e->n_items; i++) memcpy(last + i * width, after + e->items[i] * width, width);
    int form = n_integers <= n_values ? DIFFERENCES : VALUES;
    write_header(to, e->n_items, form, form == DIFFERENCES ? order : 0, n_last);
    return HEADER + e->n_position_bytes + n_last;
}

size_t tagc_changes_body_encode(const tagc_differ_kernels *kernels, size_t width, const void *before,
                                const void *after, size_t n, uint8_t *body, void *scratch,
                                uint64_t *n_changes) {
    encoder e;
    tagc_arena arena = {.base = scratch};
    size_t n_bytes = 0;
    lay_out(n < SEGMENT ? n : SEGMENT, &arena, &e);
    *n_changes = before ? 0 : n;
    for (size_t at = 0; at < n; at += SEGMENT) {
        const uint8_t *a = (const uint8_t *)before + (before ? at * width : 0),
                      *b = (const uint8_t *)after + at * width;
        size_t here = segment_elems(n, at);
        if (!before) {
            n_bytes += write_whole(width, b, here, body + n_bytes);
            continue;
        }
        n_bytes += encode_segment(kernels, width, a, b, here, &e, body + n_bytes);
        *n_changes += e.n_items;
    }
    return n_bytes;
}

/* ---- decode ---- */

typedef struct segment {
    size_t n, n_items, n_positions, n_last; /* elements; items; bytes */
    int form, order;
    const uint8_t *positions, *last;
    tagc_gaps gaps;
} segment;

static uint32_t load32(const uint8_t *bytes) {
    return tagc_load16(bytes) | tagc_load16(bytes + 2) << 16;
}

static int has_positions(const segment *s) {
    return s->n_items > 0 && s->n_items < s->n;
}

/* Reads the header. The caller finds the last part, behind the positions. */
static void open_segment(const uint8_t *from, size_t n, segment *s) {
    *s = (segment){
        .n = n, .n_items = load32(from), .form = from[4], .order = from[5], .n_last = load32(from + 8)};
    s->positions = from + HEADER;
    if (has_positions(s)) tagc_gaps_init(&s->gaps, n, s->n_items);
}

/* The integers of a segment: as many as items, and nothing behind them. */
static int integers_valid(size_t width, const segment *s) {
    tagc_integers_reader reader = {.bytes = s->last, .n_bits = 8 * (uint64_t)s->n_last, .order = s->order};
    uint32_t integer;
    for (size_t i = 0; i < s->n_items; i++)
        if (!tagc_integers_read(&reader, most_of(width), &integer)) return 0;
    return tagc_integers_ended(&reader);
}

/* Returns the bytes of the segment; 0 if it is damaged. */
static size_t valid_segment(size_t width, const uint8_t *from, size_t n_bytes, size_t n, segment *s) {
    size_t n_items;
    if (n_bytes < HEADER) return 0;
    open_segment(from, n, s);
    if (s->n_items > n || s->form > VALUES || tagc_load16(from + 6)) return 0;
    if (s->order > (s->form == DIFFERENCES ? TAGC_INTEGERS_MAX_ORDER : 0)) return 0;
    if (s->form == WHOLE && s->n_items != n) return 0;
    n_bytes -= HEADER;
    if (has_positions(s)) {
        s->n_positions = tagc_gaps_validate(&s->gaps, s->positions, n_bytes, &n_items);
        if (s->n_positions == 0 || n_items != s->n_items) return 0;
    }
    if (s->n_last > n_bytes - s->n_positions) return 0;
    s->last = s->positions + s->n_positions;
    if (s->form == DIFFERENCES ? !integers_valid(width, s) : s->n_last != s->n_items * width) return 0;
    return HEADER + s->n_positions + s->n_last;
}

int tagc_changes_body_valid(size_t width, const uint8_t *body, size_t n_bytes, size_t n, int *is_whole) {
    segment s;
    *is_whole = 1;
    for (size_t at = 0; at < n; at += SEGMENT) {
        size_t here = valid_segment(width, body, n_bytes, segment_elems(n, at), &s);
        if (here == 0) return 0;
        body += here;
        n_bytes -= here;
        *is_whole &= s.form == WHOLE;
    }
    return n_bytes == 0;
}

typedef struct decoder {
    const segment *s;
    tagc_integers_reader reader;
    size_t n_done; /* items */
} decoder;

/* Changes elements `items` (n_items) of values, or where items is NULL the first n_items. */
INLINE void change_as(size_t width, decoder *d, const uint32_t *items, size_t n_items, uint8_t *values) {
    for (size_t i = 0; i < n_items; i++) {
        uint8_t *at = values + (items ? items[i] : i) * width;
        uint32_t integer;
        tagc_integers_read(&d->reader, most_of(width), &integer);
        uint32_t after = moved(width, load(width, at), integer);
        memcpy(at, &after, width);
    }
}

static void change(size_t width, decoder *d, const uint32_t *items, size_t n_items, uint8_t *values) {
    if (d->s->form == VALUES)
        for (size_t i = 0; i < n_items; i++)
            memcpy(values + items[i] * width, d->s->last + (d->n_done + i) * width, width);
    else if (width == 1)
        change_as(1, d, items, n_items, values);
    else if (width == 2)
        change_as(2, d, items, n_items, values);
    else
        change_as(4, d, items, n_items, values);
    d->n_done += n_items;
}

static void decode_segment(size_t width, const segment *s, uint32_t *items, uint8_t *values) {
    decoder d = {.s = s, .reader = {.bytes = s->last, .n_bits = 8 * (uint64_t)s->n_last, .order = s->order}};
    tagc_gaps_cursor cursor;
    if (s->n_items == s->n && s->form != DIFFERENCES) {
        memcpy(values, s->last, s->n_last);
    } else if (s->n_items == s->n) {
        change(width, &d, NULL, s->n_items, values);
    } else if (s->n_items > 0) {
        tagc_gaps_seek(&s->gaps, s->positions, 0, &cursor);
        while (cursor.chunk < s->gaps.n_chunks) {
            uint8_t *chunk = values + cursor.chunk * s->gaps.chunk * width;
            size_t n_items = tagc_gaps_next(&s->gaps, s->positions, &cursor, items);
            change(width, &d, items, n_items, chunk);
        }
    }
}

size_t tagc_changes_decode_scratch_bytes(void) {
    return (TAGC_GAPS_MAX_CHUNK + TAGC_GAPS_SLACK) * sizeof(uint32_t);
}

void tagc_changes_body_decode(size_t width, const uint8_t *body, void *values, size_t n, void *scratch) {
    for (size_t at = 0; at < n; at += SEGMENT) {
        segment s;
        open_segment(body, segment_elems(n, at), &s);
        s.n_positions = has_positions(&s) ? tagc_gaps_bytes(&s.gaps, s.positions) : 0;
        s.last = s.positions + s.n_positions;
        decode_segment(width, &s, scratch, (uint8_t *)values + at * width);
        body = s.last + s.n_last;
    }
}
