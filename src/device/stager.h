/* What tests ask a stager beside its public part. */
#ifndef TAGC_DEVICE_STAGER_H
#define TAGC_DEVICE_STAGER_H

#include "device/runtime.h"

/* Host functions that sleep until their exchange is finished. */
int tagc_stager_n_waiting(tagc_stager *stager);
/* Exchanges that tagc_stager_next would give at once. */
uint64_t tagc_stager_n_ready(tagc_stager *stager);

#endif
