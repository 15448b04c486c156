/* What can be said about a training run, and how it becomes options of the engine and the model. */
#ifndef TAGC_OPTIONS_TRAIN_OPTIONS_H
#define TAGC_OPTIONS_TRAIN_OPTIONS_H

#include "fsdp/fsdp.h"
#include "fsdp/learning_rate.h"
#include "gpt2/gpt2.h"
#include "options/options.h"

enum { TAGC_TRAIN_MAX_RANKS = 1024 };

typedef struct tagc_train_options {
    const char *data, *val_data;
    const char *model, *init_from;
    int64_t n_layer, n_head, n_embd, block_size, vocab_size; /* 0: the preset's */
    int tied;                                                /* 0 the preset's, 1 yes, 2 no */
    int64_t batch_size, seq_len, accumulate, steps, warmup, decay_steps,
        seed;     /* decay_steps 0: a tenth of the steps */
    int schedule; /* tagc_schedule */
    double lr, min_lr, weight_decay, beta1, compressed_beta1, beta2, compressed_beta2, clip;
    const char *preset, *levels;
    int sharding, wrap, gather, exchange_each_micro_step;
    int64_t bucket_elems, prefetch, grads_in_flight, gather_check_every, ranks_per_host;
    int two_level;
    int compress;
    const char *compress_names;
    int exchange, index, cells, unpeeled, fill_union, wire;
    double sparsity, ratio;
    int values, mild, rotate;
    double mild_sparsity;
    double guard;
    int64_t sparsity_warmup;
    int gentle; /* auto, yes, no */
    int64_t block;
    int64_t ranks, codec_threads, blas_threads;
    int transport;
    double timeout;
    const char *out, *resume, *fork, *trace, *trace_steps, *config;
    int schedule_from;
    int64_t eval_every, eval_batches, save_every, keep;
    int quiet;
} tagc_train_options;

/* The rows' `lacks` take a tagc_train_facts. */
extern const tagc_command tagc_train_command;

typedef struct tagc_train_facts {
    const tagc_train_options *options; /* resolved */
    int has_mild;                      /* the model has matrices in the class mild */
} tagc_train_facts;

/* Some gradients are compressed; some travel as fragments of direct exchanges. */
int tagc_train_compresses(const tagc_train_options *options);
int tagc_train_is_coded(const tagc_train_facts *facts);

/* An option's value as a word, of --exchange and the like; until the next call in this thread. */
const char *tagc_train_word(const tagc_train_options *options, const char *name);

/* The model's shape: the preset with what was given in its place, checked. */
tagc_status tagc_train_model(const tagc_train_options *options, tagc_gpt2_config *out);

/* The options of the model's shape, --model first. */
enum { TAGC_TRAIN_N_SHAPE = 7 };
extern const char *const tagc_train_shape[TAGC_TRAIN_N_SHAPE];

/* Sets what is not given of the shape. */
void tagc_train_set_shape(const tagc_parsed *parsed, const tagc_gpt2_config *config,
                          tagc_train_options *options);

/* The shape in the config.json beside --init-from, where there is one, for what is not given of the shape. */
tagc_status tagc_train_take_shape(const tagc_parsed *parsed, tagc_train_options *options);

/* Of the steps behind step `from`, counted from there. */
tagc_learning_rate tagc_train_learning_rate(const tagc_train_options *options, uint64_t from);

/* Options of the engine, resolved. */
void tagc_train_fsdp(const tagc_train_options *options, tagc_fsdp_options *out);

/* "FIRST-LAST" or one number, 1-based, FIRST <= LAST. */
tagc_status tagc_train_trace_steps(const char *text, uint64_t *first, uint64_t *last);

/* What no single option's range can say. */
tagc_status tagc_train_check(const tagc_train_options *options);

#endif
