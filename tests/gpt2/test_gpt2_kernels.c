/* Every table of kernels that this processor can run, against scalar double arithmetic, at all row lengths
 * around the vector widths. Arrays end where the row ends, so that the address sanitizer sees a step too far.
 */
#include "plain_params.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "gpt2/kernels.h"

enum { MAX_N = 70 };

static float *random_row(size_t n, float scale, uint64_t *seed) {
    float *x = malloc((n ? n : 1) * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = scale * test_uniform(seed);
    return x;
}

static float *copy_row(const float *x, size_t n) {
    float *y = malloc(n * sizeof *y);
    memcpy(y, x, n * sizeof *y);
    return y;
}

static void assert_near(const char *what, const char *table, size_t n, double got, double expected,
                        double tolerance) {
    if (!(fabs(got - expected) <= tolerance))
        fail_msg("%s of %s at n %zu: %.9g, expected %.9g", what, table, n, got, expected);
}

static double gelu(double x) {
    return 0.5 * x * (1 + tanh(sqrt(2 / acos(-1.0)) * (x + 0.044715 * x * x * x)));
}

static void check_simple(const tagc_kernels *k, size_t n, uint64_t *seed) {
    float *x = random_row(n, 3, seed), *z = random_row(n, 3, seed), *y = random_row(n, 1, seed);
    double dot = 0;
    k->add(x, z, y, n);
    for (size_t i = 0; i < n; i++) {
        assert_true(y[i] == x[i] + z[i]);
        dot += (double)x[i] * (double)z[i];
    }
    assert_near("dot", k->name, n, (double)k->dot(x, z, n), dot, 1e-5 * sqrt((double)n));
    k->scale(0.3f, y, n);
    for (size_t i = 0; i < n; i++) assert_true(y[i] == (x[i] + z[i]) * 0.3f);
    free(x);
    free(z);
    free(y);

    float *rows = random_row(5 * n, 1, seed), *sum = random_row(n, 1, seed), *before = copy_row(sum, n);
    k->sum_rows(rows, 5, n, sum);
    for (size_t i = 0; i < n; i++) {
        double expected = (double)before[i];
        for (size_t row = 0; row < 5; row++) expected += (double)rows[row * n + i];
        assert_near("sum_rows", k->name, n, (double)sum[i], expected, 1e-6);
    }
    free(rows);
    free(sum);
    free(before);
}

static void check_norm(const tagc_kernels *k, size_t n, uint64_t *seed) {
    float *x = random_row(n, 2, seed), *w = random_row(n, 1, seed), *b = random_row(n, 1, seed);
    float *dy = random_row(n, 1, seed), *dx = random_row(n, 1, seed), *dw = random_row(n, 1, seed);
    float *db = random_row(n, 1, seed), *y = malloc(n * sizeof *y), mean, rstd;
    float *dx0 = copy_row(dx, n), *dw0 = copy_row(dw, n), *db0 = copy_row(db, n);
    double m = 0, v = 0, sum = 0, product = 0;
    for (size_t i = 0; i < n; i++) x[i] += 5;
    for (size_t i = 0; i < n; i++) m += (double)x[i] / (double)n;
    for (size_t i = 0; i < n; i++) v += ((double)x[i] - m) * ((double)x[i] - m) / (double)n;
    double r = 1 / sqrt(v + 1e-5);
    k->norm_statistics(x, n, &mean, &rstd);
    assert_near("mean", k->name, n, (double)mean, m, 2e-6);
    assert_near("rstd", k->name, n, (double)rstd, r, 2e-4 * r);
    /* From here on the statistics are given, whatever their rounding. */
    m = (double)mean;
    r = (double)rstd;
    k->norm(x, mean, rstd, w, b, y, n);
    k->norm_backward(x, mean, rstd, w, dy, dx, dw, db, n);
    for (size_t i = 0; i < n; i++) {
        double normal = ((double)x[i] - m) * r, d = (double)dy[i];
        sum += d * (double)w[i] / (double)n;
        product += d * (double)w[i] * normal / (double)n;
        assert_near("norm", k->name, n, (double)y[i], normal * (double)w[i] + (double)b[i], 1e-5);
        assert_near("dweight", k->name, n, (double)dw[i], (double)dw0[i] + d * normal, 1e-5);
        assert_near("dbias", k->name, n, (double)db[i], (double)db0[i] + d, 1e-6);
    }
    for (size_t i = 0; i < n; i++) {
        double normal = ((double)x[i] - m) * r;
        double expected = (double)dx0[i] + r * ((double)dy[i] * (double)w[i] - sum - normal * product);
        assert_near("norm dx", k->name, n, (double)dx[i], expected, 1e-5 * (1 + r));
    }
    float *all[] = {x, w, b, dy, dx, dw, db, y, dx0, dw0, db0};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
}

static void check_gelu(const tagc_kernels *k, size_t n, uint64_t *seed) {
    float *x = random_row(n, 6, seed), *y = malloc(n * sizeof *y), *dy = random_row(n, 1, seed);
    float *dy0 = copy_row(dy, n), *again = malloc(n * sizeof *again);
    k->gelu(x, y, n);
    k->gelu_backward(x, again, dy, n);
    for (size_t i = 0; i < n; i++) {
        double v = (double)x[i], slope = (gelu(v + 1e-5) - gelu(v - 1e-5)) / 2e-5;
        assert_near("gelu", k->name, n, (double)y[i], gelu(v), 1e-6);
        assert_true(y[i] == again[i]);
        assert_near("dgelu", k->name, n, (double)dy[i], (double)dy0[i] * slope, 2e-6);
    }
    free(x);
    free(y);
    free(dy);
    free(dy0);
    free(again);
}

static void check_softmax(const tagc_kernels *k, size_t n, uint64_t *seed) {
    float *x = random_row(n, 20, seed), *p = copy_row(x, n), *q = copy_row(x, n), *s = copy_row(x, n), max;
    float *dp = random_row(n, 1, seed), *dp0 = copy_row(dp, n);
    double top = -INFINITY, sum = 0;
    for (size_t i = 0; i < n; i++) top = fmax(top, (double)x[i]);
    for (size_t i = 0; i < n; i++) sum += exp((double)x[i] - top);
    assert_near("exp_row", k->name, n, (double)k->exp_row(p, n, &max), sum, 1e-6 * sum);
    assert_true((double)max == top);
    double lse = top + log(sum);
    assert_near("log_sum_exp", k->name, n, (double)k->log_sum_exp(x, n), lse, 2e-6 * (1 + fabs(lse)));
    k->softmax_row((float)lse, 0.7f, q, n);
    k->softmax_backward((float)lse, 0.2f, 0.5f, s, dp, n);
    for (size_t i = 0; i < n; i++) {
        double probability = exp((double)x[i] - lse);
        assert_near("exp", k->name, n, (double)p[i], exp((double)x[i] - top), 1e-6);
        assert_near("softmax", k->name, n, (double)q[i], 0.7 * probability, 3e-6);
        assert_near("probability", k->name, n, (double)s[i], probability, 3e-6);
        assert_near("dscore", k->name, n, (double)dp[i], 0.5 * probability * ((double)dp0[i] - 0.2), 3e-6);
    }
    float *all[] = {x, p, q, s, dp, dp0};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
}

TEST(test_all_lengths) {
    uint64_t seed = 1;
    for (const tagc_kernels *const *k = tagc_kernels_all(); *k; k++) {
        for (size_t n = 1; n <= MAX_N; n++) {
            check_simple(*k, n, &seed);
            check_norm(*k, n, &seed);
            check_gelu(*k, n, &seed);
            check_softmax(*k, n, &seed);
        }
    }
}

/* The error that kernels.h states, over the whole range of exp. */
TEST(test_exp_accuracy) {
    for (const tagc_kernels *const *k = tagc_kernels_all(); *k; k++) {
        double worst = 0;
        for (int i = 0; i < 400000; i++) {
            float x = -86.9f + (float)i * 4.35e-4f, y = x;
            (*k)->softmax_row(0, 1, &y, 1);
            worst = fmax(worst, fabs((double)y / exp((double)x) - 1));
        }
        if (!(worst < 1.5e-7)) fail_msg("%s: relative error %g", (*k)->name, worst);
    }
}

/* NaN must come out of everything that sees one, and huge values must not make one. */
TEST(test_hostile_values) {
    for (const tagc_kernels *const *k = tagc_kernels_all(); *k; k++) {
        for (size_t n = 1; n <= MAX_N; n += 3) {
            for (size_t at = 0; at < n; at += 5) {
                float x[MAX_N] = {0}, y[MAX_N], dy[MAX_N] = {0}, max, mean, rstd;
                x[at] = NAN;
                (*k)->gelu(x, y, n);
                assert_true(isnan(y[at]));
                assert_true(isnan((*k)->log_sum_exp(x, n)));
                (*k)->norm_statistics(x, n, &mean, &rstd);
                assert_true(isnan(mean) && isnan(rstd));
                memcpy(y, x, sizeof y);
                assert_true(isnan((*k)->exp_row(y, n, &max)));

                x[at] = 1e30f;
                memcpy(y, x, sizeof y);
                assert_true((*k)->exp_row(y, n, &max) >= 1 && y[at] == 1 &&
                            max == (n > 1 || at == 0 ? 1e30f : 0));
                assert_true((*k)->log_sum_exp(x, n) == 1e30f);
                x[at] = -FLT_MAX;
                assert_near("log_sum_exp", (*k)->name, n, (double)(*k)->log_sum_exp(x, n),
                            n > 1 ? log((double)(n - 1)) : -(double)FLT_MAX, 1e-5);
                x[at] = -50;
                dy[at] = 1;
                (*k)->gelu_backward(x, y, dy, n);
                assert_true(fabsf(y[at]) < 1e-20f && fabsf(dy[at]) < 1e-20f);
                x[at] = 50;
                dy[at] = 1;
                (*k)->gelu_backward(x, y, dy, n);
                assert_true(y[at] == 50 && dy[at] == 1);
            }
        }
    }
}
