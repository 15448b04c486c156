/* Variations of error feedback that training may want, kept apart from the engine so that each can go without a trace.
 *
 *   decay         residual *= decay before every step: what waited too long fades
 *   warm-up       the kept share falls from 25 % to its target over some steps (deep gradient compression)
 *   momentum      u = m u + (1 - m) g enters the selection instead of g; what was sent is cleared from u, so that old
 *                 momentum does not follow it (deep gradient compression's correction)
 *   low rank      what lies in few directions of a fragment is sent beside the selection (lowrank.c)
 *   bf16          the residual is rounded after every step: what half the memory would cost in loss
 *
 * Their own state (u, the low-rank directions) is not in a checkpoint; the place in the warm-up is the caller's to set. */
#ifndef TAGC_FSDP_RECIPE_H
#define TAGC_FSDP_RECIPE_H

#include "core/status.h"
#include "fsdp/fsdp.h"

typedef struct tagc_flat tagc_flat;
typedef struct tagc_low_rank tagc_low_rank;

/* Of a flat. */
typedef struct tagc_recipe {
    float *momentum; /* (n_padded) u, or NULL */
    float *before;   /* (n_padded) residual + what enters, to see what was sent; or scratch; or NULL */
    tagc_low_rank *low_rank; /* or NULL */
    double sparsity;         /* in use; the target is the flat's option */
    uint64_t n_bytes;
} tagc_recipe;

tagc_status tagc_recipes_check(const tagc_fsdp_options *options);
/* A flat's reducer has just been made. */
tagc_status tagc_recipe_make(const tagc_fsdp *fsdp, tagc_flat *flat);
void tagc_recipe_free(tagc_flat *flat);
/* Before the first gather of a step. */
tagc_status tagc_recipes_begin_step(tagc_fsdp *fsdp);
/* Around the exchange of a flat whose reducer is idle; gradient (n_padded) may be changed, and to output (n_owned) added. */
tagc_status tagc_recipe_before(tagc_fsdp *fsdp, tagc_flat *flat, float *gradient);
tagc_status tagc_recipe_after(tagc_fsdp *fsdp, tagc_flat *flat, int nonfinite, float *output);

/* ---- lowrank.c ---- */

/* For shards of `shard` values. */
tagc_status tagc_low_rank_create(int world_size, int rank, uint64_t shard, tagc_low_rank **out,
                                 uint64_t *n_bytes);
void tagc_low_rank_destroy(tagc_low_rank *low_rank);
/* Collective, with no exchange under way: takes the low-rank part of gradient + residual out of the gradient. */
tagc_status tagc_low_rank_take(tagc_fsdp *fsdp, tagc_low_rank *low_rank, const float *residual,
                               float *gradient);
/* Adds what all took to the owner's mean. */
void tagc_low_rank_give(const tagc_fsdp *fsdp, tagc_low_rank *low_rank, float *output);

#endif
