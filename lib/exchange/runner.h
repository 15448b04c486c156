/* Where a reducer or gatherer works: in host memory or, with tables of lib/gpu, in a device's. A reducer always has both tables, so no
 * other file asks which one it is. */
#ifndef TAGC_EXCHANGE_RUNNER_H
#define TAGC_EXCHANGE_RUNNER_H

#include "codec/batch.h"
#include "core/memory.h"

/* The memory of gradient, output and residual. Each function waits until it is done. Their context is heap.context. */
typedef struct tagc_arrays {
    tagc_heap heap;
    const tagc_batch_maker *maker; /* works in this memory */
    /* 1: the processor can read and write them in place. */
    int is_here;
    /* TAGC_ERR_ARGUMENT unless `array`, called `what`, is in this memory. */
    tagc_status (*check)(void *context, const void *array, const char *what);
    tagc_status (*read)(void *context, void *to, const void *from, size_t n_bytes);
    tagc_status (*write)(void *context, void *to, const void *from, size_t n_bytes);
    /* n_bytes: a multiple of 2 */
    tagc_status (*fill)(void *context, void *array, uint32_t word, uint64_t n_bytes);
} tagc_arrays;

extern const tagc_arrays tagc_host_arrays;

struct tagc_reducer;
struct tagc_gatherer;

/* Runs the batches of a direct reducer. A failure is noted in the step (tagc_note_failure). */
typedef struct tagc_runner {
    /* For messages: "kernels". */
    const char *name;
    /* 1: its steps are ahead (tagc_reducer_begin_ahead), and bring the memory for a new residual. A batch has the rows of all hosts, and
     * _add waits for all bodies. 0: one row at a time. */
    int is_ahead;
    /* Made when the reducer is laid out, and ended with that layout. _end accepts what is half-made. */
    tagc_status (*make)(struct tagc_reducer *r);
    void (*end)(struct tagc_reducer *r);
    /* The residual may be another one: the reducer is made, or was changed. NULL: nothing to note. */
    void (*note_residual)(struct tagc_reducer *r);
    /* Encodes the fragment of turn t into its row. */
    void (*encode)(struct tagc_reducer *r, int t, tagc_encoded *out);
    /* Decodes and adds bodies [first, end) of the list tagc_direct.bodies, without those whose bytes are NULL. */
    void (*add)(struct tagc_reducer *r, int first, int end);
    void (*encode_sums)(struct tagc_reducer *r, uint8_t *body, tagc_encoded *out);
    /* Decodes the whole list but the own row. Where bytes are NULL, the sums are zeros or stay. */
    void (*decode_sums)(struct tagc_reducer *r);
} tagc_runner;

/* Encodes and decodes the rows of a gatherer. A failure is noted in its device_failure. */
typedef struct tagc_gather_runner {
    tagc_status (*make)(struct tagc_gatherer *gatherer);
    void (*end)(struct tagc_gatherer *gatherer); /* accepts what is half-made */
    /* Encodes the own row in this gather's format. Returns 1 if something is not finite. */
    int (*encode_row)(struct tagc_gatherer *gatherer, uint8_t *body);
    /* Decodes the first n_rows of gatherer->decoded. */
    void (*decode_rows)(struct tagc_gatherer *gatherer, int n_rows);
    /* Of a row of the replica. */
    uint64_t (*checksum)(struct tagc_gatherer *gatherer, int row);
} tagc_gather_runner;

extern const tagc_gather_runner tagc_host_gathers;

#endif
