/* Paths and folders of checkpoints, shared by saving, loading and pruning. */
#ifndef TAGC_FSDP_CHECKPOINT_FILES_H
#define TAGC_FSDP_CHECKPOINT_FILES_H

#include "core/status.h"
#include "disk/paths.h"
#include "fsdp/checkpoint_format.h"

tagc_status tagc_folder_remove(const char *path); /* with the files in it; a missing one is no error */
/* Reads path/manifest.json. Error texts name it. */
tagc_status tagc_manifest_read(const char *path, tagc_manifest **out);

#endif
