/* A file that appears completely or not at all. Bytes go to "<path>.partial", which replaces <path> when all of it is on the
 * disk. A pipe, a device or a link is written directly, because a rename would replace it by a file. "-" is standard output. */
#ifndef TAGC_DISK_NEW_FILE_H
#define TAGC_DISK_NEW_FILE_H

#include "disk/paths.h"
#include <stdio.h>

typedef struct tagc_new_file {
    FILE *stream; /* to write to; NULL if there is nothing to close */
    /* private */
    int is_plain, is_stdout;
    char path[TAGC_PATH_BYTES], partial[TAGC_PATH_BYTES];
} tagc_new_file;

/* Whether it means standard output, which then gets nothing else. path may be NULL. */
int tagc_new_file_is_stdout(const char *path);

/* TAGC_ERR_IO if `path` cannot be written. Call it before the work whose result it will hold. */
tagc_status tagc_new_file_check(const char *path);

/* TAGC_ERR_IO names the path. _close after success and failure alike. */
tagc_status tagc_new_file_open(const char *path, tagc_new_file *out);
/* Fails also if a write to the stream failed. */
tagc_status tagc_new_file_commit(tagc_new_file *file);
/* Removes what was not committed. */
void tagc_new_file_close(tagc_new_file *file);

#endif
