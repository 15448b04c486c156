/* JSON lines: a file with a JSON object on each line, of which one field is a text. */
#ifndef TAGC_DATA_JSONL_H
#define TAGC_DATA_JSONL_H

#include "data/source.h"

/* Longer lines are refused. */
#define TAGC_JSONL_MOST_BYTES ((size_t)1 << 28)

typedef struct tagc_jsonl tagc_jsonl;

/* Reads the lines of `source`, which stays the caller's. path: for messages. */
tagc_status tagc_jsonl_open(tagc_source *source, const char *path, const char *field, tagc_jsonl **out);
void tagc_jsonl_close(tagc_jsonl *lines); /* accepts NULL */

/* The field of the next line that is not blank: *text (n_bytes) is valid until the next call, and NULL at the end of the
 * file. A field that is null is an empty text. TAGC_ERR_CORRUPT names the line: it is no JSON object, or the field is
 * missing or no string. */
tagc_status tagc_jsonl_next(tagc_jsonl *lines, const char **text, size_t *n_bytes);

unsigned long tagc_jsonl_line(const tagc_jsonl *lines); /* of the last text, from 1 */

/* 1 if text (n_bytes), the beginning of a file, starts with a whole line that is an object with a string of that name. */
int tagc_jsonl_looks_like(const uint8_t *text, size_t n_bytes, const char *field);

#endif
