/* The update of the owner's part of a tensor. */
#ifndef TAGC_FSDP_ADAMW_H
#define TAGC_FSDP_ADAMW_H

#include <stddef.h>
#include <stdint.h>

typedef struct tagc_adamw {
    double lr, beta1, beta2, epsilon, weight_decay;
    double gradient_scale; /* clipping and the mean over micro-steps */
    uint64_t n_updates;    /* including this one */
} tagc_adamw;
/* moment1 may be NULL if beta1 is 0. */
void tagc_adamw_update(const tagc_adamw *adamw, float *master, float *moment1, float *moment2,
                       const float *gradient, size_t n);
double tagc_sum_of_squares(const float *x, size_t n); /* in double, in a fixed order */

#endif
