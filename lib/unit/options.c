/* See options.h. */
#include "unit/options.h"

#include "core/sized.h"
#include "schedule/constants.h"

static const tagc_model_options default_options = {
    .op = TAGC_OP_AVG,
    .n_threads = 1,
    .exchange = TAGC_EXCHANGE_DIRECT,
    .schedule = {.moment = TAGC_MOMENT_STAYS},
    .layout = {.output = TAGC_OUTPUT_SHARD, .cut = TAGC_CUT_ROWS, .min_elems = TAGC_CLASS_MIN_ELEMS},
    .formats = {.gradient = TAGC_ELEMENT_FP32,
                .sum = TAGC_ELEMENT_FP32,
                .dense = TAGC_FORMAT_FP32,
                .residual = -1,
                .result = -1,
                .result_sparsity = -1},
    .hosts = {.format = -1},
};
static const tagc_sized options_struct = {"tagc_model_options", sizeof(tagc_model_options),
                                          offsetof(tagc_model_options, name) +
                                              sizeof(char *), /* the last field of the first release */
                                          &default_options};

void tagc_model_options_init_sized(tagc_model_options *options, size_t struct_bytes) {
    tagc_sized_init(&options_struct, options, struct_bytes);
}

static tagc_status check_choice(const char *name, int value, int low, int high) {
    if (value >= low && value <= high) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT, "%s is %d, must be in [%d, %d]", name, value, low, high);
}

static tagc_status check_options(const tagc_model_options *o, int n_places) {
    TAGC_TRY(check_choice("schedule.moment", o->schedule.moment, TAGC_MOMENT_STAYS, TAGC_MOMENT_NONE));
    TAGC_TRY(check_choice("layout.output", o->layout.output, TAGC_OUTPUT_SHARD, TAGC_OUTPUT_HOST_SHARD));
    TAGC_TRY(check_choice("op", o->op, TAGC_OP_AVG, TAGC_OP_SUM));
    TAGC_TRY(check_choice("formats.gradient", o->formats.gradient, TAGC_ELEMENT_FP32, TAGC_ELEMENT_FP16));
    TAGC_TRY(check_choice("formats.sum", o->formats.sum, TAGC_ELEMENT_FP32, TAGC_ELEMENT_FP16));
    TAGC_TRY(check_choice("formats.dense", o->formats.dense, TAGC_FORMAT_FP32, TAGC_FORMAT_BF16));
    TAGC_TRY(check_choice("n_threads", o->n_threads, 1, 256));
    TAGC_TRY(check_choice("exchange", o->exchange, TAGC_EXCHANGE_SKETCH, TAGC_EXCHANGE_DIRECT));
    TAGC_TRY(check_choice("rests", o->rests, 0, 1));
    TAGC_TRY(check_choice("hosts.summed", o->hosts.summed, 0, 1));
    if (o->hosts.summed && n_places > 1 && o->layout.output == TAGC_OUTPUT_UNIT)
        return tagc_fail(
            TAGC_ERR_UNSUPPORTED,
            "summed with output UNIT: take HOST_SHARD, and send the host's ranks what each gets");
    if (o->hosts.summed && o->layout.cut == TAGC_CUT_FLAT_ARRAYS)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "summed with cut FLAT_ARRAYS, which are whole: take FLAT");
    if (o->formats.residual != -1 && o->formats.residual != TAGC_RESIDUAL_NONE &&
        o->formats.residual != TAGC_FORMAT_FP32 && o->formats.residual != TAGC_FORMAT_INT8 &&
        o->formats.residual != TAGC_FORMAT_INT4)
        return tagc_fail(TAGC_ERR_ARGUMENT, "formats.residual is %d, must be -1, NONE, FP32, INT8 or INT4",
                         o->formats.residual);
    TAGC_TRY(check_choice("hosts.format", o->hosts.format, -1, TAGC_FORMAT_BF16));
    TAGC_TRY(check_choice("layout.cut", o->layout.cut, TAGC_CUT_ROWS, TAGC_CUT_RANGES));
    if (o->layout.cut == TAGC_CUT_FLAT_ARRAYS &&
        (o->formats.gradient != TAGC_ELEMENT_FP32 || o->formats.sum != TAGC_ELEMENT_FP32))
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "cut is FLAT_ARRAYS, which are fp32, but gradient is %d and sum %d",
                         o->formats.gradient, o->formats.sum);
    if (!o->schedule.follows != !o->schedule.numbers)
        return tagc_fail(TAGC_ERR_ARGUMENT, "follows and numbers: one is NULL, and the other is not");
    if ((o->layout.cut == TAGC_CUT_FLAT || o->layout.cut == TAGC_CUT_FLAT_ARRAYS) &&
        (o->schedule.follows || o->rests))
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "follows and rests need the cut ROWS or RANGES");
    if ((o->layout.cut == TAGC_CUT_RANGES) != (o->layout.ranges != NULL))
        return tagc_fail(TAGC_ERR_ARGUMENT, "cut is %d, and ranges %s: RANGES needs them, and no other cut",
                         o->layout.cut, o->layout.ranges ? "are given" : "are NULL");
    if (o->layout.cut == TAGC_CUT_RANGES && o->layout.output == TAGC_OUTPUT_UNIT)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "cut is RANGES, and output UNIT, of which nobody owns a part");
    if (o->paper && !tagc_is_paper(o->exchange))
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "paper is set, but exchange is none of the paper's");
    if (tagc_is_paper(o->exchange) && o->formats.residual > TAGC_FORMAT_FP32)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "exchange is one of the paper's, which have residual FP32");
    return TAGC_OK;
}

tagc_status tagc_model_options_read(const tagc_model_options *from, int n_places, tagc_model_options *out) {
    tagc_model_options_init(out);
    if (from) TAGC_TRY(tagc_sized_read(&options_struct, from, out));
    return check_options(out, n_places);
}

/* ---- what a class sends ---- */

tagc_schedule_plan tagc_class_plan(const tagc_schedule_options *o, int dense, tagc_class kind) {
    tagc_schedule_plan plan = {.level = TAGC_LEVEL_LAST, .moment = 1};
    plan.format = kind == TAGC_CLASS_DENSE  ? (tagc_format)dense
                  : kind == TAGC_CLASS_MILD ? o->mild_format
                                            : o->format;
    plan.sparsity = kind == TAGC_CLASS_DENSE ? 0 : kind == TAGC_CLASS_MILD ? o->mild_sparsity : o->sparsity;
    if (plan.sparsity == 0 && plan.format == TAGC_FORMAT_INT4) plan.block = TAGC_BLOCK_OF_EVERY;
    return plan;
}

int tagc_class_has_levels(const tagc_schedule_options *o, int exchange, tagc_class kind) {
    if (!o->gentle || kind == TAGC_CLASS_DENSE) return 0;
    if (kind == TAGC_CLASS_MILD) return o->mild_sparsity > 0;
    return o->sparsity > 0 && exchange == TAGC_EXCHANGE_DIRECT;
}

/* ---- the options of reducers ---- */

static int is_papers(const tagc_model_options *options, tagc_class kind) {
    return kind == TAGC_CLASS_COMPRESSED && tagc_is_paper(options->exchange);
}

/* direct can, the other exchanges read fp32, as does what sends values whole. */
int tagc_reads_bf16(const tagc_model_options *options, tagc_class kind) {
    return options->formats.gradient == TAGC_ELEMENT_BF16 && kind != TAGC_CLASS_DENSE &&
           !is_papers(options, kind);
}

void tagc_options_between(const tagc_model_options *m, const tagc_exchanged *what, tagc_reducer_options *o) {
    const tagc_schedule_plan *plan = &what->plan;
    int stays = what->n_places > 1 && what->n_hosts == 1; /* nothing leaves the host */
    tagc_reducer_options_init(o);
    o->n_elems = what->n_elems;
    o->tag = what->tag;
    o->op = m->op;
    o->output = m->layout.output == TAGC_OUTPUT_SHARD ? TAGC_OUTPUT_SHARD : TAGC_OUTPUT_UNIT;
    o->n_threads = m->n_threads;
    if (is_papers(m, what->kind)) {
        o->exchange = m->exchange;
        o->paper = m->paper;
        o->sparsity = plan->sparsity;
        return;
    }
    o->exchange = TAGC_EXCHANGE_DIRECT;
    o->format = stays ? TAGC_FORMAT_FP32 : (int)plan->format;
    o->sparsity = stays ? 0 : plan->sparsity;
    if (what->kind == TAGC_CLASS_DENSE) return;
    o->residual = m->formats.residual;
    o->gradient = tagc_reads_bf16(m, what->kind) ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
    if (stays) return;
    if (o->format >= TAGC_FORMAT_INT8) o->block = m->formats.block;
    if (plan->block > 0 && (o->block == 0 || (what->is_followed && o->block > plan->block)))
        o->block = plan->block;
    if (what->kind != TAGC_CLASS_COMPRESSED || (what->is_followed && plan->sparsity == 0)) return;
    o->result.format = m->formats.result;
    o->result.sparsity = m->formats.result_sparsity;
}

/* In fp32 or bf16, since all of it travels. */
void tagc_options_within(const tagc_model_options *m, const tagc_exchanged *what, tagc_reducer_options *o) {
    tagc_reducer_options_init(o);
    o->n_elems = what->n_elems * (uint64_t)what->n_places;
    o->tag = what->tag;
    o->op = m->op;
    o->sparsity = 0;
    o->format = m->hosts.format >= 0                    ? m->hosts.format
                : what->plan.format == TAGC_FORMAT_FP32 ? TAGC_FORMAT_FP32
                                                        : TAGC_FORMAT_BF16;
    o->gradient = m->formats.gradient == TAGC_ELEMENT_BF16 ? TAGC_FORMAT_BF16 : TAGC_FORMAT_FP32;
    o->n_threads = m->n_threads;
}
