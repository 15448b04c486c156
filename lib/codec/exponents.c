/* Exponents in few bits, see exponents.h. Plain loops over bytes, which every compiler vectorises, and eight codes in a
 * word: so all processor levels run the same code. */
#include "codec/exponents.h"

#include <string.h>

enum {
    CHUNK = TAGC_EXPONENTS_CHUNK,
    HEADER = 4,
    GROUP = 8,
    MOST_WIDTH = 4,
    AS_THEY_ARE = 8,
    WORD = 64,
    AT_ONCE = 4
};

#define INLINE static inline __attribute__((always_inline))
#define EACH(byte) (UINT64_C(0x0101010101010101) * (byte))

static size_t chunk_elems(size_t n, size_t at) {
    return n - at < CHUNK ? n - at : CHUNK;
}

static size_t n_groups_of(size_t n) {
    return (n + GROUP - 1) / GROUP;
}

size_t tagc_exponents_max_bytes(size_t n) {
    return n * sizeof(uint16_t) + HEADER * ((n + CHUNK - 1) / CHUNK);
}

/* ---- eight codes in a word ---- */

/* A mask of the lowest n_bits of each lane of `lane` bits. */
INLINE uint64_t lanes(unsigned lane, unsigned n_bits) {
    return (UINT64_MAX / (lane == 64 ? UINT64_MAX : (UINT64_C(1) << lane) - 1)) *
           ((UINT64_C(1) << n_bits) - 1);
}

/* Eight bytes below 2^w, and their 8 w bits side by side, each from the other: neighbours move together, then pairs,
 * then fours. */
INLINE uint64_t closed(unsigned w, uint64_t x) {
    x = (x | x >> (8 - w)) & lanes(16, 2 * w);
    x = (x | x >> (16 - 2 * w)) & lanes(32, 4 * w);
    return (x | x >> (32 - 4 * w)) & lanes(64, 8 * w);
}

INLINE uint64_t opened(unsigned w, uint64_t x) {
    x = (x | x << (32 - 4 * w)) & lanes(32, 4 * w);
    x = (x | x << (16 - 2 * w)) & lanes(16, 2 * w);
    return (x | x << (8 - w)) & lanes(8, w);
}

/* w bytes; a memcpy would take a detour by memory. */
INLINE uint64_t load(unsigned w, const uint8_t *from) {
    uint64_t bytes = 0;
    for (unsigned i = 0; i < w; i++) bytes |= (uint64_t)from[i] << 8 * i;
    return bytes;
}

INLINE void store(unsigned w, uint8_t *to, uint64_t bytes) {
    for (unsigned i = 0; i < w; i++) to[i] = (uint8_t)(bytes >> 8 * i);
}

/* A bit for each of eight bytes up to 2^w - 1: whether it is that. */
INLINE uint64_t escapes_in(unsigned w, uint64_t codes) {
    uint64_t others = (codes ^ EACH((1u << w) - 1)) + EACH(0x7f); /* the highest bit of each */
    return ((~others & EACH(0x80)) >> 7) * UINT64_C(0x0102040810204080) >> 56;
}

/* Where the escapes of a chunk are. */
typedef struct places {
    size_t n;
    uint16_t at[CHUNK + AT_ONCE];
} places;

/* Adds the bits of a word, `at` on. A word seldom has more than AT_ONCE, so a processor foresees the branch. */
INLINE void note(places *p, uint64_t bits, size_t at) {
    size_t n = (size_t)__builtin_popcountll(bits);
    uint16_t *to = p->at + p->n;
    p->n += n;
    for (size_t i = 0; i < AT_ONCE; i++, bits &= bits - 1)
        to[i] = (uint16_t)(at + (size_t)__builtin_ctzll(bits | UINT64_C(1) << 63));
    for (size_t i = AT_ONCE; i < n; i++, bits &= bits - 1)
        to[i] = (uint16_t)(at + (size_t)__builtin_ctzll(bits));
}

/* ---- encode ---- */

/* Of each exponent: how often it is there. Four tables, since neighbours in an array are often alike, and a processor
 * would wait for its own write. */
static void count(const uint8_t *exponents, size_t n, uint32_t counts[256]) {
    uint32_t four[4][256] = {{0}};
    size_t i = 0;
    for (; i + GROUP <= n; i += GROUP) {
        uint64_t eight;
        memcpy(&eight, exponents + i, sizeof eight);
        for (unsigned k = 0; k < GROUP; k++) four[k % 4][eight >> 8 * k & 255]++;
    }
    for (; i < n; i++) four[0][exponents[i]]++;
    for (size_t e = 0; e < 256; e++) counts[e] = four[0][e] + four[1][e] + four[2][e] + four[3][e];
}

typedef struct form {
    unsigned width, base;
    size_t n_bytes; /* behind signs and mantissas */
} form;

/* The form of the fewest bytes. */
static form choose(const uint8_t *exponents, size_t n) {
    uint32_t counts[256];
    unsigned low = 0, high = 255;
    form best = {.width = AS_THEY_ARE, .n_bytes = n};
    count(exponents, n, counts);
    while (counts[low] == 0) low++;
    while (counts[high] == 0) high--;
    if (low == high) return (form){.width = 0, .base = low};
    for (unsigned w = 1; w <= MOST_WIDTH; w++) {
        unsigned n_named = (1u << w) - 1;
        size_t n_inside = 0;
        for (unsigned e = low; e < low + n_named && e <= high; e++) n_inside += counts[e];
        for (unsigned base = low;; base++) { /* one window after the other */
            size_t n_bytes = w * n_groups_of(n) + n - n_inside;
            if (n_bytes < best.n_bytes) best = (form){.width = w, .base = base, .n_bytes = n_bytes};
            if (base + n_named > high) break;
            n_inside += counts[base + n_named];
            n_inside -= counts[base];
        }
    }
    return best;
}

/* codes: (8 n_groups). */
INLINE void pack_as(unsigned w, const uint8_t *codes, size_t n_groups, uint8_t *to, places *escapes) {
    uint64_t bits = 0;
    escapes->n = 0;
    for (size_t g = 0; g < n_groups; g++, to += w) {
        uint64_t eight;
        memcpy(&eight, codes + g * GROUP, sizeof eight);
        bits |= escapes_in(w, eight) << g * GROUP % WORD;
        store(w, to, closed(w, eight));
        if ((g + 1) * GROUP % WORD != 0 && g + 1 < n_groups) continue;
        note(escapes, bits, g * GROUP / WORD * WORD);
        bits = 0;
    }
}

static void pack(unsigned w, const uint8_t *codes, size_t n_groups, uint8_t *to, places *escapes) {
    switch (w) {
    case 1:
        pack_as(1, codes, n_groups, to, escapes);
        return;
    case 2:
        pack_as(2, codes, n_groups, to, escapes);
        return;
    case 3:
        pack_as(3, codes, n_groups, to, escapes);
        return;
    case 4:
        pack_as(4, codes, n_groups, to, escapes);
        return;
    default:
        escapes->n = 0;
    }
}

static size_t encode_chunk(const uint16_t *values, size_t n, uint8_t *to) {
    uint8_t exponents[CHUNK], codes[CHUNK] = {0}, *rest = to + HEADER + n;
    places escapes;
    for (size_t i = 0; i < n; i++) exponents[i] = (uint8_t)(values[i] >> 7);
    form chosen = choose(exponents, n);
    to[0] = (uint8_t)chosen.width;
    to[1] = (uint8_t)chosen.base;
    if (chosen.width == AS_THEY_ARE) {
        memset(to + 2, 0, sizeof(uint16_t));
        memcpy(to + HEADER, values, n * sizeof *values);
        return HEADER + n * sizeof *values;
    }
    uint8_t base = (uint8_t)chosen.base, escape = (uint8_t)((1u << chosen.width) - 1);
    for (size_t i = 0; i < n; i++) to[HEADER + i] = (uint8_t)((values[i] >> 8 & 0x80) | (values[i] & 0x7f));
    for (size_t i = 0; i < n; i++) {
        uint8_t code = (uint8_t)(exponents[i] - base);
        codes[i] = code < escape ? code : escape;
    }
    pack(chosen.width, codes, n_groups_of(n), rest, &escapes);
    rest += chosen.width * n_groups_of(n);
    for (size_t i = 0; i < escapes.n; i++) rest[i] = exponents[escapes.at[i]];
    uint16_t n_escapes = (uint16_t)escapes.n;
    memcpy(to + 2, &n_escapes, sizeof n_escapes);
    return (size_t)(rest - to) + escapes.n;
}

size_t tagc_exponents_encode(const uint16_t *values, size_t n, uint8_t *body) {
    size_t n_bytes = 0;
    for (size_t at = 0; at < n; at += CHUNK)
        n_bytes += encode_chunk(values + at, chunk_elems(n, at), body + n_bytes);
    return n_bytes;
}

/* ---- decode ---- */

/* codes: (8 n_groups). */
INLINE void unpack_as(unsigned w, const uint8_t *from, size_t n_groups, uint8_t *codes, places *escapes) {
    uint64_t bits = 0;
    escapes->n = 0;
    for (size_t g = 0; g < n_groups; g++, from += w) {
        uint64_t eight = opened(w, load(w, from));
        memcpy(codes + g * GROUP, &eight, sizeof eight);
        bits |= escapes_in(w, eight) << g * GROUP % WORD;
        if ((g + 1) * GROUP % WORD != 0 && g + 1 < n_groups) continue;
        note(escapes, bits, g * GROUP / WORD * WORD);
        bits = 0;
    }
}

static void unpack(unsigned w, const uint8_t *from, size_t n_groups, uint8_t *codes, places *escapes) {
    switch (w) {
    case 1:
        unpack_as(1, from, n_groups, codes, escapes);
        return;
    case 2:
        unpack_as(2, from, n_groups, codes, escapes);
        return;
    case 3:
        unpack_as(3, from, n_groups, codes, escapes);
        return;
    case 4:
        unpack_as(4, from, n_groups, codes, escapes);
        return;
    default:
        memset(codes, 0, n_groups * GROUP);
        escapes->n = 0;
    }
}

/* Returns the bytes of the chunk; 0 if it is damaged. */
static size_t decode_chunk(const uint8_t *from, size_t n_bytes, uint16_t *values, size_t n) {
    uint8_t codes[CHUNK];
    places escapes;
    if (n_bytes < HEADER) return 0;
    unsigned width = from[0];
    uint8_t base = from[1];
    uint16_t n_escapes;
    memcpy(&n_escapes, from + 2, sizeof n_escapes);
    size_t n_groups = n_groups_of(n);
    size_t n_here = HEADER + (width == AS_THEY_ARE ? n * sizeof *values : n + width * n_groups + n_escapes);
    if (n_bytes < n_here) return 0;
    if (width == AS_THEY_ARE) {
        memcpy(values, from + HEADER, n * sizeof *values);
        return base == 0 && n_escapes == 0 ? n_here : 0;
    }
    if (width > MOST_WIDTH) return 0;
    const uint8_t *rest = from + HEADER + n;
    unpack(width, rest, n_groups, codes, &escapes);
    if (escapes.n != n_escapes) return 0;
    rest += width * n_groups;
    for (size_t i = 0; i < n_escapes; i++) codes[escapes.at[i]] = (uint8_t)(rest[i] - base);
    for (size_t i = 0; i < n; i++) {
        uint32_t as_it_is = from[HEADER + i], exponent = (uint8_t)(codes[i] + base);
        values[i] = (uint16_t)((as_it_is & 0x80) << 8 | exponent << 7 | (as_it_is & 0x7f));
    }
    return n_here;
}

int tagc_exponents_decode(const uint8_t *body, size_t n_bytes, uint16_t *values, size_t n) {
    for (size_t at = 0; at < n; at += CHUNK) {
        size_t n_here = decode_chunk(body, n_bytes, values + at, chunk_elems(n, at));
        if (n_here == 0) return 0;
        body += n_here;
        n_bytes -= n_here;
    }
    return n_bytes == 0;
}
