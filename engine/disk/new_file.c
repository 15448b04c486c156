/* See new_file.h. */
#include "disk/new_file.h"

#include "core/status.h"
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static tagc_status cannot_write(const char *path, int error) {
    return tagc_fail(TAGC_ERR_IO, "cannot write %s: %s", path, strerror(error ? error : EIO));
}

int tagc_new_file_is_stdout(const char *path) {
    return path && strcmp(path, "-") == 0;
}

static tagc_status find_partial(const char *path, tagc_new_file *file) {
    struct stat about;
    int exists = lstat(path, &about) == 0;
    *file = (tagc_new_file){.is_plain = !exists || S_ISREG(about.st_mode)};
    if (tagc_path_is_dir(path)) return cannot_write(path, EISDIR);
    if (tagc_path_print(file->path, "%s", path) == TAGC_OK &&
        tagc_path_print(file->partial, file->is_plain ? "%s.partial" : "%s", path) == TAGC_OK)
        return TAGC_OK;
    return cannot_write(path, ENAMETOOLONG);
}

tagc_status tagc_new_file_open(const char *path, tagc_new_file *file) {
    if (tagc_new_file_is_stdout(path)) {
        *file = (tagc_new_file){.stream = stdout, .is_stdout = 1, .path = "standard output"};
        return TAGC_OK;
    }
    TAGC_TRY(find_partial(path, file));
    file->stream = fopen(file->partial, "we");
    return file->stream ? TAGC_OK : cannot_write(path, errno);
}

tagc_status tagc_new_file_check(const char *path) {
    tagc_new_file file;
    if (tagc_new_file_is_stdout(path)) return TAGC_OK;
    TAGC_TRY(find_partial(path, &file));
    if (!file.is_plain) return access(path, W_OK) == 0 ? TAGC_OK : cannot_write(path, errno);
    tagc_status status = tagc_new_file_open(path, &file);
    tagc_new_file_close(&file);
    return status;
}

tagc_status tagc_new_file_commit(tagc_new_file *file) {
    char folder[TAGC_PATH_BYTES];
    errno = 0;
    if (fflush(file->stream) != 0 || ferror(file->stream) ||
        (file->is_plain && fsync(fileno(file->stream)) != 0))
        return cannot_write(file->path, errno);
    if (file->is_plain && rename(file->partial, file->path) != 0) return cannot_write(file->path, errno);
    int failed = !file->is_stdout && fclose(file->stream) != 0;
    file->stream = NULL;
    if (failed) return cannot_write(file->path, errno);
    if (!file->is_plain) return TAGC_OK;
    TAGC_TRY(tagc_path_beside(file->path, ".", folder));
    return tagc_path_sync_dir(folder);
}

void tagc_new_file_close(tagc_new_file *file) {
    if (!file->stream) return;
    if (!file->is_stdout) fclose(file->stream);
    if (file->is_plain) unlink(file->partial);
    file->stream = NULL;
}
