/* Reads text, plain or gzip. zlib's own file functions do not report where a file is damaged, nor always that it is cut
 * short; hence the inflate loop here. */
#include "data/source.h"

#include "core/status.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

enum { IN_BYTES = 1 << 16 };
#define MAX_WHOLE_BYTES ((size_t)1 << 30)

struct tagc_source {
    char *path;
    int fd;
    int compressed, in_member; /* in_member: a gzip member was begun and not ended */
    int at_end;                /* of the file */
    uint64_t n_file_bytes;     /* read from the file so far */
    z_stream z;                /* next_in, avail_in: what was read and not used, for plain files too */
    uint8_t in[IN_BYTES];
};

static tagc_status fill(tagc_source *s) {
    ssize_t n;
    do {
        n = read(s->fd, s->in, sizeof s->in);
    } while (n < 0 && errno == EINTR);
    if (n < 0)
        return tagc_fail(TAGC_ERR_IO, "%s: cannot read at byte %" PRIu64 ": %s", s->path, s->n_file_bytes,
                         strerror(errno));
    s->at_end = n == 0;
    s->n_file_bytes += (uint64_t)n;
    s->z.next_in = s->in;
    s->z.avail_in = (uInt)n;
    return TAGC_OK;
}

static tagc_status start(tagc_source *s) {
    s->fd = open(s->path, O_RDONLY | O_CLOEXEC);
    if (s->fd < 0) return tagc_fail(TAGC_ERR_IO, "%s: cannot open: %s", s->path, strerror(errno));
    TAGC_TRY(fill(s));
    s->compressed = s->z.avail_in >= 2 && s->in[0] == 0x1f && s->in[1] == 0x8b;
    if (s->compressed && inflateInit2(&s->z, 16 + MAX_WBITS) != Z_OK) {
        s->compressed = 0;
        return tagc_fail(TAGC_ERR_MEMORY, "%s: no memory to decompress", s->path);
    }
    return TAGC_OK;
}

tagc_status tagc_source_open(const char *path, tagc_source **out) {
    *out = NULL;
    tagc_source *s = calloc(1, sizeof *s);
    if (s) {
        s->fd = -1;
        s->path = strdup(path);
    }
    tagc_status status =
        s && s->path ? start(s) : tagc_fail(TAGC_ERR_MEMORY, "%s: no memory to read it", path);
    if (status != TAGC_OK) {
        tagc_source_close(s);
        return status;
    }
    *out = s;
    return TAGC_OK;
}

void tagc_source_close(tagc_source *source) {
    if (!source) return;
    if (source->compressed) inflateEnd(&source->z);
    if (source->fd >= 0) close(source->fd);
    free(source->path);
    free(source);
}

int tagc_source_compressed(const tagc_source *source) {
    return source->compressed;
}

static size_t take_plain(tagc_source *s, uint8_t *bytes, size_t capacity) {
    size_t n = capacity < s->z.avail_in ? capacity : s->z.avail_in;
    memcpy(bytes, s->z.next_in, n);
    s->z.next_in += n;
    s->z.avail_in -= (uInt)n;
    return n;
}

/* One call of inflate. A file may be several members in a row, as `cat a.gz b.gz` makes them. */
static tagc_status take_gzip(tagc_source *s, uint8_t *bytes, size_t capacity, size_t *n_taken) {
    if (!s->in_member) inflateReset(&s->z);
    s->in_member = 1;
    s->z.next_out = bytes;
    s->z.avail_out = capacity > 1u << 30 ? 1u << 30 : (uInt)capacity;
    int code = inflate(&s->z, Z_NO_FLUSH);
    *n_taken = (size_t)(s->z.next_out - bytes);
    if (code == Z_STREAM_END) s->in_member = 0;
    if (code == Z_OK || code == Z_STREAM_END || code == Z_BUF_ERROR) return TAGC_OK;
    if (code == Z_MEM_ERROR) return tagc_fail(TAGC_ERR_MEMORY, "%s: no memory to decompress", s->path);
    return tagc_fail(TAGC_ERR_CORRUPT, "%s: damaged gzip data at byte %" PRIu64 ": %s", s->path,
                     s->n_file_bytes - s->z.avail_in, s->z.msg ? s->z.msg : "no gzip data");
}

tagc_status tagc_source_read(tagc_source *source, uint8_t *bytes, size_t capacity, size_t *n_read) {
    *n_read = 0;
    while (*n_read < capacity) {
        if (source->z.avail_in == 0 && !source->at_end) TAGC_TRY(fill(source));
        size_t n = 0;
        if (!source->compressed)
            n = take_plain(source, bytes + *n_read, capacity - *n_read);
        else if (source->in_member || source->z.avail_in > 0)
            TAGC_TRY(take_gzip(source, bytes + *n_read, capacity - *n_read, &n));
        *n_read += n;
        if (n > 0 || !source->at_end) continue;
        if (source->in_member)
            return tagc_fail(TAGC_ERR_CORRUPT,
                             "%s: cut short: the gzip data does not end at byte %" PRIu64
                             ", where the file does",
                             source->path, source->n_file_bytes);
        break;
    }
    return TAGC_OK;
}

tagc_status tagc_source_read_all(const char *path, char **bytes, size_t *n_bytes) {
    tagc_source *source;
    size_t capacity = 1 << 16, n = 0;
    char *all = NULL;
    *bytes = NULL;
    *n_bytes = 0;
    TAGC_TRY(tagc_source_open(path, &source));
    tagc_status status = TAGC_OK;
    for (size_t n_read = 1; status == TAGC_OK && n_read > 0; n += n_read) {
        if (n == capacity || !all) {
            if (all) capacity *= 2;
            char *larger = capacity <= MAX_WHOLE_BYTES ? realloc(all, capacity) : NULL;
            if (!larger) {
                status = tagc_fail(TAGC_ERR_MEMORY, "%s: larger than 1 GiB, or no memory", path);
                break;
            }
            all = larger;
        }
        status = tagc_source_read(source, (uint8_t *)all + n, capacity - n, &n_read);
    }
    tagc_source_close(source);
    if (status != TAGC_OK) {
        free(all);
        return status;
    }
    *bytes = all;
    *n_bytes = n;
    return TAGC_OK;
}
