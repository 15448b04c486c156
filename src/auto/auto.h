/* --exchange auto: compresses only if that makes steps faster on this link and machine, measured while training runs.
  *   1  the engine starts dense; link and codec are measured before the first step
 *   2  a few dense steps measure what computing takes
 *   3  the cost model chooses an exchange per flat: the mildest that is about as fast as the fastest
 *   4  the choice and dense run a few steps each, in turns; the choice stays only if it is faster
 *   5  if the iteration time of a settled run changes for long, the search starts again at 2
 *
 * A search takes 5 to 30 steps, at most half of them slower than dense. The next begins 60 steps later or never.
 *
 * All ranks decide alike from the same numbers. Because decisions depend on times, two runs may differ in their bits. */
#ifndef TAGC_AUTO_AUTO_H
#define TAGC_AUTO_AUTO_H

#include "fsdp/fsdp.h"
#include "gpt2/gpt2.h"

typedef struct tagc_auto tagc_auto;

typedef struct tagc_auto_setup {
    tagc_comm *comm;
    tagc_fsdp *fsdp;
    tagc_fsdp_options
        engine; /* as the engine was made: what compressed and mild flats use if compression is chosen */
    tagc_gpt2_config model;
    int n_batch, n_tokens; /* of a rank and micro-step */
    void (*say)(void *context, const char *line);
    void *context;
} tagc_auto_setup;

/* Collective. *out is NULL on failure. */
tagc_status tagc_auto_create(const tagc_auto_setup *setup, tagc_auto **out);
/* Collective, after every step. wall_s: from the end of the step before to the end of this one, since a step may leave
 * gathers under way. */
tagc_status tagc_auto_step(tagc_auto *a, const tagc_fsdp_stats *stats, double wall_s);
/* 1 if no measurement is under way. */
int tagc_auto_is_settled(const tagc_auto *a);
void tagc_auto_destroy(tagc_auto *a); /* accepts NULL */

/* ---- --bucket-elems auto: the size of units for this link and machine, before the engine is made ---- */

/* Collective. Measures link, codec and computing for about a second, then the cost model chooses bucket_elems: 0 if no
 * size is forecast to gain 2 %. chooses_exchange: 1 if --exchange is auto, too. All ranks return the same. Does not read
 * the setup's fsdp. */
tagc_status tagc_bucket_choose(const tagc_auto_setup *setup, int chooses_exchange, int64_t *bucket_elems);

#endif
