/* Options in which one rank differs from the others: all of them get the same error. */
#include "good_options.h"
#include "reducer_fields.h"
#include "whole.h"

/* A field that ranks must agree on, and what one of them has instead. */
typedef struct difference {
    const char *name;
    int exchange; /* in which it has a meaning */
    double value;
    const char *text; /* NULL: "NAME: rank 12 has" */
} difference;

static const difference differences[] = {
    {"n_elems", TAGC_EXCHANGE_PACKED, 0, NULL}, /* twice as many */
    {"exchange", TAGC_EXCHANGE_PACKED, TAGC_EXCHANGE_SKETCH,
     "exchange: rank 12 has sketch, rank 10 has packed"},
    {"index", TAGC_EXCHANGE_PACKED, TAGC_INDEX_SUM4, "rank 12 has"}, /* it also decides fill_union */
    {"sparsity", TAGC_EXCHANGE_PACKED, 0.9, "sparsity: rank 12 has 0.9, rank 10 has 0.9875"},
    {"ratio", TAGC_EXCHANGE_SKETCH, 10, NULL},
    {"cells", TAGC_EXCHANGE_SKETCH, TAGC_CELLS_FIXED, "cells: rank 12 has fixed, rank 10 has fp32"},
    {"unpeeled", TAGC_EXCHANGE_SKETCH, TAGC_UNPEELED_ESTIMATE,
     "unpeeled: rank 12 has estimate, rank 10 has packed"},
    {"fill_union", TAGC_EXCHANGE_PACKED, 0, NULL},
    {"tag", TAGC_EXCHANGE_PACKED, 7, "tag: rank 12 has 7, rank 10 has"}, /* made in another order */
    {"op", TAGC_EXCHANGE_PACKED, TAGC_OP_SUM, "op: rank 12 has sum, rank 10 has avg"},
    {"output", TAGC_EXCHANGE_PACKED, TAGC_OUTPUT_UNIT, "output: rank 12 has unit, rank 10 has shard"},
    {"seed", TAGC_EXCHANGE_SKETCH, 1, NULL},
    {"format", TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_INT4, NULL},
    {"format", WHOLE, TAGC_FORMAT_BF16, "format: rank 12 has bf16, rank 10 has fp32"},
    {"block", TAGC_EXCHANGE_DIRECT, 64, NULL},
    {"residual", TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_INT4,
     "residual: rank 12 has int4, rank 10 has the default"},
    {"residual", TAGC_EXCHANGE_DIRECT, TAGC_RESIDUAL_NONE,
     "residual: rank 12 has none, rank 10 has the default"},
};

static void one_rank_differs(rank_run *run) {
    const difference *d = run->shared;
    both b = {.options = good_options(run->world_size)};
    int is_paper = 0;
    tagc_reducer *reducer;
    tagc_paper_options_init(&b.paper);
    set_exchange(&b.options, d->exchange);
    if (strstr("index fill_union ratio cells unpeeled seed", d->name)) b.options.paper = &b.paper;
    if (run->rank == 2 && !strcmp(d->name, "n_elems"))
        b.options.n_elems *= 2;
    else if (run->rank == 2 && !strcmp(d->name, "tag"))
        b.options.tag = 7;
    else if (run->rank == 2)
        set_field(&b, d->name, d->value, &is_paper);
    keep_status(run, tagc_reducer_create(run->comm, &b.options, &reducer));
    CHECK(run, reducer == NULL);
}

static void invalid_on_one(rank_run *run) {
    tagc_reducer_options options = good_options(run->world_size);
    if (run->rank == 2) options.sparsity = 2;
    tagc_reducer *reducer;
    keep_status(run, tagc_reducer_create(run->comm, &options, &reducer));
}

static void gatherer_on_one(rank_run *run) {
    tagc_reducer_options options = good_options(run->world_size);
    tagc_gatherer_options gather;
    tagc_gatherer_options_init(&gather);
    gather.n_elems = options.n_elems;
    tagc_reducer *reducer;
    tagc_gatherer *gatherer;
    keep_status(run, run->rank == 2 ? tagc_gatherer_create(run->comm, &gather, &gatherer)
                                    : tagc_reducer_create(run->comm, &options, &reducer));
}

/* n_threads, the format of the gradient and the seed of rounding are each rank's own business. */
static void allowed_differences(rank_run *run) {
    tagc_reducer_options options = good_options(run->world_size);
    options.n_threads = 1 + run->rank;
    options.rounding_seed = (uint64_t)run->rank;
    options.exchange = TAGC_EXCHANGE_DIRECT;
    options.gradient = run->rank == 1 ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
    tagc_reducer *reducer;
    CHECK(run, tagc_reducer_create(run->comm, &options, &reducer) == TAGC_OK);
    tagc_reducer_destroy(reducer);
}

static void assert_all(const rank_run *runs, int world_size, tagc_status status, const char *text) {
    for (int r = 0; r < world_size; r++) {
        assert_int_equal(runs[r].status, status);
        if (!strstr(runs[r].text, text)) fail_msg("\"%s\" does not contain \"%s\"", runs[r].text, text);
    }
}

TEST(test_differences) {
    rank_run runs[MAX_RANKS];
    for (size_t i = 0; i < sizeof differences / sizeof differences[0]; i++) {
        const difference *d = &differences[i];
        char expected[64];
        snprintf(expected, sizeof expected, d->text ? "%s" : "%s: rank 12 has", d->text ? d->text : d->name);
        run_ranks_with(4, one_rank_differs, (void *)(uintptr_t)d, NULL, runs);
        assert_all(runs, 4, TAGC_ERR_MISMATCH, expected);
    }
}

TEST(test_mistakes_of_one_rank) {
    rank_run runs[MAX_RANKS];
    run_ranks_with(3, invalid_on_one, NULL, NULL, runs);
    assert_all(runs, 3, TAGC_ERR_ARGUMENT, "rank 12: sparsity is 2, must be in [0, 1]");
    run_ranks_with(3, gatherer_on_one, NULL, NULL, runs);
    assert_all(runs, 3, TAGC_ERR_MISMATCH, "rank 12 makes a gatherer");
}

TEST(test_allowed_differences) {
    run_ranks(3, allowed_differences, NULL);
}
