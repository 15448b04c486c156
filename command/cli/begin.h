/* How `tagc train` begins: its words, and the checkpoint that they name, as what a trainer opens. */
#ifndef TAGC_CLI_BEGIN_H
#define TAGC_CLI_BEGIN_H

#include "options/options.h"
#include "train/trainer.h"

/* Collective. Close *out after success and failure alike. is_default_preset: TAGC_PRESET_DEFAULT was taken, for want of options that
 * choose. */
tagc_status tagc_begin(tagc_rank *rank, const tagc_parsed *parsed, int quiet, tagc_beginning *out,
                       int *is_default_preset);

#endif
