/* The schedule that GPT-2 is usually trained with. */
#include "fsdp/learning_rate.h"
#include <math.h>

double tagc_learning_rate_cosine(uint64_t step, uint64_t n_warmup, uint64_t n_steps, double max_lr,
                                 double min_lr) {
    /* Never zero, so that no step is wasted. */
    if (step < n_warmup) return max_lr * (double)(step + 1) / (double)(n_warmup + 1);
    if (step >= n_steps) return min_lr;
    double progress = (double)(step - n_warmup) / (double)(n_steps - n_warmup);
    return min_lr + 0.5 * (1.0 + cos(3.14159265358979323846 * progress)) * (max_lr - min_lr);
}
