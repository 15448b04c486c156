/* Small questions about paths. */
#ifndef TAGC_FILES_PATHS_H
#define TAGC_FILES_PATHS_H

#include "tagc/tagc.h"

enum { TAGC_PATH_BYTES = 4096 };

int tagc_path_is_dir(const char *path);
int tagc_path_exists(const char *path);

/* Writes "<dir>/<name>" to out (TAGC_PATH_BYTES); TAGC_ERR_IO if it is too long. */
tagc_status tagc_path_join(const char *dir, const char *name, char *out);

/* The file `name` in the folder that holds `path`. */
tagc_status tagc_path_beside(const char *path, const char *name, char *out);

/* Makes a folder and its parents. */
tagc_status tagc_path_make_dirs(const char *dir);

#endif
