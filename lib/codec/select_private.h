/* What a selection holds between its sweeps; for select.c and select_settle.c only. */
#ifndef TAGC_CODEC_SELECT_PRIVATE_H
#define TAGC_CODEC_SELECT_PRIVATE_H

#include "codec/select_kernels.h"
#include "codec/select_sample.h"
#include "core/memory.h"

#include <stdatomic.h>

#define TAGC_SELECT_BLOCK                                                                                    \
    16384 /* elements; few enough that a block's candidates are still in cache after its sweep */

typedef struct tagc_select_block {
    uint32_t owner;                         /* the thread that streamed it */
    uint32_t candidate_begin, n_candidates; /* in the lists of its owner */
    uint32_t band_begin, n_band;
    uint32_t n_sent, n_ties; /* certainly above the threshold, and equal to it */
    uint32_t out_begin;      /* in the caller's indices and values */
} tagc_select_block;

typedef struct tagc_select_share { /* of one thread */
    uint32_t *candidate_indices;   /* (n_room) */
    float *candidate_values;       /* (n_room) */
    float *band;                   /* (n_room) */
    uint32_t *radix;               /* (N_RADIX) */
    size_t n_candidates, n_band;
    uint32_t max_bits;
    char padding[TAGC_ALIGNMENT];
} tagc_select_share;

typedef struct tagc_selector {
    const tagc_select_kernels *kernels;
    tagc_addends addends;
    const float *gradient, *residual_in; /* (n), or NULL: in other formats, read from the addends */
    float *residual_out;                 /* (n), or NULL: acc is not written */
    void *stored_out; /* a row that gets what is not a candidate, and the rest when it is settled; or NULL */
    uint32_t seed;    /* of stored_out */
    tagc_pool *pool;
    struct tagc_selector *self; /* in the scratch, where it waits to be settled */
    size_t n_sent;
    int is_written;    /* stored_out has what is not a candidate, and each share has the candidates */
    uint32_t *indices; /* (k) */
    float *values;     /* (k) */
    size_t n, k, n_blocks;
    int beyond_cache; /* the residual will have left the cache before it is read again */
    int bypass;       /* and not in place: the sweep writes around the cache */
    int leave;        /* acc stays in the residual everywhere */

    tagc_sample_shape shape;
    uint32_t *sample, *buckets; /* of the prediction */
    tagc_select_block *blocks;  /* (n_blocks) */
    tagc_select_share *shares;  /* (n_threads) */
    size_t most_in_block;       /* elements */
    size_t n_room;              /* candidates of one thread; 0 where none can be sent, or all are */
    atomic_size_t next_block;

    uint32_t t_lo, t_hi; /* predicted */
    int from_acc;        /* the band could not be used: search acc */
    uint32_t base, prefix, threshold;
    int shift, shift_prefix; /* of the present radix level */
    uint32_t n_digits;
} tagc_selector;

#endif
