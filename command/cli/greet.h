/* The first lines of a run. */
#ifndef TAGC_CLI_GREET_H
#define TAGC_CLI_GREET_H

#include "options/options.h"
#include "train/trainer.h"

/* Prints what is trained, how gradients travel, and which options have no effect. is_default_preset: TAGC_PRESET_DEFAULT was taken, for
 * want of options that choose. */
void tagc_greet(tagc_trainer *trainer, const tagc_parsed *parsed, int is_default_preset);

#endif
