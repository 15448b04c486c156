/* What libtagc-cuda.so has, or a test in its place: kernels for batches of the codes (codec/batch.h), for deltas, for runs of
 * elements and for messages of arrays. All give the same bytes and sums as the processor. */
#ifndef TAGC_GPU_MAKER_H
#define TAGC_GPU_MAKER_H

#include "codec/batch.h"
#include "gpu/message.h"
#include "tagc/device.h"

#define TAGC_MAKER_ABI 8u

/* Deltas (delta.h) over many arrays at once. */
typedef enum tagc_delta_kind {
    TAGC_DELTA_ENCODE = 0, /* values, base -> body */
    TAGC_DELTA_APPLY = 1,  /* body, out: the replica */
} tagc_delta_kind;

typedef struct tagc_delta_row {
    int bits; /* 8, 4 or 2 */
    size_t n;
    const float *values;  /* (n) */
    const uint16_t *base; /* (n), bf16; may be NULL */
    uint16_t *out;        /* (n), bf16 */
    uint8_t *body;        /* tagc_delta_bytes(bits, n), which apply only reads */
} tagc_delta_row;

typedef struct tagc_delta_batch tagc_delta_batch;

/* As in tagc_batch_maker. results (n_rows): of encode 1 where a difference is not finite, whose block of 256 then has a scale of NaN
 * and any codes; else 0. */
typedef struct tagc_delta_maker {
    size_t (*work_bytes)(const tagc_delta_row *rows, size_t n_rows);
    tagc_status (*create)(tagc_delta_kind kind, const tagc_delta_row *rows, size_t n_rows, int *results,
                          void *work, void *stream, tagc_delta_batch **out);
    tagc_status (*point)(tagc_delta_batch *batch, const tagc_delta_row *rows, int *results);
    tagc_status (*run)(tagc_delta_batch *batch);
    void (*destroy)(tagc_delta_batch *batch); /* accepts NULL */
} tagc_delta_maker;

/* A run of elements in a list, whose runs have no gap between them if counted by `at`. */
typedef struct tagc_listed_run {
    uint64_t from, to; /* its first element in one array, and in the other */
    uint64_t at;       /* the elements of all runs before it */
} tagc_listed_run;

/* What _squares sums up: a residual as it is stored (codec/residual.h), rows of n values; and a gradient. Either may be NULL. */
typedef struct tagc_squared {
    const void *residual;
    int format, gradient_element;
    uint32_t n_rows;
    size_t n, row_bytes;
    const void *gradient; /* (n_gradient) */
    size_t n_gradient;
} tagc_squared;
enum { TAGC_N_SQUARES = 256 }; /* sums of squares of each, whose sum the caller takes */

/* Copies of runs between arrays of any tagc_element, and the end of an exchange of such arrays. Whatever the arguments point to is where the arrays are. */
typedef struct tagc_runs_maker {
    /* n: of all runs together. Each value is multiplied by `factor`. */
    tagc_status (*copy)(const tagc_listed_run *runs, uint32_t n_runs, uint64_t n, const void *from,
                        int from_element, void *to, int to_element, float factor, void *stream);
    /* Nothing, unless *is_void: then residual becomes `before`, and output NaN. residual_bytes: a multiple of two. */
    tagc_status (*settle)(const int *is_void, const void *before, void *residual, size_t residual_bytes,
                          float *output, size_t n_output, void *stream);
    /* Nothing, unless *is_void: then all bits of n_bytes, a multiple of two, are set, which is NaN in every element. */
    tagc_status (*spoil)(const int *is_void, void *array, size_t n_bytes, void *stream);
    /* squares (2, TAGC_N_SQUARES): of the residual, of the gradient. */
    tagc_status (*squares)(const tagc_squared *of, double *squares, void *stream);
} tagc_runs_maker;

/* An array of `n` values in few bits (tagc/blocks.h). */
typedef struct tagc_message_form {
    uint64_t n;
    int values, block; /* tagc_format; values per scale */
    int element;       /* tagc_element of the array: FP32 or BF16 */
    int is_stochastic;
    uint32_t seed, largest_scale; /* codec/values.h */
} tagc_message_form;

/* Whatever the arguments point to is where the arrays are. Calls with one state are of one stream. */
typedef struct tagc_messages_maker {
    tagc_status (*encode)(const tagc_message_form *form, const void *values, uint8_t *message,
                          tagc_blocks_state *state, void *stream);
    tagc_status (*decode)(const tagc_message_form *form, const uint8_t *message, void *values,
                          uint64_t number, tagc_blocks_state *state, void *stream);
} tagc_messages_maker;

typedef struct tagc_maker {
    unsigned abi; /* TAGC_MAKER_ABI */
    /* Loads all kernels on the current device. A runtime may otherwise load a kernel at its first launch and first wait for all
     * earlier work of the device. If that work waits for the thread that launches, neither ends. */
    tagc_status (*prepare)(void);
    const tagc_batch_maker *batches; /* its last_error is that of all calls */
    const tagc_delta_maker *deltas;
    const tagc_runs_maker *runs;
    const tagc_messages_maker *messages;
} tagc_maker;

/* The maker of libtagc-cuda.so, which is looked for in the file that TAGC_CUDA_LIBRARY names, else beside libtagc, else where the
 * system looks for libraries. TAGC_ERR_UNSUPPORTED, with what is missing, if this machine does not have it. */
tagc_status tagc_maker_load(const tagc_maker **out);

#endif
