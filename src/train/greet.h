/* What a run says of itself before its first step. */
#ifndef TAGC_TRAIN_GREET_H
#define TAGC_TRAIN_GREET_H

#include "train/trainer.h"

void tagc_greet(tagc_trainer *trainer, const tagc_parsed *parsed);

#endif
