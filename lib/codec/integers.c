/* Codes of integers, see integers.h. */
#include "codec/integers.h"

#include <string.h>

enum { SAMPLE = 4096, WINDOW = 57 /* bits that a load of 8 bytes has in any case, from any bit on */ };

static unsigned log2_of(uint64_t q) {
    return 63u - (unsigned)__builtin_clzll(q);
}

static inline unsigned k_of(int code) {
    return (unsigned)code % TAGC_INTEGERS_RICE;
}

static inline uint64_t bits_of(int code, uint32_t value) {
    unsigned k = k_of(code);
    if (code >= TAGC_INTEGERS_FIXED) return (unsigned)code - TAGC_INTEGERS_FIXED;
    if (code >= TAGC_INTEGERS_RICE) return (value >> k) + 1 + k;
    return 2 * log2_of((uint64_t)value + (UINT64_C(1) << k)) + 1 - k;
}

static uint64_t count_bits(int code, const uint32_t *values, size_t n, size_t stride) {
    uint64_t n_bits = 0;
    for (size_t i = 0; i < n; i += stride) n_bits += bits_of(code, values[i]);
    return n_bits;
}

/* Of a family the size falls to the best code and rises after it. */
static int best_of(int code, const uint32_t *values, size_t n, size_t stride, uint64_t *n_bits) {
    uint64_t next;
    *n_bits = count_bits(code, values, n, stride);
    for (; k_of(code) < TAGC_INTEGERS_MAX_ORDER; code++, *n_bits = next)
        if ((next = count_bits(code + 1, values, n, stride)) >= *n_bits) break;
    return code;
}

int tagc_integers_code(const uint32_t *values, size_t n) {
    size_t stride = 1 + n / SAMPLE;
    uint64_t of_golomb, of_rice, sum = 0;
    uint32_t any = 0;
    for (size_t i = 0; i < n; i++) any |= values[i], sum += values[i];
    int golomb = best_of(0, values, n, stride, &of_golomb),
        rice = best_of(TAGC_INTEGERS_RICE, values, n, stride, &of_rice),
        fixed = TAGC_INTEGERS_FIXED + (any ? 1 + (int)log2_of(any) : 0);
    /* a value that the sample lacks may have billions of zeros */
    int code = of_rice < of_golomb && sum >> k_of(rice) <= 4 * (uint64_t)n ? rice : golomb;
    return count_bits(fixed, values, n, stride) <= (code == rice ? of_rice : of_golomb) ? fixed : code;
}

uint64_t tagc_integers_bytes(const tagc_integers_pairs *pairs) {
    uint64_t n_bits = 0;
    for (int i = 0; i < 2; i++) n_bits += count_bits(pairs->code[i], pairs->values[i], pairs->n, 1);
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

static inline void put_code(writer *w, int code, uint32_t value) {
    uint64_t q = (uint64_t)value + (UINT64_C(1) << k_of(code));
    unsigned length = k_of(code), n_zeros;
    if (code >= TAGC_INTEGERS_FIXED) {
        put(w, value, (unsigned)code - TAGC_INTEGERS_FIXED);
        return;
    }
    if (code >= TAGC_INTEGERS_RICE) {
        for (n_zeros = value >> length; n_zeros > 31; n_zeros -= 32) put(w, 0, 32);
    } else {
        length = log2_of(q);
        n_zeros = length - k_of(code);
    }
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
        put_code(&w, pairs->code[0], pairs->values[0][i]);
        put_code(&w, pairs->code[1], pairs->values[1][i]);
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

/* Goes past zeros, and past the one behind them; returns how many, or `most` + 1 if there are more, or the stream ends. */
static inline uint64_t read_zeros(tagc_integers_reader *r, uint64_t most) {
    for (uint64_t n_zeros = 0; n_zeros <= most && r->at < r->n_bits; r->at += WINDOW - 1) {
        uint64_t window = window_at(r, r->at);
        unsigned n = window ? (unsigned)__builtin_ctzll(window) : 64;
        if (n < WINDOW) {
            r->at += n + 1;
            return n_zeros + n;
        }
        n_zeros += WINDOW - 1;
    }
    return most + 1;
}

int tagc_integers_read(tagc_integers_reader *r, int code, uint32_t most, uint32_t *value) {
    uint64_t length = (unsigned)code - TAGC_INTEGERS_FIXED, high = 0;
    if (code < TAGC_INTEGERS_FIXED) {
        uint64_t n_most = code < TAGC_INTEGERS_RICE ? 32 - k_of(code) : most >> k_of(code),
                 n_zeros = read_zeros(r, n_most);
        if (n_zeros > n_most) return 0;
        length = k_of(code) + (code < TAGC_INTEGERS_RICE ? n_zeros : 0);
        high = code < TAGC_INTEGERS_RICE ? (UINT64_C(1) << length) - (UINT64_C(1) << k_of(code))
                                         : n_zeros << length;
    }
    if (r->at > r->n_bits || r->n_bits - r->at < length) return 0;
    uint64_t wide = high + (length ? window_at(r, r->at) & ((UINT64_C(1) << length) - 1) : 0);
    r->at += length;
    *value = (uint32_t)wide;
    return wide <= most;
}

int tagc_integers_ended(const tagc_integers_reader *r) {
    return r->n_bits - r->at < 8 && (r->at == r->n_bits || window_at(r, r->at) == 0);
}
