/* What is to be known of a training run, and how it becomes options of the engine and the model. */
#ifndef TAGC_TRAIN_OPTIONS_H
#define TAGC_TRAIN_OPTIONS_H

#include "core/status.h"
#include "fsdp/fsdp.h"
#include "fsdp/learning_rate.h"
#include "gpt2/gpt2.h"

/* Of `values` and `mild`, behind those of tagc_format: the exchange's own choice. */
enum { TAGC_TRAIN_AUTO_VALUES = TAGC_FORMAT_INT2 + 1 };
enum { TAGC_TRAIN_MAX_RANKS = 1024 };
/* As `exchange`, beside those of tagc_exchange: direct, every value as --wire says. tagc_train_fsdp alone makes that of it. */
enum { TAGC_TRAIN_DENSE = 0 };

typedef struct tagc_train_options {
    const char *data, *val_data;
    const char *model, *init_from;
    int64_t n_layer, n_head, n_embd, block_size, vocab_size; /* 0: the preset's */
    int tied;                                                /* 0 the preset's, 1 yes, 2 no */
    int64_t batch_size, seq_len, accumulate, steps, warmup, decay_steps,
        seed;     /* decay_steps 0: a tenth of the steps */
    int schedule; /* tagc_rate_schedule */
    double lr, min_lr, weight_decay, beta1, compressed_beta1, beta2, compressed_beta2, clip;
    const char *preset, *levels;
    int sharding, wrap, gather, exchange_each_micro_step;
    int64_t bucket_elems, prefetch, grads_in_flight, gather_check_every, ranks_per_host;
    int two_level;
    int compress;
    const char *compress_names;
    int exchange, index, cells, unpeeled, fill_union, wire;
    double sparsity, ratio;
    int values, mild;
    int residual; /* fp32, int8, int4 */
    double mild_sparsity, result_sparsity;
    int result_values; /* auto, then tagc_format */
    int gentle;        /* auto, yes, no */
    int64_t block;
    int64_t ranks, codec_threads, blas_threads;
    int transport;
    double timeout;
    const char *out, *resume, *fork, *trace, *trace_steps, *config;
    int schedule_from;
    int64_t eval_every, eval_batches, save_every, keep;
    int quiet;
} tagc_train_options;

/* Returns 1 if some gradients are compressed. */
int tagc_train_compresses(const tagc_train_options *options);

/* The model's shape: the preset with what was given in its place, checked. */
tagc_status tagc_train_model(const tagc_train_options *options, tagc_gpt2_config *out);

/* Of the steps behind step `from`, counted from there. */
tagc_learning_rate tagc_train_learning_rate(const tagc_train_options *options, uint64_t from);

/* Options of the engine, resolved. */
void tagc_train_fsdp(const tagc_train_options *options, tagc_fsdp_options *out);

/* "FIRST-LAST" or one number, 1-based, FIRST <= LAST. */
tagc_status tagc_train_trace_steps(const char *text, uint64_t *first, uint64_t *last);

#endif
