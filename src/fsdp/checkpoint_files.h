/* Paths and folders of checkpoints, shared by saving, loading and pruning. */
#ifndef TAGC_FSDP_CHECKPOINT_FILES_H
#define TAGC_FSDP_CHECKPOINT_FILES_H

#include "core/status.h"
#include "fsdp/checkpoint_format.h"

#define TAGC_PATH_BYTES 4096

/* printf into a path; TAGC_ERR_ARGUMENT if it is too long. */
tagc_status tagc_path_print(char path[TAGC_PATH_BYTES], const char *format, ...)
    __attribute__((format(printf, 2, 3)));
tagc_status tagc_folder_make(const char *path);   /* with its parents; an existing one is no error */
tagc_status tagc_folder_remove(const char *path); /* with the files in it; a missing one is no error */
tagc_status tagc_folder_sync(const char *path);
/* Reads path/manifest.json. Error texts name it. */
tagc_status tagc_manifest_read(const char *path, tagc_manifest **out);

#endif
