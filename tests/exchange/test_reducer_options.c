/* Options that a rank can get wrong by itself, their bounds, and those that mean nothing for an exchange. */
#include "exchange/options.h"
#include "good_options.h"
#include "reducer_fields.h"

#include <math.h>

/* ---- one rank's mistakes ---- */

static void expect_refusal(rank_run *run, const tagc_reducer_options *options, tagc_status status,
                           const char *text) {
    tagc_reducer *reducer = (tagc_reducer *)run;
    CHECK(run, tagc_reducer_create(run->comm, options, &reducer) == status);
    CHECK(run, reducer == NULL);
    if (strstr(tagc_last_error(), text) || run->failure[0]) return;
    snprintf(run->failure, sizeof run->failure, "expected \"%s\", the text is \"%.120s\"", text,
             tagc_last_error());
}

/* ---- what means nothing for an exchange ---- */

enum { SKETCH = 2, PACKED = 4, DIRECT = 8, ALL = 14 }; /* by tagc_exchange */

/* Every value that is not the default, the exchanges that take it, and how the refusal of the others begins. */
static const struct {
    const char *field;
    double value;
    int taken_by;
    const char *text;
} meanings[] = {
    {"format", TAGC_FORMAT_FP32, ALL, ""},
    {"format", TAGC_FORMAT_BF16, DIRECT, "format is bf16, but exchange"},
    {"format", TAGC_FORMAT_INT8, DIRECT, "format is int8, but exchange"},
    {"format", TAGC_FORMAT_INT4, DIRECT, "format is int4, but exchange"},
    {"format", TAGC_FORMAT_INT2, DIRECT, "format is int2, but exchange"},
    {"sparsity", 0, ALL, ""},
    {"sparsity", 0.5, ALL, ""},
    {"op", TAGC_OP_SUM, ALL, ""},
    {"output", TAGC_OUTPUT_UNIT, ALL, ""},
    {"block", 64, DIRECT, "block is 64, but exchange"},
    {"n_threads", 2, ALL, ""},
    {"residual", TAGC_FORMAT_FP32, ALL, ""},
    {"residual", TAGC_FORMAT_INT8, DIRECT, "residual is int8, but exchange"},
    {"residual", TAGC_FORMAT_INT4, DIRECT, "residual is int4, but exchange"},
    {"residual", TAGC_RESIDUAL_NONE, DIRECT, "residual is none, but exchange"},
    {"gradient", TAGC_FORMAT_BF16, DIRECT, "gradient is bf16, but exchange"},
    {"paper", 0, SKETCH | PACKED, "paper is set, but exchange"},
    {"index", TAGC_INDEX_SUM4, SKETCH | PACKED, "paper is set, but exchange"},
    {"fill_union", 1, SKETCH | PACKED, "paper is set, but exchange"},
    {"ratio", 10, SKETCH, "ratio is 10, but exchange packed has no ratio"},
    {"cells", TAGC_CELLS_FIXED, SKETCH,
     "cells is fixed, but exchange packed has no cells: leave it at its default, fp32"},
    {"unpeeled", TAGC_UNPEELED_RESIDUAL, SKETCH, "unpeeled is residual, but exchange packed"},
    {"seed", 7, SKETCH, "seed is 7, but exchange packed"},
};

/* Options in which one field has a value of `meanings`. *is_paper: it is one of tagc_paper_options. */
static void set_meaning(rank_run *run, both *b, size_t i, int exchange, int *is_paper) {
    *b = (both){.options = good_options(run->world_size)};
    tagc_paper_options_init(&b->paper);
    b->options.exchange = exchange;
    set_field(b, meanings[i].field, meanings[i].value, is_paper);
    if (*is_paper) b->options.paper = &b->paper;
}

static void check_meaning(rank_run *run, size_t i, int exchange) {
    both b;
    tagc_reducer *reducer;
    int is_paper, has_paper = (SKETCH | PACKED) >> exchange & 1;
    set_meaning(run, &b, i, exchange, &is_paper);
    if (meanings[i].taken_by >> exchange & 1) {
        CHECK(run, tagc_reducer_create(run->comm, &b.options, &reducer) == TAGC_OK);
        tagc_reducer_destroy(reducer);
    } else {
        expect_refusal(run, &b.options, TAGC_ERR_UNSUPPORTED,
                       is_paper && !has_paper ? "paper is set, but exchange" : meanings[i].text);
    }
}

static void meanings_body(rank_run *run) {
    for (size_t i = 0; i < sizeof meanings / sizeof meanings[0]; i++)
        for (int exchange = TAGC_EXCHANGE_SKETCH; exchange <= TAGC_EXCHANGE_DIRECT; exchange++)
            check_meaning(run, i, exchange);
}

TEST(test_meanings) {
    run_ranks(2, meanings_body, NULL);
}

/* ---- values out of range ---- */

static void bad_numbers(rank_run *run) {
    for (size_t f = 0; f < sizeof option_fields / sizeof option_fields[0]; f++)
        for (int side = 0; side < 3; side++) {
            const option_field *field = &option_fields[f];
            both b = {.options = good_options(run->world_size)};
            double value = side == 0 ? field->low : side == 1 ? field->high : NAN;
            tagc_paper_options_init(&b.paper);
            b.options.paper = &b.paper;
            set_number(&b, field, value, (int)(side < 2 ? value : 1e9));
            expect_refusal(run, &b.options, TAGC_ERR_ARGUMENT, field->name);
        }
}

/* A number that an enum does not have: the text lists what it has, by the names in tagc.h and paper.h. */
static void bad_enums(rank_run *run) {
    static const struct {
        const char *field, *text;
        int value;
    } enums[] = {
        {"exchange", "exchange is 9, must be sketch (1), packed (2) or direct (3)", 9},
        {"format",
         "format is 9, must be -1 (the default), fp32 (0), bf16 (1), int8 (2), int4 (3) or int2 "
         "(4)",
         9},
        {"residual", "residual is 9, must be none (-2), -1 (the default), fp32 (0), int8 (2) or int4 (3)", 9},
        {"residual", "residual is 1, must be none (-2), -1 (the default), fp32 (0), int8 (2) or int4 (3)", 1},
        {"gradient", "gradient is 9, must be fp32 (0) or bf16 (1)", 9},
        {"op", "op is 9, must be avg (0) or sum (1)", 9},
        {"output", "output is 9, must be shard (0) or unit (1)", 9},
        {"index", "index is 9, must be or (0), sum4 (1) or sum1 (2)", 9},
        {"cells", "cells is 9, must be fp32 (0) or fixed (1)", 9},
        {"unpeeled", "unpeeled is 9, must be packed (0), residual (1) or estimate (2)", 9},
    };
    for (size_t i = 0; i < sizeof enums / sizeof enums[0]; i++) {
        both b = {.options = good_options(run->world_size)};
        int is_paper;
        tagc_paper_options_init(&b.paper);
        set_field(&b, enums[i].field, enums[i].value, &is_paper);
        if (is_paper) b.options.paper = &b.paper;
        expect_refusal(run, &b.options, TAGC_ERR_ARGUMENT, enums[i].text);
    }
}

static void bad_sizes(rank_run *run) {
    tagc_reducer_options options = good_options(run->world_size);
    options.n_elems = 0;
    expect_refusal(run, &options, TAGC_ERR_ARGUMENT, "n_elems is 0");
    options.n_elems = (uint64_t)run->world_size << 32;
    expect_refusal(run, &options, TAGC_ERR_ARGUMENT, "n_elems is");
    options = good_options(run->world_size);
    options.struct_bytes = 8;
    expect_refusal(run, &options, TAGC_ERR_ARGUMENT,
                   "struct_bytes of tagc_reducer_options is 8, must be in [");
}

static void bad_paper(rank_run *run) {
    tagc_reducer_options options = good_options(run->world_size);
    tagc_paper_options paper;
    tagc_paper_options_init(&paper);
    options.paper = &paper;
    paper.ratio = 0.5;
    expect_refusal(run, &options, TAGC_ERR_ARGUMENT, "ratio is 0.5");
    paper.ratio = 0;
    paper.fill_union = 1;
    paper.index = TAGC_INDEX_SUM4;
    expect_refusal(run, &options, TAGC_ERR_UNSUPPORTED, run->world_size > 15 ? "15 ranks" : "fill_union");
}

/* What direct has only together with something else. */
static void bad_combinations(rank_run *run) {
    tagc_reducer_options options = good_options(run->world_size), direct = options;
    direct.exchange = TAGC_EXCHANGE_DIRECT;
    options = direct;
    options.block = 96;
    expect_refusal(run, &options, TAGC_ERR_ARGUMENT, "block is 96, must be 0 (128) or a power of two");
    options.block = 8;
    expect_refusal(run, &options, TAGC_ERR_ARGUMENT, "block is 8, must be 0 (128) or a power of two");
    options = direct;
    options.sparsity = 0;
    options.format = TAGC_FORMAT_BF16;
    options.block = 64;
    expect_refusal(run, &options, TAGC_ERR_UNSUPPORTED, "block is 64, but format bf16 has no blocks");
    /* nothing comes back */
    tagc_reducer_options_init(&options);
    options.n_elems = 64 * (uint64_t)run->world_size;
    options.result.format = TAGC_FORMAT_INT8;
    expect_refusal(run, &options, TAGC_ERR_UNSUPPORTED, "result.format is set, but output is shard");
    options.result.format = -1;
    options.result.sparsity = 0.5;
    expect_refusal(run, &options, TAGC_ERR_UNSUPPORTED, "result.sparsity is set, but output is shard");
    options.output = TAGC_OUTPUT_UNIT;
    options.result.sparsity = -0.5;
    expect_refusal(run, &options, TAGC_ERR_ARGUMENT, "result.sparsity is -0.5, must be in [0, 1], or -1");
    options = direct;
    options.output = TAGC_OUTPUT_HOST_SHARD; /* of a model alone */
    expect_refusal(run, &options, TAGC_ERR_ARGUMENT, "output is 2, must be shard (0) or unit (1)");
}

/* Without a residual: whatever would lose something for good. */
static void bad_without_residual(rank_run *run) {
    static const struct {
        const char *field;
        double value;
        const char *text;
    } bad[] = {
        {"sparsity", 0.5,
         "sparsity is 0.5, must be 0 where residual is none: what is not sent would be lost"},
        {"format", TAGC_FORMAT_BF16, "format is bf16, must be fp32, int8 or int4 where residual is none"},
        {"format", TAGC_FORMAT_INT2, "format is int2, must be"},
        {"result.sparsity", 0.25, "result.sparsity is 0.25, must be 0 where residual is none"},
        {"result.format", TAGC_FORMAT_BF16, "result.format is bf16, must be"},
        {"result.format", TAGC_FORMAT_INT2, "result.format is int2, must be"},
    };
    both b;
    int is_paper;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        b = (both){.options = good_options(run->world_size)};
        b.options.exchange = TAGC_EXCHANGE_DIRECT;
        b.options.residual = TAGC_RESIDUAL_NONE;
        b.options.output = TAGC_OUTPUT_UNIT;
        set_field(&b, bad[i].field, bad[i].value, &is_paper);
        expect_refusal(run, &b.options, TAGC_ERR_UNSUPPORTED, bad[i].text);
    }
}

static void bad_pointers(rank_run *run) {
    tagc_reducer_options options = good_options(run->world_size);
    expect_refusal(run, NULL, TAGC_ERR_ARGUMENT, "options is NULL");
    CHECK(run, tagc_reducer_create(run->comm, &options, NULL) == TAGC_ERR_ARGUMENT);
}

static void bad_values(rank_run *run) {
    bad_numbers(run);
    bad_enums(run);
    bad_sizes(run);
    bad_paper(run);
    bad_combinations(run);
    bad_without_residual(run);
    bad_pointers(run);
}

TEST(test_bad_values) {
    run_ranks(1, bad_values, NULL);
    run_ranks(2, bad_values, NULL);
    run_ranks(16, bad_values, NULL);
    tagc_reducer *reducer;
    assert_int_equal(tagc_reducer_create(NULL, NULL, &reducer), TAGC_ERR_ARGUMENT);
}

TEST(test_padded_elems) {
    assert_true(tagc_padded_elems(1, 3) == 48 && tagc_padded_elems(48, 3) == 48);
    assert_true(tagc_padded_elems(49, 3) == 96);
    assert_true(tagc_padded_elems(5045, 2) == 5056 && tagc_padded_elems(0, 2) == 0);
}

/* ---- options without effect ---- */

static const struct prune_case {
    int exchange, format, sent_format, keeps_block;
} prune_cases[] = {
    {TAGC_EXCHANGE_PACKED, TAGC_FORMAT_BF16, -1, 0},
    {TAGC_EXCHANGE_SKETCH, TAGC_FORMAT_FP32, -1, 0},
    {TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_BF16, TAGC_FORMAT_BF16, 0},
    {TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_INT8, TAGC_FORMAT_INT8, 1},
    {TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_INT2, TAGC_FORMAT_INT2, 1},
};

static void check_pruned(const struct prune_case *c, int selects) {
    int is_direct = c->exchange == TAGC_EXCHANGE_DIRECT;
    both b = {.options = good_options(4)};
    tagc_paper_options_init(&b.paper);
    tagc_reducer_options *o = &b.options;
    o->exchange = c->exchange;
    o->format = c->format;
    o->sparsity = selects ? 0.9 : 0;
    o->block = 64;
    o->paper = &b.paper;
    tagc_reducer_options_prune(o);
    assert_int_equal(o->exchange, c->exchange);
    assert_int_equal(o->format, c->sent_format);
    assert_true(o->sparsity == (selects ? 0.9 : 0));
    assert_int_equal(o->block, c->keeps_block ? 64 : 0);
    assert_ptr_equal(o->paper, is_direct ? NULL : &b.paper);
}

/* What an exchange has no use for is set to its default, and the rest stays. */
TEST(test_prune) {
    for (size_t i = 0; i < sizeof prune_cases / sizeof prune_cases[0]; i++)
        for (int selects = 0; selects < 2; selects++) check_pruned(&prune_cases[i], selects);
}
