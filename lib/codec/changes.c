/* Changes, see changes.h. */
#include "codec/changes.h"
#include "codec/bitmap.h"
#include "codec/code_kernels.h"
#include "codec/integers.h"
#include "core/memory.h"

#include <string.h>

enum { HEADER = 8, ROW = 12 /* of a class */, WHOLE = 0, CHANGES = 1 };
enum { SEGMENT = TAGC_CHANGES_SEGMENT, MAX = TAGC_CLASSES_MAX };

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

static uint32_t load32(const uint8_t *bytes) {
    return tagc_load16(bytes) | tagc_load16(bytes + 2) << 16;
}

static void store32(uint8_t *bytes, size_t value) {
    tagc_store16(bytes, (uint32_t)value);
    tagc_store16(bytes + 2, (uint32_t)(value >> 16));
}

tagc_changes_kernels tagc_changes_best(void) {
    return (tagc_changes_kernels){.differ = tagc_differ_kernels_all()[0],
                                  .classes = tagc_classes_kernels_all()[0]};
}

/* ---- a segment ---- */

typedef struct segment {
    size_t n, n_items; /* elements */
    int form;
    tagc_classes classes;
    tagc_class_items of[MAX];
    int order[MAX][2];      /* of gaps and of integers */
    size_t n_bytes[MAX];    /* of streams */
    const uint8_t *streams; /* where they lie */
} segment;

typedef struct room {
    uint32_t *gaps, *items, *integers; /* (most_items) each */
    uint8_t *bits;                     /* tagc_bitmap_bytes: what changed */
} room;

static void lay_out(size_t n, size_t most_items, tagc_arena *arena, room *r) {
    *r = (room){.gaps = tagc_arena_take(arena, most_items, sizeof(uint32_t)),
                .items = tagc_arena_take(arena, most_items, sizeof(uint32_t)),
                .integers = tagc_arena_take(arena, most_items, sizeof(uint32_t)),
                .bits = tagc_arena_take(arena, tagc_bitmap_bytes(n < SEGMENT ? n : SEGMENT), 1)};
}

size_t tagc_changes_scratch_bytes(size_t n, size_t most_items) {
    room r;
    tagc_arena arena = {0};
    lay_out(n, most_items, &arena, &r);
    return arena.n_bytes;
}

/* Gives each class its part of the room. */
static void share_out(segment *s, const room *r) {
    size_t at = 0;
    for (int c = 0; c < s->classes.n; c++) {
        s->of[c].gaps = r->gaps + at;
        s->of[c].items = r->items + at;
        at += s->of[c].n;
    }
}

/* ---- encode ---- */

INLINE void subtract_as(size_t width, const uint32_t *items, size_t n, const uint8_t *before,
                        const uint8_t *after, uint32_t *integers) {
    for (size_t i = 0; i < n; i++) {
        size_t at = items[i] * width;
        integers[i] = integer_of(width, load(width, before + at), load(width, after + at));
    }
}

static void subtract(size_t width, const uint32_t *items, size_t n, const uint8_t *before,
                     const uint8_t *after, uint32_t *integers) {
    if (width == 1)
        subtract_as(1, items, n, before, after, integers);
    else if (width == 2)
        subtract_as(2, items, n, before, after, integers);
    else
        subtract_as(4, items, n, before, after, integers);
}

static void write_header(size_t n_items, int form, int n_classes, uint8_t *to) {
    store32(to, n_items);
    to[4] = (uint8_t)form;
    to[5] = (uint8_t)n_classes;
    tagc_store16(to + 6, 0);
}

static size_t write_whole(size_t width, const uint8_t *after, size_t n, uint8_t *to) {
    memcpy(to + HEADER, after, n * width);
    write_header(n, WHOLE, 0, to);
    return HEADER + n * width;
}

static tagc_integers_pairs pairs_of(const segment *s, int c, const uint32_t *integers) {
    return (tagc_integers_pairs){
        .values = {s->of[c].gaps, integers}, .order = {s->order[c][0], s->order[c][1]}, .n = s->of[c].n};
}

static void write_row(const segment *s, int c, uint8_t *row) {
    row[0] = s->classes.first[c];
    row[1] = (uint8_t)s->order[c][0];
    row[2] = (uint8_t)s->order[c][1];
    row[3] = 0;
    store32(row + 4, s->of[c].n);
    store32(row + 8, s->n_bytes[c]);
}

/* The bits say what changed, and s->n_items how much. */
static size_t encode_segment(const tagc_changes_kernels *kernels, size_t width, const uint8_t *before,
                             const uint8_t *after, int by_magnitude, segment *s, const room *r, uint8_t *to) {
    size_t n_rows, n_streams = 0, at = 0;
    if (s->n_items == 0) {
        write_header(0, CHANGES, 0, to);
        return HEADER;
    }
    s->classes.n = 1;
    s->of[0].n = s->n_items;
    if (by_magnitude) tagc_classes_choose(width, before, r->bits, s->n, 8 * ROW, &s->classes, s->of);
    share_out(s, r);
    tagc_classes_split(kernels->classes, width, &s->classes, before, r->bits, s->n, s->of);
    for (int c = 0; c < s->classes.n; at += s->of[c++].n) {
        subtract(width, s->of[c].items, s->of[c].n, before, after, r->integers + at);
        s->order[c][0] = tagc_integers_order(s->of[c].gaps, s->of[c].n);
        s->order[c][1] = tagc_integers_order(r->integers + at, s->of[c].n);
        tagc_integers_pairs pairs = pairs_of(s, c, r->integers + at);
        s->n_bytes[c] = (size_t)tagc_integers_bytes(&pairs);
        n_streams += s->n_bytes[c];
    }
    n_rows = ROW * (size_t)s->classes.n;
    if (n_rows + n_streams >= s->n * width) return write_whole(width, after, s->n, to);
    write_header(s->n_items, CHANGES, s->classes.n, to);
    uint8_t *stream = to + HEADER + n_rows;
    at = 0;
    for (int c = 0; c < s->classes.n; at += s->of[c].n, stream += s->n_bytes[c++]) {
        tagc_integers_pairs pairs = pairs_of(s, c, r->integers + at);
        write_row(s, c, to + HEADER + ROW * (size_t)c);
        tagc_integers_write(&pairs, stream);
    }
    return HEADER + n_rows + n_streams;
}

size_t tagc_changes_body_encode(const tagc_changes_kernels *kernels, size_t width, const void *before,
                                const void *after, size_t n, int by_magnitude, uint8_t *body, void *scratch,
                                size_t most_items, uint64_t *n_changes) {
    room r;
    tagc_arena arena = {.base = scratch};
    size_t n_bytes = 0;
    lay_out(n, most_items, &arena, &r);
    *n_changes = before ? 0 : n;
    for (size_t at = 0; at < n; at += SEGMENT) {
        const uint8_t *a = (const uint8_t *)before + (before ? at * width : 0),
                      *b = (const uint8_t *)after + at * width;
        segment s = {.n = segment_elems(n, at)};
        if (!before) {
            n_bytes += write_whole(width, b, s.n, body + n_bytes);
            continue;
        }
        tagc_differ(kernels->differ, width, a, b, s.n, r.bits);
        s.n_items = tagc_bitmap_count(r.bits, s.n);
        if (s.n_items > most_items) return SIZE_MAX;
        n_bytes += encode_segment(kernels, width, a, b, by_magnitude, &s, &r, body + n_bytes);
        *n_changes += s.n_items;
    }
    return n_bytes;
}

/* ---- decode ---- */

/* Reads header and rows, of which there are n_bytes, or the caller knows that they are valid. Returns where the streams begin; 0 if that
 * cannot be. */
static size_t open_segment(const uint8_t *from, size_t n_bytes, size_t n, segment *s) {
    size_t n_items = 0;
    if (n_bytes < HEADER) return 0;
    *s = (segment){.n = n, .n_items = load32(from), .form = from[4], .classes.n = from[5]};
    if (s->n_items > n || s->form > CHANGES || tagc_load16(from + 6)) return 0;
    if (s->form == WHOLE || s->n_items == 0)
        return s->classes.n == 0 && (s->form == CHANGES || s->n_items == n) ? HEADER : 0;
    if (s->classes.n < 1 || s->classes.n > MAX || n_bytes - HEADER < ROW * (size_t)s->classes.n) return 0;
    from += HEADER;
    for (int c = 0; c < s->classes.n; c++, from += ROW) {
        s->classes.first[c] = from[0];
        for (int i = 0; i < 2; i++) s->order[c][i] = from[1 + i];
        s->of[c].n = load32(from + 4);
        s->n_bytes[c] = load32(from + 8);
        if (c ? from[0] <= s->classes.first[c - 1] : from[0] != 0) return 0;
        if (from[1] > TAGC_INTEGERS_MAX_ORDER || from[2] > TAGC_INTEGERS_MAX_ORDER || from[3]) return 0;
        if (s->of[c].n > s->n_items - n_items) return 0;
        n_items += s->of[c].n;
    }
    return n_items == s->n_items ? HEADER + ROW * (size_t)s->classes.n : 0;
}

/* The pairs of a class: as many as items, and nothing behind them. */
static int stream_valid(size_t width, const segment *s, int c, const uint8_t *stream) {
    tagc_integers_reader reader = {.bytes = stream, .n_bits = 8 * (uint64_t)s->n_bytes[c]};
    uint32_t gap, integer;
    for (size_t i = 0; i < s->of[c].n; i++)
        if (!tagc_integers_read(&reader, s->order[c][0], UINT32_MAX, &gap) ||
            !tagc_integers_read(&reader, s->order[c][1], most_of(width), &integer))
            return 0;
    return tagc_integers_ended(&reader);
}

/* Returns the bytes of the segment; 0 if it is damaged. */
static size_t valid_segment(size_t width, const uint8_t *from, size_t n_bytes, size_t n, segment *s) {
    size_t at = open_segment(from, n_bytes, n, s);
    if (at == 0) return 0;
    if (s->form == WHOLE) return s->n * width <= n_bytes - at ? at + s->n * width : 0;
    for (int c = 0; c < s->classes.n; at += s->n_bytes[c++])
        if (s->n_bytes[c] > n_bytes - at || !stream_valid(width, s, c, from + at)) return 0;
    return at;
}

int tagc_changes_body_valid(size_t width, const uint8_t *body, size_t n_bytes, size_t n, size_t *most_items,
                            tagc_changes_form *form) {
    segment s;
    *most_items = 0;
    *form = TAGC_CHANGES_WHOLE;
    for (size_t at = 0; at < n; at += SEGMENT) {
        size_t here = valid_segment(width, body, n_bytes, segment_elems(n, at), &s);
        if (here == 0) return 0;
        body += here;
        n_bytes -= here;
        if (s.form == CHANGES && *form != TAGC_CHANGES_BY_MAGNITUDE)
            *form = s.classes.n > 1 ? TAGC_CHANGES_BY_MAGNITUDE : TAGC_CHANGES_BY_PLACE;
        if (s.form == CHANGES && s.n_items > *most_items) *most_items = s.n_items;
    }
    return n_bytes == 0;
}

INLINE void change_as(size_t width, const uint32_t *items, const uint32_t *integers, size_t n,
                      uint8_t *values) {
    for (size_t i = 0; i < n; i++) {
        uint8_t *at = values + items[i] * width;
        uint32_t after = moved(width, load(width, at), integers[i]);
        memcpy(at, &after, width);
    }
}

static void change(size_t width, const uint32_t *items, const uint32_t *integers, size_t n, uint8_t *values) {
    if (width == 1)
        change_as(1, items, integers, n, values);
    else if (width == 2)
        change_as(2, items, integers, n, values);
    else
        change_as(4, items, integers, n, values);
}

/* Reads the pairs of all classes; returns the bytes of their streams. */
static size_t read_streams(size_t width, const segment *s, const uint8_t *from, uint32_t *integers) {
    size_t n_bytes = 0;
    for (int c = 0; c < s->classes.n; n_bytes += s->n_bytes[c], integers += s->of[c++].n) {
        tagc_integers_reader reader = {.bytes = from + n_bytes, .n_bits = 8 * (uint64_t)s->n_bytes[c]};
        for (size_t i = 0; i < s->of[c].n; i++) {
            tagc_integers_read(&reader, s->order[c][0], UINT32_MAX, s->of[c].gaps + i);
            tagc_integers_read(&reader, s->order[c][1], most_of(width), integers + i);
        }
    }
    return n_bytes;
}

int tagc_changes_body_decode(const tagc_changes_kernels *kernels, size_t width, const uint8_t *body,
                             void *values, size_t n, void *scratch, size_t most_items) {
    room r;
    tagc_arena arena = {.base = scratch};
    lay_out(0, most_items, &arena, &r);
    for (size_t at = 0; at < n; at += SEGMENT) {
        segment s;
        uint8_t *to = (uint8_t *)values + at * width;
        body += open_segment(body, SIZE_MAX, segment_elems(n, at), &s);
        if (s.form == WHOLE) {
            memcpy(to, body, s.n * width);
            body += s.n * width;
        } else if (s.n_items > 0) {
            share_out(&s, &r);
            body += read_streams(width, &s, body, r.integers);
            if (!tagc_classes_join(kernels->classes, width, &s.classes, to, s.n, s.of)) return 0;
            change(width, r.items, r.integers, s.n_items, to);
        }
    }
    return 1;
}
