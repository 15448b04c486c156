/* See files.h. */
#include "data/files.h"

#include "core/status.h"
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

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

static int visible(const struct dirent *entry) {
    return entry->d_name[0] != '.';
}

/* Not alphasort(), which asks the locale. */
static int by_bytes(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

static tagc_status add_folder(tagc_file_list *list, const char *folder);

static tagc_status add_entry(tagc_file_list *list, const char *path) {
    struct stat itself, target;
    if (lstat(path, &itself) != 0)
        return tagc_fail(TAGC_ERR_IO, "%s: cannot stat: %s", path, strerror(errno));
    if (S_ISDIR(itself.st_mode)) return add_folder(list, path);
    if (stat(path, &target) != 0 && errno == ENOENT) return TAGC_OK; /* a link to nothing */
    if (stat(path, &target) != 0) return tagc_fail(TAGC_ERR_IO, "%s: cannot stat: %s", path, strerror(errno));
    return S_ISREG(target.st_mode) ? tagc_file_list_append(list, path) : TAGC_OK;
}

static tagc_status add_folder(tagc_file_list *list, const char *folder) {
    struct dirent **entries;
    int n = scandir(folder, &entries, visible, by_bytes);
    if (n < 0) return tagc_fail(TAGC_ERR_IO, "%s: cannot list: %s", folder, strerror(errno));
    tagc_status status = TAGC_OK;
    size_t n_folder = strlen(folder);
    const char *slash = n_folder > 0 && folder[n_folder - 1] == '/' ? "" : "/";
    for (int i = 0; i < n; i++) {
        char *path = NULL;
        if (status == TAGC_OK) {
            if (asprintf(&path, "%s%s%s", folder, slash, entries[i]->d_name) < 0) path = NULL;
            status = path ? add_entry(list, path) : no_memory(folder);
        }
        free(path);
        free(entries[i]);
    }
    free(entries);
    return status;
}

tagc_status tagc_file_list_add(tagc_file_list *list, const char *input) {
    struct stat about;
    if (stat(input, &about) != 0)
        return tagc_fail(TAGC_ERR_IO, "%s: cannot stat: %s", input, strerror(errno));
    return S_ISDIR(about.st_mode) ? add_folder(list, input) : tagc_file_list_append(list, input);
}

void tagc_file_list_clear(tagc_file_list *list) {
    for (size_t i = 0; i < list->n; i++) free(list->paths[i]);
    free(list->paths);
    *list = (tagc_file_list){0};
}
