/* Changes, see changes.h. */
#include "codec/changes.h"
#include "codec/bitmap.h"
#include "codec/code_kernels.h"
#include "codec/integers.h"
#include "core/memory.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { HEADER = 8, ROW = 12 /* of a list */, WHOLE = 0, CHANGES = 1 };
enum { SEGMENT = TAGC_CHANGES_SEGMENT, LISTS = TAGC_CLASS_LISTS_MAX };
enum { SIZES = 32, ALONE = LISTS / TAGC_CLASSES_MAX - 1 /* sizes with a list of their own, at most */ };

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

/* The size of a difference is the logarithm of its magnitude: 0 for one by 1, 1 for 2 and 3, and so on. */
INLINE int size_of(uint32_t integer) {
    return 31 - __builtin_clz(integer / 2 + 1);
}

INLINE uint32_t least_of(int size) { /* integer of that size */
    return (UINT32_C(2) << size) - 2;
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

/* Items are in lists: by class, and in a class by size, from that of the list up to the next. */
typedef struct segment {
    size_t n, n_items; /* elements */
    int form, n_lists;
    tagc_classes classes;
    tagc_class_items of[LISTS];
    int size[LISTS], code[LISTS][2]; /* the least; of gaps and of integers */
    size_t n_bytes[LISTS];           /* of streams */
} segment;

typedef struct room {
    uint32_t *items, *integers; /* (most_items) each */
    uint32_t *gaps, *sorted;    /* as long, to encode */
    uint8_t *bits;              /* tagc_bitmap_bytes: what changed */
} room;

static void lay_out(size_t n, size_t most_items, tagc_arena *arena, room *r) {
    size_t n_more = n > 0 ? most_items : 0;
    *r = (room){.items = tagc_arena_take(arena, most_items, sizeof(uint32_t)),
                .integers = tagc_arena_take(arena, most_items, sizeof(uint32_t)),
                .gaps = tagc_arena_take(arena, n_more, sizeof(uint32_t)),
                .sorted = tagc_arena_take(arena, n_more, sizeof(uint32_t)),
                .bits = tagc_arena_take(arena, tagc_bitmap_bytes(n < SEGMENT ? n : SEGMENT), 1)};
}

size_t tagc_changes_scratch_bytes(size_t n, size_t most_items) {
    room r;
    tagc_arena arena = {0};
    lay_out(n, most_items, &arena, &r);
    return arena.n_bytes;
}

/* Gives each list its part of two arrays. */
static void share_out(tagc_class_items *of, int n_lists, uint32_t *gaps, uint32_t *items) {
    for (int i = 0; i < n_lists; gaps += of[i].n, items += of[i].n, i++)
        of[i].gaps = gaps, of[i].items = items;
}

/* ---- encode ---- */

INLINE void subtract_as(size_t width, const uint32_t *items, size_t n, const uint8_t *before,
                        const uint8_t *after, uint32_t *integers) {
    for (size_t i = 0; i < n; i++) {
        size_t at = items[i] * width;
        integers[i] = integer_of(width, load(width, before + at), load(width, after + at));
    }
}

/* Bits of one list of all sizes from `first` on: its places, and of each integer as many as its size has, one, and one for each size
 * between it and the one in the middle. */
static double bits_from(int first, const uint32_t *count, double n_elems) {
    double n_items = 0, least = HUGE_VAL;
    for (int size = first; size < SIZES; size++) n_items += count[size];
    for (int middle = first; middle < SIZES; middle++) {
        double bits = n_items > count[middle] ? n_items : 0;
        for (int size = first; size < SIZES && count[middle]; size++)
            bits += count[size] * (double)(size + 1 + abs(size - middle));
        if (count[middle] && bits < least) least = bits;
    }
    if (n_items == 0) return 0;
    /* a gap takes a bit or more, unless all elements are items */
    double places = 2 * n_items < n_elems ? tagc_places_bits(n_elems, n_items) : n_elems;
    return 8 * ROW + least + (n_items < n_elems ? places : 0);
}

/* How many sizes are to have lists of their own, so that the positions in them say the size, too. */
static int choose_alone(const uint32_t *count, double n_elems) {
    double of_lists = 0, best = HUGE_VAL;
    int n_alone = 0;
    for (int n = 0; n <= ALONE; n++) {
        uint32_t only[SIZES] = {0};
        double bits = of_lists + bits_from(n, count, n_elems);
        if (bits < best) best = bits, n_alone = n;
        only[n] = count[n];
        of_lists += bits_from(n, only, n_elems);
    }
    return n_alone;
}

/* Makes lists of the items of class c: gaps and integers of each, one behind the other. */
static void sort(segment *s, int c, const tagc_class_items *of, const uint32_t *integers, uint32_t *gaps,
                 uint32_t *sorted) {
    uint32_t count[SIZES] = {0}, next[LISTS], last[LISTS] = {0}, number = 0;
    int list_of[SIZES], from = s->n_lists;
    for (size_t i = 0; i < of->n; i++) {
        count[size_of(integers[i])]++;
        number += of->gaps[i] + 1;
    }
    int n_alone = choose_alone(count, number);
    for (int size = 0, at = 0, is_open = 0; size < SIZES; size++) {
        if ((count[size] && !is_open) || (of->n == 0 && size == 0)) {
            next[s->n_lists] = (uint32_t)at, s->size[s->n_lists] = size;
            s->of[s->n_lists++] = (tagc_class_items){.c = c};
            is_open = size >= n_alone;
        }
        list_of[size] = s->n_lists - 1;
        if (count[size]) s->of[s->n_lists - 1].n += count[size];
        at += (int)count[size];
    }
    share_out(s->of + from, s->n_lists - from, gaps, gaps);
    number = 0;
    for (size_t i = 0; i < of->n; i++, number++) {
        int list = list_of[size_of(integers[i])];
        number += of->gaps[i];
        gaps[next[list]] = number - last[list];
        sorted[next[list]++] = integers[i] - least_of(s->size[list]);
        last[list] = number + 1;
    }
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

static tagc_integers_pairs pairs_of(const segment *s, int i, const uint32_t *integers) {
    return (tagc_integers_pairs){
        .values = {s->of[i].gaps, integers}, .code = {s->code[i][0], s->code[i][1]}, .n = s->of[i].n};
}

static void write_row(const segment *s, int i, uint8_t *row) {
    row[0] = s->classes.first[s->of[i].c];
    row[1] = (uint8_t)s->code[i][0];
    row[2] = (uint8_t)s->code[i][1];
    row[3] = (uint8_t)s->size[i];
    store32(row + 4, s->of[i].n);
    store32(row + 8, s->n_bytes[i]);
}

/* The bits say what changed, and s->n_items how much. */
static size_t encode_segment(const tagc_changes_kernels *kernels, size_t width, const uint8_t *before,
                             const uint8_t *after, int by_magnitude, segment *s, const room *r, uint8_t *to) {
    tagc_class_items of[TAGC_CLASSES_MAX] = {{.n = s->n_items}};
    size_t n_rows, n_streams = 0, at = 0;
    if (s->n_items == 0) {
        write_header(0, CHANGES, 0, to);
        return HEADER;
    }
    s->classes.n = 1;
    if (by_magnitude) tagc_classes_choose(width, before, r->bits, s->n, 8 * ROW, &s->classes, of);
    share_out(of, s->classes.n, r->gaps, r->items);
    tagc_classes_split(kernels->classes, width, &s->classes, before, r->bits, s->n, of);
    for (int c = 0; c < s->classes.n; at += of[c++].n) { /* what is sorted takes the place of the items */
        TAGC_BY_WIDTH(width, subtract_as, of[c].items, of[c].n, before, after, r->integers + at);
        sort(s, c, of + c, r->integers + at, r->items + at, r->sorted + at);
    }
    const uint32_t *integers = r->sorted;
    for (int i = 0; i < s->n_lists; integers += s->of[i++].n) {
        s->code[i][0] = tagc_integers_code(s->of[i].gaps, s->of[i].n);
        s->code[i][1] = tagc_integers_code(integers, s->of[i].n);
        tagc_integers_pairs pairs = pairs_of(s, i, integers);
        s->n_bytes[i] = (size_t)tagc_integers_bytes(&pairs);
        n_streams += s->n_bytes[i];
    }
    n_rows = ROW * (size_t)s->n_lists;
    if (n_rows + n_streams >= s->n * width) return write_whole(width, after, s->n, to);
    write_header(s->n_items, CHANGES, s->n_lists, to);
    uint8_t *stream = to + HEADER + n_rows;
    integers = r->sorted;
    for (int i = 0; i < s->n_lists; integers += s->of[i].n, stream += s->n_bytes[i++]) {
        tagc_integers_pairs pairs = pairs_of(s, i, integers);
        write_row(s, i, to + HEADER + ROW * (size_t)i);
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
static size_t open_segment(const uint8_t *from, size_t n_bytes, size_t width, size_t n, segment *s) {
    size_t n_items = 0;
    if (n_bytes < HEADER) return 0;
    *s = (segment){.n = n, .n_items = load32(from), .form = from[4], .n_lists = from[5]};
    if (s->n_items > n || s->form > CHANGES || tagc_load16(from + 6)) return 0;
    if (s->form == WHOLE || s->n_items == 0)
        return s->n_lists == 0 && (s->form == CHANGES || s->n_items == n) ? HEADER : 0;
    if (s->n_lists < 1 || s->n_lists > LISTS || n_bytes - HEADER < ROW * (size_t)s->n_lists) return 0;
    from += HEADER;
    for (int i = 0; i < s->n_lists; i++, from += ROW) {
        int above = i > 0 && from[0] == s->classes.first[s->classes.n - 1] ? s->size[i - 1] : -1;
        if (i ? from[0] < s->classes.first[s->classes.n - 1] : from[0] != 0) return 0;
        if (above < 0 && s->classes.n == TAGC_CLASSES_MAX) return 0;
        if (from[3] <= above || from[3] >= 8 * width) return 0;
        if (above < 0) s->classes.first[s->classes.n++] = from[0];
        s->of[i] = (tagc_class_items){.c = s->classes.n - 1, .n = load32(from + 4)};
        s->size[i] = from[3];
        for (int kind = 0; kind < 2; kind++) s->code[i][kind] = from[1 + kind];
        s->n_bytes[i] = load32(from + 8);
        if (!tagc_integers_is_code(from[1]) || !tagc_integers_is_code(from[2])) return 0;
        if (s->of[i].n > s->n_items - n_items) return 0;
        n_items += s->of[i].n;
    }
    return n_items == s->n_items ? HEADER + ROW * (size_t)s->n_lists : 0;
}

/* The pairs of a list: as many as items, which the segment has room for, and nothing behind them. */
static int stream_valid(size_t width, const segment *s, int list, const uint8_t *stream) {
    tagc_integers_reader reader = {.bytes = stream, .n_bits = 8 * (uint64_t)s->n_bytes[list]};
    uint32_t gap, integer, least = least_of(s->size[list]);
    size_t n_left = s->n;
    for (size_t i = 0; i < s->of[list].n; i++, n_left -= gap + (size_t)1)
        if (n_left == 0 || !tagc_integers_read(&reader, s->code[list][0], (uint32_t)(n_left - 1), &gap) ||
            !tagc_integers_read(&reader, s->code[list][1], most_of(width) - least, &integer))
            return 0;
    return tagc_integers_ended(&reader);
}

/* Returns the bytes of the segment; 0 if it is damaged. */
static size_t valid_segment(size_t width, const uint8_t *from, size_t n_bytes, size_t n, segment *s) {
    size_t at = open_segment(from, n_bytes, width, n, s);
    if (at == 0) return 0;
    if (s->form == WHOLE) return s->n * width <= n_bytes - at ? at + s->n * width : 0;
    for (int i = 0; i < s->n_lists; at += s->n_bytes[i++])
        if (s->n_bytes[i] > n_bytes - at || !stream_valid(width, s, i, from + at)) return 0;
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

/* Reads the pairs of all lists; returns the bytes of their streams. */
static size_t read_streams(size_t width, const segment *s, const uint8_t *from, uint32_t *integers) {
    size_t n_bytes = 0;
    for (int list = 0; list < s->n_lists; n_bytes += s->n_bytes[list++]) {
        tagc_integers_reader reader = {.bytes = from + n_bytes, .n_bits = 8 * (uint64_t)s->n_bytes[list]};
        for (size_t i = 0; i < s->of[list].n; i++, integers++) {
            tagc_integers_read(&reader, s->code[list][0], UINT32_MAX, s->of[list].gaps + i);
            tagc_integers_read(&reader, s->code[list][1], most_of(width), integers);
            *integers += least_of(s->size[list]);
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
        body += open_segment(body, SIZE_MAX, width, segment_elems(n, at), &s);
        if (s.form == WHOLE) {
            memcpy(to, body, s.n * width);
            body += s.n * width;
        } else if (s.n_items > 0) {
            share_out(s.of, s.n_lists, r.items, r.items);
            body += read_streams(width, &s, body, r.integers);
            if (!tagc_classes_join(kernels->classes, width, &s.classes, to, s.n, s.of, s.n_lists)) return 0;
            TAGC_BY_WIDTH(width, change_as, r.items, r.integers, s.n_items, to);
        }
    }
    return 1;
}
