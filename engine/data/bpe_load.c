/* Reads GPT-2's vocab.json and merges.txt. Both write bytes as characters: a printable byte is itself, and the others, in
 * order, are U+0100 and up (so the blank is U+0120). */
#include "data/bpe_table.h"

#include "core/status.h"
#include "data/utf8.h"
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

enum { N_SPELLINGS = 0x144, MAX_TOKEN = (1 << 20) - 1 };

typedef struct loader {
    const tagc_blob *vocab, *merges;
    json_t *tokens;               /* spelled piece -> token */
    int16_t byte_of[N_SPELLINGS]; /* character -> byte, -1: none */
    tagc_bpe *bpe;
} loader;

static void set_spellings(loader *l) {
    int next = 0x100;
    memset(l->byte_of, -1, sizeof l->byte_of);
    for (int byte = 0; byte < 256; byte++) {
        int prints = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
        l->byte_of[prints ? byte : next++] = (int16_t)byte;
    }
}

/* bytes may be NULL, to count. -1 if a character encodes no byte. */
static long read_spelling(const loader *l, const char *spelling, size_t n_bytes, char *bytes) {
    long n = 0;
    for (size_t i = 0; i < n_bytes; n++) {
        uint32_t code;
        i += tagc_utf8_decode_any((const uint8_t *)spelling + i, n_bytes - i, &code);
        if (code >= N_SPELLINGS || l->byte_of[code] < 0) return -1;
        if (bytes) bytes[n] = (char)l->byte_of[code];
    }
    return n;
}

static tagc_status no_memory(const loader *l) {
    return tagc_fail(TAGC_ERR_MEMORY, "%s: no memory for its tables", l->vocab->name);
}

/* Largest token and the bytes of all pieces. */
static tagc_status measure_vocab(const loader *l, int *max_token, size_t *n_piece_bytes) {
    const char *key;
    json_t *value;
    *max_token = -1;
    *n_piece_bytes = 0;
    json_object_foreach(l->tokens, key, value) {
        long n = read_spelling(l, key, strlen(key), NULL);
        if (n <= 0)
            return tagc_fail(TAGC_ERR_CORRUPT,
                             "%s: \"%.64s\" is not spelled with GPT-2's characters for bytes", l->vocab->name,
                             key);
        json_int_t token = json_integer_value(value);
        if (!json_is_integer(value) || token < 0 || token > MAX_TOKEN)
            return tagc_fail(TAGC_ERR_CORRUPT, "%s: the token of \"%.64s\" must be a whole number in [0, %d]",
                             l->vocab->name, key, MAX_TOKEN);
        if (token > *max_token) *max_token = (int)token;
        *n_piece_bytes += (size_t)n;
    }
    return TAGC_OK;
}

static tagc_status fill_pieces(loader *l) {
    tagc_bpe *bpe = l->bpe;
    const char *key;
    json_t *value;
    uint32_t start = 0;
    memset(bpe->byte_token, 0xff, sizeof bpe->byte_token);
    json_object_foreach(l->tokens, key, value) {
        size_t token = (size_t)json_integer_value(value);
        if (bpe->piece_bytes[token] > 0)
            return tagc_fail(TAGC_ERR_CORRUPT, "%s: token %zu has two pieces, \"%.64s\" is one",
                             l->vocab->name, token, key);
        bpe->piece_start[token] = start;
        bpe->piece_bytes[token] = (uint32_t)read_spelling(l, key, strlen(key), bpe->pieces + start);
        if (bpe->piece_bytes[token] == 1) bpe->byte_token[(uint8_t)bpe->pieces[start]] = (uint32_t)token;
        start += bpe->piece_bytes[token];
    }
    for (int byte = 0; byte < 256; byte++)
        if (bpe->byte_token[byte] == UINT32_MAX)
            return tagc_fail(TAGC_ERR_CORRUPT, "%s: no token for byte 0x%02x, all 256 are needed",
                             l->vocab->name, (unsigned)byte);
    return TAGC_OK;
}

/* Other files of a tokenizer's folder, which are given in place of vocab.json or merges.txt. */
static tagc_status refuse_other_vocab(const loader *l) {
    const char *name = l->vocab->name;
    if (json_is_object(json_object_get(l->tokens, "model")))
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "%s: this is a tokenizer of Hugging Face in one file. --vocab and --merges take "
                         "GPT-2's vocab.json and "
                         "merges.txt; in Python, "
                         "GPT2TokenizerFast.from_pretrained(FOLDER).save_vocabulary(FOLDER) writes both",
                         name);
    if (json_is_string(json_object_get(l->tokens, "tokenizer_class")) ||
        json_is_string(json_object_get(l->tokens, "model_type")))
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "%s: this is a configuration and no vocabulary: --vocab takes vocab.json", name);
    return TAGC_OK;
}

static int starts_with(const tagc_blob *blob, const char *start) {
    return blob->n_bytes >= strlen(start) && memcmp(blob->bytes, start, strlen(start)) == 0;
}

static tagc_status load_vocab(loader *l) {
    json_error_t error;
    l->tokens = json_loadb(l->vocab->bytes, l->vocab->n_bytes, JSON_REJECT_DUPLICATES, &error);
    if (!l->tokens && starts_with(l->vocab, "#version"))
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "%s: this is a list of merges: give it to --merges, and vocab.json to --vocab",
                         l->vocab->name);
    if (!l->tokens)
        return tagc_fail(TAGC_ERR_CORRUPT, "%s: not JSON, byte %d: %s", l->vocab->name, error.position,
                         error.text);
    if (!json_is_object(l->tokens))
        return tagc_fail(TAGC_ERR_CORRUPT, "%s: must be one JSON object, piece to token", l->vocab->name);

    TAGC_TRY(refuse_other_vocab(l));
    tagc_bpe *bpe = l->bpe;
    int max_token;
    size_t n_piece_bytes;
    TAGC_TRY(measure_vocab(l, &max_token, &n_piece_bytes));
    if (n_piece_bytes > UINT32_MAX)
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "%s: more than 4 GiB of pieces", l->vocab->name);
    bpe->vocab_size = max_token + 1;
    bpe->pieces = malloc(n_piece_bytes + 1);
    bpe->piece_start = calloc((size_t)bpe->vocab_size + 1, sizeof *bpe->piece_start);
    bpe->piece_bytes = calloc((size_t)bpe->vocab_size + 1, sizeof *bpe->piece_bytes);
    if (!bpe->pieces || !bpe->piece_start || !bpe->piece_bytes) return no_memory(l);
    TAGC_TRY(fill_pieces(l));

    const json_t *end = json_object_get(l->tokens, "<|endoftext|>");
    bpe->end_of_text = end ? (int)json_integer_value(end) : -1;
    return TAGC_OK;
}

static tagc_status token_of(const loader *l, const char *spelling, unsigned long line, uint32_t *token) {
    const json_t *value = json_object_get(l->tokens, spelling);
    if (!value)
        return tagc_fail(TAGC_ERR_CORRUPT, "%s line %lu: \"%.64s\" is not in %s", l->merges->name, line,
                         spelling, l->vocab->name);
    *token = (uint32_t)json_integer_value(value);
    return TAGC_OK;
}

/* "left right": one merge. `spelling` has room for the line and '\0'. */
static tagc_status add_merge(loader *l, const char *text, size_t n_bytes, unsigned long line, uint32_t rank,
                             char *spelling) {
    memcpy(spelling, text, n_bytes);
    spelling[n_bytes] = '\0';
    char *right = strchr(spelling, ' ');
    if (!right || right == spelling || !right[1] || strchr(right + 1, ' ') || strlen(spelling) != n_bytes)
        return tagc_fail(TAGC_ERR_CORRUPT, "%s line %lu: must be two pieces with one blank between",
                         l->merges->name, line);
    *right++ = '\0';
    tagc_bpe_merge merge = {.rank = rank};
    TAGC_TRY(token_of(l, spelling, line, &merge.left));
    TAGC_TRY(token_of(l, right, line, &merge.right));
    memmove(right - 1, right, strlen(right) + 1);
    TAGC_TRY(token_of(l, spelling, line, &merge.joined));
    tagc_bpe_merge *cell = &l->bpe->merges[tagc_bpe_cell(l->bpe, merge.left, merge.right)];
    if (cell->rank != UINT32_MAX)
        return tagc_fail(TAGC_ERR_CORRUPT, "%s line %lu: the pair was listed before", l->merges->name, line);
    *cell = merge;
    return TAGC_OK;
}

static tagc_status load_merges(loader *l) {
    const char *text = l->merges->bytes, *end = text + l->merges->n_bytes;
    size_t n_lines = 1, n_longest = 0, n_run = 0;
    if (starts_with(l->merges, "{\"") || starts_with(l->merges, "{\n"))
        return tagc_fail(TAGC_ERR_UNSUPPORTED, "%s: this is JSON: --merges takes GPT-2's merges.txt",
                         l->merges->name);
    for (const char *p = text; p < end; p++) {
        n_run = *p == '\n' ? 0 : n_run + 1;
        n_lines += *p == '\n';
        if (n_run > n_longest) n_longest = n_run;
    }
    uint64_t n_cells = 2;
    while (n_cells < 2 * (uint64_t)n_lines) n_cells *= 2;
    if (n_cells > UINT32_MAX) return tagc_fail(TAGC_ERR_UNSUPPORTED, "%s: over 2^30 lines", l->merges->name);
    l->bpe->n_cells = (uint32_t)n_cells;
    l->bpe->merges = malloc((size_t)n_cells * sizeof *l->bpe->merges);
    char *spelling = malloc(n_longest + 1);
    if (!l->bpe->merges || !spelling) {
        free(spelling);
        return no_memory(l);
    }
    memset(l->bpe->merges, 0xff, (size_t)n_cells * sizeof *l->bpe->merges);

    tagc_status status = TAGC_OK;
    uint32_t rank = 0;
    for (unsigned long line = 1; text < end && status == TAGC_OK; line++) {
        const char *stop = memchr(text, '\n', (size_t)(end - text));
        size_t n_bytes = (size_t)((stop ? stop : end) - text), n_line = n_bytes;
        if (n_line > 0 && text[n_line - 1] == '\r') n_line--;
        int is_version = line == 1 && n_line >= 8 && memcmp(text, "#version", 8) == 0;
        if (n_line > 0 && !is_version) status = add_merge(l, text, n_line, line, rank++, spelling);
        text += n_bytes + (stop != NULL);
    }
    free(spelling);
    return status;
}

tagc_status tagc_bpe_create(const tagc_blob *vocab, const tagc_blob *merges, tagc_bpe **out) {
    *out = NULL;
    loader l = {.vocab = vocab, .merges = merges};
    set_spellings(&l);
    l.bpe = calloc(1, sizeof *l.bpe);
    if (!l.bpe) return no_memory(&l);
    tagc_status status = load_vocab(&l);
    if (status == TAGC_OK) status = load_merges(&l);
    json_decref(l.tokens);
    if (status != TAGC_OK) {
        tagc_bpe_destroy(l.bpe);
        return status;
    }
    *out = l.bpe;
    return TAGC_OK;
}
