/* The share that compressed flats keep: it falls to its target in a warm-up (deep gradient compression) and is raised
 * while the guard asks for more. Also the norm of the residuals, which the guard reads. */
#include "fsdp/internal.h"
#include <math.h>

#define WARMUP_KEPT 0.25 /* the share kept at first */

static double kept_share(const tagc_fsdp *f, double target) {
    uint64_t n = (uint64_t)f->options.sparsity_warmup;
    double kept = target;
    if (f->n_steps_begun < n && target > 0 && target < WARMUP_KEPT)
        kept = WARMUP_KEPT * pow(target / WARMUP_KEPT, (double)f->n_steps_begun / (double)n);
    return fmin(1, kept * f->kept_factor);
}

static tagc_status set_sparsity(tagc_fsdp *f, tagc_flat *flat) {
    tagc_reducer_options reducer;
    tagc_gatherer_options gatherer;
    tagc_fsdp_exchange_options(f, flat, &reducer, &gatherer);
    if (reducer.exchange == TAGC_EXCHANGE_DENSE) return TAGC_OK;
    double now = flat->sparsity < 0 ? reducer.sparsity : flat->sparsity;
    double wanted = 1 - kept_share(f, 1 - reducer.sparsity);
    if (wanted == now || fabs(wanted - now) < 1e-9) return TAGC_OK;
    TAGC_TRY(tagc_reducer_set_sparsity(flat->reducer, wanted));
    flat->sparsity = wanted;
    return TAGC_OK;
}

tagc_status tagc_fsdp_begin_kept(tagc_fsdp *f) {
    TAGC_TRY(tagc_fsdp_begin_gentle(f));
    for (int i = 0; i < f->tables.n_flats; i++)
        if (f->tables.flats[i].class_ == TAGC_CLASS_COMPRESSED && !f->tables.flats[i].gentle)
            TAGC_TRY(set_sparsity(f, &f->tables.flats[i]));
    f->n_steps_begun++;
    return TAGC_OK;
}

tagc_status tagc_fsdp_residual_norm(tagc_fsdp *f, double *norm) {
    double sum = 0;
    for (int i = 0; i < f->tables.n_flats; i++) {
        uint64_t n;
        const float *residual = tagc_fsdp_residual(&f->tables.flats[i], &n);
        /* Each rank of a host holds a part of the residual of the host's sum. */
        sum += tagc_sum_of_squares(residual, n) / f->tables.flats[i].ranks_per_host;
    }
    TAGC_TRY(tagc_comm_all_gather(f->comm, &sum, sizeof sum, f->norms));
    sum = 0;
    for (int rank = 0; rank < f->world_size; rank++) sum += f->norms[rank]; /* the same bits on all ranks */
    *norm = sqrt(sum / f->world_size);
    return TAGC_OK;
}

void tagc_fsdp_set_kept_factor(tagc_fsdp *f, double factor) {
    f->kept_factor = factor;
}

void tagc_fsdp_set_steps_begun(tagc_fsdp *f, uint64_t n_steps) {
    f->n_steps_begun = n_steps;
}
