/* Exponential Golomb codes, see integers.h. */
#include "codec/integers.h"

#include <string.h>

enum { SAMPLE = 4096, WINDOW = 57 /* bits that a load of 8 bytes has in any case, from any bit on */ };

static unsigned log2_of(uint64_t q) {
    return 63u - (unsigned)__builtin_clzll(q);
}

static unsigned bits_of(int order, uint32_t value) {
    return 2 * log2_of((uint64_t)value + (UINT64_C(1) << order)) + 1 - (unsigned)order;
}

static uint64_t count_bits(int order, const uint32_t *values, size_t n, size_t stride) {
    uint64_t n_bits = 0;
    for (size_t i = 0; i < n; i += stride) n_bits += bits_of(order, values[i]);
    return n_bits;
}

/* The size falls to the best order and rises after it. */
int tagc_integers_order(const uint32_t *values, size_t n) {
    size_t stride = 1 + n / SAMPLE;
    uint64_t best = count_bits(0, values, n, stride), next;
    int order = 0;
    for (; order < TAGC_INTEGERS_MAX_ORDER; order++, best = next)
        if ((next = count_bits(order + 1, values, n, stride)) >= best) break;
    return order;
}

uint64_t tagc_integers_bytes(const tagc_integers_pairs *pairs) {
    uint64_t n_bits = 0;
    for (int i = 0; i < 2; i++) n_bits += count_bits(pairs->order[i], pairs->values[i], pairs->n, 1);
    return (n_bits + 7) / 8;
}

typedef struct writer {
    uint8_t *bytes;
    uint64_t bits; /* not written yet, fewer than 32 */
    unsigned n_bits;
} writer;

static inline void put(writer *w, uint32_t bits, unsigned n_bits) { /* 32 at most */
    w->bits |= (uint64_t)bits << w->n_bits;
    w->n_bits += n_bits;
    if (w->n_bits < 32) return;
    uint32_t word = (uint32_t)w->bits;
    memcpy(w->bytes, &word, sizeof word);
    w->bytes += sizeof word;
    w->bits >>= 32;
    w->n_bits -= 32;
}

static inline void put_code(writer *w, int order, uint32_t value) {
    uint64_t q = (uint64_t)value + (UINT64_C(1) << order);
    unsigned length = log2_of(q), n_zeros = length - (unsigned)order;
    uint64_t low = q & ((UINT64_C(1) << length) - 1);
    if (n_zeros + 1 + length <= 32) {
        put(w, (uint32_t)((low << 1 | 1) << n_zeros), n_zeros + 1 + length);
    } else {
        put(w, 0, n_zeros);
        put(w, 1, 1);
        put(w, (uint32_t)low, length);
    }
}

void tagc_integers_write(const tagc_integers_pairs *pairs, uint8_t *bytes) {
    writer w = {.bytes = bytes};
    for (size_t i = 0; i < pairs->n; i++) {
        put_code(&w, pairs->order[0], pairs->values[0][i]);
        put_code(&w, pairs->order[1], pairs->values[1][i]);
    }
    for (unsigned left = w.n_bits; left > 0; left = left > 8 ? left - 8 : 0, w.bits >>= 8)
        *w.bytes++ = (uint8_t)w.bits;
}

/* The bits from `at` on, WINDOW of them or more; zeros past the end. */
static inline uint64_t window_at(const tagc_integers_reader *r, uint64_t at) {
    uint64_t word = 0, n_left = r->n_bits / 8 - at / 8;
    if (n_left >= sizeof word)
        memcpy(&word, r->bytes + at / 8, sizeof word);
    else
        memcpy(&word, r->bytes + at / 8, (size_t)n_left);
    return word >> at % 8;
}

int tagc_integers_read(tagc_integers_reader *r, int order, uint32_t most, uint32_t *value) {
    if (r->at >= r->n_bits) return 0;
    uint64_t window = window_at(r, r->at);
    unsigned n_zeros = window ? (unsigned)__builtin_ctzll(window) : 64, length = n_zeros + (unsigned)order;
    if (length > 32 || r->n_bits - r->at < n_zeros + 1 + length) return 0;
    uint64_t low =
        n_zeros + 1 + length <= WINDOW ? window >> n_zeros >> 1 : window_at(r, r->at + n_zeros + 1);
    uint64_t one = UINT64_C(1) << length, q = one | (low & (one - 1)), wide = q - (UINT64_C(1) << order);
    r->at += n_zeros + 1 + length;
    *value = (uint32_t)wide;
    return wide <= most;
}

int tagc_integers_ended(const tagc_integers_reader *r) {
    return r->n_bits - r->at < 8 && (r->at == r->n_bits || window_at(r, r->at) == 0);
}
