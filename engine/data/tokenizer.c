/* The two tokenizers behind one handle: bytes, or byte pairs when there is a table of them. */
#include "core/status.h"
#include "data/bpe.h"
#include "data/data.h"
#include "data/source.h"
#include "data/xxh64.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BYTE_END_OF_TEXT = 0 };

struct tagc_tokenizer {
    char name[TAGC_TOKENIZER_NAME_BYTES];
    tagc_bpe *bpe; /* NULL: bytes */
    char bytes[256];
};

tagc_status tagc_tokenizer_create_bytes(tagc_tokenizer **out) {
    *out = calloc(1, sizeof **out);
    if (!*out) return tagc_fail(TAGC_ERR_MEMORY, "no memory for a tokenizer");
    memcpy((*out)->name, "bytes", sizeof "bytes");
    for (int i = 0; i < 256; i++) (*out)->bytes[i] = (char)i;
    return TAGC_OK;
}

tagc_status tagc_tokenizer_create_bpe(const char *vocab_path, const char *merges_path, tagc_tokenizer **out) {
    *out = NULL;
    tagc_blob vocab = {.name = vocab_path}, merges = {.name = merges_path};
    tagc_tokenizer *made = NULL;
    char *vocab_bytes = NULL, *merges_bytes = NULL;
    tagc_status status = tagc_source_read_all(vocab_path, &vocab_bytes, &vocab.n_bytes);
    if (status == TAGC_OK) status = tagc_source_read_all(merges_path, &merges_bytes, &merges.n_bytes);
    if (status == TAGC_OK) status = tagc_tokenizer_create_bytes(&made);
    if (status == TAGC_OK) {
        vocab.bytes = vocab_bytes;
        merges.bytes = merges_bytes;
        status = tagc_bpe_create(&vocab, &merges, &made->bpe);
    }
    if (status == TAGC_OK) {
        uint64_t both = tagc_xxh64(merges.bytes, merges.n_bytes, tagc_xxh64(vocab.bytes, vocab.n_bytes, 0));
        snprintf(made->name, sizeof made->name, "bpe-%016" PRIx64, both);
        *out = made;
    } else {
        tagc_tokenizer_destroy(made);
    }
    free(vocab_bytes);
    free(merges_bytes);
    return status;
}

void tagc_tokenizer_destroy(tagc_tokenizer *tokenizer) {
    if (!tokenizer) return;
    tagc_bpe_destroy(tokenizer->bpe);
    free(tokenizer);
}

const char *tagc_tokenizer_name(const tagc_tokenizer *tokenizer) {
    return tokenizer->name;
}

int tagc_tokenizer_vocab_size(const tagc_tokenizer *tokenizer) {
    return tokenizer->bpe ? tagc_bpe_vocab_size(tokenizer->bpe) : 256;
}

int tagc_tokenizer_end_of_text(const tagc_tokenizer *tokenizer) {
    return tokenizer->bpe ? tagc_bpe_end_of_text(tokenizer->bpe) : BYTE_END_OF_TEXT;
}

tagc_status tagc_tokenizer_encode(tagc_tokenizer *tokenizer, const char *text, size_t n_bytes, int *tokens,
                                  size_t *n_tokens) {
    if (tokenizer->bpe)
        return tagc_bpe_encode(tokenizer->bpe, (const uint8_t *)text, n_bytes, tokens, n_tokens);
    for (size_t i = 0; i < n_bytes; i++) tokens[i] = (uint8_t)text[i];
    *n_tokens = n_bytes;
    return TAGC_OK;
}

const char *tagc_tokenizer_piece(const tagc_tokenizer *tokenizer, int token, size_t *n_bytes) {
    *n_bytes = 0;
    if (token < 0 || token == tagc_tokenizer_end_of_text(tokenizer)) return NULL;
    if (tokenizer->bpe) return tagc_bpe_piece(tokenizer->bpe, token, n_bytes);
    if (token >= 256) return NULL;
    *n_bytes = 1;
    return tokenizer->bytes + token;
}

tagc_status tagc_tokenizer_decode(const tagc_tokenizer *tokenizer, const int *tokens, size_t n_tokens,
                                  char **text, size_t *n_bytes) {
    size_t n_piece, n_total = 0;
    *text = NULL;
    *n_bytes = 0;
    for (size_t i = 0; i < n_tokens; i++) {
        tagc_tokenizer_piece(tokenizer, tokens[i], &n_piece);
        n_total += n_piece;
    }
    char *joined = malloc(n_total + 1);
    if (!joined) return tagc_fail(TAGC_ERR_MEMORY, "no memory for a text of %zu bytes", n_total);
    n_total = 0;
    for (size_t i = 0; i < n_tokens; i++) {
        const char *piece = tagc_tokenizer_piece(tokenizer, tokens[i], &n_piece);
        if (piece) memcpy(joined + n_total, piece, n_piece);
        n_total += n_piece;
    }
    joined[n_total] = '\0';
    *text = joined;
    *n_bytes = n_total;
    return TAGC_OK;
}
