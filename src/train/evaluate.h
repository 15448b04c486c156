/* The validation loss over all ranks. */
#ifndef TAGC_TRAIN_EVALUATE_H
#define TAGC_TRAIN_EVALUATE_H

#include "data/data.h"
#include "fsdp/fsdp.h"
#include "gpt2/gpt2.h"
#include "launch/ranks.h"

typedef struct tagc_evaluation {
    tagc_rank *rank;
    tagc_gpt2 *model;
    tagc_fsdp *fsdp;
    tagc_loader *loader; /* unshuffled */
    int n_batch, n_tokens;
    uint64_t n_batches;    /* per rank */
    int *tokens, *targets; /* (n_batch, n_tokens) scratch */
} tagc_evaluation;

/* Collective. Mean loss of the first n_batches * W batches of the loader, the same on all ranks. */
tagc_status tagc_evaluate(const tagc_evaluation *evaluation, double *loss);

/* Sequences per rank and batch: n_batch, or fewer, at least 1, where the file would be read more than once to fill that. */
int tagc_evaluate_batch(const tagc_tokens *tokens, int n_batch, int n_tokens, int world_size);
/* At most this many batches are in the loader once over. */
uint64_t tagc_evaluate_batches(const tagc_loader *loader, int n_batch, int world_size, uint64_t wanted);

#endif
