/* Paths and folders. Error texts name them. */
#include "files/paths.h"

#include "core/status.h"
#include <errno.h>
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

tagc_status tagc_path_join(const char *dir, const char *name, char *out) {
    if (snprintf(out, TAGC_PATH_BYTES, "%s/%s", dir, name) >= TAGC_PATH_BYTES)
        return tagc_fail(TAGC_ERR_IO, "a path is longer than %d bytes: %.200s...", TAGC_PATH_BYTES - 1, dir);
    return TAGC_OK;
}

tagc_status tagc_path_beside(const char *path, const char *name, char *out) {
    const char *slash = strrchr(path, '/');
    int n_dir = slash ? (int)(slash - path) + 1 : 0;
    if (snprintf(out, TAGC_PATH_BYTES, "%.*s%s", n_dir, path, name) >= TAGC_PATH_BYTES)
        return tagc_fail(TAGC_ERR_IO, "a path is longer than %d bytes: %.200s...", TAGC_PATH_BYTES - 1, path);
    return TAGC_OK;
}

tagc_status tagc_path_make_dirs(const char *dir) {
    char path[TAGC_PATH_BYTES];
    if (snprintf(path, sizeof path, "%s", dir) >= (int)sizeof path)
        return tagc_fail(TAGC_ERR_IO, "a path is longer than %d bytes", TAGC_PATH_BYTES - 1);
    for (char *slash = path; *slash; slash++) {
        if (*slash != '/' || slash == path) continue;
        *slash = '\0';
        mkdir(path, 0777);
        *slash = '/';
    }
    if (mkdir(path, 0777) != 0 && !(errno == EEXIST && tagc_path_is_dir(path)))
        return tagc_fail(TAGC_ERR_IO, "%s: %s", dir, strerror(errno));
    return TAGC_OK;
}
