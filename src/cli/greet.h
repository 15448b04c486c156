/* What a run says of itself before its first step. */
#ifndef TAGC_CLI_GREET_H
#define TAGC_CLI_GREET_H

#include "cli/trainer.h"

void tagc_greet(tagc_trainer *trainer, const tagc_parsed *parsed);

#endif
