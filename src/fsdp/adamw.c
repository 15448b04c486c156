/* The owner's update. Operations are in the order of torch.optim.AdamW, so that the two agree to fp32
 * rounding; the loop is plain so that the compiler turns it into vectors. */
#include "fsdp/internal.h"
#include <math.h>

/* sqrtf may set errno, which would keep the loop scalar. */
#if defined(__GNUC__) && !defined(__clang__)
#define NO_MATH_ERRNO __attribute__((optimize("no-math-errno")))
#else
#define NO_MATH_ERRNO
#endif

NO_MATH_ERRNO void tagc_adamw_update(const tagc_adamw *adamw, float *restrict master, float *restrict moment1,
                                     float *restrict moment2, const float *restrict gradient, size_t n) {
    double t = (double)adamw->n_updates;
    const float scale = (float)adamw->gradient_scale;
    const float keep = (float)(1.0 - adamw->lr * adamw->weight_decay);
    const float weight1 = (float)(1.0 - adamw->beta1);
    const float beta2 = (float)adamw->beta2, weight2 = (float)(1.0 - adamw->beta2);
    const float step = (float)(adamw->lr / (1.0 - pow(adamw->beta1, t)));
    const float root_correction2 = (float)sqrt(1.0 - pow(adamw->beta2, t));
    const float epsilon = (float)adamw->epsilon;
    for (size_t i = 0; i < n; i++) {
        float g = gradient[i] * scale;
        float m = moment1[i] + weight1 * (g - moment1[i]);
        float v = moment2[i] * beta2 + weight2 * g * g;
        float denominator = sqrtf(v) / root_correction2 + epsilon;
        master[i] = master[i] * keep - step * (m / denominator);
        moment1[i] = m;
        moment2[i] = v;
    }
}

double tagc_sum_of_squares(const float *x, size_t n) {
    enum { LANES = 16 }; /* independent sums, for the compiler's vectors */
    double sums[LANES] = {0}, total = 0;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (size_t lane = 0; lane < LANES; lane++) sums[lane] += (double)x[i + lane] * (double)x[i + lane];
    for (; i < n; i++) sums[i % LANES] += (double)x[i] * (double)x[i];
    for (size_t lane = 0; lane < LANES; lane++) total += sums[lane];
    return total;
}
