/* Recipes: each is one function here and one call in the engine. */
#include "fsdp/recipe.h"
#include "fsdp/internal.h"
#include <math.h>

#define WARMUP_KEPT 0.25 /* the share that is kept at first */

tagc_status tagc_recipes_check(const tagc_fsdp_options *o) {
    const tagc_recipes *r = &o->recipes;
    if (!(r->residual_decay >= 0 && r->residual_decay <= 1))
        return tagc_fail(TAGC_ERR_ARGUMENT, "residual_decay is %g, allowed is [0, 1]", r->residual_decay);
    if (r->sparsity_warmup < 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "sparsity_warmup is %d, allowed is 0 or more",
                         r->sparsity_warmup);
    if (!(r->local_momentum >= 0 && r->local_momentum < 1))
        return tagc_fail(TAGC_ERR_ARGUMENT, "local_momentum is %g, allowed is [0, 1)", r->local_momentum);
    if (r->residual_bf16 != 0 && r->residual_bf16 != 1)
        return tagc_fail(TAGC_ERR_ARGUMENT, "residual_bf16 is %d, allowed is 0 or 1", r->residual_bf16);
    if (r->low_rank < 0 || r->low_rank > 64)
        return tagc_fail(TAGC_ERR_ARGUMENT, "low_rank is %d, allowed is 0 to 64", r->low_rank);
    int is_sharded = o->sharding == TAGC_SHARD_FULL || o->sharding == TAGC_SHARD_GRAD;
    if (r->low_rank > 0 && (!is_sharded || o->two_level || r->local_momentum > 0))
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "low_rank is %d, allowed without full or grad sharding, with two_level or"
                         " local_momentum is 0",
                         r->low_rank);
    if (r->local_momentum > 0 && (o->two_level || o->sharding == TAGC_SHARD_HYBRID))
        return tagc_fail(
            TAGC_ERR_UNSUPPORTED,
            "local_momentum is %g, allowed with two_level or hybrid sharding is 0: residuals belong"
            " to hosts",
            r->local_momentum);
    return TAGC_OK;
}

tagc_status tagc_recipe_make(const tagc_fsdp *f, tagc_flat *flat) {
    const tagc_fsdp_options *o = &f->options;
    tagc_recipe *recipe = &flat->recipe;
    void *memory;
    uint64_t n_low, n_residual, n_bytes = flat->n_padded * sizeof(float);
    tagc_reducer_residual(flat->reducer, &n_residual);
    recipe->sparsity = -1;
    if (n_residual == 0) return TAGC_OK;
    if (o->recipes.local_momentum > 0 && flat->class_ == TAGC_CLASS_COMPRESSED) {
        TAGC_TRY(tagc_memory_create(n_bytes, "local momentum", &memory));
        recipe->momentum = memory;
        recipe->n_bytes += n_bytes;
    }
    if (o->recipes.low_rank > 0 && flat->class_ == TAGC_CLASS_COMPRESSED) {
        TAGC_TRY(tagc_low_rank_create(f->world_size, o->recipes.low_rank,
                                      flat->n_padded / (uint64_t)f->world_size, &recipe->low_rank, &n_low));
        recipe->n_bytes += n_low;
    }
    if (recipe->momentum != NULL || o->recipes.residual_bf16) {
        TAGC_TRY(tagc_memory_create(n_bytes, "a recipe's scratch", &memory));
        recipe->before = memory;
        recipe->n_bytes += n_bytes;
    }
    return TAGC_OK;
}

void tagc_recipe_free(tagc_flat *flat) {
    tagc_memory_destroy(flat->recipe.momentum);
    tagc_memory_destroy(flat->recipe.before);
    tagc_low_rank_destroy(flat->recipe.low_rank);
}

/* ---- the kept share ---- */

static double kept_share(const tagc_fsdp *f, double target) {
    uint64_t n = (uint64_t)f->options.recipes.sparsity_warmup;
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
    double now = flat->recipe.sparsity < 0 ? reducer.sparsity : flat->recipe.sparsity;
    double wanted = 1 - kept_share(f, 1 - reducer.sparsity);
    if (wanted == now || fabs(wanted - now) < 1e-9) return TAGC_OK;
    TAGC_TRY(tagc_reducer_set_sparsity(flat->reducer, wanted));
    flat->recipe.sparsity = wanted;
    return TAGC_OK;
}

tagc_status tagc_recipes_begin_step(tagc_fsdp *f) {
    double decay = f->options.recipes.residual_decay;
    for (int i = 0; i < f->n_flats; i++) {
        tagc_flat *flat = &f->flats[i];
        if (flat->class_ == TAGC_CLASS_COMPRESSED) TAGC_TRY(set_sparsity(f, flat));
        if (decay != 1) TAGC_TRY(tagc_reducer_scale_residual(flat->reducer, decay));
    }
    f->n_steps_begun++;
    return TAGC_OK;
}

tagc_status tagc_fsdp_residual_norm(tagc_fsdp *f, double *norm) {
    double sum = 0;
    for (int i = 0; i < f->n_flats; i++) {
        uint64_t n;
        const float *residual = tagc_fsdp_residual(&f->flats[i], &n);
        /* A host's residual is of the sum over its ranks, of which each holds a part. */
        sum += tagc_sum_of_squares(residual, n) / f->flats[i].ranks_per_host;
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

/* ---- around an exchange ---- */

static int is_finite(const float *x, uint64_t n) {
    float sum = 0; /* x - x is 0, or NaN where x is not finite */
    for (uint64_t i = 0; i < n; i++) sum += x[i] - x[i];
    return sum == 0;
}

tagc_status tagc_recipe_before(tagc_fsdp *f, tagc_flat *flat, float *gradient) {
    float *u = flat->recipe.momentum, *before = flat->recipe.before;
    float m = (float)f->options.recipes.local_momentum;
    uint64_t n;
    const float *residual = tagc_reducer_residual(flat->reducer, &n);
    if (flat->recipe.low_rank != NULL && n == flat->n_padded)
        TAGC_TRY(tagc_low_rank_take(f, flat->recipe.low_rank, residual, gradient));
    if (u == NULL || n != flat->n_padded || !is_finite(gradient, n)) return TAGC_OK;
    for (uint64_t i = 0; i < flat->n_padded; i++) {
        gradient[i] = u[i] = m * u[i] + (1 - m) * gradient[i];
        before[i] = gradient[i] + residual[i]; /* the selection's own sum */
    }
    return TAGC_OK;
}

/* bfloat16 to nearest, ties to even. */
static float round_bf16(float x) {
    union {
        float value;
        uint32_t bits;
    } word = {.value = x};
    word.bits = (word.bits + 0x7fff + (word.bits >> 16 & 1)) & 0xffff0000;
    return isfinite(word.value) ? word.value : x;
}

tagc_status tagc_recipe_after(tagc_fsdp *f, tagc_flat *flat, int nonfinite, float *output) {
    float *u = flat->recipe.momentum, *before = flat->recipe.before;
    if (nonfinite) return TAGC_OK;
    uint64_t n;
    const float *residual = tagc_reducer_residual(flat->reducer, &n);
    if (flat->recipe.low_rank != NULL && n == flat->n_padded)
        tagc_low_rank_give(f, flat->recipe.low_rank, output);
    if (before == NULL) return TAGC_OK;
    /* Sent is what changed: also a value whose rounding error stayed behind. */
    for (uint64_t i = 0; u != NULL && n == flat->n_padded && i < n; i++)
        if (residual[i] != before[i]) u[i] = 0;
    if (!f->options.recipes.residual_bf16 || n == 0) return TAGC_OK;
    for (uint64_t i = 0; i < n; i++) before[i] = round_bf16(residual[i]);
    return tagc_reducer_set_residual(flat->reducer, before, n);
}
