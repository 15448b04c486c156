/* Paths and folders. */
#include "disk/paths.h"

#include "core/status.h"
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int tagc_path_is_dir(const char *path) {
    struct stat about;
    return stat(path, &about) == 0 && S_ISDIR(about.st_mode);
}

int tagc_path_exists(const char *path) {
    return access(path, F_OK) == 0;
}

tagc_status tagc_path_print(char path[TAGC_PATH_BYTES], const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(path, TAGC_PATH_BYTES, format, args);
    va_end(args);
    if (n >= 0 && n < TAGC_PATH_BYTES) return TAGC_OK;
    return tagc_fail(TAGC_ERR_ARGUMENT, "a path of %d bytes, allowed is up to %d: %.200s...", n,
                     TAGC_PATH_BYTES - 1, path);
}

tagc_status tagc_path_join(const char *dir, const char *name, char *out) {
    return tagc_path_print(out, "%s/%s", dir, name);
}

tagc_status tagc_path_beside(const char *path, const char *name, char *out) {
    const char *slash = strrchr(path, '/');
    return tagc_path_print(out, "%.*s%s", slash ? (int)(slash - path) + 1 : 0, path, name);
}

tagc_status tagc_path_make_dirs(const char *dir) {
    char path[TAGC_PATH_BYTES];
    TAGC_TRY(tagc_path_print(path, "%s", dir));
    for (char *slash = path; *slash; slash++) {
        if (*slash != '/' || slash == path) continue;
        *slash = '\0';
        mkdir(path, 0777); /* a failure shows in the last mkdir */
        *slash = '/';
    }
    if (mkdir(path, 0777) != 0 && !(errno == EEXIST && tagc_path_is_dir(path)))
        return tagc_fail(TAGC_ERR_IO, "cannot make folder %s: %s", dir, strerror(errno));
    return TAGC_OK;
}

tagc_status tagc_path_sync_dir(const char *dir) {
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 && errno == EACCES) return TAGC_OK;              /* it can be written to, but not read */
    int failed = fd < 0 || (fsync(fd) != 0 && errno != EINVAL); /* some file systems cannot, and say EINVAL */
    int error = errno;
    if (fd >= 0) close(fd);
    return failed ? tagc_fail(TAGC_ERR_IO, "cannot sync folder %s: %s", dir, strerror(error)) : TAGC_OK;
}
