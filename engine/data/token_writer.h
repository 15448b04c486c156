/* Writes a token file under a temporary name until it is complete, so that it appears as a whole or not at all. */
#ifndef TAGC_DATA_TOKEN_WRITER_H
#define TAGC_DATA_TOKEN_WRITER_H

#include "data/data.h"

typedef struct tagc_token_writer tagc_token_writer;

/* For folder/name; `tokenizer` describes the tokens. */
tagc_status tagc_token_writer_create(const char *folder, const char *name, const tagc_tokenizer *tokenizer,
                                     tagc_token_writer **out);
tagc_status tagc_token_writer_append(tagc_token_writer *writer, const int *tokens, size_t n_tokens);
uint64_t tagc_token_writer_n(const tagc_token_writer *writer);

/* Takes the last n_tokens from `from` and appends them to `to`, of the same tokenizer. */
tagc_status tagc_token_writer_move_tail(tagc_token_writer *from, tagc_token_writer *to, uint64_t n_tokens);

/* Writes header and checksum and flushes everything to disk, still under the temporary name. */
tagc_status tagc_token_writer_finish(tagc_token_writer *writer);

/* After _finish: renames the file to its final name and replaces an older one. */
tagc_status tagc_token_writer_commit(tagc_token_writer *writer);

/* Accepts NULL. Without _commit nothing stays behind. */
void tagc_token_writer_destroy(tagc_token_writer *writer);

#endif
