/* The corpus builder reads a stream of text and writes two token files, in memory that does not grow with the corpus. They have
 * temporary names until both are complete, so that they appear as a whole or not at all. */
#include "core/status.h"
#include "data/data.h"
#include "data/text_files.h"
#include "data/token_file.h"
#include "disk/file_kind.h"
#include "disk/paths.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CHUNK_BYTES = 1 << 20 };

/* ---- a token file that is being written ---- */

typedef struct output {
    const char *folder;
    char path[TAGC_PATH_BYTES], temporary[TAGC_PATH_BYTES]; /* temporary is "" once the file has its name */
    int fd;                                                 /* -1: there is none */
    uint64_t n_tokens;
} output;

static tagc_status write_failed(const output *out) {
    return tagc_fail(TAGC_ERR_IO, "%s: cannot write: %s", out->temporary, strerror(errno));
}

static tagc_status write_all(const output *out, const uint8_t *bytes, size_t n_bytes) {
    while (n_bytes > 0) {
        ssize_t n = write(out->fd, bytes, n_bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return write_failed(out);
        bytes += n;
        n_bytes -= (size_t)n;
    }
    return TAGC_OK;
}

static tagc_status output_open(output *out, const char *folder, const char *name) {
    static const uint8_t no_header[TAGC_TOKEN_HEADER_BYTES]; /* until output_finish knows it */
    char temporary[64];
    snprintf(temporary, sizeof temporary, "%s.tmp-%ld", name, (long)getpid());
    out->folder = folder;
    TAGC_TRY(tagc_path_join(folder, name, out->path));
    TAGC_TRY(tagc_path_join(folder, temporary, out->temporary));
    out->fd = open(out->temporary, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (out->fd >= 0) return write_all(out, no_header, sizeof no_header);
    tagc_status status = tagc_fail(TAGC_ERR_IO, "%s: cannot create: %s", out->temporary, strerror(errno));
    out->temporary[0] = '\0';
    return status;
}

static void output_close(output *out) {
    if (out->fd >= 0) close(out->fd);
    if (*out->temporary) unlink(out->temporary);
}

static tagc_status append(output *out, const uint8_t *tokens, size_t n_tokens) {
    out->n_tokens += n_tokens;
    return write_all(out, tokens, n_tokens);
}

static tagc_status end_text(output *out) {
    static const uint8_t end = TAGC_BYTES_END_OF_TEXT;
    return append(out, &end, 1);
}

/* *map: the whole file as it is so far, n_bytes of it. */
static tagc_status map_output(const output *out, uint8_t **map, size_t *n_bytes) {
    *n_bytes = TAGC_TOKEN_HEADER_BYTES + (size_t)out->n_tokens;
    *map = mmap(NULL, *n_bytes, PROT_READ, MAP_SHARED, out->fd, 0);
    if (*map != MAP_FAILED) return TAGC_OK;
    return tagc_fail(TAGC_ERR_IO, "%s: cannot map %zu bytes: %s", out->temporary, *n_bytes, strerror(errno));
}

/* Takes the last n_tokens from `from` and appends them to `to`. */
static tagc_status move_tail(output *from, output *to, uint64_t n_tokens) {
    uint8_t *map;
    size_t n_bytes;
    if (n_tokens == 0) return TAGC_OK;
    TAGC_TRY(map_output(from, &map, &n_bytes));
    size_t n_left = n_bytes - (size_t)n_tokens;
    tagc_status status = append(to, map + n_left, (size_t)n_tokens);
    munmap(map, n_bytes);
    TAGC_TRY(status);
    if (ftruncate(from->fd, (off_t)n_left) != 0 || lseek(from->fd, (off_t)n_left, SEEK_SET) < 0)
        return write_failed(from);
    from->n_tokens -= n_tokens;
    return TAGC_OK;
}

/* Writes the header and flushes everything to disk, still under the temporary name. The checksum is computed here, because
 * move_tail may remove tokens. */
static tagc_status output_finish(output *out) {
    tagc_tokens_info info = {.token_bytes = 1,
                             .n_tokens = out->n_tokens,
                             .vocab_size = TAGC_BYTES_VOCAB_SIZE,
                             .end_of_text = TAGC_BYTES_END_OF_TEXT,
                             .tokenizer = TAGC_BYTES_TOKENIZER};
    uint8_t header[TAGC_TOKEN_HEADER_BYTES], *map;
    size_t n_bytes;
    TAGC_TRY(map_output(out, &map, &n_bytes));
    tagc_token_file_header(&info, map + TAGC_TOKEN_HEADER_BYTES, header);
    munmap(map, n_bytes);
    if (lseek(out->fd, 0, SEEK_SET) < 0) return write_failed(out);
    TAGC_TRY(write_all(out, header, sizeof header));
    return fsync(out->fd) == 0 ? TAGC_OK : write_failed(out);
}

static tagc_status output_commit(output *out) {
    if (rename(out->temporary, out->path) != 0)
        return tagc_fail(TAGC_ERR_IO, "%s: cannot rename to %s: %s", out->temporary, out->path,
                         strerror(errno));
    out->temporary[0] = '\0';
    return tagc_path_sync_dir(out->folder);
}

/* ---- UTF-8 ---- */

/* The length of the character at text[0], 1 to 4; n_bytes >= 1. 0 when the text ends within a so far valid character; -1 when the
 * bytes are not UTF-8 (overlong, surrogate, above U+10FFFF, stray). */
static int character_bytes(const uint8_t *text, size_t n_bytes) {
    uint8_t lead = text[0];
    if (lead < 0x80) return 1;
    if (lead < 0xc2 || lead > 0xf4) return -1;
    int n_more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
    /* The bounds of the second byte are what excludes overlong forms, surrogates and what lies above
     * U+10FFFF. */
    uint8_t low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    uint8_t high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    for (int i = 1; i <= n_more; i++) {
        if ((size_t)i >= n_bytes) return 0;
        if (text[i] < low || text[i] > high) return -1;
        low = 0x80;
        high = 0xbf;
    }
    return n_more + 1;
}

/* How many bytes from the start are complete, valid characters. */
static size_t valid_prefix(const uint8_t *text, size_t n_bytes) {
    size_t i = 0;
    while (i < n_bytes) {
        uint64_t word;
        if (n_bytes - i >= sizeof word) {
            memcpy(&word, text + i, sizeof word);
            if (!(word & UINT64_C(0x8080808080808080))) {
                i += sizeof word;
                continue;
            }
        }
        int length = character_bytes(text + i, n_bytes - i);
        if (length <= 0) return i;
        i += (size_t)length;
    }
    return i;
}

/* ---- the builder ---- */

typedef struct builder {
    const tagc_data_options *options;
    int by_document; /* whole documents for validation, or the tail of each */
    tagc_file_list files;
    output train, val;
    tagc_data_report report;
    uint8_t *text; /* (CHUNK_BYTES) */
} builder;

void tagc_data_options_init(tagc_data_options *options) {
    *options = (tagc_data_options){.val_share = 0.1};
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
    b->report.n_train_tokens = b->train.n_tokens;
    b->report.n_val_tokens = b->val.n_tokens;
    if (b->options->progress && b->options->progress(b->options->progress_context, &b->report))
        return tagc_fail(TAGC_ERR_INTERRUPTED, "stopped while reading %s; no token file was written",
                         b->report.file ? b->report.file : "nothing");
    return TAGC_OK;
}

/* The first byte in text (n_bytes) that is not text, or n_bytes. Without at_end the last character may be incomplete. */
static size_t find_invalid(const uint8_t *text, size_t n_bytes, int at_end) {
    size_t n_valid = valid_prefix(text, n_bytes);
    const uint8_t *zero = memchr(text, 0, n_valid);
    if (zero) return (size_t)(zero - text);
    if (n_valid < n_bytes && !at_end && character_bytes(text + n_valid, n_bytes - n_valid) == 0)
        return n_bytes;
    return n_valid;
}

static uint64_t count_invalid(const uint8_t *text, size_t n_bytes) {
    uint64_t n = 0;
    for (size_t at; (at = find_invalid(text, n_bytes, 1)) < n_bytes; n++) {
        text += at + 1;
        n_bytes -= at + 1;
    }
    return n;
}

/* `offset` is that of b->text[0] in its document. */
static tagc_status check_text(const builder *b, const tagc_source *source, uint64_t offset, size_t n_bytes,
                              int at_end) {
    size_t at = find_invalid(b->text, n_bytes, at_end);
    const char *where = tagc_source_compressed(source) ? " of the decompressed text" : "";
    if (at == n_bytes) return TAGC_OK;
    if (b->text[at] == 0)
        return tagc_fail(
            TAGC_ERR_CORRUPT,
            "%s: byte %" PRIu64
            "%s is 0x00, which is no text: it ends a text of byte tokens (--lossy keeps such bytes as "
            "they are)",
            b->report.file, offset + at, where);
    return tagc_fail(
        TAGC_ERR_CORRUPT,
        "%s: byte %" PRIu64
        "%s is 0x%02x, which is not UTF-8 there (iconv converts other encodings; --lossy keeps such "
        "bytes as they are)",
        b->report.file, offset + at, where, b->text[at]);
}

static int has_ending(const char *path, const char *ending) {
    size_t n = strlen(path), n_ending = strlen(ending);
    if (n > 3 && strcmp(path + n - 3, ".gz") == 0) n -= 3;
    return n > n_ending && memcmp(path + n - n_ending, ending, n_ending) == 0;
}

/* A text may begin with the letters by which a file of another kind is known, so there must be bytes that a text has not. */
static const tagc_file_kind *kind_of(const uint8_t *text, size_t n_bytes) {
    if (valid_prefix(text, n_bytes) + 4 > n_bytes && !memchr(text, 0, n_bytes)) return NULL;
    return tagc_file_kind_of(text, n_bytes);
}

/* Refuses what is no text, by the first n_bytes in b->text. */
static tagc_status check_kind(const builder *b, size_t n_bytes) {
    const char *file = b->report.file;
    const tagc_file_kind *kind = kind_of(b->text, n_bytes);
    if (!kind && (has_ending(file, ".jsonl") || has_ending(file, ".ndjson")))
        return tagc_fail(
            TAGC_ERR_UNSUPPORTED,
            "%s is JSON lines, and tagc data reads plain text: python -m tagc data takes a field of "
            "each line (--lossy keeps the file as it is)",
            file);
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
        return tagc_fail(
            TAGC_ERR_UNSUPPORTED,
            "%s is %s, and tagc data reads plain text: in Python, pandas.%s(...).to_json("
            "\"NEW.jsonl\", orient=\"records\", lines=True) makes what python -m tagc data reads",
            file, kind->what, kind->tool);
    case TAGC_FILE_PICKLE:
    case TAGC_FILE_DOCUMENT:
        break;
    }
    return tagc_fail(TAGC_ERR_UNSUPPORTED, "%s is %s, and tagc data reads plain text", file, kind->what);
}

/* A byte order mark is of the file and not of its text. */
static size_t drop_mark(uint8_t *text, size_t n_bytes) {
    if (n_bytes < 3 || memcmp(text, "\xef\xbb\xbf", 3) != 0) return n_bytes;
    memmove(text, text + 3, n_bytes - 3);
    return n_bytes - 3;
}

/* All characters of b->text (n_bytes) that are complete; at least 1 byte. */
static size_t whole_characters(const uint8_t *text, size_t n_bytes) {
    for (size_t back = 1; back <= 3 && back < n_bytes; back++)
        if (character_bytes(text + n_bytes - back, back) == 0) return n_bytes - back;
    return n_bytes;
}

static tagc_status read_document(builder *b, tagc_source *source, output *out, uint64_t *n_text_bytes) {
    size_t n_held = 0; /* bytes in b->text that are not written yet */
    *n_text_bytes = 0;
    for (int at_end = 0, is_first = 1; !at_end; is_first = 0) {
        size_t n_read;
        TAGC_TRY(tagc_source_read(source, b->text + n_held, CHUNK_BYTES - n_held, &n_read));
        at_end = n_read < CHUNK_BYTES - n_held;
        n_held += n_read;
        if (is_first && !b->options->lossy) TAGC_TRY(check_kind(b, n_held));
        if (is_first) n_held = drop_mark(b->text, n_held);
        if (n_held == 0) break;
        if (!b->options->lossy) TAGC_TRY(check_text(b, source, *n_text_bytes, n_held, at_end));
        size_t n_whole = at_end ? n_held : whole_characters(b->text, n_held);
        if (b->options->lossy) b->report.n_invalid_bytes += count_invalid(b->text, n_whole);
        TAGC_TRY(append(out, b->text, n_whole));
        b->report.n_text_bytes += n_whole;
        *n_text_bytes += n_whole;
        n_held -= n_whole;
        memmove(b->text, b->text + n_whole, n_held);
        TAGC_TRY(tell_progress(b));
    }
    return TAGC_OK;
}

static tagc_status add_document(builder *b, tagc_source *source) {
    double share = b->options->val_share;
    uint64_t n_train = b->train.n_tokens, n_val = b->val.n_tokens, n_text_bytes;
    /* Decided before the document is read, so that its size does not bias the choice. */
    int to_val = b->by_document && (double)n_val < share * (double)(n_train + n_val);
    output *out = to_val ? &b->val : &b->train;
    TAGC_TRY(read_document(b, source, out, &n_text_bytes));
    if (n_text_bytes == 0) {
        b->report.n_empty++;
        return TAGC_OK;
    }
    if (share > 0 && !b->by_document) {
        uint64_t n_tail = (uint64_t)(share * (double)(b->train.n_tokens - n_train));
        TAGC_TRY(move_tail(&b->train, &b->val, n_tail));
        if (n_tail > 0) TAGC_TRY(end_text(&b->val));
    }
    return end_text(out);
}

static tagc_status add_file(builder *b, const char *path) {
    tagc_source *source;
    b->report.file = path;
    TAGC_TRY(tell_progress(b));
    TAGC_TRY(tagc_source_open(path, &source));
    tagc_status status = add_document(b, source);
    tagc_source_close(source);
    b->report.n_files += status == TAGC_OK;
    return status;
}

static tagc_status no_file(const builder *b) {
    char why[512] = "";
    for (int i = 0; i < TAGC_N_SKIPS && !*why; i++)
        if (b->report.skipped[i].n > 0)
            snprintf(why, sizeof why, "; skipped %" PRIu64 ": %s (%s)", b->report.skipped[i].n,
                     tagc_data_skip_text(i), b->report.skipped[i].names);
    return tagc_fail(TAGC_ERR_ARGUMENT, "%s%s: no file in it%s", b->options->inputs[0],
                     b->options->n_inputs > 1 ? " and the other inputs" : "", why);
}

static tagc_status prepare(builder *b) {
    const tagc_data_options *o = b->options;
    for (size_t i = 0; i < o->n_inputs; i++) TAGC_TRY(tagc_file_list_add(&b->files, o->inputs[i]));
    memcpy(b->report.skipped, b->files.skipped, sizeof b->report.skipped);
    if (b->files.n == 0) return no_file(b);
    b->report.n_total_files = b->files.n;
    b->by_document = o->val_share > 0 && (double)b->files.n >= 2 / o->val_share;
    b->text = malloc(CHUNK_BYTES);
    if (!b->text) return tagc_fail(TAGC_ERR_MEMORY, "no memory for %d bytes of text", CHUNK_BYTES);
    TAGC_TRY(tagc_path_make_dirs(o->out_dir));
    if (o->val_share == 0) TAGC_TRY(check_no_val(o->out_dir));
    TAGC_TRY(output_open(&b->train, o->out_dir, "train.bin"));
    return o->val_share > 0 ? output_open(&b->val, o->out_dir, "val.bin") : TAGC_OK;
}

static tagc_status build(builder *b) {
    TAGC_TRY(prepare(b));
    for (size_t i = 0; i < b->files.n; i++) TAGC_TRY(add_file(b, b->files.paths[i]));
    b->report.file = NULL;
    TAGC_TRY(tell_progress(b));
    if (b->report.n_text_bytes == 0)
        return tagc_fail(TAGC_ERR_ARGUMENT, "%s: %zu file%s and no text in %s", b->options->inputs[0],
                         b->files.n, b->files.n == 1 ? "" : "s", b->files.n == 1 ? "it" : "them");
    int has_val = b->options->val_share > 0;
    if (has_val && b->val.n_tokens == 0)
        return tagc_fail(TAGC_ERR_ARGUMENT,
                         "--val-share is %g: of %" PRIu64
                         " tokens nothing is left for val.bin; give more text",
                         b->options->val_share, b->report.n_train_tokens);
    TAGC_TRY(output_finish(&b->train));
    if (has_val) {
        TAGC_TRY(output_finish(&b->val));
        TAGC_TRY(output_commit(&b->val));
    }
    return output_commit(&b->train);
}

tagc_status tagc_data_build(const tagc_data_options *options, tagc_data_report *report) {
    builder b = {.options = options, .train.fd = -1, .val.fd = -1};
    tagc_status status = check_options(options);
    if (status == TAGC_OK) status = build(&b);
    output_close(&b.train);
    output_close(&b.val);
    tagc_file_list_clear(&b.files);
    free(b.text);
    b.report.file = NULL;
    if (report) *report = b.report;
    return status;
}
