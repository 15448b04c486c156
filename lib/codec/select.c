/* Exact top-k in one sweep over memory. A sample of lines predicts two bounds around the k-th largest |acc|:
 *
 *        0 ........ t_lo ....(k-th is here)....  t_hi ........ Inf
 *        residual       band                         sent
 *
 * The sweep writes the residual and collects everything from t_lo up as candidates. The exact threshold is then found
 * in the band alone. A last sweep over the candidates keeps k of them and puts the others back. If the sample was
 * misleading, the candidates are put back first, so that the residual holds acc, and histograms of it give the threshold. An
 * array too small to sample is one band.
 *
 * Threads take blocks one by one instead of one long slice each, because large elements cluster. A thread whose room for
 * candidates is full takes no more blocks and leaves them to the others, so only the sum of the rooms must be enough. Each
 * block knows where its output begins, so the result does not depend on the threads. */
#include "codec/residual.h"
#include "codec/select_kernels.h"
#include "codec/select_sample.h"
#include "core/memory.h"

#include <stdatomic.h>
#include <string.h>

#define APART 48    /* elements: arrays that are multiples of 4096 bytes apart delay each other's loads */
#define PIECE 512   /* elements that are converted to fp32 together */
#define BLOCK 16384 /* elements; few enough that a block's candidates are still in cache after its sweep */
#define WORTH_THREADS 4 /* blocks; fewer are not worth waking anybody */
/* Up to this many elements a band's range is bisected; digits of larger bands are counted. */
#define SMALL_BAND 1024
#define RADIX_BITS 11
#define N_RADIX (1u << RADIX_BITS)
#define INF_BITS 0x7f800000u

/* What a selection holds between its sweeps. */

typedef struct tagc_select_block {
    uint32_t owner;                         /* the thread that streamed it */
    uint32_t candidate_begin, n_candidates; /* in the lists of its owner */
    uint32_t band_begin, n_band;
    uint32_t n_sent, n_ties; /* certainly above the threshold, and equal to it */
    uint32_t out_begin;      /* in the caller's indices and values */
} tagc_select_block;

typedef struct tagc_select_share { /* of one thread */
    uint32_t *candidate_indices;   /* (n_room) */
    float *candidate_values;       /* (n_room) */
    float *band;                   /* (n_room) */
    uint32_t *radix;               /* (N_RADIX) */
    size_t n_candidates, n_band;
    uint32_t max_bits;
    char padding[TAGC_ALIGNMENT];
} tagc_select_share;

typedef struct tagc_selector {
    const tagc_select_kernels *kernels;
    tagc_addends addends;
    const float *gradient, *residual_in; /* (n), or NULL: in other formats, read from the addends */
    float *residual_out;                 /* (n), or NULL: acc is not written */
    void *stored_out; /* a row that gets what is not a candidate, and the rest when it is settled; or NULL */
    uint32_t seed;    /* of stored_out */
    tagc_pool *pool;
    struct tagc_selector *self; /* in the scratch, where it waits to be settled */
    size_t n_sent;
    int is_written;    /* stored_out has what is not a candidate, and each share has the candidates */
    uint32_t *indices; /* (k) */
    float *values;     /* (k) */
    size_t n, k, n_blocks;
    int beyond_cache; /* the residual will have left the cache before it is read again */
    int bypass;       /* and not in place: the sweep writes around the cache */
    int leave;        /* acc stays in the residual everywhere */

    tagc_sample_shape shape;
    uint32_t *sample, *buckets; /* of the prediction */
    tagc_select_block *blocks;  /* (n_blocks) */
    tagc_select_share *shares;  /* (n_threads) */
    size_t most_in_block;       /* elements */
    size_t n_room;              /* candidates of one thread; 0 where none can be sent, or all are */
    atomic_size_t next_block;

    uint32_t t_lo, t_hi; /* predicted */
    int from_acc;        /* the band could not be used: search acc */
    uint32_t base, prefix, threshold;
    int shift, shift_prefix; /* of the present radix level */
    uint32_t n_digits;
} tagc_selector;

size_t tagc_select_count(size_t n, double sparsity) {
    if (n == 0 || !(sparsity > 0)) return n;
    size_t n_zero = sparsity < 1 ? (size_t)(sparsity * (double)n) : n;
    /* as fractions, so that 0.9 of 10 is 9 in spite of the rounding of 0.9 */
    while (n_zero > 0 && (double)(n_zero - 1) / (double)n >= sparsity) n_zero--;
    while (n_zero < n && (double)n_zero / (double)n < sparsity) n_zero++;
    return n_zero < n || sparsity >= 1 ? n - n_zero : 1;
}

static size_t size_min(size_t a, size_t b) {
    return a < b ? a : b;
}

/* A thread's part of the room for all candidates goes on by a block, the one that finds it too small. */
static void lay_out(tagc_selector *s, tagc_arena *arena, int n_threads) {
    size_t n = s->n;
    s->self = tagc_arena_take(arena, 1, sizeof *s);
    s->shape = tagc_sample_shape_of(n, s->k);
    s->n_blocks = (n + BLOCK - 1) / BLOCK;
    s->most_in_block = size_min(n, BLOCK);
    size_t n_shares = s->n_blocks < WORTH_THREADS ? 1 : (size_t)n_threads;
    size_t n_fair = (s->n_blocks + n_shares - 1) / n_shares * BLOCK;
    s->n_room = 0;
    if (s->k > 0 && s->k < n) {
        double n_candidates = tagc_sample_candidates(&s->shape, n) / (double)n_shares;
        s->n_room = size_min((size_t)n_candidates, n_fair) + s->most_in_block + TAGC_SELECT_SLACK;
    }
    s->blocks = tagc_arena_take(arena, s->n_blocks, sizeof *s->blocks);
    s->sample = tagc_arena_take(arena, tagc_sample_elems(&s->shape), sizeof *s->sample);
    s->buckets = tagc_arena_take(arena, tagc_sample_buckets(&s->shape), sizeof *s->buckets);
    s->shares = tagc_arena_take(arena, n_shares, sizeof *s->shares);
    for (size_t t = 0; t < n_shares; t++) {
        tagc_select_share own = {.candidate_indices = tagc_arena_take(arena, s->n_room, sizeof(uint32_t)),
                                 .candidate_values = tagc_arena_take(arena, s->n_room, sizeof(float)),
                                 .band = tagc_arena_take(arena, s->n_room, sizeof(float)),
                                 .radix = tagc_arena_take(arena, N_RADIX, sizeof(uint32_t))};
        if (s->shares) s->shares[t] = own;
    }
}

size_t tagc_select_scratch_bytes(size_t n, size_t k, int n_threads) {
    tagc_selector s = {.n = n, .k = k};
    tagc_arena arena = {0};
    lay_out(&s, &arena, n_threads);
    return arena.n_bytes;
}

/* ---- work that threads share ---- */

static size_t block_elems(const tagc_selector *s, size_t b) {
    return size_min(s->n - b * BLOCK, BLOCK);
}

/* `stream` over one block. */
static size_t stream_block(const tagc_selector *s, size_t at, size_t n, uint32_t t_lo, uint32_t *indices,
                           float *values, uint32_t *max_bits) {
    const uint32_t t_clear = s->leave && !s->stored_out ? TAGC_SELECT_NONE : t_lo;
    if (s->residual_out)
        return s->kernels->stream(s->gradient + at, s->residual_in + at, s->residual_out + at, n,
                                  (uint32_t)at, t_lo, t_clear, s->bypass, indices, values, max_bits);
    float gradient_room[PIECE + APART], room[PIECE];
    const float *gradient, *residual;
    size_t i = 0, n_candidates = 0;
    if (s->kernels->stream_int8 && s->stored_out && s->addends.residual_format == TAGC_FORMAT_INT8) {
        const size_t n_exponents = tagc_residual_exponent_bytes(TAGC_FORMAT_INT8, s->n);
        const uint8_t *in = s->addends.residual;
        uint8_t *out = s->stored_out;
        i = n / TAGC_RESIDUAL_BLOCK * TAGC_RESIDUAL_BLOCK;
        n_candidates = s->kernels->stream_int8(
            s->addends.gradient, s->addends.gradient_format == TAGC_FORMAT_BF16, in, in + n_exponents, out,
            out + n_exponents, i, (uint32_t)at, t_lo, s->seed, indices, values, max_bits);
    }
    for (; i < n; i += PIECE) {
        size_t n_here = size_min(n - i, PIECE);
        tagc_addends_parts(&s->addends, at + i, n_here, gradient_room, room, &gradient, &residual);
        n_candidates +=
            s->kernels->stream(gradient, residual, room, n_here, (uint32_t)(at + i), t_lo, t_clear, 0,
                               indices + n_candidates, values + n_candidates, max_bits);
        if (s->stored_out)
            tagc_residual_write(s->addends.residual_format, s->n, room, at + i, n_here, s->seed,
                                s->stored_out);
    }
    return n_candidates;
}

/* Takes blocks until none is left or this thread's room is full. */
static void stream_work(void *arg, int index, int n_threads) {
    tagc_selector *s = arg;
    tagc_select_share *own = &s->shares[index];
    (void)n_threads;
    own->n_candidates = own->n_band = 0;
    own->max_bits = 0;
    while (own->n_candidates + s->most_in_block + TAGC_SELECT_SLACK <= s->n_room) {
        const size_t b = atomic_fetch_add(&s->next_block, 1), at = b * BLOCK;
        if (b >= s->n_blocks) break;
        tagc_select_block *here = &s->blocks[b];
        *here = (tagc_select_block){.owner = (uint32_t)index,
                                    .candidate_begin = (uint32_t)own->n_candidates,
                                    .band_begin = (uint32_t)own->n_band};
        float *values = own->candidate_values + own->n_candidates;
        size_t n_candidates =
            stream_block(s, at, block_elems(s, b), s->t_lo, own->candidate_indices + own->n_candidates,
                         values, &own->max_bits);
        size_t n_band = s->kernels->band(values, n_candidates, s->t_hi, own->band + own->n_band);
        here->n_candidates = (uint32_t)n_candidates;
        here->n_band = (uint32_t)n_band;
        own->n_candidates += n_candidates;
        own->n_band += n_band;
    }
    if (s->bypass) s->kernels->fence();
}

/* For blocks that no room had space for: writes acc to the residual, where the second pass looks for it. */
static void sum_work(void *arg, int index, int n_threads) {
    tagc_selector *s = arg;
    (void)n_threads;
    uint32_t nowhere_indices[TAGC_SELECT_SLACK];
    float nowhere_values[TAGC_SELECT_SLACK];
    for (size_t b; (b = atomic_fetch_add(&s->next_block, 1)) < s->n_blocks;) {
        stream_block(s, b * BLOCK, block_elems(s, b), TAGC_SELECT_NONE, nowhere_indices, nowhere_values,
                     &s->shares[index].max_bits);
    }
    if (s->bypass) s->kernels->fence();
}

static void restore_work(void *arg, int index, int n_threads) {
    tagc_selector *s = arg;
    (void)n_threads;
    const tagc_select_share *own = &s->shares[index];
    for (size_t i = 0; i < own->n_candidates; i++)
        s->residual_out[own->candidate_indices[i]] = own->candidate_values[i];
}

/* acc at [at, at + n), n up to PIECE: in the residual, or made in the room once more. */
static const float *acc_at(const tagc_selector *s, size_t at, size_t n, float *room) {
    if (s->residual_out) return s->residual_out + at;
    tagc_addends_read(&s->addends, at, n, room);
    return room;
}

/* Counts, among bits - base whose digits above `shift` are `prefix`, the digit at `shift`. */
static void add_digits(const tagc_selector *s, const float *values, size_t n, uint32_t *radix) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = tagc_abs_bits(values[i]) - s->base;
        if (bits >> s->shift_prefix == s->prefix) radix[bits >> s->shift & (s->n_digits - 1)]++;
    }
}

static void radix_work(void *arg, int index, int n_threads) {
    tagc_selector *s = arg;
    tagc_select_share *own = &s->shares[index];
    memset(own->radix, 0, N_RADIX * sizeof *own->radix);
    if (!s->from_acc) {
        add_digits(s, own->band, own->n_band, own->radix);
        return;
    }
    float room[PIECE];
    for (size_t at = (size_t)index * PIECE; at < s->n; at += (size_t)n_threads * PIECE) {
        size_t n = size_min(s->n - at, PIECE);
        add_digits(s, acc_at(s, at, n, room), n, own->radix);
    }
}

/* Each block's owner has the candidates; all threads share the residual. */
static int is_mine(const tagc_selector *s, size_t b, int index, int n_threads) {
    return s->from_acc ? b % (size_t)n_threads == (size_t)index : s->blocks[b].owner == (uint32_t)index;
}

static void count_band(const tagc_selector *s, const tagc_select_share *own, tagc_select_block *here) {
    size_t n_ties, n_certain = here->n_candidates - here->n_band;
    n_certain += s->kernels->count(own->band + here->band_begin, here->n_band, s->threshold, &n_ties);
    here->n_sent = (uint32_t)n_certain;
    here->n_ties = (uint32_t)n_ties;
}

static void count_again(const tagc_selector *s, size_t b) {
    float room[PIECE];
    tagc_select_block *here = &s->blocks[b];
    here->n_sent = here->n_ties = 0;
    for (size_t i = 0, n = block_elems(s, b), n_ties; i < n; i += PIECE) {
        size_t n_here = size_min(n - i, PIECE);
        here->n_sent += (uint32_t)s->kernels->count(acc_at(s, b * BLOCK + i, n_here, room), n_here,
                                                    s->threshold, &n_ties);
        here->n_ties += (uint32_t)n_ties;
    }
}

static void count_work(void *arg, int index, int n_threads) {
    tagc_selector *s = arg;
    const tagc_select_share *own = &s->shares[index];
    for (size_t b = 0; b < s->n_blocks; b++) {
        if (!is_mine(s, b, index, n_threads)) continue;
        if (s->from_acc)
            count_again(s, b);
        else
            count_band(s, own, &s->blocks[b]);
    }
}

/* Keeps from acc what is above the threshold, and the first n_ties equal to it. */
static void keep_again(tagc_selector *s, const tagc_select_block *here, size_t begin, size_t end) {
    size_t j = here->out_begin, n_ties = here->n_ties;
    float room[PIECE];
    for (size_t at = begin; at < end; at += PIECE) {
        size_t n = size_min(end - at, PIECE);
        const float *acc = acc_at(s, at, n, room);
        for (size_t i = 0; i < n; i++) {
            uint32_t bits = tagc_abs_bits(acc[i]);
            if (bits < s->threshold || (bits == s->threshold && n_ties == 0)) continue;
            n_ties -= bits == s->threshold;
            s->indices[j] = (uint32_t)(at + i);
            s->values[j++] = acc[i];
            if (!s->leave) s->residual_out[at + i] = TAGC_ZERO_RESIDUAL;
        }
    }
}

static void pick_work(void *arg, int index, int n_threads) {
    tagc_selector *s = arg;
    const tagc_select_share *own = &s->shares[index];
    for (size_t b = 0; b < s->n_blocks; b++) {
        if (!is_mine(s, b, index, n_threads)) continue;
        const tagc_select_block *here = &s->blocks[b];
        if (s->from_acc)
            keep_again(s, here, b * BLOCK, b * BLOCK + block_elems(s, b));
        else
            s->kernels->keep(own->candidate_indices + here->candidate_begin,
                             own->candidate_values + here->candidate_begin, here->n_candidates, s->threshold,
                             here->n_ties, s->leave ? NULL : s->residual_out, s->beyond_cache,
                             s->indices + here->out_begin, s->values + here->out_begin, here->n_sent);
    }
    if (s->beyond_cache) s->kernels->fence();
}

/* k == n: zeros too, with their signs. */
static void pick_all_work(void *arg, int index, int n_threads) {
    tagc_selector *s = arg;
    tagc_select_share *own = &s->shares[index];
    own->max_bits = 0;
    for (size_t b = (size_t)index; b < s->n_blocks; b += (size_t)n_threads) {
        tagc_addends_read(&s->addends, b * BLOCK, block_elems(s, b), s->values + b * BLOCK);
        for (size_t i = b * BLOCK; i < b * BLOCK + block_elems(s, b); i++) {
            s->indices[i] = (uint32_t)i;
            uint32_t bits = tagc_abs_bits(s->values[i]);
            if (s->residual_out) s->residual_out[i] = s->leave && bits ? s->values[i] : TAGC_ZERO_RESIDUAL;
            if (bits > own->max_bits) own->max_bits = bits;
        }
    }
}

/* ---- in between ---- */

/* The bits of the element of `rank` from the top (1: the largest) among those whose bits - base need n_bits.
 */
static uint32_t find_rank(tagc_selector *s, tagc_pool *pool, size_t rank, uint32_t base, int n_bits) {
    s->base = base;
    s->prefix = 0;
    s->shift = n_bits;
    while (s->shift > 0) {
        s->shift_prefix = s->shift;
        s->shift = s->shift > RADIX_BITS ? s->shift - RADIX_BITS : 0;
        s->n_digits = 1u << (s->shift_prefix - s->shift);
        uint32_t digit = s->n_digits;
        tagc_pool_run(pool, radix_work, s);
        for (size_t n_here = 0; rank > n_here;) {
            rank -= n_here;
            digit--;
            n_here = 0;
            for (int t = 0; t < tagc_pool_n_threads(pool); t++) n_here += s->shares[t].radix[digit];
        }
        s->prefix = s->prefix << (s->shift_prefix - s->shift) | digit;
    }
    return base + s->prefix;
}

/* A threshold above which exactly `rank` elements of a small band lie, or that the one of this rank has. */
static uint32_t halve_band(const tagc_selector *s, size_t rank) {
    const tagc_select_share *own = &s->shares[0];
    uint32_t low = s->t_lo - 1, high = s->t_hi - 1; /* more than `rank` above low, fewer above high */
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        size_t n_ties, n_above = s->kernels->count(own->band, own->n_band, middle, &n_ties);
        if (n_above == rank) return middle;
        *(n_above > rank ? &low : &high) = middle;
    }
    return high;
}

/* Finds threshold and ties in the band; returns 0 if the prediction was bad. */
static int threshold_from_band(tagc_selector *s, tagc_pool *pool) {
    size_t n_candidates = 0, n_band = 0;
    for (int t = 0; t < tagc_pool_n_threads(pool); t++) {
        n_candidates += s->shares[t].n_candidates;
        n_band += s->shares[t].n_band;
    }
    size_t n_certain = n_candidates - n_band;
    if (n_certain > s->k || (n_candidates < s->k && s->t_lo > 1)) return 0;
    if (n_candidates <= s->k)
        s->threshold = s->t_lo - 1;
    else if (n_certain == s->k)
        s->threshold = s->t_hi - 1;
    else if (!pool && n_band <= SMALL_BAND)
        s->threshold = halve_band(s, s->k - n_certain);
    else
        s->threshold =
            find_rank(s, pool, s->k - n_certain, s->t_lo, 32 - __builtin_clz(s->t_hi - 1 - s->t_lo));
    return 1;
}

/* Computes where each block's output begins and how many of its ties are sent: the first ones. Returns the number sent. */
static size_t share_out(tagc_selector *s) {
    size_t n_above = 0, n_out = 0;
    for (size_t b = 0; b < s->n_blocks; b++) n_above += s->blocks[b].n_sent;
    size_t n_ties_left = s->threshold ? s->k - n_above : 0; /* zeros are never sent */
    for (size_t b = 0; b < s->n_blocks; b++) {
        tagc_select_block *here = &s->blocks[b];
        here->n_ties = (uint32_t)size_min(here->n_ties, n_ties_left);
        n_ties_left -= here->n_ties;
        here->n_sent += here->n_ties;
        here->out_begin = (uint32_t)n_out;
        n_out += here->n_sent;
    }
    return n_out;
}

/* Takes the largest |acc| of all threads; returns 0 if it is not finite. */
static int all_finite(const tagc_selector *s, tagc_pool *pool, tagc_selection *result) {
    union {
        uint32_t bits;
        float value;
    } max = {.bits = 0};
    for (int t = 0; t < tagc_pool_n_threads(pool); t++)
        if (s->shares[t].max_bits > max.bits) max.bits = s->shares[t].max_bits;
    result->max_abs = max.value;
    result->nonfinite = max.bits >= INF_BITS;
    return !result->nonfinite;
}

static void select_from(tagc_selector *s, void *scratch, tagc_pool *pool, tagc_selection *result) {
    size_t n = s->n, k = s->k;
    *result = (tagc_selection){.n_passes = 1};
    if (n == 0) return;
    tagc_arena arena = {.base = scratch};
    lay_out(s, &arena, tagc_pool_n_threads(pool));
    if (s->n_blocks < WORTH_THREADS) pool = NULL;
    s->pool = pool;
    /* the new residual is not read again soon; writing around the cache saves reading the old lines first */
    s->beyond_cache = n >= (size_t)1 << 21;
    s->bypass = s->beyond_cache && s->residual_out != s->residual_in;
    if (k == n) {
        tagc_pool_run(pool, pick_all_work, s);
        all_finite(s, pool, result);
        result->n_sent = n;
        return;
    }
    s->t_lo = k == 0 ? TAGC_SELECT_NONE : 1;
    s->t_hi = INF_BITS;
    tagc_sample_predict(&s->shape, &s->addends, s->sample, s->buckets, &s->t_lo, &s->t_hi);
    tagc_pool_run(pool, stream_work, s);
    int overflow = atomic_load(&s->next_block) < s->n_blocks; /* every room is full */
    if (overflow) tagc_pool_run(pool, sum_work, s);
    if (!all_finite(s, pool, result) || k == 0) return;
    if (overflow || !threshold_from_band(s, pool)) {
        result->n_passes = 2;
        if (!s->leave) tagc_pool_run(pool, restore_work, s);
        s->from_acc = 1;
        s->threshold = find_rank(s, pool, k, 0, 31);
    }
    tagc_pool_run(pool, count_work, s);
    result->n_sent = share_out(s);
    tagc_pool_run(pool, pick_work, s);
}

void tagc_select_with(const tagc_select_kernels *kernels, const float *gradient, const float *residual_in,
                      float *residual_out, int leave, size_t n, size_t k, uint32_t *indices, float *values,
                      void *scratch, tagc_pool *pool, tagc_selection *result) {
    tagc_selector s = {.kernels = kernels,
                       .addends = {.n = n, .gradient = gradient, .residual = residual_in},
                       .gradient = gradient,
                       .residual_in = residual_in,
                       .residual_out = residual_out,
                       .leave = leave,
                       .indices = indices,
                       .values = values,
                       .n = n,
                       .k = k};
    select_from(&s, scratch, pool, result);
}

static const tagc_select_kernels *best(void) {
    const tagc_select_kernels *available[TAGC_SELECT_MAX_KERNELS];
    tagc_select_available(available);
    return available[0];
}

void tagc_select(const float *gradient, const float *residual_in, float *residual_out, size_t n, size_t k,
                 uint32_t *indices, float *values, void *scratch, tagc_pool *pool, tagc_selection *result) {
    tagc_select_with(best(), gradient, residual_in, residual_out, 0, n, k, indices, values, scratch, pool,
                     result);
}

void tagc_select_leaving(const float *gradient, const float *residual_in, float *residual_out, size_t n,
                         size_t k, uint32_t *indices, float *values, void *scratch, tagc_pool *pool,
                         tagc_selection *result) {
    tagc_select_with(best(), gradient, residual_in, residual_out, 1, n, k, indices, values, scratch, pool,
                     result);
}

void tagc_select_addends(const tagc_addends *addends, void *residual_out, uint32_t seed, size_t k,
                         uint32_t *indices, float *values, void *scratch, tagc_pool *pool,
                         tagc_selection *result) {
    tagc_selector s = {.kernels = best(),
                       .addends = *addends,
                       .stored_out = residual_out,
                       .seed = seed,
                       .leave = 1,
                       .indices = indices,
                       .values = values,
                       .n = addends->n,
                       .k = k};
    select_from(&s, scratch, pool, result);
    s.n_sent = result->n_sent;
    s.is_written = result->n_passes == 1 && k > 0 && k < s.n;
    if (s.n) *s.self = s;
}

/* ---- settling ---- */

/* The end of a selection from addends: candidates become part of the stored residual.
 *
 * The sweep wrote everything else, block by block of the format, each in the scale that it needs by itself. A candidate is now known to be
 * an error or to have lost. If it fits into the scale of its block, its code is written between the others'. If it does not,
 * the block is made once more from the addends. Either way the block is what tagc_residual_write makes of all its values. */
typedef struct settling {
    const tagc_selector *s;
    const float *errors; /* (n_sent), or NULL */
} settling;

/* [at, at + n) of the row. */
static void make_again(const tagc_selector *s, size_t at, size_t n, const float *errors) {
    float acc[TAGC_RESIDUAL_BLOCK];
    tagc_addends_read(&s->addends, at, n, acc);
    for (size_t j = tagc_first_from(s->indices, s->n_sent, at); j < s->n_sent && s->indices[j] < at + n; j++)
        acc[s->indices[j] - at] = errors ? errors[j] : -0.0f;
    tagc_residual_write(s->addends.residual_format, s->n, acc, at, n, s->seed, s->stored_out);
}

/* Writes values (n) at indices (n). Blocks that are too small for one are made again. */
static void put(const settling *t, const uint32_t *indices, const float *values, size_t n) {
    const tagc_selector *s = t->s;
    uint32_t misfits[PIECE];
    for (size_t i = 0; i < n; i += PIECE) {
        size_t done = 0,
               n_misfits = tagc_residual_put(s->addends.residual_format, s->n, indices + i, values + i,
                                             n - i < PIECE ? n - i : PIECE, s->seed, s->stored_out, misfits);
        for (size_t j = 0; j < n_misfits; j++) {
            size_t at = misfits[j] / TAGC_RESIDUAL_BLOCK * TAGC_RESIDUAL_BLOCK;
            if (misfits[j] < done) continue;
            done = at + TAGC_RESIDUAL_BLOCK;
            make_again(s, at, s->n < done ? s->n - at : TAGC_RESIDUAL_BLOCK, t->errors);
        }
    }
}

static void settle_block(const settling *t, const tagc_select_share *own, const tagc_select_block *here) {
    /* keep left those that were not sent at the front of their list */
    put(t, own->candidate_indices + here->candidate_begin, own->candidate_values + here->candidate_begin,
        here->n_candidates - here->n_sent);
    if (t->errors) /* else zeros are there already */
        put(t, t->s->indices + here->out_begin, t->errors + here->out_begin, here->n_sent);
}

static void settle_work(void *arg, int index, int n_threads) {
    const settling *t = arg;
    (void)n_threads;
    for (size_t b = 0; b < t->s->n_blocks; b++)
        if (t->s->blocks[b].owner == (uint32_t)index) settle_block(t, &t->s->shares[index], &t->s->blocks[b]);
}

void tagc_select_settle(const float *errors, void *scratch) {
    const tagc_selector *s = scratch;
    settling t = {s, errors};
    if (s->is_written) {
        tagc_pool_run(s->pool, settle_work, &t);
        tagc_residual_pad(s->addends.residual_format, s->n, s->stored_out);
    } else {
        tagc_addends_settle(&s->addends, s->indices, errors, s->n_sent, s->seed, s->stored_out, s->pool);
    }
}
