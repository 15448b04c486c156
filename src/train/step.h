/* One optimizer step of a model over an engine: what tagc train repeats and tagc bench times. */
#ifndef TAGC_TRAIN_STEP_H
#define TAGC_TRAIN_STEP_H

#include "fsdp/fsdp.h"
#include "gpt2/gpt2.h"
#include "launch/busy.h"

typedef struct tagc_training {
    tagc_fsdp *fsdp;
    tagc_gpt2 *model;
    tagc_busy *busy;
    int *tokens, *targets; /* (n_batch, n_tokens) */
    int n_batch, n_tokens;
    int64_t n_micro_steps;
    /* Fills tokens and targets for the next micro-step. */
    tagc_status (*next_batch)(void *context, int *tokens, int *targets);
    void *context;
} tagc_training;

/* Collective. loss: of this rank, mean over micro-steps. busy: of the streams, in this step. */
tagc_status tagc_training_step(const tagc_training *training, double lr, double *loss, tagc_fsdp_stats *stats,
                               tagc_busy_times *busy);

#endif
