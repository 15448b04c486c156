/* See text_files.h. zlib's own file functions do not report where a file is damaged, nor always that it is cut short; hence the
 * inflate loop here. */
#include "data/text_files.h"

#include "core/status.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

/* ---- which files ---- */

typedef struct file_key {
    dev_t device;
    ino_t inode;
} file_key;

const char *tagc_data_skip_text(int skip) {
    static const char *const texts[TAGC_N_SKIPS] = {
        [TAGC_SKIP_HIDDEN] = "hidden",
        [TAGC_SKIP_BROKEN] = "links to nothing",
        [TAGC_SKIP_FOLDER] = "links to folders",
        [TAGC_SKIP_SPECIAL] = "pipes, sockets or devices",
        [TAGC_SKIP_UNREADABLE] = "cannot be read",
        [TAGC_SKIP_TWICE] = "reached before, each is counted once",
    };
    return skip >= 0 && skip < TAGC_N_SKIPS ? texts[skip] : "?";
}

/* The message goes to a terminal, which gets no control characters. */
static void skip(tagc_file_list *list, tagc_data_skip why, const char *path) {
    tagc_data_skipped *skipped = &list->skipped[why];
    size_t n = strlen(skipped->names), n_left = sizeof skipped->names - n;
    uint64_t place = skipped->n++;
    if (place == TAGC_SKIP_N_NAMED) snprintf(skipped->names + n, n_left, ", ...");
    if (place >= TAGC_SKIP_N_NAMED) return;
    size_t n_path = strlen(path);
    snprintf(skipped->names + n, n_left, "%s%s", place > 0 ? ", " : "",
             path + (n_path > TAGC_SKIP_PATH_BYTES ? n_path - TAGC_SKIP_PATH_BYTES : 0));
    for (char *c = skipped->names + n; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
}

static tagc_status no_memory(const char *path) {
    return tagc_fail(TAGC_ERR_MEMORY, "%s: no memory to list it", path);
}

tagc_status tagc_file_list_append(tagc_file_list *list, const char *path) {
    if (list->n == list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : 64;
        char **paths = realloc(list->paths, capacity * sizeof *paths);
        if (!paths) return no_memory(path);
        list->paths = paths;
        list->capacity = capacity;
    }
    list->paths[list->n] = strdup(path);
    if (!list->paths[list->n]) return no_memory(path);
    list->n++;
    return TAGC_OK;
}

static int compare_keys(const void *a, const void *b) {
    const file_key *left = a, *right = b;
    if (left->device != right->device) return left->device < right->device ? -1 : 1;
    return left->inode < right->inode ? -1 : left->inode > right->inode;
}

/* A file has one key by all its names, hard links and symbolic links alike. */
static tagc_status append_once(tagc_file_list *list, const char *path, const struct stat *about) {
    file_key *key = malloc(sizeof *key);
    if (!key) return no_memory(path);
    *key = (file_key){about->st_dev, about->st_ino};
    file_key **entry = tsearch(key, &list->seen, compare_keys);
    if (!entry || *entry != key) free(key);
    if (!entry) return no_memory(path);
    if (*entry == key) return tagc_file_list_append(list, path);
    skip(list, TAGC_SKIP_TWICE, path);
    return TAGC_OK;
}

/* Not alphasort(), which asks the locale. */
static int by_bytes(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

static int is_named(const struct dirent *entry) {
    return strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
}

static tagc_status add_folder(tagc_file_list *list, const char *folder, int is_input);

static tagc_status add_entry(tagc_file_list *list, const char *path, const char *name) {
    struct stat itself, target;
    if (name[0] == '.')
        skip(list, TAGC_SKIP_HIDDEN, path);
    else if (lstat(path, &itself) != 0)
        skip(list, TAGC_SKIP_UNREADABLE, path);
    else if (S_ISDIR(itself.st_mode))
        return add_folder(list, path, 0);
    else if (stat(path, &target) != 0)
        skip(list, errno == EACCES ? TAGC_SKIP_UNREADABLE : TAGC_SKIP_BROKEN, path);
    else if (S_ISDIR(target.st_mode))
        skip(list, TAGC_SKIP_FOLDER, path);
    else if (!S_ISREG(target.st_mode))
        skip(list, TAGC_SKIP_SPECIAL, path);
    else if (faccessat(AT_FDCWD, path, R_OK, AT_EACCESS) != 0)
        skip(list, TAGC_SKIP_UNREADABLE, path);
    else
        return append_once(list, path, &target);
    return TAGC_OK;
}

static tagc_status add_folder(tagc_file_list *list, const char *folder, int is_input) {
    struct dirent **entries;
    int n = scandir(folder, &entries, is_named, by_bytes);
    if (n < 0 && errno == EACCES && !is_input) {
        skip(list, TAGC_SKIP_UNREADABLE, folder);
        return TAGC_OK;
    }
    if (n < 0) return tagc_fail(TAGC_ERR_IO, "%s: cannot list: %s", folder, strerror(errno));
    tagc_status status = TAGC_OK;
    size_t n_folder = strlen(folder);
    const char *slash = n_folder > 0 && folder[n_folder - 1] == '/' ? "" : "/";
    for (int i = 0; i < n; i++) {
        char *path = NULL;
        if (status == TAGC_OK) {
            if (asprintf(&path, "%s%s%s", folder, slash, entries[i]->d_name) < 0) path = NULL;
            status = path ? add_entry(list, path, entries[i]->d_name) : no_memory(folder);
        }
        free(path);
        free(entries[i]);
    }
    free(entries);
    return status;
}

/* What a user names is read whatever it is, a pipe of the shell, too. */
tagc_status tagc_file_list_add(tagc_file_list *list, const char *input) {
    struct stat about;
    if (stat(input, &about) != 0)
        return tagc_fail(TAGC_ERR_IO, "%s: cannot stat: %s", input, strerror(errno));
    if (S_ISDIR(about.st_mode)) return add_folder(list, input, 1);
    return S_ISREG(about.st_mode) ? append_once(list, input, &about) : tagc_file_list_append(list, input);
}

void tagc_file_list_clear(tagc_file_list *list) {
    for (size_t i = 0; i < list->n; i++) free(list->paths[i]);
    free(list->paths);
    tdestroy(list->seen, free);
    *list = (tagc_file_list){0};
}

/* ---- a file as a stream ---- */

enum { IN_BYTES = 1 << 16 };

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
