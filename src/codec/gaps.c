/* Gaps with an escape, see gaps.h. A code may take more than one step for a gap, so that a decoder needs no branch. */
#include "codec/gaps.h"
#include "core/memory.h"

#include <string.h>

enum { HEADER = 8, ENTRY = 4, MIN_BITS = 2, MAX_BITS = 15, BITMAP = 0, MIN_CHUNK = 2048, ITEMS_WANTED = 640 };

static uint32_t load16(const uint8_t *bytes) {
    return bytes[0] | (uint32_t)bytes[1] << 8;
}

static uint32_t load32(const uint8_t *bytes) {
    return load16(bytes) | load16(bytes + 2) << 16;
}

static void store16(uint8_t *bytes, uint32_t value) {
    bytes[0] = (uint8_t)value;
    bytes[1] = (uint8_t)(value >> 8);
}

static size_t bitmap_bytes(size_t n) {
    return (n + 7) / 8;
}

static size_t chunk_elems(const tagc_gaps *gaps, size_t c) {
    size_t begin = c * gaps->chunk;
    return gaps->n - begin < gaps->chunk ? gaps->n - begin : gaps->chunk;
}

static size_t front_bytes(const tagc_gaps *gaps) {
    return HEADER + ENTRY * gaps->n_chunks;
}

void tagc_gaps_init(tagc_gaps *gaps, size_t n, size_t k) {
    *gaps = (tagc_gaps){.n = n, .k = k, .chunk = MIN_CHUNK};
    while (gaps->chunk < TAGC_GAPS_MAX_CHUNK && gaps->chunk * (uint64_t)k < ITEMS_WANTED * (uint64_t)n)
        gaps->chunk *= 2;
    gaps->n_chunks = (n + gaps->chunk - 1) / gaps->chunk;
}

/* No support of k items takes more in gaps of so many bits. */
static size_t worst_bytes(const tagc_gaps *gaps, int bits) {
    size_t n_codes = gaps->k + gaps->n / ((1u << bits) - 1);
    return (size_t)(((uint64_t)n_codes * (unsigned)bits + 7) / 8) + gaps->n_chunks;
}

static int safest_bits(const tagc_gaps *gaps) {
    int best = MIN_BITS;
    for (int bits = MIN_BITS + 1; bits <= MAX_BITS; bits++)
        if (worst_bytes(gaps, bits) < worst_bytes(gaps, best)) best = bits;
    return best;
}

static int prefer_bitmap(size_t n_bitmap_bytes, size_t n_gap_bytes) {
    return n_bitmap_bytes <= n_gap_bytes + n_gap_bytes / 8;
}

size_t tagc_gaps_max_bytes(const tagc_gaps *gaps) {
    size_t worst = worst_bytes(gaps, safest_bits(gaps)), bitmap = bitmap_bytes(gaps->n);
    return front_bytes(gaps) + (prefer_bitmap(bitmap, worst) ? bitmap : worst);
}

/* ---- encode ---- */

typedef struct encoder {
    const tagc_gaps *gaps;
    const uint32_t *indices; /* (n_items) */
    uint32_t *begin, *codes,
        *from; /* (n_chunks + 1) first item; (n_chunks) codes; (n_chunks) offset of bits */
    int bits;
    uint8_t *bytes;
} encoder;

static void lay_out(const tagc_gaps *gaps, tagc_arena *arena, encoder *e) {
    e->begin = tagc_arena_take(arena, gaps->n_chunks + 1, sizeof *e->begin);
    e->codes = tagc_arena_take(arena, gaps->n_chunks, sizeof *e->codes);
    e->from = tagc_arena_take(arena, gaps->n_chunks, sizeof *e->from);
}

size_t tagc_gaps_scratch_bytes(const tagc_gaps *gaps) {
    encoder e;
    tagc_arena arena = {0};
    lay_out(gaps, &arena, &e);
    return arena.n_bytes;
}

static size_t first_at_least(const uint32_t *indices, size_t low, size_t high, size_t value) {
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (indices[middle] < value)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static uint32_t count_codes(const encoder *e, size_t c, int bits) {
    uint32_t next = (uint32_t)(c * e->gaps->chunk), escape = (1u << bits) - 1, n = 0;
    for (uint32_t i = e->begin[c]; i < e->begin[c + 1]; i++) {
        n += 1 + (e->indices[i] - next) / escape;
        next = e->indices[i] + 1;
    }
    return n;
}

static size_t count_bytes(const encoder *e, int bits) {
    size_t n = 0;
    for (size_t c = 0; c < e->gaps->n_chunks; c++) n += (count_codes(e, c, bits) * (unsigned)bits + 7) / 8;
    return n;
}

static void choose_form(encoder *e) {
    size_t best = SIZE_MAX;
    for (int bits = MIN_BITS; bits <= MAX_BITS; bits++) {
        size_t n = count_bytes(e, bits);
        if (n < best) best = n, e->bits = bits;
    }
    if (prefer_bitmap(bitmap_bytes(e->gaps->n), best)) e->bits = BITMAP;
}

static void write_bitmap(const encoder *e, size_t c) {
    size_t begin = c * e->gaps->chunk;
    uint8_t *out = e->bytes + e->from[c];
    memset(out, 0, bitmap_bytes(chunk_elems(e->gaps, c)));
    for (uint32_t i = e->begin[c]; i < e->begin[c + 1]; i++) {
        size_t at = e->indices[i] - begin;
        out[at / 8] |= (uint8_t)(1u << at % 8);
    }
}

static void write_gaps(const encoder *e, size_t c) {
    uint32_t next = (uint32_t)(c * e->gaps->chunk), escape = (1u << e->bits) - 1;
    uint8_t *out = e->bytes + e->from[c];
    uint64_t acc = 0;
    int n_bits = 0;
    for (uint32_t i = e->begin[c]; i < e->begin[c + 1]; i++) {
        uint32_t gap = e->indices[i] - next;
        next = e->indices[i] + 1;
        for (;;) {
            acc |= (uint64_t)(gap < escape ? gap : escape) << n_bits;
            n_bits += e->bits;
            for (; n_bits >= 8; n_bits -= 8, acc >>= 8) *out++ = (uint8_t)acc;
            if (gap < escape) break;
            gap -= escape;
        }
    }
    if (n_bits > 0) *out = (uint8_t)acc;
}

size_t tagc_gaps_encode(const tagc_gaps *gaps, const uint32_t *indices, size_t n_items, uint8_t *bytes,
                        void *scratch, tagc_pool *pool) {
    (void)pool;
    encoder e = {.gaps = gaps, .indices = indices, .bytes = bytes};
    tagc_arena arena = {.base = scratch};
    lay_out(gaps, &arena, &e);
    for (size_t c = 0; c < gaps->n_chunks; c++)
        e.begin[c] = (uint32_t)first_at_least(indices, c ? e.begin[c - 1] : 0, n_items, c * gaps->chunk);
    e.begin[gaps->n_chunks] = (uint32_t)n_items;
    choose_form(&e);

    store16(bytes, (uint32_t)n_items);
    store16(bytes + 2, (uint32_t)n_items >> 16);
    store16(bytes + 4, (uint32_t)e.bits);
    store16(bytes + 6, 0);
    size_t at = front_bytes(gaps);
    for (size_t c = 0; c < gaps->n_chunks; c++) {
        e.codes[c] = e.bits == BITMAP ? 0 : count_codes(&e, c, e.bits);
        store16(bytes + HEADER + ENTRY * c, e.begin[c + 1] - e.begin[c]);
        store16(bytes + HEADER + ENTRY * c + 2, e.codes[c]);
        e.from[c] = (uint32_t)at;
        at += e.bits == BITMAP ? bitmap_bytes(chunk_elems(gaps, c)) : (e.codes[c] * (unsigned)e.bits + 7) / 8;
    }
    for (size_t c = 0; c < gaps->n_chunks; c++) e.bits == BITMAP ? write_bitmap(&e, c) : write_gaps(&e, c);
    return at;
}

/* ---- decode ---- */

size_t tagc_gaps_items(const uint8_t *bytes) {
    return load32(bytes);
}

static size_t chunk_bytes(const tagc_gaps *gaps, const uint8_t *bytes, size_t c) {
    unsigned bits = bytes[4];
    if (bits == BITMAP) return bitmap_bytes(chunk_elems(gaps, c));
    return (load16(bytes + HEADER + ENTRY * c + 2) * bits + 7) / 8;
}

void tagc_gaps_seek(const tagc_gaps *gaps, const uint8_t *bytes, size_t chunk, tagc_gaps_cursor *cursor) {
    *cursor = (tagc_gaps_cursor){.offset = front_bytes(gaps)};
    for (; cursor->chunk < chunk; cursor->chunk++) {
        cursor->item += load16(bytes + HEADER + ENTRY * cursor->chunk);
        cursor->offset += chunk_bytes(gaps, bytes, cursor->chunk);
    }
}

size_t tagc_gaps_bytes(const tagc_gaps *gaps, const uint8_t *bytes) {
    tagc_gaps_cursor cursor;
    tagc_gaps_seek(gaps, bytes, gaps->n_chunks, &cursor);
    return cursor.offset;
}

typedef struct reader {
    const uint8_t *bytes;
    uint64_t acc;
    int n_bits;
} reader;

static uint32_t read_code(reader *r, int bits) {
    for (; r->n_bits < bits; r->n_bits += 8) r->acc |= (uint64_t)*r->bytes++ << r->n_bits;
    uint32_t code = (uint32_t)r->acc & ((1u << bits) - 1);
    r->acc >>= bits;
    r->n_bits -= bits;
    return code;
}

size_t tagc_gaps_next(const tagc_gaps *gaps, const uint8_t *bytes, tagc_gaps_cursor *cursor,
                      uint32_t *positions) {
    const uint8_t *entry = bytes + HEADER + ENTRY * cursor->chunk, *from = bytes + cursor->offset;
    size_t n = 0, at = cursor->chunk * gaps->chunk;
    int bits = bytes[4];
    if (bits == BITMAP) {
        for (size_t i = 0, n_elems = chunk_elems(gaps, cursor->chunk); i < n_elems; i++)
            if (from[i / 8] >> i % 8 & 1) positions[n++] = (uint32_t)(at + i);
    } else {
        reader r = {.bytes = from};
        for (uint32_t n_codes = load16(entry + 2); n_codes > 0; n_codes--) {
            uint32_t code = read_code(&r, bits), escape = (1u << bits) - 1;
            at += code;
            if (code < escape) positions[n++] = (uint32_t)at++;
        }
    }
    cursor->item += n;
    cursor->offset += chunk_bytes(gaps, bytes, cursor->chunk);
    cursor->chunk++;
    return n;
}

/* Items of a chunk whose bits are there; SIZE_MAX when they leave the chunk. */
static size_t count_items(const tagc_gaps *gaps, const uint8_t *bytes, const tagc_gaps_cursor *cursor) {
    const uint8_t *from = bytes + cursor->offset;
    size_t n = 0, at = 0, n_elems = chunk_elems(gaps, cursor->chunk);
    int bits = bytes[4];
    if (bits == BITMAP) {
        for (size_t i = 0; i < bitmap_bytes(n_elems); i++) n += (size_t)__builtin_popcount(from[i]);
        return n_elems % 8 && from[n_elems / 8] >> n_elems % 8 ? SIZE_MAX : n;
    }
    reader r = {.bytes = from};
    for (uint32_t n_codes = load16(bytes + HEADER + ENTRY * cursor->chunk + 2); n_codes > 0; n_codes--) {
        uint32_t code = read_code(&r, bits), is_item = code < (1u << bits) - 1;
        at += code + is_item;
        n += is_item;
    }
    return at <= n_elems ? n : SIZE_MAX;
}

size_t tagc_gaps_validate(const tagc_gaps *gaps, const uint8_t *bytes, size_t n_bytes, size_t *n_items) {
    tagc_gaps_cursor cursor = {.offset = front_bytes(gaps)};
    if (n_bytes < cursor.offset) return 0;
    *n_items = load32(bytes);
    int bits = bytes[4];
    if (*n_items > gaps->k || bits > MAX_BITS || (bits != BITMAP && bits < MIN_BITS)) return 0;
    if (bytes[5] || bytes[6] || bytes[7]) return 0;
    for (; cursor.chunk < gaps->n_chunks; cursor.chunk++) {
        const uint8_t *entry = bytes + HEADER + ENTRY * cursor.chunk;
        size_t n_here = chunk_bytes(gaps, bytes, cursor.chunk);
        if (n_here > n_bytes - cursor.offset || (bits == BITMAP && load16(entry + 2))) return 0;
        if (count_items(gaps, bytes, &cursor) != load16(entry)) return 0;
        cursor.item += load16(entry);
        cursor.offset += n_here;
    }
    return cursor.item == *n_items ? cursor.offset : 0;
}
