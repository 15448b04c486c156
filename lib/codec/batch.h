/* The codes of code.h over many fragments at once: the rows of one or several units. On a processor a batch is a loop over its rows.
 * On a GPU it is a fixed number of kernel launches, whatever the number of rows: one launch per fragment would cost more than its work.
 *
 * A maker makes batches. The processor's is tagc_batch_cpu; lib/gpu has others. All give the same bytes and the same sums.
 *
 * A batch is made once for the options of its rows. Its arrays can be replaced between runs. A run allocates nothing. It reads
 * arrays and writes results in the memory that its maker works in: for a GPU in its memory, in the order of the stream that
 * it is given; the host learns of results when it copies them. Launches of a run can be captured into a graph. */
#ifndef TAGC_CODEC_BATCH_H
#define TAGC_CODEC_BATCH_H

#include "codec/code.h"

typedef enum tagc_batch_kind {
    TAGC_BATCH_ENCODE = 0,
    TAGC_BATCH_DECODE = 1,
} tagc_batch_kind;

/* One fragment. The functions of tagc_code describe each array. A kind ignores arrays that it does not name. */
typedef struct tagc_batch_row {
    tagc_code_options options;
    const void *gradient, *residual_in; /* encode */
    void *residual_out;                 /* encode */
    uint32_t seed;                      /* encode */
    uint8_t *body;                      /* encode: max_bytes of it */
    int adds;                           /* decode */
    float *sums;                        /* decode */
    float scale;                        /* decode */
    const tagc_body *bodies;            /* decode (n_bodies), sound; the list itself is in host memory */
    int n_bodies;                       /* decode: at most what it was when the batch was made */
    void *work;                         /* the processor's, instead of that of _create; or NULL */
    /* Where the arrays are, and read when the batch runs: */
    const uint64_t *lengths; /* decode: (n_bodies) instead of those in `bodies`; or NULL */
    const int *stop;         /* decode: not 0: as if n_bodies were 0; or NULL */
} tagc_batch_row;

/* Of a row. */
typedef struct tagc_batch_result {
    tagc_encoded encoded; /* encode */
    int nonfinite;        /* decode: what tagc_code.decode returns */
} tagc_batch_result;

typedef struct tagc_batch tagc_batch;

typedef struct tagc_batch_maker {
    /* Bytes that a batch needs where its arrays are, TAGC_ALIGNMENT-aligned. n_threads: of the pool. */
    size_t (*work_bytes)(tagc_batch_kind kind, const tagc_batch_row *rows, size_t n_rows, int n_threads);
    /* rows (n_rows) are copied, and a GPU's maker copies their lists of bodies, too. results (n_rows): where the arrays are, of every
     * run. pool: the processor's, may be NULL; stream: a GPU's, for copies to work and for runs. */
    tagc_status (*create)(tagc_batch_kind kind, const tagc_batch_row *rows, size_t n_rows,
                          tagc_batch_result *results, void *work, tagc_pool *pool, void *stream,
                          tagc_batch **out);
    /* Other arrays for the same options, from the next run on. Not while a graph is captured. */
    tagc_status (*point)(tagc_batch *batch, const tagc_batch_row *rows, tagc_batch_result *results);
    tagc_status (*run)(tagc_batch *batch);
    /* The most launches of one _point and _run of such rows, of which only shapes are read. */
    size_t (*n_launches)(tagc_batch_kind kind, const tagc_batch_row *rows, size_t n_rows);
    void (*destroy)(tagc_batch *batch); /* accepts NULL */
    const char *(*last_error)(void);    /* of the calling thread, after a call that failed */
} tagc_batch_maker;

extern const tagc_batch_maker tagc_batch_cpu;

#endif
