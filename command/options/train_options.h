/* The table of `tagc train`: how the options of a training run (train/options.h) are given, worded and checked. */
#ifndef TAGC_OPTIONS_TRAIN_OPTIONS_H
#define TAGC_OPTIONS_TRAIN_OPTIONS_H

#include "options/options.h"
#include "train/options.h"

/* The rows' `lacks` take a tagc_train_facts. */
extern const tagc_command tagc_train_command;

typedef struct tagc_train_facts {
    const tagc_train_options *options; /* resolved */
    int has_mild;                      /* the model has matrices in the class mild */
} tagc_train_facts;

/* Some gradients travel as fragments of direct exchanges. */
int tagc_train_is_coded(const tagc_train_facts *facts);

/* An option's value as a word, of --exchange and the like; until the next call in this thread. */
const char *tagc_train_word(const tagc_train_options *options, const char *name);

/* The options of the model's shape, --model first. */
enum { TAGC_TRAIN_N_SHAPE = 7 };
extern const char *const tagc_train_shape[TAGC_TRAIN_N_SHAPE];

/* Sets what is not given of the shape. */
void tagc_train_set_shape(const tagc_parsed *parsed, const tagc_gpt2_config *config,
                          tagc_train_options *options);

/* The shape in the config.json beside --init-from, where there is one, for what is not given of the shape. */
tagc_status tagc_train_take_shape(const tagc_parsed *parsed, tagc_train_options *options);

/* What no single option's range can say. */
tagc_status tagc_train_check(const tagc_train_options *options);

#endif
