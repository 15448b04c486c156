/* The translation of a run's options into those of the engine and the model. */
#include "train/options.h"

#include "exchange/options.h"

#include <stdlib.h>
#include <string.h>

/* ---- what rows need ---- */

int tagc_train_compresses(const tagc_train_options *o) {
    return o->exchange != TAGC_TRAIN_DENSE && o->compress != TAGC_POLICY_NONE;
}

tagc_status tagc_train_model(const tagc_train_options *options, tagc_gpt2_config *out) {
    if (!options->model) return tagc_fail(TAGC_ERR_ARGUMENT, "--model is empty");
    TAGC_TRY(tagc_gpt2_preset(options->model, out));
    if (options->n_layer) out->n_layer = (int)options->n_layer;
    if (options->n_head) out->n_head = (int)options->n_head;
    if (options->n_embd) out->n_embd = (int)options->n_embd;
    if (options->block_size) out->block_size = (int)options->block_size;
    if (options->vocab_size) out->vocab_size = (int)options->vocab_size;
    if (options->tied) out->tied = options->tied == 1;
    return tagc_gpt2_config_check(out);
}

static void set_paper(const tagc_train_options *options, tagc_paper_options *out) {
    out->index = options->index;
    out->fill_union = options->fill_union == 0 ? -1 : options->fill_union == 1;
    if (options->exchange != TAGC_EXCHANGE_SKETCH) return;
    out->ratio = options->ratio;
    out->cells = options->cells;
    out->unpeeled = options->unpeeled;
    out->seed = (uint64_t)options->seed;
}

tagc_learning_rate tagc_train_learning_rate(const tagc_train_options *options, uint64_t from) {
    uint64_t n_steps = (uint64_t)options->steps - from, n_decay = (uint64_t)options->decay_steps;
    return (tagc_learning_rate){.schedule = options->schedule,
                                .n_warmup = (uint64_t)options->warmup,
                                .n_decay = n_decay > 0 ? n_decay : (n_steps + 9) / 10,
                                .n_steps = n_steps,
                                .highest = options->lr,
                                .last = options->min_lr};
}

/* In the order of --residual's words. */
static const int residual_formats[] = {TAGC_FORMAT_FP32, TAGC_FORMAT_INT8, TAGC_FORMAT_INT4};

/* What the class COMPRESSED sends. *out is initialised. */
static void set_compressed(const tagc_train_options *options, tagc_reducer_options *out) {
    int is_direct = options->exchange == TAGC_EXCHANGE_DIRECT;
    out->exchange = options->exchange;
    out->sparsity = options->sparsity;
    if (options->exchange == TAGC_TRAIN_DENSE)
        tagc_reducer_options_send_whole(out, options->wire);
    else if (is_direct && options->values != TAGC_TRAIN_AUTO_VALUES)
        out->format = options->values;
    out->block = (int)options->block;
    out->n_threads = (int)options->codec_threads;
    if (!is_direct) return;
    out->result.sparsity = options->result_sparsity;
    out->result.format = options->result_values - 1; /* words are auto, then formats from 0 on */
    out->residual = residual_formats[options->residual];
}

/* What the class MILD sends. *out is what COMPRESSED sends. */
static void set_mild(const tagc_train_options *options, tagc_reducer_options *out) {
    int is_auto = options->mild == TAGC_TRAIN_AUTO_VALUES, is_dense = options->exchange == TAGC_TRAIN_DENSE;
    out->sparsity = options->mild_sparsity;
    out->result.sparsity = out->result.format = -1;
    if (is_auto) { /* as the engine resolves it; of a run that is dense, nothing is MILD */
        out->exchange = is_dense ? TAGC_NO_MILD : -1;
        out->format = -1;
    } else if (options->mild == 0) { /* the word dense */
        out->exchange = TAGC_NO_MILD;
        out->format = -1;
    } else {
        out->exchange = TAGC_EXCHANGE_DIRECT;
        out->format = options->mild;
    }
    if (!is_dense || out->exchange != TAGC_EXCHANGE_DIRECT || out->sparsity != -1) return;
    tagc_schedule_options schedule;
    tagc_schedule_options_init(&schedule);
    out->sparsity = schedule.mild_sparsity; /* not as little as what is dense leaves out */
}

void tagc_train_fsdp(const tagc_train_options *options, tagc_fsdp_options *out) {
    tagc_fsdp_options_init(out);
    out->sharding = options->sharding;
    out->wrap = options->wrap;
    out->policy = options->compress;
    out->names = options->compress_names;
    out->dense_format = options->wire;
    out->gather = options->gather;
    out->bucket_elems = (uint64_t)options->bucket_elems;
    out->prefetch = (int)options->prefetch;
    out->grads_in_flight = (int)options->grads_in_flight;
    out->n_micro_steps = (int)options->accumulate;
    out->exchange_each_micro_step = options->exchange_each_micro_step;
    out->gather_check_every = (int)options->gather_check_every;
    out->ranks_per_host = (int)options->ranks_per_host;
    out->two_level = options->two_level;
    out->beta1 = options->beta1;
    out->beta1_compressed = options->compressed_beta1;
    out->beta2 = options->beta2;
    out->beta2_compressed = options->compressed_beta2;
    out->weight_decay = options->weight_decay;
    out->clip_norm = options->clip;
    int is_gentle = options->gentle == 0 ? options->sparsity < 0 : options->gentle == 1;
    out->gentle = is_gentle && options->exchange == TAGC_EXCHANGE_DIRECT;
    set_compressed(options, &out->reducer);
    out->mild = out->reducer;
    set_mild(options, &out->mild);
    set_paper(options, &out->paper);
    tagc_fsdp_options_resolve(out);
}

tagc_status tagc_train_trace_steps(const char *text, uint64_t *first, uint64_t *last) {
    char *end = NULL;
    unsigned long long from = strtoull(text, &end, 10), to = from;
    if (*end == '-') to = strtoull(end + 1, &end, 10);
    if (*end || from < 1 || to < from || to > 1000000000 || text[strspn(text, "-0123456789")] ||
        text[0] == '-')
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "--trace-steps is \"%.40s\", allowed: FIRST-LAST with 1 <= FIRST <= LAST", text);
    *first = from;
    *last = to;
    return TAGC_OK;
}
