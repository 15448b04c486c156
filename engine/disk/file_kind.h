/* What a file is by its first bytes, for messages about a file that is given in place of text, tokens or weights. */
#ifndef TAGC_DISK_FILE_KIND_H
#define TAGC_DISK_FILE_KIND_H

#include <stddef.h>
#include <stdint.h>

/* What a user can do about it. */
typedef enum tagc_file_group {
    TAGC_FILE_ENCODED,  /* text in another encoding than UTF-8: `tool` is iconv's name of it */
    TAGC_FILE_PACKED,   /* compressed, or an archive: `tool` is the command that unpacks it */
    TAGC_FILE_TABLE,    /* a table with a column of text: `tool` is the function of pandas that reads it */
    TAGC_FILE_PICKLE,   /* objects of Python, as torch.save writes them; `tool` is NULL */
    TAGC_FILE_DOCUMENT, /* not text, and nothing above; `tool` is NULL */
} tagc_file_group;

typedef struct tagc_file_kind {
    tagc_file_group group;
    const char *what; /* "UTF-16 text", "a zip archive" */
    const char *tool;
} tagc_file_kind;

enum { TAGC_FILE_KIND_BYTES = 512 };

/* Looks at the first n_bytes of a file; TAGC_FILE_KIND_BYTES suffice. NULL: UTF-8, gzip, or of no kind known here. */
const tagc_file_kind *tagc_file_kind_of(const uint8_t *bytes, size_t n_bytes);

/* The same for a file; NULL also if it cannot be read. */
const tagc_file_kind *tagc_file_kind_at(const char *path);

#endif
