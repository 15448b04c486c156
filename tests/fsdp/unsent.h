/* What an engine's ranks have not sent yet, by tensor. */
#ifndef TAGC_TEST_UNSENT_H
#define TAGC_TEST_UNSENT_H

#include "toy.h"

#include "fsdp/internal.h"

/* The reducer of a flat. */
static inline tagc_reducer *reducer_of(const tagc_fsdp *f, int flat) {
    return tagc_fsdp_part(f, &f->tables.flats[flat])->reducer;
}

/* Calls with each element of a tensor and what this rank holds back of it, 0 where another rank of the host has it. Added up over
 * ranks it is what is missing in the sum of their gradients. */
static inline void add_unsent(const tagc_fsdp *f, int tensor, double sign, double *sum) {
    const tagc_member *member = &f->model->tensors[tensor];
    uint64_t n;
    float *residual = copy_of_residual(member->part->reducer, &n);
    for (uint64_t i = 0; n > 0 && i < member->n_elems; i++) {
        uint64_t at = tagc_part_find(member->part, member, i);
        if (at != UINT64_MAX)
            sum[i] += sign * (double)residual[at] * f->model->n_places; /* of a host's mean */
    }
    free(residual);
}

#endif
