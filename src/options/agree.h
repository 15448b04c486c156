/* Ranks that were started with different options would train different models: found out before anything
 * starts. */
#ifndef TAGC_OPTIONS_AGREE_H
#define TAGC_OPTIONS_AGREE_H

#include "options/options.h"
#include "tagc/tagc.h"

/* Collective: the same TAGC_ERR_MISMATCH on all ranks, naming the first option that differs and both values.
 */
tagc_status tagc_agree_options(tagc_comm *comm, const tagc_command *command, const void *values);

#endif
