/* Checks options, on one rank and across ranks, with one table per struct. */
#include "exchange/options.h"

#include "core/memory.h"
#include "exchange/exchange.h"
#include "transport/comm.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* The exchanges to which a field applies. With others it must keep its default. */
enum {
    SKETCH = 1 << TAGC_EXCHANGE_SKETCH,
    PACKED = 1 << TAGC_EXCHANGE_PACKED,
    DIRECT = 1 << TAGC_EXCHANGE_DIRECT,
    ALL = SKETCH | PACKED | DIRECT,
    DEFAULT_BLOCK = 128
};

#define MAX_UNIT_ELEMS (65536.0 * (4294967296.0 - 64.0)) /* at the largest world size */
#define MAX_SHARD (UINT32_MAX - 63)

const char *const tagc_exchange_names[] = {NULL, "sketch", "packed", "direct"};
const char *const tagc_format_names[] = {"fp32", "bf16", "int8", "int4", "int2"};
static const char *const residual_names[] = {"fp32", NULL, "int8", "int4"};
static const char *const op_names[] = {"avg", "sum"};
static const char *const output_names[] = {"shard", "unit", "host_shard"};
static const char *const rounding_names[] = {"nearest", "stochastic"};

/* clang-format off */
#define REDUCER(name) #name, offsetof(tagc_reducer_options, name)
static const tagc_field reducer_fields[] = {
    {REDUCER(n_elems), TAGC_FIELD_U64, 1, ALL, 1, MAX_UNIT_ELEMS, 0, NULL},
    {REDUCER(tag), TAGC_FIELD_U64, 1, ALL, 0, TAGC_FIELD_MAX_U64, TAGC_FIELD_MAX_U64, NULL},
    {REDUCER(exchange), TAGC_FIELD_INT, 1, ALL, TAGC_EXCHANGE_SKETCH, TAGC_EXCHANGE_DIRECT, TAGC_EXCHANGE_DIRECT,
     tagc_exchange_names},
    /* As it was given: its default may differ between ranks, and nothing on the wire depends on it. Without one, defaults that
     * follow differ, too, so that ranks compare this first. */
    {REDUCER(residual), TAGC_FIELD_INT, 1, ALL, TAGC_RESIDUAL_NONE, TAGC_FORMAT_INT4, -1,
     residual_names},
    {REDUCER(format), TAGC_FIELD_INT, 1, ALL, -1, TAGC_FORMAT_INT2, -1, tagc_format_names},
    {REDUCER(sparsity), TAGC_FIELD_DOUBLE, 1, ALL, -1, 1, -1, NULL},
    {REDUCER(op), TAGC_FIELD_INT, 1, ALL, TAGC_OP_AVG, TAGC_OP_SUM, TAGC_OP_AVG, op_names},
    {REDUCER(output), TAGC_FIELD_INT, 1, ALL, TAGC_OUTPUT_SHARD, TAGC_OUTPUT_UNIT, TAGC_OUTPUT_SHARD,
     output_names},
    {REDUCER(result.sparsity), TAGC_FIELD_DOUBLE, 1, DIRECT, -1, 1, -1, NULL},
    {REDUCER(result.format), TAGC_FIELD_INT, 1, DIRECT, -1, TAGC_FORMAT_INT2, -1, tagc_format_names},
    {REDUCER(block), TAGC_FIELD_INT, 1, DIRECT, 0, 4096, 0, NULL},
    {REDUCER(n_threads), TAGC_FIELD_INT, 0, ALL, 1, 256, 1, NULL},
    {REDUCER(gradient), TAGC_FIELD_INT, 0, DIRECT, TAGC_FORMAT_FP32, TAGC_FORMAT_BF16, TAGC_FORMAT_FP32,
     tagc_format_names},
    {REDUCER(rounding_seed), TAGC_FIELD_U64, 0, ALL, 0, TAGC_FIELD_MAX_U64, 0, NULL},
};
#define GATHERER(name) #name, offsetof(tagc_gatherer_options, name)
static const tagc_field gatherer_fields[] = {
    {GATHERER(n_elems), TAGC_FIELD_U64, 1, ALL, 1, MAX_UNIT_ELEMS, 0, NULL},
    {GATHERER(tag), TAGC_FIELD_U64, 1, ALL, 0, TAGC_FIELD_MAX_U64, TAGC_FIELD_MAX_U64, NULL},
    {GATHERER(format), TAGC_FIELD_INT, 1, ALL, TAGC_FORMAT_FP32, TAGC_FORMAT_INT2, TAGC_FORMAT_FP32,
     tagc_format_names},
    {GATHERER(delta), TAGC_FIELD_INT, 1, ALL, 0, 1, 0, NULL},
    {GATHERER(check_every), TAGC_FIELD_U64, 1, ALL, 0, 2147483647.0, 0, NULL},
    {GATHERER(n_threads), TAGC_FIELD_U64, 0, ALL, 1, 256, 1, NULL},
    {GATHERER(full_format), TAGC_FIELD_U64, 1, ALL, TAGC_FORMAT_FP32, TAGC_FORMAT_BF16, TAGC_FORMAT_FP32,
     tagc_format_names},
    {GATHERER(rounding), TAGC_FIELD_U64, 1, ALL, TAGC_ROUNDING_NEAREST, TAGC_ROUNDING_STOCHASTIC,
     TAGC_ROUNDING_NEAREST, rounding_names},
    {GATHERER(rounding_seed), TAGC_FIELD_U64, 0, ALL, 0, TAGC_FIELD_MAX_U64, 0, NULL},
    {GATHERER(lossless), TAGC_FIELD_U64, 1, ALL, 0, 1, 0, NULL},
};
#define ALL_TO_ALL(name) #name, offsetof(tagc_all_to_all_options, name)
static const tagc_field all_to_all_fields[] = {
    {ALL_TO_ALL(tag), TAGC_FIELD_U64, 1, ALL, 0, TAGC_FIELD_MAX_U64, TAGC_FIELD_MAX_U64, NULL},
    {ALL_TO_ALL(min_elems), TAGC_FIELD_U64, 1, ALL, 0, 2147483647.0, 4096, NULL},
};
/* clang-format on */
enum {
    N_REDUCER_FIELDS = sizeof reducer_fields / sizeof reducer_fields[0],
    N_GATHERER_FIELDS = sizeof gatherer_fields / sizeof gatherer_fields[0],
    N_ALL_TO_ALL_FIELDS = sizeof all_to_all_fields / sizeof all_to_all_fields[0]
};

/* ---- defaults ---- */

static const tagc_reducer_options reducer_defaults = {
    .tag = UINT64_MAX,
    .exchange = TAGC_EXCHANGE_DIRECT,
    .format = -1,
    .sparsity = -1,
    .result.format = -1,
    .result.sparsity = -1,
    .n_threads = 1,
    .residual = -1,
};
static const tagc_gatherer_options gatherer_defaults = {.tag = UINT64_MAX, .n_threads = 1};
static const tagc_all_to_all_options all_to_all_defaults = {.tag = UINT64_MAX, .min_elems = 4096};

/* The least sizes are up to the last field of the first release, without what later ones add. */
#define UP_TO(type, last) (offsetof(type, last) + sizeof((type *)0)->last)
static const tagc_sized reducer_struct = {"tagc_reducer_options", sizeof(tagc_reducer_options),
                                          UP_TO(tagc_reducer_options, rounding_seed), &reducer_defaults};
static const tagc_sized gatherer_struct = {"tagc_gatherer_options", sizeof(tagc_gatherer_options),
                                           UP_TO(tagc_gatherer_options, lossless), &gatherer_defaults};
static const tagc_sized all_to_all_struct = {"tagc_all_to_all_options", sizeof(tagc_all_to_all_options),
                                             UP_TO(tagc_all_to_all_options, min_elems), &all_to_all_defaults};

void tagc_reducer_options_init_sized(tagc_reducer_options *options, size_t struct_bytes) {
    tagc_sized_init(&reducer_struct, options, struct_bytes);
}

void tagc_gatherer_options_init_sized(tagc_gatherer_options *options, size_t struct_bytes) {
    tagc_sized_init(&gatherer_struct, options, struct_bytes);
}

void tagc_all_to_all_options_init_sized(tagc_all_to_all_options *options, size_t struct_bytes) {
    tagc_sized_init(&all_to_all_struct, options, struct_bytes);
}

/* ---- the way back ----
 *
 * lab/docs/way-back.md: sums need more bits than fragments, for each of them stands for the values of all ranks. */

#define RETURNED_PER_SENT 2.4

int tagc_result_format(const tagc_reducer_options *options) {
    int is_coarse = options->sparsity > 0 && options->format > TAGC_FORMAT_INT4;
    if (options->result.format != -1) return options->result.format;
    return is_coarse ? TAGC_FORMAT_INT4 : options->format;
}

double tagc_result_sparsity(const tagc_reducer_options *options) {
    if (options->result.sparsity != -1) return options->result.sparsity;
    return fmax(1 - RETURNED_PER_SENT * (1 - options->sparsity), 0);
}

int tagc_results_are_sent(const tagc_reducer_options *options) {
    return options->exchange == TAGC_EXCHANGE_DIRECT && options->output != TAGC_OUTPUT_SHARD;
}

int tagc_reducer_options_are_whole(const tagc_reducer_options *options) {
    if (options->exchange != TAGC_EXCHANGE_DIRECT || options->sparsity != 0) return 0;
    if (options->format != TAGC_FORMAT_FP32 && options->format != TAGC_FORMAT_BF16) return 0;
    return !tagc_results_are_sent(options) ||
           (tagc_result_format(options) == options->format && tagc_result_sparsity(options) == 0);
}

void tagc_reducer_options_send_whole(tagc_reducer_options *options, int format) {
    options->exchange = TAGC_EXCHANGE_DIRECT;
    options->sparsity = 0;
    options->format = format == TAGC_FORMAT_BF16 ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
    options->result.sparsity = options->result.format = options->residual = -1;
    options->block = 0;
    options->paper = NULL;
}

/* 1 if some values have scales. */
static int is_blocks(const tagc_reducer_options *options) {
    if (options->exchange != TAGC_EXCHANGE_DIRECT) return 0;
    return options->format >= TAGC_FORMAT_INT8 ||
           (tagc_results_are_sent(options) && tagc_result_format(options) >= TAGC_FORMAT_INT8);
}

void tagc_reducer_options_resolve(tagc_reducer_options *options) {
    int is_direct = options->exchange == TAGC_EXCHANGE_DIRECT;
    if (options->sparsity == -1) options->sparsity = is_direct ? 0 : 0.9875;
    if (options->format == -1)
        options->format = !is_direct                          ? TAGC_FORMAT_FP32
                          : tagc_is_without_residual(options) ? TAGC_FORMAT_INT4
                          : options->sparsity > 0             ? TAGC_FORMAT_INT2
                                                              : TAGC_FORMAT_INT8;
    if (options->block == 0 && is_blocks(options)) options->block = DEFAULT_BLOCK;
}

void tagc_reducer_options_prune(tagc_reducer_options *options) {
    int exchange = options->exchange;
    if (exchange != TAGC_EXCHANGE_DIRECT) {
        options->format = -1;
        options->residual = -1;
        options->gradient = TAGC_FORMAT_FP32;
    }
    if (!tagc_results_are_sent(options)) {
        options->result.format = -1;
        options->result.sparsity = -1;
    }
    if (exchange == TAGC_EXCHANGE_DIRECT) options->paper = NULL;
    tagc_reducer_options resolved = *options;
    tagc_reducer_options_resolve(&resolved);
    if (!is_blocks(&resolved)) options->block = 0;
}

/* ---- names ---- */

const tagc_gather_choice tagc_gather_choices[] = {
    {"fp32", TAGC_FORMAT_FP32, 0, 0},     {"bf16", TAGC_FORMAT_BF16, 0, 0},
    {"lossless", TAGC_FORMAT_BF16, 0, 1}, {"int8", TAGC_FORMAT_INT8, 0, 0},
    {"delta8", TAGC_FORMAT_INT8, 1, 0},   {"delta4", TAGC_FORMAT_INT4, 1, 0},
    {"delta2", TAGC_FORMAT_INT2, 1, 0},
};

void tagc_gatherer_options_choose(tagc_gatherer_options *options, int kind) {
    options->format = tagc_gather_choices[kind].format;
    options->delta = tagc_gather_choices[kind].delta;
    options->lossless = (uint64_t)tagc_gather_choices[kind].lossless;
}

int tagc_gatherer_options_kind(const tagc_gatherer_options *options) {
    int kind = 0;
    while (kind < TAGC_N_GATHER_KINDS - 1 && (tagc_gather_choices[kind].format != options->format ||
                                              tagc_gather_choices[kind].delta != options->delta ||
                                              tagc_gather_choices[kind].lossless != (int)options->lossless))
        kind++;
    return kind;
}

static const tagc_own_options *own_options_of(int exchange) {
    const tagc_exchange_table *table = tagc_exchange_of(exchange);
    return table ? table->own_options : NULL;
}

uint64_t tagc_padded_elems(uint64_t n, int world_size) {
    if (world_size < 1) return 0;
    uint64_t n_ranks = (uint64_t)world_size;
    uint64_t shard = n / n_ranks + (n % n_ranks != 0);
    return (shard + 15) / 16 * 16 * n_ranks;
}

/* ---- what one rank can see ---- */

/* A unit of n_rows rows. */
static tagc_status check_size(uint64_t n_elems, int n_rows) {
    unsigned long long max_elems = (uint64_t)MAX_SHARD * (uint64_t)n_rows;
    if (n_elems > max_elems)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_elems is %llu, must be at most %llu for %d ranks",
                         (unsigned long long)n_elems, max_elems, n_rows);
    return TAGC_OK;
}

static tagc_status check_numbers(const tagc_reducer_options *options, int world_size) {
    if (options->sparsity != -1 && !(options->sparsity >= 0 && options->sparsity <= 1))
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "sparsity is %.10g, must be in [0, 1], or -1 for the exchange's own",
                         options->sparsity);
    if (options->result.sparsity != -1 && !(options->result.sparsity >= 0 && options->result.sparsity <= 1))
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "result.sparsity is %.10g, must be in [0, 1], or -1 to follow sparsity",
                         options->result.sparsity);
    TAGC_TRY(tagc_fields_check(reducer_fields, N_REDUCER_FIELDS, options));
    TAGC_TRY(check_size(options->n_elems, world_size));
    if (options->block != 0 && (options->block < 16 || (options->block & (options->block - 1))))
        return tagc_fail(TAGC_ERR_ARGUMENT, "block is %d, must be 0 (%d) or a power of two in [16, 4096]",
                         options->block, DEFAULT_BLOCK);
    return TAGC_OK;
}

/* Checks fields that do not apply to the exchange. */
static tagc_status check_known(const tagc_field *fields, int n_fields, const void *values,
                               const tagc_reducer_options *options) {
    for (int f = 0; f < n_fields; f++) {
        const tagc_field *at = &fields[f];
        uint64_t raw = tagc_field_raw(at, values);
        if (at->exchanges >> options->exchange & 1 || tagc_field_number(at, raw) == at->initial) continue;
        char text[TAGC_FIELD_TEXT_BYTES], initial[TAGC_FIELD_TEXT_BYTES];
        tagc_field_text(at, raw, text);
        snprintf(initial, sizeof initial, "%.10g", at->initial);
        if (at->names && at->initial >= 0)
            snprintf(initial, sizeof initial, "%s", at->names[(int)at->initial]);
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "%s is %s, but exchange %s has no %s: leave it at its default, %s", at->name, text,
                         tagc_exchange_names[options->exchange], at->name, initial);
    }
    return TAGC_OK;
}

/* Reads what options->paper points to, or its defaults, and checks it. */
static tagc_status read_own(const tagc_reducer_options *options, int world_size, void *own) {
    const tagc_own_options *o = own_options_of(options->exchange);
    if (!o && options->paper)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "paper is set, but exchange %s has no options of its own: leave it at its default, "
                         "NULL",
                         tagc_exchange_names[options->exchange]);
    if (!o) return TAGC_OK;
    memcpy(own, o->type->defaults, o->type->n_bytes);
    if (options->paper) TAGC_TRY(tagc_sized_read(o->type, options->paper, own));
    TAGC_TRY(tagc_fields_check(o->fields, o->n_fields, own));
    TAGC_TRY(o->check(own, world_size));
    return check_known(o->fields, o->n_fields, own, options);
}

static tagc_status check_once_format(const char *name, int format) {
    if (format == TAGC_FORMAT_FP32 || format == TAGC_FORMAT_INT8 || format == TAGC_FORMAT_INT4)
        return TAGC_OK;
    return tagc_fail(TAGC_ERR_UNSUPPORTED,
                     "%s is %s, must be fp32, int8 or int4 where residual is none: others are not rounded at "
                     "random",
                     name, tagc_format_names[format]);
}

static tagc_status check_once_sparsity(const char *name, double sparsity) {
    if (sparsity == 0) return TAGC_OK;
    return tagc_fail(TAGC_ERR_UNSUPPORTED,
                     "%s is %.10g, must be 0 where residual is none: what is not sent would be lost", name,
                     sparsity);
}

tagc_status tagc_reducer_options_check_once(const tagc_reducer_options *full) {
    if (full->residual != TAGC_RESIDUAL_NONE) return TAGC_OK;
    if (full->exchange != TAGC_EXCHANGE_DIRECT)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "residual is none, but exchange %s cannot do without one",
                         tagc_exchange_names[full->exchange]);
    TAGC_TRY(check_once_sparsity("sparsity", full->sparsity));
    TAGC_TRY(check_once_format("format", full->format));
    if (!tagc_results_are_sent(full)) return TAGC_OK;
    TAGC_TRY(check_once_sparsity("result.sparsity", tagc_result_sparsity(full)));
    return check_once_format("result.format", tagc_result_format(full));
}

/* Checks fields that apply to the exchange, but not together with others. `full` has its defaults resolved. */
static tagc_status check_together(const tagc_reducer_options *options, const tagc_reducer_options *full) {
    const char *exchange = tagc_exchange_names[full->exchange], *format = tagc_format_names[full->format];
    if (full->format != TAGC_FORMAT_FP32 && full->exchange != TAGC_EXCHANGE_DIRECT)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "format is %s, but exchange %s supports only %s", format,
                         exchange, tagc_format_names[0]);
    if (full->exchange == TAGC_EXCHANGE_DIRECT && full->output == TAGC_OUTPUT_SHARD &&
        (full->result.format != -1 || full->result.sparsity != -1))
        return tagc_fail(
            TAGC_ERR_UNSUPPORTED,
            "%s is set, but output is shard, so no sums are sent back: leave it at its default, -1",
            full->result.format != -1 ? "result.format" : "result.sparsity");
    TAGC_TRY(tagc_reducer_options_check_once(full));
    if (full->residual > TAGC_FORMAT_FP32 && full->exchange != TAGC_EXCHANGE_DIRECT)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "residual is %s, but exchange %s stores it only as %s",
                         tagc_format_names[full->residual], exchange, tagc_format_names[0]);
    if (options->block != 0 && !is_blocks(full))
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "block is %d, but format %s has no blocks: leave block at 0, or choose an integer "
                         "format",
                         options->block, format);
    return TAGC_OK;
}

tagc_status tagc_reducer_options_check(const tagc_reducer_options *options, int world_size,
                                       tagc_reducer_options *out, void *own) {
    tagc_reducer_options read;
    if (!options) return tagc_fail(TAGC_ERR_ARGUMENT, "options is NULL");
    TAGC_TRY(tagc_sized_read(&reducer_struct, options, &read));
    TAGC_TRY(check_numbers(&read, world_size));
    if (!tagc_exchange_of(read.exchange))
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "exchange is %s, but this libtagc was built without it: cmake -DTAGC_PAPER=ON "
                         "builds one with it",
                         tagc_exchange_names[read.exchange]);
    TAGC_TRY(read_own(&read, world_size, own));
    TAGC_TRY(check_known(reducer_fields, N_REDUCER_FIELDS, &read, &read));
    *out = read;
    out->n_elems = (read.n_elems + (uint64_t)world_size - 1) / (uint64_t)world_size * (uint64_t)world_size;
    tagc_reducer_options_resolve(out);
    TAGC_TRY(check_together(&read, out));
    if (out->block == 0) out->block = DEFAULT_BLOCK;
    out->paper = NULL;
    const tagc_own_options *o = own_options_of(out->exchange);
    if (o) o->resolve(out, own);
    return TAGC_OK;
}

/* What a reducer may change between steps. */
static int is_changeable(const tagc_field *field) {
    return field->offset == offsetof(tagc_reducer_options, format) ||
           field->offset == offsetof(tagc_reducer_options, sparsity) ||
           field->offset == offsetof(tagc_reducer_options, block) ||
           field->offset == offsetof(tagc_reducer_options, result.format) ||
           field->offset == offsetof(tagc_reducer_options, result.sparsity);
}

tagc_status tagc_reducer_options_check_change(const tagc_reducer_options *now,
                                              const tagc_reducer_options *wanted) {
    for (int f = 0; f < N_REDUCER_FIELDS; f++) {
        const tagc_field *field = &reducer_fields[f];
        uint64_t is = tagc_field_raw(field, now), was_asked = tagc_field_raw(field, wanted);
        if (is == was_asked || is_changeable(field)) continue;
        char here[TAGC_FIELD_TEXT_BYTES], there[TAGC_FIELD_TEXT_BYTES];
        tagc_field_text(field, is, here);
        tagc_field_text(field, was_asked, there);
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "%s is %s, must be %s: only format, sparsity, block, result.format and "
                         "result.sparsity of a reducer can change",
                         field->name, there, here);
    }
    return TAGC_OK;
}

tagc_status tagc_all_to_all_options_check(const tagc_all_to_all_options *options,
                                          tagc_all_to_all_options *out) {
    if (!options) return tagc_fail(TAGC_ERR_ARGUMENT, "options is NULL");
    TAGC_TRY(tagc_sized_read(&all_to_all_struct, options, out));
    return tagc_fields_check(all_to_all_fields, N_ALL_TO_ALL_FIELDS, out);
}

tagc_status tagc_gatherer_options_check(const tagc_gatherer_options *options, int world_size,
                                        tagc_gatherer_options *out) {
    if (!options) return tagc_fail(TAGC_ERR_ARGUMENT, "options is NULL");
    TAGC_TRY(tagc_sized_read(&gatherer_struct, options, out));
    TAGC_TRY(tagc_fields_check(gatherer_fields, N_GATHERER_FIELDS, out));
    TAGC_TRY(check_size(out->n_elems, world_size));
    if (out->n_elems % (uint64_t)world_size != 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_elems is %llu, must be a multiple of %d, the number of ranks",
                         (unsigned long long)out->n_elems, world_size);
    if (out->lossless && (out->delta || out->format != TAGC_FORMAT_BF16))
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "lossless is 1, but %s%s: it codes whole parameters in bf16",
                         out->delta ? "delta is 1" : "format is ",
                         out->delta ? "" : tagc_format_names[out->format]);
    const tagc_gather_choice *found = &tagc_gather_choices[tagc_gatherer_options_kind(out)];
    if (found->format != out->format || found->delta != out->delta)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "format is %s, but a gather of %s supports only %s",
                         tagc_format_names[out->format],
                         out->delta ? "deltas (delta is 1)" : "whole parameters (delta is 0)",
                         out->delta ? "int8, int4 and int2" : "fp32, bf16 and int8");
    if (out->full_format == TAGC_FORMAT_BF16 && !out->delta && out->format != TAGC_FORMAT_BF16)
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "full_format is bf16, but format is %s: bf16 would round what arrives",
                         tagc_format_names[out->format]);
    if (out->rounding == TAGC_ROUNDING_STOCHASTIC && (out->delta || out->format != TAGC_FORMAT_INT8))
        return tagc_fail(
            TAGC_ERR_UNSUPPORTED,
            "rounding is stochastic, but only whole parameters in int8 are rounded so: format is %s "
            "and delta %d",
            tagc_format_names[out->format], out->delta);
    if (out->check_every != 0 && !out->delta)
        return tagc_fail(
            TAGC_ERR_UNSUPPORTED,
            "check_every is %llu, but only replicas of deltas are compared: leave it at 0, or set "
            "delta to 1",
            (unsigned long long)out->check_every);
    return TAGC_OK;
}

/* ---- across ranks ---- */

/* What one rank sends to the others when it creates an object. */
typedef struct report {
    tagc_identity_claim claim;
    uint32_t status;
    uint32_t n_fields; /* tells what it makes */
    uint64_t may_be_whole;
    uint64_t values[N_REDUCER_FIELDS + TAGC_OWN_MAX_FIELDS];
    char text[256];
} report;

static void write_values(const tagc_field *fields, int n_fields, const void *options, uint64_t *values) {
    for (int f = 0; f < n_fields; f++) values[f] = tagc_field_raw(&fields[f], options);
}

/* Compares n_fields values from `first` on with those of rank 0. */
static tagc_status compare_values(const tagc_comm *comm, const tagc_field *fields, int n_fields, int first,
                                  const report *reports, int rank) {
    const uint64_t *own = reports[rank].values + first, *other = reports[0].values + first;
    for (int f = 0; f < n_fields; f++) {
        if (!fields[f].shared || own[f] == other[f]) continue;
        char here[TAGC_FIELD_TEXT_BYTES], there[TAGC_FIELD_TEXT_BYTES];
        tagc_field_text(&fields[f], own[f], here);
        tagc_field_text(&fields[f], other[f], there);
        return tagc_fail(TAGC_ERR_MISMATCH, "%s: rank %d has %s, rank %d has %s", fields[f].name,
                         tagc_comm_name(comm, rank), here, tagc_comm_name(comm, 0), there);
    }
    return TAGC_OK;
}

static int exchange_in(const report *of) {
    int f = 0;
    while (strcmp(reducer_fields[f].name, "exchange") != 0) f++;
    return of->values[f] <= TAGC_EXCHANGE_DIRECT ? (int)of->values[f] : 0;
}

static const char *noun_of(const report *of) {
    if (of->n_fields == N_ALL_TO_ALL_FIELDS) return "an all-to-all";
    return of->n_fields == N_REDUCER_FIELDS ? "a reducer" : "a gatherer";
}

static tagc_status compare_reports(const tagc_comm *comm, const tagc_field *fields, int n_fields,
                                   const report *reports) {
    int world_size = tagc_comm_world_size(comm);
    for (int r = 0; r < world_size; r++) {
        if (reports[r].status == TAGC_OK) continue;
        char text[sizeof reports[r].text];
        memcpy(text, reports[r].text, sizeof text);
        text[sizeof text - 1] = 0;
        return tagc_fail(tagc_status_told(reports[r].status), "rank %d: %s", tagc_comm_name(comm, r), text);
    }
    const tagc_own_options *own = fields == reducer_fields ? own_options_of(exchange_in(&reports[0])) : NULL;
    for (int r = 1; r < world_size; r++) {
        if (reports[r].n_fields != reports[0].n_fields)
            return tagc_fail(TAGC_ERR_MISMATCH, "rank %d makes %s where rank %d makes %s",
                             tagc_comm_name(comm, r), noun_of(&reports[r]), tagc_comm_name(comm, 0),
                             noun_of(&reports[0]));
        if (reports[r].claim.serial != reports[0].claim.serial)
            return tagc_fail(TAGC_ERR_MISMATCH,
                             "rank %d makes object %u of this comm where rank %d makes object %u",
                             tagc_comm_name(comm, r), reports[r].claim.serial, tagc_comm_name(comm, 0),
                             reports[0].claim.serial);
        TAGC_TRY(compare_values(comm, fields, n_fields, 0, reports, r));
        if (own) TAGC_TRY(compare_values(comm, own->fields, own->n_fields, n_fields, reports, r));
    }
    return TAGC_OK;
}

static tagc_status agree(tagc_comm *comm, tagc_status local, const tagc_field *fields, int n_fields,
                         report *own, tagc_identity *identity, int *may_be_whole) {
    int world_size = tagc_comm_world_size(comm);
    own->claim = tagc_identity_next(comm);
    own->status = (uint32_t)local;
    own->n_fields = (uint32_t)n_fields;
    if (local != TAGC_OK)
        snprintf(own->text, sizeof own->text, "%.*s", (int)sizeof own->text - 1, tagc_last_error());
    void *reports;
    tagc_status status =
        tagc_memory_create((size_t)world_size * sizeof *own, "options of all ranks", &reports);
    if (status != TAGC_OK) { /* no memory even for an answer: the others must not wait for it */
        tagc_comm_abort(comm, "no memory for the options of all ranks");
        return status;
    }
    status = tagc_comm_all_gather(comm, own, sizeof *own, reports, (size_t)world_size * sizeof *own);
    if (status == TAGC_OK) status = compare_reports(comm, fields, n_fields, reports);
    if (status == TAGC_OK) tagc_identity_open(comm, identity, ((const report *)reports)->claim);
    for (int r = 0; status == TAGC_OK && may_be_whole && r < world_size; r++)
        *may_be_whole &= ((const report *)reports)[r].may_be_whole != 0;
    tagc_memory_destroy(reports);
    return status;
}

/* What decides which messages a step has, and cannot change. */
static uint64_t shape_of(const tagc_field *fields, int n_fields, const uint64_t *values) {
    uint64_t shape = (uint64_t)n_fields; /* tells what it is of */
    for (int f = 0; f < n_fields; f++) {
        int is_tag = strcmp(fields[f].name, "tag") == 0;
        if (!fields[f].shared || is_tag || (fields == reducer_fields && is_changeable(&fields[f]))) continue;
        shape = (shape ^ values[f]) * 0x9e3779b97f4a7c15u;
        shape ^= shape >> 29;
    }
    return shape;
}

tagc_status tagc_reducer_options_agree(tagc_comm *comm, tagc_status local,
                                       const tagc_reducer_options *options, const void *own,
                                       tagc_identity *identity, int *may_be_whole) {
    report mine = {.may_be_whole = may_be_whole && *may_be_whole};
    if (local == TAGC_OK) {
        const tagc_own_options *o = own_options_of(options->exchange);
        write_values(reducer_fields, N_REDUCER_FIELDS, options, mine.values);
        if (o) write_values(o->fields, o->n_fields, own, mine.values + N_REDUCER_FIELDS);
        *identity = (tagc_identity){.noun = "reducer",
                                    .tag = options->tag,
                                    .n_elems = options->n_elems,
                                    .shape = shape_of(reducer_fields, N_REDUCER_FIELDS, mine.values)};
    }
    return agree(comm, local, reducer_fields, N_REDUCER_FIELDS, &mine, identity, may_be_whole);
}

tagc_status tagc_gatherer_options_agree(tagc_comm *comm, tagc_status local,
                                        const tagc_gatherer_options *options, tagc_identity *identity) {
    report mine = {0};
    if (local == TAGC_OK) {
        write_values(gatherer_fields, N_GATHERER_FIELDS, options, mine.values);
        *identity = (tagc_identity){.noun = "gatherer",
                                    .tag = options->tag,
                                    .n_elems = options->n_elems,
                                    .shape = shape_of(gatherer_fields, N_GATHERER_FIELDS, mine.values)};
    }
    return agree(comm, local, gatherer_fields, N_GATHERER_FIELDS, &mine, identity, NULL);
}

tagc_status tagc_all_to_all_options_agree(tagc_comm *comm, tagc_status local,
                                          const tagc_all_to_all_options *options, tagc_identity *identity) {
    report mine = {0};
    if (local == TAGC_OK) {
        write_values(all_to_all_fields, N_ALL_TO_ALL_FIELDS, options, mine.values);
        *identity = (tagc_identity){.noun = "all-to-all",
                                    .tag = options->tag,
                                    .shape = shape_of(all_to_all_fields, N_ALL_TO_ALL_FIELDS, mine.values)};
    }
    return agree(comm, local, all_to_all_fields, N_ALL_TO_ALL_FIELDS, &mine, identity, NULL);
}
