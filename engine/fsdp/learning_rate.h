/* The learning rate of each step. */
#ifndef TAGC_FSDP_LEARNING_RATE_H
#define TAGC_FSDP_LEARNING_RATE_H

#include <stdint.h>

typedef enum tagc_rate_schedule {
    TAGC_RATE_COSINE = 0, /* half a cosine */
    TAGC_RATE_WSD = 1     /* warm-up, stable, decay: a straight line over the last n_decay steps */
} tagc_rate_schedule;

typedef struct tagc_learning_rate {
    tagc_rate_schedule schedule; /* of the fall from `highest` to `last` after the warm-up */
    uint64_t n_warmup;           /* steps of a straight line from 0 to `highest` */
    uint64_t n_decay;
    uint64_t n_steps;
    double highest;
    double last; /* of step n_steps and later ones */
} tagc_learning_rate;

/* The rate of step 1, 2, ..., n_steps. It is 0 only if `last` is. */
double tagc_learning_rate_at(const tagc_learning_rate *rate, uint64_t step);

#endif
