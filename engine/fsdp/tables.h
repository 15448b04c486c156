/* The tables of an engine's layout: the places of tensors, the flats and units, and the memory that they use.
 *
 * One arena holds everything that a rank keeps:
 *
 *   per flat   master [| first moment] | second moment | gradient [| received]   (n_owned) each
 *   buffers      parameters (n_padded) of the gathered units; absent for SHARD_NONE, whose master is the whole flat
 *   buffers      gradients (W, shard) of the units in backward or under way
 *
 * If beta1 is 0, a flat has no first moment. If the schedule lets it fall to 0, the moment lies in memory of its own, which is
 * freed then.
 *
 * A unit's buffer never changes. Units of one layer take turns with a few buffers, so that neighbours have different ones.
 * A unit that spans several layers has a buffer of its own, and so have all units if nothing is released. */
#ifndef TAGC_FSDP_TABLES_H
#define TAGC_FSDP_TABLES_H

#include "fsdp/fsdp.h"
#include "fsdp/layout.h"
#include "tagc/schedule.h"

/* The place of a tensor, and the part that this rank owns: elements [first, first + n) of the tensor are elements
 * [at, at + n) of the owned part of the flat. */
typedef struct tagc_place {
    int unit, flat;
    uint64_t offset; /* in the flat */
    uint64_t first, at, n;
} tagc_place;

typedef struct tagc_flat {
    int unit, class_;            /* tagc_class */
    int first_member, n_members; /* in tagc_fsdp.members */
    uint64_t n_elems, n_padded;  /* without and with padding */
    uint64_t first_owned, n_owned;
    uint64_t unit_offset;                                    /* in the unit's buffers */
    float *full, *full_gradient;                             /* (n_padded), in the buffers */
    float *master, *moment1, *moment2, *gradient, *received; /* (n_owned); moment1 NULL: beta1 is 0 */
    void *fading_moment1;                /* where moment1 lies, if the schedule lets beta1 fall to 0 */
    struct tagc_flat_gatherer *gatherer; /* NULL: every rank has all */
    /* If it follows the schedule: the plan in use. */
    int is_followed;
    tagc_schedule_plan plan;
} tagc_flat;

typedef struct tagc_buffer {
    float *values;
    uint64_t n_elems; /* of its largest unit */
} tagc_buffer;

typedef struct tagc_tables {
    int n_tensors, n_units, n_flats, n_buffers, n_gradient_buffers;
    tagc_tensor_info *tensors; /* (n_tensors) */
    tagc_place *places;        /* (n_tensors) */
    int *members;              /* (n_tensors) tensors, flat by flat */
    tagc_layout_unit *units;   /* in the order of the forward pass */
    int *backward_order;       /* (n_units) */
    tagc_flat *flats;
    tagc_buffer *buffers, *gradient_buffers;
} tagc_tables;

#endif
