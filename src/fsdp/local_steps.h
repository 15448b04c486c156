/* Local steps: each site trains alone, and every local_steps steps the sites exchange how far their parameters moved.
 *
 *   step, step, ... step   the ranks of a site exchange gradients with each other only
 *   round                  pseudo-gradient = anchor - master; its mean over the sites, by reducers with error feedback
 *                          outer step: velocity = momentum * velocity + mean
 *                                      anchor  -= lr * (momentum > 0 ? mean + momentum * velocity : mean)
 *                          master = anchor, the same bits on all sites
 *
 * A round exchanges one fragment: one of local_fragments ranges of neighbouring tensors of about equal size. Fragment i of P
 * has its round (i + 1) / P of local_steps after all sites had the same parameters, and then every local_steps steps. With
 * local_delay, training goes on while a round is under way, and so many steps later
 *                          master += (new anchor - old anchor) + pseudo-gradient
 * which keeps what the site learnt meanwhile; the next pseudo-gradient contains it.
 *
 * A site is one rank (sharding NONE), or the ranks of a host (HYBRID, which is FULL within the site). The engine of a
 * site is an ordinary engine over the comm of the site. A rank exchanges with the ranks of the same place in other sites. */
#ifndef TAGC_FSDP_LOCAL_STEPS_H
#define TAGC_FSDP_LOCAL_STEPS_H

#include "core/status.h"
#include "fsdp/checkpoint_format.h"
#include "fsdp/fsdp.h"

typedef struct tagc_local_part {
    int class_;                  /* tagc_class */
    int first_member, n_members; /* in tagc_local_steps.members */
    uint64_t at;                 /* in the arrays */
    uint64_t n_elems, n_padded;  /* that this rank exchanges */
    uint64_t n_residual;         /* n_padded, or 0 if the exchange keeps none */
    tagc_reducer_options options;
    tagc_reducer *reducer;
} tagc_local_part;

typedef struct tagc_local_fragment {
    int first_part, n_parts;
    uint64_t at, n_elems; /* in the arrays */
    uint64_t due;         /* steps of a round modulo local_steps, when its round begins */
    uint64_t n_steps;     /* since its pseudo-gradient was last taken */
    uint64_t n_away;      /* steps whose pseudo-gradient is under way; 0: none is */
    int is_launched;      /* 0 after loading, until the next step */
    int n_begun;          /* reducers under way */
    tagc_status failure;  /* of this rank, told to the others at the end of the round */
    char failure_text[TAGC_ERROR_TEXT_BYTES];
} tagc_local_fragment;

typedef struct tagc_local_steps {
    tagc_fsdp_options options; /* the caller's; fsdp->options say how ranks of a site exchange */
    tagc_comm *between;        /* the ranks of the same place in their sites, (n_sites,) */
    int n_sites, site;
    int n_fragments;
    tagc_local_fragment *fragments; /* (n_fragments) */
    int n_parts;            /* of each fragment, matrices: one for each unit and class; vectors: one */
    tagc_local_part *parts; /* (n_parts) */
    int *members;           /* (n_tensors) tensors, part by part */
    uint64_t n_elems;       /* of the arrays below, padding included */
    float *anchor;          /* masters after the last round */
    float *velocity;        /* NULL without momentum */
    float *delta, *mean;    /* of the rounds under way */
    float *before;          /* residuals before these rounds; NULL without a delay */
    void *memory;
    uint64_t n_steps, n_rounds; /* modulo local_steps, since sites had the same parameters; applied so far */
    int has_anchor;
    uint64_t sent_before[TAGC_N_LEGS], received_before[TAGC_N_LEGS]; /* at the beginning of the step */
} tagc_local_steps;

/* Ranks of a site. */
int tagc_local_site_ranks(const tagc_fsdp_options *options);
/* How a site's own engine exchanges. */
tagc_fsdp_options tagc_local_inner(const tagc_fsdp_options *options);

/* Makes fsdp->local with the parts of the engine's tables, without communication. _connect makes its arrays and reducers. */
tagc_status tagc_local_lay_out(tagc_fsdp *fsdp, const tagc_fsdp_options *options, int n_sites);
/* Collective over all ranks. Needs fsdp->local->between. */
tagc_status tagc_local_connect(tagc_fsdp *fsdp);
void tagc_local_destroy(tagc_fsdp *fsdp); /* of fsdp->local, which may be NULL */

/* Call it when masters were replaced: drops the rounds under way, and clears velocity and residuals. */
void tagc_local_reset(tagc_fsdp *fsdp);
/* Collective, before the first gather of a step. */
tagc_status tagc_local_begin_step(tagc_fsdp *fsdp);
/* Call it after an update. Collective over the site, or over all ranks if a round ends. */
tagc_status tagc_local_end_step(tagc_fsdp *fsdp);

/* ---- checkpoints ---- */

/* Number of values in this rank's file: anchor, velocity, residuals, pseudo-gradients under way in `state`. */
uint64_t tagc_local_n_saved(const tagc_local_steps *local, const tagc_manifest_local *state);
/* out->fragments is malloc'ed. */
tagc_status tagc_local_describe(const tagc_local_steps *local, tagc_manifest_local *out);
/* Calls write(context, values, n) for each of its arrays in turn. */
tagc_status tagc_local_write(const tagc_local_steps *local,
                             tagc_status (*write)(void *context, const float *values, uint64_t n),
                             void *context);
/* Whether _load would accept it. Changes nothing. */
tagc_status tagc_local_check_saved(const tagc_fsdp *fsdp, const tagc_manifest *manifest);
/* values: as _write passed them. */
tagc_status tagc_local_load(tagc_fsdp *fsdp, const tagc_manifest_local *saved, const float *values);

#endif
