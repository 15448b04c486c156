/* The folder of --out, and which process may write there. */
#ifndef TAGC_TRAIN_RUN_FOLDER_H
#define TAGC_TRAIN_RUN_FOLDER_H

#include "tagc/tagc.h"

/* Local, of rank 0: refuses a folder whose run would get mixed up with this one. checkpoint: the one that is
 * gone on from, of `step`; NULL for a new run. */
tagc_status tagc_run_folder_check(const char *dir, const char *checkpoint, uint64_t step);

/* Collective, after rank 0 has made it: refuses when a rank does not see the folder. */
tagc_status tagc_run_folder_agree(tagc_comm *comm, const char *dir);

#endif
