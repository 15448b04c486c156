/* Finds the files that --data names: one file for each part, or shards as llm.c's corpora have. */
#include "core/status.h"
#include "data/data.h"
#include "data/files.h"
#include "disk/paths.h"
#include <dirent.h>
#include <errno.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static tagc_status add(tagc_file_list *list, const char *dir, const char *name) {
    char path[TAGC_PATH_BYTES];
    TAGC_TRY(tagc_path_join(dir, name, path));
    return tagc_file_list_append(list, path);
}

static int by_bytes(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static int is_shard(const char *name, tagc_data_part part, int has_train) {
    size_t n = strlen(name);
    int is_train = strstr(name, "train") != NULL, is_val = strstr(name, "val") != NULL;
    if (name[0] == '.' || n < 5 || strcmp(name + n - 4, ".bin") != 0) return 0;
    if (part == TAGC_DATA_VAL) return is_val && !is_train;
    return has_train ? is_train : !is_val;
}

static tagc_status list_shards(const char *dir, tagc_data_part part, tagc_file_list *list) {
    DIR *folder = opendir(dir);
    if (!folder) return tagc_fail(TAGC_ERR_IO, "%.200s: %s", dir, strerror(errno));
    int has_train = 0;
    for (struct dirent *entry; (entry = readdir(folder));) has_train |= is_shard(entry->d_name, part, 1);
    rewinddir(folder);
    tagc_status status = TAGC_OK;
    for (struct dirent *entry; status == TAGC_OK && (entry = readdir(folder));)
        if (is_shard(entry->d_name, part, has_train)) status = add(list, dir, entry->d_name);
    closedir(folder);
    return status;
}

static tagc_status list_folder(const char *dir, tagc_data_part part, tagc_file_list *list) {
    const char *name = part == TAGC_DATA_TRAIN ? "train.bin" : "val.bin";
    struct stat about;
    TAGC_TRY(add(list, dir, name));
    if (stat(list->paths[0], &about) == 0 || errno != ENOENT)
        return TAGC_OK; /* opening it says what is wrong */
    tagc_file_list_clear(list);
    TAGC_TRY(list_shards(dir, part, list));
    if (list->n > 0) return TAGC_OK;
    return tagc_fail(TAGC_ERR_IO,
                     "%.200s has no %s, and no shards *.bin; tagc data makes one from text files", dir, name);
}

static tagc_status list_pattern(const char *pattern, tagc_data_part part, tagc_file_list *list) {
    glob_t found;
    int code = glob(pattern, GLOB_NOSORT | GLOB_ERR, NULL, &found);
    tagc_status status = TAGC_OK;
    if (code != 0 && strpbrk(pattern, "*?["))
        status = tagc_fail(TAGC_ERR_IO, "no file matches %.200s", pattern);
    else if (code != 0)
        status = tagc_fail(TAGC_ERR_IO, "%.200s does not exist; tagc data makes %s from text files", pattern,
                           part == TAGC_DATA_TRAIN ? "train.bin" : "val.bin");
    for (size_t i = 0; code == 0 && status == TAGC_OK && i < found.gl_pathc; i++)
        status = tagc_file_list_append(list, found.gl_pathv[i]);
    globfree(&found);
    return status;
}

static tagc_status find(const char *data, tagc_data_part part, tagc_file_list *list) {
    struct stat about;
    tagc_status status;
    *list = (tagc_file_list){0};
    int is_there = stat(data, &about) == 0;
    if (is_there && S_ISDIR(about.st_mode))
        status = list_folder(data, part, list);
    else if (is_there || errno != ENOENT)
        status = tagc_file_list_append(list, data);
    else
        status = list_pattern(data, part, list);
    if (status != TAGC_OK)
        tagc_file_list_clear(list);
    else
        qsort(list->paths, list->n, sizeof *list->paths, by_bytes);
    return status;
}

int tagc_data_has(const char *data, tagc_data_part part) {
    tagc_file_list list;
    int has = find(data, part, &list) == TAGC_OK;
    tagc_file_list_clear(&list);
    return has;
}

tagc_status tagc_data_open(const char *data, tagc_data_part part, tagc_tokens **out) {
    tagc_file_list list;
    *out = NULL;
    TAGC_TRY(find(data, part, &list));
    tagc_status status = tagc_tokens_open_shards(
        list.n == 1 ? list.paths[0] : data, (const char *const *)list.paths, list.n, TAGC_TOKENS_AUTO, out);
    tagc_file_list_clear(&list);
    return status;
}
