/* Files of text: which of them a list of files and folders names, in an order that depends on names only, and each as a stream of
 * bytes, decompressed if it starts like gzip. */
#ifndef TAGC_DATA_TEXT_FILES_H
#define TAGC_DATA_TEXT_FILES_H

#include "data/data.h"

typedef struct tagc_file_list {
    char **paths; /* (n) */
    size_t n, capacity;
    void *seen; /* the files added so far, a tree of tsearch() */
    tagc_data_skipped skipped[TAGC_N_SKIPS];
} tagc_file_list;

/* Appends `input` if it is a file, and the files in it, recursively and in byte order of names, if it is a folder. A file that was
 * added before is not added again. What a folder has beside files, and what cannot be read there, is counted in `skipped`. */
tagc_status tagc_file_list_add(tagc_file_list *list, const char *input);
/* Appends this path, whatever is there. */
tagc_status tagc_file_list_append(tagc_file_list *list, const char *path);
void tagc_file_list_clear(tagc_file_list *list); /* frees; a zeroed list is empty */

typedef struct tagc_source tagc_source;

tagc_status tagc_source_open(const char *path, tagc_source **out);

/* Sets *n_read to `capacity`, or to what is left at the end of the text. Failures name the file, and for damaged or truncated
 * gzip data the byte of the compressed file. */
tagc_status tagc_source_read(tagc_source *source, uint8_t *bytes, size_t capacity, size_t *n_read);

int tagc_source_compressed(const tagc_source *source);
void tagc_source_close(tagc_source *source); /* accepts NULL */

#endif
