/* Files of text, plain or gzip, from hostile bytes. The text must not depend on the sizes in which it is
 * read, and bytes that do not start like gzip must come out as they are. */
#include "data/text_files.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_TEXT = 1 << 18 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

/* Up to MAX_TEXT bytes; the status says how it ended. */
static tagc_status read_text(const char *path, size_t step, uint8_t *text, size_t *n_text) {
    tagc_source *source;
    *n_text = 0;
    tagc_status status = tagc_source_open(path, &source);
    for (size_t n = step; status == TAGC_OK && n == step && *n_text + step <= MAX_TEXT; *n_text += n)
        status = tagc_source_read(source, text + *n_text, step, &n);
    tagc_source_close(source);
    return status;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes) {
    char path[64];
    size_t n_large, n_small;
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    uint8_t *large = malloc(MAX_TEXT), *small = malloc(MAX_TEXT);
    if (fd >= 0 && large && small && write(fd, data, n_bytes) == (ssize_t)n_bytes) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        tagc_status status = read_text(path, MAX_TEXT, large, &n_large);
        tagc_status in_steps = read_text(path, 64, small, &n_small);
        if (status != in_steps && n_small < MAX_TEXT) abort();
        if (status == TAGC_OK && (n_large != n_small || memcmp(large, small, n_large) != 0)) abort();
        int is_gzip = n_bytes >= 2 && data[0] == 0x1f && data[1] == 0x8b;
        if (!is_gzip && (status != TAGC_OK || n_large != n_bytes || memcmp(large, data, n_bytes) != 0))
            abort();
    }
    if (fd >= 0) close(fd);
    free(large);
    free(small);
    return 0;
}
