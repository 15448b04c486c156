/* See token_writer.h. The checksum is computed at the end by reading the file back, because move_tail may remove tokens. The
 * pages are in memory then. */
#include "data/token_writer.h"

#include "core/status.h"
#include "data/token_format.h"
#include "data/xxh64.h"
#include "disk/paths.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BUFFER_BYTES = 1 << 16 };

struct tagc_token_writer {
    char *folder, *path;
    char *temporary; /* NULL once it has its final name */
    int fd;
    tagc_tokens_info info;
    size_t n_buffered; /* bytes */
    uint8_t buffer[BUFFER_BYTES];
};

static char *join(const char *folder, const char *name, const char *suffix) {
    char *path;
    return asprintf(&path, "%s/%s%s", folder, name, suffix) < 0 ? NULL : path;
}

tagc_status tagc_token_writer_create(const char *folder, const char *name, const tagc_tokenizer *tokenizer,
                                     tagc_token_writer **out) {
    *out = NULL;
    tagc_token_writer *w = calloc(1, sizeof *w);
    if (!w) return tagc_fail(TAGC_ERR_MEMORY, "%s/%s: no memory to write it", folder, name);
    char suffix[32];
    snprintf(suffix, sizeof suffix, ".tmp-%ld", (long)getpid());
    w->fd = -1;
    w->folder = strdup(folder);
    w->path = join(folder, name, "");
    w->temporary = join(folder, name, suffix);
    w->info = (tagc_tokens_info){
        .format = TAGC_TOKENS_TAGC,
        .vocab_size = (uint32_t)tagc_tokenizer_vocab_size(tokenizer),
        .token_bytes = tagc_token_format_width((uint32_t)tagc_tokenizer_vocab_size(tokenizer)),
        .end_of_text = tagc_tokenizer_end_of_text(tokenizer),
    };
    snprintf(w->info.tokenizer, sizeof w->info.tokenizer, "%s", tagc_tokenizer_name(tokenizer));
    w->n_buffered = TAGC_TOKEN_HEADER_BYTES; /* zeros, until _finish knows better */

    tagc_status status = TAGC_OK;
    if (!w->folder || !w->path || !w->temporary)
        status = tagc_fail(TAGC_ERR_MEMORY, "%s/%s: no memory to write it", folder, name);
    else if ((w->fd = open(w->temporary, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) < 0)
        status = tagc_fail(TAGC_ERR_IO, "%s: cannot create: %s", w->temporary, strerror(errno));
    if (status != TAGC_OK) {
        tagc_token_writer_destroy(w);
        return status;
    }
    *out = w;
    return TAGC_OK;
}

void tagc_token_writer_destroy(tagc_token_writer *writer) {
    if (!writer) return;
    if (writer->fd >= 0) close(writer->fd);
    if (writer->temporary) unlink(writer->temporary);
    free(writer->folder);
    free(writer->path);
    free(writer->temporary);
    free(writer);
}

static tagc_status write_failed(const tagc_token_writer *w) {
    return tagc_fail(TAGC_ERR_IO, "%s: cannot write: %s", w->temporary, strerror(errno));
}

static tagc_status write_all(const tagc_token_writer *w, const uint8_t *bytes, size_t n_bytes) {
    while (n_bytes > 0) {
        ssize_t n = write(w->fd, bytes, n_bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return write_failed(w);
        bytes += n;
        n_bytes -= (size_t)n;
    }
    return TAGC_OK;
}

static tagc_status flush(tagc_token_writer *w) {
    TAGC_TRY(write_all(w, w->buffer, w->n_buffered));
    w->n_buffered = 0;
    return TAGC_OK;
}

static tagc_status read_exactly(const tagc_token_writer *w, uint64_t at, uint8_t *bytes, size_t n_bytes) {
    while (n_bytes > 0) {
        ssize_t n = pread(w->fd, bytes, n_bytes, (off_t)at);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            return tagc_fail(TAGC_ERR_IO, "%s: cannot read back at byte %" PRIu64 ": %s", w->temporary, at,
                             n < 0 ? strerror(errno) : "it ends there");
        bytes += n;
        at += (uint64_t)n;
        n_bytes -= (size_t)n;
    }
    return TAGC_OK;
}

uint64_t tagc_token_writer_n(const tagc_token_writer *writer) {
    return writer->info.n_tokens;
}

tagc_status tagc_token_writer_append(tagc_token_writer *writer, const int *tokens, size_t n_tokens) {
    size_t width = (size_t)writer->info.token_bytes;
    for (size_t i = 0; i < n_tokens; i++) {
        if (writer->n_buffered + width > BUFFER_BYTES) TAGC_TRY(flush(writer));
        uint32_t token = (uint32_t)tokens[i];
        for (size_t k = 0; k < width; k++) writer->buffer[writer->n_buffered++] = (uint8_t)(token >> (8 * k));
    }
    writer->info.n_tokens += n_tokens;
    return TAGC_OK;
}

tagc_status tagc_token_writer_move_tail(tagc_token_writer *from, tagc_token_writer *to, uint64_t n_tokens) {
    uint64_t width = (uint64_t)from->info.token_bytes;
    uint64_t at = TAGC_TOKEN_HEADER_BYTES + (from->info.n_tokens - n_tokens) * width,
             end = at + n_tokens * width;
    TAGC_TRY(flush(from));
    TAGC_TRY(flush(to));
    for (uint64_t next = at; next < end;) {
        size_t n = end - next < BUFFER_BYTES ? (size_t)(end - next) : BUFFER_BYTES;
        TAGC_TRY(read_exactly(from, next, to->buffer, n));
        TAGC_TRY(write_all(to, to->buffer, n));
        next += n;
    }
    if (ftruncate(from->fd, (off_t)at) != 0 || lseek(from->fd, (off_t)at, SEEK_SET) < 0)
        return write_failed(from);
    from->info.n_tokens -= n_tokens;
    to->info.n_tokens += n_tokens;
    return TAGC_OK;
}

static tagc_status checksum_payload(tagc_token_writer *w, uint64_t *checksum) {
    tagc_xxh64_state state;
    tagc_xxh64_begin(&state);
    uint64_t at = TAGC_TOKEN_HEADER_BYTES, end = at + w->info.n_tokens * (uint64_t)w->info.token_bytes;
    tagc_status status = TAGC_OK;
    while (at < end && status == TAGC_OK) {
        size_t n = end - at < BUFFER_BYTES ? (size_t)(end - at) : BUFFER_BYTES;
        status = read_exactly(w, at, w->buffer, n);
        tagc_xxh64_add(&state, w->buffer, n);
        at += n;
    }
    *checksum = tagc_xxh64_end(&state);
    return status;
}

tagc_status tagc_token_writer_finish(tagc_token_writer *writer) {
    uint64_t checksum = 0;
    uint8_t header[TAGC_TOKEN_HEADER_BYTES];
    TAGC_TRY(flush(writer));
    TAGC_TRY(checksum_payload(writer, &checksum));
    tagc_token_format_write(&writer->info, checksum, header);
    if (lseek(writer->fd, 0, SEEK_SET) < 0) return write_failed(writer);
    TAGC_TRY(write_all(writer, header, sizeof header));
    return fsync(writer->fd) == 0 ? TAGC_OK : write_failed(writer);
}

tagc_status tagc_token_writer_commit(tagc_token_writer *writer) {
    if (rename(writer->temporary, writer->path) != 0)
        return tagc_fail(TAGC_ERR_IO, "%s: cannot rename to %s: %s", writer->temporary, writer->path,
                         strerror(errno));
    free(writer->temporary);
    writer->temporary = NULL;
    return tagc_path_sync_dir(writer->folder);
}
