/* The codes of code.h over many fragments at once: all rows of a unit, or of several units. On a processor a batch is a loop
 * over its rows. On a GPU it is a fixed number of kernel launches, whatever the number of rows: one launch per fragment would
 * cost more than its work.
 *
 * A maker makes batches. "cpu" is always there; "cuda" is libtagc-cuda.so, loaded when it is asked for. Both give the same
 * bytes and the same sums.
 *
 * A batch is made once for the options of its rows. Its arrays can be replaced between runs. A run allocates nothing. It reads
 * arrays and writes results in the memory that its maker works in: for "cuda" the GPU's, in the order of the stream that
 * it is given; the host learns of results when it copies them. Launches of a run can be captured into a graph. */
#ifndef TAGC_GPU_BATCH_H
#define TAGC_GPU_BATCH_H

#include "gpu/slot.h"

#define TAGC_BATCH_ABI 1u

typedef enum tagc_batch_kind {
    TAGC_BATCH_ENCODE = 0,
    TAGC_BATCH_ENCODE_SUMS = 1,
    TAGC_BATCH_VALIDATE = 2, /* one body per row */
    TAGC_BATCH_DECODE = 3,
} tagc_batch_kind;

/* One fragment. The functions of tagc_code describe each array. A kind ignores arrays that it does not name. */
typedef struct tagc_batch_row {
    tagc_code_options options;
    const float *gradient, *residual_in; /* encode */
    float *residual_out;                 /* encode */
    float *sums;                         /* encode_sums, decode */
    float *error;                        /* encode_sums */
    float scale;                         /* decode; the `unscale` of encode_sums */
    uint8_t *body;                       /* encode, encode_sums: max_bytes of it */
    const tagc_body *bodies; /* decode (n_bodies); validate (1); the list itself is in host memory */
    int n_bodies;            /* decode: at most what it was when the batch was made */
    int add;                 /* decode */
    /* Where the arrays are, and read when the batch runs: */
    const uint64_t *lengths; /* validate, decode: (n_bodies) instead of those in `bodies`; or NULL */
    const int *stop;         /* decode: not 0: as if n_bodies were 0; or NULL */
} tagc_batch_row;

/* What validate finds. A body with several damages has the first of them. */
typedef enum tagc_damage {
    TAGC_DAMAGE_NONE = 0,
    TAGC_DAMAGE_POSITIONS = 1,
    TAGC_DAMAGE_LENGTH = 2,
    TAGC_DAMAGE_VALUES = 3,
} tagc_damage;

/* Of a row. */
typedef struct tagc_batch_result {
    tagc_encoded encoded; /* encode, encode_sums */
    int nonfinite;        /* decode: what tagc_code.decode returns */
    int damage;           /* validate: a tagc_damage */
} tagc_batch_result;

/* Deltas (delta.h) over many arrays at once. */
typedef enum tagc_delta_kind {
    TAGC_DELTA_ENCODE = 0, /* values, base -> body */
    TAGC_DELTA_APPLY = 1,  /* body, out: the replica */
} tagc_delta_kind;

typedef struct tagc_delta_row {
    int bits; /* 8, 4 or 2 */
    size_t n;
    const float *values, *base; /* (n); base may be NULL */
    float *out;                 /* (n) */
    uint8_t *body;              /* tagc_delta_bytes(bits, n), which apply only reads */
} tagc_delta_row;

typedef struct tagc_batch tagc_batch;
typedef struct tagc_delta_batch tagc_delta_batch;

/* Headers of slots (slots.h). Whatever the arguments point to is where the arrays are. The order of a step: _seal; and
 * on their owner's rank _open, a batch that validates, _judge, a batch that decodes, _judge. */
typedef struct tagc_slots_maker {
    size_t (*work_bytes)(uint32_t n_slots);
    /* In front of bodies of which results (n_slots) tell. Fragments begin the verdict anew; a body of sums is left out where the
     * verdict says that nothing counts. */
    tagc_status (*seal)(const tagc_slots_form *form, uint8_t *slots, const tagc_batch_result *results,
                        tagc_slots_verdict *verdict, void *work, void *stream);
    /* Slot i is of rank i. lengths (n_slots): of bodies that count, else 0. */
    tagc_status (*open)(const tagc_slots_form *form, const uint8_t *slots, uint64_t *lengths,
                        tagc_slots_verdict *verdict, void *work, void *stream);
    /* Damages, of bodies whose length is not 0 (lengths NULL: of all), and what is not finite. stop: 1 where the verdict says that nothing
     * counts. */
    tagc_status (*judge)(const tagc_slots_form *form, const tagc_batch_result *results, uint32_t n,
                         const uint64_t *lengths, tagc_slots_verdict *verdict, int *stop, void *stream);
    /* Nothing, unless the verdict says that nothing counts: then residual becomes `before`, and output NaN. */
    tagc_status (*settle)(const tagc_slots_verdict *agreed, const float *before, float *residual,
                          size_t n_residual, float *output, size_t n_output, void *stream);
} tagc_slots_maker;

typedef struct tagc_batch_maker {
    unsigned abi; /* TAGC_BATCH_ABI */
    const char *name;
    /* Loads all kernels on the current device. A runtime may otherwise load a kernel at its first launch and first wait for all
     * earlier work of the device. If that work waits for the thread that launches, neither ends. */
    tagc_status (*prepare)(void);
    /* Bytes that a batch needs where its arrays are, TAGC_ALIGNMENT-aligned. n_threads: of the pool. */
    size_t (*work_bytes)(tagc_batch_kind kind, const tagc_batch_row *rows, size_t n_rows, int n_threads);
    /* rows (n_rows) are copied, and so are lists of bodies by "cuda"; results (n_rows): where the arrays are, of every run.
     * pool: of "cpu", may be NULL; stream: of "cuda", for copies to work and for runs. */
    tagc_status (*create)(tagc_batch_kind kind, const tagc_batch_row *rows, size_t n_rows,
                          tagc_batch_result *results, void *work, tagc_pool *pool, void *stream,
                          tagc_batch **out);
    /* Other arrays for the same options, from the next run on. Not while a graph is captured. */
    tagc_status (*point)(tagc_batch *batch, const tagc_batch_row *rows, tagc_batch_result *results);
    tagc_status (*run)(tagc_batch *batch);
    void (*destroy)(tagc_batch *batch); /* accepts NULL */
    const char *(*last_error)(void);    /* of the calling thread, after a call that failed */

    /* The same of deltas. results (n_rows): of encode 1 where a difference is not finite, whose block of 256 then has a scale
     * of NaN and any codes; else 0. */
    size_t (*delta_work_bytes)(const tagc_delta_row *rows, size_t n_rows);
    tagc_status (*delta_create)(tagc_delta_kind kind, const tagc_delta_row *rows, size_t n_rows, int *results,
                                void *work, void *stream, tagc_delta_batch **out);
    tagc_status (*delta_point)(tagc_delta_batch *batch, const tagc_delta_row *rows, int *results);
    tagc_status (*delta_run)(tagc_delta_batch *batch);
    void (*delta_destroy)(tagc_delta_batch *batch); /* accepts NULL */

    const tagc_slots_maker *slots;
} tagc_batch_maker;

extern const tagc_batch_maker tagc_batch_cpu;
extern const tagc_slots_maker tagc_slots_cpu;

/* The maker of this name, "cpu" or "cuda". TAGC_ERR_UNSUPPORTED, with what is missing, where this machine does not have it.
 * libtagc-cuda.so is looked for in the file that TAGC_CUDA_LIBRARY names, else beside libtagc, else where the system
 * looks for libraries. */
tagc_status tagc_batch_maker_of(const char *name, const tagc_batch_maker **out);

#endif
