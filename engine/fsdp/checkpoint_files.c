/* Finds checkpoints and removes old ones. */
#include "fsdp/checkpoint.h"
#include "fsdp/checkpoint_format.h"
#include "fsdp/internal.h"
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_MANIFEST_BYTES ((off_t)256 << 20)

tagc_status tagc_folder_remove(const char *path) {
    DIR *folder = opendir(path);
    if (folder == NULL && errno == ENOENT) return TAGC_OK;
    if (folder == NULL) return tagc_fail(TAGC_ERR_IO, "cannot remove %s: %s", path, strerror(errno));
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            unlinkat(dirfd(folder), entry->d_name, 0); /* if this fails, rmdir fails, too */
    closedir(folder);
    if (rmdir(path) == 0) return TAGC_OK;
    return tagc_fail(TAGC_ERR_IO, "cannot remove %s: %s", path, strerror(errno));
}

tagc_status tagc_manifest_read(const char *path, tagc_manifest **out) {
    *out = NULL;
    char name[TAGC_PATH_BYTES];
    TAGC_TRY(tagc_path_print(name, "%s/manifest.json", path));
    FILE *file = fopen(name, "rb");
    struct stat info;
    if (file == NULL || fstat(fileno(file), &info) != 0 || info.st_size > MAX_MANIFEST_BYTES) {
        int error = file != NULL ? EFBIG : errno;
        if (file != NULL) fclose(file);
        return tagc_fail(TAGC_ERR_IO, "cannot read %s: %s", name, strerror(error));
    }
    char *text = malloc((size_t)info.st_size + 1);
    size_t n_bytes = text != NULL ? fread(text, 1, (size_t)info.st_size, file) : 0;
    fclose(file);
    tagc_status status = text == NULL ? tagc_fail(TAGC_ERR_MEMORY, "no memory to read %s", name)
                                      : tagc_manifest_parse(text, n_bytes, 1, out);
    free(text);
    return status == TAGC_OK ? TAGC_OK : tagc_fail_in(status, "%s", name);
}

tagc_status tagc_checkpoint_info(const char *path, uint64_t *step, int *world_size, char **extra) {
    tagc_manifest *manifest;
    TAGC_TRY(tagc_manifest_read(path, &manifest));
    *step = manifest->step;
    *world_size = manifest->world_size;
    *extra = manifest->extra;
    manifest->extra = NULL;
    tagc_manifest_destroy(manifest);
    return TAGC_OK;
}

/* ---- finding ---- */

/* The number of a folder "step-<digits>", else 0 and *is = 0. */
static uint64_t step_of(const char *name, int *is) {
    char *end = NULL;
    *is = 0;
    if (strncmp(name, "step-", 5) != 0 || name[5] < '0' || name[5] > '9') return 0;
    uint64_t step = strtoull(name + 5, &end, 10);
    *is = *end == 0;
    return step;
}

/* The newest step below `before`; *found = 0 when there is none. */
static tagc_status newest(const char *dir, uint64_t before, uint64_t *step, char name[TAGC_PATH_BYTES],
                          int *found) {
    *found = 0;
    DIR *folder = opendir(dir);
    if (folder == NULL) return tagc_fail(TAGC_ERR_IO, "cannot read folder %s: %s", dir, strerror(errno));
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        int is;
        uint64_t number = step_of(entry->d_name, &is);
        if (!is || number >= before || (*found && number < *step)) continue;
        *found = 1;
        *step = number;
        strcpy(name, entry->d_name); /* at most 255 bytes */
    }
    closedir(folder);
    return TAGC_OK;
}

tagc_status tagc_checkpoint_newest(const char *dir, uint64_t before, uint64_t *step, int *found) {
    char name[TAGC_PATH_BYTES];
    return newest(dir, before, step, name, found);
}

static tagc_status find(const char *dir, char path[TAGC_PATH_BYTES]) {
    TAGC_TRY(tagc_path_print(path, "%s/manifest.json", dir));
    if (access(path, F_OK) == 0) return tagc_path_print(path, "%s", dir);
    uint64_t step = 0;
    int found;
    char name[TAGC_PATH_BYTES];
    TAGC_TRY(newest(dir, UINT64_MAX, &step, name, &found));
    if (!found)
        return tagc_fail(TAGC_ERR_IO, "no checkpoint in %s: neither manifest.json nor a step-* folder", dir);
    return tagc_path_print(path, "%s/%.255s", dir, name);
}

tagc_status tagc_checkpoint_find(tagc_comm *comm, const char *dir, char *path, size_t n_bytes) {
    int world_size = tagc_comm_world_size(comm);
    char own[TAGC_PATH_BYTES] = "";
    tagc_status status = TAGC_OK;
    char *all = malloc((size_t)world_size * sizeof own); /* (W, path): rank 0's counts */
    if (all == NULL) status = tagc_fail(TAGC_ERR_MEMORY, "no memory for %d paths", world_size);
    if (status == TAGC_OK && tagc_comm_rank(comm) == 0) status = find(dir, own);
    if (status == TAGC_OK && strlen(own) >= n_bytes)
        status = tagc_fail(TAGC_ERR_ARGUMENT, "path has room for %zu bytes, %s needs more", n_bytes, own);
    status = tagc_levels_agree(NULL, comm, status);
    if (status == TAGC_OK)
        status = tagc_comm_all_gather(comm, own, sizeof own, all, (size_t)world_size * sizeof own);
    if (status == TAGC_OK && memchr(all, 0, n_bytes < sizeof own ? n_bytes : sizeof own) == NULL)
        status = tagc_fail(TAGC_ERR_ARGUMENT, "path has room for %zu bytes, rank 0's is longer", n_bytes);
    if (status == TAGC_OK) strcpy(path, all);
    free(all);
    return status;
}

/* ---- pruning ---- */

static int is_partial(const char *name) {
    size_t n = strlen(name);
    return strncmp(name, ".step-", 6) == 0 && n > 8 && strcmp(name + n - 8, ".partial") == 0;
}

static tagc_status prune(const char *dir, int n_keep) {
    char path[TAGC_PATH_BYTES], name[TAGC_PATH_BYTES];
    uint64_t step = 0, before = UINT64_MAX;
    int found = 1;
    for (int n = 0; found; n++, before = step) {
        TAGC_TRY(newest(dir, before, &step, name, &found));
        if (!found || n < n_keep) continue;
        TAGC_TRY(tagc_path_print(path, "%s/%.255s", dir, name));
        TAGC_TRY(tagc_folder_remove(path));
    }
    DIR *folder = opendir(dir);
    if (folder == NULL) return tagc_fail(TAGC_ERR_IO, "cannot read folder %s: %s", dir, strerror(errno));
    tagc_status status = TAGC_OK;
    for (struct dirent *entry; status == TAGC_OK && (entry = readdir(folder)) != NULL;) {
        if (!is_partial(entry->d_name)) continue;
        status = tagc_path_print(path, "%s/%s", dir, entry->d_name);
        if (status == TAGC_OK) status = tagc_folder_remove(path);
    }
    closedir(folder);
    return status;
}

tagc_status tagc_checkpoint_prune(tagc_comm *comm, const char *dir, int n_keep) {
    tagc_status status = TAGC_OK;
    if (n_keep < 1)
        status = tagc_fail(TAGC_ERR_ARGUMENT, "n_keep is %d, allowed is 1 or more", n_keep);
    else if (tagc_comm_rank(comm) == 0)
        status = prune(dir, n_keep);
    return tagc_levels_agree(NULL, comm, status);
}
