/* JSON lines from hostile bytes: every text that comes out is what its line says, which is parsed here again, and no line
 * is skipped or read twice. */
#include "data/jsonl.h"
#include "disk/file_kind.h"
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

enum { BLANK, WRONG, TEXT };

/* What line `line` of data is, -1 behind the last. A text is compared with text (n_text), unless that is NULL. */
static int parse_line(const uint8_t *data, size_t n_bytes, unsigned long line, const char *text,
                      size_t n_text) {
    const uint8_t *end = data + n_bytes, *stop;
    for (unsigned long i = 1; i < line && data; i++) {
        data = memchr(data, '\n', (size_t)(end - data));
        if (data) data++;
    }
    if (!data || data == end) return -1;
    stop = memchr(data, '\n', (size_t)(end - data));
    if (!stop) stop = end;
    if (line == 1 && stop - data >= 3 && memcmp(data, "\xef\xbb\xbf", 3) == 0) data += 3;
    const uint8_t *at = data;
    while (at < stop && (*at == ' ' || *at == '\t' || *at == '\r')) at++;
    if (at == stop) return BLANK;
    json_t *object = json_loadb((const char *)data, (size_t)(stop - data), JSON_ALLOW_NUL, NULL);
    const json_t *value = json_object_get(object, "text");
    int is_text = json_is_object(object) && (json_is_string(value) || json_is_null(value));
    if (is_text && text && n_text != json_string_length(value)) abort();
    if (is_text && text && n_text > 0 && memcmp(json_string_value(value), text, n_text) != 0) abort();
    json_decref(object);
    return is_text ? TEXT : WRONG;
}

/* Each text is its line's, only blank lines lie between, and it ends at a wrong line or behind the last. */
static void check(tagc_jsonl *lines, const uint8_t *data, size_t n_bytes) {
    const char *text;
    size_t n_text;
    tagc_status status;
    unsigned long line = 0;
    while ((status = tagc_jsonl_next(lines, &text, &n_text)) == TAGC_OK && text) {
        for (line++; line < tagc_jsonl_line(lines); line++)
            if (parse_line(data, n_bytes, line, NULL, 0) != BLANK) abort();
        if (line != tagc_jsonl_line(lines) || parse_line(data, n_bytes, line, text, n_text) != TEXT) abort();
    }
    if (status != TAGC_OK && status != TAGC_ERR_CORRUPT) return;
    for (line++; parse_line(data, n_bytes, line, NULL, 0) == BLANK;) line++;
    if (parse_line(data, n_bytes, line, NULL, 0) != (status == TAGC_OK ? -1 : WRONG)) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    char path[64];
    tagc_source *source = NULL;
    tagc_jsonl *lines = NULL;
    int is_gzip = n_bytes >= 2 && data[0] == 0x1f && data[1] == 0x8b;
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (fd < 0 || write(fd, data, n_bytes) != (ssize_t)n_bytes) abort();
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (tagc_source_open(path, &source) == TAGC_OK &&
        tagc_jsonl_open(source, path, "text", &lines) == TAGC_OK) {
        const char *text;
        size_t n_text;
        if (!is_gzip) check(lines, data, n_bytes);
        while (is_gzip && tagc_jsonl_next(lines, &text, &n_text) == TAGC_OK && text) continue;
    }
    tagc_jsonl_close(lines);
    tagc_source_close(source);
    (void)tagc_jsonl_looks_like(data, n_bytes, "text");
    (void)tagc_file_kind_of(data, n_bytes);
    close(fd);
    return 0;
}
