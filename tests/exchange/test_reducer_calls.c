/* What a caller can get wrong between steps: calls out of order, and sparsities that differ between ranks.
 * Then all ranks hear of it, and can go on together. */
#include "../lengths.h"
#include "exchange/reducer.h"
#include "good_options.h"

#include <math.h>

/* A reducer of one rank with its arrays. */
typedef struct caller {
    rank_run *run;
    tagc_reducer_options options;
    tagc_reducer *reducer;
    float gradient[GOOD_ELEMS], output[64];
} caller;

static caller new_caller(rank_run *run, tagc_exchange exchange) {
    caller c = {.run = run, .options = good_options(run->world_size)};
    c.options.exchange = exchange;
    fill_good(run, c.gradient);
    return c;
}

static int make(caller *c) {
    return CHECK(c->run, tagc_reducer_create(c->run->comm, &c->options, &c->reducer) == TAGC_OK);
}

static tagc_status step(caller *c, tagc_reducer_stats *stats) {
    return run_reducer(c->reducer, c->gradient, c->output, stats);
}

/* ---- index first ---- */

static void refuse_calls(caller *c) {
    rank_run *run = c->run;
    CHECK(run, tagc_reducer_end(c->reducer, NULL) == TAGC_ERR_STATE);
    CHECK(run, begin_reducer(NULL, c->gradient, c->output) == TAGC_ERR_ARGUMENT);
    CHECK(run, begin_reducer(c->reducer, NULL, c->output) == TAGC_ERR_ARGUMENT);
    CHECK(run, begin_reducer(c->reducer, c->gradient, NULL) == TAGC_ERR_ARGUMENT);
    CHECK(run, begin_reducer(c->reducer, c->gradient, c->gradient + 1) == TAGC_ERR_ARGUMENT);
    CHECK(run, strstr(tagc_last_error(), "overlap"));
    CHECK(run, begin_reducer(c->reducer, c->gradient, c->output) == TAGC_OK);
    CHECK(run, begin_reducer(c->reducer, c->gradient, c->output) == TAGC_ERR_STATE);
    CHECK(run, tagc_reducer_set_sparsity(c->reducer, 0.5) == TAGC_ERR_STATE);
    CHECK(run, tagc_reducer_scale_residual(c->reducer, 1) == TAGC_ERR_STATE);
    CHECK(run, tagc_reducer_set_residual(c->reducer, c->gradient, GOOD_ELEMS) == TAGC_ERR_STATE);
    CHECK(run, tagc_reducer_end(c->reducer, NULL) == TAGC_OK);
    CHECK(run, tagc_reducer_end(NULL, NULL) == TAGC_ERR_ARGUMENT);
    tagc_reducer_stats not_initialised = {0};
    CHECK(run, step(c, &not_initialised) == TAGC_ERR_ARGUMENT);
}

static void set_sparsities(caller *c) {
    rank_run *run = c->run;
    tagc_reducer_stats stats;
    tagc_reducer_stats_init(&stats);
    CHECK(run, tagc_reducer_set_sparsity(c->reducer, 1.5) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_set_sparsity(c->reducer, NAN) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_set_sparsity(NULL, 0.5) == TAGC_ERR_ARGUMENT);
    for (double sparsity = 0; sparsity <= 1; sparsity += 0.25) {
        CHECK(run, tagc_reducer_set_sparsity(c->reducer, sparsity) == TAGC_OK);
        CHECK(run, step(c, &stats) == TAGC_OK);
        CHECK(run, stats.sparsity == sparsity);
    }
}

/* Fields that make the reducer what it is, and values out of range, change nothing. */
static void refuse_changes(caller *c) {
    rank_run *run = c->run;
    tagc_reducer_options o = c->options;
    CHECK(run, tagc_reducer_change(NULL, &o) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_change(c->reducer, NULL) == TAGC_ERR_ARGUMENT);
    o.op = TAGC_OP_SUM;
    CHECK(run, tagc_reducer_change(c->reducer, &o) == TAGC_ERR_ARGUMENT);
    CHECK(run, strstr(tagc_last_error(), "op is sum, must be avg: only format, sparsity, block"));
    o = c->options;
    o.n_elems *= 2;
    CHECK(run, tagc_reducer_change(c->reducer, &o) == TAGC_ERR_ARGUMENT);
    o = c->options;
    o.format = TAGC_FORMAT_FP32;
    o.block = 64;
    CHECK(run, tagc_reducer_change(c->reducer, &o) == TAGC_ERR_UNSUPPORTED);
    o.format = 77;
    CHECK(run, tagc_reducer_change(c->reducer, &o) == TAGC_ERR_ARGUMENT);
    CHECK(run, begin_reducer(c->reducer, c->gradient, c->output) == TAGC_OK);
    CHECK(run, tagc_reducer_change(c->reducer, &c->options) == TAGC_ERR_STATE);
    CHECK(run, tagc_reducer_end(c->reducer, NULL) == TAGC_OK);
}

/* From level to level and back: each step is, bit for bit, that of a new reducer with the same residual. */
static void change_levels(rank_run *run) {
    static const struct {
        int format, block;
        double sparsity;
    } levels[] = {{TAGC_FORMAT_INT8, 0, 0},    {TAGC_FORMAT_INT4, 64, 0}, {TAGC_FORMAT_INT2, 32, 0.9},
                  {TAGC_FORMAT_INT2, 32, 0.5}, {TAGC_FORMAT_INT2, 0, 0},  {TAGC_FORMAT_FP32, 0, 0},
                  {TAGC_FORMAT_INT4, 0, 0}};
    caller c = new_caller(run, TAGC_EXCHANGE_DIRECT);
    c.options.format = TAGC_FORMAT_INT8;
    c.options.sparsity = 0;
    float expected[64], residual[GOOD_ELEMS], there[GOOD_ELEMS];
    if (!make(&c)) return;
    refuse_changes(&c);
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++) {
        tagc_reducer *fresh;
        c.options.format = levels[i].format;
        c.options.block = levels[i].block;
        c.options.sparsity = levels[i].sparsity;
        CHECK(run, tagc_reducer_get_residual(c.reducer, residual, GOOD_ELEMS) == TAGC_OK);
        CHECK(run, tagc_reducer_change(c.reducer, &c.options) == TAGC_OK);
        CHECK(run, tagc_reducer_change(c.reducer, &c.options) == TAGC_OK);
        CHECK(run, tagc_reducer_get_residual(c.reducer, there, GOOD_ELEMS) == TAGC_OK);
        CHECK(run, memcmp(residual, there, sizeof there) == 0);
        if (!CHECK(run, tagc_reducer_create(run->comm, &c.options, &fresh) == TAGC_OK)) return;
        int has_residual = tagc_reducer_residual_elems(fresh) > 0;
        CHECK(run, has_residual == (levels[i].format != TAGC_FORMAT_FP32));
        if (has_residual) CHECK(run, tagc_reducer_set_residual(fresh, residual, GOOD_ELEMS) == TAGC_OK);
        CHECK(run, step(&c, NULL) == TAGC_OK);
        CHECK(run, run_reducer(fresh, c.gradient, expected, NULL) == TAGC_OK);
        int is_same = memcmp(expected, c.output, sizeof expected) == 0;
        CHECK(run, is_same == has_residual); /* in fp32 all that was in the residual leaves it */
        double square;
        CHECK(run, tagc_reducer_residual_square(c.reducer, &square) == TAGC_OK);
        CHECK(run, (square == 0) == !has_residual);
        tagc_reducer_destroy(fresh);
    }
    tagc_reducer_destroy(c.reducer);
}

TEST(test_change_of_level) {
    run_ranks(4, change_levels, NULL);
}

static void forget_on_one(caller *c) {
    rank_run *run = c->run;
    CHECK(run, tagc_reducer_set_sparsity(c->reducer, run->rank == 1 ? 0.25 : 0.5) == TAGC_OK);
    keep_status(run, step(c, NULL));
    CHECK(run, tagc_reducer_set_sparsity(c->reducer, 0.5) == TAGC_OK);
    CHECK(run, step(c, NULL) == TAGC_OK);
}

static void order_body(rank_run *run) {
    caller c = new_caller(run, TAGC_EXCHANGE_PACKED);
    if (!make(&c)) return;
    refuse_calls(&c);
    set_sparsities(&c);
    forget_on_one(&c);
    CHECK(run, begin_reducer(c.reducer, c.gradient, c.output) == TAGC_OK);
    tagc_reducer_destroy(c.reducer); /* waits for the step */
}

TEST(test_order) {
    rank_run runs[MAX_RANKS];
    run_ranks_with(4, order_body, NULL, NULL, runs);
    for (int r = 0; r < 4; r++) assert_int_equal(runs[r].status, TAGC_ERR_MISMATCH);
    assert_non_null(strstr(runs[0].text, "sparsity"));
    tagc_reducer_destroy(NULL);
    tagc_gatherer_destroy(NULL);
}

/* ---- direct ---- */

/* bf16 at sparsity 0 sends everything exactly and needs no residual. */
static void get_a_residual(caller *c) {
    rank_run *run = c->run;
    CHECK(run, tagc_reducer_residual_elems(c->reducer) == 0 && tagc_reducer_state_bytes(c->reducer) == 64);
    CHECK(run, step(c, NULL) == TAGC_OK);
    CHECK(run, tagc_reducer_set_sparsity(c->reducer, 0.9) == TAGC_OK);
    CHECK(run, tagc_reducer_residual_elems(c->reducer) > 0);
    /* a row for each of four ranks: exponents and codes, both up to a multiple of 64 bytes */
    CHECK(run, tagc_reducer_state_bytes(c->reducer) == 64 + 4 * (64 + 64));
    CHECK(run, c->reducer->residual_format == TAGC_FORMAT_INT8);
    CHECK(run, step(c, NULL) == TAGC_OK);
}

/* A rank that forgets sends more than the others have room for. */
static void forget_on_one_of_direct(caller *c) {
    rank_run *run = c->run;
    float before[GOOD_ELEMS], after[GOOD_ELEMS];
    CHECK(run, tagc_reducer_set_sparsity(c->reducer, run->rank == 1 ? 0.25 : 0.5) == TAGC_OK);
    residual_to(c->reducer, before);
    keep_status(run, step(c, NULL));
    residual_to(c->reducer, after);
    CHECK(run, memcmp(before, after, sizeof before) == 0);
    CHECK(run, step(c, NULL) == TAGC_ERR_MISMATCH);
    CHECK(run, tagc_reducer_set_sparsity(c->reducer, 0.5) == TAGC_OK);
    CHECK(run, step(c, NULL) == TAGC_OK);
    CHECK(run, step(c, NULL) == TAGC_OK);
}

static void direct_order_body(rank_run *run) {
    caller c = new_caller(run, TAGC_EXCHANGE_DIRECT);
    c.options.sparsity = 0;
    c.options.format = TAGC_FORMAT_BF16;
    if (!make(&c)) return;
    get_a_residual(&c);
    forget_on_one_of_direct(&c);
    tagc_reducer_destroy(c.reducer);
}

TEST(test_direct_order) {
    rank_run runs[MAX_RANKS];
    run_ranks_with(4, direct_order_body, NULL, NULL, runs);
    for (int r = 0; r < 4; r++) {
        assert_int_equal(runs[r].status, TAGC_ERR_MISMATCH);
        if (r < 2)
            assert_non_null(strstr(runs[r].text, r == 0 ? "from rank 11: sparsity: 48 of a shard's 64"
                                                        : "from rank 10: sparsity: 32 of a shard's 64"));
    }
}
