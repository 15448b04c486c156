/* The end of a selection from addends: candidates become part of the stored residual.
 *
 * The sweep wrote everything else, block by block of the format, each in the scale that it needs by itself. A candidate is now known to be
 * an error or to have lost. If it fits into the scale of its block, its code is written between the others'. If it does not,
 * the block is made once more from the addends. Either way the block is what tagc_residual_write makes of all its values. */
#include "codec/residual.h"
#include "codec/select_private.h"

enum { PIECE = 1024 }; /* elements at a time */

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
