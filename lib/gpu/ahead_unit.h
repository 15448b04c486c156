/* Inside of a unit of a tagc_model (model.c): what its exchange puts into streams. With kernels, where what lies there (ahead_unit.c). */
#ifndef TAGC_GPU_AHEAD_UNIT_H
#define TAGC_GPU_AHEAD_UNIT_H

#include "gpu/ahead.h"

#define TAGC_NOWHERE SIZE_MAX
#define TAGC_UNCOVERED UINT64_MAX /* a sample that the input does not have: 0 */

/* `length` elements, from number `from` of one array to number `to` of another. */
typedef struct tagc_run {
    uint64_t from, to, length;
} tagc_run;

/* Runs in the device's memory. */
typedef struct run_list {
    const tagc_listed_run *runs;
    uint32_t n_runs;
    uint64_t n; /* elements */
} run_list;

typedef struct unit_part {
    tagc_reducer *reducer; /* without kernels, or in the store of the unit's others */
    /* Elements of its gradient and of its output. */
    uint64_t n_gradient, n_output;
    /* Which elements of the input its gradient gets, in the order of the gradient; the rest of it is 0. And which elements of its output
     * the output gets. */
    run_list packs, unpacks;
    /* In bytes of the part's room on the device. TAGC_NOWHERE: the reducer reads the input, or writes the output, itself. */
    size_t at_gradient, at_output;
    tagc_ahead *ahead;        /* NULL: the reducer's arrays are on the host */
    size_t at_here, at_there; /* of the rest of its room */
} unit_part;

typedef struct tagc_model_place tagc_model_place;

struct tagc_unit {
    tagc_queue *queue;
    tagc_job *job;
    tagc_model_place *model;
    /* With kernels. */
    int gradient, sum; /* tagc_element of input and output */
    int may_overlap;   /* they may be the same array */
    float factor;      /* of sums */
    unit_part *parts;
    uint32_t n_parts;
    tagc_schedule *schedule;
    uint32_t *numbers, n_sampled; /* of what it samples */
    size_t n_samples;             /* of all these */
    run_list sampled;             /* from the input to n_samples floats */
    tagc_store *store;            /* of the reducers */
    uint32_t n_adds;              /* parts whose reducers have kernels */
    int has_squares[MAX_BUFFERS]; /* of the exchange that has that buffer */
};

/* What is copied from, while a unit with kernels is made. */
typedef struct unit_part_options {
    tagc_reducer *reducer;
    uint64_t n_gradient, n_output;
    const tagc_run *packs, *unpacks;
    uint64_t n_packs, n_unpacks;
} unit_part_options;

typedef struct unit_options {
    const char *what; /* for messages */
    int gradient, sum, may_overlap;
    float factor;
    uint32_t n_parts;
    const unit_part_options *parts;
    uint64_t n_input, n_output; /* elements */
    /* Parameters whose samples the schedule gets: their numbers, the samples of each, and where the input has all of these. */
    uint32_t n_sampled;
    tagc_schedule *schedule;
    const uint32_t *numbers, *counts;
    const uint64_t *places;
} unit_options;

/* With kernels. The first call for a larger unit than before waits for all enqueued exchanges, as tagc_job_create does. */
tagc_status tagc_unit_make(tagc_queue *queue, tagc_model_place *model, const unit_options *options,
                           tagc_unit **out);
/* Without them: its exchanges copy n_bytes_in and n_bytes_out. */
tagc_status tagc_unit_make_bare(tagc_queue *queue, tagc_model_place *model, size_t n_bytes_in,
                                size_t n_bytes_out, tagc_unit **out);
/* All its exchanges must be finished. */
void tagc_unit_destroy(tagc_unit *unit);

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
