/* The layout of an engine without the engine: units, flats, buffers and memory of any model, world size and options, computed
 * by the code that lays out a real engine. For planning. */
#ifndef TAGC_FSDP_LAYOUT_H
#define TAGC_FSDP_LAYOUT_H

#include "fsdp/fsdp.h"

typedef struct tagc_layout_unit {
    char name[TAGC_TENSOR_NAME_BYTES];
    int first_flat, n_flats, n_tensors;
    int n_uses;      /* in a forward pass */
    int spans;       /* used in more than one layer: stays gathered between forward and backward */
    int position[2]; /* in the order of the forward and of the backward pass */
    int buffer, gradient_buffer; /* two units of one buffer cannot be gathered, or in backward, at once */
    uint64_t n_elems, n_padded;  /* without and with padding */
    uint64_t backward_key;       /* descends in the order of the backward pass */
    int n_exchanged;             /* of an engine: in this step */
} tagc_layout_unit;

typedef struct tagc_layout {
    int world_size, n_tensors, n_units, n_flats, n_buffers, n_gradient_buffers;
    int *unit_of_tensor; /* (n_tensors) */
    int *backward_order; /* (n_units) */
    tagc_layout_unit *units;
    tagc_layout_flat *flats;
    tagc_paper_options paper; /* of the reducers that use them */
    uint64_t n_params, n_compressed, n_mild;
    tagc_fsdp_memory memory; /* as tagc_fsdp_memory_used reports; the same on every rank */
    uint64_t n_owned;        /* elements of the masters of one rank, with padding */
} tagc_layout;

/* Local. On failure *out is NULL. */
tagc_status tagc_layout_create(const tagc_tensor_info *tensors, int n_tensors,
                               const tagc_fsdp_options *options, int world_size, tagc_layout **out);
void tagc_layout_destroy(tagc_layout *layout); /* accepts NULL */
/* 1: parameters go from host to host, then within each. */
int tagc_fsdp_gathers_in_levels(const tagc_fsdp_options *options);

#endif
