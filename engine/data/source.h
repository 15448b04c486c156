/* A text file as a stream of bytes, decompressed if it starts like gzip. */
#ifndef TAGC_DATA_SOURCE_H
#define TAGC_DATA_SOURCE_H

#include "tagc/tagc.h"

typedef struct tagc_source tagc_source;

tagc_status tagc_source_open(const char *path, tagc_source **out);

/* Sets *n_read to `capacity`, or to what is left at the end of the text. Failures name the file, and for damaged or truncated
 * gzip data the byte of the compressed file. */
tagc_status tagc_source_read(tagc_source *source, uint8_t *bytes, size_t capacity, size_t *n_read);

int tagc_source_compressed(const tagc_source *source);
void tagc_source_close(tagc_source *source); /* accepts NULL */

/* The whole text of a file, at most 1 GiB, malloc'ed. */
tagc_status tagc_source_read_all(const char *path, char **bytes, size_t *n_bytes);

#endif
