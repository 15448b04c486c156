/* Lists the files in a list of files and folders, in an order that depends on names only. */
#ifndef TAGC_DATA_FILES_H
#define TAGC_DATA_FILES_H

#include "tagc/tagc.h"

typedef struct tagc_file_list {
    char **paths; /* (n) */
    size_t n, capacity;
} tagc_file_list;

/* Appends `input` if it is a file, and the files in it, recursively and in byte order of names, if it is a folder. Below a
 * folder it skips names that begin with a dot, links to folders, and what is neither file nor folder. */
tagc_status tagc_file_list_add(tagc_file_list *list, const char *input);
/* Appends this path, whatever is there. */
tagc_status tagc_file_list_append(tagc_file_list *list, const char *path);
void tagc_file_list_clear(tagc_file_list *list); /* frees; a zeroed list is empty */

#endif
