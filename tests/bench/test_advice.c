/* Advice of tagc bench on cases made by hand, and the spread that results quote. */
#include "../test.h"
#include "bench/bench.h"

#include <math.h>
#include <string.h>

enum { FULL = 0, GRAD = 1 };

static tagc_result_spread again; /* of the second turns; none at first */

static void advise(const tagc_bench_candidate *candidates, int n, int n_rounds, tagc_bench_advice *out) {
    memset(out, 0x5a, sizeof *out);
    tagc_bench_advise(candidates, n, n_rounds, again, out);
    assert_non_null(memchr(out->reason, 0, sizeof out->reason));
}

static void says(const tagc_bench_advice *advice, const char *text) {
    if (!strstr(advice->reason, text)) fail_msg("\"%s\" is not in: %s", text, advice->reason);
}

static void says_not(const tagc_bench_advice *advice, const char *text) {
    if (strstr(advice->reason, text)) fail_msg("\"%s\" is in: %s", text, advice->reason);
}

/* Named as the arms, one median per round. */
static const double slow[] = {4.0, 4.2, 4.1, 4.0, 4.0}, mid[] = {3.0, 3.1, 3.0, 3.0, 3.0},
                    fast[] = {2.0, 2.0, 2.1, 2.0, 2.0};

TEST(test_pays) {
    const tagc_bench_candidate candidates[] = {
        {.name = "fsdp", .round_s = slow, .total_s = 4.1, .exposed_s = 2.05, .comm_s = 3},
        {.name = "packed",
         .is_compressed = 1,
         .round_s = fast,
         .total_s = 2.0,
         .exposed_s = 0.5,
         .comm_s = 1,
         .codec_s = 0.2},
        {.name = "sketch", .is_compressed = 1, .round_s = mid, .total_s = 3.0, .exposed_s = 1, .comm_s = 1},
    };
    tagc_bench_advice advice;
    advise(candidates, 3, 5, &advice);
    assert_int_equal(advice.arm, 1);
    assert_int_equal(advice.verdict, TAGC_VERDICT_PAYS);
    assert_true(fabs(advice.speedup - 2.0) < 1e-12); /* median of 4.0/2.0, 4.2/2.0, 4.1/2.1, twice 4.0/2.0 */
    says(&advice, "packed pays: 2.000 s");
    says(&advice, "2.00x as fast as fsdp");
    says(&advice, "1.95 to 2.10 in 5 rounds");
    says(&advice, "fsdp waits for parameters and gradients for 50 %");
    says_not(&advice, "its codec is the limit");
}

/* 5 % make no difference; 30 % in most rounds and nothing in one is not sure. */
TEST(test_too_little) {
    const double a[] = {1.05, 1.05, 1.05, 1.05, 1.05}, b[] = {1.0, 1.0, 1.0, 1.0, 1.0, 1.0},
                 c[] = {1.3, 1.3, 1.3, 1.3, 1.3, 1.0}, d[] = {1.1, 1.5, 1.5, 1.5, 3.5};
    tagc_bench_candidate candidates[] = {
        {.name = "fsdp", .round_s = a, .total_s = 1.05, .exposed_s = 0.5},
        {.name = "packed",
         .is_compressed = 1,
         .round_s = b,
         .total_s = 1.0,
         .exposed_s = 0.4,
         .codec_s = 0.5,
         .comm_s = 0.1},
    };
    tagc_bench_advice advice;
    advise(candidates, 2, 5, &advice);
    assert_int_equal(advice.arm, -1);
    assert_int_equal(advice.verdict, TAGC_VERDICT_NO_DIFFERENCE);
    says(&advice, "leave compression off, packed makes no difference:");
    says(&advice, "1.05x");
    says(&advice, "its codec is the limit: it works 500.0 ms of the 1.000 s");
    candidates[0].round_s = c;
    candidates[0].total_s = 1.3;
    advise(candidates, 2, 6, &advice);
    assert_int_equal(advice.arm, -1);
    assert_true(fabs(advice.speedup - 1.3) < 1e-12);
    says(&advice, "packed makes no difference; rounds differ by more");
    candidates[0].round_s = d; /* faster in every round, by an unknown factor */
    advise(candidates, 2, 5, &advice);
    assert_int_equal(advice.arm, -1);
    says(&advice, "packed makes no difference; rounds differ by more");
    candidates[0].round_s = c;
    advise(candidates, 2, 5, &advice); /* without the sixth round it is */
    assert_int_equal(advice.arm, 1);
    for (int n_rounds = 1; n_rounds < 5; n_rounds++) { /* few rounds have no spread to rely on */
        advise(candidates, 2, n_rounds, &advice);
        assert_int_equal(advice.arm, -1);
        assert_int_equal(advice.verdict, TAGC_VERDICT_UNKNOWN);
        assert_true(fabs(advice.speedup - 1.3) < 1e-12);
        says(&advice, "whether compression pays is not known, because fewer than 5 rounds");
    }
}

/* What differs by no more than one arm from itself makes no difference. */
TEST(test_second_turns) {
    const double a[] = {1.3, 1.3, 1.3, 1.3, 1.3}, b[] = {1.0, 1.0, 1.0, 1.0, 1.0};
    const tagc_bench_candidate candidates[] = {
        {.name = "fsdp", .round_s = a, .total_s = 1.3},
        {.name = "packed", .is_compressed = 1, .round_s = b, .total_s = 1.0},
    };
    static const struct {
        tagc_result_spread again;
        tagc_verdict verdict;
        const char *text;
    } cases[] = {
        {{.median = 1.0, .min = 0.9, .max = 1.2, .n = 5}, TAGC_VERDICT_PAYS, "up to 20 % apart"},
        {{.median = 1.0, .min = 1.0, .max = 1.4, .n = 5}, TAGC_VERDICT_NO_DIFFERENCE, "up to 40 % apart"},
        {{.median = 1.0, .min = 0.6, .max = 1.0, .n = 5},
         TAGC_VERDICT_NO_DIFFERENCE,
         "rounds differ by more"},
        {{.median = 1.3, .min = 1.3, .max = 1.3, .n = 5}, TAGC_VERDICT_NO_DIFFERENCE, "up to 30 % apart"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tagc_bench_advice advice;
        again = cases[i].again;
        advise(candidates, 2, 5, &advice);
        again = (tagc_result_spread){0};
        assert_int_equal(advice.verdict, cases[i].verdict);
        assert_int_equal(advice.arm, cases[i].verdict == TAGC_VERDICT_PAYS ? 1 : -1);
        says(&advice, cases[i].text);
    }
}

/* An arm that only compresses norms sends as much as one that compresses nothing: its time is chance. */
TEST(test_as_many_bytes) {
    tagc_bench_candidate candidates[] = {
        {.name = "fsdp", .round_s = slow, .total_s = 4.0, .n_bytes = 1000},
        {.name = "norms", .is_compressed = 1, .round_s = fast, .total_s = 2.0, .n_bytes = 960},
        {.name = "packed", .is_compressed = 1, .round_s = mid, .total_s = 3.0, .n_bytes = 100},
    };
    tagc_bench_advice advice;
    advise(candidates, 3, 5, &advice);
    assert_int_equal(advice.arm, 2);
    says(&advice, "packed pays");
    advise(candidates, 2, 5, &advice);
    assert_int_equal(advice.arm, -1);
    assert_int_equal(advice.verdict, TAGC_VERDICT_UNKNOWN);
    assert_true(isnan(advice.speedup));
    says(&advice, "no arm sends fewer bytes than fsdp");
    candidates[1].n_bytes = 950;
    advise(candidates, 2, 5, &advice);
    assert_int_equal(advice.arm, 1);
}

static double uniform(unsigned *random) {
    *random = *random * 1664525u + 1013904223u;
    return (double)(*random >> 8) / (1 << 24);
}

/* Arms that take the same time, on machines whose rounds differ by up to 30 %: nearly no bench says that one pays. */
TEST(test_equal_arms) {
    enum { N_BENCHES = 4000, N_ROUNDS = 5, N_ARMS = 4 };
    unsigned random = 7;
    int n_pays = 0, n_without = 0;
    for (int i = 0; i < N_BENCHES; i++) {
        double noise = 0.3 * uniform(&random), s[N_ARMS + 1][N_ROUNDS], ratios[N_ROUNDS];
        tagc_bench_candidate candidates[N_ARMS];
        for (int a = 0; a <= N_ARMS; a++)
            for (int k = 0; k < N_ROUNDS; k++) s[a][k] = 1 + noise * (uniform(&random) - 0.5);
        for (int k = 0; k < N_ROUNDS; k++) ratios[k] = s[N_ARMS][k] / s[0][k];
        for (int a = 0; a < N_ARMS; a++)
            candidates[a] = (tagc_bench_candidate){.name = "arm",
                                                   .is_compressed = a > 0,
                                                   .round_s = s[a],
                                                   .total_s = tagc_result_spread_of(s[a], N_ROUNDS).median};
        tagc_bench_advice advice;
        advise(candidates, N_ARMS, N_ROUNDS, &advice);
        n_without += advice.verdict == TAGC_VERDICT_PAYS;
        again = tagc_result_spread_of(ratios, N_ROUNDS);
        advise(candidates, N_ARMS, N_ROUNDS, &advice);
        again = (tagc_result_spread){0};
        n_pays += advice.verdict == TAGC_VERDICT_PAYS;
    }
    print_message("equal arms: %d of %d pay, %d without second turns\n", n_pays, (int)N_BENCHES, n_without);
    assert_true(n_pays <= N_BENCHES / 200);
    assert_true(n_without > n_pays);
}

/* What is named as the limit is most of the time, or of the waiting. */
TEST(test_limits) {
    static const struct {
        double exposed_s, compute_s, link_s;
        const char *text;
    } cases[] = {
        {1.8, 0.1, 0, "whether the link is the limit is not known"},
        {1.8, 0.1, 0.01,
         "its bytes fill the link for only 10.0 ms of the 2.000 s: messages or ranks wait for each other"},
        {1.8, 0.1, 0.2, "its bytes fill the link for only 200.0 ms"},
        {1.8, 0.1, 1.5, "the link is the limit: its bytes fill it for 1.500 s of the 2.000 s"},
        {1.8, 0.1, 2.5, "the link is the limit: its bytes fill it all the time"},
        {0.5, 1.5, 0.1, "computing is the limit: it takes 1.500 s of the 2.000 s"},
        {0.5, 1.5, 0, "computing is the limit"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const tagc_bench_candidate candidates[] = {
            {.name = "fsdp", .round_s = slow, .total_s = 4.1, .exposed_s = 2.05},
            {.name = "packed",
             .is_compressed = 1,
             .round_s = fast,
             .total_s = 2.0,
             .exposed_s = cases[i].exposed_s,
             .compute_s = cases[i].compute_s,
             .link_s = cases[i].link_s,
             .comm_s = 1.9},
        };
        tagc_bench_advice advice;
        advise(candidates, 2, 5, &advice);
        says(&advice, cases[i].text);
    }
}

/* An arm without compression under another sharding counts; the gain within the own one is told too. */
TEST(test_other_sharding) {
    const tagc_bench_candidate candidates[] = {
        {.name = "fsdp", .sharding = FULL, .round_s = slow, .total_s = 4.1, .exposed_s = 2},
        {.name = "packed",
         .sharding = FULL,
         .is_compressed = 1,
         .round_s = mid,
         .total_s = 3.0,
         .exposed_s = 1},
        {.name = "zero2-bf16", .sharding = GRAD, .round_s = fast, .total_s = 2.0, .exposed_s = 0.04},
    };
    tagc_bench_advice advice;
    advise(candidates, 3, 5, &advice);
    assert_int_equal(advice.arm, -1);
    assert_int_equal(advice.verdict, TAGC_VERDICT_COSTS);
    says(&advice, "leave compression off, packed costs:");
    says(&advice, "zero2-bf16 2.000 s without (0.67x");
    says(&advice, "within full sharding, packed is 1.33x as fast as fsdp");
    says(&advice, "computing is the limit");
}

TEST(test_nothing_to_compare) {
    const tagc_bench_candidate plain[] = {{.name = "fsdp", .round_s = slow, .total_s = 4}};
    const tagc_bench_candidate packed[] = {
        {.name = "packed", .is_compressed = 1, .round_s = slow, .total_s = 4}};
    tagc_bench_advice advice;
    advise(plain, 1, 5, &advice);
    assert_int_equal(advice.arm, -1);
    assert_int_equal(advice.verdict, TAGC_VERDICT_UNKNOWN);
    assert_true(isnan(advice.speedup));
    says(&advice, "no arm compresses");
    advise(packed, 1, 5, &advice);
    assert_int_equal(advice.arm, -1);
    assert_int_equal(advice.verdict, TAGC_VERDICT_UNKNOWN);
    assert_true(isnan(advice.speedup));
    says(&advice, "no arm leaves compression off");
}

/* Names as long as they may be do not run over. */
TEST(test_long_names) {
    char long_name[TAGC_ARM_NAME_BYTES];
    memset(long_name, 'x', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = 0;
    const tagc_bench_candidate candidates[] = {
        {.name = long_name, .sharding = FULL, .round_s = slow, .total_s = 4.1, .exposed_s = 2},
        {.name = long_name,
         .sharding = FULL,
         .is_compressed = 1,
         .round_s = mid,
         .total_s = 3.0,
         .exposed_s = 1,
         .codec_s = 2},
        {.name = long_name, .sharding = GRAD, .round_s = fast, .total_s = 2.0, .exposed_s = 1},
    };
    tagc_bench_advice advice;
    advise(candidates, 3, 5, &advice);
    says(&advice, "within full sharding");
}

TEST(test_spread) {
    const double odd[] = {3, 1, 2}, even[] = {4, 1, 3, 2}, broken[] = {1, (double)NAN};
    tagc_result_spread spread = tagc_result_spread_of(odd, 3);
    assert_true(spread.median == 2 && spread.min == 1 && spread.max == 3 && spread.n == 3);
    spread = tagc_result_spread_of(even, 4);
    assert_true(spread.median == 2.5 && spread.min == 1 && spread.max == 4 && spread.n == 4);
    assert_true(odd[0] == 3 && even[0] == 4);
    assert_true(isnan(tagc_result_spread_of(broken, 2).median));
    assert_true(isnan(tagc_result_spread_of(odd, 0).median));
}
