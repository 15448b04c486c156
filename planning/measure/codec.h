/* Times memory alone, and selecting, indexing, encoding and decoding. */
#ifndef TAGC_MEASURE_CODEC_H
#define TAGC_MEASURE_CODEC_H

#include "core/pool.h"
#include "launch/ranks.h"

/* ---- the floor: read a gradient and a residual, write the residual ---- */

typedef struct tagc_floor {
    tagc_comm *comm;
    tagc_pool *pool;
    float *gradient, *residual; /* (n) */
    size_t n;
} tagc_floor;

/* n_params: of the model; the arrays have a quarter of that, within limits. Call _close after failure, too. */
tagc_status tagc_floor_open(tagc_comm *comm, uint64_t n_params, int n_threads, tagc_floor *out);
void tagc_floor_close(tagc_floor *floor);
/* Collective: seconds per element, mean over ranks, which all run at once; the median of a few turns. */
tagc_status tagc_floor_measure(tagc_floor *floor, double *s_per_elem);

/* ---- reducers and gathers ---- */

typedef struct tagc_reducer_times {
    double phase_s[TAGC_N_PHASES]; /* mean over ranks */
    double wall_s;                 /* of the slowest rank */
    uint64_t n_union, n_returned;
    double n_sent; /* mean over ranks */
} tagc_reducer_times;

/* Collective: times one step of a reducer. gradient (n_elems of the reducer); output as the reducer requires. */
tagc_status tagc_time_reducer(tagc_comm *comm, tagc_reducer *reducer, const float *gradient, float *output,
                              tagc_reducer_times *out);

typedef struct tagc_codec_time {
    uint64_t n_elems, n_union,
        n_returned; /* the last two: of the last step; 0 if the exchange does not count it */
    double n_sent;  /* by one rank in that step, mean over ranks */
    double phase_s[TAGC_N_PHASES], to_floor[TAGC_N_PHASES], total_to_floor;
} tagc_codec_time;

typedef struct tagc_codec_bench {
    tagc_rank *rank; /* learns of a failure before its objects are destroyed */
    tagc_floor floor;
    float *gradient, *output; /* (n_most) */
    uint8_t *body;            /* of a gather of n_most_gathered elements */
    uint64_t seed;
} tagc_codec_bench;

typedef struct tagc_codec_setup {
    /* Elements: of the model, of a unit, of a unit that is gathered in codes. */
    uint64_t n_params, n_most, n_most_gathered;
    int n_threads, n_here; /* ranks on this rank's host */
} tagc_codec_setup;

tagc_status tagc_codec_bench_open(tagc_rank *rank, const tagc_codec_setup *setup, tagc_codec_bench *out);
void tagc_codec_bench_close(tagc_codec_bench *bench);
/* Collective. A reducer with these options; n_elems is theirs. */
tagc_status tagc_measure_reducer(tagc_codec_bench *bench, const tagc_reducer_options *options,
                                 tagc_codec_time *out);
/* Collective. Encodes a shard and decodes a unit. kind: a tagc_gather_kind from LOSSLESS on. */
tagc_status tagc_measure_gather(tagc_codec_bench *bench, int kind, uint64_t n_elems, tagc_codec_time *out);

#endif
