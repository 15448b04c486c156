/* Learning rate by step. */
#ifndef TAGC_FSDP_LEARNING_RATE_H
#define TAGC_FSDP_LEARNING_RATE_H

#include <stdint.h>

/* Rises linearly over the first n_warmup steps to max_lr (reached at step n_warmup), then falls along half a
 * cosine to min_lr at step n_steps, and stays there. Steps count from 0. */
double tagc_learning_rate_cosine(uint64_t step, uint64_t n_warmup, uint64_t n_steps, double max_lr,
                                 double min_lr);

#endif
