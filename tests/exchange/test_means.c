/* What arrives over many steps: values down to a millionth of their block's largest, of whom none may be too small to arrive. One rank
 * gets what it sends, so the exact sum is known; bounds are five standard deviations. */
#include "../lengths.h"
#include "../ranks.h"
#include "../repeats.h"
#include "../residual.h"
#include "blocks_oracle.h"

#include <string.h>

/* As many roundings of each size as 100,000 steps of 512 values have, and fewer messages. */
enum { N = 8192, PERIOD = 64, N_DECADES = 7, N_STEPS = REPEATS(6250, 600, 100) };

static float values[N];

static int decade_of(int i) {
    return i % PERIOD * 6 / (PERIOD - 1);
}

static void fill(void) {
    for (int i = 0; i < N; i++) {
        float size = (float)pow(10, -6.0 * (i % PERIOD) / (PERIOD - 1));
        values[i] = i / PERIOD % 2 ? -size : size;
    }
}

/* sums (N): what arrived and what waits. variances (N). */
static void check_sums(const char *name, const double *sums, const double *variances) {
    double off[N_DECADES] = {0}, expected[N_DECADES] = {0}, variance[N_DECADES] = {0};
    for (int i = 0; i < N; i++) {
        double exact = (double)values[i] * N_STEPS;
        off[decade_of(i)] += copysign(1, exact) * (sums[i] - exact);
        expected[decade_of(i)] += fabs(exact);
        variance[decade_of(i)] += variances[i];
    }
    for (int d = 0; d < N_DECADES; d++)
        if (fabs(off[d]) > 5 * sqrt(variance[d]) + 1e-6 * expected[d]) /* sums of fp32 are rounded, too */
            fail_msg("%s, decade %d: %.4g of the sum arrives, off by %.3g standard deviations", name, d,
                     1 + off[d] / expected[d], off[d] / sqrt(variance[d]));
}

/* The variances of the sums of values that are rounded at random in blocks. */
static void of_rounding(int format, size_t block, double *variances) {
    for (size_t i = 0; i < N; i++) {
        double scale = oracle_wide(oracle_scale(format, 1, values + i / block * block, block)),
               share = fabs((double)values[i]) / scale;
        share -= floor(share);
        variances[i] = share * (1 - share) * scale * scale * N_STEPS;
    }
}

static void sum_steps(int format, double sparsity, int residual, double *sums) {
    static float out[N], left[N];
    tagc_comm *comm = comm_alone(NULL);
    tagc_reducer *reducer;
    tagc_reducer_options o;
    tagc_reducer_options_init(&o);
    o.n_elems = N;
    o.format = format;
    o.sparsity = sparsity;
    o.residual = residual;
    o.rounding_seed = 7;
    assert_int_equal(tagc_reducer_create(comm, &o, &reducer), TAGC_OK);
    memset(sums, 0, N * sizeof *sums);
    for (int step = 0; step < N_STEPS; step++) {
        assert_int_equal(run_reducer(reducer, values, out, NULL), TAGC_OK);
        for (int i = 0; i < N; i++) sums[i] += (double)out[i];
    }
    uint64_t n_left = residual_to(reducer, left);
    for (uint64_t i = 0; i < n_left; i++) sums[i] += (double)left[i];
    tagc_reducer_destroy(reducer);
    tagc_comm_destroy(comm);
}

TEST(test_once) {
    static double sums[N], variances[N];
    for (int format = TAGC_FORMAT_INT8; format <= TAGC_FORMAT_INT4; format++) {
        sum_steps(format, 0, TAGC_RESIDUAL_NONE, sums);
        of_rounding(format, 128, variances);
        check_sums(format == TAGC_FORMAT_INT8 ? "int8 once" : "int4 once", sums, variances);
    }
}

/* Nothing is rounded at random: whole values, and a residual that holds all that was not sent. */
TEST(test_exact) {
    static const struct {
        const char *name;
        int format, residual;
        double sparsity;
        double most; /* of each value, relative, in one step: to the nearest, so that it is the same in all */
    } cases[] = {
        {"fp32 once", TAGC_FORMAT_FP32, -1, 0, 0},
        {"bf16 once", TAGC_FORMAT_BF16, -1, 0, 0x1p-8},
        {"int2, residual fp32", TAGC_FORMAT_INT2, TAGC_FORMAT_FP32, 0.95, 0},
        {"int4, residual fp32", TAGC_FORMAT_INT4, TAGC_FORMAT_FP32, 0.95, 0},
        {"int8, residual fp32", TAGC_FORMAT_INT8, TAGC_FORMAT_FP32, 0, 0},
        {"bf16, residual fp32", TAGC_FORMAT_BF16, TAGC_FORMAT_FP32, 0.95, 0},
    };
    static double sums[N];
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        sum_steps(cases[c].format, cases[c].sparsity, cases[c].residual, sums);
        for (int i = 0; i < N; i++) {
            double exact = (double)values[i] * N_STEPS;
            if (fabs(sums[i] - exact) > (cases[c].most + 1e-4) * fabs(exact)) /* sums of fp32 are rounded */
                fail_msg("%s, value %g: %.6g of the sum arrives", cases[c].name, (double)values[i],
                         sums[i] / exact);
        }
    }
}

/* A residual of g takes up the part g / step of a step by chance, at each step: a variance of at most g * step, and up to step^2 / 4
 * where all of it is sent, which for small values is rare. No residual here exceeds eight times the largest value. */
TEST(test_stored) {
    static const struct {
        const char *name;
        int format, residual;
        double sparsity;
    } cases[] = {
        {"int8, residual int8", TAGC_FORMAT_INT8, TAGC_FORMAT_INT8, 0},
        {"int4, residual int8", TAGC_FORMAT_INT4, TAGC_FORMAT_INT8, 0},
        {"int4, residual int4", TAGC_FORMAT_INT4, TAGC_FORMAT_INT4, 0},
        {"95 % zero, residual int8", TAGC_FORMAT_INT4, TAGC_FORMAT_INT8, 0.95},
        {"95 % zero, residual int4", TAGC_FORMAT_INT4, TAGC_FORMAT_INT4, 0.95},
        {"int2, residual int8", TAGC_FORMAT_INT2, TAGC_FORMAT_INT8, 0.95},
        {"int2, residual int4", TAGC_FORMAT_INT2, TAGC_FORMAT_INT4, 0.95},
        {"bf16, residual int8", TAGC_FORMAT_BF16, TAGC_FORMAT_INT8, 0.95},
        {"fp32, residual int8", TAGC_FORMAT_FP32, TAGC_FORMAT_INT8, 0.95},
    };
    static double sums[N], variances[N];
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        double step = (cases[c].sparsity > 0 ? 8 : 1) / (cases[c].residual == TAGC_FORMAT_INT4 ? 3.5 : 63.5);
        sum_steps(cases[c].format, cases[c].sparsity, cases[c].residual, sums);
        for (int i = 0; i < N; i++) variances[i] = fabs((double)values[i]) * step * N_STEPS + step * step;
        check_sums(cases[c].name, sums, variances);
    }
}

TEST(test_gathered) {
    static float full[N];
    static double sums[N], variances[N];
    tagc_comm *comm = comm_alone(NULL);
    tagc_gatherer *gatherer;
    tagc_gatherer_options o;
    tagc_gatherer_options_init(&o);
    o.n_elems = N;
    o.format = TAGC_FORMAT_INT8;
    o.rounding = TAGC_ROUNDING_STOCHASTIC;
    assert_int_equal(tagc_gatherer_create(comm, &o, &gatherer), TAGC_OK);
    memset(sums, 0, sizeof sums);
    for (int step = 0; step < N_STEPS; step++) {
        assert_int_equal(begin_gatherer(gatherer, values, full), TAGC_OK);
        assert_int_equal(tagc_gatherer_end(gatherer), TAGC_OK);
        for (int i = 0; i < N; i++) sums[i] += (double)full[i];
    }
    of_rounding(TAGC_FORMAT_INT8, 256, variances);
    check_sums("gathered in int8", sums, variances);
    tagc_gatherer_destroy(gatherer);
    tagc_comm_destroy(comm);
}

int main(void) {
    fill();
    return test_run(NULL, NULL);
}
