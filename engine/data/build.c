/* The corpus builder reads a stream of text and writes two token files, in memory that does not grow with the corpus. */
#include "core/status.h"
#include "data/data.h"
#include "data/files.h"
#include "data/jsonl.h"
#include "data/source.h"
#include "data/split.h"
#include "data/token_writer.h"
#include "data/utf8.h"
#include "disk/file_kind.h"
#include "disk/paths.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { CHUNK_BYTES = 1 << 20 };

typedef struct builder {
    const tagc_data_options *options;
    tagc_tokenizer *tokenizer, *own_tokenizer;
    int zero_ends_text; /* this tokenizer does not accept the byte 0 */
    int by_document;    /* whole documents for validation, or the tail of each */
    tagc_file_list files;
    tagc_token_writer *train, *val; /* val NULL when there is none */
    tagc_data_report report;
    uint8_t *text; /* (CHUNK_BYTES) */
    int *tokens;   /* (CHUNK_BYTES) */
} builder;

/* What a document is read from: a file, or a field of a line that is in memory. */
typedef struct text_from {
    tagc_source *source;
    const char *text; /* n_left bytes of it, if source is NULL */
    size_t n_left;
    unsigned long line;
} text_from;

void tagc_data_options_init(tagc_data_options *options) {
    *options = (tagc_data_options){.val_share = 0.1, .text_field = "text"};
}

static tagc_status check_options(const tagc_data_options *options) {
    if (options->n_inputs == 0 || !options->inputs)
        return tagc_fail(TAGC_ERR_ARGUMENT, "n_inputs is 0, at least one file or folder is needed");
    if (!options->out_dir || !*options->out_dir)
        return tagc_fail(TAGC_ERR_ARGUMENT, "out_dir is missing: the folder for train.bin and val.bin");
    if (!(options->val_share >= 0 && options->val_share <= 0.5))
        return tagc_fail(TAGC_ERR_ARGUMENT, "val_share is %g, must be in [0, 0.5]", options->val_share);
    return TAGC_OK;
}

/* A val.bin of other text or another tokenizer would look like that of the new train.bin. */
static tagc_status check_no_val(const char *out_dir) {
    struct stat info;
    char path[TAGC_PATH_BYTES];
    TAGC_TRY(tagc_path_join(out_dir, "val.bin", path));
    if (lstat(path, &info) != 0) return TAGC_OK;
    return tagc_fail(
        TAGC_ERR_ARGUMENT,
        "--val-share is 0, but %s is there already, of other text: remove it, or choose another folder",
        path);
}

static tagc_status tell_progress(builder *b) {
    b->report.n_train_tokens = tagc_token_writer_n(b->train);
    b->report.n_val_tokens = b->val ? tagc_token_writer_n(b->val) : 0;
    if (b->options->progress && b->options->progress(b->options->progress_context, &b->report))
        return tagc_fail(TAGC_ERR_INTERRUPTED, "stopped while reading %s; no token file was written",
                         b->report.file ? b->report.file : "nothing");
    return TAGC_OK;
}

/* The first byte in text (n_bytes) that is not text, or n_bytes. Without at_end the last character may be incomplete. */
static size_t find_invalid(const builder *b, const uint8_t *text, size_t n_bytes, int at_end) {
    size_t n_valid = tagc_utf8_valid_prefix(text, n_bytes);
    const uint8_t *zero = b->zero_ends_text ? memchr(text, 0, n_valid) : NULL;
    if (zero) return (size_t)(zero - text);
    uint32_t code;
    if (n_valid < n_bytes && !at_end && tagc_utf8_decode(text + n_valid, n_bytes - n_valid, &code) == 0)
        return n_bytes;
    return n_valid;
}

static uint64_t count_invalid(const builder *b, const uint8_t *text, size_t n_bytes) {
    uint64_t n = 0;
    for (size_t at; (at = find_invalid(b, text, n_bytes, 1)) < n_bytes; n++) {
        text += at + 1;
        n_bytes -= at + 1;
    }
    return n;
}

/* `offset` is that of b->text[0] in its document. */
static tagc_status check_text(const builder *b, const text_from *from, uint64_t offset, size_t n_bytes,
                              int at_end) {
    size_t at = find_invalid(b, b->text, n_bytes, at_end);
    char where[64] = "";
    if (at == n_bytes) return TAGC_OK;
    if (!from->source) snprintf(where, sizeof where, " line %lu: the text's", from->line);
    if (b->text[at] == 0)
        return tagc_fail(
            TAGC_ERR_CORRUPT,
            "%s%s byte %" PRIu64
            "%s is 0x00, which is no text: it ends a text of byte tokens (--lossy keeps such bytes as "
            "they are)",
            b->report.file, from->source ? ":" : where, offset + at,
            from->source && tagc_source_compressed(from->source) ? " of the decompressed text" : "");
    return tagc_fail(
        TAGC_ERR_CORRUPT,
        "%s: byte %" PRIu64
        "%s is 0x%02x, which is not UTF-8 there (iconv converts other encodings; --lossy keeps such "
        "bytes as they are)",
        b->report.file, offset + at,
        from->source && tagc_source_compressed(from->source) ? " of the decompressed text" : "", b->text[at]);
}

/* Refuses what is no text, by the first n_bytes in b->text. A text may begin with the letters by which a file of another kind
 * is known, so there must be bytes that a text has not. */
static tagc_status check_kind(const builder *b, size_t n_bytes) {
    const char *file = b->report.file;
    if (tagc_utf8_valid_prefix(b->text, n_bytes) + 4 > n_bytes && !memchr(b->text, 0, n_bytes))
        return TAGC_OK;
    const tagc_file_kind *kind = tagc_file_kind_of(b->text, n_bytes);
    if (!kind) return TAGC_OK;
    switch (kind->group) {
    case TAGC_FILE_ENCODED:
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "%s is %s, and tagc data reads UTF-8: iconv -f %s -t UTF-8 %s > NEW.txt converts it",
                         file, kind->what, kind->tool, file);
    case TAGC_FILE_PACKED:
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "%s is %s, and tagc data reads plain text and gzip: %s %s unpacks it", file,
                         kind->what, kind->tool, file);
    case TAGC_FILE_TABLE:
        return tagc_fail(TAGC_ERR_UNSUPPORTED,
                         "%s is %s, and tagc data reads plain text and JSON lines: in Python, "
                         "pandas.%s(...).to_json(\"NEW.jsonl\", orient=\"records\", lines=True) converts it",
                         file, kind->what, kind->tool);
    case TAGC_FILE_PICKLE:
    case TAGC_FILE_DOCUMENT:
        break;
    }
    return tagc_fail(TAGC_ERR_UNSUPPORTED, "%s is %s, and tagc data reads plain text and JSON lines", file,
                     kind->what);
}

static tagc_status append_text(builder *b, tagc_token_writer *writer, size_t n_bytes) {
    size_t n_tokens;
    if (b->options->lossy) b->report.n_invalid_bytes += count_invalid(b, b->text, n_bytes);
    TAGC_TRY(tagc_tokenizer_encode(b->tokenizer, (const char *)b->text, n_bytes, b->tokens, &n_tokens));
    b->report.n_text_bytes += n_bytes;
    return tagc_token_writer_append(writer, b->tokens, n_tokens);
}

static tagc_status read_some(text_from *from, uint8_t *bytes, size_t capacity, size_t *n_read) {
    if (from->source) return tagc_source_read(from->source, bytes, capacity, n_read);
    *n_read = from->n_left < capacity ? from->n_left : capacity;
    memcpy(bytes, from->text, *n_read);
    from->text += *n_read;
    from->n_left -= *n_read;
    return TAGC_OK;
}

/* A byte order mark is of the file and not of its text. */
static size_t drop_mark(uint8_t *text, size_t n_bytes) {
    if (n_bytes < 3 || memcmp(text, "\xef\xbb\xbf", 3) != 0) return n_bytes;
    memmove(text, text + 3, n_bytes - 3);
    return n_bytes - 3;
}

static tagc_status read_document(builder *b, text_from *from, tagc_token_writer *writer,
                                 uint64_t *n_text_bytes) {
    size_t n_held = 0; /* bytes in b->text that are not encoded yet */
    *n_text_bytes = 0;
    for (int at_end = 0, is_first = from->source != NULL; !at_end; is_first = 0) {
        size_t n_read;
        TAGC_TRY(read_some(from, b->text + n_held, CHUNK_BYTES - n_held, &n_read));
        at_end = n_read < CHUNK_BYTES - n_held;
        n_held += n_read;
        if (is_first) {
            if (!b->options->lossy) TAGC_TRY(check_kind(b, n_held));
            const char *field = b->options->text_field;
            if (field && !*b->report.json_like && tagc_jsonl_looks_like(b->text, n_held, field))
                snprintf(b->report.json_like, sizeof b->report.json_like, "%.255s", b->report.file);
            n_held = drop_mark(b->text, n_held);
        }
        if (n_held == 0) break;
        if (!b->options->lossy) TAGC_TRY(check_text(b, from, *n_text_bytes, n_held, at_end));
        size_t n_whole = at_end ? n_held : tagc_split_safe(b->text, n_held);
        TAGC_TRY(append_text(b, writer, n_whole));
        *n_text_bytes += n_whole;
        n_held -= n_whole;
        memmove(b->text, b->text + n_whole, n_held);
        TAGC_TRY(tell_progress(b));
    }
    return TAGC_OK;
}

static tagc_status end_text(const builder *b, tagc_token_writer *writer) {
    int end = tagc_tokenizer_end_of_text(b->tokenizer);
    return end < 0 ? TAGC_OK : tagc_token_writer_append(writer, &end, 1);
}

/* by_document: whole documents go to validation, else the tail of each. */
static tagc_status add_document(builder *b, text_from *from, int by_document) {
    uint64_t n_train = tagc_token_writer_n(b->train), n_val = b->val ? tagc_token_writer_n(b->val) : 0;
    /* Decided before the document is read, so that its size does not bias the choice. */
    int to_val = b->val && by_document && (double)n_val < b->options->val_share * (double)(n_train + n_val);
    tagc_token_writer *writer = to_val ? b->val : b->train;
    uint64_t n_text_bytes;
    TAGC_TRY(read_document(b, from, writer, &n_text_bytes));
    if (n_text_bytes == 0) {
        b->report.n_empty++;
        return TAGC_OK;
    }
    b->report.n_documents++;
    if (b->val && !by_document) {
        uint64_t n_tokens = tagc_token_writer_n(b->train) - n_train;
        uint64_t n_tail = (uint64_t)(b->options->val_share * (double)n_tokens);
        TAGC_TRY(tagc_token_writer_move_tail(b->train, b->val, n_tail));
        if (n_tail > 0) TAGC_TRY(end_text(b, b->val));
    }
    return end_text(b, writer);
}

static tagc_status add_lines(builder *b, tagc_source *source) {
    tagc_jsonl *lines;
    text_from from = {0};
    TAGC_TRY(tagc_jsonl_open(source, b->report.file, b->options->text_field, &lines));
    tagc_status status;
    while ((status = tagc_jsonl_next(lines, &from.text, &from.n_left)) == TAGC_OK && from.text) {
        from.line = tagc_jsonl_line(lines);
        status = add_document(b, &from, 1);
        if (status != TAGC_OK) break;
    }
    tagc_jsonl_close(lines);
    return status;
}

static int has_ending(const char *path, const char *ending) {
    size_t n = strlen(path), n_ending = strlen(ending);
    if (n > 3 && strcmp(path + n - 3, ".gz") == 0) n -= 3;
    return n > n_ending && memcmp(path + n - n_ending, ending, n_ending) == 0;
}

/* *is_lines: whether the file is JSON lines. A file named so may be something else, which reading it as text will say. */
static tagc_status find_lines(builder *b, const char *path, int *is_lines) {
    const char *field = b->options->text_field;
    int is_json = field && has_ending(path, ".json");
    *is_lines = field && (has_ending(path, ".jsonl") || has_ending(path, ".ndjson"));
    if (!is_json && !*is_lines) return TAGC_OK;
    tagc_source *source;
    size_t n_read;
    TAGC_TRY(tagc_source_open(path, &source));
    tagc_status status = tagc_source_read(source, b->text, CHUNK_BYTES, &n_read);
    tagc_source_close(source);
    TAGC_TRY(status);
    if (is_json) *is_lines = tagc_jsonl_looks_like(b->text, n_read, field);
    if (tagc_file_kind_of(b->text, n_read)) *is_lines = 0;
    return TAGC_OK;
}

static tagc_status add_file(builder *b, const char *path) {
    tagc_source *source;
    int is_lines;
    b->report.file = path;
    TAGC_TRY(tell_progress(b));
    TAGC_TRY(find_lines(b, path, &is_lines));
    TAGC_TRY(tagc_source_open(path, &source));
    text_from from = {.source = source};
    tagc_status status = is_lines ? add_lines(b, source) : add_document(b, &from, b->by_document);
    tagc_source_close(source);
    b->report.n_files += status == TAGC_OK;
    return status;
}

static tagc_status prepare(builder *b) {
    const tagc_data_options *o = b->options;
    for (size_t i = 0; i < o->n_inputs; i++) TAGC_TRY(tagc_file_list_add(&b->files, o->inputs[i]));
    if (b->files.n == 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s%s: no file in it", o->inputs[0],
                         o->n_inputs > 1 ? " and the other inputs" : "");
    b->report.n_total_files = b->files.n;
    b->by_document = o->val_share > 0 && (double)b->files.n >= 2 / o->val_share;

    b->tokenizer = o->tokenizer;
    if (!b->tokenizer) {
        TAGC_TRY(tagc_tokenizer_create_bytes(&b->own_tokenizer));
        b->tokenizer = b->own_tokenizer;
    }
    b->zero_ends_text = strcmp(tagc_tokenizer_name(b->tokenizer), "bytes") == 0;
    b->text = malloc(CHUNK_BYTES);
    b->tokens = malloc(CHUNK_BYTES * sizeof *b->tokens);
    if (!b->text || !b->tokens)
        return tagc_fail(TAGC_ERR_MEMORY, "no memory for %d bytes of text", CHUNK_BYTES);

    TAGC_TRY(tagc_path_make_dirs(o->out_dir));
    if (o->val_share == 0) TAGC_TRY(check_no_val(o->out_dir));
    TAGC_TRY(tagc_token_writer_create(o->out_dir, "train.bin", b->tokenizer, &b->train));
    if (o->val_share > 0) TAGC_TRY(tagc_token_writer_create(o->out_dir, "val.bin", b->tokenizer, &b->val));
    return TAGC_OK;
}

static tagc_status build(builder *b) {
    TAGC_TRY(prepare(b));
    for (size_t i = 0; i < b->files.n; i++) TAGC_TRY(add_file(b, b->files.paths[i]));
    b->report.file = NULL;
    TAGC_TRY(tell_progress(b));
    if (b->report.n_text_bytes == 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s: %zu file%s and no text in %s", b->options->inputs[0],
                         b->files.n, b->files.n == 1 ? "" : "s", b->files.n == 1 ? "it" : "them");
    if (b->val && b->report.n_val_tokens == 0)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "--val-share is %g: of %" PRIu64
                         " tokens nothing is left for val.bin; give more text",
                         b->options->val_share, b->report.n_train_tokens);
    TAGC_TRY(tagc_token_writer_finish(b->train));
    if (b->val) {
        TAGC_TRY(tagc_token_writer_finish(b->val));
        TAGC_TRY(tagc_token_writer_commit(b->val));
    }
    return tagc_token_writer_commit(b->train);
}

tagc_status tagc_data_build(const tagc_data_options *options, tagc_data_report *report) {
    builder b = {.options = options};
    tagc_status status = check_options(options);
    if (status == TAGC_OK) status = build(&b);
    tagc_token_writer_destroy(b.train);
    tagc_token_writer_destroy(b.val);
    tagc_tokenizer_destroy(b.own_tokenizer);
    tagc_file_list_clear(&b.files);
    free(b.text);
    free(b.tokens);
    b.report.file = NULL;
    if (report) *report = b.report;
    return status;
}
