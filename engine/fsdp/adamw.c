/* The owner's update. Operations are in the order of torch.optim.AdamW, so that the results differ by fp32
 * rounding at most. The loops are simple enough for the compiler to vectorise. */
#include "fsdp/adamw.h"
#include <math.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define BLOCK_ELEMS 1024 /* stays in the first-level cache between the three loops */

/* sqrtf may set errno, so a compiler does not vectorise it. Both versions round correctly. */
static void take_roots(float *x, size_t n) {
    size_t i = 0;
#if defined(__SSE2__)
    for (; i + 4 <= n; i += 4) _mm_storeu_ps(x + i, _mm_sqrt_ps(_mm_loadu_ps(x + i)));
#endif
    for (; i < n; i++) x[i] = sqrtf(x[i]);
}

typedef struct factors {
    float scale, keep, weight1, beta2, weight2, step, root_correction2, epsilon;
} factors;

static void update_block(const factors *f, float *restrict master, float *restrict moment1,
                         float *restrict moment2, const float *restrict gradient, size_t n) {
    float scaled[BLOCK_ELEMS], root[BLOCK_ELEMS];
    const float *mean = scaled; /* without a first moment, the gradient itself */
    if (moment1 != NULL) {
        mean = moment1;
        for (size_t i = 0; i < n; i++) {
            float g = gradient[i] * f->scale,
                  change = g - moment1[i]; /* starts from the nearer end, as torch's lerp does */
            moment1[i] =
                f->weight1 < 0.5f ? moment1[i] + f->weight1 * change : g - change * (1.0f - f->weight1);
            root[i] = moment2[i] = moment2[i] * f->beta2 + f->weight2 * g * g;
        }
    } else {
        for (size_t i = 0; i < n; i++) {
            float g = scaled[i] = gradient[i] * f->scale;
            root[i] = moment2[i] = moment2[i] * f->beta2 + f->weight2 * g * g;
        }
    }
    take_roots(root, n);
    for (size_t i = 0; i < n; i++) {
        float denominator = root[i] / f->root_correction2 + f->epsilon;
        master[i] = master[i] * f->keep - f->step * (mean[i] / denominator);
    }
}

void tagc_adamw_update(const tagc_adamw *adamw, float *master, float *moment1, float *moment2,
                       const float *gradient, size_t n) {
    double t = (double)adamw->n_updates;
    const factors f = {
        .scale = (float)adamw->gradient_scale,
        .keep = (float)(1.0 - adamw->lr * adamw->weight_decay),
        .weight1 = (float)(1.0 - adamw->beta1),
        .beta2 = (float)adamw->beta2,
        .weight2 = (float)(1.0 - adamw->beta2),
        .step = (float)(adamw->lr / (1.0 - pow(adamw->beta1, t))),
        .root_correction2 = (float)sqrt(1.0 - pow(adamw->beta2, t)),
        .epsilon = (float)adamw->epsilon,
    };
    for (size_t at = 0; at < n; at += BLOCK_ELEMS)
        update_block(&f, master + at, moment1 != NULL ? moment1 + at : NULL, moment2 + at, gradient + at,
                     n - at < BLOCK_ELEMS ? n - at : BLOCK_ELEMS);
}

double tagc_sum_of_squares(const float *x, size_t n) {
    enum { LANES = 16 }; /* independent sums, so that the compiler can vectorise */
    double sums[LANES] = {0}, total = 0;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (size_t lane = 0; lane < LANES; lane++) sums[lane] += (double)x[i + lane] * (double)x[i + lane];
    for (; i < n; i++) sums[i % LANES] += (double)x[i] * (double)x[i];
    for (size_t lane = 0; lane < LANES; lane++) total += sums[lane];
    return total;
}
