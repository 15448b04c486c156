/* --exchange auto: compression where it pays on this link, with this machine, as measured while training goes on.
 *
 *   1  the engine starts dense; link and codec are measured before the first step
 *   2  a few dense steps say what computing takes
 *   3  the cost model chooses an exchange per flat: the mildest that is about as fast as any
 *   4  the choice runs for a few steps, in turns with dense; it stays only where it is faster
 *   5  a settled iteration time that changes for long starts again at 2
 *
 * A search takes 5 to 30 steps, at most half of them slower than dense; the next begins 60 steps later or never.
 *
 * All ranks take the same decisions from the same numbers. Losses then depend on times, so two runs are not the same
 * bit for bit. */
#ifndef TAGC_AUTO_AUTO_H
#define TAGC_AUTO_AUTO_H

#include "fsdp/fsdp.h"
#include "gpt2/gpt2.h"

typedef struct tagc_auto tagc_auto;

typedef struct tagc_auto_setup {
    tagc_comm *comm;
    tagc_fsdp *fsdp;
    tagc_fsdp_options engine; /* as the engine was made: what compressed and mild flats do where it pays */
    tagc_gpt2_config model;
    int n_batch, n_tokens; /* of a rank and micro-step */
    void (*say)(void *context, const char *line);
    void *context;
} tagc_auto_setup;

/* Collective. *out is NULL on failure. */
tagc_status tagc_auto_create(const tagc_auto_setup *setup, tagc_auto **out);
/* Collective, after every step, which took wall_s from end to end: what an engine leaves under way at its end counts. */
tagc_status tagc_auto_step(tagc_auto *a, const tagc_fsdp_stats *stats, double wall_s);
/* 1 when no measurement is under way. */
int tagc_auto_is_settled(const tagc_auto *a);
void tagc_auto_destroy(tagc_auto *a); /* accepts NULL */

#endif
