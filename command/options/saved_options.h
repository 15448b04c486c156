/* Options as they are stored with a checkpoint or a result, {name: text}, and how a run goes on from them. */
#ifndef TAGC_OPTIONS_SAVED_OPTIONS_H
#define TAGC_OPTIONS_SAVED_OPTIONS_H

#include "options/options.h"
#include "train/progress.h"
#include "train/saved.h"

/* Returns every option of a command. */
json_t *tagc_saved_options(const tagc_command *command, const void *values);

/* TAGC_ERR_ARGUMENT names an option that a checkpoint cannot hold. */
tagc_status tagc_saved_check_text(const tagc_command *command, const void *values);

/* To go on: TAGC_ERR_UNSUPPORTED for an option that this build does not know. */
tagc_status tagc_saved_check_known(const tagc_saved *saved, const tagc_command *command);

/* For a fork: the model's options that were not given become the checkpoint's. */
tagc_status tagc_saved_merge_model(const tagc_saved *saved, const tagc_parsed *parsed, void *values);

/* Options that were not given become the checkpoint's. Given ones that differ are refused where the
 * checkpoint could not go on with them, and noted otherwise. */
tagc_status tagc_saved_merge(const tagc_saved *saved, const tagc_parsed *parsed, void *values,
                             tagc_progress *progress);

#endif
