/* The sketch at the paper's 10x on the shapes of GPT-2: nothing may stay unpeeled, and the wire carries what
 * the formula says, as counted by the transport. */
#include "../exchange/oracle.h"
#include "../exchange/paper.h"
#include "../exchange/ranks.h"
#include "../lengths.h"
#include "core/clock.h"

#ifdef TAGC_SANITIZED
enum { N_SEEDS = 5, N_LARGE_SEEDS = 1, LARGE = 2359296 / 8, MIDDLE_SEEDS = 2 };
#else
enum { N_SEEDS = 100, N_LARGE_SEEDS = 2, LARGE = 2359296, MIDDLE_SEEDS = 10 };
#endif

typedef struct trial {
    tagc_reducer_options options;
    tagc_paper_options paper;
    int hot_columns; /* of a (768, n / 768) matrix: where everything large is */
    uint64_t first_seed;
    int n_seeds;
    tagc_reducer_stats stats[MAX_RANKS];
    uint64_t n_unpeeled[MAX_RANKS];
    uint64_t n_bytes_sent[MAX_RANKS]; /* by the comm, all legs but control */
} trial;

static void run_seeds(rank_run *run) {
    trial *t = run->shared;
    size_t n = (size_t)t->options.n_elems;
    float *gradient = malloc(n * sizeof *gradient), *output = malloc(n * sizeof *output);
    for (int s = 0; s < t->n_seeds; s++) {
        uint64_t seed = t->first_seed + (uint64_t)s, before[TAGC_N_LEGS], after[TAGC_N_LEGS];
        tagc_reducer_options options = t->options;
        tagc_paper_options paper = t->paper;
        paper.seed = seed;
        attach_paper(&options, &paper);
        tagc_reducer *reducer;
        if (!CHECK(run, tagc_reducer_create(run->comm, &options, &reducer) == TAGC_OK)) break;
        size_t n_columns = n / 768 ? n / 768 : 1;
        for (size_t i = 0; i < n; i++) {
            gradient[i] = random_gradient(seed, run->rank, i);
            if (t->hot_columns && i % n_columns < (size_t)t->hot_columns) gradient[i] += 1;
        }
        tagc_comm_bytes(run->comm, before, NULL, TAGC_N_LEGS);
        tagc_reducer_stats_init(&t->stats[run->rank]);
        double begin_s = tagc_clock_s();
        CHECK(run, run_reducer(reducer, gradient, output, &t->stats[run->rank]) == TAGC_OK);
        double total_s = t->stats[run->rank].total_s;
        CHECK(run, total_s > 0 && total_s <= tagc_clock_s() - begin_s);
        tagc_comm_bytes(run->comm, after, NULL, TAGC_N_LEGS);
        t->n_unpeeled[run->rank] += t->stats[run->rank].n_unpeeled;
        t->n_bytes_sent[run->rank] = 0;
        for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
            CHECK(run, after[leg] - before[leg] == t->stats[run->rank].n_bytes_sent[leg]);
            t->n_bytes_sent[run->rank] += after[leg] - before[leg];
        }
        tagc_reducer_destroy(reducer);
    }
    free(gradient);
    free(output);
}

static trial make_trial(uint64_t n, int world_size, int n_seeds) {
    trial t = {.n_seeds = n_seeds, .first_seed = n};
    tagc_reducer_options_init(&t.options);
    tagc_paper_options_init(&t.paper);
    t.options.n_elems = tagc_padded_elems(n, world_size);
    t.options.exchange = TAGC_EXCHANGE_SKETCH;
    t.paper.ratio = 10;
    return t;
}

static void assert_all_peeled(trial *t, int world_size) {
    run_ranks(world_size, run_seeds, t);
    for (int r = 0; r < world_size; r++) {
        if (t->n_unpeeled[r])
            fail_msg("n = %llu, W = %d: %llu unpeeled at load %.3f", (unsigned long long)t->options.n_elems,
                     world_size, (unsigned long long)t->n_unpeeled[r], t->stats[r].load);
        assert_true(t->stats[r].sparsity >= 0.9875);
    }
}

TEST(test_small_shapes) {
    static const uint64_t sizes[] = {5 * 1009, 12288};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (int world_size = 2; world_size <= 4; world_size += 2) {
            trial t = make_trial(sizes[i], world_size, N_SEEDS);
            assert_all_peeled(&t, world_size);
        }
    trial t = make_trial(98304, 4, N_SEEDS / 2);
    assert_all_peeled(&t, 4);
}

TEST(test_large_shape) {
    for (int world_size = 2; world_size <= 4; world_size += 2) {
        trial t = make_trial(LARGE, world_size, N_LARGE_SEEDS);
        assert_all_peeled(&t, world_size);
    }
}

TEST(test_hot_columns) {
    trial t = make_trial(LARGE / 4, 2, 2);
    t.hot_columns = 10;
    assert_all_peeled(&t, 2);
}

/* Sized from the union: load 0.75 whatever the union, also at low sparsity and for tiny shards. */
TEST(test_auto_ratio) {
    static const double sparsities[] = {0.5, 0.8, 0.9, 0.95, 0.9875, 0.999};
    for (size_t s = 0; s < sizeof sparsities / sizeof sparsities[0]; s++)
        for (int shape = 0; shape < 3; shape++) {
            trial t = make_trial((uint64_t[]){400, 30000, 400000}[shape], 2,
                                 shape == 2 ? MIDDLE_SEEDS / 2 : MIDDLE_SEEDS);
            t.paper.ratio = 0;
            t.options.sparsity = sparsities[s];
            run_ranks(2, run_seeds, &t);
            double n_items = 0; /* of both shards */
            for (int r = 0; r < 2; r++) n_items += t.stats[r].load * (double)t.stats[r].n_cells;
            assert_true(fabs(n_items - (double)t.stats[0].n_union) < 0.5 && t.stats[0].n_union > 0);
            for (int r = 0; r < 2; r++) {
                assert_int_equal(t.n_unpeeled[r], 0);
                if (shape == 2 && sparsities[s] < 0.99)
                    assert_true(t.stats[r].load > 0.73 && t.stats[r].load < 0.76);
            }
        }
}

static double bits_per_element(const trial *t, int world_size) {
    double n_bits = 0;
    for (int r = 0; r < world_size; r++) n_bits += 8.0 * (double)t->n_bytes_sent[r];
    return n_bits / world_size / (double)t->options.n_elems;
}

/* Bits per parameter and rank: 10x with a true OR is (2 + 3.2) (W - 1) / W; packed is (2 + 32 u) (W - 1) / W.
 */
TEST(test_wire_bytes) {
    trial t = make_trial(LARGE, 2, 1);
    run_ranks(2, run_seeds, &t);
    double expected = 5.2 * 0.5, measured = bits_per_element(&t, 2);
    print_message("sketch 10x: %.4f bits, expected %.4f\n", measured, expected);
    assert_true(fabs(measured / expected - 1) < 0.02);
    assert_int_equal(t.stats[0].n_bytes_sent[TAGC_LEG_LEFTOVER], 0);

    trial nibbles = make_trial(LARGE, 2, 1);
    nibbles.paper.index = TAGC_INDEX_SUM4;
    run_ranks(2, run_seeds, &nibbles);
    expected = (8 + 3.2) * 0.5, measured = bits_per_element(&nibbles, 2);
    print_message("sketch 10x, sum4: %.4f bits, expected %.4f\n", measured, expected);
    assert_true(fabs(measured / expected - 1) < 0.02);

    trial packed = make_trial(LARGE, 2, 1);
    packed.options.exchange = TAGC_EXCHANGE_PACKED;
    run_ranks(2, run_seeds, &packed);
    double density = (double)packed.stats[0].n_union / (double)packed.options.n_elems;
    expected = (2 + 32 * density) * 0.5, measured = bits_per_element(&packed, 2);
    print_message("packed: %.4f bits, expected %.4f (union %.4f)\n", measured, expected, density);
    assert_true(fabs(measured / expected - 1) < 0.01);
}
