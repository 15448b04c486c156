/* The signal: windows against sums in double, shares against an exact solution, betas against the curvature they tolerate. */
#include "made.h"

static double uniform(void) {
    return rand() / (RAND_MAX + 1.0);
}

static double normal(void) {
    double sum = 0;
    for (int i = 0; i < 12; i++) sum += uniform();
    return sum - 6;
}

TEST(positions_are_spread_and_in_order) {
    const uint64_t sizes[] = {1, 2, 511, 512, 513, 1000, 65536, 1u << 20, 12345678901};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        uint64_t positions[TAGC_SCHEDULE_SAMPLE];
        size_t n;
        tagc_schedule_positions(sizes[k], positions, &n);
        assert_true(n > 0 && n <= TAGC_SCHEDULE_SAMPLE);
        if (sizes[k] <= TAGC_SCHEDULE_SAMPLE) assert_int_equal(n, sizes[k]);
        for (size_t i = 1; i < n; i++) assert_true(positions[i - 1] < positions[i]);
        assert_true(positions[n - 1] < sizes[k]);
        if (sizes[k] > 10000) assert_true(n > 400 && positions[n - 1] > sizes[k] / 10 * 9);
    }
}

/* What a window must give: s^2 / q over elements that are not faint. */
static tagc_schedule_sums oracle(const float *values, int n_exchanges, int n) {
    tagc_schedule_sums found = {.n_square = (double)n_exchanges * n};
    double squares[TAGC_SCHEDULE_SAMPLE];
    for (int i = 0; i < n; i++) {
        squares[i] = 0;
        for (int e = 0; e < n_exchanges; e++)
            squares[i] += (double)values[e * n + i] * (double)values[e * n + i];
        found.square += squares[i];
    }
    for (int i = 0; i < n; i++) {
        double sum = 0;
        for (int e = 0; e < n_exchanges; e++) sum += (double)values[e * n + i];
        if (squares[i] <= 0.03 * 0.03 * found.square / n) continue;
        found.signal += sum * sum / squares[i];
        found.weight++;
    }
    return found;
}

TEST(windows_match_sums_in_double) {
    srand(11);
    tagc_schedule *s = made("cc", NULL);
    static float values[20 * TAGC_SCHEDULE_SAMPLE];
    for (int trial = 0; trial < 50; trial++) {
        int n = 1 + rand() % TAGC_SCHEDULE_SAMPLE;
        double scale = pow(10, 6 * uniform() - 3), shift = uniform() < 0.5 ? 0 : normal();
        for (int i = 0; i < n; i++) {
            double own = uniform() < 0.2 ? 1e-3 : 1, direction = normal() * shift;
            for (int e = 0; e < 20; e++) values[e * n + i] = (float)(scale * own * (normal() + direction));
        }
        for (int e = 0; e < 20; e++) {
            const uint32_t both[] = {1, 0}, counts[] = {0, (uint32_t)n};
            uint32_t full[2];
            size_t n_full;
            OK(tagc_schedule_add(s, both, counts, 2, &values[e * n], full, &n_full));
            assert_int_equal(n_full, e == 19 ? 2 : 0);
        }
        uint32_t zero = 0, one = 1;
        tagc_schedule_sums found, expected = oracle(values, 20, n);
        OK(tagc_schedule_take(s, &zero, 1, &found));
        assert_near(found.signal, expected.signal, 1e-3 * expected.signal + 1e-3);
        assert_near(found.weight, expected.weight, 0);
        assert_near(found.square, expected.square, 1e-5 * expected.square);
        assert_near(found.n_square, expected.n_square, 0);
        OK(tagc_schedule_take(s, &one, 1, &found)); /* of this one this rank has no element */
        assert_near(found.weight, 0, 0);
        assert_near(found.n_square, 0, 0);
    }
    tagc_schedule_destroy(s);
}

TEST(a_value_that_is_not_finite_spoils_one_window) {
    tagc_schedule *s = made("c", NULL);
    for (int w = 0; w < 2; w++) {
        uint32_t zero = 0, count = 4, full;
        size_t n_full = 0;
        for (int e = 0; e < 20; e++) {
            float values[] = {1, -1, w == 0 && e == 3 ? INFINITY : 1, 1};
            OK(tagc_schedule_add(s, &zero, &count, 1, values, &full, &n_full));
        }
        assert_int_equal(n_full, 1);
        tagc_schedule_sums found;
        OK(tagc_schedule_take(s, &zero, 1, &found));
        assert_true(w == 0 ? isnan(found.signal) : found.signal == 80);
    }
    tagc_schedule_destroy(s);
}

TEST(another_number_of_samples_begins_anew) {
    tagc_schedule *s = made("c", NULL);
    const float values[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    uint32_t zero = 0, full, count = 8;
    size_t n_full;
    for (int e = 0; e < 19; e++) OK(tagc_schedule_add(s, &zero, &count, 1, values, &full, &n_full));
    count = 7;
    OK(tagc_schedule_add(s, &zero, &count, 1, values, &full, &n_full));
    assert_int_equal(n_full, 0);
    OK(tagc_schedule_scale(s, 4)); /* a loss scaler: what has gathered and what comes are of one scale */
    const float scaled[7] = {4, 4, 4, 4, 4, 4, 4};
    for (int e = 0; e < 19; e++) OK(tagc_schedule_add(s, &zero, &count, 1, scaled, &full, &n_full));
    assert_int_equal(n_full, 1);
    tagc_schedule_sums found;
    OK(tagc_schedule_take(s, &zero, 1, &found));
    assert_near(found.signal / found.weight, 20, 1e-4);
    tagc_schedule_destroy(s);
}

/* Shares are proportional to mean squares, cut at both ends: found by trying which are cut, from the sorted list. */
static void exact_shares(const double *squares, const double *sizes, int n, double most, double *shares) {
    double total = 0;
    for (int i = 0; i < n; i++) total += sizes[i];
    for (int low = 0; low <= n; low++)
        for (int high = 0; low + high <= n;
             high++) { /* squares ascend: the first `low` are at 1/8, the last `high` at most */
            double fixed = 0, free_sum = 0;
            for (int i = 0; i < n; i++)
                if (i < low)
                    fixed += 0.125 * sizes[i];
                else if (i >= n - high)
                    fixed += most * sizes[i];
                else
                    free_sum += squares[i] * sizes[i];
            double factor = free_sum > 0 ? (total - fixed) / free_sum : 0;
            int fits = free_sum > 0 ? factor > 0 : fabs(total - fixed) < 1e-9 * total;
            for (int i = 0; i < n; i++) {
                shares[i] = i < low ? 0.125 : i >= n - high ? most : factor * squares[i];
                if (i >= low && i < n - high) fits &= shares[i] >= 0.125 - 1e-12 && shares[i] <= most + 1e-12;
                if (i < low) fits &= factor * squares[i] <= 0.125 + 1e-12;
                if (i >= n - high) fits &= factor * squares[i] >= most - 1e-12;
            }
            if (fits) return;
        }
    fail_msg("no exact shares");
}

TEST(shares_make_units_select_as_one) {
    srand(12);
    int n_followed = 0, n_scaled = 0;
    for (int trial = 0; trial < 200; trial++) {
        enum { N = 5 };
        tagc_schedule_parameter parameters[N];
        char names[N][16];
        double squares[N], sizes[N], shares[N];
        for (int i = 0; i < N; i++) {
            squares[i] = (i > 0 ? squares[i - 1] : 0.01) * pow(10, uniform());
            sizes[i] = 1 + rand() % 5000;
            snprintf(names[i], sizeof names[i], "p%d", i);
            parameters[i] = (tagc_schedule_parameter){names[i], (uint64_t)sizes[i], TAGC_CLASS_COMPRESSED};
        }
        tagc_schedule_options o;
        tagc_schedule_options_init(&o);
        o.sparsity = trial % 2 ? 0.95 : 0.6;
        tagc_schedule *s;
        OK(tagc_schedule_create(&o, parameters, N, &s));
        set_all(s, N, TAGC_MOMENT_NONE);
        int n_last = trial % 3 == 0 ? N - 1 : N; /* the others have no gradient in the last window */
        double scale = trial % 5 == 0 ? 100 : 1, most = fmin(4, 1 / (1 - o.sparsity)), kept = 0;
        for (int w = 0; w < 4; w++) {
            for (uint32_t i = 0; i < (w == 3 ? (uint32_t)n_last : N); i++) {
                tagc_schedule_sums found = sums(NOISE, 2);
                found.square = w == 3 ? 3 * scale * scale * squares[i] : squares[i];
                if (w == 3 && i == 0) found.square *= 9;
                found.n_square = 1;
                OK(tagc_schedule_see(s, &i, 1, &found, 0));
            }
            OK(tagc_schedule_step(s, NULL, NULL));
            if (w == 2) OK(tagc_schedule_scale(s, scale));
            if (w == 2) kept = plan_of(s, N - 1).sparsity;
        }
        squares[0] *= (1 + 27) / 4.0; /* the mean of both windows, in that of the others */
        int order[N] = {0, 1, 2, 3, 4};
        for (int i = 1; i < n_last && squares[order[i - 1]] > squares[order[i]]; i++) {
            int other = order[i];
            order[i] = order[i - 1];
            order[i - 1] = other;
        }
        double sorted[N], sorted_sizes[N];
        for (int i = 0; i < n_last; i++) {
            sorted[i] = squares[order[i]];
            sorted_sizes[i] = sizes[order[i]];
        }
        exact_shares(sorted, sorted_sizes, n_last, most, shares);
        double change = 0; /* shares follow where one has changed enough; p0's has not always */
        for (int i = 0; i < n_last; i++) {
            double now = 1 - plan_of(s, (uint32_t)order[i]).sparsity;
            change = fmax(change, fabs(fmin(1, shares[i] * (1 - o.sparsity)) - now));
        }
        int followed = change < 0.011 * (1 - o.sparsity);
        n_followed += followed;
        n_scaled += followed && scale > 1;
        if (n_last < N) assert_near(plan_of(s, N - 1).sparsity, kept, 0);
        tagc_schedule_destroy(s);
    }
    assert_true(n_followed > 190 && n_scaled > 38);
}

/* (1 + beta1) / (1 - beta1) falls by equal factors, to 3 at a beta1 of 0.5. */
TEST(betas_tolerate_less_by_equal_factors) {
    tagc_schedule *s = made("c", NULL);
    double before = 19, b1, b2;
    for (int i = 9; i >= 0; i--) {
        tagc_schedule_betas(s, i / 10.0, 0, 0.9, 0.999, &b1, &b2);
        double tolerated = (1 + b1) / (1 - b1);
        assert_near(tolerated / before, pow(3.0 / 19, 0.1), 1e-9);
        assert_near(b2, 0.999, 0);
        before = tolerated;
    }
    assert_near(b1, 0.5, 1e-12);
    tagc_schedule_betas(s, 0, 0, 0.3, 0.95, &b1, &b2);
    assert_near(b1, 0.3, 0); /* the user's own is shorter */
    tagc_schedule_betas(s, 1, 40, 0.9, 0.95, &b1, &b2);
    assert_near(b1, 0.9, 0);
    assert_near(b2, 0.95, 0); /* too few updates for a longer one */
    tagc_schedule_betas(s, 1, 100, 0.9, 0.95, &b1, &b2);
    assert_near(b2, 0.97, 1e-12);
    tagc_schedule_betas(s, 1, 1 << 20, 0.9, 0.95, &b1, &b2);
    assert_near(b2, 0.995, 1e-12);
    tagc_schedule_destroy(s);
}
