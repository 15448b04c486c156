/* One status for all ranks. */
#ifndef TAGC_FSDP_AGREE_H
#define TAGC_FSDP_AGREE_H

#include "tagc/tagc.h"

/* Collective. Every rank brings its status (and its text, tagc_last_error); all return that of the lowest
 * rank that failed, with "rank r: " before its text. */
tagc_status tagc_agree(tagc_comm *comm, tagc_status status);

#endif
