/* Makes all ranks return the same status. */
#ifndef TAGC_FSDP_AGREE_H
#define TAGC_FSDP_AGREE_H

#include "tagc/tagc.h"

/* Collective. Each rank passes its status; its text is tagc_last_error. All ranks return the status of the lowest
 * rank that failed, with "rank r: " before its text. */
tagc_status tagc_agree(tagc_comm *comm, tagc_status status);

#endif
