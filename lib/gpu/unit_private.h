/* Inside of a unit: unit.c has its life, its agreement and exchanges on the host, ahead_unit.c exchanges with kernels; model.c makes
 * units of a tagc_model, whose exchanges lib/unit has. */
#ifndef TAGC_GPU_UNIT_PRIVATE_H
#define TAGC_GPU_UNIT_PRIVATE_H

#include "gpu/ahead.h"

#define TAGC_NOWHERE SIZE_MAX
#define TAGC_UNCOVERED UINT64_MAX /* a sample that the input does not have: 0 */
enum { TAGC_WHAT_BYTES = 256 };

/* Runs in the device's memory. */
typedef struct run_list {
    const tagc_listed_run *runs;
    uint32_t n_runs;
    uint64_t n; /* elements */
} run_list;

typedef struct unit_part {
    tagc_unit_part of; /* its runs are the unit's own */
    /* On the host: in floats of the step's work memory. With kernels: in bytes of the part's room on the device. TAGC_NOWHERE: the
     * reducer reads the input, or writes the unit's output, itself. */
    size_t at_gradient, at_output;
    /* With kernels. */
    tagc_ahead *ahead;        /* NULL: the reducer's arrays are on the host */
    size_t at_here, at_there; /* of the rest of its room */
    run_list packs, unpacks;
} unit_part;

/* A unit of a tagc_model (model.c). */
typedef struct tagc_model_place tagc_model_place;

struct tagc_unit {
    tagc_queue *queue;
    tagc_job *job;
    tagc_model_place *model; /* NULL: a unit of tagc_unit_create */
    int output_element;      /* tagc_element */
    int may_overlap;         /* input and output may be the same array */
    tagc_unit_options of;
    char what[TAGC_WHAT_BYTES];
    unit_part *parts;
    tagc_run *runs;
    int64_t (*everyone)[TAGC_UNIT_WORDS]; /* (ranks of the larger comm) */
    uint32_t *numbers, *counts;
    uint64_t *places;
    float *samples;
    size_t n_samples, n_gradients, n_outputs; /* the latter of work memory */
    /* With kernels. */
    tagc_store *store;               /* of these */
    uint32_t n_adds;                 /* parts whose reducers have kernels */
    run_list sampled;                /* from the input to n_samples floats */
    int has_squares[MAX_BUFFERS];    /* of the exchange that has that buffer */
    atomic_uint n_enqueued, n_ended; /* exchanges */
};

/* tagc_element of what the reducer of a part reads. */
static inline int tagc_unit_reads(const tagc_unit_part *of) {
    return of->reducer->options.gradient == TAGC_FORMAT_BF16 ? TAGC_ELEMENT_BF16 : TAGC_ELEMENT_FP32;
}

/* 1 if a reducer of these options has kernels. */
int tagc_unit_wants_kernels(const tagc_unit_options *of);
/* tagc_unit_create, of a model. parts may be none: then it has no kernels, and its exchanges copy n_bytes_in and n_bytes_out. */
tagc_status tagc_unit_make(tagc_queue *queue, tagc_model_place *model, const tagc_unit_options *options,
                           int output_element, int may_overlap, tagc_unit **out);
tagc_status tagc_unit_make_bare(tagc_queue *queue, tagc_model_place *model, size_t n_bytes_in,
                                size_t n_bytes_out, tagc_unit **out);

/* With kernels: the most pieces of work that an exchange puts into streams behind its first flag. */
size_t tagc_unit_n_places(const tagc_unit *unit);
/* Makes what is in the device's memory, for a unit that is laid out. After a failure call _end_ahead. */
tagc_status tagc_unit_make_ahead(tagc_unit *unit);
void tagc_unit_end_ahead(tagc_unit *unit);
/* Runs the reducers of a ticket, or only tells the device of a failure. */
tagc_status tagc_unit_reduce_ahead(const ticket *one, tagc_status failure, const char *text);

/* The room of the unit, and of a part. */
gpu_room tagc_unit_own_room(const ticket *one);
gpu_room tagc_unit_room_of(const ticket *one, uint32_t p);
/* Makes the orders of the unit and of all its parts negative. */
void tagc_unit_refuse(const ticket *one);
/* In pinned memory, of a part without kernels. */
void *tagc_unit_gradient_here(const gpu_room *room);
float *tagc_unit_sums_here(const unit_part *one, const gpu_room *room);
/* Of the gradient of a part; the exchange has squares. */
double tagc_unit_square_here(const ticket *one, uint32_t p);
/* The sum of squares of a kernel. */
double tagc_squares_sum(const double *values);

#endif
