/* The end of a selection from addends: candidates become part of the stored residual.
 *
 * The sweep wrote everything else, block by block of the format, each in the scale that it needs by itself. A candidate is now known to be
 * an error or to have lost. If it fits into the scale of its block, its code is written between the others'. If it does not,
 * the block is made once more from the addends. Either way the block is what tagc_residual_write makes of all its values. */
#include "codec/code_kernels.h"
#include "codec/residual.h"
#include "codec/select_private.h"

#include <string.h>

enum { LEAST = 32, SHIFT_LEAST = 5 }; /* values of the smallest block */

typedef struct settling {
    const tagc_selector *s;
    const float *errors;
    const tagc_code_kernels *kernels;
} settling;

/* Puts what becomes of the candidates of one block of the selection into their lists: the error where one was sent, else acc. Without
 * errors only what was not sent stays in the lists. Returns their new length. tops: the bits of the largest magnitude in each
 * LEAST elements. */
static size_t find_ends(const settling *t, const tagc_select_block *here, uint32_t base, uint32_t *indices,
                        float *values, uint32_t *tops) {
    const uint32_t *sent = t->s->indices + here->out_begin;
    const float *errors = t->errors ? t->errors + here->out_begin : NULL;
    size_t j = 0, n = 0, n_sent = here->n_sent;
    for (size_t i = 0; i < here->n_candidates; i++) {
        uint32_t at = indices[i];
        int is_sent = j < n_sent && sent[j] == at;
        float end = is_sent && errors ? errors[j] : values[i];
        j += (size_t)is_sent;
        indices[n] = at;
        values[n] = end;
        if (is_sent && !errors) continue;
        n++;
        uint32_t bits = tagc_abs_bits(end), *top = &tops[(at - base) >> SHIFT_LEAST];
        *top = bits > *top ? bits : *top;
    }
    return n;
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

/* [at, at + n) of the row, with its ends (n_ends) among others. */
static void make_again(const settling *t, size_t at, size_t n, const uint32_t *indices, const float *values,
                       size_t n_ends) {
    const tagc_selector *s = t->s;
    float acc[TAGC_RESIDUAL_BLOCK];
    tagc_addends_read(&s->addends, at, n, acc);
    for (const uint32_t *sent = s->indices + first_from(s->indices, s->n_sent, at);
         sent < s->indices + s->n_sent && *sent < at + n; sent++)
        acc[*sent - at] = -0.0f;
    for (size_t i = first_from(indices, n_ends, at); i < n_ends && indices[i] < at + n; i++)
        acc[indices[i] - at] = values[i];
    tagc_residual_write(s->addends.residual_format, s->n, acc, at, n, s->seed, s->stored_out);
}

/* Blocks that are too small for what became of their candidates. */
static void enlarge(const settling *t, size_t begin, size_t n, const uint32_t *tops, const uint32_t *indices,
                    const float *values, size_t n_ends) {
    const tagc_selector *s = t->s;
    const int format = s->addends.residual_format, n_tops = TAGC_RESIDUAL_BLOCK / LEAST;
    const size_t per_exponent = format == TAGC_FORMAT_INT8 ? TAGC_RESIDUAL_BLOCK / LEAST : 1;
    const uint8_t *exponents = (const uint8_t *)s->stored_out + begin / LEAST / per_exponent;
    for (size_t i = 0; i < n; i += TAGC_RESIDUAL_BLOCK) {
        int is_small = 0;
        for (size_t b = i / LEAST; b < i / LEAST + (size_t)n_tops; b++)
            is_small |= tops[b] && tagc_residual_exponent(format, tops[b]) > exponents[b / per_exponent];
        if (is_small)
            make_again(t, begin + i, n - i < TAGC_RESIDUAL_BLOCK ? n - i : TAGC_RESIDUAL_BLOCK, indices, values,
                       n_ends);
    }
}

static void settle_work(void *arg, int index, int n_threads) {
    const settling *t = arg;
    const tagc_selector *s = t->s;
    const tagc_select_share *own = &s->shares[index];
    const int format = s->addends.residual_format;
    uint8_t *exponents = s->stored_out, *codes = exponents + tagc_residual_exponent_bytes(format, s->n);
    uint32_t tops[TAGC_SELECT_BLOCK / LEAST];
    (void)n_threads;
    for (size_t b = 0; b < s->n_blocks; b++) {
        const tagc_select_block *here = &s->blocks[b];
        if (here->owner != (uint32_t)index || here->n_candidates == 0) continue;
        size_t begin = b * TAGC_SELECT_BLOCK;
        size_t n = s->n - begin < TAGC_SELECT_BLOCK ? s->n - begin : TAGC_SELECT_BLOCK;
        uint32_t *indices = own->candidate_indices + here->candidate_begin;
        float *values = own->candidate_values + here->candidate_begin;
        memset(tops, 0, sizeof tops);
        size_t n_ends = find_ends(t, here, (uint32_t)begin, indices, values, tops);
        if (codes > exponents) enlarge(t, begin, n, tops, indices, values, n_ends);
        tagc_residual_put(format, s->n, indices, values, n_ends, s->seed, s->stored_out);
    }
}

void tagc_select_settle(const float *errors, void *scratch) {
    const tagc_selector *s = scratch;
    settling t = {s, errors, tagc_code_best()};
    if (s->is_written)
        tagc_pool_run(s->pool, settle_work, &t);
    else
        tagc_addends_settle(&s->addends, s->indices, errors, s->n_sent, s->seed, s->stored_out, s->pool);
}
