/* Two bounds around the k-th largest |gradient + residual|, predicted from a sample; for select.c only. */
#ifndef TAGC_CODEC_SELECT_SAMPLE_H
#define TAGC_CODEC_SELECT_SAMPLE_H

#include "codec/addends.h"
#include <stddef.h>
#include <stdint.h>

/* How the sample is spread over n elements: `unit` neighbours in each window of `stride` units. In large arrays a unit is a
 * line of memory, because each costs a fetch. In small ones it is a single element, so that clusters of large elements do
 * not widen the bounds. */
typedef struct tagc_sample_shape {
    size_t unit, stride, n_windows; /* n_windows 0: nothing is sampled */
    double expected;                /* how many of the sampled elements belong to the k largest */
    int bucket_shift;               /* of the bits of |acc| for the histogram */
} tagc_sample_shape;

tagc_sample_shape tagc_sample_shape_of(size_t n, size_t k);

size_t tagc_sample_elems(const tagc_sample_shape *shape);
size_t tagc_sample_buckets(const tagc_sample_shape *shape); /* of the histogram; 0 where nothing is sampled */

/* The most of n elements that lie above the lower bound: the expected number and four standard deviations. */
double tagc_sample_candidates(const tagc_sample_shape *shape, size_t n);

/* Takes the sample and lowers t_lo and t_hi to bounds that hold in all but one of some thousand arrays. If the sample is too
 * small for that, leaves them as they are. Overwrites sample (_elems) and buckets (_buckets). */
void tagc_sample_predict(const tagc_sample_shape *shape, const tagc_addends *addends, uint32_t *sample,
                         uint32_t *buckets, uint32_t *t_lo, uint32_t *t_hi);

#endif
