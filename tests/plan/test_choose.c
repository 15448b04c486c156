/* What the chooser picks against every candidate and every subset of flats tried by the test itself, on machines and links
 * that it makes up. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/status.h"
#include "plan/choose.h"

enum { N_CANDIDATES = 4, MAX_FLATS = 12 };

typedef struct fixture {
    tagc_setup setup;
    tagc_costs costs;
    tagc_plan_link link;
    tagc_candidate candidates[N_CANDIDATES];
    tagc_layout *layout;
    tagc_reducer_options flats[MAX_FLATS];
} fixture;

static double uniform(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(*state >> 11) / 9007199254740992.0;
}

static double spread(uint64_t *state, double least, double most) {
    return least * pow(most / least, uniform(state));
}

static void add(fixture *f, int i, int exchange, double sparsity, int format) {
    tagc_candidate *c = &f->candidates[i];
    tagc_reducer_options_init(&c->compressed);
    c->compressed.exchange = exchange;
    c->compressed.sparsity = sparsity;
    c->compressed.format = format;
    c->mild = c->compressed;
    if (exchange == TAGC_EXCHANGE_DIRECT) c->mild.sparsity = 0;
    f->costs.codec[i] = (tagc_codec_cost){.exchange = exchange, .sparsity = sparsity, .format = format};
}

/* Dense, int8 and int4 of every element, and few: the mildest first. Costs are per element of every phase. */
static void make(fixture *f, int placement, double elem_s, double bytes_per_s, double latency_s) {
    *f = (fixture){.setup = {.world_size = 2,
                             .n_hosts = 2,
                             .n_batch = 2,
                             .n_tokens = 16,
                             .placement = placement,
                             .union_density = -1},
                   .link = {.bytes_per_s = bytes_per_s, .latency_s = latency_s}};
    assert_int_equal(tagc_gpt2_preset("tiny", &f->setup.model), TAGC_OK);
    tagc_fsdp_options_init(&f->setup.engine);
    f->setup.engine.reducer.exchange = TAGC_EXCHANGE_PACKED;
    tagc_costs_init(&f->costs);
    f->costs.flop_s = 1e-10;
    f->costs.byte_s = 1e-10;
    add(f, 0, TAGC_EXCHANGE_DENSE, 0, 0);
    add(f, 1, TAGC_EXCHANGE_DIRECT, 0, TAGC_FORMAT_INT8);
    add(f, 2, TAGC_EXCHANGE_DIRECT, 0, TAGC_FORMAT_INT4);
    add(f, 3, TAGC_EXCHANGE_DIRECT, 0.98, TAGC_FORMAT_INT4);
    f->costs.n_codec = N_CANDIDATES;
    for (int i = 1; i < N_CANDIDATES; i++)
        for (int phase = 0; phase < TAGC_PHASE_WAIT; phase++) f->costs.codec[i].elem_s[phase] = elem_s;
    f->setup.engine.reducer = f->candidates[3].compressed;
    f->setup.engine.mild = f->candidates[3].mild;
    assert_int_equal(tagc_setup_layout(&f->setup, &f->layout), TAGC_OK);
    assert_in_range(f->layout->n_flats, 2, MAX_FLATS);
}

static tagc_choice choose(fixture *f, double tolerance) {
    tagc_choice choice;
    if (tagc_plan_choose(&f->setup, &f->costs, &f->link, f->candidates, N_CANDIDATES, tolerance, f->flats,
                         &choice) != TAGC_OK)
        fail_msg("%s", tagc_last_error());
    return choice;
}

static double forecast(fixture *f, const tagc_reducer_options *flats) {
    tagc_setup setup = f->setup;
    tagc_forecast forecast;
    setup.flat_reducers = flats;
    if (tagc_plan_simulate(&setup, &f->costs, &f->link, &forecast) != TAGC_OK)
        fail_msg("%s", tagc_last_error());
    return forecast.iteration_s;
}

/* What the candidate does where `kept` has a bit, and dense elsewhere. */
static double subset(fixture *f, int candidate, unsigned kept) {
    tagc_reducer_options flats[MAX_FLATS];
    for (int i = 0; i < f->layout->n_flats; i++) {
        const tagc_candidate *c = &f->candidates[kept >> i & 1 ? candidate : 0];
        flats[i] = f->layout->flats[i].reducer;
        if (f->layout->flats[i].class_ == TAGC_CLASS_COMPRESSED) flats[i] = c->compressed;
        if (f->layout->flats[i].class_ == TAGC_CLASS_MILD) flats[i] = c->mild;
    }
    return forecast(f, flats);
}

static unsigned compressible(const fixture *f) {
    unsigned bits = 0;
    for (int i = 0; i < f->layout->n_flats; i++)
        bits |= (unsigned)(f->layout->flats[i].class_ != TAGC_CLASS_DENSE) << i;
    return bits;
}

/* Flats that do other than dense; all of these as the candidate says. */
static unsigned kept_of(const fixture *f, int candidate) {
    unsigned kept = 0;
    for (int i = 0; i < f->layout->n_flats; i++) {
        const tagc_layout_flat *about = &f->layout->flats[i];
        const tagc_candidate *c = &f->candidates[candidate];
        if (f->flats[i].exchange == TAGC_EXCHANGE_DENSE) continue;
        assert_int_not_equal(about->class_, TAGC_CLASS_DENSE);
        const tagc_reducer_options *o = about->class_ == TAGC_CLASS_MILD ? &c->mild : &c->compressed;
        assert_memory_equal(&f->flats[i], o, sizeof *o);
        kept |= 1u << i;
    }
    return kept;
}

static int count(unsigned bits) {
    int n = 0;
    for (; bits; bits &= bits - 1) n++;
    return n;
}

static void check(fixture *f, double tolerance) {
    double all_s[N_CANDIDATES], fastest_s = (double)INFINITY;
    unsigned all = compressible(f);
    for (int i = 0; i < N_CANDIDATES; i++) {
        all_s[i] = subset(f, i, all);
        fastest_s = fmin(fastest_s, all_s[i]);
    }
    tagc_choice choice = choose(f, tolerance);
    assert_true(choice.dense_s == all_s[0] && choice.fastest_s == fastest_s);
    assert_true(all_s[choice.fastest] == fastest_s);
    assert_true(all_s[choice.candidate] <= fastest_s * (1 + tolerance));
    for (int i = 0; i < choice.candidate; i++) assert_true(all_s[i] > fastest_s * (1 + tolerance));
    assert_int_equal(choice.n_flats, count(all));
    unsigned kept = kept_of(f, choice.candidate);
    assert_int_equal(choice.n_kept, count(kept));
    assert_true(choice.chosen_s == forecast(f, f->flats));
    if (choice.candidate == 0) return;
    /* Flats that stay dense do not show, and there is none that is compressed for nothing. */
    double limit_s = all_s[choice.candidate] * 1.002;
    assert_true(choice.chosen_s <= limit_s);
    for (int i = 0; i < f->layout->n_flats; i++)
        if (kept >> i & 1) assert_true(subset(f, choice.candidate, kept & ~(1u << i)) > limit_s);
}

static void nothing_gains(void **state) {
    (void)state;
    fixture f;
    make(&f, TAGC_PLACE_ZERO3, 1e-9, (double)INFINITY, 0); /* bytes cost nothing */
    tagc_choice choice = choose(&f, 0.02);
    assert_int_equal(choice.candidate, 0);
    assert_int_equal(choice.fastest, 0);
    assert_int_equal(kept_of(&f, 0), 0);
    assert_true(choice.chosen_s == choice.dense_s);
    tagc_layout_destroy(f.layout);
    make(&f, TAGC_PLACE_ZERO2, 1e-3, 1e8, 0); /* and here codecs cost all */
    assert_int_equal(choose(&f, 0.02).candidate, 0);
    tagc_layout_destroy(f.layout);
    make(&f, TAGC_PLACE_ZERO3, 0, 1e6, 0);
    f.setup.world_size = f.setup.n_hosts = 1; /* one rank sends to no other */
    tagc_layout_destroy(f.layout);
    assert_int_equal(tagc_setup_layout(&f.setup, &f.layout), TAGC_OK);
    assert_int_equal(choose(&f, 0.02).candidate, 0);
    tagc_layout_destroy(f.layout);
}

/* A link so slow that only bytes count: each is faster than the one before it, by known shares. */
static void only_bytes_count(void **state) {
    (void)state;
    fixture f;
    make(&f, TAGC_PLACE_NONE, 0, 1e4, 0); /* replicated: there is nothing but gradients */
    tagc_choice choice = choose(&f, 0.02);
    assert_int_equal(choice.candidate, 3);
    assert_int_equal(choice.fastest, 3);
    assert_int_equal(choice.n_kept, count(kept_of(&f, 3)));
    assert_true(choice.n_kept > 0 && choice.chosen_s < choice.dense_s / 4);
    /* What the tolerance allows to be slower is taken, and nothing else. */
    assert_int_equal(choose(&f, 1e9).candidate, 0);
    double int4_s = subset(&f, 2, compressible(&f)), int8_s = subset(&f, 1, compressible(&f));
    assert_true(int8_s > int4_s && int4_s > choice.fastest_s);
    assert_int_equal(choose(&f, int4_s / choice.fastest_s - 1 + 1e-9).candidate, 2);
    assert_int_equal(choose(&f, int4_s / choice.fastest_s - 1 - 1e-9).candidate, 3);
    assert_int_equal(choose(&f, int8_s / choice.fastest_s - 1 + 1e-9).candidate, 1);
    tagc_layout_destroy(f.layout);
}

static void any_machine(void **state) {
    (void)state;
    uint64_t random = 1;
    int n_chosen[N_CANDIDATES] = {0}, n_thinned = 0;
    for (int trial = 0; trial < 400; trial++) {
        fixture f;
        make(&f, trial % 4, 0, spread(&random, 1e5, 1e10), spread(&random, 1e-7, 1e-3));
        f.costs.flop_s = spread(&random, 1e-13, 1e-8);
        for (int i = 1; i < N_CANDIDATES; i++)
            for (int phase = 0; phase < TAGC_PHASE_WAIT; phase++)
                f.costs.codec[i].elem_s[phase] = spread(&random, 1e-11, 1e-7);
        double tolerance = trial % 3 == 0 ? 0 : 0.02;
        check(&f, tolerance);
        tagc_choice choice = choose(&f, tolerance);
        n_chosen[choice.candidate]++;
        n_thinned += choice.candidate > 0 && choice.n_kept < choice.n_flats;
        tagc_layout_destroy(f.layout);
    }
    for (int i = 0; i < N_CANDIDATES; i++) assert_true(n_chosen[i] > 0);
    assert_true(n_thinned > 0);
}

static void what_is_wrong_is_told(void **state) {
    (void)state;
    fixture f;
    tagc_choice choice;
    make(&f, TAGC_PLACE_ZERO3, 1e-9, 1e8, 0);
    assert_int_equal(tagc_plan_choose(&f.setup, &f.costs, &f.link, f.candidates, 0, 0.02, f.flats, &choice),
                     TAGC_ERR_ARGUMENT);
    assert_non_null(strstr(tagc_last_error(), "n is 0"));
    f.costs.n_codec = 1; /* nothing is known about direct */
    assert_int_equal(
        tagc_plan_choose(&f.setup, &f.costs, &f.link, f.candidates, N_CANDIDATES, 0.02, f.flats, &choice),
        TAGC_ERR_UNSUPPORTED);
    tagc_layout_destroy(f.layout);
}

/* ---- buckets ---- */

static double bucket_s(const fixture *f, uint64_t bucket_elems) {
    fixture copy = *f;
    copy.setup.engine.bucket_elems = bucket_elems;
    return forecast(&copy, NULL);
}

static tagc_bucket_choice choose_bucket(const fixture *f, double tolerance) {
    tagc_bucket_choice choice;
    if (tagc_plan_choose_bucket(&f->setup, &f->costs, &f->link, tolerance, &choice) != TAGC_OK)
        fail_msg("%s", tagc_last_error());
    return choice;
}

static void make_deep(fixture *f, int placement, double bytes_per_s, double latency_s) {
    make(f, placement, 1e-9, bytes_per_s, latency_s);
    tagc_layout_destroy(f->layout);
    f->setup.model.n_layer = 12;
    f->setup.model.n_embd = 64;
}

/* Against every power of two, and what a bucket of one value and one of the whole model would make of it. */
static void a_bucket_is_the_smallest_that_is_fast(void **state) {
    (void)state;
    uint64_t random = 3;
    int n_none = 0, n_all = 0, n_between = 0;
    for (int trial = 0; trial < 60; trial++) {
        fixture f;
        make_deep(&f, trial % 4, spread(&random, 1e6, 1e10), spread(&random, 1e-6, 5e-2));
        f.costs.flop_s = spread(&random, 1e-12, 1e-9);
        f.setup.engine.bucket_elems = 12345; /* is not read */
        f.setup.engine.prefetch = trial % 3;
        double tolerance = trial % 3 == 0 ? 0 : 0.02, none_s = bucket_s(&f, 0), fastest_s = none_s;
        for (int i = 0; i <= 40; i++) fastest_s = fmin(fastest_s, bucket_s(&f, (uint64_t)1 << i));
        tagc_bucket_choice c = choose_bucket(&f, tolerance);
        assert_true(c.without_s == none_s && c.chosen_s == bucket_s(&f, c.bucket_elems));
        assert_true(c.chosen_s <= fastest_s * (1 + tolerance));
        if (c.bucket_elems > 0) assert_true(none_s > fastest_s * (1 + tolerance));
        for (uint64_t smaller = 1; smaller < c.bucket_elems; smaller *= 2)
            assert_true(bucket_s(&f, smaller) > fastest_s * (1 + tolerance));
        n_none += c.bucket_elems == 0;
        n_all += c.n_units == 2; /* the embedding, and the rest */
        n_between += c.bucket_elems > 0 && c.n_units > 2;
    }
    assert_true(n_none > 5 && n_all > 5 && n_between > 5);
}

/* Where messages cost nothing, buckets only hide less; where nothing else costs, fewer are faster. */
static void latency_decides(void **state) {
    (void)state;
    fixture f;
    make_deep(&f, TAGC_PLACE_ZERO3, 1e8, 0);
    assert_int_equal(choose_bucket(&f, 0.02).bucket_elems, 0);
    make_deep(&f, TAGC_PLACE_ZERO3, (double)INFINITY, 1);
    tagc_bucket_choice c = choose_bucket(&f, 0.02);
    assert_int_equal(c.n_units, 2);
    assert_true(c.chosen_s < c.without_s / 3);
    make_deep(&f, TAGC_PLACE_ZERO3, (double)INFINITY, 1);
    f.setup.engine.wrap = TAGC_WRAP_MATRIX; /* has no stages to join */
    assert_int_equal(choose_bucket(&f, 0).bucket_elems, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_gains),
        cmocka_unit_test(only_bytes_count),
        cmocka_unit_test(any_machine),
        cmocka_unit_test(what_is_wrong_is_told),
        cmocka_unit_test(a_bucket_is_the_smallest_that_is_fast),
        cmocka_unit_test(latency_decides),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
