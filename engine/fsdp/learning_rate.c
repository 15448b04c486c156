/* The usual learning-rate schedules of GPT-2. */
#include "fsdp/learning_rate.h"

#include <math.h>

double tagc_learning_rate_at(const tagc_learning_rate *rate, uint64_t step) {
    if (step <= rate->n_warmup) return rate->highest * (double)step / (double)(rate->n_warmup + 1);
    if (step >= rate->n_steps) return rate->last;
    uint64_t n_fall = rate->n_steps - rate->n_warmup; /* steps after the warm-up */
    if (rate->schedule == TAGC_RATE_WSD && rate->n_decay < n_fall) n_fall = rate->n_decay;
    if (rate->n_steps - step >= n_fall) return rate->highest;
    double left = (double)(rate->n_steps - step) / (double)n_fall;
    if (rate->schedule == TAGC_RATE_COSINE) left = 0.5 * (1.0 - cos(3.14159265358979323846 * left));
    return rate->last + left * (rate->highest - rate->last);
}
