/* The loops of kernels.h over vectors of LANES floats. Included by kernels.c once per instruction set, with
 * LANES, TARGET (a function attribute) and NAME(x) (the suffix) defined; hence no include guard. */

typedef float NAME(vec) __attribute__((vector_size(4 * LANES)));
typedef uint32_t NAME(uvec) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(ivec) __attribute__((vector_size(4 * LANES)));
#define VEC NAME(vec)
#define UVEC NAME(uvec)
#define IVEC NAME(ivec)
#define INLINE TARGET static inline __attribute__((always_inline))
#define KERNEL TARGET static

/* The first m floats at p, the rest `rest`. Only the last vector of a row has m < LANES. */
INLINE VEC NAME(load)(const float *p, size_t m, float rest) {
    VEC v;
    if (m >= LANES) {
        memcpy(&v, p, sizeof v);
        return v;
    }
    v = rest - (VEC){0};
    for (size_t i = 0; i < m; i++) v[i] = p[i];
    return v;
}

INLINE void NAME(store)(float *p, size_t m, VEC v) {
    if (m >= LANES)
        memcpy(p, &v, sizeof v);
    else
        for (size_t i = 0; i < m; i++) p[i] = v[i];
}

INLINE VEC NAME(choose)(IVEC mask, VEC yes, VEC no) {
    return (VEC)((mask & (IVEC)yes) | (~mask & (IVEC)no));
}

INLINE float NAME(sum)(VEC v) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}

/* exp(x) = 2^k exp(r) with r in [-ln 2 / 2, ln 2 / 2]. k * LN2_HIGH is exact. NaN stays NaN. */
INLINE VEC NAME(exp)(VEC x) {
    const VEC zero = {0};
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it leaves an integer in the low bits */
    const float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
    x = NAME(choose)(x < zero - 87.0f, zero - 87.0f, x);
    x = NAME(choose)(x > zero + 88.0f, zero + 88.0f, x);
    VEC shifted = x * 1.44269504f + round;
    VEC k = shifted - round;
    VEC r = (x - k * ln2_high) - k * ln2_low;
    VEC p = r * (1.0f / 5040) + (1.0f / 720);
    p = p * r + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
    UVEC exponent = ((UVEC)shifted - 0x4b400000u + 127u) << 23;
    return p * (VEC)exponent;
}

KERNEL void NAME(add)(const float *x, const float *z, float *y, size_t n) {
    for (size_t i = 0; i < n; i += LANES)
        NAME(store)(y + i, n - i, NAME(load)(x + i, n - i, 0) + NAME(load)(z + i, n - i, 0));
}

KERNEL void NAME(scale)(float factor, float *y, size_t n) {
    for (size_t i = 0; i < n; i += LANES) NAME(store)(y + i, n - i, NAME(load)(y + i, n - i, 0) * factor);
}

KERNEL float NAME(dot)(const float *x, const float *y, size_t n) {
    VEC sum = {0};
    for (size_t i = 0; i < n; i += LANES) sum += NAME(load)(x + i, n - i, 0) * NAME(load)(y + i, n - i, 0);
    return NAME(sum)(sum);
}

KERNEL void NAME(sum_rows)(const float *x, size_t n_rows, size_t n_cols, float *sum) {
    for (size_t i = 0; i < n_cols; i += LANES) {
        VEC total = {0};
        for (size_t row = 0; row < n_rows; row++) total += NAME(load)(x + row * n_cols + i, n_cols - i, 0);
        NAME(store)(sum + i, n_cols - i, NAME(load)(sum + i, n_cols - i, 0) + total);
    }
}

KERNEL void NAME(norm_statistics)(const float *x, size_t n, float *mean, float *rstd) {
    VEC sum = {0}, squares = {0};
    for (size_t i = 0; i < n; i += LANES) sum += NAME(load)(x + i, n - i, 0);
    float m = NAME(sum)(sum) / (float)n;
    for (size_t i = 0; i < n; i += LANES) {
        VEC centred = NAME(load)(x + i, n - i, m) - m;
        squares += centred * centred;
    }
    *mean = m;
    *rstd = 1.0f / sqrtf(NAME(sum)(squares) / (float)n + TAGC_NORM_EPSILON);
}

KERNEL void NAME(norm)(const float *x, float mean, float rstd, const float *weight, const float *bias,
                       float *y, size_t n) {
    for (size_t i = 0; i < n; i += LANES) {
        size_t m = n - i;
        VEC normal = (NAME(load)(x + i, m, 0) - mean) * rstd;
        NAME(store)(y + i, m, normal * NAME(load)(weight + i, m, 0) + NAME(load)(bias + i, m, 0));
    }
}

KERNEL void NAME(norm_backward)(const float *x, float mean, float rstd, const float *weight, const float *dy,
                                float *dx, float *dweight, float *dbias, size_t n) {
    VEC sum = {0}, product = {0};
    for (size_t i = 0; i < n; i += LANES) {
        size_t m = n - i;
        VEC normal = (NAME(load)(x + i, m, mean) - mean) * rstd;
        VEC d = NAME(load)(dy + i, m, 0);
        VEC dnormal = d * NAME(load)(weight + i, m, 0);
        sum += dnormal;
        product += dnormal * normal;
        NAME(store)(dweight + i, m, NAME(load)(dweight + i, m, 0) + d * normal);
        NAME(store)(dbias + i, m, NAME(load)(dbias + i, m, 0) + d);
    }
    float mean_d = NAME(sum)(sum) / (float)n, mean_product = NAME(sum)(product) / (float)n;
    for (size_t i = 0; i < n; i += LANES) {
        size_t m = n - i;
        VEC normal = (NAME(load)(x + i, m, mean) - mean) * rstd;
        VEC dnormal = NAME(load)(dy + i, m, 0) * NAME(load)(weight + i, m, 0);
        VEC d = (dnormal - mean_d - normal * mean_product) * rstd;
        NAME(store)(dx + i, m, NAME(load)(dx + i, m, 0) + d);
    }
}

/* gelu(x) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3): the tanh form without its cancellation.
 */
#define TWO_ROOT_TWO_OVER_PI 1.59576912f

INLINE VEC NAME(gelu_gate)(VEC x) {
    VEC u2 = x * (x * x * (0.044715f * TWO_ROOT_TWO_OVER_PI) + TWO_ROOT_TWO_OVER_PI);
    return 1.0f / (NAME(exp)(-u2) + 1.0f);
}

KERNEL void NAME(gelu)(const float *x, float *y, size_t n) {
    for (size_t i = 0; i < n; i += LANES) {
        VEC v = NAME(load)(x + i, n - i, 0);
        NAME(store)(y + i, n - i, v * NAME(gelu_gate)(v));
    }
}

KERNEL void NAME(gelu_backward)(const float *x, float *y, float *dy, size_t n) {
    for (size_t i = 0; i < n; i += LANES) {
        size_t m = n - i;
        VEC v = NAME(load)(x + i, m, 0);
        VEC gate = NAME(gelu_gate)(v);
        VEC du2 = v * v * (3 * 0.044715f * TWO_ROOT_TWO_OVER_PI) + TWO_ROOT_TWO_OVER_PI;
        VEC value = v * gate;
        NAME(store)(y + i, m, value);
        NAME(store)(dy + i, m, NAME(load)(dy + i, m, 0) * (gate + value * (1.0f - gate) * du2));
    }
}

INLINE float NAME(max)(const float *x, size_t n) {
    VEC max = x[0] - (VEC){0};
    for (size_t i = 0; i < n; i += LANES) {
        VEC v = NAME(load)(x + i, n - i, x[0]);
        max = NAME(choose)(v > max, v, max);
    }
    float best = max[0];
    for (int i = 1; i < LANES; i++) best = max[i] > best ? max[i] : best;
    return best;
}

KERNEL float NAME(exp_row)(float *x, size_t n, float *max) {
    float top = NAME(max)(x, n);
    VEC sum = {0};
    for (size_t i = 0; i < n; i += LANES) {
        VEC e = NAME(exp)(NAME(load)(x + i, n - i, 0) - top);
        NAME(store)(x + i, n - i, e);
        /* Lanes past the end must not count. */
        sum += n - i >= LANES ? e : NAME(load)(x + i, n - i, 0);
    }
    *max = top;
    return NAME(sum)(sum);
}

KERNEL float NAME(log_sum_exp)(const float *x, size_t n) {
    float top = NAME(max)(x, n);
    VEC sum = {0};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) sum += NAME(exp)(NAME(load)(x + i, LANES, 0) - top);
    if (i < n) {
        float tail[LANES];
        NAME(store)(tail, LANES, NAME(exp)(NAME(load)(x + i, n - i, 0) - top));
        sum += NAME(load)(tail, n - i, 0);
    }
    return top + logf(NAME(sum)(sum));
}

KERNEL void NAME(softmax_row)(float lse, float factor, float *x, size_t n) {
    for (size_t i = 0; i < n; i += LANES)
        NAME(store)(x + i, n - i, NAME(exp)(NAME(load)(x + i, n - i, 0) - lse) * factor);
}

KERNEL void NAME(softmax_backward)(float lse, float delta, float factor, float *s, float *dp, size_t n) {
    for (size_t i = 0; i < n; i += LANES) {
        VEC p = NAME(exp)(NAME(load)(s + i, n - i, 0) - lse);
        NAME(store)(s + i, n - i, p);
        NAME(store)(dp + i, n - i, p * (NAME(load)(dp + i, n - i, 0) - delta) * factor);
    }
}

static const tagc_kernels NAME(kernels) = {
    .name = KERNELS_NAME,
    .add = NAME(add),
    .scale = NAME(scale),
    .dot = NAME(dot),
    .sum_rows = NAME(sum_rows),
    .norm_statistics = NAME(norm_statistics),
    .norm = NAME(norm),
    .norm_backward = NAME(norm_backward),
    .gelu = NAME(gelu),
    .gelu_backward = NAME(gelu_backward),
    .exp_row = NAME(exp_row),
    .log_sum_exp = NAME(log_sum_exp),
    .softmax_row = NAME(softmax_row),
    .softmax_backward = NAME(softmax_backward),
};

#undef VEC
#undef IVEC
#undef UVEC
#undef INLINE
#undef KERNEL
#undef TWO_ROOT_TWO_OVER_PI
