/* A guard over compressed training: if residuals or the loss show that too little is sent, it raises the share for a
 * while. It is a pure function of numbers that all ranks have, so ranks agree without a message. */
#ifndef TAGC_FSDP_GUARD_H
#define TAGC_FSDP_GUARD_H

#include <stdint.h>

typedef struct tagc_guard {
    double max_ratio;  /* limit of the residual's norm / the gradient's, both smoothed */
    double max_factor; /* at which every value is kept */
    double factor;     /* in use: 1, 2, 4 ... max_factor */
    double residual_norm, grad_norm, loss,
        spread;                       /* smoothed; spread: mean distance of the loss from its mean */
    uint64_t n_seen, n_calm, n_since; /* steps; the last two count since the last alarm and the last change */
} tagc_guard;

typedef enum tagc_guard_change {
    TAGC_GUARD_SAME = 0,
    TAGC_GUARD_RESIDUAL = 1, /* factor doubled: the residual grew too large for the gradient */
    TAGC_GUARD_LOSS = 2,     /* factor doubled: the loss has jumped */
    TAGC_GUARD_CALM = 3      /* factor halved */
} tagc_guard_change;

/* kept: the share that is sent of compressed gradients, (0, 1]. */
void tagc_guard_init(tagc_guard *guard, double max_ratio, double kept);
/* Continues from the state of `before`; its limits are not read. */
void tagc_guard_resume(tagc_guard *guard, const tagc_guard *before);
/* Call it after every step, with the loss and the norms of that step. */
tagc_guard_change tagc_guard_update(tagc_guard *guard, double loss, double grad_norm, double residual_norm);

#endif
