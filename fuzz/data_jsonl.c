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

/* The field of line `line` of data, of which a file of the same bytes said that it is text (n_text). */
static void check_line(const uint8_t *data, size_t n_bytes, unsigned long line, const char *text,
                       size_t n_text) {
    const uint8_t *end = data + n_bytes, *stop;
    for (; line > 1; line--) {
        data = memchr(data, '\n', (size_t)(end - data));
        if (!data) abort();
        data++;
    }
    stop = memchr(data, '\n', (size_t)(end - data));
    if (!stop) stop = end;
    if (stop - data >= 3 && memcmp(data, "\xef\xbb\xbf", 3) == 0) data += 3;
    json_t *object = json_loadb((const char *)data, (size_t)(stop - data), JSON_ALLOW_NUL, NULL);
    const json_t *value = json_object_get(object, "text");
    if (!json_is_object(object) || (!json_is_string(value) && !json_is_null(value))) abort();
    if (n_text != json_string_length(value)) abort();
    if (n_text > 0 && memcmp(json_string_value(value), text, n_text) != 0) abort();
    json_decref(object);
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
        unsigned long last = 0;
        while (tagc_jsonl_next(lines, &text, &n_text) == TAGC_OK && text) {
            if (tagc_jsonl_line(lines) <= last) abort();
            last = tagc_jsonl_line(lines);
            if (!is_gzip) check_line(data, n_bytes, last, text, n_text);
        }
    }
    tagc_jsonl_close(lines);
    tagc_source_close(source);
    (void)tagc_jsonl_looks_like(data, n_bytes, "text");
    (void)tagc_file_kind_of(data, n_bytes);
    close(fd);
    return 0;
}
