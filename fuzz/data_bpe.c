/* Vocabularies, merges and texts from hostile bytes, apart by 0xfe: vocab.json, merges.txt, text. An empty
 * vocabulary stands for one of all bytes and some longer pieces, so that merges and texts are reached. A text
 * must survive encoding and decoding. */
#include "data/bpe.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static size_t make_vocab(char *json) {
    static const char *const longer[] = {"aa", "ab", "ba", "aab", "abab", "aaaa", "\\u0120a", "\\u0120ab"};
    char *p = json;
    int next = 0x100;
    *p++ = '{';
    for (int byte = 0; byte < 256; byte++) {
        int prints = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
        p += sprintf(p, "\"\\u%04x\":%d,", (unsigned)(prints ? byte : next++), byte);
    }
    for (int i = 0; i < 8; i++) p += sprintf(p, "\"%s\":%d,", longer[i], 256 + i);
    p[-1] = '}';
    return (size_t)(p - json);
}

static tagc_blob take(const char *name, const uint8_t **data, size_t *n_bytes) {
    const uint8_t *end = memchr(*data, 0xfe, *n_bytes);
    tagc_blob blob = {name, (const char *)*data, end ? (size_t)(end - *data) : *n_bytes};
    *data += blob.n_bytes + (end != NULL);
    *n_bytes -= blob.n_bytes + (end != NULL);
    return blob;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    char json[8192];
    tagc_blob vocab = take("vocab", &data, &n_bytes), merges = take("merges", &data, &n_bytes);
    if (vocab.n_bytes == 0) vocab = (tagc_blob){"vocab", json, make_vocab(json)};
    tagc_bpe *bpe;
    if (tagc_bpe_create(&vocab, &merges, &bpe) != TAGC_OK) return 0;

    int *tokens = malloc((n_bytes + 1) * sizeof *tokens);
    size_t n_tokens = 0, at = 0;
    if (tokens && tagc_bpe_encode(bpe, data, n_bytes, tokens, &n_tokens) == TAGC_OK) {
        for (size_t i = 0; i < n_tokens; i++) {
            size_t n_piece;
            const char *piece = tagc_bpe_piece(bpe, tokens[i], &n_piece);
            if (!piece || n_piece > n_bytes - at || memcmp(piece, data + at, n_piece) != 0) abort();
            at += n_piece;
        }
        if (at != n_bytes) abort();
    }
    free(tokens);
    tagc_bpe_destroy(bpe);
    return 0;
}
