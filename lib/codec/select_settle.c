/* The end of a selection from addends: candidates become part of the stored residual.
 *
 * The sweep wrote everything else, block by block of the format, each in the scale that it needs by itself. A candidate is now known to be
 * an error or to have lost. If it fits into the scale of its block, its code is written between the others'. If it does not,
 * the block is made once more from the addends. Either way the block is what tagc_residual_write makes of all its values. */
#include "codec/residual.h"
#include "codec/select_private.h"

enum { LEAST = 32, SHIFT_LEAST = 5 }; /* values of the smallest block */

typedef struct settling {
    const tagc_selector *s;
    const float *errors; /* (n_sent), or NULL */
} settling;

/* What becomes of candidates of one block of the selection: two lists, each ascending. */
typedef struct ends {
    const uint32_t *indices; /* (n) */
    const float *values;     /* (n) */
    size_t n;
} ends;

/* Raises tops, the bits of the largest magnitude in each LEAST elements from `base` on. */
static void find_tops(const ends *e, uint32_t base, uint32_t *tops) {
    for (size_t i = 0; i < e->n; i++) {
        uint32_t bits = tagc_abs_bits(e->values[i]), *top = &tops[(e->indices[i] - base) >> SHIFT_LEAST];
        *top = bits > *top ? bits : *top;
    }
}

/* The first of indices (n), ascending, that is not below `at`. */
static size_t first_from(const uint32_t *indices, size_t n, size_t at) {
    size_t low = 0;
    while (low < n) {
        size_t middle = low + (n - low) / 2;
        if (indices[middle] < at)
            low = middle + 1;
        else
            n = middle;
    }
    return low;
}

/* [at, at + n) of the row. */
static void make_again(const tagc_selector *s, size_t at, size_t n, const float *errors) {
    float acc[TAGC_RESIDUAL_BLOCK];
    tagc_addends_read(&s->addends, at, n, acc);
    for (size_t j = first_from(s->indices, s->n_sent, at); j < s->n_sent && s->indices[j] < at + n; j++)
        acc[s->indices[j] - at] = errors ? errors[j] : -0.0f;
    tagc_residual_write(s->addends.residual_format, s->n, acc, at, n, s->seed, s->stored_out);
}

/* Blocks in [begin, begin + n) that are too small for what became of their candidates. */
static void enlarge(const settling *t, size_t begin, size_t n, const uint32_t *tops) {
    const tagc_selector *s = t->s;
    const int format = s->addends.residual_format;
    const size_t per_group = TAGC_RESIDUAL_BLOCK / LEAST, per_exponent = format == TAGC_FORMAT_INT8 ? per_group : 1;
    const uint8_t *exponents = (const uint8_t *)s->stored_out + begin / LEAST / per_exponent;
    for (size_t i = 0; i < n; i += TAGC_RESIDUAL_BLOCK) {
        int is_small = 0;
        for (size_t b = i / LEAST; b < i / LEAST + per_group; b++)
            is_small |= tops[b] && tagc_residual_exponent(format, tops[b]) > exponents[b / per_exponent];
        if (is_small)
            make_again(s, begin + i, n - i < TAGC_RESIDUAL_BLOCK ? n - i : TAGC_RESIDUAL_BLOCK, t->errors);
    }
}

static void settle_block(const settling *t, const tagc_select_share *own, size_t b) {
    const tagc_selector *s = t->s;
    const tagc_select_block *here = &s->blocks[b];
    const int format = s->addends.residual_format;
    const size_t begin = b * TAGC_SELECT_BLOCK;
    /* keep left those that were not sent at the front of their list */
    ends lost = {own->candidate_indices + here->candidate_begin, own->candidate_values + here->candidate_begin,
                 here->n_candidates - here->n_sent};
    ends sent = {s->indices + here->out_begin, t->errors ? t->errors + here->out_begin : NULL,
                 t->errors ? here->n_sent : 0}; /* without errors, zeros are there already */
    if (lost.n + sent.n == 0) return;
    if (tagc_residual_exponent_bytes(format, s->n)) {
        uint32_t tops[TAGC_SELECT_BLOCK / LEAST] = {0};
        find_tops(&lost, (uint32_t)begin, tops);
        find_tops(&sent, (uint32_t)begin, tops);
        enlarge(t, begin, s->n - begin < TAGC_SELECT_BLOCK ? s->n - begin : TAGC_SELECT_BLOCK, tops);
    }
    tagc_residual_put(format, s->n, lost.indices, lost.values, lost.n, s->seed, s->stored_out);
    tagc_residual_put(format, s->n, sent.indices, sent.values, sent.n, s->seed, s->stored_out);
}

static void settle_work(void *arg, int index, int n_threads) {
    const settling *t = arg;
    (void)n_threads;
    for (size_t b = 0; b < t->s->n_blocks; b++)
        if (t->s->blocks[b].owner == (uint32_t)index) settle_block(t, &t->s->shares[index], b);
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
