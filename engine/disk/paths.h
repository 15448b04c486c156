/* Paths and folders. Errors name them. */
#ifndef TAGC_DISK_PATHS_H
#define TAGC_DISK_PATHS_H

#include "tagc/tagc.h"

enum { TAGC_PATH_BYTES = 4096 };

int tagc_path_is_dir(const char *path);
int tagc_path_exists(const char *path);

/* printf into a path; TAGC_ERR_ARGUMENT if it is too long. */
tagc_status tagc_path_print(char path[TAGC_PATH_BYTES], const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Writes "<dir>/<name>" to out (TAGC_PATH_BYTES). */
tagc_status tagc_path_join(const char *dir, const char *name, char *out);

/* The file `name` in the folder that holds `path`. */
tagc_status tagc_path_beside(const char *path, const char *name, char *out);

/* Makes a folder and its parents; an existing one is no error. */
tagc_status tagc_path_make_dirs(const char *dir);

/* A rename in the folder is durable only after this. Does nothing if the folder cannot be read. */
tagc_status tagc_path_sync_dir(const char *dir);

#endif
