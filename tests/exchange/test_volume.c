/* Planned bytes against the bytes that reducers and gatherers really send: equal, leg by leg and rank by rank, for
 * every exchange and option that changes them. What depends on the data comes from the step itself. */
#include "../lengths.h"
#include "../repeats.h"
#include "paper.h"
#include "ranks.h"

#include "exchange/direct/direct.h"
#include "exchange/options.h"
#include "exchange/volume.h"
#include "paper/paper.h"
#include "whole.h"

#include <math.h>

enum { N_STEPS = 2, N_ELEMS = 6000 };

typedef struct volume_case {
    tagc_reducer_options options;
    tagc_paper_options paper;
    uint64_t n_elems;
    uint64_t n_left; /* of all ranks and steps, to see that leftovers were met at all */
    pthread_mutex_t lock;
} volume_case;

/* All ranks' numbers of shards, as the owner knows them. */
static void gather_counts(rank_run *run, uint64_t own, uint64_t *all) {
    CHECK(run, tagc_comm_all_gather(run->comm, &own, sizeof own, all,
                                    (size_t)run->world_size * sizeof *all) == TAGC_OK);
}

static void check_step(rank_run *run, volume_case *c, tagc_reducer *reducer,
                       const tagc_reducer_options *options, const tagc_reducer_stats *stats) {
    uint64_t n_union[MAX_RANKS], n_left[MAX_RANKS];
    int rank = run->rank;
    int has_union = options->exchange == TAGC_EXCHANGE_PACKED || options->exchange == TAGC_EXCHANGE_SKETCH;
    gather_counts(run, has_union ? tagc_own_union(reducer).n : 0, n_union);
    gather_counts(run, stats->n_unpeeled, n_left);
    tagc_volume planned;
    tagc_volume_data data = {.n_union = n_union, .n_left = n_left};
    CHECK(run, tagc_reducer_volume(options, run->world_size, rank, &data, &planned) == TAGC_OK);
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
        if (planned.n_bytes[leg] != (double)stats->n_bytes_sent[leg] && !run->failure[0])
            snprintf(run->failure, sizeof run->failure,
                     "exchange %d index %d ratio %g all %d: leg %s planned %.17g, sent %llu",
                     options->exchange, c->paper.index, c->paper.ratio, options->output, tagc_leg_name(leg),
                     planned.n_bytes[leg], (unsigned long long)stats->n_bytes_sent[leg]);
    }
    pthread_mutex_lock(&c->lock);
    c->n_left += stats->n_unpeeled;
    pthread_mutex_unlock(&c->lock);
}

static void send_once(rank_run *run) {
    volume_case *c = run->shared;
    tagc_reducer_options options = c->options;
    tagc_paper_options paper = c->paper;
    attach_paper(&options, &paper);
    options.n_elems = tagc_padded_elems(c->n_elems, run->world_size);
    tagc_reducer *reducer;
    if (!CHECK(run, tagc_reducer_create(run->comm, &options, &reducer) == TAGC_OK)) return;
    float *gradient = malloc(options.n_elems * sizeof *gradient);
    float *output = malloc(options.n_elems * sizeof *output);
    for (uint64_t step = 0; step < N_STEPS; step++) {
        tagc_reducer_stats stats;
        tagc_reducer_stats_init(&stats);
        for (uint64_t i = 0; i < options.n_elems; i++) gradient[i] = random_gradient(step, run->rank, i);
        CHECK(run, run_reducer(reducer, gradient, output, &stats) == TAGC_OK);
        check_step(run, c, reducer, &options, &stats);
    }
    tagc_exchange_memory memory;
    CHECK(run, tagc_reducer_memory(&options, run->world_size, TAGC_FED_NOT, &memory) == TAGC_OK);
    CHECK(run, memory.residual == tagc_reducer_state_bytes(reducer) - 64); /* without the header */
    tagc_reducer_destroy(reducer);
    free(gradient);
    free(output);
}

static void check(volume_case *c) {
    static const int worlds[] = {1, 2, 5, 3, 8};
    size_t n_worlds = REPEATS(5, 3, 3); /* many threads take their time where they are checked */
    pthread_mutex_init(&c->lock, NULL);
    for (size_t w = 0; w < n_worlds; w++) {
        c->n_elems = N_ELEMS + 37 * w;
        run_ranks(worlds[w], send_once, c);
    }
    pthread_mutex_destroy(&c->lock);
}

TEST(dense) {
    for (int variant = 0; variant < 4; variant++) {
        volume_case c = {0};
        tagc_reducer_options_init(&c.options);
        tagc_paper_options_init(&c.paper);
        c.options.format = variant & 1 ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
        set_exchange(&c.options, WHOLE);
        c.options.output = variant >> 1;
        check(&c);
    }
}

TEST(packed) {
    static const double sparsities[] = {0, 0.5, 0.9, 1};
    for (int variant = 0; variant < 24; variant++) {
        volume_case c = {0};
        tagc_reducer_options_init(&c.options);
        tagc_paper_options_init(&c.paper);
        c.options.exchange = TAGC_EXCHANGE_PACKED;
        c.paper.index = variant % 3;
        c.options.sparsity = sparsities[variant / 3 % 4];
        c.options.output = variant / 12;
        check(&c);
    }
}

/* Ratios that peel, that leave items over, and from the union. */
TEST(sketch) {
    static const double ratios[] = {0, 4, 10, 30};
    uint64_t n_left = 0;
    for (int variant = 0; variant < 4 * 3 * 3 * 2; variant += 5) { /* which shares no factor with them */
        volume_case c = {0};
        tagc_reducer_options_init(&c.options);
        tagc_paper_options_init(&c.paper);
        c.options.exchange = TAGC_EXCHANGE_SKETCH;
        c.options.sparsity = 0.9;
        c.paper.ratio = ratios[variant % 4];
        c.paper.index = variant / 4 % 3;
        c.paper.unpeeled = variant / 12 % 3;
        c.options.output = variant / 36;
        c.paper.cells = variant & 1 ? TAGC_CELLS_FIXED : TAGC_CELLS_FP32;
        check(&c);
        n_left += c.n_left;
    }
    assert_true(n_left > 1000);
}

/* ---- direct ---- */

static float plain_gradient(uint64_t seed, int rank, uint64_t i) {
    uint64_t x = mix(seed * 1000003 + (uint64_t)rank * 7919 + i);
    double u = (double)(x >> 40) / 16777216.0 - 0.5; /* nothing that is kept is near what is kept before */
    return (float)(u * u * u);
}

/* Bodies that this rank sends, as their owners have them; a reducer without results still knows. */
static void gather_bodies(rank_run *run, const tagc_direct *d, tagc_encoded *bodies) {
    tagc_fragment own[MAX_RANKS] = {{0}}, all[MAX_RANKS][MAX_RANKS];
    for (int from = 0; from < run->world_size; from++) own[from] = d->received[from];
    CHECK(run, tagc_comm_all_gather(run->comm, own, sizeof own, all, (size_t)run->world_size * sizeof own) ==
                   TAGC_OK);
    for (int q = 0; q < run->world_size; q++)
        bodies[q] = (tagc_encoded){.n_bytes = all[q][run->rank].n_bytes,
                                   .n_index_bytes = all[q][run->rank].index_bytes};
}

/* Of one step, with and without its results; returns 0 when planned and sent differ by more than `tolerance`. */
static void direct_once(rank_run *run) {
    volume_case *c = run->shared;
    tagc_reducer_options options = c->options, scatter;
    options.n_elems = tagc_padded_elems(c->n_elems, run->world_size);
    scatter = options;
    scatter.output = 0; /* the same rows */
    tagc_reducer *reducer, *plain;
    if (!CHECK(run, tagc_reducer_create(run->comm, &options, &reducer) == TAGC_OK)) return;
    if (!CHECK(run, tagc_reducer_create(run->comm, &scatter, &plain) == TAGC_OK)) return;
    float *gradient = malloc(options.n_elems * sizeof *gradient);
    float *output = malloc(options.n_elems * sizeof *output);
    for (uint64_t i = 0; i < options.n_elems; i++) gradient[i] = plain_gradient(1, run->rank, i);
    tagc_reducer_stats stats;
    tagc_reducer_stats_init(&stats);
    CHECK(run, run_reducer(plain, gradient, output, NULL) == TAGC_OK);
    CHECK(run, run_reducer(reducer, gradient, output, &stats) == TAGC_OK);
    tagc_encoded bodies[MAX_RANKS], sums = {0};
    int has_bodies = !tagc_reducer_options_are_whole(&options);
    if (has_bodies) gather_bodies(run, tagc_direct_of(plain), bodies);
    const tagc_direct *d = tagc_direct_of(reducer);
    if (has_bodies && options.output)
        sums = (tagc_encoded){.n_bytes = d->received[run->rank].n_bytes,
                              .n_index_bytes = d->received[run->rank].index_bytes};
    tagc_volume_data data = {.bodies = bodies, .sums = &sums};
    if (options.sparsity == 0) data = (tagc_volume_data){0}; /* one length only */
    tagc_volume planned;
    CHECK(run, tagc_reducer_volume(&options, run->world_size, run->rank, &data, &planned) == TAGC_OK);
    for (int leg = 0; leg < TAGC_N_LEGS; leg++)
        if (planned.n_bytes[leg] != (double)stats.n_bytes_sent[leg] && !run->failure[0])
            snprintf(run->failure, sizeof run->failure,
                     "values %d sparsity %g all %d: leg %s planned %.17g, sent %llu", options.format,
                     options.sparsity, options.output, tagc_leg_name(leg), planned.n_bytes[leg],
                     (unsigned long long)stats.n_bytes_sent[leg]);
    tagc_exchange_memory memory;
    CHECK(run, tagc_reducer_memory(&options, run->world_size, TAGC_FED_NOT, &memory) == TAGC_OK);
    CHECK(run, memory.residual == tagc_reducer_state_bytes(reducer) - 64); /* without the header */
    tagc_reducer_destroy(reducer);
    tagc_reducer_destroy(plain);
    free(gradient);
    free(output);
}

/* To the byte. */
TEST(direct) {
    static const double sparsities[] = {0, 0.5, 0.95, 1};
#ifdef TAGC_SANITIZED
    static const int worlds[] = {1, 2, 6}; /* many threads take their time there */
#else
    static const int worlds[] = {1, 2, 3, 6, 8};
#endif
    for (size_t w = 0; w < sizeof worlds / sizeof worlds[0]; w++)
        for (int variant = 0; variant < 40; variant++) {
            volume_case c = {.n_elems = N_ELEMS + 37};
            tagc_reducer_options_init(&c.options);
            tagc_paper_options_init(&c.paper);
            c.options.exchange = TAGC_EXCHANGE_DIRECT;
            c.options.format = (variant + (int)w) % 5;
            c.options.sparsity = sparsities[variant % 4];
            c.options.output = variant / 4 % 2;
            run_ranks(worlds[w], direct_once, &c);
        }
}

typedef struct expectation {
    tagc_reducer_options options;
    double sent[MAX_RANKS], planned[MAX_RANKS]; /* all legs */
} expectation;

static void expect_once(rank_run *run) {
    expectation *e = run->shared;
    size_t n = (size_t)e->options.n_elems;
    tagc_reducer *reducer;
    if (!CHECK(run, tagc_reducer_create(run->comm, &e->options, &reducer) == TAGC_OK)) return;
    float *gradient = malloc(n * sizeof *gradient), *output = malloc(n * sizeof *output);
    for (uint64_t i = 0; i < n; i++) gradient[i] = plain_gradient(7, run->rank, i);
    tagc_reducer_stats stats;
    tagc_reducer_stats_init(&stats);
    for (int step = 0; step < 2; step++) /* after the first it is known how long bodies are */
        CHECK(run, run_reducer(reducer, gradient, output, &stats) == TAGC_OK);
    double density = 1 - e->options.sparsity;
    tagc_volume planned;
    tagc_volume_data data = {.sent_density = density, .union_density = 1 - pow(1 - density, run->world_size)};
    CHECK(run, tagc_reducer_volume(&e->options, run->world_size, run->rank, &data, &planned) == TAGC_OK);
    e->sent[run->rank] = e->planned[run->rank] = 0;
    for (int leg = 0; leg < TAGC_N_LEGS; leg++) {
        e->sent[run->rank] += (double)stats.n_bytes_sent[leg];
        e->planned[run->rank] += planned.n_bytes[leg];
    }
    tagc_reducer_destroy(reducer);
    free(gradient);
    free(output);
}

/* Without the bodies: an expectation that is near, also with results. */
TEST(direct_expected_length) {
    static const double sparsities[] = {0.8, 0.9, 0.95, 0.9875};
    for (int variant = 0; variant < 16; variant++) {
        expectation e = {0};
        int world_size = variant % 2 ? 4 : 8;
        tagc_reducer_options_init(&e.options);
        e.options.exchange = TAGC_EXCHANGE_DIRECT;
        e.options.n_elems = 20000 * (uint64_t)world_size;
        e.options.format = variant % 5;
        e.options.sparsity = sparsities[variant % 4];
        e.options.output = variant / 8;
        run_ranks(world_size, expect_once, &e);
        for (int r = 0; r < world_size; r++) assert_true(fabs(e.sent[r] / e.planned[r] - 1) < 0.02);
    }
}

/* What a rank sends of a unit, before the factor (W - 1) / W, is the same for 2 ranks and for 16, also if sums come back. */
TEST(direct_does_not_grow) {
    for (int output = TAGC_OUTPUT_SHARD; output <= TAGC_OUTPUT_UNIT; output++) {
        double first = 0;
        for (int world_size = 2; world_size <= REPEATS(16, 8, 8); world_size *= 2) {
            expectation e = {0};
            tagc_reducer_options_init(&e.options);
            e.options.exchange = TAGC_EXCHANGE_DIRECT;
            e.options.n_elems = REPEATS(4, 1, 1) << 20;
            e.options.sparsity = 0.95;
            e.options.output = output;
            run_ranks(world_size, expect_once, &e);
            double bits = 0;
            for (int r = 0; r < world_size; r++)
                bits += 8 * e.sent[r] / (world_size - 1) / (double)e.options.n_elems;
            print_message("direct, 95 %%, %s, W = %2d: %.4f bits per element and rank\n",
                          output ? "all-reduce" : "reduce-scatter", world_size, bits);
            if (world_size == 2) first = bits;
            if (output) /* a small shard has more of its table of positions */
                assert_in_range((int)(1000 * bits), 1470, REPEATS(1500, 1560, 1560));
            else
                assert_in_range((int)(1000 * bits), 415, REPEATS(430, 460, 460));
            assert_true(fabs(bits / first - 1) < 0.02);
        }
    }
}

static void gather_once(rank_run *run) {
    for (int wire = TAGC_FORMAT_FP32; wire <= TAGC_FORMAT_BF16; wire++) {
        tagc_gatherer_options options;
        tagc_gatherer_options_init(&options);
        options.n_elems = tagc_padded_elems(N_ELEMS, run->world_size);
        options.format = wire;
        tagc_gatherer *gatherer;
        if (!CHECK(run, tagc_gatherer_create(run->comm, &options, &gatherer) == TAGC_OK)) return;
        float *full = calloc(options.n_elems, sizeof *full);
        uint64_t before[TAGC_N_LEGS], after[TAGC_N_LEGS];
        size_t shard = options.n_elems / (uint64_t)run->world_size;
        tagc_comm_bytes(run->comm, before, NULL, TAGC_N_LEGS);
        CHECK(run, begin_gatherer(gatherer, full + (size_t)run->rank * shard, full) == TAGC_OK);
        CHECK(run, tagc_gatherer_end(gatherer) == TAGC_OK);
        tagc_comm_bytes(run->comm, after, NULL, TAGC_N_LEGS);
        tagc_volume planned;
        CHECK(run, tagc_gatherer_volume(&options, run->world_size, &planned) == TAGC_OK);
        for (int leg = 0; leg < TAGC_N_LEGS; leg++)
            CHECK(run, planned.n_bytes[leg] == (double)(after[leg] - before[leg]));
        tagc_gatherer_destroy(gatherer);
        free(full);
    }
}

TEST(gather) {
    for (int world_size = 1; world_size <= 8; world_size++) {
        run_ranks(world_size, gather_once, NULL);
    }
}

TEST(refuses_what_a_reducer_refuses) {
    tagc_reducer_options options;
    tagc_volume volume;
    tagc_volume_data data = {.union_density = 1.5};
    tagc_reducer_options_init(&options);
    options.exchange = TAGC_EXCHANGE_PACKED;
    options.n_elems = 1600;
    assert_int_equal(tagc_reducer_volume(&options, 4, 0, &data, &volume), TAGC_ERR_ARGUMENT);
    assert_non_null(strstr(tagc_last_error(), "union_density is 1.5"));
    data.union_density = 0.5;
    options.n_elems = 0;
    assert_int_equal(tagc_reducer_volume(&options, 4, 0, &data, &volume), TAGC_ERR_ARGUMENT);
    options.n_elems = 1600;
    tagc_paper_options paper;
    tagc_paper_options_init(&paper);
    paper.index = TAGC_INDEX_SUM4;
    options.paper = &paper;
    assert_int_equal(tagc_reducer_volume(&options, 16, 0, &data, &volume), TAGC_ERR_UNSUPPORTED);
    assert_int_equal(tagc_reducer_volume(&options, 4, 4, &data, &volume), TAGC_ERR_ARGUMENT);
}

/* Spares of small residuals are many, of larger ones a few, of large ones one; reducers without a residual have none. */
TEST(memory_counts_every_spare) {
    static const struct {
        uint64_t n_elems;
        int n_reducers, n_spares, residual;
    } cases[] = {{1000, 70, TAGC_MOST_SPARES, TAGC_FORMAT_FP32},
                 {1000, 3, 3, TAGC_FORMAT_INT4},
                 {3u << 20, 4, 3, TAGC_FORMAT_FP32},
                 {9u << 20, 2, 1, TAGC_FORMAT_FP32},
                 {12u << 20, 4, 3, TAGC_FORMAT_INT8},
                 {0, 2, 0, -1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tagc_comm *comm = comm_alone(NULL);
        tagc_reducer *reducers[70];
        tagc_reducer_options options;
        tagc_reducer_options_init(&options);
        options.n_elems = cases[i].n_elems ? cases[i].n_elems : 1000;
        set_exchange(&options, cases[i].n_elems ? TAGC_EXCHANGE_DIRECT : WHOLE);
        options.residual = cases[i].residual;
        tagc_exchange_memory memory;
        for (int k = 0; k < cases[i].n_reducers; k++)
            assert_int_equal(tagc_reducer_create(comm, &options, &reducers[k]), TAGC_OK);
        assert_int_equal(tagc_reducer_memory(&options, 1, TAGC_FED_NOT, &memory), TAGC_OK);
        const tagc_spares *spares = reducers[0]->spares;
        assert_int_equal(spares ? spares->n_made : 0, cases[i].n_spares);
        if (spares) assert_int_equal(spares->n_bytes, memory.residual);
        int n_told = tagc_comm_n_spares(TAGC_MORE_WORK_BYTES, memory.residual, cases[i].n_reducers);
        assert_int_equal(memory.residual ? n_told : 0, cases[i].n_spares);
        for (int k = 0; k < cases[i].n_reducers; k++) tagc_reducer_destroy(reducers[k]);
        tagc_comm_destroy(comm);
    }
}
