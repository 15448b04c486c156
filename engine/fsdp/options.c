/* Options of the engine: defaults, ranges, and the text that ranks compare to find different options. */
#include "exchange/options.h"
#include "core/xxh3.h"
#include "fsdp/internal.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

void tagc_fsdp_options_init(tagc_fsdp_options *options) {
    *options = (tagc_fsdp_options){
        .sharding = TAGC_SHARD_FULL,
        .wrap = TAGC_WRAP_BLOCK,
        .policy = TAGC_POLICY_NON_ATTENTION_LINEAR,
        .dense_format = TAGC_FORMAT_FP32,
        .gather = TAGC_GATHER_FP32,
        .ranks_per_host = 1,
        .prefetch = 1,
        .grads_in_flight = 2,
        .n_micro_steps = 1,
        .beta1 = 0.9,
        .beta2 = 0.95,
        .epsilon = 1e-8,
        .beta1_compressed = -1,
        .beta2_compressed = -1,
        .weight_decay = 0.1,
        .clip_norm = 1.0,
    };
    tagc_reducer_options_init(&options->reducer);
    tagc_reducer_options_init(&options->mild);
    options->mild.exchange = -1;
    tagc_paper_options_init(&options->paper);
}

void tagc_fsdp_options_resolve(tagc_fsdp_options *o) {
    tagc_reducer_options *mild = &o->mild;
    tagc_schedule_options schedule;
    tagc_schedule_options_init(&schedule);
    int is_direct = o->policy != TAGC_POLICY_NONE && o->reducer.exchange == TAGC_EXCHANGE_DIRECT;
    if (o->reducer.exchange == TAGC_EXCHANGE_DIRECT) {
        if (o->reducer.sparsity == -1) o->reducer.sparsity = schedule.sparsity;
        if (o->reducer.format == -1) o->reducer.format = schedule.format;
    }
    tagc_reducer_options_resolve(&o->reducer);
    if (mild->exchange == -1) mild->exchange = is_direct ? TAGC_EXCHANGE_DIRECT : TAGC_NO_MILD;
    if (mild->sparsity == -1)
        mild->sparsity =
            mild->exchange == TAGC_NO_MILD ? 0 : fmin(schedule.mild_sparsity, o->reducer.sparsity);
    if (mild->format == -1 && mild->exchange == TAGC_EXCHANGE_DIRECT) mild->format = schedule.mild_format;
    if (mild->residual == -1 && mild->exchange == TAGC_EXCHANGE_DIRECT) mild->residual = o->reducer.residual;
    if (mild->block == 0 && mild->exchange == TAGC_EXCHANGE_DIRECT && is_direct)
        mild->block = o->reducer.block;
    int selects = is_direct && o->reducer.sparsity > 0;
    if (o->beta1_compressed == -1)
        o->beta1_compressed = selects ? fmin(schedule.short_beta1, o->beta1) : o->beta1;
    if (o->beta2_compressed == -1 && !selects) o->beta2_compressed = o->beta2;
}

static tagc_status check_int(const char *name, int value, int min, int max) {
    if (value >= min && value <= max) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT, "%s is %d, allowed is %d to %d", name, value, min, max);
}

/* Of an enum whose values 0, 1, ... are called names (n). */
static tagc_status check_choice(const char *name, int value, const char *const *names, int n) {
    char allowed[160];
    int n_chars = 0;
    if (value >= 0 && value < n) return TAGC_OK;
    for (int i = 0; i < n && n_chars < (int)sizeof allowed; i++)
        n_chars += snprintf(allowed + n_chars, sizeof allowed - (size_t)n_chars, "%s%s (%d)",
                            i == 0       ? ""
                            : i == n - 1 ? " or "
                                         : ", ",
                            names[i], i);
    return tagc_fail(TAGC_ERR_ARGUMENT, "%s is %d, allowed is %s", name, value, allowed);
}

static tagc_status check_real(const char *name, double value, int allowed, const char *range) {
    if (isfinite(value) && allowed) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT, "%s is %g, allowed is %s", name, value, range);
}

tagc_status tagc_fsdp_options_check(const tagc_fsdp_options *o) {
    static const char *const shardings[] = {"full", "grad", "none", "hybrid"};
    static const char *const wraps[] = {"block", "matrix"};
    static const char *const policies[] = {"none", "non_attention_linear", "paper", "all", "names"};
    const char *gathers[TAGC_N_GATHER_KINDS];
    for (int kind = 0; kind < TAGC_N_GATHER_KINDS; kind++) gathers[kind] = tagc_gather_choices[kind].name;
    TAGC_TRY(check_choice("sharding", o->sharding, shardings, TAGC_SHARD_HYBRID + 1));
    if (o->mild.exchange != -1 && o->mild.exchange != TAGC_NO_MILD &&
        o->mild.exchange != TAGC_EXCHANGE_DIRECT)
        return tagc_fail(
            TAGC_ERR_ARGUMENT,
            "mild.exchange is %d, allowed is -1 (as the reducer's), %d (none is mild) or %d (direct)",
            o->mild.exchange, TAGC_NO_MILD, TAGC_EXCHANGE_DIRECT);
    if (o->mild.exchange != TAGC_NO_MILD && o->reducer.exchange == TAGC_EXCHANGE_DIRECT &&
        !tagc_reducer_options_are_whole(&o->reducer) && o->mild.block != 0 &&
        o->mild.block != o->reducer.block)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "mild.block is %d, allowed is 0 or the reducer's, %d",
                         o->mild.block, o->reducer.block);
    TAGC_TRY(check_choice("wrap", o->wrap, wraps, TAGC_WRAP_MATRIX + 1));
    if (o->bucket_elems > TAGC_MOST_BUCKET_ELEMS)
        return tagc_fail(TAGC_ERR_ARGUMENT, "bucket_elems is %llu, allowed is 0 (off) to %llu",
                         (unsigned long long)o->bucket_elems, (unsigned long long)TAGC_MOST_BUCKET_ELEMS);
    if (o->bucket_elems > 0 && o->wrap != TAGC_WRAP_BLOCK)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "bucket_elems is %llu with wrap matrix, allowed is 0: only layers form buckets",
                         (unsigned long long)o->bucket_elems);
    TAGC_TRY(check_choice("policy", o->policy, policies, TAGC_POLICY_NAMES + 1));
    TAGC_TRY(check_choice("dense_format", o->dense_format, tagc_format_names, TAGC_FORMAT_BF16 + 1));
    TAGC_TRY(check_choice("gather", o->gather, gathers, TAGC_N_GATHER_KINDS));
    if (o->gather >= TAGC_GATHER_DELTA8 && o->sharding != TAGC_SHARD_GRAD)
        return tagc_fail(
            TAGC_ERR_ARGUMENT,
            "gather is %s, which needs sharding grad, but sharding is %s: allowed is fp32, bf16 or int8",
            gathers[o->gather], shardings[o->sharding]);
    TAGC_TRY(check_int("gather_check_every", o->gather_check_every, 0, 2147483647));
    TAGC_TRY(check_int("ranks_per_host", o->ranks_per_host, 1, 65536));
    TAGC_TRY(check_int("two_level", o->two_level, 0, 1));
    TAGC_TRY(check_int("prefetch", o->prefetch, 0, 64));
    TAGC_TRY(check_int("grads_in_flight", o->grads_in_flight, 1, 8));
    TAGC_TRY(check_int("n_micro_steps", o->n_micro_steps, 1, 65536));
    TAGC_TRY(check_int("exchange_each_micro_step", o->exchange_each_micro_step, 0, 1));
    TAGC_TRY(check_int("gentle", o->gentle, 0, 1));
    TAGC_TRY(check_int("fresh", o->fresh, 0, 1));
    TAGC_TRY(check_real("beta1", o->beta1, o->beta1 >= 0 && o->beta1 < 1, "[0, 1)"));
    TAGC_TRY(check_real("beta1_compressed", o->beta1_compressed,
                        o->beta1_compressed == -1 || (o->beta1_compressed >= 0 && o->beta1_compressed < 1),
                        "-1 (by the exchange) or [0, 1)"));
    TAGC_TRY(check_real("beta2", o->beta2, o->beta2 >= 0 && o->beta2 < 1, "[0, 1)"));
    TAGC_TRY(check_real("beta2_compressed", o->beta2_compressed,
                        o->beta2_compressed == -1 || (o->beta2_compressed >= 0 && o->beta2_compressed < 1),
                        "-1 (by the exchange) or [0, 1)"));
    TAGC_TRY(check_real("epsilon", o->epsilon, o->epsilon > 0, "above 0"));
    TAGC_TRY(check_real("weight_decay", o->weight_decay, o->weight_decay >= 0, "0 or more"));
    TAGC_TRY(check_real("clip_norm", o->clip_norm, o->clip_norm >= 0, "0 (off) or more"));
    int exchange = o->policy == TAGC_POLICY_NONE ? TAGC_EXCHANGE_DIRECT : o->reducer.exchange;
    if (exchange < TAGC_EXCHANGE_SKETCH || exchange > TAGC_EXCHANGE_DIRECT)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "exchange is %d, allowed is sketch (%d), packed (%d) or direct (%d)", exchange,
                         TAGC_EXCHANGE_SKETCH, TAGC_EXCHANGE_PACKED, TAGC_EXCHANGE_DIRECT);
    if (o->sharding == TAGC_SHARD_HYBRID && exchange != TAGC_EXCHANGE_DIRECT)
        return tagc_fail(
            TAGC_ERR_UNSUPPORTED,
            "exchange is %s, but hybrid sharding supports only direct: no other adds within hosts first",
            tagc_exchange_names[exchange]);
    if (o->policy == TAGC_POLICY_NAMES && (o->names == NULL || o->names[0] == 0))
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "names is empty, policy by names needs patterns such as h.*.mlp.*");
    return TAGC_OK;
}

void tagc_fsdp_options_text(const tagc_fsdp *fsdp, char text[TAGC_OPTIONS_TEXT_BYTES]) {
    const tagc_fsdp_options *o = &fsdp->options;
    memset(text, 0, TAGC_OPTIONS_TEXT_BYTES);
    uint64_t tensors = 0, names = o->names == NULL ? 0 : tagc_xxh3(o->names, strlen(o->names), 0);
    for (int i = 0; i < fsdp->tables.n_tensors; i++) {
        const tagc_tensor_info *t = &fsdp->tables.tensors[i];
        uint64_t numbers[] = {t->n_rows,
                              t->n_cols,
                              (uint64_t)t->kind,
                              (uint64_t)t->layer,
                              (uint64_t)t->last_layer,
                              (uint64_t)t->decay,
                              tagc_xxh3(t->name, strlen(t->name), 0)};
        tensors = tagc_xxh3(numbers, sizeof numbers, tensors);
    }
    snprintf(text, TAGC_OPTIONS_TEXT_BYTES,
             "n_tensors=%d tensors=%016llx sharding=%d wrap=%d bucket_elems=%llu policy=%d names=%016llx "
             "exchange=%d mild=%d "
             "dense_format=%d "
             "gather=%d ranks_per_host=%d two_level=%d prefetch=%d grads_in_flight=%d n_micro_steps=%d "
             "exchange_each_micro_step=%d "
             "beta1=%.17g beta1_compressed=%.17g "
             "beta2=%.17g beta2_compressed=%.17g epsilon=%.17g weight_decay=%.17g clip_norm=%.17g "
             "gentle=%d fresh=%d",
             fsdp->tables.n_tensors, (unsigned long long)tensors, o->sharding, o->wrap,
             (unsigned long long)o->bucket_elems, o->policy, (unsigned long long)names, o->reducer.exchange,
             o->mild.exchange, o->dense_format, o->gather, o->ranks_per_host, o->two_level, o->prefetch,
             o->grads_in_flight, o->n_micro_steps, o->exchange_each_micro_step, o->beta1, o->beta1_compressed,
             o->beta2, o->beta2_compressed, o->epsilon, o->weight_decay, o->clip_norm, o->gentle, o->fresh);
}
