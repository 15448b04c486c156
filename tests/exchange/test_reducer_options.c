/* What a caller can get wrong, alone or against the other ranks, and the residual as state. */
#include "core/clock.h"
#include "exchange/options.h"
#include "oracle.h"
#include "ranks.h"
#include "tagc/paper.h"

/* ---- one rank's mistakes ---- */

typedef struct bad_field {
    const char *name;
    int is_paper, is_double;
    size_t offset;
    double low, high; /* just outside */
} bad_field;

#define INT_FIELD(name, low, high)                                                                           \
    { #name, 0, 0, offsetof(tagc_reducer_options, name), low, high }
#define PAPER_FIELD(name, low, high)                                                                         \
    { #name, 1, 0, offsetof(tagc_paper_options, name), low, high }
static const bad_field bad_fields[] = {
    INT_FIELD(exchange, -1, 4),
    INT_FIELD(format, -2, 6),
    {"sparsity", 0, 1, offsetof(tagc_reducer_options, sparsity), -1e-9, 1.0000001},
    INT_FIELD(op, -1, 2),
    INT_FIELD(output, -1, 3),
    INT_FIELD(block, -1, 4097),
    INT_FIELD(rotate, -1, 2),
    INT_FIELD(ranks_per_host, 0, 65537),
    INT_FIELD(n_threads, 0, 257),
    PAPER_FIELD(index, -1, 3),
    PAPER_FIELD(fill_union, -2, 2),
    {"ratio", 1, 1, offsetof(tagc_paper_options, ratio), -1, 1000.1},
    PAPER_FIELD(cells, -1, 2),
    PAPER_FIELD(unpeeled, -1, 3),
};

/* Options of a rank, with room for those of the paper beside them. */
typedef struct both {
    tagc_reducer_options options;
    tagc_paper_options paper;
} both;

static void *field_of(both *b, const bad_field *f) {
    return (f->is_paper ? (char *)&b->paper : (char *)&b->options) + f->offset;
}

static tagc_reducer_options good_options(int world_size) {
    tagc_reducer_options options;
    tagc_reducer_options_init(&options);
    options.exchange = TAGC_EXCHANGE_PACKED;
    options.n_elems = 64 * (uint64_t)world_size;
    return options;
}

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

enum { DENSE = 1, SKETCH = 2, PACKED = 4, DIRECT = 8, ALL = 15 }; /* by tagc_exchange */

/* Every value that is not the default, the exchanges that take it, and what the refusal of the others begins with. */
static const struct {
    const char *field;
    double value;
    int taken_by;
    const char *text;
} meanings[] = {
    {"format", TAGC_FORMAT_FP32, ALL, ""},
    {"format", TAGC_FORMAT_BF16, DENSE | DIRECT, "format is 1 (bf16), and exchange"},
    {"format", TAGC_FORMAT_INT8, DIRECT, "format is 2 (int8), and exchange"},
    {"format", TAGC_FORMAT_INT4, DIRECT, "format is 3 (int4), and exchange"},
    {"format", TAGC_FORMAT_INT2, DIRECT, "format is 4 (int2), and exchange"},
    {"format", TAGC_FORMAT_SIGN, DIRECT, "format is 5 (sign), and exchange"},
    {"sparsity", 0, ALL, ""},
    {"sparsity", 0.5, SKETCH | PACKED | DIRECT, "sparsity is 0.5, which exchange 0 (dense)"},
    {"op", TAGC_OP_SUM, ALL, ""},
    {"output", TAGC_OUTPUT_UNIT, ALL, ""},
    {"output", TAGC_OUTPUT_HOST_SHARD, DIRECT, "output is 2 (host shard), which exchange"},
    {"block", 64, DIRECT, "block is 64, which exchange"},
    {"rotate", 1, 0, "rotate is 1, which "},
    {"ranks_per_host", 2, DIRECT, "ranks_per_host is 2, which exchange"},
    {"n_threads", 2, ALL, ""},
    {"paper", 0, SKETCH | PACKED, "paper is set, which exchange"},
    {"index", TAGC_INDEX_SUM4, SKETCH | PACKED, "paper is set, which exchange"},
    {"fill_union", 1, SKETCH | PACKED, "paper is set, which exchange"},
    {"ratio", 10, SKETCH, "ratio is 10, which exchange 2 (packed)"},
    {"cells", TAGC_CELLS_FIXED, SKETCH, "cells is 1, which exchange 2 (packed)"},
    {"unpeeled", TAGC_UNPEELED_RESIDUAL, SKETCH, "unpeeled is 1, which exchange 2 (packed)"},
    {"seed", 7, SKETCH, "seed is 7, which exchange 2 (packed)"},
};

/* *is_paper: it is one of tagc_paper_options. */
static void set_field(both *b, const char *name, double value, int *is_paper) {
    *is_paper = 1;
    if (!strcmp(name, "paper")) return;
    if (!strcmp(name, "seed")) {
        b->paper.seed = (uint64_t)value;
        return;
    }
    size_t f = 0;
    while (strcmp(bad_fields[f].name, name) != 0) f++;
    *is_paper = bad_fields[f].is_paper;
    int as_int = (int)value;
    memcpy(field_of(b, &bad_fields[f]), bad_fields[f].is_double ? (void *)&value : (void *)&as_int,
           bad_fields[f].is_double ? sizeof value : sizeof as_int);
}

static void meanings_body(rank_run *run) {
    for (size_t i = 0; i < sizeof meanings / sizeof meanings[0]; i++)
        for (int exchange = TAGC_EXCHANGE_DENSE; exchange <= TAGC_EXCHANGE_DIRECT; exchange++) {
            both b = {.options = good_options(run->world_size)};
            int is_paper;
            tagc_paper_options_init(&b.paper);
            b.options.exchange = exchange;
            set_field(&b, meanings[i].field, meanings[i].value, &is_paper);
            if (is_paper) b.options.paper = &b.paper;
            if (!(meanings[i].taken_by >> exchange & 1)) {
                expect_refusal(run, &b.options, TAGC_ERR_UNSUPPORTED,
                               is_paper && !((SKETCH | PACKED) >> exchange & 1)
                                   ? "paper is set, which exchange"
                                   : meanings[i].text);
                continue;
            }
            tagc_reducer *reducer;
            CHECK(run, tagc_reducer_create(run->comm, &b.options, &reducer) == TAGC_OK);
            tagc_reducer_destroy(reducer);
        }
}

static void test_meanings(void **state) {
    (void)state;
    rank_run runs[MAX_RANKS];
    run_ranks(2, meanings_body, NULL, NULL, runs);
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
    options.rotate = 1;
    expect_refusal(run, &options, TAGC_ERR_UNSUPPORTED, "rotate is 1, which needs sparsity 0");
    options.sparsity = 0;
    options.format = TAGC_FORMAT_BF16;
    expect_refusal(run, &options, TAGC_ERR_UNSUPPORTED, "rotate is 1, which needs sparsity 0 and an integer");
    options.rotate = 0;
    options.block = 64;
    expect_refusal(run, &options, TAGC_ERR_UNSUPPORTED, "block is 64, and format 1 (bf16) has no scales");
    options = direct;
    options.ranks_per_host = 3;
    expect_refusal(run, &options, TAGC_ERR_ARGUMENT, "ranks_per_host is 3, must divide the world size");
}

static void bad_values(rank_run *run) {
    for (size_t f = 0; f < sizeof bad_fields / sizeof bad_fields[0]; f++)
        for (int side = 0; side < 3; side++) {
            const bad_field *field = &bad_fields[f];
            both b = {.options = good_options(run->world_size)};
            double value = side == 0 ? field->low : side == 1 ? field->high : NAN;
            int as_int = (int)(side < 2 ? value : 1e9);
            tagc_paper_options_init(&b.paper);
            b.options.paper = &b.paper;
            memcpy(field_of(&b, field), field->is_double ? (void *)&value : (void *)&as_int,
                   field->is_double ? sizeof value : sizeof as_int);
            expect_refusal(run, &b.options, TAGC_ERR_ARGUMENT, field->name);
        }
    tagc_reducer_options options = good_options(run->world_size);
    options.n_elems = 0;
    expect_refusal(run, &options, TAGC_ERR_ARGUMENT, "n_elems is 0");
    options.n_elems = 65;
    if (run->world_size > 1) expect_refusal(run, &options, TAGC_ERR_ARGUMENT, "multiple of the world size");
    options.n_elems = (uint64_t)run->world_size << 32;
    expect_refusal(run, &options, TAGC_ERR_ARGUMENT, "n_elems is");
    options = good_options(run->world_size);
    tagc_paper_options paper;
    tagc_paper_options_init(&paper);
    options.paper = &paper;
    paper.ratio = 0.5;
    expect_refusal(run, &options, TAGC_ERR_ARGUMENT, "ratio is 0.5");
    options = good_options(run->world_size);
    options.struct_bytes = 8;
    expect_refusal(run, &options, TAGC_ERR_ARGUMENT, "struct_bytes is 8");
    options = good_options(run->world_size);
    options.paper = &paper;
    paper.ratio = 0;
    paper.fill_union = 1;
    paper.index = TAGC_INDEX_SUM4;
    expect_refusal(run, &options, TAGC_ERR_UNSUPPORTED, run->world_size > 15 ? "15 ranks" : "fill_union");
    bad_combinations(run);
    expect_refusal(run, NULL, TAGC_ERR_ARGUMENT, "options is NULL");
    CHECK(run, tagc_reducer_create(run->comm, &options, NULL) == TAGC_ERR_ARGUMENT);
}

static void test_bad_values(void **state) {
    (void)state;
    rank_run runs[MAX_RANKS];
    run_ranks(1, bad_values, NULL, NULL, runs);
    run_ranks(2, bad_values, NULL, NULL, runs);
    run_ranks(16, bad_values, NULL, NULL, runs);
    tagc_reducer *reducer;
    assert_int_equal(tagc_reducer_create(NULL, NULL, &reducer), TAGC_ERR_ARGUMENT);
}

static void test_bounds(void **state) {
    (void)state;
    for (size_t f = 0; f < sizeof bad_fields / sizeof bad_fields[0]; f++) {
        double min, max, initial;
        assert_int_equal(tagc_reducer_option_bounds(bad_fields[f].name, &min, &max, &initial), TAGC_OK);
        /* of sparsity everything between -1 and 0 is refused as well */
        assert_true((min == -1 || min > bad_fields[f].low) && max < bad_fields[f].high);
        assert_true(initial >= min && initial <= max);
        both b;
        tagc_reducer_options_init(&b.options);
        tagc_paper_options_init(&b.paper);
        double value;
        int as_int;
        memcpy(&value, field_of(&b, &bad_fields[f]), bad_fields[f].is_double ? sizeof value : sizeof as_int);
        memcpy(&as_int, field_of(&b, &bad_fields[f]), sizeof as_int);
        assert_true(initial == (bad_fields[f].is_double ? value : as_int));
    }
    assert_int_equal(tagc_reducer_option_bounds("sparsity", NULL, NULL, NULL), TAGC_OK);
    assert_int_equal(tagc_reducer_option_bounds("struct_bytes", NULL, NULL, NULL), TAGC_ERR_ARGUMENT);
    assert_non_null(strstr(tagc_last_error(), "struct_bytes"));
    assert_int_equal(tagc_reducer_option_bounds(NULL, NULL, NULL, NULL), TAGC_ERR_ARGUMENT);
    assert_true(tagc_padded_elems(1, 3) == 48 && tagc_padded_elems(48, 3) == 48 &&
                tagc_padded_elems(49, 3) == 96);
    assert_true(tagc_padded_elems(5045, 2) == 5056 && tagc_padded_elems(0, 2) == 0);
}

/* ---- mistakes of one rank among others ---- */

static void one_rank_differs(rank_run *run) {
    const char *name = run->shared;
    tagc_reducer_options options = good_options(run->world_size);
    tagc_paper_options paper;
    tagc_paper_options_init(&paper);
    int differs = run->rank == 2, is_sketch = strstr("ratio cells unpeeled seed", name) != NULL;
    if (is_sketch) options.exchange = TAGC_EXCHANGE_SKETCH;
    if (is_sketch || strstr("index fill_union", name)) options.paper = &paper;
    if (differs && !strcmp(name, "n_elems")) options.n_elems *= 2;
    if (differs && !strcmp(name, "exchange")) options.exchange = TAGC_EXCHANGE_SKETCH;
    if (differs && !strcmp(name, "index")) paper.index = TAGC_INDEX_SUM4;
    if (differs && !strcmp(name, "sparsity")) options.sparsity = 0.9;
    if (differs && !strcmp(name, "ratio")) paper.ratio = 10;
    if (differs && !strcmp(name, "cells")) paper.cells = TAGC_CELLS_FIXED;
    if (differs && !strcmp(name, "unpeeled")) paper.unpeeled = TAGC_UNPEELED_ESTIMATE;
    if (differs && !strcmp(name, "fill_union")) paper.fill_union = 0;
    if (differs && !strcmp(name, "op")) options.op = TAGC_OP_SUM;
    if (differs && !strcmp(name, "output")) options.output = TAGC_OUTPUT_UNIT;
    if (differs && !strcmp(name, "seed")) paper.seed = 1;
    if (strstr("format block ranks_per_host", name)) options.exchange = TAGC_EXCHANGE_DIRECT;
    if (differs && !strcmp(name, "format")) options.format = TAGC_FORMAT_SIGN;
    if (differs && !strcmp(name, "block")) options.block = 64;
    if (differs && !strcmp(name, "ranks_per_host")) options.ranks_per_host = 2;
    tagc_reducer *reducer;
    keep_status(run, tagc_reducer_create(run->comm, &options, &reducer));
    CHECK(run, reducer == NULL);
}

static void invalid_on_one(rank_run *run) {
    tagc_reducer_options options = good_options(run->world_size);
    if (run->rank == 2) options.sparsity = 2;
    tagc_reducer *reducer;
    keep_status(run, tagc_reducer_create(run->comm, &options, &reducer));
}

static void format_differs(rank_run *run) {
    tagc_reducer_options options = good_options(run->world_size);
    options.exchange = TAGC_EXCHANGE_DENSE;
    options.format = run->rank == 2;
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

/* n_threads and tag are each rank's own business. */
static void allowed_differences(rank_run *run) {
    tagc_reducer_options options = good_options(run->world_size);
    options.n_threads = 1 + run->rank;
    options.tag = (uint64_t)run->rank;
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

static void test_mismatch(void **state) {
    (void)state;
    static const char *const names[] = {"n_elems",  "exchange",      "index", "sparsity", "ratio", "cells",
                                        "unpeeled", "fill_union",    "op",    "output",   "seed",  "format",
                                        "block",    "ranks_per_host"};
    rank_run runs[MAX_RANKS];
    for (size_t f = 0; f < sizeof names / sizeof names[0]; f++) {
        char expected[64];
        run_ranks(4, one_rank_differs, (void *)(uintptr_t)names[f], NULL, runs);
        snprintf(expected, sizeof expected, "%s: rank 2 has", names[f]);
        if (!strcmp(names[f], "index")) strcpy(expected, "rank 2 has"); /* it also decides fill_union */
        assert_all(runs, 4, TAGC_ERR_MISMATCH, expected);
    }
    run_ranks(4, one_rank_differs, (void *)(uintptr_t) "sparsity", NULL, runs);
    assert_all(runs, 4, TAGC_ERR_MISMATCH, "sparsity: rank 2 has 0.9, rank 0 has 0.9875");
    run_ranks(3, invalid_on_one, NULL, NULL, runs);
    assert_all(runs, 3, TAGC_ERR_ARGUMENT, "rank 2: sparsity is 2, must be in [0, 1]");
    run_ranks(3, format_differs, NULL, NULL, runs);
    assert_all(runs, 3, TAGC_ERR_MISMATCH, "format: rank 2 has 1, rank 0 has 0");
    run_ranks(3, gatherer_on_one, NULL, NULL, runs);
    assert_all(runs, 3, TAGC_ERR_MISMATCH, "rank 2 makes a gatherer");
    run_ranks(3, allowed_differences, NULL, NULL, runs);
}

/* ---- options without effect ---- */

/* What an exchange has no use for is set to its default, and the rest stays. */
static void test_prune(void **state) {
    (void)state;
    static const struct {
        int exchange, format, kept_format, keeps_block;
    } cases[] = {
        {TAGC_EXCHANGE_DENSE, TAGC_FORMAT_FP32, TAGC_FORMAT_FP32, 0},
        {TAGC_EXCHANGE_DENSE, TAGC_FORMAT_BF16, TAGC_FORMAT_BF16, 0},
        {TAGC_EXCHANGE_DENSE, TAGC_FORMAT_INT8, -1, 0},
        {TAGC_EXCHANGE_PACKED, TAGC_FORMAT_BF16, -1, 0},
        {TAGC_EXCHANGE_SKETCH, TAGC_FORMAT_FP32, -1, 0},
        {TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_BF16, TAGC_FORMAT_BF16, 0},
        {TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_INT8, TAGC_FORMAT_INT8, 1},
        {TAGC_EXCHANGE_DIRECT, TAGC_FORMAT_INT2, TAGC_FORMAT_INT2, 1},
    };
    tagc_paper_options paper;
    tagc_paper_options_init(&paper);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int selects = 0; selects < 2; selects++) {
            tagc_reducer_options o = good_options(4);
            o.exchange = cases[i].exchange;
            o.format = cases[i].format;
            o.sparsity = selects ? 0.9 : 0;
            o.block = 64;
            o.rotate = 1;
            o.ranks_per_host = 2;
            o.paper = &paper;
            tagc_reducer_options_prune(&o);
            int is_direct = o.exchange == TAGC_EXCHANGE_DIRECT, is_dense = o.exchange == TAGC_EXCHANGE_DENSE;
            assert_int_equal(o.exchange, cases[i].exchange);
            assert_int_equal(o.format, cases[i].kept_format);
            assert_true(o.sparsity == (selects && !is_dense ? 0.9 : 0));
            assert_int_equal(o.block, cases[i].keeps_block ? 64 : 0);
            assert_int_equal(o.rotate, cases[i].keeps_block && !selects);
            assert_int_equal(o.ranks_per_host, is_direct ? 2 : 1);
            assert_ptr_equal(o.paper, is_direct || is_dense ? NULL : &paper);
        }
    }
}

/* ---- calls out of order, set_sparsity ---- */

static void order_body(rank_run *run) {
    tagc_reducer_options options = good_options(run->world_size);
    float gradient[64 * 4], output[64];
    tagc_reducer_stats stats = {0};
    for (size_t i = 0; i < sizeof gradient / sizeof gradient[0]; i++)
        gradient[i] = random_gradient(1, run->rank, i);
    tagc_reducer *reducer;
    if (!CHECK(run, tagc_reducer_create(run->comm, &options, &reducer) == TAGC_OK)) return;
    CHECK(run, tagc_reducer_end(reducer, NULL) == TAGC_ERR_STATE);
    CHECK(run, tagc_reducer_begin(NULL, gradient, output) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_begin(reducer, NULL, output) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_begin(reducer, gradient, NULL) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_begin(reducer, gradient, gradient + 1) == TAGC_ERR_ARGUMENT);
    CHECK(run, strstr(tagc_last_error(), "overlap"));
    CHECK(run, tagc_reducer_begin(reducer, gradient, output) == TAGC_OK);
    CHECK(run, tagc_reducer_begin(reducer, gradient, output) == TAGC_ERR_STATE);
    CHECK(run, tagc_reducer_set_sparsity(reducer, 0.5) == TAGC_ERR_STATE);
    CHECK(run, tagc_reducer_scale_residual(reducer, 1) == TAGC_ERR_STATE);
    CHECK(run, tagc_reducer_set_residual(reducer, gradient, 64 * 4) == TAGC_ERR_STATE);
    CHECK(run, tagc_reducer_end(reducer, NULL) == TAGC_OK);
    CHECK(run, tagc_reducer_end(NULL, NULL) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_run(reducer, gradient, output, &stats) ==
                   TAGC_ERR_ARGUMENT); /* stats not initialised */
    tagc_reducer_stats_init(&stats);
    CHECK(run, tagc_reducer_set_sparsity(reducer, 1.5) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_set_sparsity(reducer, NAN) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_set_sparsity(NULL, 0.5) == TAGC_ERR_ARGUMENT);
    for (double sparsity = 0; sparsity <= 1; sparsity += 0.25) {
        CHECK(run, tagc_reducer_set_sparsity(reducer, sparsity) == TAGC_OK);
        CHECK(run, tagc_reducer_run(reducer, gradient, output, &stats) == TAGC_OK);
        CHECK(run, stats.sparsity == sparsity);
    }
    /* One rank forgets: all of them hear of it, and can go on together. */
    CHECK(run, tagc_reducer_set_sparsity(reducer, run->rank == 1 ? 0.25 : 0.5) == TAGC_OK);
    keep_status(run, tagc_reducer_run(reducer, gradient, output, &stats));
    CHECK(run, tagc_reducer_set_sparsity(reducer, 0.5) == TAGC_OK);
    CHECK(run, tagc_reducer_run(reducer, gradient, output, &stats) == TAGC_OK);
    CHECK(run, tagc_reducer_begin(reducer, gradient, output) == TAGC_OK);
    tagc_reducer_destroy(reducer); /* waits for the step */
}

static void test_order(void **state) {
    (void)state;
    rank_run runs[MAX_RANKS];
    run_ranks(4, order_body, NULL, NULL, runs);
    for (int r = 0; r < 4; r++) assert_int_equal(runs[r].status, TAGC_ERR_MISMATCH);
    assert_non_null(strstr(runs[0].text, "sparsity"));
    tagc_reducer_destroy(NULL);
    tagc_gatherer_destroy(NULL);
}

/* With direct a rank that forgets sends more than the others have room for: all of them hear why, and can go on. */
static void direct_order_body(rank_run *run) {
    tagc_reducer_options options = good_options(run->world_size);
    float gradient[64 * 4], output[64];
    tagc_reducer *reducer;
    options.exchange = TAGC_EXCHANGE_DIRECT;
    options.rotate = 1;
    options.sparsity = 0;
    for (size_t i = 0; i < sizeof gradient / sizeof gradient[0]; i++)
        gradient[i] = random_gradient(1, run->rank, i);
    if (!CHECK(run, tagc_reducer_create(run->comm, &options, &reducer) == TAGC_OK)) return;
    CHECK(run, tagc_reducer_set_sparsity(reducer, 0.5) == TAGC_ERR_UNSUPPORTED);
    CHECK(run, strstr(tagc_last_error(), "rotate"));
    CHECK(run, tagc_reducer_set_sparsity(reducer, 0) == TAGC_OK);
    CHECK(run, tagc_reducer_run(reducer, gradient, output, NULL) == TAGC_OK);
    tagc_reducer_destroy(reducer);

    options.rotate = 0;
    options.format = TAGC_FORMAT_BF16;
    if (!CHECK(run, tagc_reducer_create(run->comm, &options, &reducer) == TAGC_OK)) return;
    CHECK(run, tagc_reducer_residual(reducer, NULL) == NULL && tagc_reducer_state_bytes(reducer) == 64);
    CHECK(run, tagc_reducer_run(reducer, gradient, output, NULL) == TAGC_OK);
    CHECK(run, tagc_reducer_set_sparsity(reducer, 0.9) == TAGC_OK);
    CHECK(run,
          tagc_reducer_residual(reducer, NULL) != NULL && tagc_reducer_state_bytes(reducer) == 64 + 1024);
    CHECK(run, tagc_reducer_run(reducer, gradient, output, NULL) == TAGC_OK);
    CHECK(run, tagc_reducer_set_sparsity(reducer, run->rank == 1 ? 0.25 : 0.5) == TAGC_OK);
    uint64_t n;
    float before[64 * 4];
    memcpy(before, tagc_reducer_residual(reducer, &n), sizeof before);
    keep_status(run, tagc_reducer_run(reducer, gradient, output, NULL));
    CHECK(run, memcmp(before, tagc_reducer_residual(reducer, &n), sizeof before) == 0);
    CHECK(run, tagc_reducer_run(reducer, gradient, output, NULL) == TAGC_ERR_MISMATCH);
    CHECK(run, tagc_reducer_set_sparsity(reducer, 0.5) == TAGC_OK);
    CHECK(run, tagc_reducer_run(reducer, gradient, output, NULL) == TAGC_OK);
    CHECK(run, tagc_reducer_run(reducer, gradient, output, NULL) == TAGC_OK);
    tagc_reducer_destroy(reducer);
}

static void test_direct_order(void **state) {
    (void)state;
    rank_run runs[MAX_RANKS];
    run_ranks(4, direct_order_body, NULL, NULL, runs);
    for (int r = 0; r < 4; r++) {
        assert_int_equal(runs[r].status, TAGC_ERR_MISMATCH);
        if (r < 2) assert_non_null(strstr(runs[r].text, "sparsity: rank"));
    }
}

/* Where those who differ send each other no fragments, all hear of it from the agreement, and can go on together. */
static void hosts_order_body(rank_run *run) {
    tagc_reducer_options options = good_options(run->world_size);
    float gradient[64 * 4], output[64];
    tagc_reducer *reducer;
    uint64_t n;
    options.exchange = TAGC_EXCHANGE_DIRECT;
    options.ranks_per_host = 2;
    for (size_t i = 0; i < sizeof gradient / sizeof gradient[0]; i++)
        gradient[i] = random_gradient(1, run->rank, i);
    if (!CHECK(run, tagc_reducer_create(run->comm, &options, &reducer) == TAGC_OK)) return;
    CHECK(run, tagc_reducer_set_sparsity(reducer, run->rank % 2 ? 0.25 : 0.5) == TAGC_OK);
    keep_status(run, tagc_reducer_run(reducer, gradient, output, NULL));
    const float *residual = tagc_reducer_residual(reducer, &n);
    for (uint64_t i = 0; i < n; i++) CHECK(run, residual[i] == 0);
    CHECK(run, tagc_reducer_set_sparsity(reducer, 0.5) == TAGC_OK);
    CHECK(run, tagc_reducer_run(reducer, gradient, output, NULL) == TAGC_OK);
    tagc_reducer_destroy(reducer);
}

static void test_hosts_order(void **state) {
    (void)state;
    rank_run runs[MAX_RANKS];
    run_ranks(4, hosts_order_body, NULL, NULL, runs);
    for (int r = 0; r < 4; r++) {
        assert_int_equal(runs[r].status, TAGC_ERR_MISMATCH);
        assert_non_null(strstr(runs[r].text, "sparsity: rank"));
    }
}

/* ---- residual as state ---- */

static void state_body(rank_run *run) {
    tagc_reducer_options options = good_options(run->world_size);
    options.n_elems = 1000 * (uint64_t)run->world_size;
    size_t n = (size_t)options.n_elems;
    float *gradient = malloc(n * sizeof *gradient), *output = malloc(n * sizeof *output),
          *again = malloc(n * sizeof *again);
    for (size_t i = 0; i < n; i++) gradient[i] = random_gradient(2, run->rank, i);
    tagc_reducer *one, *two;
    if (!CHECK(run, tagc_reducer_create(run->comm, &options, &one) == TAGC_OK)) return;
    if (!CHECK(run, tagc_reducer_create(run->comm, &options, &two) == TAGC_OK)) return;
    CHECK(run, tagc_reducer_run(one, gradient, output, NULL) == TAGC_OK);
    uint64_t n_bytes = tagc_reducer_state_bytes(one);
    CHECK(run, n_bytes == 64 + n * 4);
    char *saved = malloc(n_bytes), *copy = malloc(n_bytes);
    CHECK(run, tagc_reducer_state_save(one, saved, n_bytes) == TAGC_OK);
    CHECK(run, tagc_reducer_state_save(one, saved, n_bytes - 1) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_state_save(one, NULL, n_bytes) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_state_load(two, saved, n_bytes) == TAGC_OK);
    const float *a = tagc_reducer_residual(one, NULL), *b = tagc_reducer_residual(two, NULL);
    CHECK(run, memcmp(a, b, n * sizeof *a) == 0);
    for (int damage = 0; damage < 200; damage++) { /* header bytes one by one, then anywhere */
        memcpy(copy, saved, n_bytes);
        size_t at = damage < 64 ? (size_t)damage : mix((uint64_t)damage) % n_bytes;
        copy[at] ^= (char)(1 << damage % 8);
        CHECK(run, tagc_reducer_state_load(two, copy, n_bytes) == TAGC_ERR_CORRUPT);
        CHECK(run, tagc_reducer_state_load(two, saved, mix((uint64_t)damage) % n_bytes) == TAGC_ERR_CORRUPT);
    }
    CHECK(run, tagc_reducer_state_load(two, NULL, n_bytes) == TAGC_ERR_ARGUMENT);
    CHECK(run, memcmp(a, tagc_reducer_residual(two, NULL), n * sizeof *a) == 0);
    CHECK(run, tagc_reducer_run(one, gradient, output, NULL) == TAGC_OK);
    CHECK(run, tagc_reducer_run(two, gradient, again, NULL) == TAGC_OK);
    CHECK(run, memcmp(output, again, 1000 * sizeof *output) == 0);
    options.n_elems *= 2;
    tagc_reducer *larger;
    if (!CHECK(run, tagc_reducer_create(run->comm, &options, &larger) == TAGC_OK)) return;
    CHECK(run, tagc_reducer_state_load(larger, saved, n_bytes) == TAGC_ERR_MISMATCH);
    tagc_reducer_destroy(larger);

    /* scaling */
    CHECK(run, tagc_reducer_state_load(two, saved, n_bytes) == TAGC_OK);
    memcpy(again, tagc_reducer_residual(two, NULL), n * sizeof *again);
    CHECK(run, tagc_reducer_scale_residual(two, 0.5) == TAGC_OK);
    for (size_t i = 0; i < n; i++)
        CHECK(run, bits_of(tagc_reducer_residual(two, NULL)[i]) == bits_of(again[i] * 0.5f));
    CHECK(run, tagc_reducer_scale_residual(two, -1) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_scale_residual(two, NAN) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_scale_residual(two, INFINITY) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_scale_residual(two, 1e300) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_scale_residual(two, 0) == TAGC_OK);
    for (size_t i = 0; i < n; i++) CHECK(run, bits_of(tagc_reducer_residual(two, NULL)[i]) == 0x80000000u);

    /* put in place */
    CHECK(run, tagc_reducer_set_residual(two, again, n - 1) == TAGC_ERR_ARGUMENT);
    CHECK(run, tagc_reducer_set_residual(two, NULL, n) == TAGC_ERR_ARGUMENT);
    float kept = again[5];
    again[5] = NAN;
    CHECK(run, tagc_reducer_set_residual(two, again, n) == TAGC_ERR_ARGUMENT);
    CHECK(run, bits_of(tagc_reducer_residual(two, NULL)[6]) == 0x80000000u);
    again[5] = kept;
    CHECK(run, tagc_reducer_set_residual(two, again, n) == TAGC_OK);
    CHECK(run, memcmp(again, tagc_reducer_residual(two, NULL), n * sizeof *again) == 0);
    tagc_reducer_destroy(one);
    tagc_reducer_destroy(two);
    free(gradient);
    free(output);
    free(again);
    free(saved);
    free(copy);
}

static void test_state(void **state) {
    (void)state;
    rank_run runs[MAX_RANKS];
    run_ranks(2, state_body, NULL, NULL, runs);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bad_values),   cmocka_unit_test(test_bounds),
        cmocka_unit_test(test_meanings),     cmocka_unit_test(test_mismatch),
        cmocka_unit_test(test_prune),
        cmocka_unit_test(test_order),        cmocka_unit_test(test_hosts_order),
        cmocka_unit_test(test_direct_order), cmocka_unit_test(test_state),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
