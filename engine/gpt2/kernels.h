/* Everything in a step that is not a matrix product: row-wise loops, in one table per instruction set.
 *
 * kernels_body.h holds the loops once, written over vectors of LANES floats; kernels.c compiles them for
 * AVX-512, AVX2 and the plain machine. exp is a polynomial of degree 7 after a reduction by ln 2: relative
 * error below 1.5e-7 on [-87, 88], clamped outside. All rows are contiguous. */
#ifndef TAGC_GPT2_KERNELS_H
#define TAGC_GPT2_KERNELS_H

#include <stddef.h>

#define TAGC_NORM_EPSILON 1e-5f

typedef struct tagc_kernels {
    const char *name;
    /* y (n) = x + z */
    void (*add)(const float *x, const float *z, float *y, size_t n);
    /* y (n) *= factor */
    void (*scale)(float factor, float *y, size_t n);
    float (*dot)(const float *x, const float *y, size_t n);
    /* sum (n_cols) += the sum of the rows of x (n_rows, n_cols) */
    void (*sum_rows)(const float *x, size_t n_rows, size_t n_cols, float *sum);
    void (*norm_statistics)(const float *x, size_t n, float *mean, float *rstd);
    /* y (n) = (x - mean) * rstd * weight + bias */
    void (*norm)(const float *x, float mean, float rstd, const float *weight, const float *bias, float *y,
                 size_t n);
    /* dx (n) += gradient through the norm of one row, dweight and dbias (n) += */
    void (*norm_backward)(const float *x, float mean, float rstd, const float *weight, const float *dy,
                          float *dx, float *dweight, float *dbias, size_t n);
    void (*gelu)(const float *x, float *y, size_t n);
    /* y (n) = gelu(x), dy (n) *= gelu'(x) */
    void (*gelu_backward)(const float *x, float *y, float *dy, size_t n);
    /* x (n) = exp(x - max x); returns the sum, *max the maximum */
    float (*exp_row)(float *x, size_t n, float *max);
    /* log of the sum of exp(x) over n values */
    float (*log_sum_exp)(const float *x, size_t n);
    /* x (n) = factor * exp(x - lse) */
    void (*softmax_row)(float lse, float factor, float *x, size_t n);
    /* s (n) = p = exp(s - lse), dp (n) = factor * p * (dp - delta) */
    void (*softmax_backward)(float lse, float delta, float factor, float *s, float *dp, size_t n);
} tagc_kernels;

/* The best table of this processor, and all tables that it can run (best first, NULL at the end). */
const tagc_kernels *tagc_kernels_best(void);
const tagc_kernels *const *tagc_kernels_all(void);

#endif
