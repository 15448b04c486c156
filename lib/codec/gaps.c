/* Gaps with an escape, see gaps.h. The encoder may use several codes for a gap, so that the decoder needs no branch. */
#include "codec/gaps.h"
#include "codec/bitmap.h"
#include "core/memory.h"

#include <string.h>

enum { HEADER = 8, ENTRY = 4, MIN_BITS = 2, MAX_BITS = 15, BITMAP = 0 };
enum { MIN_CHUNK = 2048, ITEMS_WANTED = 1280, WORTH_THREADS = 1 << 15 };

static uint32_t load32(const uint8_t *bytes) {
    return tagc_load16(bytes) | tagc_load16(bytes + 2) << 16;
}

static size_t bitmap_bytes(size_t n) {
    return (n + 7) / 8;
}

size_t tagc_gaps_chunk_elems(const tagc_gaps *gaps, size_t chunk) {
    size_t begin = chunk * gaps->chunk;
    return gaps->n - begin < gaps->chunk ? gaps->n - begin : gaps->chunk;
}

static size_t front_bytes(const tagc_gaps *gaps) {
    return HEADER + ENTRY * gaps->n_chunks;
}

void tagc_gaps_init(tagc_gaps *gaps, size_t n, size_t k) {
    *gaps = (tagc_gaps){.n = n, .k = k, .chunk = MIN_CHUNK, .kernels = tagc_code_best()};
    while (gaps->chunk < TAGC_GAPS_MAX_CHUNK && gaps->chunk * (uint64_t)k < ITEMS_WANTED * (uint64_t)n)
        gaps->chunk *= 2;
    gaps->n_chunks = (n + gaps->chunk - 1) / gaps->chunk;
}

/* The most bytes that any k items take in gaps of this width. */
static size_t worst_bytes(const tagc_gaps *gaps, int bits) {
    size_t n_codes = gaps->k + gaps->n / ((1u << bits) - 1);
    return (size_t)(((uint64_t)n_codes * (unsigned)bits + 7) / 8) + gaps->n_chunks;
}

int tagc_gaps_safest_bits(const tagc_gaps *gaps, size_t *n_bytes) {
    int best = MIN_BITS;
    for (int bits = MIN_BITS + 1; bits <= MAX_BITS; bits++)
        if (worst_bytes(gaps, bits) < worst_bytes(gaps, best)) best = bits;
    *n_bytes = worst_bytes(gaps, best);
    return best;
}

static int prefer_bitmap(size_t n_bitmap_bytes, size_t n_gap_bytes) {
    return n_bitmap_bytes <= n_gap_bytes + n_gap_bytes / 8;
}

size_t tagc_gaps_max_bytes(const tagc_gaps *gaps) {
    size_t worst, bitmap = bitmap_bytes(gaps->n);
    tagc_gaps_safest_bits(gaps, &worst);
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

static size_t code_bytes(size_t n_codes, int bits) {
    return (n_codes * (size_t)bits + 7) / 8;
}

static size_t count_codes(const encoder *e, size_t c, int bits) {
    return e->gaps->kernels->count_codes(e->indices + e->begin[c], e->begin[c + 1] - e->begin[c],
                                         (uint32_t)(c * e->gaps->chunk), bits);
}

static size_t sampled_bytes(const encoder *e, size_t stride, int bits) {
    size_t n = 0;
    for (size_t c = 0; c < e->gaps->n_chunks; c += stride) n += code_bytes(count_codes(e, c, bits), bits);
    return n;
}

/* The size falls to the best width and rises after it, except for negligible bumps. */
static int choose_bits(const encoder *e, size_t n_items) {
    size_t stride = 1 + e->gaps->n_chunks / 64, best, next;
    int bits = MIN_BITS, up;
    while (bits < MAX_BITS && (n_items << bits) < 3 * e->gaps->n)
        bits++; /* near the best of a random support */
    best = sampled_bytes(e, stride, bits);
    for (int step = 1; step >= -1; step -= 2)
        for (; (up = bits + step) >= MIN_BITS && up <= MAX_BITS; bits = up, best = next)
            if ((next = sampled_bytes(e, stride, up)) >= best) break;
    return bits;
}

/* Each thread takes a run of chunks. */
static void count_work(void *arg, int index, int n_threads) {
    encoder *e = arg;
    size_t n = e->gaps->n_chunks, end = n * ((size_t)index + 1) / (size_t)n_threads;
    for (size_t c = n * (size_t)index / (size_t)n_threads; c < end; c++)
        e->codes[c] = (uint32_t)count_codes(e, c, e->bits);
}

static size_t count_bytes(encoder *e, tagc_pool *pool) {
    size_t n = 0;
    tagc_pool_run(pool, count_work, e);
    for (size_t c = 0; c < e->gaps->n_chunks; c++) n += code_bytes(e->codes[c], e->bits);
    return n;
}

static void choose_form(encoder *e, size_t n_items, tagc_pool *pool) {
    size_t worst;
    int safest = tagc_gaps_safest_bits(e->gaps, &worst);
    e->bits = choose_bits(e, n_items);
    size_t n = count_bytes(e, pool);
    if (n > worst) { /* the sample misled */
        e->bits = safest;
        n = count_bytes(e, pool);
    }
    if (prefer_bitmap(bitmap_bytes(e->gaps->n), n)) e->bits = BITMAP;
}

static void write_bitmap(const encoder *e, size_t c) {
    size_t begin = c * e->gaps->chunk;
    uint8_t *out = e->bytes + e->from[c];
    memset(out, 0, bitmap_bytes(tagc_gaps_chunk_elems(e->gaps, c)));
    for (uint32_t i = e->begin[c]; i < e->begin[c + 1]; i++) {
        size_t at = e->indices[i] - begin;
        out[at / 8] |= (uint8_t)(1u << at % 8);
    }
}

static void write_work(void *arg, int index, int n_threads) {
    encoder *e = arg;
    size_t n = e->gaps->n_chunks, end = n * ((size_t)index + 1) / (size_t)n_threads;
    for (size_t c = n * (size_t)index / (size_t)n_threads; c < end; c++)
        if (e->bits == BITMAP)
            write_bitmap(e, c);
        else
            e->gaps->kernels->write_codes(e->indices + e->begin[c], e->begin[c + 1] - e->begin[c],
                                          (uint32_t)(c * e->gaps->chunk), e->bits, e->codes[c],
                                          e->bytes + e->from[c]);
}

size_t tagc_gaps_encode(const tagc_gaps *gaps, const uint32_t *indices, size_t n_items, uint8_t *bytes,
                        void *scratch, tagc_pool *pool) {
    encoder e = {.gaps = gaps, .indices = indices, .bytes = bytes};
    tagc_arena arena = {.base = scratch};
    lay_out(gaps, &arena, &e);
    if (n_items < WORTH_THREADS) pool = NULL;
    for (size_t c = 0; c < gaps->n_chunks; c++)
        e.begin[c] = (uint32_t)first_at_least(indices, c ? e.begin[c - 1] : 0, n_items, c * gaps->chunk);
    e.begin[gaps->n_chunks] = (uint32_t)n_items;
    choose_form(&e, n_items, pool);

    tagc_store16(bytes, (uint32_t)n_items);
    tagc_store16(bytes + 2, (uint32_t)(n_items >> 16));
    tagc_store16(bytes + 4, (uint32_t)e.bits);
    tagc_store16(bytes + 6, 0);
    size_t at = front_bytes(gaps);
    for (size_t c = 0; c < gaps->n_chunks; c++) {
        if (e.bits == BITMAP) e.codes[c] = 0;
        tagc_store16(bytes + HEADER + ENTRY * c, e.begin[c + 1] - e.begin[c]);
        tagc_store16(bytes + HEADER + ENTRY * c + 2, e.codes[c]);
        e.from[c] = (uint32_t)at;
        at +=
            e.bits == BITMAP ? bitmap_bytes(tagc_gaps_chunk_elems(gaps, c)) : code_bytes(e.codes[c], e.bits);
    }
    tagc_pool_run(pool, write_work, &e);
    return at;
}

/* ---- decode ---- */

size_t tagc_gaps_items(const uint8_t *bytes) {
    return load32(bytes);
}

/* Whole words, and the last one through a copy. */
static void read_bitmap(const uint8_t *bits, size_t n, uint32_t *positions) {
    uint8_t word[8] = {0};
    size_t n_whole = n / 64 * 64, n_first = tagc_bitmap_indices(bits, n_whole, positions);
    memcpy(word, bits + n_whole / 8, bitmap_bytes(n - n_whole));
    size_t n_last = tagc_bitmap_indices(word, n - n_whole, positions + n_first);
    for (size_t i = 0; i < n_last; i++) positions[n_first + i] += (uint32_t)n_whole;
}

static size_t chunk_bytes(const tagc_gaps *gaps, const uint8_t *bytes, size_t c) {
    unsigned bits = bytes[4];
    if (bits == BITMAP) return bitmap_bytes(tagc_gaps_chunk_elems(gaps, c));
    return code_bytes(tagc_load16(bytes + HEADER + ENTRY * c + 2), (int)bits);
}

void tagc_gaps_seek(const tagc_gaps *gaps, const uint8_t *bytes, size_t chunk, tagc_gaps_cursor *cursor) {
    *cursor = (tagc_gaps_cursor){.offset = front_bytes(gaps)};
    for (; cursor->chunk < chunk; cursor->chunk++) {
        cursor->item += tagc_load16(bytes + HEADER + ENTRY * cursor->chunk);
        cursor->offset += chunk_bytes(gaps, bytes, cursor->chunk);
    }
}

size_t tagc_gaps_bytes(const tagc_gaps *gaps, const uint8_t *bytes) {
    tagc_gaps_cursor cursor;
    tagc_gaps_seek(gaps, bytes, gaps->n_chunks, &cursor);
    return cursor.offset;
}

size_t tagc_gaps_next_items(const uint8_t *bytes, const tagc_gaps_cursor *cursor) {
    return tagc_load16(bytes + HEADER + ENTRY * cursor->chunk);
}

size_t tagc_gaps_next(const tagc_gaps *gaps, const uint8_t *bytes, tagc_gaps_cursor *cursor,
                      uint32_t *positions) {
    const uint8_t *entry = bytes + HEADER + ENTRY * cursor->chunk, *from = bytes + cursor->offset;
    size_t n_items = tagc_load16(entry), n_elems = tagc_gaps_chunk_elems(gaps, cursor->chunk);
    if (bytes[4] == BITMAP)
        read_bitmap(from, n_elems, positions);
    else
        gaps->kernels->read_codes(from, tagc_load16(entry + 2), bytes[4], positions);
    cursor->item += n_items;
    cursor->offset += chunk_bytes(gaps, bytes, cursor->chunk);
    cursor->chunk++;
    return n_items;
}

/* Items of a chunk whose bits are present; SIZE_MAX if they leave the chunk. */
static size_t count_items(const tagc_gaps *gaps, const uint8_t *bytes, const tagc_gaps_cursor *cursor) {
    const uint8_t *from = bytes + cursor->offset;
    size_t n = 0, end, n_elems = tagc_gaps_chunk_elems(gaps, cursor->chunk);
    if (bytes[4] == BITMAP) {
        for (size_t i = 0; i < bitmap_bytes(n_elems); i++) n += (size_t)__builtin_popcount(from[i]);
        return n_elems % 8 && from[n_elems / 8] >> n_elems % 8 ? SIZE_MAX : n;
    }
    n = gaps->kernels->check_codes(from, tagc_load16(bytes + HEADER + ENTRY * cursor->chunk + 2), bytes[4],
                                   &end);
    return end <= n_elems ? n : SIZE_MAX;
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
        if (n_here > n_bytes - cursor.offset || (bits == BITMAP && tagc_load16(entry + 2))) return 0;
        if (count_items(gaps, bytes, &cursor) != tagc_load16(entry)) return 0;
        cursor.item += tagc_load16(entry);
        cursor.offset += n_here;
    }
    return cursor.item == *n_items ? cursor.offset : 0;
}
