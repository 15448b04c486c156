/* GPT-2's byte pair encoding: the tables from vocab.json and merges.txt, and the encoder.
 *
 * A word starts as its bytes, each a token. Of all adjacent pairs in merges.txt, the one listed first (the leftmost of
 * equals) becomes one token, until no listed pair is left. A heap of pairs makes this n log n, so that a megabyte without a
 * blank is not a problem. */
#ifndef TAGC_DATA_BPE_H
#define TAGC_DATA_BPE_H

#include "tagc/tagc.h"

typedef struct tagc_bpe tagc_bpe;

/* A file in memory, and its name for messages. */
typedef struct tagc_blob {
    const char *name;
    const char *bytes;
    size_t n_bytes;
} tagc_blob;

tagc_status tagc_bpe_create(const tagc_blob *vocab, const tagc_blob *merges, tagc_bpe **out);
void tagc_bpe_destroy(tagc_bpe *bpe); /* accepts NULL */

int tagc_bpe_vocab_size(const tagc_bpe *bpe);  /* the largest token + 1 */
int tagc_bpe_end_of_text(const tagc_bpe *bpe); /* -1 when there is none */
/* NULL for a number without a piece. */
const char *tagc_bpe_piece(const tagc_bpe *bpe, int token, size_t *n_bytes);

/* tokens (n_bytes); n_bytes at most 2^30. */
tagc_status tagc_bpe_encode(tagc_bpe *bpe, const uint8_t *text, size_t n_bytes, int *tokens,
                            size_t *n_tokens);

#endif
