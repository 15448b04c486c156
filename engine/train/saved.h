/* What the command stores with a checkpoint beside the engine's state, and how a run goes on from it. */
#ifndef TAGC_TRAIN_SAVED_H
#define TAGC_TRAIN_SAVED_H

#include "disk/paths.h"
#include "fsdp/fsdp.h"
#include "fsdp/guard.h"
#include "gpt2/gpt2.h"
#include "options/options.h"
#include "train/progress.h"
#include <jansson.h>

typedef struct tagc_saved {
    tagc_gpt2_config model;
    uint64_t position; /* of the loader */
    uint64_t n_tokens; /* seen so far */
    int world_size;
    uint64_t fork_step;                /* where this run left another one; 0: it did not */
    double best_val_loss;              /* infinity before the first evaluation */
    tagc_guard guard;                  /* n_seen is 0 without one; its limits are the options' */
    char tokenizer[64];                /* of the token file, "" when it does not say */
    uint64_t data_n_tokens, data_hash; /* of the training tokens */
    json_t *options;                   /* {name: text}; texts of merged options live here */
    uint64_t step;                     /* of the checkpoint, not in its text; set by _open */
} tagc_saved;

json_t *tagc_saved_model(const tagc_gpt2_config *config);
json_t *tagc_saved_options(const tagc_command *command, const void *values);

/* JSON text, malloc'ed; NULL when out of memory. `options` of the struct is not read. */
char *tagc_saved_write(const tagc_saved *saved, const tagc_command *command, const void *values);

/* TAGC_ERR_CORRUPT names what is missing or wrong. */
tagc_status tagc_saved_read(const char *text, tagc_saved *out);
/* Collective: that of the newest checkpoint at or under `from`. path: the checkpoint's. */
tagc_status tagc_saved_open(tagc_comm *comm, const char *from, char path[TAGC_PATH_BYTES], tagc_saved *out);
void tagc_saved_destroy(tagc_saved *saved);

/* The engine's options out of a result's, which are those of tagc train by name. Names that this build does not know are passed over. */
tagc_status tagc_saved_engine(const json_t *options, tagc_fsdp_options *out);

/* To go on: TAGC_ERR_UNSUPPORTED for an option that this build does not know. */
tagc_status tagc_saved_check_known(const tagc_saved *saved, const tagc_command *command);

/* For a fork: the model's options that were not given become the checkpoint's. */
tagc_status tagc_saved_merge_model(const tagc_saved *saved, const tagc_parsed *parsed, void *values);

/* Options that were not given become the checkpoint's. Given ones that differ are refused where the
 * checkpoint could not go on with them, and noted otherwise. */
tagc_status tagc_saved_merge(const tagc_saved *saved, const tagc_parsed *parsed, void *values,
                             tagc_progress *progress);

#endif
