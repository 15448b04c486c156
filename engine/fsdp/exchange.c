/* Which exchange each flat uses: that of the engine's options, that of its plan, or the one set by tagc_fsdp_set_exchange.
 *
 * A change of exchange loses nothing of a residual. If the new exchange has one of the same layout, it gets the values.
 * Otherwise the flat keeps them (`former`) and adds them to the next gradient. */
#include "exchange/options.h"
#include "exchange/wire.h"
#include "fsdp/checkpoint_format.h"
#include "fsdp/internal.h"
#include "fsdp/layout.h"
#include <stdlib.h>
#include <string.h>

/* Only direct has two levels, so a hybrid engine replaces dense by direct with every value. */
void tagc_layout_own_fields(const tagc_fsdp_options *engine, uint64_t n_padded, int unit,
                            tagc_reducer_options *r) {
    int is_hybrid = engine->sharding == TAGC_SHARD_HYBRID;
    if (is_hybrid && r->exchange == TAGC_EXCHANGE_DENSE) {
        r->exchange = TAGC_EXCHANGE_DIRECT;
        r->sparsity = 0;
        r->format = r->format == TAGC_FORMAT_BF16 ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
    }
    r->paper = &engine->paper;
    r->output = is_hybrid                             ? TAGC_OUTPUT_HOST_SHARD
                : engine->sharding == TAGC_SHARD_NONE ? TAGC_OUTPUT_UNIT
                                                      : TAGC_OUTPUT_SHARD;
    tagc_reducer_options_prune(r);
    tagc_reducer_options_resolve(r);
    int by_hosts = is_hybrid || (engine->two_level && r->exchange == TAGC_EXCHANGE_DIRECT);
    r->n_elems = n_padded;
    r->tag = (uint64_t)unit;
    r->op = TAGC_OP_AVG;
    r->ranks_per_host = by_hosts ? engine->ranks_per_host : 1;
    r->n_threads = engine->reducer.n_threads;
}

int tagc_fsdp_exchange_options(const tagc_fsdp *f, const tagc_flat *flat, tagc_reducer_options *r,
                               tagc_gatherer_options *g) {
    if (flat->is_asked) {
        *r = flat->asked;
    } else if (flat->class_ == TAGC_CLASS_COMPRESSED) {
        *r = f->options.reducer;
    } else if (flat->class_ == TAGC_CLASS_MILD) {
        *r = f->options.mild;
    } else {
        tagc_reducer_options_init(r);
        r->exchange = TAGC_EXCHANGE_DENSE;
        r->format = f->options.dense_format;
    }
    if (flat->is_followed) tagc_fsdp_plan_options(&flat->plan, r);
    tagc_layout_own_fields(&f->options, flat->n_padded, flat->unit, r);
    r->rounding_seed =
        (uint64_t)f->tables.members[flat->first_member]; /* the same tensor however units are wrapped */
    tagc_gatherer_options_init(g);
    g->n_elems = flat->n_padded;
    g->tag = (uint64_t)flat->unit;
    g->n_threads = (uint64_t)f->options.reducer.n_threads;
    tagc_gatherer_options_choose(g, f->options.gather);
    g->check_every = g->delta ? (uint64_t)f->options.gather_check_every : 0;
    int is_hybrid = f->options.sharding == TAGC_SHARD_HYBRID;
    g->within_host = is_hybrid;
    g->ranks_per_host = is_hybrid || f->options.two_level ? f->options.ranks_per_host : 1;
    return f->options.sharding != TAGC_SHARD_NONE;
}

static uint64_t stored_bytes(const tagc_reducer *reducer) {
    return tagc_reducer_state_bytes(reducer) - TAGC_WIRE_HEADER_BYTES;
}

tagc_status tagc_fsdp_make_exchange(tagc_fsdp *f, tagc_flat *flat) {
    tagc_reducer_options r;
    tagc_gatherer_options g;
    int is_gathered = tagc_fsdp_exchange_options(f, flat, &r, &g);
    TAGC_TRY(tagc_reducer_create(f->comm, &r, &flat->reducer));
    flat->ranks_per_host = r.ranks_per_host;
    f->memory.residuals += stored_bytes(flat->reducer);
    return is_gathered ? tagc_gatherer_create(f->comm, &g, &flat->gatherer) : TAGC_OK;
}

/* ---- a change between steps ---- */

void tagc_fsdp_drop_former(tagc_fsdp *f, tagc_flat *flat) {
    if (flat->former == NULL) return;
    free(flat->former);
    flat->former = NULL;
    flat->former_sent = 0;
    f->memory.residuals -= flat->n_padded * sizeof(float);
}

uint64_t tagc_fsdp_residual_elems(const tagc_flat *flat) {
    return flat->former != NULL ? flat->n_padded : tagc_reducer_residual_elems(flat->reducer);
}

tagc_status tagc_fsdp_residual_read(const tagc_flat *flat, float *values) {
    uint64_t n = tagc_fsdp_residual_elems(flat);
    if (n == 0) return TAGC_OK;
    if (flat->former == NULL) return tagc_reducer_get_residual(flat->reducer, values, n);
    memcpy(values, flat->former, n * sizeof *values);
    return TAGC_OK;
}

int tagc_fsdp_residual_is_bf16(const tagc_flat *flat) {
    return flat->former == NULL && tagc_reducer_residual_elems(flat->reducer) > 0 &&
           tagc_reducer_residual_format(flat->reducer) != TAGC_FORMAT_FP32;
}

tagc_status tagc_fsdp_residual_square(const tagc_flat *flat, double *square) {
    if (flat->former == NULL) return tagc_reducer_residual_square(flat->reducer, square);
    *square = tagc_sum_of_squares(flat->former, flat->n_padded);
    return TAGC_OK;
}

/* The values of this flat that this rank has not sent yet, laid out as its gradient. values (n_padded). Uses
 * full_gradient, which is free between steps. */
static tagc_status spread_residual(const tagc_fsdp *f, const tagc_flat *flat, float *values) {
    uint64_t n_residual = tagc_fsdp_residual_elems(flat);
    float *residual = flat->full_gradient;
    TAGC_TRY(tagc_fsdp_residual_read(flat, residual));
    for (uint64_t i = 0, n; i < flat->n_padded; i += n) {
        tagc_cover from =
            tagc_residual_cover(flat->n_padded, n_residual, f->world_size, f->n_owners, f->rank, i);
        n = from.n_run;
        for (uint64_t k = 0; k < n; k++) values[i + k] = from.covers ? residual[from.at + k] : -0.0f;
    }
    return TAGC_OK;
}

static tagc_status check_change(const tagc_fsdp *f, int flat, const tagc_reducer_options *options) {
    if (f->deferred != TAGC_OK) return tagc_fail(f->deferred, "%s", f->deferred_text);
    if (f->order.micro_step != 0)
        return tagc_fail(TAGC_ERR_STATE, "a change of exchange between a backward pass and its step");
    if (flat < 0 || flat >= f->tables.n_flats)
        return tagc_fail(TAGC_ERR_ARGUMENT, "flat is %d, allowed is 0 to %d", flat, f->tables.n_flats - 1);
    if (options == NULL) return tagc_fail(TAGC_ERR_ARGUMENT, "options is NULL");
    if (f->options.sharding == TAGC_SHARD_HYBRID && options->exchange != TAGC_EXCHANGE_DENSE &&
        options->exchange != TAGC_EXCHANGE_DIRECT)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "exchange is %d, but hybrid sharding supports only dense (%d) and direct (%d)",
                         options->exchange, TAGC_EXCHANGE_DENSE, TAGC_EXCHANGE_DIRECT);
    return TAGC_OK;
}

/* Every rank's number must be the same. */
static tagc_status agree_on_flat(tagc_fsdp *f, int flat) {
    double own = flat, *all = f->norms; /* (W), unused between steps */
    TAGC_TRY(tagc_comm_all_gather(f->comm, &own, sizeof own, all));
    for (int rank = 1; rank < f->world_size; rank++)
        if (all[rank] != all[0])
            return tagc_fail(TAGC_ERR_MISMATCH, "rank 0 changes the exchange of flat %.0f, rank %d of %.0f",
                             all[0], rank, all[rank]);
    return TAGC_OK;
}

/* Puts the unsent values into `fresh`. If that is not possible, sets *is_former: the next gradient gets them. */
static tagc_status hand_over(const tagc_flat *flat, tagc_reducer *fresh, const float *values,
                             int *is_former) {
    uint64_t n_before = tagc_reducer_residual_elems(flat->reducer),
             n_after = tagc_reducer_residual_elems(fresh);
    *is_former = flat->former != NULL || n_before > 0;
    if (*is_former && n_after == flat->n_padded) {
        *is_former = 0;
        return tagc_reducer_set_residual(fresh, values, n_after);
    }
    if (n_before == 0 || n_before != n_after) return TAGC_OK;
    *is_former = flat->former != NULL; /* then the reducer's own residual is zero */
    TAGC_TRY(tagc_reducer_get_residual(flat->reducer, flat->full_gradient, n_before));
    return tagc_reducer_set_residual(fresh, flat->full_gradient, n_after);
}

tagc_status tagc_fsdp_change_exchange(tagc_fsdp *f, int index, const tagc_flat *wanted) {
    tagc_flat *flat = &f->tables.flats[index], changed = *wanted;
    tagc_reducer *fresh = NULL;
    int is_former = 0;
    float *values = malloc(flat->n_padded * sizeof *values);
    tagc_status status = TAGC_OK;
    if (values == NULL)
        status = tagc_fail(TAGC_ERR_MEMORY, "no memory for a residual of %llu values",
                           (unsigned long long)flat->n_padded);
    status = tagc_agree(f->comm, status);
    if (status == TAGC_OK) {
        tagc_reducer_options asked;
        tagc_gatherer_options gatherer;
        tagc_fsdp_exchange_options(f, &changed, &asked, &gatherer);
        changed.ranks_per_host = asked.ranks_per_host;
        status = tagc_reducer_create(f->comm, &asked, &fresh);
        if (status == TAGC_OK) status = tagc_reducer_set_steps(fresh, tagc_reducer_steps(flat->reducer));
    }
    if (status == TAGC_OK) {
        status = spread_residual(f, flat, values);
        if (status == TAGC_OK) status = hand_over(flat, fresh, values, &is_former);
        status = tagc_agree(f->comm, status);
    }
    if (status != TAGC_OK) {
        tagc_reducer_destroy(fresh);
        free(values);
        return status;
    }
    tagc_fsdp_drop_former(f, flat);
    f->memory.residuals += stored_bytes(fresh) + (is_former ? flat->n_padded * sizeof(float) : 0);
    f->memory.residuals -= stored_bytes(flat->reducer);
    tagc_reducer_destroy(flat->reducer);
    *flat = changed;
    flat->reducer = fresh;
    flat->former = is_former ? values : NULL;
    if (!is_former) free(values);
    if (!flat->is_followed) tagc_fsdp_drop_moment(f, flat);
    return TAGC_OK;
}

tagc_status tagc_fsdp_change_reducer(tagc_fsdp *f, const tagc_flat *wanted) {
    tagc_reducer_options options;
    tagc_gatherer_options gatherer;
    uint64_t n_before = stored_bytes(wanted->reducer);
    tagc_fsdp_exchange_options(f, wanted, &options, &gatherer);
    TAGC_TRY(tagc_agree(f->comm, tagc_reducer_change(wanted->reducer, &options)));
    f->memory.residuals += stored_bytes(wanted->reducer) - n_before;
    return TAGC_OK;
}

tagc_status tagc_fsdp_set_exchange(tagc_fsdp *f, int index, const tagc_reducer_options *options) {
    TAGC_TRY(tagc_agree(f->comm, check_change(f, index, options)));
    TAGC_TRY(agree_on_flat(f, index));
    tagc_flat changed = f->tables.flats[index];
    changed.asked = *options;
    changed.is_asked = 1;
    changed.is_followed = 0;
    return tagc_fsdp_change_exchange(f, index, &changed);
}
